"""docs/recipes/fsdp-accumulation.md: the weights of one process, reduce-scattered once per step."""

import pytest
import torch.distributed as dist

from tests.forked import killed_at, largest_difference
from tests.recipes import applied, run_text_to_end, with_task
from tools.lib.edits import changed
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


@pytest.mark.slow
def test_same_weights_and_one_reduce_scatter_per_step(tmp_path):
    folder = applied("fsdp-accumulation", tmp_path / "copy")
    script = with_task(folder / "train_fsdp.py", "tasks.text")
    without_line = script.with_stem("without_line")
    without_line.write_text(changed(script.read_text(), [(LINE, "")], script))
    flags = {"clip_norm": 0.5, "save_steps": 2, "allow_config_change": True}
    one = with_task(folder / "train_1gpu.py", "tasks.text")
    _, expected = run_text_to_end(one, None, tmp_path / "one", **flags)

    counts = []
    for name, each in (("with", script), ("without", without_line)):
        calls, output = tmp_path / f"{name}.calls", tmp_path / name
        _, end = run_text_to_end(each, 2, output, counted(calls), micro_batches=3, **flags)
        assert largest_difference(end["model"], expected["model"]) < 1e-12
        counts.append(calls.read_text().count("called"))
    assert counts[0] % (2 * STEPS) == 0 and counts[1] == 3 * counts[0] > 0

    killed, run = killed_at(1, 3), tmp_path / "killed"
    run_text_to_end(script, 2, run, killed, micro_batches=3, **flags)
    _, end = run_text_to_end(script, 3, run, micro_batches=2, **flags)
    assert largest_difference(end["model"], expected["model"]) < 1e-12


@pytest.mark.slow
@pytest.mark.rare
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
