"""The check as a user meets it: commands, folders, interrupts, and scripts that misbehave."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from check.__main__ import main, parse, repository, script_file
from check.events import Rank, Run
from check.findings import Finding, NotChecked
from check.processes import INSIDE, CannotRun, Processes
from check.report import accepted, as_json, as_sarif, is_failure, text
from check.rules.output import observers
from check.scenarios import Options, _remedies, of_rank, stacks_of

FOLDER = Path(__file__).resolve().parents[1]
CHECK = [sys.executable, FOLDER]
TRAINS = """
import pathlib
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""


def project(folder, source, name="train.py"):
    """Write a script into a folder. Returns the folder."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(source)
    return folder


def check(folder, *arguments):
    """Check a script of a folder. Returns the exit code, stdout and stderr."""
    done = subprocess.run(
        [*CHECK, *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def test_script_of_another_folder_is_refused(tmp_path, monkeypatch, capsys):
    """It would run in its own folder, not in a copy."""
    project(tmp_path, TRAINS)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(SystemExit):
        parse(["--", "../train.py"])
    assert "project's folder" in capsys.readouterr().err


def test_absolute_path_means_the_copy(tmp_path, monkeypatch):
    project(tmp_path, TRAINS, "sub/train.py")
    monkeypatch.chdir(tmp_path)
    args = parse(["--", str(tmp_path / "sub" / "train.py"), "--lr", "1"])
    assert args.command == ["sub/train.py", "--lr", "1"]


def test_file_of_a_module(tmp_path, monkeypatch):
    project(tmp_path, "", "package/train.py")
    monkeypatch.chdir(tmp_path)
    assert script_file(["train.py", "--x"]) == "train.py"
    assert script_file(["-m", "package.train"]) == "package/train.py"
    assert script_file(["-m", "package"]) == "package/__main__.py"


def test_sarif_has_what_the_standard_requires():
    """SARIF 2.1.0: 3.13 (log), 3.14 (run), 3.18 to 3.19 (tool), 3.27 (result), 3.49 (rule)."""
    found = [
        Finding("same-samples", ("a folder/train.py", 3), "x"),
        Finding("fails-on-two", None, "y"),
    ]
    gaps = [NotChecked("resuming", "no checkpoint")]
    log = json.loads(as_sarif(found, "train.py", not_checked=gaps))
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    assert run["tool"]["driver"]["name"] == "check-training"
    (invocation,) = run["invocations"]
    (notification,) = invocation["toolExecutionNotifications"]  # 3.20
    assert "resuming" in notification["message"]["text"] and invocation["executionSuccessful"]
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert len(rules) == len(run["tool"]["driver"]["rules"])
    for result, uri in zip(run["results"], ("a%20folder/train.py", "train.py"), strict=True):
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"] and result["ruleId"] in rules
        assert rules[result["ruleId"]]["help"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == uri and place["region"]["startLine"] >= 1


def test_files_of_a_project_in_a_repository_are_named_from_its_root(tmp_path):
    """As code hosts expect, wherever in the repository the check was started."""
    (tmp_path / ".git").mkdir()
    folder = project(tmp_path / "training" / "vision", TRAINS)
    prefix = os.path.relpath(folder, repository(folder))
    found = [Finding("same-samples", ("train.py", 3), "x"), Finding("fails-on-two", None, "y")]
    results = json.loads(as_sarif(found, "train.py", prefix))["runs"][0]["results"]
    places = [result["locations"][0]["physicalLocation"] for result in results]
    uris = {place["artifactLocation"]["uri"] for place in places}
    assert uris == {"training/vision/train.py"}


def main_in(folder, monkeypatch, *arguments):
    """The exit code of a check, in this process."""
    project(folder, TRAINS)
    monkeypatch.chdir(folder)
    return main([*arguments, "--", "train.py"])


def old_results(folder):
    """The options for files of results, which an earlier check has left there."""
    for name in ("out.json", "out.sarif"):
        (folder / name).write_text("of an earlier check")
    return ["--json", str(folder / "out.json"), "--sarif", str(folder / "out.sarif")]


def test_mistake_of_the_check_is_no_finding(tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise KeyError("of the check")

    monkeypatch.setattr("check.__main__.run_all", fail)
    assert main_in(tmp_path, monkeypatch, *old_results(tmp_path)) == 2
    assert "KeyError: 'of the check'" in capsys.readouterr().err
    assert "of the check" in json.loads((tmp_path / "out.json").read_text())["error"]


def test_check_that_fails_leaves_no_old_results(tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise CannotRun("The script failed")

    monkeypatch.setattr("check.__main__.run_all", fail)
    assert main_in(tmp_path, monkeypatch, *old_results(tmp_path)) == 2
    assert json.loads((tmp_path / "out.json").read_text()) == {"error": "The script failed"}
    assert not (tmp_path / "out.sarif").exists()
    assert main_in(tmp_path, monkeypatch, "--json", "-") == 2
    assert json.loads(capsys.readouterr().out) == {"error": "The script failed"}


def test_failure_leaves_the_baseline_as_it_is(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise CannotRun("The script failed")

    monkeypatch.setattr("check.__main__.run_all", fail)
    known = tmp_path / "known.json"
    known.write_text('{"findings": []}')
    options = ("--json", str(known), "--baseline", str(known))
    assert main_in(tmp_path, monkeypatch, *options) == 2
    assert json.loads(known.read_text()) == {"findings": []}


def test_fail_on_decides_what_makes_the_exit_code_1(tmp_path, monkeypatch):
    note, warning = Finding("no-no-grad", None, "x"), Finding("no-set-epoch", None, "y")
    gap = NotChecked("resuming", "no checkpoint")
    project(tmp_path, TRAINS)
    monkeypatch.chdir(tmp_path)
    for options, failing in {
        (): [warning],
        ("--fail-on", "error"): [],
        ("--fail-on=note,not-checked",): [note, gap],
    }.items():
        kinds = parse([*options, "--", "train.py"]).fail_on
        for item in (note, warning, gap):
            found = [[item], []] if isinstance(item, Finding) else [[], [item]]
            assert is_failure(*found, kinds) == (item in failing)
    with pytest.raises(SystemExit):
        parse(["--fail-on", "errors", "--", "train.py"])


def test_python_without_torch_is_one_line(tmp_path):
    """-S leaves out what is installed."""
    command = [sys.executable, "-S", *CHECK[1:], "--", "train.py"]
    done = subprocess.run(
        command, cwd=project(tmp_path, TRAINS), capture_output=True, text=True, env={}
    )
    first, second = done.stderr.splitlines()
    assert done.returncode == 2 and first == "Checking train.py"
    assert "cannot import torch" in second and "the script" in second


def test_remedies_for_data_that_is_missing_and_folders_that_are_not_writable():
    def remedies(output, **options):
        return " ".join(_remedies(output, Options([], Path(), **options)))

    no_data = "RuntimeError: Dataset not found. You can use download=True to download it"
    for output in (no_data, "<urlopen error [Errno -3] Temporary failure in name resolution>"):
        assert "--fake-data" in remedies(output)
        assert remedies(output, fake_data={}) == ""
    denied = remedies("PermissionError: [Errno 13] Permission denied: '/scratch/last.pt'")
    for option in ("--writable", "--copy-limit", "--hide"):
        assert option in denied
    assert "--device cpu" in remedies("CUDA error: not initialized")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=(pytest.mark.slow, pytest.mark.rare)),
        pytest.param(signal.SIGHUP, marks=(pytest.mark.slow, pytest.mark.rare)),
    ],
)
def test_interrupted_check_leaves_nothing_behind(number, tmp_path):
    """Neither a process, one that has left its session included, nor a folder."""
    source = (
        "import os, signal, subprocess, sys, time, torch\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "daemon = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(f'{os.getpid()} {daemon.pid} ')\n"
        "time.sleep(600)\n"
    )
    folder, pids = project(tmp_path / "a project", source), tmp_path / "pids"
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    # A shell lets what it starts in the background ignore SIGINT, which would be inherited.
    process = subprocess.Popen(
        [*CHECK, "--writable", tmp_path, "--", "train.py", pids],
        cwd=folder,
        env=environment,
        preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (2, number)],
    )
    try:
        end = time.monotonic() + 300
        while not (pids.exists() and pids.read_text().endswith(" ")) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(120) == 128 + number
    finally:
        process.kill()
    for pid in pids.read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    # PyTorch makes the folder of its compiler for any optimizer.
    assert [name for name in left if not name.startswith("torchinductor_")] == []


def test_signal_does_not_reach_a_process_that_has_the_number_of_one_that_ended(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / f"{other.pid}.stacks").touch()
        assert stacks_of(tmp_path) == {other.pid: ""}
        assert other.poll() is None
        other.kill()


ABOUT_ITSELF = """
import __main__, os, random, sys
import numpy
print(__name__, os.path.basename(__main__.__file__), sys.argv[1:], sys.path[0] == os.getcwd())
print(hash("a name"), random.random(), numpy.random.random(), os.getsid(0) == os.getpid())
if sys.argv[1] == "fail":
    sys.exit(3)
