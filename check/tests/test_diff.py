"""`check diff`: the first difference of two runs, in the order of causes."""

import json
import subprocess
import textwrap

import pytest
import torch

from check.diff import report
from check.diff.command import launched, parse
from check.diff.factors import ROUNDED, Comparison, compare, order_of
from check.diff.runs import Step
from check.diff.stages import SETTINGS, Comparer, Outcome, Result
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
        pytest.param("samples", 1, "samples", "All ranks of B ", marks=pytest.mark.rare),
        ("seeds", 1, "initial weights", "Rank 1 of B"),
        pytest.param("noise", 1, "inputs", "8 are the same", marks=pytest.mark.rare),
        pytest.param("dropout", 1, "outputs of modules", "2, a Dropout", marks=pytest.mark.rare),
        pytest.param("undivided", 1, "loss", "B is 2 times A", marks=pytest.mark.rare),
        pytest.param("scale", 1, "loss", "B is 2 times A: ", marks=pytest.mark.rare),
        ("bypass", 1, "gradients", "rank 1"),
        pytest.param("one", 1, "gradients", "3.weight: B is 2 times A", marks=pytest.mark.rare),
        pytest.param(
            "rate",
            2,
            "settings of the optimizer",
            "lr is 0.2 in B, 0.1 in A",
            marks=pytest.mark.rare,
        ),
    ],
)
def test_first_difference_is_named(bug, step, stage, words, tmp_path):
    first = [*ONE, bug] if bug == "dropout" else ONE
    code, result, said = diff(tmp_path, "--steps", "2", "--", *first, "--", *TWO, bug)
    assert code == 1, said
    assert (result["first"]["step"], result["first"]["stage"]) == (step, stage)
    assert words in result["first"]["text"]


@pytest.mark.slow
@pytest.mark.rare
def test_sync_batch_norm_joins_the_statistics_of_the_ranks(tmp_path):
    """That of PyTorch refuses CPUs. In A it is a BatchNorm."""
    text = textwrap.dedent(SCRIPT).replace("model[1].eval()", "")
    synced = text.replace("nn.BatchNorm1d(8)", "nn.SyncBatchNorm(8)")
    (tmp_path / "synced.py").write_text(synced)
    (tmp_path / "batch.py").write_text(text)
    one = [*ONE[:-1], "batch.py"]
    code, result, error = diff(tmp_path, "--", *one, "--", *TWO[:-1], "synced.py")
    assert code == 0 and result["stages"][-1]["compared"] == 3, error
    code, result, _ = diff(tmp_path, "--", *one, "--", *TWO[:-1], "batch.py")
    assert code == 1 and "1, a BatchNorm1d" in result["first"]["text"]


@pytest.mark.slow
@pytest.mark.rare
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
    (tmp_path / "file").touch()
    code, result, text = diff(folder, "--at-a", "no-such", "--", *ONE)
    assert code == 125 and "no-such" in text


def test_script_that_fails_is_shown(tmp_path):
    (tmp_path / "other.py").write_text("raise SystemExit('no data here')")
    code, result, text = diff(tmp_path, "--", "other.py", "--", *ONE)
    assert code == 125 and "no data here" in text and "Run A failed" in result["error"]


def test_script_that_fails_after_a_step_is_not_called_equal(tmp_path):
    check = "assert step < 2, 'no such sample'"
    broken = SCRIPT.replace("        outputs = (", f"        {check}\n        outputs = (")
    assert check in broken
    (tmp_path / "other.py").write_text(textwrap.dedent(broken))
    other = ["torchrun", "--nproc_per_node=1", "other.py"]
    code, result, text = diff(tmp_path, "--", *other, "--", *ONE)
    assert code == 125 and "no such sample" in text and "--steps 1 compares" in result["error"]


