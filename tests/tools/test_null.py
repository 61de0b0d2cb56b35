"""tools.null: what the null device does, refuses and counts."""

import json
import runpy
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from tools.lib.ladder import ROOT
from tools.lib.update import RECORD
from tools.null import report
from tools.null.__main__ import INSIDE
from tools.null.build import generated

# Each writes what it has seen into a file, as JSON.
MEMORY = """
import json, sys, torch
seen = {"devices": torch.cuda.device_count(), "name": torch.cuda.get_device_name(1)}
numbers = torch.arange(5.0).cuda()
seen["moved"] = numbers.cpu().tolist()
seen["computed"] = (numbers + 1).tolist()
seen["total"] = torch.cuda.mem_get_info()[1]
del numbers
torch.cuda.reset_peak_memory_stats()
weights = torch.empty(2**28, device="cuda")
seen["peak"] = torch.cuda.max_memory_allocated()
try:
    torch.empty(2**29, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    seen["error"] = str(error)
torch.empty(2**29, device="cuda:1")  # a device of its own
try:
    torch.zeros(2, device="cuda:0") + torch.zeros(2, device="cuda:1")
except RuntimeError as error:
    seen["mixed"] = str(error)
json.dump(seen, open(sys.argv[1].partition("=")[2], "w"))
"""

COMPILED_LATE = """
import torch
numbers = torch.zeros(8, device="cuda")
torch.special.ndtri(numbers)
torch.erfinv(numbers)
"""

CAPTURE = """
import json, sys, torch
seen = {}
numbers = torch.zeros(8, device="cuda")
side = torch.cuda.Stream()

def capture(name, body):
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            body()
        graph.replay()
        seen[name] = "captured"
    except RuntimeError as error:  # that of the end of the capture, after that of the body
        seen[name] = str(error.__context__ or error).partition("\\n")[0]
    torch.cuda.synchronize()

def unjoined():
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        numbers.add_(1)

def joined():
    unjoined()
    torch.cuda.current_stream().wait_stream(side)

def ask_event():
    event = torch.cuda.Event()
    event.record()
    event.query()

capture("kernels", lambda: numbers.add_(1).mul_(2))
capture("joined", joined)
capture("item", lambda: numbers.sum().item())
capture("pageable copy", lambda: numbers.copy_(torch.ones(8), non_blocking=True))
capture("synchronize", torch.cuda.synchronize)
capture("event", ask_event)
capture("unjoined", unjoined)
json.dump(seen, open(sys.argv[1].partition("=")[2], "w"))
"""

WAITS = """
import torch
weight = torch.zeros(3, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
pinned = torch.ones(3).pin_memory()
for step in range(4):
    loss = (weight * pinned.cuda(non_blocking=True)).sum()
    loss.backward()
    loss.item()  # waits
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.synchronize()  # there is nothing left to wait for
"""

GROUPS = """
import json, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
rank = int(__import__("os").environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("BACKEND", device_id=torch.device("cuda", rank))
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, rank)
mesh = init_device_mesh("cuda", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
dist.all_reduce(torch.zeros(5, device="cuda"), group=mesh["tensor"].get_group())
dist.all_reduce(torch.zeros(3 + DIFFERENCE * rank, device="cuda"))
dist.barrier(group=dist.new_group(backend="gloo"))
if rank == 0:
    dist.send(torch.zeros(2, device="cuda"), 1)
elif DIFFERENCE == 0:
    dist.recv(torch.zeros(2, device="cuda"), 0)
if rank == 0:
    json.dump(seen, open(sys.argv[1].partition("=")[2], "w"))
dist.destroy_process_group()
"""


def run_text(device, folder, text, nproc=None, **arguments):
    """Run a script with this text. Returns its NullRun and what it has written."""
    script, output = folder / "script.py", folder / "seen.json"
    script.write_text(text)
    run = device.run(script, nproc, arguments=arguments, out=output)
    assert run.code == 0, run.stderr
    return run, json.loads(output.read_text()) if output.exists() else None


def test_memory_is_allocated_and_small_copies_move_their_bytes(null_device, tmp_path):
    _, seen = run_text(null_device, tmp_path, MEMORY, gpus=2, memory=2.5)
    assert seen["devices"] == 2 and seen["name"] == "null H100"
    assert seen["moved"] == [0, 1, 2, 3, 4]
    assert seen["computed"] == [0, 0, 0, 0, 0]  # no kernel has written
    assert seen["total"] == 2.5 * 2**30 and seen["peak"] == 2**30
    assert "Tried to allocate 2.00 GiB" in seen["error"]
    assert "same device" in seen["mixed"] or "cuda:1" in seen["mixed"]


def test_kernels_that_pytorch_compiles_are_launched(null_device, tmp_path):
    run, _ = run_text(null_device, tmp_path, COMPILED_LATE)
    names = " ".join(run.reports[0]["end"]["kernel"])
    assert "ndtri" in names and "erfinv" in names


