"""The checks that all ranks run the same code on the same data, and hold the same model."""

import importlib.util
import sys

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import random_split

from tasks.images.models import build_classifier
from tasks.images.settings import Settings
from tests.processes import run_ranks
from tests.utils.test_checkpoint import checkpointer, make_state, outcome
from utils.config import Config
from utils.data import describe_datasets
from utils.distributed import rebuild_ddp_buckets
from utils.errors import UserError
from utils.hooks import Hooks
from utils.optim import build_optimizer
from utils.replicas import (
    CompareReplicas,
    check_replicas,
    check_setup,
    checksums,
)
from utils.sync_batchnorm import SyncBatchNorm


def checksum(tensor):
    return checksums([tensor])[0]


class Running(nn.Module):
    """Subtracts a running mean of its inputs."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(features))

    def forward(self, inputs):
        if self.training:
            self.running_mean = self.running_mean.lerp(inputs.detach().mean(0), 0.1)
        return inputs - self.running_mean


def make(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), norm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return nn.DataParallel(model), optimizer  # without GPUs, a wrapper that does nothing


# What a checksum notices


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(3, 4), (3, 5), (1,)])
def test_checksum_changes_with_every_bit(dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    for byte in range(tensor.nbytes):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            assert checksum(changed) != before, (byte, bit)


def test_checksum_changes_with_the_order_but_not_with_the_layout():
    tensor = torch.arange(12.0).view(3, 4)
    before = checksum(tensor)
    swapped = tensor.flip(0)
    assert checksum(swapped) != before
    assert checksum(swapped.flip(0)) == before
    assert checksum(tensor.t().contiguous().t()) == before
    assert checksum(torch.tensor(7)) == 7
    odd_offset = torch.arange(13.0)[1:].view(3, 4) - 1
    assert checksum(odd_offset) == before
    view = torch.cat([torch.zeros(1), torch.arange(12.0)])[1:]  # starts in the middle of 8 bytes
    assert checksum(view) == checksum(view.view(3, 4))


def test_tensors_have_the_sums_of_their_elements():
    """Of several lengths, some longer than is added at once, and with values that are not
    numbers."""
    lengths = [1, 3, 1 << 16, 2, 5, 0x30001, 1]
    tensors = [torch.randint(-(2**62), 2**62, (n,)) for n in lengths]
    expected = [(t * torch.arange(1, 2 * len(t), 2)).sum().item() for t in tensors]
    assert checksums(tensors) == expected
    nan = torch.tensor([0x7FF8000000000000, 0x7FF8000000000001]).view(torch.float64)
    assert nan.isnan().all() and checksum(nan[:1]) != checksum(nan[1:])
    assert checksums([nan, *tensors]) == checksums([nan.clone(), *tensors])


# Which tensors are compared


def test_differing_tensor_and_its_rank_are_named():
    cases = ("0.weight", "1.running_mean", "1.num_batches_tracked", "0.bias (momentum_buffer)")

    def body(rank, world_size):
        messages = []
        for name in cases:
            model, optimizer = make()
            check_replicas(model, optimizer)
            if rank == world_size - 2:
                tensors = dict(model.module.state_dict())
                state = optimizer.state[model.module[0].bias]
                tensors["0.bias (momentum_buffer)"] = state["momentum_buffer"]
                tensors[name].view(-1)[0] += 1
            with pytest.raises(UserError) as caught:
                check_replicas(model, optimizer)
            messages.append(str(caught.value))
        return messages

    make()  # imports what an optimizer needs, before the ranks are forked
    for world_size in (2, 3):
        # Of two ranks, either may be wrong: the second one is named.
        odd = 1 if world_size == 2 else world_size - 2
        for messages in run_ranks(body, world_size, world_size):
            for name, message in zip(cases, messages, strict=True):
                assert f"rank {odd} differs" in message
                assert f" {name}, " in message and " 1 tensors" in message


def test_copies_of_a_shard_are_compared():
    """Two ranks divide each parameter, and two more hold the same shards: as of HSDP, and of FSDP
    across the replicas of tensor parallelism, where a gradient is not averaged."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        all_ranks = init_device_mesh("cpu", (4,))
        whole = torch.arange(7.0)  # unevenly divided by four
        model = nn.ParameterDict(
            {
                "own": nn.Parameter(distribute_tensor(whole, all_ranks, [Shard(0)])),
                "copied": nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Replicate()])),
                "sliced": nn.Parameter(distribute_tensor(whole, mesh["data"], [Shard(0)])),
            }
        )
        optimizer = torch.optim.SGD(model.parameters())
        outcomes = [outcome(lambda: check_replicas(model, optimizer))]
        for name in ("own", "copied", "sliced"):
            with torch.no_grad():
                model[name].to_local().add_(float(rank == 3))
            outcomes.append(outcome(lambda: check_replicas(model, optimizer)))
            with torch.no_grad():
                model[name].to_local().sub_(float(rank == 3))
        return outcomes

    for same, own, copied, sliced in run_ranks(body, 4):
        assert same == own == (None, "")
        for name, (kind, text) in (("copied", copied), ("sliced", sliced)):
            assert kind is UserError
            assert "rank 3 differs" in text and f" {name}, " in text and " 1 tensors" in text


