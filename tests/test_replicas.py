"""The checks of ordinary runs: replicas alike, each sample once, saving when it is due."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import utils.supervise
from tests.launch import run_ranks
from utils.config import load_config
from utils.datasets import build_datasets
from utils.distributed import UserError
from utils.loaders import EpochSampler, build_loader
from utils.metrics import Meter
from utils.replicas import check_replicas, checksum
from utils.supervise import finish_epoch, supervise
from utils.sync_batchnorm import SyncBatchNorm

CPU = torch.device("cpu")


def make(norm=torch.nn.BatchNorm1d):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), norm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return torch.nn.ModuleDict({"module": model}), optimizer


def test_a_checksum_sees_every_bit():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        tensor = torch.arange(12).to(dtype).view(3, 4).t()
        before = checksum(tensor).item()
        assert before == checksum(tensor.clone().contiguous()).item()
        swapped = tensor.clone()
        swapped[0, 0], swapped[1, 1] = tensor[1, 1], tensor[0, 0]
        assert checksum(swapped).item() != before
        bits = tensor.contiguous().view(torch.uint8)
        bits[1, 1] ^= 1
        assert checksum(tensor.contiguous()).item() != before or not tensor.is_contiguous()
        assert checksum(bits.view(dtype)).item() != before
    assert checksum(torch.tensor(7)).item() == 7


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(2, "0.weight"), (3, "1.running_mean"), (3, "1.num_batches_tracked"), (2, "0.bias (mom")],
)
def test_the_first_differing_tensor_and_its_rank_are_named(world_size, name):
    def body(rank):
        model, optimizer = make()
        check_replicas(model, optimizer)
        if rank == world_size - 2:
            tensors = dict(model["module"].state_dict())
            parameter = model["module"][0].bias
            tensors["0.bias (mom"] = optimizer.state[parameter]["momentum_buffer"]
            tensors[name].view(-1)[0] += 1
        try:
            check_replicas(model, optimizer)
        except UserError as error:
            return str(error)

    for said in run_ranks(body, world_size):
        # of two ranks nobody knows which is wrong: the other than the first is named
        odd = 1 if world_size == 2 else world_size - 2
        assert f"rank {odd} differs from the others in {name}" in said
        assert "the first of 1 different" in said


def test_each_ranks_own_batchnorm_may_differ_between_steps_only():
    def body(rank, norm):
        model, optimizer = make(norm)
        model["module"][1].running_mean += rank
        check_replicas(model, optimizer, between_steps=norm is torch.nn.BatchNorm1d)
        check_replicas(model, optimizer)

    for norm in (torch.nn.BatchNorm1d, SyncBatchNorm):
        assert all(isinstance(error, UserError) for error in run_ranks(body, 2, norm))
    make_alone = make()
    make_alone[0]["module"][1].running_mean += 1
    check_replicas(*make_alone)  # one rank is always of one mind


def training(tmp_path, *flags):
    cfg = load_config(
        [
            "--dataset=synthetic",
            "--synthetic-samples=50",
            "--image-size=8",
            "--global-batch-size=10",
            f"--output-dir={tmp_path}",
            *flags,
        ]
    )
    train_set, val_set = build_datasets(cfg)
    sampler = EpochSampler(train_set, cfg.seed)
    model, optimizer = make()
    loader = build_loader(train_set, sampler, cfg, CPU, train=True)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "meter": Meter(CPU)}
    return cfg, state, {"samples": len(val_set)}


def test_saves_when_steps_or_minutes_are_over_and_never_at_the_epochs_end(tmp_path, monkeypatch):
    cfg, state, _ = training(tmp_path, "--save-steps=2")
    saved = []

    def save(folder, state, epoch, **options):
        saved.append((epoch, state["loader"].step, options))

    monkeypatch.setattr(utils.supervise, "save_checkpoint", save)
    for _ in supervise(state["loader"], 3, state, cfg):
        pass
    options = {"sharded": False, "between_steps": True}
    assert saved == [(3, 2, options), (3, 4, options)]  # of 5
    saved.clear()
    minutes = itertools.count(0, 60 * 4)
    clock = SimpleNamespace(monotonic=lambda: next(minutes))
    monkeypatch.setattr(utils.supervise, "time", clock)
    monkeypatch.setattr(utils.supervise, "STEPS_BETWEEN_CLOCKS", 1)
    cfg, state, _ = training(tmp_path, "--save-minutes=7")
    for _ in supervise(state["loader"], 0, state, cfg):
        pass
    assert [step for _, step, _ in saved] == [2, 4]


def test_a_loss_that_is_no_number_is_never_saved(tmp_path):
    cfg, state, _ = training(tmp_path, "--save-steps=1")
    with pytest.raises(UserError, match="training loss is nan"):
        for images, labels in supervise(state["loader"], 0, state, cfg):
            outputs = images.new_zeros(len(labels), 10)
            state["meter"].update(torch.tensor(float("nan")), outputs, labels)
    assert not (tmp_path / "last.pt").exists()


def test_replicas_are_checked_every_few_steps(tmp_path):
    def body(rank, every):
        cfg, state, _ = training(tmp_path, f"--check-replicas-every={every}", "--save-minutes=0")
        steps = 0
        try:
            for _ in supervise(state["loader"], 0, state, cfg):
                steps += 1
                if rank:
                    state["model"]["module"][0].weight.data += 1
        except UserError as error:
            return steps, str(error)

    for steps, said in run_ranks(body, 2, 3):
        assert steps == 3 and "0.weight" in said
    assert run_ranks(body, 2, 0) == [None, None]


def test_the_audit_says_what_was_trained(tmp_path, capsys):
    cfg, state, val = training(tmp_path, "--audit", "--global-batch-size=7")
    assert list(state["loader"]) and finish_epoch(2, state, val, cfg) == {
        "dropped": 1,
        "repeated": 0,
    }
    said = capsys.readouterr().out
    assert "epoch 2 trained 49 of 50 samples, each exactly once, and dropped 1: " in said
    assert "evaluation counted exactly 12" in said
    state["loader"].sampler = [*range(25), *range(25)]
    list(state["loader"])
    with pytest.raises(UserError, match=r"trained 24 samples more than once: 0, 1, .* and 4 more"):
        finish_epoch(2, state, val, cfg)
    state["loader"].seen = None
    assert finish_epoch(2, state, val, cfg) == {}
    assert "begun without --audit" in capsys.readouterr().out
    cfg, state, val = training(tmp_path)
    assert finish_epoch(2, state, val, cfg) == {} and not capsys.readouterr().out


def test_the_meter_goes_on_at_any_world_size():
    def body(rank, state):
        meter = Meter(CPU)
        if state:
            meter.load_state_dict(state)
        outputs = torch.eye(4)[: 2 + rank]
        meter.update(torch.tensor(1.0 + rank), outputs, torch.arange(2 + rank))
        return meter.state_dict(), meter.compute()

    first = run_ranks(body, 2, None)
    assert first[0][0] == first[1][0] and first[0][1]["samples"] == 5
    for world_size, samples in ((2, 10), (1, 7), (3, 14)):
        for _, result in run_ranks(body, world_size, first[0][0]):
            assert result["samples"] == samples
            assert result["accuracy"] == 1.0
