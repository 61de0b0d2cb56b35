"""--weights: start from pretrained weights, and with --freeze, train only the last layer."""

import difflib
import socket
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from utils.distributed import main_process_first
from utils.errors import UserError

DOWNLOAD_TIMEOUT = 60  # seconds without an answer before a download fails


class Weights(NamedTuple):
    """enum: torchvision's entry, or None; path: the file; inputs: what the weights expect of their
    images, as far as it is known: image_size, resize, interpolation, mean, std."""

    enum: Any
    path: Path
    inputs: dict[str, Any]


def find_weights(model: str, weights: str) -> Weights:
    """What `weights` means for the model of that name, as Weights. Downloads nothing.

    weights: a name in torchvision.models.get_model_weights(model), such as DEFAULT; or a file: a
    state dict with torchvision's names, or a checkpoint of these scripts.
    Raises UserError for anything else.
    """
    base, known = _base_name(model), {}
    if base in torchvision.models.list_models(module=torchvision.models):
        known = dict(torchvision.models.get_model_weights(base).__members__)
    if weights in known:
        enum, folder = known[weights], Path(torch.hub.get_dir()) / "checkpoints"
        return Weights(enum, folder / Path(enum.url).name, _inputs(enum, base))
    path = Path(weights).expanduser()
    if not path.is_file():
        close = difflib.get_close_matches(weights, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(
            f"--weights {weights!r} is not a file, and {base} has "
            f"{', '.join(known) or 'no weights by name'}{hint}"
        )
    saved = _read(path)
    if _is_checkpoint(saved):
        return Weights(None, path, _inputs_of_checkpoint(saved))
    same_file = (enum for enum in known.values() if Path(enum.url).name == path.name)
    enum = next(same_file, known.get("DEFAULT"))
    return Weights(None, path, _inputs(enum, base) if enum else {})


def inputs_of_run(cfg: Any) -> dict[str, Any]:
    """What cfg.weights expects of its images, or what the run has used that is to be resumed; see
    Weights. Raises UserError if there are no such weights."""
    if checkpoint := _resumed(cfg):
        return _inputs_of_checkpoint(checkpoint)
    return find_weights(cfg.model, cfg.weights).inputs


def load_and_freeze(model: nn.Module, cfg: Any) -> nn.Module:
    """The model with cfg.weights in all layers but the last, and what cfg.freeze names frozen."""
    if not _resumed(cfg):
        load_weights(model, cfg.model, cfg.weights)
    return freeze_backbone(model) if cfg.freeze == "backbone" else model


def weights_of(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """{name: tensor} of the model to use: with averages of its parameters, if a run keeps them (see
    docs/recipes/ema.md), because best.pt is the epoch in which those were best."""
    states = checkpoint["optimizer"].get("state", {})  # SGD without momentum has none
    averages = {name: s["average"] for name, s in states.items() if "average" in s}
    return checkpoint["model"] | averages


def load_weights(model: nn.Module, name: str, weights: str) -> None:
    """Fill the model of that name, except for its last layer, from `weights` (see find_weights).

    Torchvision's weights are downloaded into torch.hub's folder, once if the nodes share it.
    Raises UserError if they cannot be read, or do not fit in every other layer.
    """
    entry = find_weights(name, weights)
    saved: Any = _download(_base_name(name), entry) if entry.enum else _read(entry.path)
    if _is_checkpoint(saved):
        from utils.checkpoint import read_checkpoint  # verifies checksums, reads sharded ones

        saved = weights_of(read_checkpoint(entry.path))
    saved = saved.get("model", saved.get("state_dict", saved))
    saved = {key.removeprefix("module."): value for key, value in saved.items()}
    heads = (f"{head_of(model)}.", "aux1.", "aux2.", "AuxLogits.")
    expected = {k: v.shape for k, v in model.state_dict().items() if not k.startswith(heads)}
    stored = {k: v.shape for k, v in saved.items() if not k.startswith(heads)}
    for key in (key for key in expected if key.endswith("num_batches_tracked")):
        stored.setdefault(key, expected[key])  # missing from old files
    differences = [
        f"{key} is {_size(expected, key)} in the model and {_size(stored, key)} in the file"
        for key in expected | stored
        if expected.get(key) != stored.get(key)
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"the weights in {entry.path} do not fit the model {name} (check its suffixes, and "
            f"--image-size): {'; '.join(differences[:3])}{more}"
        )
    model.load_state_dict({key: saved[key] for key in expected if key in saved}, strict=False)


def head_of(model: nn.Module) -> str:
    """The name of the last linear or convolutional layer, whose outputs are the classes."""
    kinds = nn.Linear | nn.Conv2d
    return [name for name, module in model.named_modules() if isinstance(module, kinds)][-1]


class FrozenBatchNorm(nn.Module):
    """A BatchNorm2d that keeps its weights and statistics, in train() too, under the same names."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, original: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = original.weight, original.bias, original.eps
        for name, buffer in original.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, images: Tensor) -> Tensor:
        """images: (n, channels, height, width) -> the same shape."""
        mean, variance = self.running_mean, self.running_var
        return batch_norm(images, mean, variance, self.weight, self.bias, eps=self.eps)


def freeze_backbone(model: nn.Module) -> nn.Module:
    """The model with everything but its last layer frozen: no gradients, fixed BatchNorm."""
    head = model.get_submodule(head_of(model))
    model.requires_grad_(False)
    head.requires_grad_(True)
    return _freeze_batchnorm(model)


def _freeze_batchnorm(module):
    if isinstance(module, nn.BatchNorm2d):
        return FrozenBatchNorm(module)
    for name, child in module.named_children():
        setattr(module, name, _freeze_batchnorm(child))
    return module


def _base_name(model):
    """The name without its suffixes: resnet18 for resnet18_cifar_gn."""
    if not model.endswith(("_cifar", "_gn")):
        return model
    from tasks.images.small_models import split_name

    return split_name(model)[0]


def _inputs(enum, model):
    transform = enum.transforms()
    mean, std = transform.mean, transform.std
    if model in ("googlenet", "inception_v3"):
        mean = std = (0.5, 0.5, 0.5)  # what their transform_input=True converts to
    return {
        "image_size": transform.crop_size[0],
        "resize": transform.resize_size[0],
        "interpolation": transform.interpolation.value,
        "mean": list(mean),
        "std": list(std),
    }


def _inputs_of_checkpoint(checkpoint):
    names = ("image_size", "resize", "interpolation", "mean", "std")
    return {name: checkpoint["data"][name] for name in names if name in checkpoint["data"]}


def _resumed(cfg):
    """The checkpoint from which a run with cfg.weights continues, or None. It replaces the weights,
    whose file may be gone."""
    path = Path(cfg.output_dir) / "last.pt"
    with suppress(UserError):  # the Checkpointer reports it, or finds the one before
        saved = _read(path) if cfg.resume != "never" else None
        return saved if saved and saved.get("config", {}).get("weights") == cfg.weights else None


def _read(path):
    try:
        saved = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if isinstance(saved, dict):
            return saved
        reason = f"it holds a {type(saved).__name__}"
    except Exception as error:  # zip, pickle and OS errors of many kinds, which all mean the same
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise UserError(
        f"{path} cannot be read as weights, a file written by torch.save(model.state_dict(), "
        f"path): {reason}"
    )


def _is_checkpoint(saved):
    return "format" in saved and isinstance(saved.get("data"), dict)


def _size(shapes, key):
    return tuple(shapes[key]) if key in shapes else "missing"


def _download(name, entry):
    """The state dict of torchvision's weights, from torch.hub's folder or from the network."""
    before = socket.getdefaulttimeout()
    with main_process_first():  # one process per node downloads
        is_new = not entry.path.exists()
        try:
            socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
            # Torchvision would unpickle the file, whatever is in it.
            torch.hub.load_state_dict_from_url(
                entry.enum.url, map_location="cpu", check_hash=True, weights_only=True
            )
            with torch.random.fork_rng(devices=[]):  # leave the global random state alone
                return torchvision.models.get_model(name, weights=entry.enum).state_dict()
        except Exception as error:  # from the network, the disk, or a damaged file
            reason = str(error).partition("\n")[0]
            if is_new:
                raise UserError(
                    f"the weights {entry.path.name} are not in {entry.path.parent} and could not "
                    f"be downloaded from {entry.enum.url}: {reason}. Put the file there, or pass "
                    f"its path with --weights"
                ) from None
            raise UserError(
                f"{entry.path} is damaged ({reason}): remove it to download it again"
            ) from None
        finally:
            socket.setdefaulttimeout(before)
