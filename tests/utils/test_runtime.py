"""Threads, precision, and what a run prints first."""

import os

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from utils import runtime
from utils.config import Config, load_config
from utils.errors import UserError
from utils.runtime import configure_torch, log_summary, to_dtype


@pytest.fixture(autouse=True)
def unchanged_precision():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


def test_threads_follow_cores_and_settings_alone(requested_threads, monkeypatch):
    """Neither the load nor OMP_NUM_THREADS: the same command must give the same bits."""
    monkeypatch.setattr(runtime, "cores_per_rank", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    configure_torch(Config())
    configure_torch(Config(num_workers=1))
    configure_torch(Config(num_workers=9))
    configure_torch(Config(num_threads=2, num_workers=3))
    assert requested_threads == [4, 3, 1, 2]


def test_several_processes_need_a_process_group(monkeypatch, requested_threads):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["/x/train_1gpu.py"])
    with pytest.raises(UserError, match=r"python train_1gpu\.py"):
        configure_torch(Config())
    assert requested_threads == []


def test_tf32_is_used_where_the_config_says_so():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    default = matmul.allow_tf32, cudnn.allow_tf32
    for dtype, expected in (("tf32", (True, True)), ("ieee", (False, False)), ("float32", default)):
        configure_torch(Config(dtype=dtype))
        assert (matmul.allow_tf32, cudnn.allow_tf32) == expected


def test_deterministic_algorithms_are_used_on_request(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for is_asked in (True, False):
        configure_torch(Config(deterministic=is_asked))
        assert torch.are_deterministic_algorithms_enabled() == is_asked
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG", "") == ":4096:8" * is_asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_complex_tensors_of_a_model_stay_complex(dtype):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, dtype=torch.half))
    model.register_parameter("weight", nn.Parameter(torch.tensor([1 + 2j, 3j])))
    model.register_buffer("rotation", torch.tensor([1j]))
    parameter = model.weight
    assert to_dtype(model, dtype) is model and model.weight is parameter
    assert model.weight.tolist() == [1 + 2j, 3j] and model.rotation.tolist() == [1j]
    assert model.weight.dtype == model.rotation.dtype == dtype.to_complex()
    assert model[1].weight.dtype == model[0].running_mean.dtype == dtype
    assert model[0].num_batches_tracked.dtype == torch.int64


@torch._dynamo.config.patch(optimize_ddp=None)
def test_single_process_compiles_ddp_into_one_graph(monkeypatch):
    """Several have a graph for each bucket, so that communication overlaps with backward()."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for world_size, is_split in (("1", False), ("2", True)):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        configure_torch(Config(compile="default"))
        assert torch._dynamo.config.optimize_ddp == is_split


class Loader(list):
    """Batches, with what log_summary() needs of a Loader."""

    step, dataset, batch_size, device = 7, range(50), 4, torch.device("cpu")


def test_summary_tells_what_the_run_will_do(tmp_path, capsys, monkeypatch):
    cfg = load_config(argv=["--global-batch-size=8", "--epochs=3", f"--output-dir={tmp_path}"])
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    state = {"model": nn.DataParallel(model), "loader": Loader("abc")}
    log_summary(cfg, state, 1)
    out = capsys.readouterr().out
    assert "Linear" in out and "6 trainable" in out
    assert "3 of 3 steps, from epoch 1, step 7" in out and str(tmp_path) in out
    assert "--output-dir" not in out
    assert load_config(argv=[f"--config={tmp_path / 'config.yaml'}"]) == cfg
    log_summary(cfg, state, 3)
    assert "--output-dir" in capsys.readouterr().out
    (tmp_path / "config.yaml").unlink()
    monkeypatch.setattr(runtime, "is_main_process", lambda: False)
    log_summary(cfg, state, 3)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())