def test_capture_refuses_what_cuda_refuses(null_device, tmp_path):
    run, seen = run_text(null_device, tmp_path, CAPTURE)
    assert seen.pop("kernels") == seen.pop("joined") == "captured"
    for name in ("item", "synchronize"):
        assert "stream is capturing" in seen[name], name
    assert "during CUDA graph capture" in seen["pageable copy"]  # PyTorch's own message
    assert "event last recorded" in seen["event"]
    assert "unjoined" in seen["unjoined"]
    assert run.reports[0]["end"]["graph"]["launched, of 2 kernels"][0] == 1


def test_waits_are_counted_with_the_line_that_waits(null_device, tmp_path):
    run, _ = run_text(null_device, tmp_path, WAITS)
    assert len(run.reports[0]["steps"]) == 4
    waits = {report.cause(name): count for name, (count, _) in run.step["wait"].items()}
    script = tmp_path / "script.py"
    item, synchronize = f"{script}:9", f"{script}:11"
    assert waits == {
        ("cudaStreamSynchronize", item): 1,
        ("cudaDeviceSynchronize", synchronize): 1,
    }
    assert run.step["copy"]["host to device, pinned"] == [1, 12]
    assert report.number(run.step, "kernel") >= 4


@pytest.mark.slow
@pytest.mark.rare
def test_command_reports_as_text_and_as_json(null_device, tmp_path):
    script, counts = tmp_path / "script.py", tmp_path / "counts.json"
    # Before PyTorch is imported and changed, as Transformers does.
    looks_for_torch = "__import__('importlib.util').util.find_spec('torch')\n"
    script.write_text(looks_for_torch + WAITS)
    command = [sys.executable, "-m", "tools.null", "--json", counts, script]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "rank 0 of 1: 4 steps" in run.stdout and f"{script}:10" in run.stdout
    assert len(json.loads(counts.read_text())[0]["steps"]) == 4


@pytest.mark.parametrize("difference", [0, 1])
def test_ranks_call_the_same_collectives(difference, null_device, tmp_path):
    text = GROUPS.replace("DIFFERENCE", str(difference)).replace("BACKEND", "nccl")
    run, seen = run_text(null_device, tmp_path, text, nproc=2)
    assert seen == [0, 1]  # objects are really sent
    assert [one["world_size"] for one in run.reports] == [2, 2]
    found = report.differences(run.reports)
    if difference:
        assert "rank 0 calls all-reduce of 3 float32, rank 1 all-reduce of 4 float32" in found[0]
        assert "2 float32 from rank 0 to rank 1 is not received" in found[1]
    else:
        assert found == []
        reduced = run.reports[0]["end"]["collective"]["all-reduce, 2 ranks"]
        assert reduced == [2, 4 * (5 + 3)]


def test_one_rank_of_many(null_device, tmp_path):
    has_split = version("torch") >= "2.14"  # older "fake" groups cannot be split
    backend = "cuda:nccl,cpu:gloo" if has_split else "nccl"
    text = GROUPS.replace("DIFFERENCE", "1").replace("BACKEND", backend)
    run, seen = run_text(null_device, tmp_path, text, ranks=64)
    assert seen == [0] * 64  # as if all had sent what this one did
    assert run.reports[0]["end"]["collective"]["all-reduce, 64 ranks"] == [2, 4 * (5 + 3)]


def test_modules_of_a_copy_are_known_and_those_of_other_projects_are_not(tmp_path):
    is_known = runpy.run_path(str(INSIDE / "null_device.py"))["is_known"]

    def finite_in(folder):
        path = folder / "utils" / "guards" / "finite.py"
        return SimpleNamespace(__name__="utils.guards.finite", __file__=str(path))

    assert is_known(finite_in(ROOT)) and not is_known(finite_in(tmp_path))
    (tmp_path / RECORD).touch()
    assert is_known(finite_in(tmp_path))


def test_different_collectives_are_named():
    def rank(number, *calls):
        return {"rank": number, "calls": {"ab of 2 ranks": list(calls)}}

    send, receive = "send of 3 float32 to 1", "receive of 3 float32 from 0"
    same = "all-reduce of 8 float32"
    assert report.differences([rank(0, send, same), rank(1, same, receive)]) == []
    (text,) = report.differences([rank(0, same, same), rank(1, same)])
    assert "collective 2" in text and "rank 1 nothing" in text


def test_kernels_of_cublas_are_counted_and_its_settings_are_not():
    text = generated({"cublasSgemm_v2", "cublasSetMathMode", "cudaFuncSetAttribute"})
    assert 'null_kernel("cublasSgemm_v2")' in text
    assert 'null_other("cublasSetMathMode")' in text
    assert 'null_other("cudaFuncSetAttribute")' in text
