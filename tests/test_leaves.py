"""Model parallel, FSDP, spawn: what their scripts need from utils/."""

import os
import signal
import time

import pytest
import torch
import torchvision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import utils.model_parallel
from tests.launch import planted, run_ranks, run_script, save_now, start_script
from tests.test_failures import assert_one_message, spoken
from tools.runs import family, wait_for_family
from train_mp import place
from utils.checkpoint import load_checkpoint, read_checkpoint
from utils.distributed import UserError
from utils.model_parallel import (
    MicroBatches,
    assign_layers,
    get_devices,
    init_distributed_devices,
)
from utils.models import ResNet9, ResNet20, blocks_of, build_model, layers_of
from utils.optim import build_optimizer
from utils.settings import Config

CPU, META = torch.device("cpu"), torch.device("meta")


def small_vit():
    torch.manual_seed(0)
    return torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=3, num_heads=2, hidden_dim=8, mlp_dim=16
    )


# Model parallel


@pytest.mark.parametrize(
    ("make", "layers", "blocks"),
    [(ResNet20, 12, 9), (ResNet9, 7, 7), (torchvision.models.resnet50, 19, 16), (small_vit, 6, 4)],
)
def test_the_layers_hold_all_parameters_in_order(make, layers, blocks):
    model = make(10) if make in (ResNet20, ResNet9) else make()
    found = layers_of(model)
    assert (len(found), len(blocks_of(model))) == (layers, blocks)
    inside = {parameter for layer in found for parameter in layer.parameters()}
    outside = [name for name, parameter in model.named_parameters() if parameter not in inside]
    assert set(outside) <= {"class_token", "encoder.pos_embedding"}
    order = []
    for number, layer in enumerate(found):
        layer.register_forward_hook(lambda *_, number=number: order.append(number))
    model.eval()(torch.randn(2, 3, 16, 16))
    assert order == list(range(layers))


def test_stages_are_balanced_or_given_by_hand():
    model, devices = ResNet20(10), ["a", "b", "c"]
    for stages in (1, 2, 3):
        owners = [device for _, device in assign_layers(model, devices[:stages])]
        assert owners == sorted(owners) and set(owners) == set(devices[:stages])
    sizes = {}
    for layer, device in assign_layers(model, devices[:2]):
        sizes[device] = sizes.get(device, 0) + sum(p.numel() for p in layer.parameters())
    blocks = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    best = min(max(sum(blocks[:cut]), sum(blocks[cut:])) for cut in range(1, 12))
    assert max(sizes.values()) == best
    by_hand = [device for _, device in assign_layers(model, devices, "2,9,1")]
    assert by_hand == ["a"] * 2 + ["b"] * 9 + ["c"]
    for split in ("2,10", "2,9,2", "0,11,1", "a,b,c"):
        with pytest.raises(UserError, match=r"must be 3 positive numbers that add up to .* 12 lay"):
            assign_layers(model, devices, split)
    with pytest.raises(UserError, match="12 layers cannot be cut into 13"):
        assign_layers(model, list(range(13)))
    with pytest.raises(UserError, match="VGG is neither a ResNet nor a ViT"):
        assign_layers(torchvision.models.vgg11(), devices)


@pytest.mark.parametrize("make", [small_vit, torchvision.models.resnet18])
def test_activations_follow_the_layers(make):
    """Meta tensors play the second GPU: an operation on both devices would raise."""
    model, images = make(), torch.randn(2, 3, 16, 16)
    expected = model.eval()(images)
    torch.testing.assert_close(place(model, [CPU, CPU, CPU], "")(images), expected)
    model = make().eval()
    outputs = place(model, [CPU, META], "")(images)
    assert outputs.device == META and outputs.shape == expected.shape
    devices = {parameter.device for parameter in model.parameters()}
    assert devices == {CPU, META}


