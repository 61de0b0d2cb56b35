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


@pytest.fixture(scope="module")
def server():
    """Runs scripts with modules of their own."""
    with ForkServer() as server:
        yield server


def run(server, folder, script, nproc, output_dir, **flags):
    """Run a script of the copy to its end. Returns its Run."""
    text_file = write_text(output_dir.parent / "text.txt", train=65, val=7)
    flags = TEXT | {"text_file": text_file, "optimizer": "muon", "output_dir": output_dir} | flags
    environment = {"PYTHONPATH": str(folder)}
    process = server.start(folder / script, nproc, flags, environment, folder, [0], "a fork")
    return finish_run(process, output_dir)


@pytest.mark.slow
def test_empty_shards_train_the_same_weights(server, folder, tmp_path):
    """Of the four rows of a matrix, three ranks have two, two and none."""
    ends = []
    for script, nproc in (("train_1gpu.py", None), ("train_fsdp.py", 3)):
        done = run(server, folder, script, nproc, tmp_path / script, width=4, clip_norm=0.5)
        assert done.code == 0, done.stderr
        ends.append(read_checkpoint(tmp_path / script / "last.pt"))
    one, sharded = ends
    assert largest_difference(one["model"], sharded["model"]) < TOLERANCE
    ours, theirs = one["optimizer"]["state"], sharded["optimizer"]["state"]
    assert "momentum_buffer" in ours["blocks.0.mlp.0.weight"]
    assert "exp_avg" in ours["embedding.weight"]
    for name, state in ours.items():
        assert state.keys() == theirs[name].keys()
        for key in state.keys() - {"step"}:  # a number
            assert (state[key] - theirs[name][key]).abs().max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.rare
def test_matrices_that_are_divided_twice_are_refused(server, folder, tmp_path):
    done = run(server, folder, "train_fsdp_tp.py", 4, tmp_path / "run", fsdp_size=2)
    last = done.stderr.splitlines()[-1]
    assert done.code == 1 and "Muon" in last and "train_fsdp_tp.py" in last


@pytest.mark.slow
@pytest.mark.rare
def test_step_sends_what_the_page_says(folder, tmp_path):
    outside, blocks, _ = sizes("text", layers=4)
    matrices = 4 * 4 * 12 * FLAGS["width"] ** 2  # bytes; the ranks divide those of each shape
    fsdp = {"all-gather": 4 * (outside + 2 * blocks), "reduce-scatter": 4 * (outside + blocks)}
    flags = {"root": folder, "optimizer": "muon", "layers": 4}
    found = measure("text", "train_fsdp.py", 4, tmp_path / "page", **flags)
    assert found == fsdp | {"all-to-all": 2 * matrices // 4}
