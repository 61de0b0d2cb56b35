"""The check that all ranks hold the same model."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.launch import run_ranks
from utils.errors import UserError
from utils.replicas import check_replicas, checksums
from utils.sync_batchnorm import SyncBatchNorm


def checksum(tensor):
    return checksums([tensor])[0]


def make(norm=torch.nn.BatchNorm1d):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), norm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return torch.nn.ModuleDict({"module": model}), optimizer


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
    """Of several lengths, some longer than a buffer, and with values that are not numbers."""
    lengths = [1, 3, 1 << 16, 2, 5, 0x30001, 1]
    tensors = [torch.randint(-(2**62), 2**62, (n,)) for n in lengths]
    flat = torch.cat(tensors)
    terms = flat * torch.arange(1, 2 * len(flat), 2)
    assert checksums(tensors) == [part.sum().item() for part in terms.split(lengths)]
    nan = torch.tensor([0x7FF8000000000000, 0x7FF8000000000001]).view(torch.float64)
    assert nan.isnan().all() and checksum(nan[:1]) != checksum(nan[1:])
    assert checksums([nan, *tensors]) == checksums([nan.clone(), *tensors])


class Count(TorchDispatchMode):
    """Counts the operations that launch kernels: the views are left out."""

    def __init__(self):
        super().__init__()
        self.launched = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = ("detach", "view", "split", "select", "slice", "lift_fresh")
        self.launched += function.overloadpacket.__name__ not in views
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [10, 1000])
def test_kernels_do_not_grow_with_the_number_of_tensors(count):
    tensors = [torch.ones(3 + i % 2) for i in range(count)]  # as int32 and as int64
    with Count() as counter:
        assert len(checksums(tensors)) == count
    assert counter.launched <= 25


def test_differing_tensor_and_its_rank_are_named():
    cases = ("0.weight", "1.running_mean", "1.num_batches_tracked", "0.bias (momentum_buffer)")

    def body(rank, world_size):
        messages = []
        for name in cases:
            model, optimizer = make()
            check_replicas(model, optimizer)
            if rank == world_size - 2:
                tensors = dict(model["module"].state_dict())
                state = optimizer.state[model["module"][0].bias]
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
                assert f"rank {odd} differs from the others in {name}" in message
                assert "the first of 1 tensors that differ" in message


def test_buffers_may_differ_between_steps():
    """DistributedDataParallel broadcasts them at the next forward pass."""

    def body(rank):
        outcomes = []
        for norm in (torch.nn.BatchNorm1d, SyncBatchNorm):
            for between_steps in (True, False):
                model, optimizer = make(norm)
                model["module"][1].running_mean += rank
                try:
                    check_replicas(model, optimizer, between_steps=between_steps)
                    outcomes.append("same")
                except UserError:
                    outcomes.append("different")
        return outcomes

    expected = ["same", "different", "same", "different"]
    assert run_ranks(body, 2) == [expected, expected]


def test_single_process_has_nothing_to_compare():
    model, optimizer = make()
    model["module"][1].running_mean += 1
    check_replicas(model, optimizer)
