"""Starting from trained weights: where they are, which images they expect, what stays frozen."""

import difflib
import socket
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
import torchvision
from torch import nn
from torch.nn.functional import batch_norm

from utils.checkpoint import read_checkpoint
from utils.distributed import UserError, main_process_first

SECONDS_OF_SILENCE = 60  # of a server, before a download is given up


class Weights(NamedTuple):
    """enum: torchvision's entry, if it is one; path: the file; inputs: "image_size", "mean", "std",
    "resize" and "interpolation" of the images that they expect, as far as that is known."""

    enum: object
    path: Path
    inputs: dict


def find_weights(model, weights):
    """What `weights` means for the model of that name -> Weights. Fetches nothing.

    weights: a name in torchvision.models.get_model_weights(model), such as DEFAULT; or a file: a
    state dict under torchvision's names, or a checkpoint of these scripts. Empty: no weights.
    Raises UserError for what is none of that.
    """
    if not weights:
        return Weights(None, None, {})
    known = {}
    if model in torchvision.models.list_models(module=torchvision.models):
        known = dict(torchvision.models.get_model_weights(model).__members__)
    if weights in known:
        enum, folder = known[weights], Path(torch.hub.get_dir()) / "checkpoints"
        return Weights(enum, folder / Path(enum.url).name, _inputs(enum, model))
    path = Path(weights).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(weights, known, n=1)
        raise UserError(
            f"weights {weights!r} is no file, and {model} has "
            f"{', '.join(known) or 'no weights by name'}"
            f"{f' (did you mean {near[0]!r}?)' if near else ''}"
        )
    saved = _read(path)
    if "format" in saved:
        return Weights(None, path, saved["data"])
    same = (enum for enum in known.values() if Path(enum.url).name == path.name)
    enum = next(same, known.get("DEFAULT"))
    return Weights(None, path, _inputs(enum, model) if enum else {})


def _inputs(enum, model):
    images = enum.transforms()
    mean, std = images.mean, images.std
    if model in ("googlenet", "inception_v3"):
        mean = std = (0.5, 0.5, 0.5)  # what their transform_input=True turns the others into
    return {
        "image_size": images.crop_size[0],
        "resize": images.resize_size[0],
        "mean": list(mean),
        "std": list(std),
        "interpolation": images.interpolation.value,
    }


def _read(path):
    try:
        saved = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if isinstance(saved, dict):
            return saved
        reason = f"it holds a {type(saved).__name__}"
    except Exception as error:  # zip, pickle and OS errors of many kinds, all of one meaning
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise UserError(
        f"{path} cannot be read as weights, a file written by torch.save(model.state_dict(), "
        f"path): {reason}"
    )


def load_weights(model, name, weights):
    """Fill the model of that name, but for its head, from `weights` (see find_weights()).

    Torchvision's are downloaded by one process a node, into torch.hub's folder, where they stay.
    Raises UserError where they cannot be had, or do not fit: nothing is left at random silently.
    """
    found = find_weights(name, weights)
    if found.enum:
        saved = _fetch(name, found)
    else:
        saved = _read(found.path)
        saved = read_checkpoint(found.path) if "format" in saved else saved
        saved = saved.get("model", saved.get("state_dict", saved))
        saved = {key.removeprefix("module."): value for key, value in saved.items()}
    passed_over = (f"{head_of(model)}.", "aux1.", "aux2.", "AuxLogits.")  # heads
    wanted = {k: v.shape for k, v in model.state_dict().items() if not k.startswith(passed_over)}
    given = {k: v.shape for k, v in saved.items() if not k.startswith(passed_over)}
    for key in [key for key in wanted if key.endswith("num_batches_tracked")]:
        given.setdefault(key, wanted[key])  # which old files do not hold
    wrong = [
        f"{key} is {_size(wanted, key)} here and {_size(given, key)} there"
        for key in wanted | given
        if wanted.get(key) != given.get(key)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"the weights in {found.path} do not fit {name} as it is set up here (--stem, --norm, "
            f"--image-size): {'; '.join(wrong[:3])}{more}"
        )
    model.load_state_dict({key: saved[key] for key in wanted if key in saved}, strict=False)


def _size(shapes, key):
    return tuple(shapes[key]) if key in shapes else "missing"


def _fetch(name, found):
    """The state dict of torchvision's weights; whoever comes first on a node downloads them."""
    before = socket.getdefaulttimeout()
    with main_process_first():
        missing = not found.path.exists()
        try:
            socket.setdefaulttimeout(SECONDS_OF_SILENCE)
            with torch.random.fork_rng(devices=[]):  # leave the global random numbers alone
                return torchvision.models.get_model(name, weights=found.enum).state_dict()
        except Exception as error:  # of the network, of the disk, of a damaged file
            if missing:
                raise UserError(
                    f"the weights {found.path.name} are not in {found.path.parent} and could not "
                    f"be fetched from {found.enum.url}: {error}. Put the file there yourself, or "
                    f"pass its path with --weights"
                ) from None
            raise UserError(
                f"{found.path} is damaged ({error}): remove it, and it is fetched anew"
            ) from None
        finally:
            socket.setdefaulttimeout(before)


def head_of(model):
    """The name of the last layer that computes outputs: what depends on the classes."""
    kinds = nn.Linear | nn.Conv2d
    return [name for name, module in model.named_modules() if isinstance(module, kinds)][-1]


class FrozenBatchNorm(nn.Module):
    """A BatchNorm2d that stays as it is, in train() as well, under the same names."""

    def __init__(self, original):
        super().__init__()
        self.weight, self.bias, self.eps = original.weight, original.bias, original.eps
        for name, buffer in original.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, images):
        """images: (n, channels, height, width) -> the same shape."""
        scale, mean, variance = self.weight, self.running_mean, self.running_var
        return batch_norm(images, mean, variance, scale, self.bias, training=False, eps=self.eps)


def freeze_backbone(model):
    """The model with all but its head frozen: no gradients, and no new BatchNorm statistics."""
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
