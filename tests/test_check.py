"""tools.check: bugs in other people's scripts are found, and scripts without a bug pass."""

import json
import subprocess
import sys

import pytest

from tools.changes import changed
from tools.check.__main__ import parse, script_of
from tools.check.advice import ADVICE
from tools.check.corpus import own
from tools.check.corpus.__main__ import check
from tools.check.corpus.bugs import BUGS, CORRECT, SCRIPTS
from tools.check.findings import Finding
from tools.check.mirror import mirror
from tools.check.report import as_sarif
from tools.lessons import ROOT
from tools.verify.plants import PLANTS

# Rules that no bug of the corpus aims at: a test below has them, or they say what else went wrong.
NOT_PLANTED = {"fails-on-two", "hangs-on-two", "resume-fails", "written-by-every-rank"}
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
]


def run_check(folder, *options, arguments=()):
    """Check train.py of a folder as a user does. Returns the exit code, stdout and stderr."""
    command = [sys.executable, ROOT / "tools" / "check", *options, "--", "train.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout, done.stderr


def check_source(folder, source, script):
    """The rules that a check of this script reports, and those that are more than notes."""
    (folder / "train.py").write_text(source)
    options = ["--json", "-"]
    if script.resume_arguments:
        options.append(f"--resume-args={script.resume_arguments}")
    code, stdout, stderr = run_check(folder, *options, arguments=script.arguments)
    assert code in (0, 1), stderr
    found = json.loads(stdout)["findings"]
    alarms = {finding["rule"] for finding in found if finding["severity"] != "note"}
    assert code == (1 if alarms else 0)
    return {finding["rule"] for finding in found}, alarms


def script_named(name):
    return next(script for script in CORRECT if script.name == name)


def test_bugs_apply_and_all_rules_have_one():
    for bug in BUGS:
        compile(bug.source(), bug.name, "exec")
        assert bug.finds in ADVICE and set(bug.also) <= set(ADVICE), bug.name
    planted = {bug.finds for bug in BUGS} | {rule for bug in BUGS for rule in bug.also}
    assert set(ADVICE) - planted <= NOT_PLANTED


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
    text = (SCRIPTS / f"{bugs[0].script}.py").read_text()
    for bug in bugs:
        assert bug.script == bugs[0].script
        text = changed(text, bug.changes, bug.name)
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


@pytest.mark.slow
@pytest.mark.parametrize("script", CORRECT, ids=lambda script: script.name)
def test_no_false_alarm(script, tmp_path):
    _, alarms = check_source(tmp_path, (SCRIPTS / f"{script.name}.py").read_text(), script)
    assert not alarms


OWN = {each.name: each for each in own.own_checks()}


def test_own_bugs_are_all_planted_once(tmp_path):
    planted = [bug.name for each in OWN.values() for bug in each.bugs]
    assert sorted(planted) == sorted(bug.name for bug in PLANTS)
    assert set(own.FINDS) | set(own.UNSEEN) <= set(planted)
    assert set(own.FINDS.values()) <= set(ADVICE)
    for number, each in enumerate(OWN.values()):
        if len(each.bugs) > 1:  # each must find its line, which no other one has changed
            own.options_of(each, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp x2", "accum x2", "fsdp x2", "one_file ddp x2"])
def test_own_script_yields_no_alarm_and_is_checked(name):
    """SyncBatchNorm, seeds in each step, lists of micro-batches, keys of (epoch, index), next()."""
    row = own.row_of(OWN[f"images: {name}"], check)
    assert row["verdicts"] == {f"images: {name}": "ok"} and not row["not_checked"], row


@pytest.mark.slow
@pytest.mark.parametrize("names", [own.TOGETHER[0], own.TOGETHER[3]], ids=lambda names: names[0])
def test_finds_bugs_in_own_scripts(names):
    row = own.row_of(OWN[", ".join(names)], check)
    assert {own.FINDS[name] for name in names if name in own.FINDS} <= set(row["rules"]), row
