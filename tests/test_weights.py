"""Fine-tuning: weights by name and from files, a frozen backbone, optimizers and schedules."""

import hashlib
import re
import socket

import pytest
import torch
import torchvision
from torch.nn.parallel import DistributedDataParallel

from tests.launch import SMALL, run_ranks, run_script, web_server
from tools.verify import FROZEN, Case, Verifier
from utils.checkpoint import read_checkpoint
from utils.config import load_config
from utils.datasets import build_datasets
from utils.distributed import PeerError, UserError
from utils.models import build_model
from utils.optim import build_optimizer, build_scheduler
from utils.runtime import seed_everything
from utils.weights import FrozenBatchNorm, find_weights, freeze_backbone, head_of, load_weights

RESNET18 = torchvision.models.ResNet18_Weights.DEFAULT


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """torch.hub's folder, empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def pretrained(path, name="resnet18", **options):
    """A file as torchvision publishes them: 1000 classes, from other random numbers."""
    torch.manual_seed(7)
    model = torchvision.models.get_model(name, weights=None, **options)
    torch.save(model.state_dict(), path)
    return model.state_dict()


def model_from(*flags, classes=3):
    cfg = load_config(["--dataset=synthetic", *flags])
    seed_everything(cfg.seed)
    return build_model(cfg, classes)


# Where they are


def test_weights_by_name_bring_size_and_normalisation(hub, tmp_path):
    found = find_weights("resnet50", "DEFAULT")
    assert found.path == hub / "resnet50-11ad3fa6.pth" and found.enum.name == "IMAGENET1K_V2"
    assert (found.inputs["image_size"], found.inputs["resize"]) == (224, 232)
    assert find_weights("resnet50", "IMAGENET1K_V1").inputs["resize"] == 256
    assert find_weights("swin_v2_t", "DEFAULT").inputs["interpolation"] == "bicubic"
    assert find_weights("inception_v3", "DEFAULT").inputs["mean"] == [0.5, 0.5, 0.5]
    assert find_weights("resnet18", "").inputs == {}
    cfg = load_config(["--dataset=synthetic", "--model=efficientnet_b1", "--weights=DEFAULT"])
    assert cfg.image_size == 240 and load_config(["--dataset=synthetic"]).image_size == 32
    meta = build_datasets(cfg)[1].meta()
    assert meta["mean"] == [0.485, 0.456, 0.406] and meta["resize"] == 240


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights=DEFUALT"], r"resnet18 has .*did you mean 'DEFAULT'"),
        (["--weights=x.pth", "--model=resnet20"], "resnet20 has no weights by name"),
        (["--freeze=backbone"], "random backbone: pass --weights"),
        (["--image-size=7"], "image_size must be 0 or at least 8"),
        (["--val-fraction=0.1"], "val_fraction is for dataset=imagefolder"),
        (["--val-fraction=1", "--dataset=imagefolder"], "nothing to train on"),
    ],
)
def test_mistakes_are_named_before_anything_starts(flags, message, capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--dataset=synthetic", *flags])
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_file_is_known_by_its_name_or_taken_for_the_default(tmp_path):
    for name, resize in (("resnet50-0676ba61.pth", 256), ("mine.pth", 232)):
        torch.save({}, tmp_path / name)
        assert find_weights("resnet50", str(tmp_path / name)).inputs["resize"] == resize
    facts = {"image_size": 48, "mean": [0, 0, 0], "std": [1, 1, 1]}
    torch.save({"format": 1, "data": facts}, tmp_path / "best.pt")
    assert find_weights("resnet50", str(tmp_path / "best.pt")).inputs == facts
    for junk in (b"", b"junk", b"PK\x03\x04junk"):
        (tmp_path / "junk.pth").write_bytes(junk)
        with pytest.raises(UserError, match=r"junk\.pth cannot be read as weights"):
            find_weights("resnet50", str(tmp_path / "junk.pth"))
    torch.save(torch.ones(2), tmp_path / "junk.pth")
    with pytest.raises(UserError, match="it holds a Tensor"):
        find_weights("resnet50", str(tmp_path / "junk.pth"))


# Loading


def test_a_new_head_on_the_weights_in_the_cache(hub):
    saved = pretrained(hub / "resnet18-f37072fd.pth")
    ours = model_from("--weights=DEFAULT").state_dict()
    random = model_from().state_dict()
    for name, value in ours.items():
        assert torch.equal(value, random[name] if name.startswith("fc.") else saved[name]), name
    assert ours["fc.weight"].shape == (3, 512)


@pytest.mark.parametrize("name", ["googlenet", "densenet121", "vit_b_32"])
def test_weights_of_other_families(name, hub):
    options = {"init_weights": False} if name == "googlenet" else {}
    saved = pretrained(find_weights(name, "DEFAULT").path, name, **options)
    model = model_from(f"--model={name}", "--weights=DEFAULT")
    ours, head = model.state_dict(), head_of(model)
    assert all(torch.equal(ours[n], saved[n]) for n in ours if not n.startswith(head))
    assert len(ours[f"{head}.bias"]) == 3


def test_the_head_of_every_model():
    for name in torchvision.models.list_models(module=torchvision.models):
        if "regnet" in name or name in ("googlenet", "inception_v3"):  # not on the meta device
            continue
        with torch.device("meta"):
            model = torchvision.models.get_model(name, weights=None, num_classes=7)
        head = model.get_submodule(head_of(model))
        assert getattr(head, "out_features", getattr(head, "out_channels", 0)) == 7, name


def test_wrapped_files_and_files_that_do_not_fit(tmp_path):
    path = tmp_path / "w.pth"
    saved = pretrained(path)
    old = {f"module.{k}": v for k, v in saved.items() if "num_batches" not in k}
    for wrapped in (saved, {"state_dict": saved}, {"model": saved}, old):
        torch.save(wrapped, path)
        model = model_from(f"--weights={path}")
        assert torch.equal(model.conv1.weight, saved["conv1.weight"])
    for flags, message in (
        (["--stem=cifar"], r"conv1\.weight is \(64, 3, 3, 3\) here and \(64, 3, 7, 7\) there"),
        (["--norm=group"], r"--norm.*bn1\.running_mean is missing here"),
        (["--model=resnet34"], r"layer1\.2\.conv1\.weight .* and missing there.* more"),
    ):
        with pytest.raises(UserError, match=message):
            model_from(f"--weights={path}", *flags)


def test_a_damaged_file_in_the_cache_is_named(hub):
    pretrained(hub / "resnet18-f37072fd.pth")
    whole = (hub / "resnet18-f37072fd.pth").read_bytes()
    (hub / "resnet18-f37072fd.pth").write_bytes(whole[:100000])
    with pytest.raises(UserError, match=r"f37072fd\.pth is damaged .* remove it"):
        model_from("--weights=DEFAULT")


# Fetching


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Weights behind a server on this machine: yields (its requests, name of the file)."""
    site = tmp_path / "site"
    site.mkdir()
    pretrained(site / "weights")
    name = f"resnet18-{hashlib.sha256((site / 'weights').read_bytes()).hexdigest()[:8]}.pth"
    (site / "weights").rename(site / name)
    requests = tmp_path / "requests"
    with web_server(site, requests) as address:
        url = f"{address}/{name}"
        monkeypatch.setattr(RESNET18.value, "url", url)
        yield requests, name