def test_micro_batches_add_up_to_the_batch():
    model, images = nn.Linear(3, 2), torch.randn(7, 3)
    for count in (1, 3, 7, 9):
        sizes = []
        model.register_forward_hook(lambda _, x, y, sizes=sizes: sizes.append(len(x[0])))
        torch.testing.assert_close(MicroBatches(model, count)(images), model(images))
        assert len(sizes[:-1]) <= count and sum(sizes[:-1]) == 7


def test_names_of_devices(monkeypatch):
    assert get_devices() == [CPU, CPU]
    assert get_devices("cpu,cpu,cpu") == [CPU] * 3
    for wrong in ("cpu,tpu", "meta", "cpu,"):
        with pytest.raises(UserError, match="is no list such as cuda:0,cuda:1 or cpu,cpu"):
            get_devices(wrong)
    with pytest.raises(UserError, match="cuda,cuda needs 2 CUDA devices here, but 0 are visible"):
        get_devices("cuda,cuda")

    visible = 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(utils.model_parallel, "get_device", lambda name: None)
    cuda = [torch.device("cuda", i) for i in range(6)]
    assert get_devices() == cuda[:4]
    assert get_devices("cuda,cuda") == get_devices("cuda:0,cuda:1") == cuda[:2]
    assert get_devices("cuda:1,cpu") == [cuda[1], CPU]

    joined = []
    monkeypatch.setattr(utils.model_parallel, "init_distributed", lambda *a: joined.append(a))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(utils.model_parallel, "get_local_rank", lambda: 1)
    assert init_distributed_devices() == cuda[2:4]
    assert init_distributed_devices("cuda,cuda", 9.0) == cuda[2:4]
    assert init_distributed_devices("cpu,cpu") == [CPU, CPU]
    assert init_distributed_devices("cuda:0,cuda:1") == cuda[:2]
    assert joined == [
        ("cuda", 300.0, 2),
        ("cuda", 9.0, 2),
        ("cpu", 300.0, 1),
        ("cuda:0", 300.0, 1),
    ]
    with pytest.raises(UserError, match="needs 6 CUDA devices here, but 4 are visible"):
        init_distributed_devices("cuda,cuda,cuda")


def test_too_few_devices_for_the_processes_is_one_message(tmp_path):
    run = run_script("train_ddp_mp.py", 2, output_dir=tmp_path, devices="cuda,cuda")
    assert_one_message(run, "need 4 CUDA devices, but 0 are visible")


def test_micro_batches_that_cannot_be_made(tmp_path):
    run = run_script("train_ddp_accum.py", 2, output_dir=tmp_path, micro_batches=7)
    assert_one_message(run, "the 6 samples", "do not make 7 micro-batches", "--micro-batches")


# FSDP and checkpoints in parts


def test_a_compiled_model_trains_the_same_weights(tmp_path):
    eager, compiled = (
        run_script("train_ddp.py", 1, dtype="float64", compile=mode, output_dir=tmp_path / mode)
        for mode in ("none", "default")
    )
    assert compiled.code == 0, compiled.stderr
    names = ("train_loss", "val_loss")
    for ours, theirs in zip(compiled.rows, eager.rows, strict=True):
        assert [ours[n] for n in names] == pytest.approx([theirs[n] for n in names], rel=1e-9)
    saved, other = (read_checkpoint(run.output_dir / "last.pt") for run in (compiled, eager))
    assert list(saved["model"]) == list(other["model"])
    for script in ("train_mp.py", "train_dp.py"):
        refused = run_script(script, compile="default", output_dir=tmp_path / script)
        assert refused.code == 1 and "pass --compile none" in refused.stderr


