"""What refers to parameters that are replaced: kept, or refused with a name."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from tests.processes import run_ranks
from utils.errors import UserError
from utils.rungs.parameters import replacing_parameters
from utils.rungs.tensor_parallel import divide_layers, init_mesh


class Net(nn.Module):
    """Its last layer has a second name, and it may have other things of the first layer's."""

    def __init__(self, change=None):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.recurrent = nn.LSTM(4, 4)  # also has its parameters in a list, which follows them
        self.alias = self.last
        if change:
            change(self)


def hook(net):
    net.first.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


def hook_after_accumulation(net):
    net.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def keep_in_list(net):
    net.kept = [net.first.weight]


def keep_in_function(net):
    weight = net.first.weight
    net.penalty = lambda: weight.square().sum()


def tie(net):
    net.last.weight = net.first.weight


def share(net):
    net.last.shared = net.first  # in a block, and outside of it


def shard(net):
    for parameter in net.parameters():  # leaves a variable that refers to the last one
        assert not isinstance(parameter, DTensor)
    with replacing_parameters(net):
        fully_shard(net.last)
        fully_shard(net)


def divide(net):
    mesh = init_mesh(torch.device("cpu"), data=1)["tensor"]
    with replacing_parameters(net):
        divide_layers([(net.first, ColwiseParallel())], mesh)


def test_what_would_go_on_with_an_old_parameter_is_refused():
    def body(rank):
        for change in (hook, hook_after_accumulation, keep_in_list, keep_in_function, tie, share):
            with pytest.raises(UserError, match=r"first\.weight"):
                shard(Net(change))
        for change in (hook, tie):
            with pytest.raises(UserError, match=r"first\.weight"):
                divide(Net(change))

    assert run_ranks(body, 2) == [None, None]


def test_attributes_stay():
    """Such as those that tell an optimizer what to decay."""

    def body(rank):
        for replace in (shard, divide):
            net = Net()
            for number, parameter in enumerate(net.parameters()):
                parameter.number = number
            replace(net)
            assert any(isinstance(parameter, DTensor) for parameter in net.parameters())
            assert [parameter.number for parameter in net.parameters()] == list(range(8))

    assert run_ranks(body, 2) == [None, None]
