"""Stages of a model on several devices, and what train_mp.py and train_ddp_mp.py need for them."""

import os

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tasks.images
from tasks.images.small_models import ResNet20
from tests.accelerators import visible_accelerators
from tests.forked import fork_script
from tests.processes import run_ranks
from train_mp import place_stages
from utils.errors import UserError
from utils.rungs.model_parallel import MicroBatches, assign_layers, get_devices
from utils.sync_batchnorm import convert_sync_batchnorm

CPU, META = torch.device("cpu"), torch.device("meta")
NCCL2 = "TORCH_DIST_USE_NCCL2"


@pytest.fixture
def four_gpus(monkeypatch):
    """Four visible GPUs, for torchrun's processes. Yields the list of devices made current."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv(NCCL2, "")  # so that it is removed afterwards
    monkeypatch.delenv(NCCL2)
    return visible_accelerators(monkeypatch, 4)


def small_vit():
    torch.manual_seed(0)
    return torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=3, num_heads=2, hidden_dim=8, mlp_dim=16
    )


def test_synchronized_buffers_are_not_broadcast():
    """DistributedDataParallel would, before each forward pass, and they are the same already."""

    def body(rank):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        plain = DistributedDataParallel(MicroBatches(model, 2))
        synced = DistributedDataParallel(MicroBatches(convert_sync_batchnorm(model), 2))
        return plain.will_sync_module_buffers(), synced.will_sync_module_buffers()

    assert run_ranks(body, 2) == [(True, False)] * 2


def test_stages_are_balanced():
    layers, devices = tasks.images.layers(ResNet20(10)), ["a", "b", "c"]
    for count in (1, 2, 3):
        owners = [device for _, device in assign_layers(layers, devices[:count])]
        assert owners == sorted(owners) and set(owners) == set(devices[:count])
    sizes = {}
    for module, device in assign_layers(layers, devices[:2]):
        sizes[device] = sizes.get(device, 0) + sum(p.numel() for p in module.parameters())
    weights = [sum(p.numel() for m in parts for p in m.parameters()) for _, parts in layers]
    best = min(max(sum(weights[:cut]), sum(weights[cut:])) for cut in range(1, 11))
    assert max(sizes.values()) == best


def test_stages_may_be_set_by_hand():
    layers, devices = tasks.images.layers(ResNet20(10)), ["a", "b", "c"]
    owners = [device for _, device in assign_layers(layers, devices, "2,8,1")]
    assert owners == ["a"] * 3 + ["b"] * 8 + ["c"]  # the first layer has two modules
    for split in ("2,9", "2,8,2", "0,10,1", "a,b,c"):
        with pytest.raises(UserError, match=f"--split {split} "):
            assign_layers(layers, devices, split)
    with pytest.raises(UserError, match="12 stages"):
        assign_layers(layers, list(range(12)))


def test_module_of_two_layers_stays_with_the_first():
    """As an embedding whose weight is also that of the last layer."""
    shared, other = nn.Linear(2, 2), nn.Linear(2, 2)
    layers = [(shared, [shared]), (other, [other]), (shared, [shared])]
    assert assign_layers(layers, ["a", "b", "c"]) == [(shared, "a"), (other, "b")]


def test_activations_follow_the_layers():
    """Meta tensors stand in for a second GPU: an operation on both devices would raise."""
    model, images = small_vit().eval(), torch.randn(2, 3, 16, 16)
    expected = model(images)
    layers = tasks.images.layers(model)
    torch.testing.assert_close(place_stages(model, layers, [CPU, CPU, CPU], "")(images), expected)
    model = small_vit().eval()
    outputs = place_stages(model, tasks.images.layers(model), [CPU, META], "")(images)
    assert outputs.device == META and outputs.shape == expected.shape
    assert {parameter.device for parameter in model.parameters()} == {CPU, META}


class Masked(nn.Module):
    """Its second layer takes two tensors, one of them by name, and it has a weight of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Bilinear(3, 3, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.second(self.first(x) * self.scale, input2=x)


def test_no_layer_visits_the_first_device_and_all_inputs_follow():
    """A model that is too large for one device must not be moved there; `meta` keeps no values."""
    model = Masked()
    layers = [(None, [model.first]), (None, [model.second])]
    before = model.second.weight.clone()
    model = place_stages(model, layers, [META, CPU], "1,1")
    assert model.first.weight.device == model.scale.device == META
    assert model.second.weight.equal(before)
    model = Masked()
    model = place_stages(model, [(None, [model.first]), (None, [model.second])], [CPU, META], "1,1")
    assert model(torch.ones(4, 3)).shape == (4, 2)


def test_micro_batches_add_up_to_the_batch():
    images = torch.randn(7, 3)
    for count, parts in ((1, [7]), (3, [3, 3, 1]), (9, [1] * 7)):
        model, sizes = nn.Linear(3, 2), []
        expected = model(images)
        model.register_forward_hook(lambda _, x, y, sizes=sizes: sizes.append(len(x[0])))
        torch.testing.assert_close(MicroBatches(model, count)(images), expected)
        assert sizes == parts


def test_device_names_without_a_gpu(monkeypatch):
    visible_accelerators(monkeypatch, 0)
    assert get_devices() == [CPU, CPU]
    assert get_devices("cpu,cpu,cpu") == [CPU] * 3
    for names in ("cpu,tpu", "meta", "cpu,", "", "cuda:-1,cpu", "cuda,cuda"):
        with pytest.raises(UserError, match=f"--devices {names}"):
            get_devices(names)


def test_each_process_gets_gpus_of_its_own(monkeypatch, four_gpus):
    cuda = [torch.device("cuda", i) for i in range(4)]
    assert get_devices() == cuda
    assert get_devices("cuda,cuda") == get_devices("cuda:0,cuda:1") == cuda[:2]
    assert get_devices("cuda:1,cpu") == [cuda[1], CPU]
    with pytest.raises(UserError, match="5 GPUs"):
        get_devices("cuda:4,cuda:0")

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for local_rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        expected = cuda[2 * local_rank :][:2]
        assert get_devices() == get_devices("cuda,cuda") == expected
        assert four_gpus[-1] == expected[0]
    assert get_devices("cpu,cpu") == [CPU, CPU]
    assert get_devices("cuda:0,cuda:1") == cuda[:2]  # shared by the processes, as requested
    with pytest.raises(UserError, match="6 GPUs"):
        get_devices("cuda,cuda,cuda")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert get_devices("cuda,cuda,cuda,cuda") == cuda  # as under srun --gpus-per-task=4


def test_nccl_is_not_bound_to_one_of_several_gpus(four_gpus):
    """DistributedDataParallel would refuse a model that is on other devices, too. Of processes with
    one GPU each, the backend is PyTorch's choice."""
    get_devices("cuda")
    assert NCCL2 not in os.environ
    get_devices("cuda,cuda")
    assert os.environ[NCCL2] == "0"


def test_stages_of_two_kinds_are_refused_under_ddp():
    def body(rank):
        return assign_layers(tasks.images.layers(ResNet20(10)), [META, CPU])

    assert len(body(0)) == 12
    (error,) = run_ranks(body, 1)
    assert isinstance(error, UserError)


def test_one_process_runs_micro_batches(tmp_path):
    """Nothing runs the model on a few blank images, which BatchNorm would refuse."""
    flags = {"micro_batches": 2, "devices": "cpu,cpu", "synthetic_samples": 24, "epochs": 1}
    run = fork_script("train_ddp_mp.py", 1, output_dir=tmp_path / "run", **flags)
    assert (run.code, run.stderr) == (0, "")