"""


def test_forks_are_like_processes_of_their_own(tmp_path):
    """As `python about.py` and `python -m about` would be, with random states of their own."""
    (tmp_path / "about.py").write_text(ABOUT_ITSELF)
    environment = dict(os.environ) | {"PYTHONPATH": str(INSIDE)}
    plan = {"exact": None, "kill_step": None, "limit_data": 0, "run": "one", "device": "cpu"}
    plan |= {"root": str(tmp_path), "folder": str(tmp_path), "joins_statistics": False}
    environment["TOOLS_CHECK_PLAN"] = json.dumps(plan | {"fake_data": None})
    commands = [["about.py", "fail"], ["about.py", "end"], ["-m", "about", "end"]]
    with Processes() as processes:
        forks = []
        for number, command in enumerate(commands):
            log = tmp_path / f"{number}.txt"
            forks.append(processes.start(number, command, tmp_path, environment, log))
        while any(fork.poll() is None for fork in forks):
            time.sleep(0.05)
    assert [fork.poll() for fork in forks] == [3, 0, 0]
    lines = [(tmp_path / f"{number}.txt").read_text().splitlines() for number in range(3)]
    assert [line[0] for line in lines] == [
        "__main__ about.py ['fail'] True",
        "__main__ about.py ['end'] True",
        "__main__ about.py ['end'] True",
    ]
    hashes, *draws, sessions = zip(*(line[1].split() for line in lines), strict=True)
    assert hashes[0] != hashes[1]  # ranks 0 and 1
    assert all(len(set(each)) == 3 for each in draws) and set(sessions) == {"True"}


def output(limit, source, folder, device="cpu"):
    """What a script prints with --limit-data."""
    plan = {"folder": str(folder), "root": str(folder), "run": "one", "limit_data": limit}
    plan |= {"device": device, "exact": None, "joins_statistics": False}
    environment = {"TOOLS_CHECK_PLAN": json.dumps(plan), "PYTHONPATH": str(INSIDE)}
    command = [sys.executable, "-c", f"import torch\nfrom torch.utils.data import *\n{source}"]
    return subprocess.check_output(command, env=os.environ | environment, text=True)


def test_batches_of_two_ranks_are_joined(tmp_path):
    """Tensors, arrays, and lists with an entry per sample; what is one per batch stays."""
    source = """
