"""docs/recipes/fsdp-accumulation.md: the weights of one process, reduce-scattered once per step."""

import pytest
import torch.distributed as dist

from tests.forked import killed_at, largest_difference
from tests.recipes import applied, run_text_to_end, with_task
from tools.lib.recipes import apply
from tools.verify.run import project_with_task

STEPS = 10  # in two epochs
LINE = (
    "            model.set_requires_gradient_sync(is_last)  # reduce-scatter with the last only\n"
)


def counted(file):
    """For fork_script(before=...): a line in a file per reduce-scatter of any rank."""

    def before():
        name = "reduce_scatter_single"  # torch 2.14's name
        name = name if hasattr(dist, name) else "reduce_scatter_tensor"
        real = getattr(dist, name)

        def reduce_scatter(*args, **kwargs):
            with open(file, "a") as lines:
                lines.write("called\n")
            return real(*args, **kwargs)

        setattr(dist, name, reduce_scatter)

    return before


@pytest.fixture
def scripts(tmp_path):
    """The scripts without and with the page, for the text task."""
    plain = project_with_task("images", tmp_path / "plain")
    folder = applied("fsdp-accumulation", tmp_path / "copy")
    one = with_task(plain / "train_1gpu.py", "tasks.text")
    return one, with_task(folder / "train_fsdp.py", "tasks.text")


@pytest.mark.slow
def test_same_weights_on_any_number_of_ranks(scripts, tmp_path):
    one, accumulated = scripts
    text = accumulated.read_text()
    assert text.count(LINE) == 1
    without_line = accumulated.with_stem("without_line")
    without_line.write_text(text.replace(LINE, ""))
    _, expected = run_text_to_end(one, None, tmp_path / "one", clip_norm=0.5)

    def train(name, nproc, micro_batches, before=None, script=accumulated):
        flags = {"clip_norm": 0.5, "micro_batches": micro_batches, "save_steps": 2}
        flags["allow_config_change"] = True
        return run_text_to_end(script, nproc, tmp_path / name, before, **flags)[1]

    reduced = tmp_path / "reduced"
    end = train("two", 2, 3, counted(reduced))
    assert largest_difference(end["model"], expected["model"]) < 1e-12
    each_reduced = tmp_path / "each reduced"
    end = train("each", 2, 3, counted(each_reduced), without_line)
    assert largest_difference(end["model"], expected["model"]) < 1e-12
    count, count_without = (len(f.read_text().split()) for f in (reduced, each_reduced))
    assert count % (2 * STEPS) == 0 and count_without == 3 * count > 0

    train("resumed", 2, 3, killed_at(1, 3))
    end = train("resumed", 3, 2)
    assert largest_difference(end["model"], expected["model"]) < 1e-12


@pytest.mark.slow
def test_same_lines_for_divided_experts(tmp_path):
    """The page in train_ep.py, and the weights of one process."""
    folder = project_with_task("images", tmp_path / "copy")
    script = folder / "train_ep.py"
    (text,) = apply("fsdp-accumulation", [script.name], lambda path: script.read_text()).values()
    script.write_text(text)
    one, accumulated = (
        with_task(folder / name, "tasks.moe") for name in ("train_1gpu.py", "train_ep.py")
    )
    flags = {"clip_norm": 0.5, "balance": 0}
    _, expected = run_text_to_end(one, None, tmp_path / "one", **flags)
    _, end = run_text_to_end(accumulated, 2, tmp_path / "two", micro_batches=3, **flags)
    assert largest_difference(end["model"], expected["model"]) < 1e-12
