"""docs/recipes/slow-links.md: what is sent, what it changes, and what a resumed run needs."""

import re
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from tests.forked import ROUNDING, fork_script, killed_at, largest_difference, same_bits
from tests.namespaces import c10d, finish, hosts, needs_namespaces
from tests.processes import run_ranks
from tests.recipes import RUN, applied, run_to_end
from tools.lib.ladder import ROOT
from tools.verify.run import project_with_task
from utils.checkpoint import read_checkpoint

PAGE = ROOT / "docs" / "recipes" / "slow-links.md"
IN_BF16, LOCAL_STEPS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SETTLED = "rebuild_ddp_buckets(model)  # a resumed run then sums gradients in the same order\n"
RESUMED = {"save_steps": 2}
SLOW = pytest.mark.slow


def edited(path, *replacements):
    """Replace pieces of code in a file, each of which must be there once. Returns the path."""
    text = path.read_text()
    for code, instead in replacements:
        assert text.count(code) == 1, code
        text = text.replace(code, instead)
    path.write_text(text)
    return path


def script_with(change, folder):
    """The path of a copy of train_ddp.py: "plain", or with one of the page's changes."""
    if change == "PowerSGD":
        return applied(PAGE.stem, folder) / "train_ddp.py"
    script = project_with_task("images", folder) / "train_ddp.py"
    if change == "bf16":
        imported, _, register = IN_BF16.splitlines()
        edited(script, ("import torch\n", f"import torch\n{imported}\n"))
        edited(script, (SETTLED, f"{SETTLED}    {register}\n"))
    if change == "local steps":
        edited(script, ("\n\ndef train_one_epoch", f"\n\n{LOCAL_STEPS}\n\ndef train_one_epoch"))
        edited(script, ("outputs = model(inputs)", "outputs = local_forward(model, inputs)"))
        edited(
            script,
            ("scheduler.step()\n", "scheduler.step()\n        average(model, optimizer, loader)\n"),
        )
    return script


@pytest.fixture(scope="module")
def power_sgd(tmp_path_factory):
    """A script with the page's diff, and the last checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("power_sgd")
    script = script_with("PowerSGD", folder / "copy")
    return script, run_to_end(script, 2, folder / "two", **RESUMED)[1]


@pytest.mark.parametrize("nproc", [1, 3])
def test_power_sgd_on_any_number_of_ranks(nproc, power_sgd, tmp_path):
    script, two = power_sgd
    run, end = run_to_end(script, nproc, tmp_path / "run")
    assert run.stderr == ""
    assert largest_difference(end["model"], two["model"]) < ROUNDING


def test_power_sgd_changes_the_weights(power_sgd, tmp_path):
    plain = run_to_end("train_ddp.py", 2, tmp_path / "plain")[1]
    assert largest_difference(power_sgd[1]["model"], plain["model"]) > 1e-3


def test_power_sgd_resumes_within_an_epoch(power_sgd, tmp_path):
    script, two = power_sgd
    assert run_to_end(script, 2, tmp_path / "run", killed_at(1, 3), **RESUMED)[0].code == -9
    shutil.copytree(tmp_path / "run", tmp_path / "three")
    for nproc, folder in (2, tmp_path / "run"), (3, tmp_path / "three"):
        run, end = run_to_end(script, nproc, folder, **RESUMED)
        assert run.stderr == ""
        assert largest_difference(end["model"], two["model"]) < ROUNDING
        assert nproc == 3 or same_bits(end["model"], two["model"])


@pytest.mark.parametrize(
    "part", ["error_dict", *(pytest.param(p, marks=SLOW) for p in ("q_memory_dict", "iter"))]
)
def test_power_sgd_needs_its_state(part, power_sgd, tmp_path):
    """A resumed run that lacks a part of the state reaches different weights."""
    script, two = power_sgd
    run_to_end(script, 2, tmp_path / "run", killed_at(1, 3), **RESUMED)
    checkpoint = read_checkpoint(tmp_path / "run" / "last.pt")
    state = checkpoint["power_sgd"]
    if part == "iter":
        state["iter"] = 0
    else:
        state[part] = {bucket: torch.zeros_like(t) for bucket, t in state[part].items()}
    torch.save(checkpoint, tmp_path / "run" / "last.pt")
    end = run_to_end(script, 2, tmp_path / "run", **RESUMED)[1]
    assert largest_difference(end["model"], two["model"]) > 1e-6


def test_hooks_mix_up_collectives_of_gloo_without_the_wait(tmp_path):
    """Why the page waits. If this passes no longer, PyTorch may have solved it."""
    script = script_with("PowerSGD", tmp_path / "copy")
    edited(script, ("        future.wait()\n", "        pass\n"))
    flags = RUN | {"timeout": 10}
    for number in range(5):  # the order is a matter of chance
        try:
            code = fork_script(script, 2, output_dir=tmp_path / f"{number}", limit=30, **flags).code
        except AssertionError:  # it hangs
            return
        if code != 0:
            return
    raise AssertionError("all runs ended well")


def gradients_after(rank, hook, factor, others=1, options=None):
    """The sums of eight gradients, of which the fifth is multiplied by `factor`."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(20, 30))
    state = PowerSGDState(None, 2, 2, **options or {}) if hook is powerSGD_hook else None
    model.register_comm_hook(state, hook)
    sums = []
    for step in range(8):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 20, generator=generator)).pow(2).mean()
        (loss * (factor if step == 4 else others)).backward()
        sums.append(model.module.weight.grad.abs().sum().item())
    return torch.tensor(sums)


