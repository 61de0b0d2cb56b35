"""Bugs in other people's scripts are found, and scripts without a bug pass."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import ProcessGroup

from check.__main__ import parse, script_of
from check.advice import ADVICE
from check.events import Rank, Run
from check.findings import Finding
from check.processes import INSIDE
from check.report import as_sarif
from check.rules import files
from check.rules.data import same_samples, samples_left_out
from check.rules.evaluation import division, mode
from check.rules.files import resumed, writers
from check.rules.gradients import left_over, scale
from check.rules.models import failures, parameters, start
from check.scenarios import Checked, Options
from check.tests.corpus import __main__ as corpus
from check.tests.corpus.bugs import BUGS, CORRECT, changed

FOLDER = Path(__file__).resolve().parents[1]

# Rules that no bug of the corpus aims at: a test below has them, or they say what else went wrong.
NOT_PLANTED = {"fails-on-two", "hangs-on-two", "resume-fails"}
BY_NAME = {bug.name: bug for bug in BUGS}

# Bugs that do not hide each other, so that one check of a few seconds finds them all.
TOGETHER = [
    [
        "in place",
        "optimizer lost",
        "no set_epoch",
        "no eval mode",
        "no no_grad",
        "item in each step",
        "searches in vain",
        "no all_reduce",
        "printed by all",
    ],
    ["around the wrapper", "epoch lost", "padded validation"],
    [
        "scheduler lost, whose rate has not changed yet",
        "schedule of momentum lost",
        "next epoch skipped, by its number",
    ],
    ["next epoch skipped"],
    ["loss divided by the world size", "model lost", "no zero_grad"],
    ["finetune: frozen BatchNorm learns", "finetune: writers", "finetune: validation augmented"],
    ["amp: clipped before unscale", "amp: scaler lost", "amp: padding counted"],
    ["by hand: seed per rank"],
    ["by hand: parameters of a different model"],
    ["stream: mean of means"],
    ["collective on rank 0"],
    ["spawn: no sampler", "spawn: BatchNorm per rank"],
    ["windows: same seed", "windows: iteration lost"],
    ["accelerate: loss not divided", "accelerate: repeated samples counted"],
    ["two networks: the same noise", "two networks: one rank skips a layer"],
    ["tutorial: log of all"],
    ["alone: buffers lost"],
    ["divided stream: a counter of the loss lost"],
    ["within: position lost"],
]
# The same rules, in scripts of a different form: python -m check.tests.corpus runs all of them.
REPEATED = ("spawn: no sampler", "windows: same seed", "by hand: seed per rank")
REPEATED += ("finetune: frozen BatchNorm learns", "tutorial: log of all", "stream: mean of means")


def run_check(folder, *options, arguments=("train.py",)):
    """Check train.py of a folder as a user does. Returns the exit code, stdout and stderr."""
    command = [sys.executable, FOLDER, *options, "--", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout, done.stderr


def found_in(folder, source, processes=2):
    """The rules of the findings on a script, what they observed, and what was not checked."""
    (folder / "train.py").write_text(source)
    report = json.loads(run_check(folder, "--processes", str(processes), "--json", "-")[1])
    rules, observed = ([each[key] for each in report["findings"]] for key in ("rule", "observed"))
    return rules, str(observed), str(report["not_checked"])


def check_source(folder, source, script, *more):
    """The rules that a check of this script reports, and those that are more than notes."""
    (folder / "train.py").write_text(source)
    options = ["--json", "-", *more]
    if script.resume_arguments:
        options.append(f"--resume-args={script.resume_arguments}")
    command = [*script.command(), *script.arguments]
    code, stdout, stderr = run_check(folder, *options, arguments=command)
    assert code in (0, 1), stderr
    found = json.loads(stdout)["findings"]
    alarms = {finding["rule"] for finding in found if finding["severity"] != "note"}
    assert code == (1 if alarms else 0)
    return {finding["rule"] for finding in found}, alarms


def source_of(script):
    """The text of a script; skips the test if a package that it needs is not installed."""
    for package in script.needs:
        pytest.importorskip(package)
    return script.source()


def script_named(name):
    return next(script for script in CORRECT if script.name == name)


def test_bugs_apply_and_all_rules_have_one():
    for bug in BUGS:
        compile(bug.source(), bug.name, "exec")
        assert bug.finds in ADVICE and set(bug.also) <= set(ADVICE), bug.name
    planted = {bug.finds for bug in BUGS} | {rule for bug in BUGS for rule in bug.also}
    assert set(ADVICE) - planted <= NOT_PLANTED


def test_corpus_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    checked = []

    def measure(source, script, processes):
        checked.append(script.name)
        return {"found": [], "not_checked": [], "seconds": 1.0}

    results = tmp_path / "results.json"
    monkeypatch.setattr(corpus, "measure", measure)
    arguments = ["corpus", "--only", "one_process", "--results", str(results)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert corpus.main() == 1  # nothing is found, so all bugs are missed
    kept = json.loads(results.read_text())
    first = len(checked)
    assert first == len(kept) > 1
    del kept["one_process"]
    results.write_text(json.dumps(kept))
    corpus.main()
    assert len(checked) == first + 1
    assert f"{first} checks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command, script",
    [
        ("train.py --lr 1", "train.py --lr 1"),
        ("python train.py", "train.py"),
        ("torchrun --nproc_per_node=8 --standalone train.py --x", "train.py --x"),
        ("torchrun --nproc_per_node 8 train.py", "train.py"),
        ("torchrun --virtual-local-rank --nproc_per_node 8 -- train.py", "train.py"),
        ("python3.11 -u -W ignore train.py", "train.py"),
        ("python_train.py --lr 1", "python_train.py --lr 1"),
        ("accelerate launch --multi_gpu --num_processes 2 train.py --x", "train.py --x"),
        ("python -m torch.distributed.run --nnodes=2 -m package.train", "-m package.train"),
    ],
)
def test_command_without_its_launcher(command, script):
    assert script_of(command.split()) == script.split()


def test_wrong_command_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        parse(["--", "no_such.py"])
    assert error.value.code == 2
    assert "no file no_such.py" in capsys.readouterr().err


READ_FAKE_DATA = """
import importlib.util, sys