def weights_on_ranks(ranks, **options):
    def body(rank):
        model = torchvision.models.resnet18(num_classes=3)
        try:
            load_weights(model, "resnet18", "DEFAULT")
        except Exception as error:
            return error
        return float(model.conv1.weight.sum())

    return run_ranks(body, ranks, **options)


def test_one_process_a_node_fetches_them(server, hub):
    sums = weights_on_ranks(3)
    assert sums == [sums[0]] * 3 and isinstance(sums[0], float)
    assert (hub / server[1]).exists()
    assert weights_on_ranks(2) == sums[:2]
    assert len(server[0].read_text().splitlines()) == 1


def test_offline_and_absent_names_the_file_and_its_place(server, hub, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/{server[1]}"
        monkeypatch.setattr(RESNET18.value, "url", url)
        first, second = weights_on_ranks(2)
    assert isinstance(first, UserError) and isinstance(second, PeerError)
    for part in (server[1], str(hub), "could not be fetched", "--weights"):
        assert part in str(first)


def test_a_download_that_is_not_what_it_should_be_is_refused(server, hub, tmp_path):
    with open(tmp_path / "site" / server[1], "ab") as file:
        file.write(b"x")
    first, _ = weights_on_ranks(2)
    assert "could not be fetched" in str(first) and list(hub.iterdir()) == []


# The frozen backbone


def test_a_frozen_backbone_trains_its_head_alone():
    def body(rank):
        seed_everything(0)
        frozen = freeze_backbone(torchvision.models.resnet18(num_classes=3))
        model = DistributedDataParallel(frozen).train()
        before = {name: value.clone() for name, value in frozen.state_dict().items()}
        optimizer = build_optimizer(model, load_config(["--dataset=synthetic"]))
        model(torch.randn(4, 3, 32, 32)).sum().backward()
        optimizer.step()
        changed = [n for n, v in frozen.state_dict().items() if not torch.equal(v, before[n])]
        waited_for = model._get_ddp_logging_data()["num_parameter_tensors"]
        return changed, waited_for, sum(len(g["params"]) for g in optimizer.param_groups)

    assert run_ranks(body, 2) == [(["fc.weight", "fc.bias"], 2, 2)] * 2


def test_a_frozen_batchnorm_is_a_batchnorm_in_eval():
    plain = torch.nn.BatchNorm2d(3)
    plain(torch.randn(8, 3, 4, 4))
    frozen = FrozenBatchNorm(plain).train()
    assert list(frozen.state_dict()) == list(plain.state_dict())
    images = torch.randn(8, 3, 4, 4)
    assert torch.equal(frozen(images), plain.eval()(images))


def test_every_script_takes_weights_and_a_frozen_backbone(tmp_path):
    """train_ddp.py's rows stand in the table of make verify."""
    two = {"train_ddp_amp.py": {}, "train_fsdp.py": {}, "train_ddp_mp.py": {"devices": "cpu,cpu"}}
    one = {"train_dp.py": {}, "train_mp.py": {}, "train_ddp_spawn.py": {"spawn_processes": 2}}
    cases = [
        Case(script, script, nproc, FROZEN | flags, reference="1gpu frozen")
        for nproc, scripts in ((2, two), (None, one))
        for script, flags in scripts.items()
    ]
    # Nothing depends on the other samples of a batch: the parts of one compute what the whole does.
    parts = FROZEN | {"micro_batches": 2}
    cases.append(Case("accum", "train_ddp_accum.py", 2, parts, reference="1gpu frozen"))
    rows = Verifier(tmp_path).run(cases)
    assert [row.verdict for row in rows] == ["green"] * 7
    saved, ours = torch.load(tmp_path / "weights.pth"), tmp_path / "train_fsdp.py" / "last.pt"
    for name, value in read_checkpoint(ours)["model"].items():
        assert name.startswith("fc.") != torch.equal(value.float(), saved[name])


# Optimizers and schedules


def test_a_run_goes_on_with_another_script_and_adams_state(tmp_path):
    """From whole checkpoints and from sharded ones."""
    flags = {"optimizer": "adam", "lr": 1e-3, "dtype": "float64"}
    begin = {
        "1gpu": ("train_1gpu.py", None, {}),
        "fsdp": ("train_fsdp.py", 2, {"save_sharded": True}),
    }
    losses = []
    for first, (script, nproc, more) in begin.items():
        folder = tmp_path / first
        run = run_script(script, nproc, output_dir=folder, **flags, **more)
        losses.append([row["train_loss"] for row in run.rows])
        for name in ("last.pt", "best.pt", "epoch-0002.pt"):
            (folder / name).unlink()
        script, nproc, more = begin[{"1gpu": "fsdp", "fsdp": "1gpu"}[first]]
        run = run_script(script, nproc, output_dir=folder, **flags, **more)
        losses.append([row["train_loss"] for row in run.rows])
        assert run.code == 0, run.stderr
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-9)
    assert SMALL["epochs"] == len(losses[0]) == 2


def test_the_step_schedule_falls_after_the_warm_up():
    flags = ["--lr-schedule=step", "--lr-step-epochs=2", "--lr-gamma=0.5", "--lr=1", "--epochs=7"]
    cfg = load_config(["--dataset=synthetic", *flags])
    optimizer = build_optimizer(torch.nn.Linear(1, 1), cfg)
    scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=2)
    rates = []
    for _ in range(14):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == [0.5, 1] + [1] * 4 + [0.5] * 4 + [0.25] * 4