@pytest.mark.slow
@pytest.mark.rare
def test_recomputation_of_activations_is_no_forward(tmp_path):
    """PyTorch ends it by an exception as soon as all that is needed has been computed."""
    call = '(model if bug == "bypass" else trained)(x)'
    recomputed = "torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)"
    assert call in SCRIPT
    (tmp_path / "other.py").write_text(textwrap.dedent(SCRIPT.replace(call, recomputed)))
    other = ["torchrun", "--nproc_per_node=1", "other.py"]
    code, result, _ = diff(tmp_path, "--", *ONE, "--", *other)
    compared = {(stage["step"], stage["stage"]): stage["compared"] for stage in result["stages"]}
    assert code == 0 and compared[3, "outputs of modules"] == 5 and compared[3, "update"] == 6


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --lr 1", (["train.py", "--lr", "1"], 0, [])),
        ("python train.py", (["train.py"], 0, [])),
        ("torchrun --nproc_per_node=4 train.py", (["train.py"], 4, [])),
        ("torchrun --standalone --nproc-per-node 2 -m a.b", (["-m", "a.b"], 2, [])),
        ("python -m torch.distributed.run --nproc_per_node 3 train.py", (["train.py"], 3, [])),
        ("torchrun train.py --nproc_per_node=2", (["train.py", "--nproc_per_node=2"], 1, [])),
        (
            "python -m torch.distributed.launch --nproc_per_node=2 train.py",
            (["train.py"], 2, ["--local-rank={local_rank}"]),
        ),
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
        (A * 2, "a sum over ranks"),
        (A / 2, "divided once"),
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


def part(*ranks):
    """A Step that holds nothing but gradients: a dict of those of each rank."""
    return Step([{"forwards": [], "unclipped": {}, "gradients": rank} for rank in ranks], [])


def test_names_can_be_mapped_and_parameters_joined():
    a = part({"h.0.qkv": A, "h.0.out": A[:2]})
    b = part(
        {"layers.0.q": A[:1], "layers.0.k": A[1:2], "layers.0.v": A[2:], "layers.0.out": A[:2]}
    )
    comparer = Comparer((1, 1), renames=[("layers", "h")], joins=[("qkv", ["q", "k", "v"])])
    result = comparer._gradients("gradients", a, b, "gradients")
    assert result.is_equal and result.compared == 2 and not result.skipped
    result = Comparer((1, 1))._gradients("gradients", a, b, "gradients")
    assert "--rename" in result.skipped


def test_parameters_of_one_module_are_named_together():
    names = ["router.weight", "router.bias", "expert.weight"]
    a, b = part(dict.fromkeys(names, A)), part({**dict.fromkeys(names[:2], 2 * A), names[2]: A})
    result = Comparer((1, 2))._gradients("gradients", a, b, "gradients")
    assert "router.*" in result.text and "2 times" in result.text and len(result.different) == 2