importlib.util.find_spec("torchvision.datasets")  # as libraries do before they import it
import torch
from torchvision import datasets
from torchvision.transforms import ToTensor

cifar = datasets.CIFAR10("nowhere", train=False, transform=ToTensor(), target_transform=str)
image, target = cifar[3]
assert image.shape == (3, 32, 32) and target == str(cifar.targets[3]) and "cat" in cifar.classes
mnist = datasets.MNIST("nowhere", download=True)
assert mnist.data.shape == (400, 28, 28) and mnist[0][0].size == (28, 28)
folder = datasets.ImageFolder("nowhere/val", transform=ToTensor())
assert len(folder) == 51 and len(folder.classes) == 5 and folder[0][0].shape[0] == 3
masks = datasets.VOCSegmentation("nowhere", image_set="val")
assert masks[0][0].size == masks[0][1].size and masks[0][1].mode == "P"
print(torch.stack([image.mean(), folder[50][0].mean()]).tolist())
"""

READ_FAKE_TEXT = """
from datasets import load_dataset

parts = load_dataset("nyu-mll/glue", "mrpc")
assert len(parts["train"]) == 400 and parts["validation"].features["label"].num_classes == 2
own = load_dataset("my/own", split="train[:10%]+test", streaming=False)
assert len(own) == 2 + 51 and len(own[0]["ids"]) == 8 and max(own[0]["ids"]) < 30
assert next(iter(load_dataset("my/own", split="train", streaming=True)))["ids"] == own[0]["ids"]
load_dataset("unknown")
"""


def read_fake_data(tmp_path, source, fake_data):
    """Run a source with the observers of a check, but without a check."""
    plan = {"exact": None, "kill_step": None, "limit_data": 0}
    plan |= {"run": "one", "device": "cpu", "root": str(tmp_path), "folder": str(tmp_path)}
    environment = os.environ | {
        "TOOLS_CHECK_PLAN": json.dumps(plan | {"fake_data": fake_data}),
        "PYTHONPATH": str(INSIDE),
    }
    command = [sys.executable, "-c", source]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


def test_fake_images_are_the_same_in_each_process(tmp_path):
    done = [
        read_fake_data(tmp_path, READ_FAKE_DATA, {"ImageFolder": {"classes": "5"}})
        for _ in range(2)
    ]
    assert done[0].returncode == 0, done[0].stderr
    assert done[0].stdout and done[0].stdout == done[1].stdout


def test_fake_text_asks_for_columns_that_are_not_known(tmp_path):
    pytest.importorskip("datasets")
    columns = {"ids": "int30[8]", "label": "class3", "train": "20"}
    done = read_fake_data(tmp_path, READ_FAKE_TEXT, {"my/own": columns})
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("--fake-data: ")
    assert last.endswith(" --fake-data 'unknown=text:str,label:class2'")


def test_options_of_fake_data(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert parse(["--", "train.py"]).fake_data is None
    assert parse(["--fake-data", "--", "train.py"]).fake_data == {}
    options = ["--fake-data", "a=x:str,y:int", "--fake-data=b=train:9"]
    given = parse([*options, "--", "train.py"]).fake_data
    assert given == {"a": {"x": "str", "y": "int"}, "b": {"train": "9"}}
    with pytest.raises(SystemExit):
        parse(["--fake-data", "a=x", "--", "train.py"])
    assert "a=x: NAME=COLUMN:TYPE,... is expected" in capsys.readouterr().err


def two_ranks_read(rule, shares, **fields):
    """The rules of findings_of_two_ranks()."""
    return [finding.rule for finding in findings_of_two_ranks(rule, shares, **fields)]


def findings_of_two_ranks(rule, shares, **fields):
    """The findings of a rule about two ranks, each with one epoch of these samples."""
    same = {"loader": 0, "dataset": 0, "base": 0, "contents": {}, "iterable": False, "place": None}
    same["has_all"] = False
    epochs = [same | {"samples": own, "base_samples": own} | fields for own in shares]
    ranks = [
        SimpleNamespace(training=[epoch], fetches=[], steps=[], of=lambda *kinds: [])
        for epoch in epochs
    ]
    two = SimpleNamespace(parts=[], world_size=2, ranks=ranks)
    return list(rule({"two": two}))


def test_samples_of_an_epoch_that_is_too_long_to_list_are_not_missing():
    shares = [list(range(10)), list(range(10, 20))]
    epoch = {"dataset_len": 100, "sizes": [10, 1]}
    assert two_ranks_read(samples_left_out, shares, **epoch, whole=True) == ["samples-left-out"]
    assert not two_ranks_read(samples_left_out, shares, **epoch, whole=False)


def test_a_repeated_batch_that_fills_up_an_epoch_is_no_overlap():
    shares = [list(range(48)), [*range(48, 80), *range(16)]]
    epoch = {"sizes": [3, 16], "whole": True}
    assert not two_ranks_read(same_samples, shares, **epoch, dataset_len=80)
    assert two_ranks_read(same_samples, shares, **epoch, dataset_len=90) == ["shares-overlap"]


def test_ranks_that_all_go_through_the_whole_dataset_are_found_before_they_do():
    shares, epoch = [[1, 2, 3], [4, 5, 6]], {"sizes": [3, 1], "whole": False, "dataset_len": 900}
    assert not two_ranks_read(same_samples, shares, **epoch)
    assert two_ranks_read(same_samples, shares, **epoch, has_all=True) == ["same-samples"]
    assert not two_ranks_read(same_samples, shares, **epoch, has_all=True, dataset=1)  # subsets


def test_samples_in_no_share_are_not_counted_in_subsets_that_may_differ():
    shares = [list(range(0, 40)), list(range(20, 60))]
    epoch = {"sizes": [3, 16], "whole": True}
    (finding,) = findings_of_two_ranks(same_samples, shares, **epoch, dataset_len=90)
    assert "20 samples" in finding.observed and "30 of 90" in finding.observed
    (finding,) = findings_of_two_ranks(same_samples, shares, **epoch, dataset_len=50, dataset=1)
    assert "20 samples" in finding.observed and "50" not in finding.observed


@pytest.mark.parametrize(("trained_from", "rules"), [(2, []), (0, ["evaluation-repeated"])])
def test_samples_that_are_tried_before_training_are_no_evaluation(trained_from, rules, monkeypatch):
    """All ranks may read the same, to compare them."""
    same = {"loader": 1, "dataset": 0, "base": 0, "contents": {}, "iterable": False, "place": None}
    tried = same | {"epoch": 1, "samples": [0, 1], "base_samples": [0, 1], "dataset_len": 9}
    own = {"events": [], "of": lambda *kinds: [], "evaluation": [tried]}
    trained = [{"epoch": trained_from}]
    ranks = [SimpleNamespace(number=n, training=trained, **own) for n in range(2)]
    monkeypatch.setattr("check.rules.evaluation.replicas", lambda checked: ranks)
    found = division({"two": SimpleNamespace(ended=True)})
    assert [finding.rule for finding in found] == rules


@pytest.mark.parametrize("kind, function", [("save", "torch.save"), ("dump", "pickle")])
def test_restart_is_compared_with_the_step_of_the_checkpoint(kind, function, tmp_path):
    """Not with a later one with the same weights, such as one that a loss scaler has skipped."""

    def events(*states):
        same = {
            "kind": "step",
            "optimizer": 0,
            "rounded": None,
            "type": "Adam",
            "rates": [0.1],
            "scaler": None,
        }
        same |= {"batches": {"0": 1}, "forwards": [], "settings": [], "schedulers": []}
        same["others"] = []
        return [
            same | {"number": i, "step": i, "parameters": [weights], "state": [2, state]}
            for i, (weights, state) in enumerate(states)
        ]

    path = str(tmp_path / "copy" / "last.pkl")
    save = {"kind": kind, "function": function, "path": path, "model": None}
    before, after = events((10, 0), (11, 1), (11, 2), (12, 3)), events((11, 1))
    before.insert(1, save)
    after.insert(0, {"kind": "load", "path": path, "place": None})
    runs = {}
    for name, of_rank in {"killed": before, "resumed": after}.items():
        runs[name] = Run(name, tmp_path, tmp_path / "copy", 0, "", 0.0)
        runs[name].ranks = [Rank(0, 1, of_rank, folder=tmp_path)]
    checked = Checked(Options([], tmp_path / "source"), runs, {}, "torchrun")
    assert list(resumed(checked)) == []


def restarted(tmp_path, resumed_events, **changes):
    """The rules about a restart after step 4 of a run of two epochs of three steps and batches.

    resumed_events: batches and numbers of epochs, which a step with `changes` follows.
    """
    same = {"rounded": None, "type": "SGD", "scaler": None, "rates": [0.1], "state": [0, 0]}
    same |= {"forwards": [], "settings": [{"momentum": [0.9]}], "schedulers": [["StepLR", 1]]}
    same["others"] = []
    path = str(tmp_path / "copy" / "last.pt")

    def step(number, **fields):
        return {
            "kind": "step",
            "step": number,
            "parameters": [number],
            "batches": {"0": 1},
        } | fields

    def batch(samples):
        epoch = {"epoch": 0, "loader": 0, "place": None}
        return {"kind": "batch", "samples": samples} | epoch

    def numbered(events):
        return [event | {"number": i, "place": None} for i, event in enumerate(events)]

    before = []
    for number in range(6):
        if number % 3 == 0:
            before.append({"kind": "set_epoch", "epoch": number // 3})
        before += [batch([number]), step(number, **same)]
    after = [{"kind": "load", "path": path}]
    for name, value in resumed_events:
        after.append(batch(value) if name == "batch" else {"kind": name, "epoch": value})
    reads = sum(name == "batch" for name, _ in resumed_events)
    saved = changes.pop("saved", 4)
    after.append(step(0, **same | changes | {"parameters": [saved], "batches": {"0": reads}}))
    save = {"kind": "save", "function": "torch.save", "path": path, "model": True}
    position = [i for i, event in enumerate(before) if event["kind"] == "step"][saved - 1] + 1
    before.insert(position, save)
    epoch = {"kind": "epoch", "steps": 3, "steps_before": 0, "backwards": 3, "whole": True}
    runs = {}
    for name, of_rank in {"killed": before, "resumed": after}.items():
        runs[name] = Run(name, tmp_path, tmp_path / "copy", 0, "", 0.0)
        rank = Rank(0, 1, numbered(of_rank), folder=tmp_path)
        rank.epochs = [epoch] if name == "killed" else []
        runs[name].ranks = [rank]
    checked = Checked(Options([], tmp_path / "source"), runs, {}, "torchrun")
    return [(each.rule, each.observed) for each in resumed(checked)]


def test_the_best_model_that_a_test_loads_at_the_end_is_no_restart(tmp_path):
    """The load follows the steps, or reads what this run itself has saved."""
    path = str(tmp_path / "copy" / "best.pt")
    save = {"kind": "save", "function": "torch.save", "path": path, "model": True}
    load = {"kind": "load", "path": path, "place": None}
    step = {"kind": "step", "rounded": None, "parameters": [0]}
    for again in ([step, load], [save, load, step]):
        runs = {}
        for name, events in {"killed": [step, save], "resumed": again}.items():
            runs[name] = Run(name, tmp_path, tmp_path / "copy", 0, "", 0.0)
            runs[name].ranks = [Rank(0, 1, events, folder=tmp_path)]
        (found,) = resumed(Checked(Options([], tmp_path / "source"), runs, {}, "torchrun"))
        assert found.what == "resuming" and "best.pt" in found.why


def test_checkpoint_whose_error_the_script_hides_is_not_resumed(tmp_path):
    path = str(tmp_path / "copy" / "last.pt")
    save = {"kind": "save", "function": "torch.save", "path": path, "model": True}
    failed = {"kind": "load_failed", "path": path, "place": ["a.py", 3], "error": "Unpickling"}
    step = {"kind": "step", "rounded": None, "parameters": [0]}
    runs = {}
    for name, events in {"killed": [step, save], "resumed": [failed, step]}.items():
        runs[name] = Run(name, tmp_path, tmp_path / "copy", 0, "", 0.0)
        runs[name].ranks = [Rank(0, 1, events, folder=tmp_path)]
    (found,) = resumed(Checked(Options([], tmp_path / "source"), runs, {}, "torchrun"))
    assert found.rule == "resume-fails" and "Unpickling" in found.observed


def test_resumed_run_that_fails_for_want_of_a_file_of_the_user_is_not_checked(tmp_path):
    step, error = {"kind": "step"}, {"kind": "exception", "error": "none", "waits": 0, "time": 0}
    runs = {}
    for name, events, code in (("killed", [step], 0), ("resumed", [error], 1)):
        runs[name] = Run(name, tmp_path, tmp_path, code, "", 0.0)
        runs[name].ranks = [Rank(0, 1, events, folder=tmp_path)]
    options = Options([], tmp_path, resume_arguments=["--resume=out/last.pt", "--lr", "0.1"])
    checked = Checked(options, runs, {}, "torchrun")
    (unseen,) = resumed(checked)
    assert unseen.what == "resuming" and "out/last.pt" in unseen.why
    (tmp_path / "out").mkdir()
    (tmp_path / "out/last.pt").touch()
    (found,) = resumed(checked)
    assert found.rule == "resume-fails"


def one_run(tmp_path, name, *ranks):
    """A Checked with one run, of ranks with these events."""
    run = Run(name, tmp_path, tmp_path, 0, "", 0.0)
    run.ranks = [Rank(number, number, events) for number, events in enumerate(ranks)]
    for rank in run.ranks:
        rank.epochs = []
    return Checked(Options([], tmp_path), {name: run}, {}, "torchrun")


INIT = {"kind": "init", "world": 2, "rank": 0}


def test_report_says_why_a_script_did_not_train_on_one_process(tmp_path):
    checked = one_run(tmp_path, "two", [INIT], [INIT | {"rank": 1}])
    checked.not_run["exact-two"] = "the script trains on several processes only"
    checked.runs["one"] = Run("one", tmp_path, tmp_path, 1, "", 0.0, codes=[1])
    checked.runs["one"].ranks = []
    (tmp_path / "output-0.txt").write_text("ValueError: two ranks at least\n=======\n")
    (unseen,) = scale(checked)
    assert unseen.why.endswith("processes only (on one: ValueError: two ranks at least)")


def test_checkpoint_that_each_rank_gives_the_same_name_is_saved_by_all(tmp_path):
    def events(rank, target):
        source = str(tmp_path / f"last.tmp{rank}")
        save = {"kind": "save", "function": "torch.save", "path": source, "model": True}
        rename = {"kind": "rename", "source": source, "path": str(tmp_path / target)}
        return [INIT, save | {"number": 1}, rename | {"number": 2, "place": ["train.py", 9]}]

    found = writers(one_run(tmp_path, "two", *(events(rank, "last.pt") for rank in range(2))))
    ((rule, place, _),) = found
    assert rule == "saved-by-every-rank" and place == ("train.py", 9)
    own = [events(rank, f"last{rank}.pt") for rank in range(2)]
    assert list(writers(one_run(tmp_path, "two", *own))) == []


def test_resumed_run_whose_optimizer_has_other_parameters(tmp_path):
    step = {
        "kind": "step",
        "step": 0,
        "type": "Adam",
        "gradients": [None],
        "strangers": 1,
        "size": 1,
    }
    (found,) = parameters(one_run(tmp_path, "resumed", [step]))
    assert found.rule == "wrong-parameters"


@pytest.mark.parametrize(
    "one_model, rule", [(True, "shards-start-differently"), (False, "models-start-differently")]
)
def test_shards_of_one_model_are_no_different_models(one_model, rule, tmp_path):
    shards = [{"kind": "shard", "checksums": [rank], "one_model": one_model} for rank in range(2)]
    (found,) = start(one_run(tmp_path, "two", *([INIT, shard] for shard in shards)))
    assert found.rule == rule


@pytest.mark.parametrize("is_cut, found", [(False, 1), (True, 0)])
def test_gradients_are_left_over_only_by_an_epoch_that_came_to_its_end(is_cut, found):
    """A loader that looks ahead gives one batch more than the check has let it read."""
    steps = [{"step": number, "added": added} for number, added in enumerate((2, 2, 3))]
    epochs = [{"steps_before": 0, "batches": 5, "cut": is_cut}, {"steps_before": 2}]
    assert len(list(left_over(SimpleNamespace(training=epochs, steps=steps)))) == found


def test_evaluation_that_was_not_seen_is_said(tmp_path):
    step = {"kind": "step", "step": 0, "number": 1, "forwards": []}
    (said,) = mode(one_run(tmp_path, "one", [step]))
    assert "evaluation" in said.what and "--epochs" in said.why


def test_evaluation_within_an_epoch_that_leaves_its_mode_is_found(tmp_path):
    def found(*modes):
        forward = {"grad": True, "dropouts": 1, "norms": 0, "model": 1, "type": "Net"}
        forwards = [[forward | {"training": on, "place": None}] for on in modes]
        steps = [
            {"kind": "step", "number": i, "step": i, "forwards": f} for i, f in enumerate(forwards)
        ]
        return [each.rule for each in mode(one_run(tmp_path, "one", steps)) if len(each) > 2]

    assert found(True, True, False, False) == ["no-train-mode"]
    assert found(True, False, True, True) == [] == found(False, False, False)


GOES_ON = [("set_epoch", 1), ("batch", [3]), ("batch", [4])]  # the first batch is skipped


def test_restart_that_goes_on_is_no_finding(tmp_path):
    assert restarted(tmp_path, GOES_ON) == []
    assert restarted(tmp_path, [("set_epoch", 1), ("batch", [4])]) == []


def test_order_after_a_restart_that_skips_batches(tmp_path):
    """Scripts that read and skip what was trained on, to find the position again."""
    of_epoch_0 = [("set_epoch", 1), ("batch", [0]), ("batch", [1])]
    ((rule, observed),) = restarted(tmp_path, of_epoch_0)
    assert rule == "order-after-resume" and "trains on" in observed and "step 2, " in observed
    skips_it = [("set_epoch", 1), ("batch", [3]), ("batch", [4]), ("batch", [5])]
    ((rule, observed),) = restarted(tmp_path, skips_it)
    assert rule == "order-after-resume" and "skips " in observed and "step 5" in observed
    ((rule, observed),) = restarted(tmp_path, [("set_epoch", 2), ("batch", [7])], saved=3)
    assert rule == "order-after-resume" and "epoch is skipped" in observed
    random = [("set_epoch", 1), ("batch", [8]), ("batch", [9])]  # no seed: nothing to compare with
    assert restarted(tmp_path, random) == []


def test_numbers_in_checkpoints_go_on_after_a_restart():
    def rank(*numbers, loaded=None):
        events = [{"kind": "load", "path": "a.pt", "counts": {"epoch": loaded}}] if loaded else []
        for number in numbers:
            save = {"kind": "save", "path": "a.pt", "counts": {"epoch": number}}
            events += [{"kind": "step"}, save, save]  # the best one, too
        return Rank(0, 1, events)

    def found(uninterrupted, again):
        return files._counted_again(again, rank(*uninterrupted)) is not None

    assert found([1, 2], rank(1, 2, loaded=1)) and found([1, 2], rank(1, loaded=2))
    assert not found([1, 2], rank(2, loaded=1))
    assert not found([1, 1, 2], rank(1, loaded=1))  # saved within epochs, too
    assert not found([1], rank(1, loaded=1)) and not found([1, 2], rank(1))


def test_schedules_and_settings_after_a_restart(tmp_path):
    """Also those that have not changed the rate in the few steps of a check."""
    lost = {"schedulers": [["StepLR", 0]]}
    ((rule, observed),) = restarted(tmp_path, GOES_ON, **lost)
    assert rule == "scheduler-not-restored" and "come to 1" in observed and "at 0" in observed
    lost = {"settings": [{"momentum": [0.95]}]}
    ((rule, observed),) = restarted(tmp_path, GOES_ON, **lost)
    assert rule == "settings-not-restored" and "momentum 0.9 in group 0" in observed
    other = {"settings": [{"nesterov": [1.0]}], "schedulers": []}  # nothing that both have
    assert restarted(tmp_path, GOES_ON, **other) == []


def test_rates_that_go_up_and_down_are_not_compared_after_a_restart():
    def lost(*rates, optimizers=1):
        steps = [
            {"step": i, "rates": [rate], "schedulers": [], "optimizer": i % optimizers}
            for i, rate in enumerate(rates)
        ]
        ranks = SimpleNamespace(steps=steps), SimpleNamespace(steps=[steps[0], steps[1]])
        return [each.rule for each in files._lost_schedule(*ranks, 3, None, False)]

    assert lost(0.3, 0.2, 0.1, 0.05, 0.02) == ["scheduler-not-restored"]
    assert lost(0.1, 0.3, 0.2, 0.1, 0.05) == ["scheduler-not-restored"]  # with a warm-up
    assert lost(0.3, 0.2, 0.4, 0.1, 0.35) == []
    alternating = 0.3, 0.1, 0.2, 0.05, 0.15, 0.04
    assert lost(*alternating, optimizers=2) == ["scheduler-not-restored"]


def test_text_that_each_epoch_reads_in_pieces_of_random_lengths_is_not_repeated():
    def found(*pieces):
        steps = [{"batches": {}, "forwards": [{"rows": piece}]} for piece in pieces]
        ranks = [
            Rank(0, 1, [{"kind": "step", "number": i, "step": i, **step} for i, step in kept])
            for kept in (enumerate(steps), enumerate(steps[:1]))
        ]
        for rank in ranks:
            rank.epochs = []
        return [each.rule for each in files._epoch(*ranks, 2, None, None)]

    assert found([1, 2, 3], [4, 5, 6], [7, 8]) == ["order-after-resume"]
    assert found([1, 2, 3], [4, 5, 6], [1, 2]) == []


def test_all_processes_that_fail_before_they_join_a_group_are_a_finding(tmp_path):
    def rules(**fields):
        run = Run("two", tmp_path, tmp_path, 1, "", 0.0, **fields)
        (tmp_path / "output-0.txt").write_text("Batches are uneven\na batch of 7 for 2 ranks\n\n")
        run.ranks = [Rank(number, number, []) for number in range(2)]
        checked = Checked(Options([], tmp_path), {"one": run, "two": run}, {}, "torchrun")
        return list(failures(checked))

    (finding,) = rules(codes=[1, 1])
    assert finding.rule == "fails-on-two" and "a batch of 7" in finding.observed
    (not_checked,) = rules(codes=[1, -9])  # ended by the check: one may have met the other
    assert "no process group" in not_checked.why and "a batch of 7" in not_checked.why


def test_slow_ranks_are_not_checked_and_those_that_wait_for_others_hang(tmp_path):
    def result(kind, timed_out, codes=(-9, -9)):
        run = Run("two", tmp_path, tmp_path, 1, "", 9.0, timed_out, codes=list(codes))
        event = {"kind": kind, "world": 2, "place": ["train.py", 3]}
        run.ranks = [Rank(number, number, [event]) for number in range(2)]
        checked = Checked(
            Options([], tmp_path, timeout=7), {"one": run, "two": run}, {}, "torchrun"
        )
        (found,) = failures(checked)
        return found

    assert "--timeout 7" in result("init", "limit").why
    assert "--timeout 7" in result("joins", "limit").why
    assert result("init", "idle").rule == "hangs-on-two"
    waits = result("joins", "idle")
    assert waits.rule == "hangs-on-two" and waits.place == ("train.py", 3)
    assert result("joins", "", codes=(-9, 1)).rule == "fails-on-two"  # before it joined the group


def test_first_exception_is_the_failure_and_not_that_of_a_rank_which_was_left(tmp_path):
    def found(*exceptions, collectives=(0, 0), codes=(1, 1)):
        run = Run("two", tmp_path, tmp_path, 1, "", 9.0, codes=list(codes))
        call = {"kind": "collective", "name": "ALLGATHER", "sizes": [], "place": ["train.py", 6]}
        ranks = [[{"kind": "init", "world": 2}] + [call] * count for count in collectives]
        for number, time, error, waits in exceptions:
            event = {"error": error, "time": time, "waits": waits, "place": ["train.py", 5]}
            ranks[number].append({"kind": "exception"} | event)
        run.ranks = [Rank(number, number, events) for number, events in enumerate(ranks)]
        (finding,) = failures(Checked(Options([], tmp_path), {"one": run, "two": run}, {}, "auto"))
        return finding

    own, left = (0, 2.0, "Exception: half a file", False), (1, 1.0, "RuntimeError: closed", True)
    failed = found(own, left, collectives=(0, 1))
    assert failed.rule == "fails-on-two" and failed.place == ("train.py", 5)
    assert "half a file" in failed.observed
    assert found(left, collectives=(0, 1), codes=(3, 1)).rule == "fails-on-two"
    assert found(left, collectives=(0, 1), codes=(0, 1)).rule == "collectives-differ"


def test_sarif_has_rules_and_places():
    findings = [Finding("no-set-epoch", ("train.py", 7), "the same order")]
    run = json.loads(as_sarif(findings, "train.py"))["runs"][0]
    region = run["results"][0]["locations"][0]["physicalLocation"]
    assert region["artifactLocation"]["uri"] == "train.py" and region["region"] == {"startLine": 7}
    assert run["tool"]["driver"]["rules"][0]["id"] == run["results"][0]["ruleId"] == "no-set-epoch"


def test_script_that_crashes_is_reported_with_its_traceback(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nimport not_there\n")
    code, stdout, stderr = run_check(tmp_path)
    assert (code, stdout) == (2, "")
    assert "ModuleNotFoundError" in stderr and 'train.py", line 2' in stderr
    assert "  two\n" not in stderr  # what cannot be imported is not there on two processes either


def together(names):
    """The script with several bugs at once, and the rules that must find them."""
    bugs = [BY_NAME[name] for name in names]
    text = source_of(script_named(bugs[0].script))
    for bug in bugs:
        assert bug.script == bugs[0].script
        text = changed(text, bug.changes, bug.name)
    return script_named(bugs[0].script), text, {bug.finds for bug in bugs}


def test_finds_several_bugs_in_one_script_and_leaves_its_folder_alone(tmp_path):
    script, source, rules = together(TOGETHER[0])
    found, _ = check_source(tmp_path, source, script)
    if not hasattr(ProcessGroup, "register_pre_hook"):  # the check says so
        rules.discard("metric-of-one-rank")
    assert rules <= found
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=[pytest.mark.rare] * (names[0] in REPEATED), id=names[0])
        for names in TOGETHER[1:]
    ],
)
def test_finds(names, tmp_path):
    script, source, rules = together(names)
    found, _ = check_source(tmp_path, source, script)
    assert rules <= found


# The other correct scripts, of which `python -m check.tests.corpus` checks all, take too long here.
LEFT_TO_THE_CORPUS = {"within_epoch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=[pytest.mark.rare] * (number % 6 > 0), id=script.name)
        for number, script in enumerate(CORRECT)
        if script.name not in LEFT_TO_THE_CORPUS
    ],
)
def test_no_false_alarm(script, tmp_path):
    _, alarms = check_source(tmp_path, source_of(script), script)
    assert not alarms


@pytest.mark.slow
@pytest.mark.rare
def test_more_than_two_processes(tmp_path):
    """The shares of all ranks count, and the gradient is that of all their batches."""
    correct = script_named("tutorial").source()
    (tmp_path / "train.py").write_text(correct)
    code, stdout, stderr = run_check(tmp_path, "--processes", "3")
    assert code == 0 and "0 errors, 0 warnings" in stdout, stdout + stderr
    (tmp_path / "train.py").write_text(BY_NAME["loss divided by the world size"].source())
    code, stdout, _ = run_check(tmp_path, "--processes", "3", "--json", "-")
    (found,) = [f for f in json.loads(stdout)["findings"] if f["rule"] == "gradient-scale"]
    assert code == 1 and "0.333" in found["observed"]


TWO_DIMENSIONS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world_size = dist.get_world_size()
tensor_size = min(2, world_size)
sizes = (world_size // tensor_size, tensor_size)
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(128, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank())
loader = DataLoader(data, 8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.rare)])
def test_parts_of_a_model_are_no_replicas(processes, tmp_path):
    """Of four ranks, two hold a model together, and the pairs shard it between them."""
    rules, _, not_checked = found_in(tmp_path, TWO_DIMENSIONS, processes)
    assert rules == [] and "check diff" in not_checked


CONTEXT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):  # the outputs of this rank's positions, from the keys of all
        own = x.chunk(size, 1)[part]
        keys = torch.cat(all_gather(self.key(own)), 1)
        return torch.softmax(self.query(own) @ keys.transpose(1, 2), -1) @ keys


dist.init_process_group("gloo")
part, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 6, 8)
data = TensorDataset(inputs, inputs.roll(1, 1))
sampler = DistributedSampler(data, 1, 0)
loader = DataLoader(data, 8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y.chunk(size, 1)[part]).backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.rare
def test_ranks_with_parts_of_the_positions_read_the_same(tmp_path):
    rules, _, not_checked = found_in(tmp_path, CONTEXT)
    assert rules == [] and "check diff" in not_checked
    whole = CONTEXT.replace("x.chunk(size, 1)[part]", "x").replace("y.chunk(size, 1)[part]", "y")
    whole = whole.replace("torch.cat(all_gather(self.key(own)), 1)", "self.key(own)")
    assert "same-samples" in found_in(tmp_path, whole)[0]


NEEDS_TWO = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CIFAR10
from torchvision.transforms import ToTensor

sys.path.append("..")
from model import model
import helper

dist.init_device_mesh("cuda", (2,))  # creates the group, and refuses one process
assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
train_set = CIFAR10("nowhere", transform=ToTensor())
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, 16, sampler=sampler)
torch.jit.trace(model, torch.zeros(1, 3, 32, 32))  # as SummaryWriter.add_graph does
model = DistributedDataParallel(model.cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
dist.destroy_process_group()
"""