def test_statistics_of_batchnorms_may_differ_between_steps():
    """DistributedDataParallel broadcasts them at the next forward pass. It does so with all other
    buffers, too, of which nothing says that a share of each batch is enough."""

    def body(rank):
        outcomes = []
        for norm in (nn.BatchNorm1d, SyncBatchNorm, Running):
            for between_steps in (True, False):
                model, optimizer = make(norm)
                model.module[1].running_mean += rank
                kind, text = outcome(
                    lambda m=model, o=optimizer, b=between_steps: check_replicas(m, o, b)
                )
                outcomes.append(kind)
        return outcomes, text

    expected = [None, UserError, None, UserError, UserError, UserError]
    for outcomes, text in run_ranks(body, 2):
        assert outcomes == expected
        assert "1.running_mean" in text and "docs/recipes/running-statistics.md" in text


def test_names_are_the_models_own():
    """Only the names of wrappers are left out."""

    def body(rank):
        inner, optimizer = make()
        model = DistributedDataParallel(nn.ModuleDict({"module": inner.module}))
        inner.module[1].running_mean += rank
        return outcome(lambda: check_replicas(model, optimizer))

    for kind, text in run_ranks(body, 2):
        assert kind is UserError and "rank 1 differs" in text
        assert " module.1.running_mean," in text


def test_single_process_has_nothing_to_compare():
    model, optimizer = make()
    model.module[1].running_mean += 1
    check_replicas(model, optimizer)


# When they are compared


def compared(folder, state, **settings):
    """A Checkpointer with the hook that compares the ranks."""
    hook = CompareReplicas(Config(output_dir=str(folder), **settings), state)
    return checkpointer(folder, state, [hook], **settings)


def replicas_run(folder, rank, steps=4, **settings):
    """The number of steps before the ranks are found to differ, and the message.

    Rank 1 changes one weight in the third step, and in those after it."""
    state = make_state()
    writer = compared(folder, state, **settings)
    try:
        for step in range(1, steps + 1):
            state["loader"].step = step
            if rank == 1 and step > 2:
                state["model"][0].weight.data[0, 0] += 1
            Hooks(writer.hooks).after_step(writer)
            writer.step()
        step += 1
        writer.save(1)
        writer.wait()
    except UserError as error:
        return step, str(error)
    return step + 1, ""


@pytest.mark.parametrize("norm", [Running, nn.InstanceNorm1d, nn.BatchNorm1d])
def test_buffers_of_one_ranks_samples_are_found_before_the_evaluation_broadcasts_them(
    norm, tmp_path
):
    """Each rank would go on with what rank 0 has seen of its share of the batches alone."""

    def body(rank):
        state = make_state()
        norms = norm(3) if norm is Running else norm(3, track_running_stats=True)
        model = nn.Sequential(nn.Linear(4, 3), nn.Unflatten(0, (-1, 3)), norms)
        state["model"] = model = DistributedDataParallel(model)
        state["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
        writer = compared(tmp_path, state)
        inputs = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))[rank]
        for step in range(1, len(state["loader"]) + 1):
            state["loader"].step = step
            model(inputs).sum().backward()
            kind, text = outcome(lambda: Hooks(writer.hooks).after_step(writer))
            if kind:
                return step, text
        model.eval()
        model(inputs)
        return outcome(lambda: writer.save(1))

    returned = run_ranks(body, 2)
    if norm is nn.BatchNorm1d:  # with --no-sync-bn, as documented
        assert returned == [(None, "")] * 2
    else:
        for step, text in returned:
            assert step == 2 and "rank 1 differs" in text and " 2.running_mean," in text


def test_buffers_that_no_checkpoint_holds_may_differ():
    """They are caches, of the longest input that a rank has seen, for example."""

    def body(rank):
        model = nn.Linear(2, 2)
        model.register_buffer("positions", torch.arange(3 + rank), persistent=False)
        return outcome(lambda: check_replicas(model, torch.optim.SGD(model.parameters(), 0.1)))

    assert run_ranks(body, 2) == [(None, "")] * 2