def test_slices_of_ranks_are_put_together():
    """Without DTensor, by columns and by rows; what is whole on each rank stays as it is."""
    a = part({"up": A, "down": A, "norm": A[0]})
    b = part(*({"up": A[i : i + 2], "down": A[:, i // 2 :][:, :1], "norm": A[0]} for i in (0, 2)))
    for one, two in ((a, b), (b, a)):
        result = Comparer((1, 2))._gradients("gradients", one, two, "gradients")
        assert result.is_equal and result.compared == 3
    b.ranks[1]["gradients"]["up"] = A[:2]
    comparer = Comparer((1, 2))
    result = comparer._gradients("gradients", a, b, "gradients")
    assert result.text.startswith("up: ") and "have different ones" not in result.text
    assert comparer.repeated["B"] == {"up"}


def test_gradient_that_is_rounding_next_to_others_is_equal():
    """That of a bias before a BatchNorm is zero in exact arithmetic."""
    a, b = part({"0.bias": A * 1e-17, "0.weight": A}), part({"0.bias": A * 3e-17, "0.weight": A})
    assert Comparer((1, 2))._gradients("gradients", a, b, "gradients").is_equal
    b.ranks[0]["gradients"]["0.bias"] = A * 1e-6
    assert "0.bias" in Comparer((1, 2))._gradients("gradients", a, b, "gradients").text


def test_rows_of_one_rank_are_named():
    comparer = Comparer((1, 2))
    assert "rank 1" in comparer._of_some_ranks(A, torch.cat([A[:2], 2 * A[2:]]))
    assert comparer._of_some_ranks(A, 2 * A) == comparer._of_some_ranks(A[:1], 2 * A[:1]) == ""


def test_parts_of_sequences_are_put_together():
    tokens = torch.arange(12).reshape(3, 4)

    def step(*parts):
        ranks = []
        for part in parts:
            rows = [str(row) for row in part.tolist()]
            forward = {"model": 0, "part": 0, "rows": rows, "tokens": part, "outputs": {}}
            ranks.append({"forwards": [forward]})
        return Step(ranks, [[]] * len(parts))

    a, b = step(tokens), step(tokens[:, :2], tokens[:, 2:])
    result, *_ = Comparer((1, 2))._inputs(a, b)
    assert result.is_equal and result.compared == 3
    assert "rank of B has a part" in result.skipped
    result, *_ = Comparer((1, 2))._inputs(a, step(tokens[:, :2], tokens[:, :2]))
    assert not result.is_equal


SAVES = """
    import sys
    import torch
    from pathlib import Path
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    bug = sys.argv[1] if len(sys.argv) > 1 else ""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(32, 6))
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    path, first = Path("checkpoint.pt"), 0
    if path.exists():
        checkpoint = torch.load(path)
        first = checkpoint["epoch"] + (bug != "epoch")
        for name, part in parts.items():
            if name != bug:
                part.load_state_dict(checkpoint[name])
    for epoch in range(first, 3):
        torch.manual_seed(epoch)
        for (x,) in DataLoader(dataset, 8, shuffle=True):
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save(states | {"epoch": epoch}, path)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "step", "stage", "words"),
    [
        ("", 0, "", ""),
        pytest.param("model", 3, "weights", "all 2", marks=pytest.mark.rare),
        ("optimizer", 3, "optimizer state", "not been restored"),
        pytest.param(
            "scheduler",
            5,
            "settings of the optimizer",
            "lr is 0.05 in B, 0.025 in A",
            marks=pytest.mark.rare,
        ),
        pytest.param("epoch", 3, "samples", "are the same", marks=pytest.mark.rare),
    ],
)
def test_run_is_equal_until_the_resume(bug, step, stage, words, tmp_path):
    """A checkpoint at the end of each epoch, of which something is not restored."""
    (tmp_path / "saves.py").write_text(textwrap.dedent(SAVES))
    options = ["--resume", "--steps", "2", "--", "saves.py", "--", "saves.py", bug]
    code, result, error = diff(tmp_path, *options)
    assert result["resumed after"] == 2, error
    if not bug:
        assert code == 0 and len({each["step"] for each in result["stages"]}) == 6
    else:
        first = result["first"]
        assert (first["step"], first["stage"]) == (step, stage) and words in first["text"]


ALONE = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("script", "words"), [(ALONE, "no checkpoint"), ("raise ValueError", "Run A failed")]
)
def test_script_without_checkpoints_cannot_be_resumed(script, words, tmp_path):
    (tmp_path / "alone.py").write_text(textwrap.dedent(script))
    code, _, error = diff(tmp_path, "--resume", "--", "alone.py")
    assert code == 125 and words in error and "_failure" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "replacement", "stage", "words"),
    [
        pytest.param(
            "torch.manual_seed(0)",
            "",
            "initial weights",
            "A is not the same",
            marks=pytest.mark.rare,
        ),
        (
            "Dropout(0.0)",
            "Dropout(0.5)",
            "outputs of modules",
            "random numbers in B",
        ),
    ],
)
def test_random_numbers_are_named(line, replacement, stage, words, tmp_path):
    """Of a script without a DataLoader."""
    text = textwrap.dedent(ALONE)
    (tmp_path / "b.py").write_text(text.replace(line, replacement))
    (tmp_path / "a.py").write_text(text if "Dropout" in line else (tmp_path / "b.py").read_text())
    code, result, _ = diff(tmp_path, "--steps", "1", "--", "a.py", "--", "b.py")
    assert code == 1 and result["first"]["stage"] == stage and words in result["first"]["text"]
    assert "reads no DataLoader" in result["stages"][0]["not compared"]


LOW_PRECISION = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 1

        @staticmethod
        def backward(context, gradient):
            return gradient.to(torch.float32) * 1

    torch.set_default_dtype(torch.bfloat16)
    model = nn.Linear(784, 10)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = MNIST("data", transform=ToTensor())
    for images, labels in DataLoader(dataset, 8, shuffle=True):
        images = images.flatten(1).to(torch.bfloat16)
        nn.functional.cross_entropy(Rounded.apply(model(images)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.rare
def test_what_is_not_seeded_can_be_compared_with_a_seed_and_in_order(tmp_path):
    """Of a script with data from the network, and a model and a backward pass of low precision: all
    of it is computed in float64."""
    (tmp_path / "a.py").write_text(textwrap.dedent(LOW_PRECISION))
    text = textwrap.dedent(LOW_PRECISION).replace(".to(torch.bfloat16)", "")
    text = text.replace("gradient.to(torch.float32)", "gradient")
    (tmp_path / "b.py").write_text(text)
    options = ["--fake-data", "--steps", "2", "--no-shuffle"]
    code, result, error = diff(tmp_path, *options, "--seed", "1", "--", "a.py", "--", "b.py")
    assert code == 0 and result["stages"][0]["compared"] == 8, error
    code, result, _ = diff(tmp_path, *options, "--", "a.py", "--", "b.py")
    assert code == 1 and result["first"]["stage"] == "initial weights"


@pytest.mark.parametrize(
    ("stage", "differences", "equal"),
    [
        ("gradients", (1e-6, 1e-2), [True, True]),
        ("gradients", (1e-6, 0.5), [True, False]),
        ("gradients", (0, 1e-2), [True, False]),
        (SETTINGS, (1e-6, 1e-2), [True, False]),
    ],
)
def test_rounding_of_float32_may_grow_in_later_steps(stage, differences, equal):
    class Told(Comparer):
        def step(self, number, a, b):
            result = Result(number + 1, stage)
            for name, difference in {"weight": a, "bias": min(a, 1e-6)}.items():
                how = "by so much" if difference > self.limit else ""
                self._add(result, Comparison(name, difference, how))
                result.text = result.text or how
            return [result]

    results = Told((1, 2), limit=ROUNDED).results(differences, differences)
    assert [result.is_equal for result in results] == equal
    assert results[1].is_equal == ("rounding that grows" in results[1].skipped)


@pytest.mark.slow
@pytest.mark.rare
def test_float32_that_differs_by_rounding_is_equal(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [*CHECK, "diff", "--dtype", "own", "--", *ONE, "--", *TWO]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "except for rounding" in done.stdout


def test_padding_and_order_of_rows_are_no_difference():
    weight = torch.randn(6, 2, dtype=torch.float64)
    order = order_of(weight, weight[[3, 0, 1, 2, 5, 4]])
    assert weight[[3, 0, 1, 2, 5, 4]][order].equal(weight)
    assert order_of(weight, weight) is None and order_of(weight, weight * 2) is None

    def step(tokens):
        tokens = torch.tensor(tokens)
        outputs = {("", "Embedding", 0): [tokens[..., None].double()]}
        rows = [hash(tuple(row)) for row in tokens.tolist()]
        forward = {
            "model": 0,
            "part": 0,
            "rows": rows,
            "tokens": tokens,
            "outputs": outputs,
            "draws": {},
        }
        return Step([{"forwards": [forward]}], [[]])

    a, b = step([[5, 6, 0, 0], [7, 8, 9, 0]]), step([[7, 8, 9], [5, 6, 0]])
    result, a, b = Comparer((1, 1))._inputs(a, b)
    assert result.is_equal and result.compared == 2 and "padding" in result.skipped
    outputs = Comparer((1, 1))._outputs(a, b)
    assert outputs.is_equal and outputs.compared == 1
    result, *_ = Comparer((1, 1))._inputs(step([[5, 6, 0]]), step([[5, 7, 0]]))
    assert "0 are the same" in result.text


def test_advice_for_samples_in_different_orders():
    """Not where all ranks have the same samples, which is a bug."""
    one, two = Step([], [[1, 2]]), Step([], [[3], [4]])
    result = Comparer((1, 2))._samples(one, two)
    assert result.text and "num_replicas=1, rank=0" in result.advice
    outcome = Outcome([result], [[one], [two]], (1, 2))
    assert result.advice in report.text(outcome, 1)
    assert not Comparer((1, 2))._samples(one, Step([], [[3], [3]])).advice
    assert not Comparer((1, 2))._samples(one, Step([], [[1], [2]])).advice


def test_padding_that_has_no_effect_is_no_difference():
    """A model of text that is given tokens[:, :-1]: where another row of the batch is longer, what
    is cut off is padding, and the last token stays, as an input without a target."""

    def step(tokens, gradient):
        forward = {"model": 0, "part": 0, "rows": [*map(hash, tokens)], "tokens": None}
        tensors = {key: {} for key in ("before", "after", "state", "buffers")}
        return Step(
            [
                tensors
                | {
                    "forwards": [forward | {"outputs": {}, "draws": {}}],
                    "gradients": {"weight": torch.tensor([gradient, 2.0])},
                    "losses": [0.5],
                    "norms": [],
                    "unclipped": {},
                    "settings": [],
                }
            ],
            [[1, 2]],
        )

    one = step([(5, 6), (7, 8)], 1.0)
    for gradient, is_equal in ((1.0, True), (3.0, False)):
        two = step([(5, 6), (7, 8, 9)], gradient)
        inputs = Comparer((1, 1)).step(0, one, two)[1]
        assert inputs.is_equal is is_equal and "1 are the same" in inputs.text + inputs.skipped
