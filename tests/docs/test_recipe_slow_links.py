"""docs/recipes/slow-links.md: what is sent, what it changes, and what a resumed run needs."""

import re
import shutil

import pytest

from tests.forked import ROUNDING, fork_script, killed_at, largest_difference, same_bits
from tests.namespaces import c10d, finish, hosts, needs_namespaces
from tests.recipes import RUN, apply, run_to_end
from tools.lib.edits import changed
from tools.lib.ladder import ROOT
from tools.verify.run import project_with_task
from utils.checkpoint import read_checkpoint

PAGE = ROOT / "docs" / "recipes" / "slow-links.md"
IN_BF16, LOCAL_STEPS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SETTLED = "rebuild_ddp_buckets(model)  # a resumed run then sums gradients in the same order\n"
RESUMED = {"save_steps": 2}
SLOW, RARE = pytest.mark.slow, pytest.mark.rare

IMPORTED, _, REGISTER = IN_BF16.splitlines()
CHANGES = {
    "plain": [],
    "bf16": [
        ("import torch\n", f"import torch\n{IMPORTED}\n"),
        (SETTLED, f"{SETTLED}    {REGISTER}\n"),
    ],
    "PowerSGD": [],  # the page's diff
    "local steps": [
        ("\n\ndef train_one_epoch", f"\n\n{LOCAL_STEPS}\n\ndef train_one_epoch"),
        ("outputs = model(inputs)", "outputs = local_forward(model, inputs)"),
        ("scheduler.step()\n", "scheduler.step()\n        average(model, optimizer, loader)\n"),
    ],
}


def script_with(change, folder, more=()):
    """The path of a copy of train_ddp.py with one of the page's changes, and maybe more."""
    folder = project_with_task("images", folder)
    if change == "PowerSGD":
        assert not apply(PAGE.stem, folder)
    script = folder / "train_ddp.py"
    script.write_text(changed(script.read_text(), [*CHANGES[change], *more], script))
    return script


@pytest.fixture(scope="module")
def power_sgd(tmp_path_factory):
    """A script with the page's diff, the weights of two ranks, and a run that was killed."""
    folder = tmp_path_factory.mktemp("power_sgd")
    script = script_with("PowerSGD", folder / "copy")
    _, end = run_to_end(script, 2, folder / "two", **RESUMED)
    run_to_end(script, 2, folder / "killed", killed_at(1, 3), **RESUMED)
    return script, end["model"], folder / "killed"


@SLOW
def test_power_sgd_on_any_number_of_ranks(power_sgd, tmp_path):
    """Its approximation changes the weights, in the same way on any number of ranks."""
    script, two, _ = power_sgd
    run, end = run_to_end(script, 1, tmp_path / "one")
    _, plain = run_to_end("train_ddp.py", 1, tmp_path / "plain")
    assert run.stderr == ""
    assert largest_difference(end["model"], two) < ROUNDING
    assert largest_difference(end["model"], plain["model"]) > 1e-3


@SLOW
@pytest.mark.parametrize("nproc", [2, 3])
def test_power_sgd_resumes_within_an_epoch(nproc, power_sgd, tmp_path):
    script, two, killed = power_sgd
    shutil.copytree(killed, tmp_path / "run")
    run, end = run_to_end(script, nproc, tmp_path / "run", **RESUMED)
    assert run.stderr == ""
    assert largest_difference(end["model"], two) < ROUNDING
    assert nproc == 3 or same_bits(end["model"], two)


@SLOW
@RARE
def test_bf16(tmp_path):
    script = script_with("bf16", tmp_path / "copy")
    _, plain = run_to_end("train_ddp.py", 2, tmp_path / "plain")
    _, end = run_to_end(script, 2, tmp_path / "bf16")
    assert 1e-5 < largest_difference(end["model"], plain["model"]) < 0.1
    run_to_end(script, 2, tmp_path / "killed", killed_at(1, 3), **RESUMED)
    _, resumed = run_to_end(script, 2, tmp_path / "killed", **RESUMED)
    assert same_bits(resumed["model"], end["model"])


