"""Pretrained weights by name and from files, and a frozen backbone."""

import copy
import hashlib
import os

import pytest
import torch
import torchvision
from torch.nn.parallel import DistributedDataParallel

from tasks.images import Settings, build_datasets, describe
from tasks.images.models import build_classifier
from tasks.images.small_models import ResNet20
from tasks.images.weights import FrozenBatchNorm, find_weights, freeze_backbone, load_weights
from tests.forked import fork_script, same_bits
from tests.processes import run_ranks, web_server
from utils.checkpoint import FORMAT, read_checkpoint
from utils.config import load_config
from utils.errors import UserError
from utils.optim import build_optimizer

RESNET18 = torchvision.models.ResNet18_Weights.DEFAULT


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """torch.hub's folder, empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def pretrained(path, name="resnet18"):
    """Write a file like those that torchvision publishes, with random weights for 1000 classes."""
    torch.manual_seed(7)
    model = torchvision.models.get_model(name, weights=None)
    torch.save(model.state_dict(), path)
    return model.state_dict()


def config(*flags):
    return load_config(Settings, argv=["--dataset=synthetic", "--synthetic-samples=8", *flags])


def model_from(*flags):
    torch.manual_seed(0)
    return build_classifier(config(*flags), 3)


# Finding


def test_frozen_backbone_needs_weights(hub, capfd):
    pretrained(hub / "resnet18-f37072fd.pth")
    assert config("--weights=DEFAULT", "--freeze=backbone").freeze == "backbone"
    with pytest.raises(SystemExit):  # the backbone would be random
        config("--freeze=backbone")
    assert "--freeze backbone needs pretrained --weights" in capfd.readouterr().err


def test_weights_by_name_determine_size_and_normalization(hub):
    entry = find_weights("resnet50", "DEFAULT")
    assert entry.path == hub / "resnet50-11ad3fa6.pth"
    assert (entry.inputs["image_size"], entry.inputs["resize"]) == (224, 232)
    assert find_weights("resnet50", "IMAGENET1K_V1").inputs["resize"] == 256
    assert find_weights("swin_v2_t", "DEFAULT").inputs["interpolation"] == "bicubic"
    assert find_weights("inception_v3", "DEFAULT").inputs["mean"] == [0.5, 0.5, 0.5]
    assert find_weights("resnet50_cifar_gn", "DEFAULT") == entry  # suffixes do not hide them
    flags = ["--model=efficientnet_b1", "--weights=DEFAULT"]
    assert config(*flags).image_size == 240
    assert config(*flags, "--image-size=64").image_size == 64
    data = describe(*build_datasets(config("--weights=DEFAULT", "--image-size=8")))
    assert data["mean"] == [0.485, 0.456, 0.406]
    assert data["image_size"] == 8


def test_wrong_names_and_files_are_reported(tmp_path):
    with pytest.raises(UserError, match=r"resnet18 has .*did you mean 'DEFAULT'"):
        find_weights("resnet18", "DEFUALT")
    with pytest.raises(UserError, match=r"'x\.pth' .*not a file.*resnet20 .*no weights"):
        find_weights("resnet20", "x.pth")
    (tmp_path / "junk.pth").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"junk\.pth .*as weights.*torch\.save"):
        find_weights("resnet50", str(tmp_path / "junk.pth"))


def test_file_is_recognized_by_its_name_or_treated_as_the_default(tmp_path):
    for name, resize in (("resnet50-0676ba61.pth", 256), ("mine.pth", 232)):
        torch.save({}, tmp_path / name)
        assert find_weights("resnet50", str(tmp_path / name)).inputs["resize"] == resize
    inputs = {"image_size": 48, "mean": [0, 0, 0], "std": [1, 1, 1]}
    data = inputs | {"classes": ["a"], "val_files": []}
    torch.save({"format": FORMAT, "data": data}, tmp_path / "best.pt")
    assert find_weights("resnet50", str(tmp_path / "best.pt")).inputs == inputs


# Loading


def test_cached_weights_get_a_new_head(hub):
    saved = pretrained(hub / "resnet18-f37072fd.pth")
    ours = model_from("--weights=DEFAULT").state_dict()
    random = model_from().state_dict()
    for name in ("fc.weight", "fc.bias"):
        assert torch.equal(ours.pop(name), random[name])
        del saved[name]
    assert same_bits(ours, saved)


@pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet")
def test_auxiliary_classifiers_of_the_file_are_left_out(hub):
    saved = pretrained(find_weights("googlenet", "DEFAULT").path, "googlenet")
    model = model_from("--model=googlenet", "--weights=DEFAULT")
    for name, value in model.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(value, saved[name])


def test_wrapped_state_dicts_are_read_and_misfits_are_named(tmp_path):
    path = tmp_path / "w.pth"
    saved = pretrained(path)
    old = {f"module.{k}": v for k, v in saved.items() if "num_batches" not in k}
    for wrapped in ({"model": saved}, {"state_dict": old}):
        torch.save(wrapped, path)
        model = model_from(f"--weights={path}")
        assert torch.equal(model.conv1.weight, saved["conv1.weight"])
    different = r"conv1\.weight .*\(64, 3, 3, 3\) .*model .*\(64, 3, 7, 7\) .*file"
    with pytest.raises(UserError, match=different):
        model_from(f"--weights={path}", "--model=resnet18_cifar")
    with pytest.raises(UserError, match=r"layer1\.2\.conv1\.weight .*in the file.* more"):
        model_from(f"--weights={path}", "--model=resnet34")


def test_bad_file_in_the_cache_is_named(hub):
    """Also one that would run code."""
    path = hub / "resnet18-f37072fd.pth"
    pretrained(path)
    os.truncate(path, 100_000)
    with pytest.raises(UserError, match=r"f37072fd\.pth is damaged .* remove it"):
        model_from("--weights=DEFAULT")
    torch.save({"conv1.weight": os.system}, path)
    with pytest.raises(UserError, match=r"f37072fd\.pth .*\(Weights only .*remove it"):
        model_from("--weights=DEFAULT")


# Downloading


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A local server for ResNet-18's weights: the list of requests, and the name of the file."""
    site = tmp_path / "site"
    site.mkdir()
    pretrained(site / "weights")
    name = f"resnet18-{hashlib.sha256((site / 'weights').read_bytes()).hexdigest()[:8]}.pth"
    (site / "weights").rename(site / name)
    requests = tmp_path / "requests"
    with web_server(site, requests) as address:
        monkeypatch.setattr(RESNET18.value, "url", f"{address}/{name}")
        yield requests, name


