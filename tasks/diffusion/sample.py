"""Draw images with a trained model of the diffusion task.

    python -m tasks.diffusion.sample runs/x/best.pt grid.png --images 64 --steps 50

This needs only the checkpoint, and uses the averages of docs/recipes/ema.md if it has any. Image
number i depends on --seed and i, not on how many there are.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.utils import save_image

from tasks.diffusion import build_model
from tasks.diffusion.denoiser import Denoiser
from tasks.images.weights import weights_of
from utils.checkpoint import read_checkpoint
from utils.distributed import select_device
from utils.errors import say
from utils.reports import report_errors
from utils.sample_random import normal
from utils.seeds import start_batch

SETTINGS = ("image_size", "patch_size", "layers", "heads", "width")  # of build_model()


def load_denoiser(path: str | Path) -> tuple[Denoiser, dict[str, Any]]:
    """The model of a checkpoint, in evaluation mode, and what the checkpoint says about its
    data."""
    checkpoint = read_checkpoint(Path(path))
    config, data = checkpoint["config"], checkpoint["data"]
    settings: Any = argparse.Namespace(**{name: config[name] for name in SETTINGS})
    model = build_model(settings, train_set=None)  # type: ignore[arg-type]
    weights = weights_of(checkpoint)
    model.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    return model.eval(), data


@torch.no_grad()
def sample(model: Denoiser, noise: Tensor, steps: int) -> Tensor:
    """Images, normalized, of the same shape as the noise (n, 3, size, size), by Euler's method.

    On the straight path from an image to noise, (noisy - image) / level is its direction.
    """
    levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
    noisy = noise
    for level, following in itertools.pairwise(levels):
        images = model.denoise(noisy, noisy.new_full((len(noisy),), level))
        noisy = images + following / level * (noisy - images)
    return noisy


def draw(model: Denoiser, data: dict[str, Any], count: int, steps: int, seed: int) -> Tensor:
    """Pixels in [0, 1], float (count, 3, size, size), on the CPU. data: see load_denoiser()."""
    parameter, size = next(model.parameters()), data["image_size"]
    parts = []
    for numbers in torch.arange(count).split(64):  # which bounds the memory
        start_batch(seed, 0, numbers)
        with torch.no_grad():
            noise = normal("sample", (len(numbers), 3, size, size), parameter.device)
        parts.append(sample(model, noise.to(parameter.dtype), steps).cpu())
    mean, std = (torch.tensor(data[name])[:, None, None] for name in ("mean", "std"))
    return (torch.cat(parts) * std + mean).clamp(0, 1)


@report_errors
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tasks.diffusion.sample", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", help="such as runs/x/best.pt")
    parser.add_argument("picture", help="a .png file to write: a grid of the images")
    parser.add_argument("--images", type=int, default=64, help="(default: 64)")
    parser.add_argument("--steps", type=int, default=50, help="forward passes (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    args = parser.parse_args()
    model, data = load_denoiser(args.checkpoint)
    model = model.to(select_device(args.device))
    pixels = draw(model, data, args.images, args.steps, args.seed)
    save_image(pixels, args.picture, nrow=math.ceil(math.sqrt(args.images)))
    say(f"{args.picture}: {args.images} images")


if __name__ == "__main__":
    sys.exit(main())