def test_buffers_that_a_module_calls_local_may_differ():
    class Observer(nn.Linear):
        local_buffers = ("low",)

    def body(rank):
        model = Observer(2, 2)
        model.register_buffer("low", torch.tensor(rank))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        alike = outcome(lambda: check_replicas(model, optimizer))
        model.register_buffer("high", torch.tensor(rank))
        return alike, outcome(lambda: check_replicas(model, optimizer))

    for alike, (_, text) in run_ranks(body, 2):
        assert alike == (None, "") and " high," in text


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"check_replicas_every": 3}, 3),
        ({"check_replicas_every": 0, "save_steps": 3}, 3),  # before the first save
        ({"check_replicas_every": 0}, 5),  # before the epoch's
        ({"check_replicas_every": -1, "save_steps": 2}, 6),  # never
    ],
    ids=str,
)
def test_replicas_are_compared_when_due(settings, step, tmp_path):
    for stopped, message in run_ranks(lambda rank: replicas_run(tmp_path, rank, **settings), 2):
        assert stopped == step
        is_found = "rank 1 differs" in message and " 0.weight," in message
        assert is_found == (step < 6)
    assert (tmp_path / "last.pt").exists() == (step == 6)


def test_replicas_are_compared_with_the_buffers_at_the_epochs_end_only(tmp_path, monkeypatch):
    calls = []

    def check(model, optimizer, between_steps):
        calls.append(between_steps)
        check_replicas(model, optimizer, between_steps)

    monkeypatch.setattr("utils.replicas.check_replicas", check)

    def body(rank):
        replicas_run(tmp_path, rank=0, steps=2, save_steps=1, check_replicas_every=2)
        return calls

    assert run_ranks(body, 2) == [[True, True, True, False]] * 2


def test_replicas_are_compared_at_the_start(tmp_path):
    def body(rank, every):
        state = make_state(seed=rank)
        return outcome(compared(tmp_path, state, check_replicas_every=every).load)

    for kind, text in run_ranks(body, 2, 0):
        assert kind is UserError and "rank 1 differs" in text and " 0.weight," in text
    assert run_ranks(body, 2, -1) == [(None, "")] * 2


# Before the first step


def test_differing_ranks_are_refused():
    same, settings = [["a"]] * 3, [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.5}]
    classes, free = [["a"], ["b"], ["a"]], [{"num_workers": 1}, {}, {"output_dir": "/mnt/runs"}]
    saves = [{}, {}, {"save_steps": 2}]  # the others would wait for it
    cases = [(settings, same), ([{}] * 3, classes), (free, same), (saves, same)]

    def body(rank):
        outcomes = []
        for settings, classes in cases:
            cfg, state = Config(**settings[rank]), make_state()
            state["data"] = {"classes": classes[rank]}
            outcomes.append(outcome(lambda cfg=cfg, state=state: check_setup(cfg, state)))
        return outcomes

    for rank, outcomes in enumerate(run_ranks(body, 3)):
        (kind, text), (_, of_classes), of_free_settings, (_, of_saves) = outcomes
        assert kind is UserError, text
        expected = "rank 0 has lr 0.1, not 0.5" if rank == 2 else "rank 2 has lr 0.5, not 0.1"
        assert expected in text and "must agree" in text
        assert "has classes [" in of_classes
        assert rank == 1 or "rank 1 has classes ['b'], not ['a']" in of_classes
        assert of_free_settings == (None, "")
        assert "has save_steps" in of_saves


def test_ranks_with_different_random_splits_are_refused():
    def body(rank):
        samples = [{"text": f"{i}"} for i in range(8)]  # without labels
        split = random_split(samples, [6, 2], torch.Generator().manual_seed(rank))
        state = make_state() | {"data": describe_datasets(*split)}
        return outcome(lambda: check_setup(Config(), state))

    for kind, text in run_ranks(body, 2):
        assert kind is UserError and " has train_subsets [" in text


def test_facts_of_any_type_are_compared_or_refused():
    def body(rank, labels):
        state = make_state() | {"data": {"labels": labels}}
        return outcome(lambda: check_setup(Config(), state))

    for kind, text in run_ranks(body, 2, numpy.arange(2)):
        assert kind is UserError and "'labels'" in text and "numpy.ndarray" in text
    for labels in (torch.arange(2), [numpy.str_("a")], {"a": (1, None)}):
        assert run_ranks(body, 2, labels) == [(None, "")] * 2
    for kind, text in run_ranks(lambda rank: body(rank, torch.tensor([1, rank])), 2):
        assert kind is UserError and "has labels tensor([1, " in text