MOMENTUM = """
import torch
from torch.utils.data import DataLoader

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.BatchNorm1d(4)
        self.key = torch.nn.BatchNorm1d(4).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.key.weight.lerp_(self.query.weight, 0.1)
            target = self.key(x + 1)
        return (self.query(x) - 2 * target).square().mean()

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x in DataLoader(torch.randn(64, 4), 8, shuffle=True):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.rare
def test_batch_norm_of_a_momentum_encoder_is_not_frozen(tmp_path):
    (tmp_path / "train.py").write_text(MOMENTUM)
    assert run_check(tmp_path)[0] == 0
    follows = "            self.key.weight.lerp_(self.query.weight, 0.1)\n"
    (tmp_path / "train.py").write_text(MOMENTUM.replace(follows, ""))
    assert "[frozen-batchnorm-learns]" in run_check(tmp_path)[1]


@pytest.mark.slow
def test_needs_two_processes_data_and_the_folder_above(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(NEEDS_TWO)
    (tmp_path / "model.py").write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))\n"
    )
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("")
    options = ("--root", "..", "--fake-data", "--env", f"PYTHONPATH={tmp_path}/lib", "--json", "-")
    code, stdout, stderr = run_check(tmp_path / "scripts", *options)
    assert code == 1, stderr
    report = json.loads(stdout)
    found = [(finding["rule"], finding["file"]) for finding in report["findings"]]
    assert found == [("no-set-epoch", "scripts/train.py")]
    assert "several processes" in str(report["not_checked"])


FAILS_LATER = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x in torch.utils.data.DataLoader(torch.randn(32, 4), 8, shuffle=True):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        if epoch == 2:
            raise ValueError("after two epochs")
    torch.save(model.state_dict(), "last.pt") if epoch == 1 else None
"""