import numpy
from check_inside.exact import _join
ranks = [
    [{"x": torch.tensor(x), "y": numpy.array(x), "names": [str(i) for i in x], "scale": 2}, pair]
    for x, pair in (([1, 2, 3], (numpy.zeros(3), numpy.ones(3))), ([4], (numpy.ones(1),) * 2))
]
fields, pair = _join([3, 1], ranks)
print(fields["x"].tolist(), fields["y"].tolist(), fields["names"], fields["scale"])
print([array.tolist() for array in pair])
"""
    lines = output(0, source, tmp_path).splitlines()
    assert lines[0] == "[1, 2, 3, 4] [1, 2, 3, 4] ['1', '2', '3', '4'] 2"
    assert lines[1] == "[[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]"


def test_checksum_leaves_the_storage_resizable(tmp_path):
    """FSDP frees and allocates the storage of its parameters in each step."""
    source = """
from check_inside.record import checksum
tensor = torch.arange(4.0)
print(checksum(tensor) == checksum(tensor.clone()) != checksum(tensor + 1))
print(tensor.untyped_storage().resizable())
column = torch.arange(8.0).as_strided((1,), (5,))  # is contiguous: there is no next element
print(checksum(column) == checksum(torch.zeros(1)))
from torch.distributed._functional_collectives import AsyncCollectiveTensor
print(checksum(AsyncCollectiveTensor(tensor)) == checksum(tensor))  # as the outputs of a mesh
"""
    assert output(0, source, tmp_path).split() == ["True"] * 4


def test_gradients_are_seen_when_a_closure_has_computed_them(tmp_path):
    source = """