def test_ranks_with_different_numbers_of_steps_or_versions_are_refused(monkeypatch):
    def body(rank):
        state, outcomes = make_state(), []
        for change in ("steps", "torch"):
            state["loader"].length = 7 if rank == 1 and change == "steps" else 5
            if rank == 1 and change == "torch":
                monkeypatch.setattr(torch, "__version__", "2.11.0")
            outcomes.append(outcome(lambda: check_setup(Config(), state)))
        return outcomes

    steps, version = run_ranks(body, 2)[0]
    assert steps[0] is UserError and steps[1].startswith("rank 1 ")
    assert "steps per epoch 7, not 5" in steps[1]
    assert version[0] is UserError and version[1].startswith("rank 1 ")
    assert "torch '2.11.0', not" in version[1]


FILES = ("train.py", "my_task.py", "models/net.py", ".venv/lib/site-packages/numbers.py")


def start_script(folder, changed, content):
    """Act as if a script in this folder had imported FILES, of which one differs."""
    for name, text in (dict.fromkeys((*FILES, "notes.txt"), "1") | {changed: content}).items():
        path = folder / name
        sys.modules.pop(f"own_{path.stem}", None)
        if text is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if name in FILES[1:]:
                spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
                sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.argv = [str(folder / "train.py")]


def test_ranks_that_run_different_files_are_refused(tmp_path):
    """Also files of the user's own, in the folder of the script. Each node may have its copy."""
    cases = [
        ("train.py", "2", "train.py"),
        ("my_task.py", "2", "my_task.py"),
        ("models/net.py", "2", "models/net.py"),
        ("my_task.py", None, "my_task.py"),  # one rank has not imported such a file
        (".venv/lib/site-packages/numbers.py", "2", None),  # installed
        ("notes.txt", "2", None),  # not imported
    ]

    def body(rank):
        outcomes = []
        for number, (changed, content, _) in enumerate(cases):
            folder = tmp_path / f"node-{rank}" / f"case-{number}"
            start_script(folder, changed, content if rank == 1 else "1")
            outcomes.append(outcome(lambda: check_setup(Config(), make_state())))
        return outcomes

    for rank, outcomes in enumerate(run_ranks(body, 2)):
        for (_, _, named), (kind, text) in zip(cases, outcomes, strict=True):
            if named:
                assert kind is UserError and text == f"rank {1 - rank} has different code: {named}"
            else:
                assert kind is None, text


# The order of DistributedDataParallel's sums


def test_settling_buckets_leaves_forward_and_hooks_of_the_model_alone():
    def body(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
        calls, method = [], model.forward
        model.forward = lambda images: method(images) + 100  # a patch of the instance
        model.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].shape))
        wrapped = DistributedDataParallel(model)
        rebuild_ddp_buckets(wrapped)
        assert calls == [] and wrapped.module is model
        return wrapped(torch.ones(3, 2)).min().item() > 90, len(calls)

    assert run_ranks(body, 2) == [(True, 1)] * 2


def test_ddp_sums_gradients_in_the_same_order_at_every_step():
    """From three ranks on, the order matters: a resumed run must have it from its first step."""

    def body(rank, settle):
        torch.manual_seed(0)
        model = build_classifier(Settings(model="resnet20"), 10)
        model = DistributedDataParallel(model)
        before = [t.clone() for t in model.state_dict().values()]
        if settle:
            rebuild_ddp_buckets(model)
        pairs = list(zip(before, model.state_dict().values(), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs)
        assert all(p.grad is None for p in model.parameters())
        torch.manual_seed(rank)
        images, gradients = torch.randn(2, 3, 16, 16), []
        for _ in range(2):
            model.load_state_dict(dict(zip(model.state_dict(), before, strict=True)))
            model.zero_grad()
            model(images).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    assert run_ranks(body, 3, True) == [True] * 3
    assert run_ranks(body, 3, False) == [False] * 3  # the test would notice


class Waves(nn.Module):
    """A model with a complex parameter, as of a Fourier layer, and a complex buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
        self.register_buffer("rotation", torch.tensor([1j]))

    def forward(self, points):
        return self.layer(points) * self.rotation @ self.weight


def test_ranks_with_complex_parameters_train_alike():
    def body(rank):
        torch.manual_seed(0)
        model = Waves()
        wrapped = DistributedDataParallel(model)
        optimizer = build_optimizer(wrapped, Config(lr=0.1))
        rebuild_ddp_buckets(wrapped)
        before = model.weight.detach().clone()
        for points in torch.randn(2, 2, 3, 2)[:, rank]:
            optimizer.zero_grad()
            wrapped(points).abs().square().sum().backward()
            optimizer.step()
            check_replicas(wrapped, optimizer)
        return bool(((model.weight - before).imag != 0).all())

    assert run_ranks(body, 2) == [True, True]


def test_settling_ddp_buckets_compiles_nothing():
    def body(rank):
        graphs, model = [], nn.Linear(2, 3)
        model.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        rebuild_ddp_buckets(DistributedDataParallel(model))
        return len(graphs)

    assert run_ranks(body, 1) == [0]
