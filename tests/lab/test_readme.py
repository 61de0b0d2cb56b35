"""The generated blocks of README.md and docs/ are up to date, and links lead somewhere."""

import re
from functools import cache

import pytest
import yaml

from lab import readme
from tools.lib.ladder import LADDER, ROOT
from tools.lib.markdown import anchor
from tools.verify.plants import BUGS


def marked(page):
    """The sizes of the copies of all scripts, on docs/copy.md, take several seconds."""
    is_slow = page.name == "copy.md"
    return pytest.param(page, id=page.name, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize("page", [*map(marked, readme.pages())])
def test_generated_blocks_are_current(page):
    text = page.read_text()
    assert text == readme.generate(text), "run: make readme"
    assert text.count("<!-- /") == len(readme.blocks_of(text)), "a block is not closed"


def test_every_block_is_on_a_page():
    blocks = [block for page in readme.pages() for block in readme.blocks_of(page.read_text())]
    expected = {(n, None) for n in readme.BLOCKS if n not in ("lesson", "communication")}
    expected |= {("lesson", rung.script) for rung in LADDER if rung.parent}
    expected |= {("verify", task) for task in ("text", "moe", "segmentation", "diffusion")}
    expected |= {("communication", "moe"), ("communication", "text")}
    assert set(blocks) == expected


def test_block_is_replaced_in_place():
    text = "before\n<!-- lesson train_dp.py -->\nold\n<!-- /lesson -->\nafter\n"
    new = readme.generate(text)
    assert new.startswith("before\n<!-- lesson train_dp.py -->\n```diff\n@@")
    assert new.endswith("```\n<!-- /lesson -->\nafter\n") and "old" not in new
    assert "+    model = torch.nn.DataParallel(model)" in new
    assert readme.generate(new) == new


def test_traps_have_an_entry_per_bug():
    entries = readme.traps().split("\n## ")
    assert len(entries) == len(BUGS)
    for bug, entry in zip(BUGS, entries, strict=True):
        assert bug.name in entry and bug.row in entry and bug.file in entry


def test_make_train_names_the_folder_of_its_run():
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert f"-m tools.report {config['output_dir']}`" in makefile


PAGES = [*ROOT.glob("*.md"), *(p for room in ROOT.iterdir() for p in room.glob("**/*.md"))]
PAGES = [page for page in PAGES if not page.relative_to(ROOT).parts[0].startswith(".")]


@cache
def prose(page):
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, place = link.partition("#")
        if ":" in path:
            continue  # the web
        target = page.parent / path if path else page
        assert target.exists(), f"no such file: {link}"
        if place and target.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)
            assert place in map(anchor, titles), f"no such heading: {link}"