@pytest.mark.slow
@pytest.mark.rare
def test_failure_before_a_run_is_killed_is_said(tmp_path):
    assert "ValueError: after two epochs" in found_in(tmp_path, FAILS_LATER)[2]


OLDER_CLASS = """
import os
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = FullyShardedDataParallel(
    module=torch.nn.Linear(4, 1),
    device_id=torch.cuda.current_device(),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, 8, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.cuda()).float(), y.cuda()).backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.rare
def test_older_class_of_fsdp_runs_without_a_gpu(tmp_path):
    assert found_in(tmp_path, OLDER_CLASS)[0] == []


SPAWNS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(rank, world_size):
    if world_size > 1:
        address = "tcp://localhost:53917"
        dist.init_process_group("nccl", init_method=address, world_size=world_size, rank=rank)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).to(f"cuda:{rank}")
    if world_size > 1:
        model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 4, generator=generator)).mean().backward()
        optimizer.step()

if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    if world_size > 1:
        torch.multiprocessing.spawn(train, nprocs=world_size, args=(world_size,))
    else:
        train(0, 1)
"""


VALIDATES_WITHIN = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.arange(64.0).reshape(16, 4))
loader = DataLoader(data, 4, shuffle=True)
for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=1):
                model(x)
"""


@pytest.mark.slow
def test_order_of_a_validation_within_an_epoch_is_not_that_of_the_training(tmp_path):
    rules, _, _ = found_in(tmp_path, VALIDATES_WITHIN)
    assert "same-samples" in rules and "no-set-epoch" not in rules


@pytest.mark.slow
@pytest.mark.rare
def test_script_that_spawns_only_where_there_are_several_gpus(tmp_path):
    rules, _, not_checked = found_in(tmp_path, SPAWNS)
    assert rules == [] and "several ranks" not in not_checked