def load(rank):
    model = torchvision.models.resnet18(num_classes=3)
    load_weights(model, "resnet18", "DEFAULT")
    return model.conv1.weight.sum().item()


def test_weights_are_downloaded_once_per_node(server, hub):
    first, second = run_ranks(load, 2)
    assert (hub / server[1]).exists()
    assert first == second == load(0)
    assert len(server[0].read_text().splitlines()) == 1


def test_download_with_another_checksum_is_refused(server, hub, tmp_path):
    with open(tmp_path / "site" / server[1], "ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=f" {server[1]} .*{RESNET18.value.url}.*invalid hash"):
        load(0)
    assert list(hub.iterdir()) == []


# The frozen backbone


def test_frozen_backbone_trains_the_head_alone():
    """make verify compares its runs on one and on two ranks."""

    def body(rank):
        frozen = freeze_backbone(ResNet20(3))
        model = DistributedDataParallel(frozen).train()
        before = copy.deepcopy(frozen.state_dict())
        optimizer = build_optimizer(model, config())
        model(torch.randn(4, 3, 32, 32)).sum().backward()
        optimizer.step()
        changed = [n for n, v in frozen.state_dict().items() if not torch.equal(v, before[n])]
        reduced = model._get_ddp_logging_data()["num_parameter_tensors"]
        return changed, reduced

    assert run_ranks(body, 2) == [(["fc.weight", "fc.bias"], 2)] * 2


def test_frozen_batchnorm_equals_batchnorm_in_eval_mode():
    plain = torch.nn.BatchNorm2d(3)
    plain(torch.randn(8, 3, 4, 4))
    frozen = FrozenBatchNorm(plain).train()
    assert list(frozen.state_dict()) == list(plain.state_dict())
    images = torch.randn(8, 3, 4, 4)
    assert torch.equal(frozen(images), plain.eval()(images))


def test_resumed_run_does_not_need_the_file(tmp_path):
    torch.save(ResNet20(10).state_dict(), tmp_path / "mine.pth")
    flags = {"weights": tmp_path / "mine.pth", "freeze": "backbone", "image_size": 8}
    whole = fork_script("train_1gpu.py", None, output_dir=tmp_path / "whole", **flags)
    (tmp_path / "half").mkdir()
    (tmp_path / "whole" / "epoch-0001.pt").rename(tmp_path / "half" / "last.pt")
    (tmp_path / "mine.pth").unlink()
    resumed = fork_script("train_1gpu.py", None, output_dir=tmp_path / "half", **flags)
    assert (resumed.code, resumed.stderr) == (0, "")
    ours, theirs = (read_checkpoint(r.output_dir / "last.pt") for r in (resumed, whole))
    assert same_bits(ours["model"], theirs["model"])
    assert ours["data"] == theirs["data"] and "mean" in ours["data"]