from check_inside.record import once_computed
said = []
for args, kwargs in ((("optimizer", lambda: said.append("closure")), {}), (("optimizer",), {})):
    changed = once_computed(args, kwargs, lambda: said.append("seen"))
    if changed:
        changed[0][1](), changed[0][1]()  # as LBFGS does
print(*said)
"""
    assert output(0, source, tmp_path).split() == ["closure", "seen", "closure", "seen"]


def test_mean_of_integers_as_with_nccl(tmp_path):
    source = """
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
count = torch.tensor([3])
dist.all_reduce(count, op=dist.ReduceOp.AVG)
print(count.item())
"""
    assert output(0, source, tmp_path, device="mapped") == "3\n"


def test_file_for_each_network_is_a_checkpoint(tmp_path):
    source = """
from check_inside.files import _holds_model
from check_inside.state import STATE
for size in (3, 4, 5):
    model = torch.nn.Linear(2, size)
    STATE.models(model)
    STATE.parameters += model.parameters()
    STATE.parameter_ids |= {id(p) for p in model.parameters()}
print(_holds_model(model.state_dict()), _holds_model([torch.zeros(9)]))
"""
    assert output(0, source, tmp_path).split() == ["True", "False"]


def test_mode_of_a_wrapper_is_that_of_the_model(tmp_path):
    """Lightning changes the mode of its module, not that of DistributedDataParallel around it."""
    source = """
from check_inside.state import STATE
from check_inside.training import _root_forward
model = torch.nn.DataParallel(torch.nn.Linear(1, 1)).eval()
model.module.train()
_root_forward(model, ())
print(STATE.forwards[-1]["training"])
"""
    assert output(0, source, tmp_path).strip() == "True"


def test_settings_of_an_optimizer_are_all_its_numbers(tmp_path):
    source = """
from check_inside.compare import _settings
adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], betas=(0.9, 0.95), amsgrad=True)
settings = dict(_settings(adam.param_groups[0]))
print(*(settings[name] for name in ("lr", "betas[0]", "betas[1]", "amsgrad", "maximize")))
"""
    assert output(0, source, tmp_path).split() == ["0.001", "0.9", "0.95", "1.0", "0.0"]


def numbers(limit, source, folder):
    return [int(word) for word in output(limit, source, folder).split()]


@pytest.mark.slow
def test_limited_lengths_agree(tmp_path):
    source = """
