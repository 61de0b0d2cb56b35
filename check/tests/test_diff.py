"""`check diff`: the first difference of two runs, in the order of causes."""

import json
import subprocess
import textwrap

import pytest
import torch

from check.diff.command import launched, parse
from check.diff.factors import compare
from check.diff.stages import Comparer
from check.tests.test_user import CHECK

SCRIPT = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    bug = sys.argv[1] if len(sys.argv) > 1 else ""
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank if bug == "seeds" else 0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    if bug == "dropout":
        model[2] = nn.Dropout(0.5)
    torch.manual_seed(0)
    inputs = torch.randn(64, 6)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model[1].eval()
    trained = nn.parallel.DistributedDataParallel(model) if bug != "seeds" else model
    sampler = DistributedSampler(dataset, shuffle=False)
    if bug == "samples":
        sampler = DistributedSampler(dataset, 1, 0, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    micro_batches = 2 if bug in ("accumulates", "undivided") else 1
    loader = DataLoader(dataset, 16 // ranks // micro_batches, sampler=sampler)
    for step, (x, y) in enumerate(loader, 1):
        if bug == "noise":
            x = x + rank
        outputs = (model if bug == "bypass" else trained)(x)
        loss = nn.functional.mse_loss(outputs, y)
        loss = loss / micro_batches if bug != "undivided" else loss
        loss = loss * 2 if bug == "scale" else loss
        loss.backward()
        if step % micro_batches:
            continue
        if bug == "one":
            model[3].weight.grad *= 2
        if bug == "rate" and step == 2:
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""
ONE = ["torchrun", "--nproc_per_node=1", "train.py"]
TWO = ["torchrun", "--nproc_per_node=2", "train.py"]


def diff(folder, *arguments):
    """Compare two commands. Returns the exit code, the result, and stderr."""
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [*CHECK, "diff", "--json", "-", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_runs_that_agree_are_equal_in_each_stage(tmp_path):
    """Accumulated on two processes: four shares of each batch, whose rows are put in order."""
    code, result, _ = diff(tmp_path, "--", *ONE, "--", *TWO, "accumulates")
    assert code == 0 and result["equal"] and result["ranks"] == {"a": 1, "b": 2}
    compared = {(stage["step"], stage["stage"]): stage["compared"] for stage in result["stages"]}
    for step in (1, 2, 3):
        assert compared[step, "samples"] == compared[step, "inputs"] == 16
        assert compared[step, "outputs of modules"] == 5
        assert compared[step, "gradients"] == compared[step, "update"] == 6
        assert compared[step, "optimizer state"] == 6 and compared[step, "buffers"] == 3
    assert max(stage["largest difference"] for stage in result["stages"]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "step", "stage", "words"),
    [
        ("samples", 1, "samples", "All ranks of B train on the same samples"),
        ("seeds", 1, "initial weights", "Rank 1 of B"),
        ("noise", 1, "inputs", "8 are the same"),
        ("dropout", 1, "outputs of modules", "2, a Dropout"),
        ("undivided", 1, "loss", "B is 2 times A"),
        ("scale", 1, "loss", "the ratio of the numbers of ranks"),
        ("bypass", 1, "gradients", "rank 1"),
        ("one", 1, "gradients", "3.weight: B is 2 times A"),
        ("rate", 2, "settings of the optimizer", "lr is 0.2 in B, 0.1 in A"),
    ],
)
def test_first_difference_is_named(bug, step, stage, words, tmp_path):
    first = [*ONE, bug] if bug == "dropout" else ONE
    code, result, _ = diff(tmp_path, "--steps", "2", "--", *first, "--", *TWO, bug)
    assert code == 1 and (result["first"]["step"], result["first"]["stage"]) == (step, stage)
    assert words in result["first"]["text"]


@pytest.mark.slow
def test_commit_is_compared_with_the_folder(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    (folder / "train.py").write_text(
        textwrap.dedent(SCRIPT).replace("0.1, momentum", "0.2, momentum")
    )
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    code, result, _ = diff(folder, "--at-a", "HEAD", "--", *ONE)
    assert code == 1 and result["first"]["text"] == "lr is 0.1 in B, 0.2 in A"
    code, result, text = diff(folder, "--at-a", "no-such", "--", *ONE)
    assert code == 2 and "no-such" in text


def test_script_that_fails_is_shown(tmp_path):
    (tmp_path / "other.py").write_text("raise SystemExit('no data here')")
    code, result, text = diff(tmp_path, "--", "other.py", "--", *ONE)
    assert code == 2 and "no data here" in text and "Run A failed" in result["error"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --lr 1", (["train.py", "--lr", "1"], 0)),
        ("python train.py", (["train.py"], 0)),
        ("torchrun --nproc_per_node=4 train.py", (["train.py"], 4)),
        ("torchrun --standalone --nproc-per-node 2 -m a.b", (["-m", "a.b"], 2)),
        ("python -m torch.distributed.run --nproc_per_node 3 train.py", (["train.py"], 3)),
        ("torchrun train.py --nproc_per_node=2", (["train.py", "--nproc_per_node=2"], 1)),
    ],
)
def test_launcher_tells_the_number_of_processes(command, expected):
    assert launched(command.split()) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "two commands"),
        (["--", "none.py"], "none.py"),
        (["--root-a", "nowhere", "--", "none.py"], "nowhere"),
        (["--rename", "x", "--", "none.py"], "--rename x"),
        (["--steps", "0", "--", "none.py"], "--steps"),
    ],
)
def test_wrong_arguments_are_named(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2 and words in capsys.readouterr().err


A = torch.arange(1.0, 9).double().reshape(4, 2)
NOISE = torch.tensor([[1, -1], [0.5, 1], [-1, 1], [1, 0.3]]).double()


@pytest.mark.parametrize(
    ("b", "words"),
    [
        (A * 2, "ratio of the numbers of ranks"),
        (A / 2, "divided once too often"),
        (A * -1, "opposite sign"),
        (A * 3, "3 times"),
        (A * 0, "zero in B"),
        (A.flip(0), "different order"),
        (A * (1 + 1e-7 * NOISE), "float32"),
        (A * (1 + 1e-2 * NOISE), "bfloat16"),
        (torch.cat([A[:3], A[3:] + 5]), "1 of 4 rows"),
        (A[:2], "shape is [4, 2] in A, [2, 2] in B"),
        (None, "none in B"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kind_of_difference_is_recognized(b, words):
    assert words in compare("x", A, b, 1e-9, (1, 2)).how
    assert compare("x", A, A * (1 + 1e-15), 1e-9, (1, 2)).how == ""


class Part:
    """A step that holds nothing but gradients."""

    def __init__(self, **gradients):
        self.gradients = gradients

    def joined(self, key):
        return dict(self.gradients)

    def disagreements(self, key):
        return {}


def test_names_can_be_mapped_and_parameters_joined():
    a = Part(**{"h.0.qkv": A, "h.0.out": A[:2]})
    b = Part(
        **{"layers.0.q": A[:1], "layers.0.k": A[1:2], "layers.0.v": A[2:], "layers.0.out": A[:2]}
    )
    comparer = Comparer((1, 1), renames=[("layers", "h")], joins=[("qkv", ["q", "k", "v"])])
    result = comparer._gradients("gradients", a, b, "gradients")
    assert result.is_equal and result.compared == 2 and not result.skipped
    result = Comparer((1, 1))._gradients("gradients", a, b, "gradients")
    assert "no name in common" in result.skipped


def test_parameters_of_one_module_are_named_together():
    names = ["router.weight", "router.bias", "expert.weight"]
    a, b = Part(**dict.fromkeys(names, A)), Part(**dict.fromkeys(names[:2], 2 * A), **{names[2]: A})
    result = Comparer((1, 2))._gradients("gradients", a, b, "gradients")
    assert "router.*" in result.text and "2 times" in result.text and len(result.different) == 2
