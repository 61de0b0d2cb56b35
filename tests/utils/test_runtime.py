"""Threads, precision, and what a run prints first."""

import os
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.processes import run_ranks
from utils import runtime
from utils.config import Config, ConfigError, load_config
from utils.errors import UserError
from utils.metrics import read_metrics
from utils.rungs.amp import AmpSettings
from utils.rungs.fsdp import FsdpSettings
from utils.runtime import configure_torch, log_summary, to_dtype


@pytest.fixture(autouse=True)
def unchanged_precision():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


# Threads and precision


@pytest.mark.parametrize(
    ("cores", "settings", "threads"),
    [
        (4, {}, 4),
        (4, {"num_workers": 0}, 4),
        (4, {"num_workers": 1}, 3),
        (4, {"num_workers": 9}, 1),
        (1, {}, 1),
        (4, {"num_threads": 7}, 7),
        (4, {"num_threads": 2, "num_workers": 3}, 2),
    ],
)
def test_threads_follow_cores_and_settings_alone(
    cores, settings, threads, requested_threads, monkeypatch
):
    """Not the load, nor OMP_NUM_THREADS: the same command must give the same bits."""
    monkeypatch.setattr(runtime, "cores_per_rank", lambda: cores)
    for load, omp in ((0.0, "1"), (99.0, "5")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
        configure_torch(Config(**settings))
    assert requested_threads == [threads, threads]


def test_ranks_share_the_cores_of_their_node(monkeypatch):
    def body(rank):
        requested = []
        torch.set_num_threads = requested.append
        monkeypatch.setattr("utils.distributed.available_cores", lambda: 7)
        configure_torch(Config())
        return requested

    assert run_ranks(body, 4, local_world_size=2) == [[3]] * 4


def test_tf32_is_on_only_where_the_config_says_so():
    """By default, as in PyTorch: in convolutions, not in matrix products."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    default = matmul.allow_tf32, cudnn.allow_tf32
    for dtype, expected in (("tf32", (True, True)), ("ieee", (False, False)), ("float32", default)):
        configure_torch(Config(dtype=dtype))
        assert (matmul.allow_tf32, cudnn.allow_tf32) == expected
        assert Config(dtype=dtype).torch_dtype == torch.float32
    assert default == (False, True)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, torch.complex64), (torch.float64, torch.complex128)],
    ids=str,
)
def test_complex_tensors_of_a_model_stay_complex(dtype, expected):
    """As of Fourier layers and rotary embeddings."""
    model = nn.ModuleList([nn.LazyLinear(2), nn.BatchNorm1d(2), nn.Linear(2, 2, dtype=torch.half)])
    model.register_parameter("weight", nn.Parameter(torch.tensor([1 + 2j, 3j])))
    model.register_buffer("rotation", torch.tensor([1j]))
    assert to_dtype(model, dtype) is model
    assert model.weight.tolist() == [1 + 2j, 3j] and model.rotation.tolist() == [1j]
    assert {model.weight.dtype, model.rotation.dtype} == {expected}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    counts = tensors.pop("1.num_batches_tracked")
    others = {t.dtype for name, t in tensors.items() if name not in ("weight", "rotation")}
    assert (others, counts.dtype) == ({dtype}, torch.int64)


def test_cudnn_chooses_by_time_only_on_request():
    for cfg in (Config(cudnn_benchmark=True), Config()):
        configure_torch(cfg)
        assert torch.backends.cudnn.benchmark is cfg.cudnn_benchmark


def test_deterministic_algorithms_only_on_request(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for cfg in (Config(deterministic=True), Config()):
        configure_torch(cfg)
        assert torch.are_deterministic_algorithms_enabled() is cfg.deterministic
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG", "") == ":4096:8" * cfg.deterministic
    with pytest.raises(ConfigError, match="fastest"):
        Config(deterministic=True, cudnn_benchmark=True).resolved()


class Layers(torch.nn.Module):
    """Not a Sequential, of which torch 2.11 does not compile the forward()."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(2000, 2000) for _ in range(3)])

    def forward(self, inputs):
        return self.layers(inputs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_single_process_compiles_ddp_into_one_graph(ranks):
    def body(rank):
        configure_torch(Config(compile="default", num_threads=1))
        model, graphs = Layers(), []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        model.compile(backend=count)
        DistributedDataParallel(model)(torch.zeros(1, 2000))
        return len(graphs)

    assert run_ranks(body, ranks) == [ranks] * ranks  # two buckets


def test_precision_in_words():
    assert Config().precision == "float32 (on CUDA: TF32 convolutions)"
    assert Config(dtype="ieee").precision == "ieee"
    amp = load_config(script_settings=AmpSettings, argv=["--dtype=tf32"])
    assert amp.precision == "bfloat16 autocast, tf32"
    fsdp = [
        load_config(script_settings=FsdpSettings, argv=[flag])
        for flag in ("--dtype=float64", "--fsdp-dtype=bfloat16")
    ]
    assert [cfg.precision for cfg in fsdp] == ["float64", "bfloat16 blocks"]


def test_several_processes_need_a_process_group(monkeypatch, requested_threads):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["/x/train_1gpu.py"])
    with pytest.raises(UserError, match=r"WORLD_SIZE is 2: .*  python train_1gpu\.py.* torchrun"):
        configure_torch(Config())
    assert requested_threads == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    configure_torch(Config())
    assert len(requested_threads) == 1


# What a run prints


class Loader(list):
    """Batches with what log_summary() needs of a Loader."""

    epoch, start, dataset, name, batch_size = 4, 7, range(50), "workers", 4
    device = torch.device("cpu")


def test_summary_tells_what_the_run_will_do(tmp_path, capfd, monkeypatch):
    flags = ["--global-batch-size=8", "--epochs=3", f"--output-dir={tmp_path}", "--lr=0.2"]
    cfg = load_config(argv=flags)
    monkeypatch.setattr("sys.argv", ["train.py", "--lr=0.2 "])
    model = torch.nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    loader = Loader("abc")
    state = {"model": torch.nn.DataParallel(model), "loader": loader}
    log_summary(cfg, state, 1)
    text = capfd.readouterr().out
    for part in (
        "model: Linear, 6 trainable parameters, float32 (on CUDA: TF32 convolutions)\n",
        "data: range, 50 training samples, loader=workers\n",
        "batch: 8 = 1 replica x 4 on cpu, threads per process: ",
        "peak lr 0.2\n",
        f"epochs: 3 of 3 steps, from epoch 1, step 7, in {tmp_path}\n",  # as 50 - 3 * 8 > 8
    ):
        assert part in text
    assert "--resume never" not in text
    assert load_config(argv=[f"--config={tmp_path / 'config.yaml'}"]) == cfg
    log_summary(cfg, state, 2)
    first, second = read_metrics(tmp_path / "starts.jsonl")
    expected = {"epoch": 1, "step": 7, "steps_per_epoch": 3, "world_size": 1}
    assert expected.items() <= first.items()
    assert first["time"] == pytest.approx(time.time(), abs=60)
    assert first["model"].startswith("Linear, 6 trainable") and "50 training" in first["data"]
    assert (first["command"], first["torch"]) == ("train.py '--lr=0.2 '", torch.__version__)
    assert (second["epoch"], second["time"] >= first["time"]) == (2, True)
    capfd.readouterr()
    loader.start = 0
    log_summary(cfg, state, 3)
    text = capfd.readouterr().out
    assert "from epoch 3, step 0, in" in text
    assert "--resume never" in text
    assert len(read_metrics(tmp_path / "starts.jsonl")) == 2
    (tmp_path / "starts.jsonl").unlink()
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(UserError, match=r"^cannot write .*config.yaml: Is a directory$"):
        log_summary(cfg, state, 3)
    (tmp_path / "config.yaml").rmdir()
    monkeypatch.setattr(runtime, "is_main_process", lambda: False)
    log_summary(cfg, state, 3)
    assert capfd.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_summary_counts_the_samples_that_fill_no_batch(tmp_path, capfd):
    flags = ["--global-batch-size=16", f"--output-dir={tmp_path}"]
    state = {"model": torch.nn.Linear(2, 3), "loader": Loader("abc")}
    log_summary(load_config(argv=flags), state, 0)
    assert " of 3 steps (2 samples" in capfd.readouterr().out