class Mixin:
    def __len__(self): return 500
class Own(Mixin, Dataset):
    def __getitem__(self, index): return index
own, tensors = Own(), TensorDataset(torch.zeros(100, 2))
print(len(own), len(tensors), len(DistributedSampler(own, 2, 0)), len(DataLoader(own, 8)))
print(*map(len, random_split(own, [450, 50])), *map(len, random_split(own, [0.9, 0.1])))
print(len(Subset(own, range(400))), own[499])
"""
    assert numbers(33, source, tmp_path) == [33, 33, 17, 5, 29, 4, 30, 3, 33, 499]
    assert numbers(0, source, tmp_path)[:4] == [500, 100, 250, 63]


def test_what_is_not_limited_is_said(tmp_path):
    source = """
from types import SimpleNamespace as Epoch
from check_inside.lengths import why_not_limited
tensors = TensorDataset(torch.zeros(100))
for dataset, drawn in ([0], 100), (tensors, 100), (tensors, 33):
    print(why_not_limited(Epoch(dataset=dataset, drawn=range(drawn), is_iterable=False)))
"""
    said = output(33, source, tmp_path).splitlines()
    assert "list" in said[0] and "torch.utils.data.Dataset" in said[0]
    assert "TensorDataset" in said[1] and "yields 100 " in said[1]
    assert said[2] == "None"


def test_folder_runs_without_the_rest_of_the_repository(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "alone" / "check", ignore=shutil.ignore_patterns("tests"))
    folder = project(tmp_path / "project", RANKS + TRAINS)
    command = [sys.executable, tmp_path / "alone" / "check", "--json", "-", "--", "train.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    found = {finding["rule"] for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and "models-start-differently" in found, done.stderr


@pytest.mark.slow
@pytest.mark.rare
def test_limited_data_shows_a_hang_at_the_uneven_end(tmp_path):
    """The shares of the first steps are even; 33 samples on two ranks make 3 and 2 batches."""
    source = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(6400, 4), torch.randn(6400, 1))
share = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    for inputs, targets in DataLoader(share, 8, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
"""
    folder = project(tmp_path, source)
    code, stdout, _ = check(folder, "--json", "-", "--", "train.py")
    assert "uneven-batches" not in {found["rule"] for found in json.loads(stdout)["findings"]}
    code, stdout, _ = check(folder, "--limit-data", "33", "--json", "-", "--", "train.py")
    assert code == 1
    assert "uneven-batches" in {found["rule"] for found in json.loads(stdout)["findings"]}


@pytest.mark.slow
@pytest.mark.rare
def test_module_in_a_folder_with_a_space(tmp_path):
    source = TRAINS + "pathlib.Path(__file__).with_name('written').touch()\n"
    folder = project(tmp_path / "a folder", source, "package/train.py")
    code, stdout, stderr = check(folder, "--sarif", "out.sarif", "--", "-m", "package.train")
    assert code == 0, stdout + stderr
    assert "several ranks: " in stdout and "no process group" in stdout
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert names == ["out.sarif", "package", "package/train.py"]


@pytest.mark.slow
@pytest.mark.rare
def test_rank_that_fails_is_quoted(tmp_path):
    source = RANKS + "if dist.get_rank() == 1: raise Exception('of rank one')\n" + TRAINS
    source += "dist.barrier()\n"
    code, stdout, _ = check(project(tmp_path, source), "--", "train.py")
    assert code == 1 and "[fails-on-two]" in stdout and "of rank one" in stdout
    assert "train.py:4: error" in stdout


@pytest.mark.slow
def test_failure_of_a_script_that_refuses_one_process_is_that_on_two(tmp_path):
    source = RANKS + "if dist.get_world_size() == 1: raise SystemExit(0)\nraise KeyError('mine')\n"
    code, _, stderr = check(project(tmp_path, source), "--", "train.py")
    assert code == 2 and "two processes" in stderr and "KeyError: 'mine'" in stderr


