"""docs/recipes/muon.md: whole matrices are orthogonalized, wherever their parts are."""

import pytest
import torch

from lab.communication import FLAGS, measure, sizes
from tests.forked import largest_difference
from tests.recipes import TEXT, import_new
from tests.verifying import ForkServer
from tools.lib.runs import finish_run
from tools.verify.run import apply_recipe, project_with_task, write_text
from utils.checkpoint import read_checkpoint

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The scripts with the page, for the text task."""
    folder = project_with_task("text", tmp_path_factory.mktemp("muon") / "copy")
    apply_recipe(folder / "docs" / "recipes" / "muon.md", folder)
    return folder


@pytest.fixture
def orthogonal(folder, monkeypatch):
    """The module that orthogonalizes."""
    return import_new("utils.orthogonal", folder, monkeypatch)


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (7, 3)], ids=str)
def test_singular_values_become_about_1(shape, orthogonal):
    torch.manual_seed(0)
    matrices = torch.randn(5, *shape, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    result = orthogonal.newton_schulz(matrices)
    values = u.mT @ result @ vh.mT  # diagonal: the vectors stay the same
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    assert (values - torch.diag_embed(diagonal)).abs().max() < TOLERANCE
    assert ((diagonal > 0.2) & (diagonal < 1.3)).all()


def test_dtype_of_the_iteration_can_be_chosen(orthogonal, monkeypatch):
    torch.manual_seed(0)
    matrices = torch.randn(2, 8, 8)
    exact = orthogonal.newton_schulz(matrices)
    monkeypatch.setattr(orthogonal, "DTYPE", torch.bfloat16)
    rounded = orthogonal.newton_schulz(matrices)
    assert rounded.dtype == exact.dtype == torch.float32
    assert 1e-4 < (rounded - exact).abs().max() < 0.2


def test_rows_of_zeros_stay_zeros(orthogonal):
    """So they may fill what does not divide evenly."""
    torch.manual_seed(0)
    matrix = torch.randn(1, 4, 6, dtype=torch.float64)
    filled = torch.cat([matrix, torch.zeros(1, 5, 6, dtype=torch.float64)], 1)
    result = orthogonal.newton_schulz(filled)
    torch.testing.assert_close(result[:, :4], orthogonal.newton_schulz(matrix))
    assert not result[:, 4:].any()
    assert not orthogonal.newton_schulz(torch.zeros(1, 2, 2)).any()


@pytest.mark.slow
def test_empty_shards_train_the_same_weights(folder, tmp_path):
    """Of the four rows of a matrix, three ranks have two, two and none."""
    text_file = write_text(tmp_path / "text.txt", train=65, val=7)
    settings = TEXT | {"text_file": text_file, "optimizer": "muon", "width": 4, "clip_norm": 0.5}
    ends = []
    with ForkServer() as server:
        for script, nproc in (("train_1gpu.py", None), ("train_fsdp.py", 3)):
            flags = settings | {"output_dir": tmp_path / script}
            environment = {"PYTHONPATH": str(folder)}
            run = server.start(folder / script, nproc, flags, environment, folder, [0], "a fork")
            done = finish_run(run, tmp_path / script)
            assert done.code == 0, done.stderr
            ends.append(read_checkpoint(tmp_path / script / "last.pt"))
    assert largest_difference(ends[0]["model"], ends[1]["model"]) < TOLERANCE
    states, others = (
        {
            (name, key): value
            for name, state in end["optimizer"]["state"].items()
            for key, value in state.items()
            if key != "step"
        }
        for end in ends
    )
    assert ("blocks.0.mlp.0.weight", "momentum_buffer") in states
    assert ("embedding.weight", "exp_avg") in states
    assert largest_difference(states, others) < TOLERANCE


@pytest.mark.slow
def test_matrices_that_are_divided_twice_are_refused(folder, tmp_path):
    text_file = write_text(tmp_path / "text.txt", train=65, val=7)
    flags = TEXT | {"text_file": text_file, "optimizer": "muon", "fsdp_size": 2}
    flags["output_dir"] = tmp_path / "run"
    with ForkServer() as server:
        script, environment = folder / "train_fsdp_tp.py", {"PYTHONPATH": str(folder)}
        run = server.start(script, 4, flags, environment, folder, [0], "a fork")
        done = finish_run(run, tmp_path / "run")
    last = done.stderr.splitlines()[-1]
    assert done.code == 1 and "Muon" in last and "train_fsdp_tp.py" in last


NAIVE = """
def _together(parts, rows, group):
    mine = parts.new_zeros(parts.shape[0], -(-rows // group.size()), parts.shape[2])
    mine[:, : parts.shape[1]] = parts
    whole = parts.new_empty(group.size(), *mine.shape)
    torch.distributed.all_gather_into_tensor(whole.flatten(0, 1), mine, group=group)
    result = newton_schulz(whole.transpose(0, 1).flatten(1, 2))
    return result.chunk(group.size(), 1)[group.rank()][:, : parts.shape[1]]
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_step_sends_what_the_page_says(ranks, folder, tmp_path):
    """And what it compares that with: every matrix, gathered on every rank."""
    outside, blocks, _ = sizes("text", layers=4)
    matrices = 4 * 4 * 12 * FLAGS["width"] ** 2  # bytes; the ranks divide those of each shape
    fsdp = {"all-gather": 4 * (outside + 2 * blocks), "reduce-scatter": 4 * (outside + blocks)}
    flags = {"root": folder, "optimizer": "muon", "layers": 4}
    found = measure("text", "train_fsdp.py", ranks, tmp_path / "page", **flags)
    assert found == fsdp | {"all-to-all": 2 * matrices // ranks}
    module = folder / "utils" / "orthogonal.py"
    text = module.read_text()
    module.write_text(text + "\n" + NAIVE)
    try:
        found = measure("text", "train_fsdp.py", ranks, tmp_path / "naive", **flags)
    finally:
        module.write_text(text)
    assert found == fsdp | {"all-gather": fsdp["all-gather"] + matrices}