@SLOW
@RARE
def test_local_steps(tmp_path):
    """A save between two averages would lose what the other ranks have learned: it is refused."""
    script = script_with("local steps", tmp_path / "copy")
    flags = {"sync_bn": False, "model": "resnet20_gn", "synthetic_samples": 120}  # 10 steps
    _, end = run_to_end(script, 2, tmp_path / "run", **flags, save_steps=8)
    run_to_end(script, 2, tmp_path / "killed", killed_at(1, 9), **flags, save_steps=8)
    _, resumed = run_to_end(script, 2, tmp_path / "killed", **flags, save_steps=8)
    assert same_bits(resumed["model"], end["model"])
    flags |= {"output_dir": tmp_path / "refused", "save_steps": 5}
    refused = fork_script(script, 2, **RUN | flags)
    assert refused.code == 1 and "rank 1 differs" in refused.stderr


SENT = """def sent():
    for line in open("/proc/self/net/dev"):
        if "eth0" in line:
            return int(line.split()[9])


def train_one_epoch"""
COUNTED = [  # the bytes that train_one_epoch() sends
    ("def train_one_epoch", SENT),
    ("train_result = train_one_epoch(", "before = sent()\n        train_result = train_one_epoch("),
    ("val_result = ", 'train_result["sent"] = sent() - before\n        val_result = '),
]
STEPS = 24  # per epoch


@needs_namespaces
@SLOW
@RARE
def test_bytes_and_seconds(tmp_path):
    """Prints two columns of the page's table (pytest -s)."""
    flags = {"model": "resnet18_gn", "image_size": 32, "global_batch_size": 32, "timeout": 120}
    flags |= {"synthetic_samples": 32 * STEPS, "epochs": 2, "lr": 0.02}
    sent = {}
    for change in CHANGES:
        script = script_with(change, tmp_path / change, COUNTED)
        output = tmp_path / f"{change} run"
        with hosts(2) as machines:
            for machine in machines:
                machine.limit("200mbit")
            command = c10d(script, machines[0], output_dir=output, **flags)
            runs = finish([host.start(command) for host in machines], output, limit=600)
        assert [run.code for run in runs] == [0, 0], runs[0].stderr
        row = runs[0].rows[-1]
        sent[change] = row["train_sent"] / STEPS
        print(f"{change}: {sent[change] / 1e6:.2f} MB, {row['train_seconds'] / STEPS:.2f} s")
    share = {change: number / sent["plain"] for change, number in sent.items()}
    assert 0.49 < share["bf16"] < 0.55
    assert share["PowerSGD"] < 0.1
    assert 0.24 < share["local steps"] < 0.3


@SLOW
@RARE
def test_what_it_changes(tmp_path):
    """Prints the other columns."""
    flags = {"image_size": 16, "synthetic_samples": 2000, "global_batch_size": 50, "epochs": 5}
    flags |= {"lr": 0.05, "num_threads": 1}
    weights, losses = {}, {}
    for change in (*CHANGES, "plain, different seed"):
        script = script_with(change.partition(",")[0], tmp_path / change)
        flags |= {"output_dir": tmp_path / f"{change} run", "seed": int("seed" in change)}
        run = fork_script(script, 2, limit=300, **flags)
        assert run.code == 0, run.stderr
        model = read_checkpoint(run.output_dir / "last.pt")["model"]
        weights[change] = {name: t for name, t in model.items() if name.endswith("weight")}
        losses[change] = run.rows[-1]["train_loss"]
        print(
            f"{change}: {losses[change]:.4f}, {run.rows[-1]['val_accuracy']:.3f}, "
            f"{largest_difference(weights[change], weights['plain']):.3f}"
        )
    assert abs(losses["bf16"] - losses["plain"]) < 0.1
    assert losses["plain"] < losses["PowerSGD"] < losses["local steps"] < 1.5