WRITTEN_FOR_CUDA = """
import os
os.environ["RANK"] = "0"
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
x = torch.ones(4, device=device)
own = torch.zeros(4)
generator = torch.Generator(device="cuda").manual_seed(1)
for scope in (torch.autocast("cuda"), torch.cuda.amp.autocast()):  # by default float16 on a GPU
    with scope:
        assert torch.get_autocast_dtype("cuda") == torch.float16
        torch.nn.functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)).numpy()
with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
    assert torch.nn.functional.linear(x, own).dtype == torch.bfloat16
torch.cuda.amp.GradScaler().scale(torch.ones(()))
for each in (generator, torch.default_generator):
    assert isinstance(each, torch.Generator)
torch.randn(3, generator=generator, device=device)
assert torch.cuda.FloatTensor(2, 3).fill_(1).shape == (2, 3)
assert x.type(torch.cuda.LongTensor).dtype == torch.int64
assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
x.record_stream(torch.cuda.current_stream())
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record(), end.record()
1 / begin.elapsed_time(end)
assert x.is_cuda and (x + 1).device == device and x.get_device() == 0 and "cuda" in x.type()
assert not own.is_cuda and own.device.type == "cpu"
kernel = "of a GPU" if x.is_cuda or x.device.type == "cuda" else "of a CPU"
assert kernel == "of a CPU"
if not x.is_cuda:
    raise ValueError("a tensor on a GPU is expected")
torch.cuda.memory.mem_get_info()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
    x.sum()
print("reached the end")
"""