def test_fsdp_in_bfloat16_and_offloaded_is_float32_but_for_rounding(tmp_path):
    flags = {"epochs": 1, "norm": "batch"}
    exact = run_script("train_fsdp.py", 2, output_dir=tmp_path / "exact", **flags)
    flags |= {"fsdp_dtype": "bfloat16", "fsdp_offload": True}
    rounded = run_script("train_fsdp.py", 2, output_dir=tmp_path / "rounded", **flags)
    assert (exact.code, rounded.code) == (0, 0), rounded.stderr
    for name in ("train_loss", "val_loss"):
        assert 0 < abs(rounded.rows[0][name] / exact.rows[0][name] - 1) < 2**-5
    model = read_checkpoint(tmp_path / "rounded" / "last.pt")["model"]
    assert {t.dtype for t in model.values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_no_thread_of_a_process_group_is_left_to_abort_the_exit(script, tmp_path):
    """Either none lives when Python has finished its own exit, or Python's is the last word."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(COUNT_THREADS.format(log=str(tmp_path / "log")))
    environment = {"PYTHONPATH": str(hooks)}
    run = run_script(script, 2, environment=environment, output_dir=tmp_path / "run", epochs=1)
    assert run.code == 0, run.stderr
    assert set((tmp_path / "log").read_text().split()) == {
        "0" if script == "train_ddp.py" else "left"
    }


COUNT_THREADS = """
import atexit, os, sys
def count():
    tasks, caller = "/proc/self/task/", sys._getframe().f_back
    names = [open(f"{{tasks}}{{task}}/comm").read() for task in os.listdir(tasks)]
    alive = sum(name.startswith(("pt_gloo", "gloo")) for name in names)
    skipped = caller is not None and caller.f_code.co_name == "_skip_teardown"
    with open({log!r}, "a") as log:
        print("left" if skipped else alive, file=log)
if "RANK" in os.environ:
    atexit.register(count)  # the first to be registered is the last to be called
"""


def sharded_state(rank, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, Config())
    for _ in range(2):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def plain_state(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    return {"model": model, "optimizer": build_optimizer(model, Config())}


def tensors_of(checkpoint):
    buffers = checkpoint["optimizer"]["state"]
    return [
        *(tensor for _, tensor in sorted(checkpoint["model"].items())),
        *(buffers[i]["momentum_buffer"] for i in sorted(buffers)),
    ]


@pytest.mark.parametrize("sharded", [False, True])
def test_shards_are_put_together_and_cut_anew(sharded, tmp_path):
    def save(rank):
        state = sharded_state(rank)
        save_now(tmp_path, state, 1, sharded=sharded)
        local = state["model"][0].weight.to_local()
        return len(local), [t.full_tensor().detach().numpy() for t in state["model"].parameters()]

    (rows, weights), (other_rows, _) = run_ranks(save, 2)
    assert rows + other_rows == 7 and rows != other_rows  # really in parts
    checkpoint = read_checkpoint(tmp_path / "last.pt")
    assert checkpoint["model"]["0.weight"].equal(torch.from_numpy(weights[0]))
    assert len(list(tmp_path.glob("*.parts"))) == sharded

    plain = plain_state(seed=1)
    assert load_checkpoint(tmp_path, plain) == 1
    loaded = plain["model"].state_dict()
    assert loaded.keys() == checkpoint["model"].keys()
    assert all(tensor.equal(checkpoint["model"][name]) for name, tensor in loaded.items())
    assert plain["optimizer"].param_groups[0]["fused"] is True  # this rank's own, not the file's

    def load(rank):
        state = sharded_state(rank, seed=1)
        load_checkpoint(tmp_path, state)
        assert isinstance(state["model"][0].weight, DTensor)
        save_now(tmp_path / "again", state, 1)
        return state["optimizer"].param_groups[0]["fused"]

    assert run_ranks(load, 3) == [False] * 3
    again = tensors_of(read_checkpoint(tmp_path / "again" / "last.pt"))
    assert all(a.equal(b) for a, b in zip(again, tensors_of(checkpoint), strict=True))


def test_parts_damaged_lost_or_left_over(tmp_path, capsys):
    state = plain_state(seed=0)
    for epoch in (1, 2):
        save_now(tmp_path, state, epoch, is_best=epoch == 1, sharded=True)
    save_now(tmp_path, state, 2, sharded=True, between_steps=True)
    (tmp_path / "of-a-killed-run.parts").mkdir()
    save_now(tmp_path, state, 2, sharded=True, between_steps=True)
    (tmp_path / "torn.pt").write_text("torn, and nothing to wait for")
    save_now(tmp_path, state, 2, sharded=True, between_steps=True)
    (tmp_path / "torn.pt").unlink()
    kept = {read_checkpoint(path)["parts"]["folder"] for path in tmp_path.glob("*.pt")}
    assert {path.name for path in tmp_path.glob("*.parts")} == kept and len(kept) == 3

    def largest(name):
        folder = tmp_path / read_checkpoint(tmp_path / name, join=False)["parts"]["folder"]
        return max(folder.iterdir(), key=lambda path: path.stat().st_size)

    damaged = largest("last.pt")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert load_checkpoint(tmp_path, plain_state(seed=1)) == 2
    assert f"{damaged} is damaged; resuming from {tmp_path / 'epoch-0002.pt'}" in (
        capsys.readouterr().err
    )
    largest("epoch-0002.pt").unlink()
    assert load_checkpoint(tmp_path, plain_state(seed=1)) == 1
    assert "is missing; resuming from" in capsys.readouterr().err
    assert load_checkpoint(tmp_path, plain_state(seed=1), resume="never") == 0
    assert not list(tmp_path.glob("*.parts"))


def test_parts_that_cannot_be_written_end_all_ranks(tmp_path):
    def body(rank):
        state = sharded_state(rank)
        save_now(tmp_path, state, 1, sharded=True)
        real = os.open
        torch.distributed.checkpoint.filesystem.os.fsync = _no_space
        try:
            save_now(tmp_path, state, 2, sharded=True)
        finally:
            torch.distributed.checkpoint.filesystem.os.fsync = real

    for error in run_ranks(body, 2):
        assert isinstance(error, UserError)
        assert "No space left" in str(error) and "what was saved before" in str(error)
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


def _no_space(*_):
    raise OSError(28, "No space left on device")


def test_groupnorm_in_place_of_batchnorm():
    batch, group = (build_model(Config(model="resnet18", norm=n), 10) for n in ("batch", "group"))
    assert [n for n, _ in batch.named_parameters()] == [n for n, _ in group.named_parameters()]
    assert not list(group.buffers())
    images = torch.randn(4, 3, 32, 32)
    whole = group(images)
    torch.testing.assert_close(whole[:1], group(images[:1]), rtol=1e-4, atol=1e-4)


# Spawn


def test_one_rank_fails_and_its_traceback_alone_is_shown(tmp_path):
    raising = "        optimizer.step()\n        1 / (dist.get_rank() - 1)"
    copy = planted(tmp_path, "train_ddp_spawn.py", "        optimizer.step()", raising)
    run = run_script(copy, output_dir=tmp_path / "run", spawn_processes=3)
    errors, tracebacks = spoken(run)
    assert run.code == 1
    assert (errors, tracebacks) == ([], 1), run.stderr
    assert "ZeroDivisionError" in run.stderr


def started(tmp_path):
    process = start_script(
        "train_ddp_spawn.py", output_dir=tmp_path, epochs=1000, spawn_processes=2
    )
    end = time.monotonic() + 120
    while not (tmp_path / "last.pt").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    return process


def test_ctrl_c_ends_all_children(tmp_path):
    process = started(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, stderr = process.communicate(timeout=60)
    assert process.returncode in (1, 130)
    assert stderr.count("interrupted") <= 1 and "Traceback" not in stderr
    assert wait_for_family(process.run_tag) == []


def test_a_killed_rank_or_launcher_ends_the_others(tmp_path):
    process = started(tmp_path / "rank")
    ranks = set(family(process.run_tag)) - {process.pid}
    os.kill(max(ranks), signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert wait_for_family(process.run_tag) == []
    process = started(tmp_path / "launcher")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert wait_for_family(process.run_tag) == []
    assert "error: rank 1 was killed by SIGKILL" in stderr and "Traceback" not in stderr


def test_a_mistake_in_a_flag_is_said_once_before_any_start(tmp_path):
    run = run_script("train_ddp_spawn.py", output_dir=tmp_path, epochs=0, spawn_processes=2)
    assert run.code == 2
    assert_one_message(run, "epochs must be at least 1")