def test_infinite_gradient_stays_in_the_error_of_power_sgd():
    for hook, lasts in (default_hooks.bf16_compress_hook, False), (powerSGD_hook, True):
        (sums, _) = run_ranks(gradients_after, 2, hook, float("inf"))
        assert not sums[4].isfinite() and sums[5:].isnan().all() == lasts


def test_zero_gradients_of_power_sgd():
    for options, is_nan in ({}, True), ({"orthogonalization_epsilon": 1e-8}, False):
        ranks = run_ranks(gradients_after, 2, powerSGD_hook, 0, 0, options)
        assert ranks[0][4:].isnan().all() == is_nan


def test_small_gradients_underflow_in_fp16_but_not_in_bf16():
    fp16, bf16 = default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook
    assert run_ranks(gradients_after, 2, fp16, 1e-8)[0][4] == 0
    assert run_ranks(gradients_after, 2, bf16, 1e-8)[0][4] > 0


@pytest.mark.slow
def test_bf16(tmp_path):
    script, plain = script_with("bf16", tmp_path / "copy"), "train_ddp.py"
    ends = [run_to_end(s, 2, tmp_path / f"{n}")[1]["model"] for n, s in enumerate((script, plain))]
    assert 1e-5 < largest_difference(*ends) < 0.1
    run_to_end(script, 2, tmp_path / "killed", killed_at(1, 3), **RESUMED)
    resumed = run_to_end(script, 2, tmp_path / "killed", **RESUMED)[1]["model"]
    assert same_bits(resumed, ends[0])


def test_local_steps(tmp_path):
    """A save between two averages would lose what the other ranks have learned: it is refused."""
    script = script_with("local steps", tmp_path / "copy")
    flags = {"sync_bn": False, "model": "resnet20_gn", "synthetic_samples": 120}  # 10 steps
    end = run_to_end(script, 2, tmp_path / "run", **flags, save_steps=8)[1]
    run_to_end(script, 2, tmp_path / "killed", killed_at(1, 9), **flags, save_steps=8)
    resumed = run_to_end(script, 2, tmp_path / "killed", **flags, save_steps=8)[1]
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
CHANGES = ("plain", "bf16", "PowerSGD", "local steps")
STEPS = 24  # per epoch


@needs_namespaces
@SLOW
@pytest.mark.rare
def test_bytes_and_seconds(tmp_path):
    """Prints two columns of the page's table (pytest -s)."""
    flags = {"model": "resnet18_gn", "image_size": 32, "global_batch_size": 32, "timeout": 120}
    flags |= {"synthetic_samples": 32 * STEPS, "epochs": 2, "lr": 0.02}
    sent = {}
    for change in CHANGES:
        script = edited(script_with(change, tmp_path / change), *COUNTED)
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
@pytest.mark.rare
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