def test_what_is_written_for_cuda_runs_on_a_cpu(tmp_path):
    path = tmp_path / "train.py"  # a file: only the script's own code sees a GPU
    path.write_text("import torch\n" + WRITTEN_FOR_CUDA)
    plan = {"folder": str(tmp_path), "root": str(tmp_path), "run": "one", "limit_data": 0}
    plan |= {"device": "mapped", "exact": None, "joins_statistics": False, "devices": 1}
    environment = {"TOOLS_CHECK_PLAN": json.dumps(plan), "PYTHONPATH": str(INSIDE)}
    done = subprocess.run(
        [sys.executable, path], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "reached the end" in done.stdout, done.stderr[-2000:]


def test_arguments_that_a_launcher_gives_to_each_rank(tmp_path, monkeypatch):
    project(tmp_path, TRAINS)
    monkeypatch.chdir(tmp_path)
    launch = ["python", "-m", "torch.distributed.launch", "--nproc_per_node=2"]
    assert parse(["--", *launch, "train.py"]).rank_args == ["--local-rank={local_rank}"]
    args = parse(["--", *launch, "--use-env", "train.py", "--lr", "1"])
    assert (args.command, args.rank_args) == (["train.py", "--lr", "1"], [])
    args = parse(["--rank-args=--rank {rank} --size={world_size}", "--", "train.py"])
    assert of_rank(args.rank_args, 1, 2) == ["--rank", "1", "--size=2"]
    (hint,) = _remedies("error: unrecognized arguments: --local-rank=0", Options([], Path()))
    assert "--rank-args" in hint


def test_mistake_of_an_observer_does_not_end_the_script(tmp_path):
    source = """
from check_inside import record
@record.guarded
def observe():
    raise ValueError("of an observer")
print(observe(), "goes on")
"""
    assert output(0, source, tmp_path).split() == ["None", "goes", "on"]
    (path,) = tmp_path.glob("*.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    (event,) = (event for event in events if event["kind"] == "observer_failed")
    run = Run("one", tmp_path, tmp_path, 0, "", 0.0)
    run.ranks = [Rank(0, 1, [event])]
    (item,) = observers(SimpleNamespace(runs={"one": run}))
    assert "observe" in item.why and "of an observer" in item.why


RAISES = """
import torch

def train(rank):
    torch.zeros(1) @ torch.zeros(2)

try:
    torch.multiprocessing.start_processes(train, nprocs=1, start_method="fork")
except Exception:
    raise Exception("of\\nthe parent")
"""


def test_exceptions_are_recorded_where_they_are_raised(tmp_path):
    """Also in a process that mp.spawn starts, where PyTorch catches them."""
    folder = project(tmp_path, RAISES)
    plan = {"folder": str(tmp_path), "root": str(tmp_path), "run": "one", "limit_data": 0}
    plan |= {"device": "cpu", "exact": None, "joins_statistics": False}
    environment = os.environ | {"TOOLS_CHECK_PLAN": json.dumps(plan), "PYTHONPATH": str(INSIDE)}
    subprocess.run([sys.executable, folder / "train.py"], env=environment, capture_output=True)
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    events = [event for event in map(json.loads, lines) if event["kind"] == "exception"]
    child, parent = sorted(events, key=lambda event: event["time"])
    assert child["error"].startswith("RuntimeError") and child["place"] == ["train.py", 5]
    assert parent["error"] == "Exception: of the parent" and parent["place"] == ["train.py", 10]


def test_places_are_in_the_folder_of_the_script_if_possible(tmp_path):
    """Not in a library that PYTHONPATH names."""
    library = "from check_inside.record import place\n\ndef there(): return place()\n"
    project(tmp_path, library, "other.py")
    script = project(tmp_path / "own", "import torch, other\nprint(other.there())\n")
    plan = {"folder": str(script), "root": str(script), "run": "one", "limit_data": 0}
    plan |= {"device": "cpu", "exact": None, "joins_statistics": False}
    paths = {"TOOLS_CHECK_PLAN": json.dumps(plan), "PYTHONPATH": f"{INSIDE}{os.pathsep}{tmp_path}"}
    command = [sys.executable, script / "train.py"]
    said = subprocess.check_output(command, env=os.environ | paths, text=True)
    assert said.split() == ["['train.py',", "2]"]


def test_accepted_findings_are_those_of_a_line_wherever_it_is_now(tmp_path):
    folder = project(tmp_path, "first\nfor batch in loader:\n    step()\n")
    checked = SimpleNamespace(options=SimpleNamespace(source=folder, epochs=2, steps=4), runs={})
    found = [Finding("no-set-epoch", ("train.py", 2), "x"), Finding("fails-on-two", None, "y")]
    baseline = json.loads(as_json(found, [], checked))
    (folder / "train.py").write_text("first\nsecond\nfor batch in loader:\n    step()\n")
    now = [Finding("no-set-epoch", ("train.py", 3), "other numbers"), found[1]]
    assert accepted(now, baseline, folder) == now
    others = [Finding("no-set-epoch", ("train.py", 4), "x"), Finding("same-samples", None, "y")]
    assert accepted(others, baseline, folder) == []
    report = text(others[:1], [], checked, now)
    assert "2 more are accepted" in report and "[no-set-epoch]" in report
    results = json.loads(as_sarif(others, "train.py", known=now))["runs"][0]["results"]
    suppressed = {(r["ruleId"], "suppressions" in r) for r in results}
    assert ("fails-on-two", True) in suppressed and ("same-samples", False) in suppressed


def test_notes_are_counted_and_shown_on_demand(tmp_path):
    checked = SimpleNamespace(options=SimpleNamespace(epochs=2, steps=4), runs={})
    found = [Finding("printed-by-every-rank", None, "x"), Finding("same-samples", None, "y")]
    report, whole = (text(found, [], checked, with_notes=shown) for shown in (False, True))
    assert "[printed-by-every-rank]" not in report and "1 note (--notes" in report
    assert "[printed-by-every-rank]" in whole and "--notes" not in whole
    assert "[same-samples]" in report and "[same-samples]" in whole


def test_baseline_that_is_no_report_is_one_line(tmp_path, monkeypatch, capsys):
    project(tmp_path, TRAINS)
    monkeypatch.chdir(tmp_path)
    for content in ("{}", "no json", '{"findings": [{"rule": "same-samples"}]}'):
        (tmp_path / "old.json").write_text(content)
        with pytest.raises(SystemExit):
            parse(["--baseline", "old.json", "--", "train.py"])
        assert "--baseline old.json" in capsys.readouterr().err


@pytest.mark.slow
def test_only_findings_that_are_new_make_a_check_fail(tmp_path):
    source = TRAINS.replace("    optimizer.zero_grad()\n", "") + RANKS
    folder = project(tmp_path, source)
    assert check(folder, "--json", "known.json", "--", "train.py")[0] == 1
    code, stdout, _ = check(folder, "--baseline", "known.json", "--", "train.py")
    assert code == 0 and "by the baseline" in stdout


@pytest.mark.slow
@pytest.mark.rare
def test_modules_are_those_of_the_copy(tmp_path):
    """Whatever PYTHONPATH names: what is found there has a place in the folder."""
    training = TRAINS.replace("    optimizer.zero_grad()\n", "")
    project(tmp_path, training, "lib/training.py")
    project(tmp_path, "import training\n")
    for path in (".", "lib", str(tmp_path / "lib")):
        options = ("--env", f"PYTHONPATH={path}{os.pathsep}lib", "--json", "-")
        stdout = check(tmp_path, *options, "--", "train.py")[1]
        files = {found["file"] for found in json.loads(stdout)["findings"]}
        assert files == {"lib/training.py"}


@pytest.mark.slow
@pytest.mark.rare
def test_ranks_meet_on_this_machine_whatever_address_the_script_names(tmp_path):
    """A script for a cluster need not be changed."""
    source = "import os\nos.environ['MASTER_ADDR'] = '192.0.2.7'\n" + RANKS
    source += "import torch\ntorch.manual_seed(0)\n" + TRAINS
    code, stdout, stderr = check(project(tmp_path, source), "--json", "-", "--", "train.py")
    found = {finding["rule"] for finding in json.loads(stdout)["findings"]}
    assert code == 1 and found & {"gradients-not-averaged", "same-samples"}, stdout + stderr


def test_addresses_of_other_machines_become_that_of_this_one(tmp_path):
    source = """
from check_inside.groups import _here
print(*map(_here, ["tcp://10.0.0.7:29500", "tcp://[2001:db8::1]:29500", "env://", None]))
from check_inside.record import PLAN
PLAN["port"] = 5
print(*map(_here, ["tcp://localhost:54321", "tcp://localhost:54321", "tcp://node:54322?x=1"]))
"""
    said = output(0, source, tmp_path).split()
    assert said[:4] == ["tcp://127.0.0.1:29500", "tcp://127.0.0.1:29500", "env://", "None"]
    here = "tcp://127.0.0.1:"
    assert said[4:] == [f"{here}5", f"{here}5", f"{here}54322?x=1"]  # of a second group


@pytest.mark.slow
def test_ranks_that_are_started_by_hand_meet_where_the_script_says(tmp_path):
    """There is no agent of torchrun, whose store would be asked for at that port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = (
        "import os, sys\n"
        "import torch, torch.distributed as dist\n"
        f"os.environ['MASTER_PORT'] = '{port}'\n"
        "rank, size = map(int, sys.argv[1:])\n"
        "dist.init_process_group('gloo', rank=rank, world_size=size)\n"
        "torch.manual_seed(0)\n"
    )
    options = ("--rank-args={rank} {world_size}", "--json", "-", "--timeout", "100")
    code, stdout, stderr = check(project(tmp_path, source + TRAINS), *options, "--", "train.py")
    found = {finding["rule"] for finding in json.loads(stdout)["findings"]}
    assert code == 1 and found & {"gradients-not-averaged", "same-samples"}, stdout + stderr
