"""tools.check: bugs in other people's scripts are found, and scripts without a bug pass."""

import json
import subprocess
import sys

import pytest

from tools.check.__main__ import parse, script_of
from tools.check.advice import ADVICE
from tools.check.corpus import __main__ as corpus
from tools.check.corpus.bugs import BUGS, CORRECT
from tools.check.corpus.page import page, verdict
from tools.check.findings import Finding
from tools.check.mirror import mirror
from tools.check.report import as_sarif
from tools.lessons import ROOT

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
    ["loss divided by the world size", "model lost", "no zero_grad"],
    ["finetune: frozen BatchNorm learns", "finetune: writers", "finetune: validation augmented"],
    ["amp: clipped before unscale", "amp: scaler lost", "amp: padding counted"],
    ["by hand: seed per rank"],
    ["by hand: parameters of a different model"],
    ["stream: mean of means"],
    ["collective on rank 0"],
    ["spawn: no sampler", "spawn: BatchNorm per rank", "spawn: in place"],
    ["windows: same seed", "windows: iteration lost"],
    ["accelerate: loss not divided", "accelerate: repeated samples counted"],
    ["detection: optimizer lost", "detection: in place", "detection: results of one rank"],
    ["contrastive: gradients of the own rank", "contrastive: optimizer lost"],
    ["imbalanced: scaler lost", "imbalanced: stays in evaluation mode", "imbalanced: same draws"],
    ["lora: mean of means", "lora: position lost"],
]


def run_check(folder, *options, arguments=("train.py",)):
    """Check train.py of a folder as a user does. Returns the exit code, stdout and stderr."""
    command = [sys.executable, ROOT / "tools" / "check", *options, "--", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout, done.stderr


def check_source(folder, source, script):
    """The rules that a check of this script reports, and those that are more than notes."""
    (folder / "train.py").write_text(source)
    options = ["--json", "-"]
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


def test_page_counts_what_was_found():
    """One bug that is found, one that is missed, and a correct script with a false alarm."""
    script = script_named("tutorial")
    found, missed = BY_NAME["no set_epoch"], BY_NAME["no all_reduce"]

    def result(*rules):
        findings = [[rule, 1, "observed"] for rule in rules]
        return {"found": findings, "not_checked": [], "seconds": 9.0}

    rows = [
        (script.name, script, None, result("not-shuffled")),
        (found.name, script, found, result(found.finds)),
        (missed.name, script, missed, result()),
        ("finetune", script_named("finetune"), None, {"skipped": "tensorboard"}),
    ]
    text = page(rows, ["torch 0"])
    assert [verdict(*row) for row in rows] == [
        "false alarm: not-shuffled",
        "ok",
        "missed metric-of-one-rank",
        "not run",
    ]
    assert "| recall | 1 of 2 (50 %) bugs" in text
    assert "| precision | 1 of 2 (50 %) errors" in text
    assert "| `not-shuffled` | warning | none is planted | 1 |" in text
    assert "| not run | 1 of 4 |" in text


def test_corpus_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    checked = []

    def measure(source, script):
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


def test_pages_of_traps_exist():
    page = (ROOT / "docs" / "traps.md").read_text()
    for advice in ADVICE.values():
        assert not advice.trap or f"\n## {advice.trap}\n" in page, advice.trap


@pytest.mark.parametrize(
    "command, script",
    [
        ("train.py --lr 1", "train.py --lr 1"),
        ("python train.py", "train.py"),
        ("torchrun --nproc_per_node=8 --standalone train.py --x", "train.py --x"),
        ("torchrun --nproc_per_node 8 train.py", "train.py"),
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
    assert "there is no file no_such.py" in capsys.readouterr().err


def test_mirror_leaves_the_original_alone(tmp_path):
    source = tmp_path / "source"
    (source / ".git").mkdir(parents=True)
    (source / "package").mkdir()
    (source / "package" / "train.py").write_text("pass")
    (source / "last.pt").write_text("weights of a real run")
    (source / "large.bin").write_bytes(bytes(6 << 20))
    mirror(source, tmp_path / "copy", ["*.pt"])
    names = {str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*")}
    assert names == {"package", "package/train.py", "large.bin"}
    assert (tmp_path / "copy" / "large.bin").is_symlink()


def test_sarif_has_rules_and_places():
    findings = [Finding("no-set-epoch", ("train.py", 7), "the same order")]
    run = json.loads(as_sarif(findings, "train.py"))["runs"][0]
    region = run["results"][0]["locations"][0]["physicalLocation"]
    assert region == {"artifactLocation": {"uri": "train.py"}, "region": {"startLine": 7}}
    assert run["tool"]["driver"]["rules"][0]["id"] == run["results"][0]["ruleId"] == "no-set-epoch"


def test_script_that_crashes_is_reported_with_its_traceback(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nraise KeyError('a mistake of its own')\n")
    code, stdout, stderr = run_check(tmp_path)
    assert (code, stdout) == (2, "")
    assert "a mistake of its own" in stderr and 'train.py", line 2' in stderr


def together(names):
    """The script with several bugs at once, and the rules that must find them."""
    bugs = [BY_NAME[name] for name in names]
    text = source_of(script_named(bugs[0].script))
    for bug in bugs:
        assert bug.script == bugs[0].script
        for old, new in bug.changes:
            assert text.count(old) == 1, (bug.name, old)
            text = text.replace(old, new)
    return script_named(bugs[0].script), text, {bug.finds for bug in bugs}


def test_finds_several_bugs_in_one_script_and_leaves_its_folder_alone(tmp_path):
    script, source, rules = together(TOGETHER[0])
    found, _ = check_source(tmp_path, source, script)
    assert rules <= found
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER[1:], ids=lambda names: names[0])
def test_finds(names, tmp_path):
    script, source, rules = together(names)
    found, _ = check_source(tmp_path, source, script)
    assert rules <= found


# The other correct scripts, of which `python -m tools.check.corpus` checks all, take too long here.
LEFT_TO_THE_CORPUS = {"contrastive", "fabric_loop", "hf_trainer", "lbfgs", "pipeline", "reinforce"}
LEFT_TO_THE_CORPUS |= {"tensor_parallel", "timm_like", "wgan", "within_epoch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [script for script in CORRECT if script.name not in LEFT_TO_THE_CORPUS],
    ids=lambda script: script.name,
)
def test_no_false_alarm(script, tmp_path):
    _, alarms = check_source(tmp_path, source_of(script), script)
    assert not alarms
