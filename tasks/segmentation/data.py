"""Images and their masks: of shapes, drawn at random, or from files.

The pixels of a mask are the numbers of classes, from 0, and IGNORED where there is no label.
"""

import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from utils.distributed import is_main_process
from utils.errors import UserError, warn
from utils.seeds import derive_seed

IGNORED = 255
SHAPES = ("background", "disc", "square", "triangle")
EXTENSIONS = (".jpg", ".jpeg", ".png")
IMAGE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")  # of 8 bits, which convert() keeps
MASK_MODES = ("1", "L", "P")  # one channel
ORIENTATION = 0x0112  # an entry of EXIF: from 5 on, it exchanges width and height
ENOUGH = 1000  # masks, in which a class that matters occurs
Pair = tuple[Path, Path]  # an image and its mask


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Images of one to four shapes in random colors and noise. Later shapes hide earlier ones.

    A sample depends only on (seed, index), and is made of integers, so that every machine creates
    the same. augment: flip half of the images.
    """

    def __init__(self, samples: int, size: int, seed: int, augment: bool = False) -> None:
        self.samples, self.size, self.seed, self.augment = samples, size, seed, augment

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """float32 (3, size, size), int64 (size, size)."""
        return _to_sample(*self._draw(index), self.augment)

    def _draw(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, index))
        return draw_shapes(self.size, generator)

    def checksum(self) -> int:
        """The CRC-32 of the first sample."""
        image, mask = self._draw(0)
        return zlib.crc32(mask.numpy().data, zlib.crc32(image.numpy().data))


def draw_shapes(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """An image, uint8 (3, size, size), and a mask, uint8 (size, size): the numbers of SHAPES."""

    def draw(low, high):
        return torch.randint(low, high, (), generator=generator)

    def draw_color():
        return torch.randint(256, (3, 1, 1), generator=generator)

    rows, columns = torch.arange(size)[:, None], torch.arange(size)
    image = draw_color()
    mask = torch.zeros(size, size, dtype=torch.uint8)
    for _ in range(draw(1, 5)):
        number = int(draw(1, len(SHAPES)))
        radius = draw(size // 10, size // 4) + 1
        down = rows - draw(0, size)
        across = columns - draw(0, size)
        inside = is_inside(SHAPES[number], radius, down, across.abs())
        mask = torch.where(inside, number, mask)
        image = torch.where(inside, draw_color(), image)
    noise = torch.randint(-64, 65, (3, size, size), generator=generator)
    return (image + noise).clamp(0, 255).to(torch.uint8), mask


def is_inside(shape: str, radius: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """bool (size, size). down, across: each pixel's distance from the center; above, down < 0."""
    if shape == "disc":
        return down**2 + across**2 <= radius**2
    width = radius if shape == "square" else (radius + down) // 2  # a triangle with its top above
    return (down.abs() <= radius) & (across <= width)


class Masks(Dataset[tuple[Tensor, Tensor]]):
    """Image files with masks, both resized to squares.

    size: pixels per side. augment: flip half of the images.
    """

    def __init__(
        self, pairs: Sequence[Pair], size: int, num_classes: int, augment: bool = False
    ) -> None:
        self.pairs, self.size, self.num_classes = pairs, size, num_classes
        self.augment = augment

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """float32 (3, size, size), int64 (size, size). Raises UserError if the files cannot be
        decoded or differ in size, if EXIF may turn the image alone, or if the mask has classes from
        num_classes."""
        image_path, mask_path = self.pairs[index]
        image, turn = _open(image_path, IMAGE_MODES)
        mask, mask_turn = _open(mask_path, MASK_MODES)
        stored = image.size if turn < 5 else image.size[::-1]
        if turn > 1 and mask_turn == 1 and mask.size == stored:
            raise UserError(
                f"{image_path} is turned by the orientation {turn} in its EXIF, and {mask_path}, "
                f"which has none, may not fit any more: save the image without it, upright if the "
                f"mask was drawn so (mogrify -auto-orient), otherwise as it is stored (exiftool "
                f"-Orientation=)"
            )
        if image.size != mask.size:
            raise UserError(
                f"{mask_path} has {mask.width} x {mask.height} pixels, but {image_path} has "
                f"{image.width} x {image.height}: export them in the same size"
            )
        numbers = numpy.unique(mask)
        wrong = numbers[(numbers >= self.num_classes) & (numbers != IGNORED)]
        if wrong.size:
            raise UserError(
                f"{mask_path} has pixels of class {wrong[0]}, but num_classes is "
                f"{self.num_classes}: pass --num-classes, or write {IGNORED} for no label"
            )
        square = (self.size, self.size)
        image = image.convert("RGB").resize(square, Image.Resampling.BILINEAR)
        mask = mask.resize(square, Image.Resampling.NEAREST)
        image = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
        return _to_sample(image, torch.from_numpy(numpy.array(mask)), self.augment)

    def checksum(self) -> int:
        """The CRC-32 of the files' names."""
        return zlib.crc32(b"/".join(os.fsencode(image.name) for image, _ in self.pairs))


def _to_sample(image, mask, augment):
    """uint8 -> image float32 in [-2, 2), mask int64; exactly, on every machine."""
    if augment and torch.randint(2, ()):  # the loader seeds this for each sample
        image, mask = image.flip(-1), mask.flip(-1)
    return (image.float() - 128) / 64, mask.long()


def check_classes(masks: Sequence[Path], num_classes: int) -> None:
    """Print a warning if a class occurs in none of the masks, or of ENOUGH of them.

    Raises UserError if they hold nothing but 0 and IGNORED: what most tools write for one class.
    """
    expected, seen = set(range(num_classes)), set()
    for path in masks[:: -(-len(masks) // ENOUGH)]:
        if expected <= seen:
            break
        seen.update(numpy.unique(_open(path, MASK_MODES)[0]).tolist())
    if seen == {0, IGNORED}:
        raise UserError(
            f"the {len(masks)} masks, such as {masks[0]}, hold only 0 and {IGNORED}, which means "
            f"no label: write 1 for the second class"
        )
    if missing := sorted(expected - seen):
        warn(
            f"class {', '.join(map(str, missing))} of --num-classes {num_classes} occurs in none "
            f"of {min(len(masks), ENOUGH)} masks"
        )


def _open(path, modes):
    """(The decoded image, upright; the orientation in its EXIF, 1 if none). Raises UserError."""
    try:
        with Image.open(path) as file:
            orientation = file.getexif().get(ORIENTATION, 1)
            image = ImageOps.exif_transpose(file)
    except Exception as error:  # Pillow's parsers raise all kinds for broken files
        raise UserError(f"{path} cannot be decoded ({error}): fix or remove it") from None
    if image.mode not in modes:
        raise UserError(
            f"{path} has pixels of mode {image.mode}: convert it to one of {', '.join(modes)} "
            f"(https://pillow.readthedocs.io/en/stable/handbook/concepts.html#modes)"
        )
    return image, orientation if orientation in range(2, 9) else 1


def find_pairs(data_dir: str) -> list[Pair]:
    """(data_dir/images/NAME.jpg or .png, data_dir/masks/NAME.png), sorted.

    Hidden files are ignored; other files and masks without an image are, too, but the main process
    says so. Raises UserError if folders or masks are missing, or if two images have one mask.
    """
    images, masks = Path(data_dir, "images"), Path(data_dir, "masks")
    for folder in (images, masks):
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder: put images into {images}, and their masks, as .png "
                f"files of the same names, into {masks}, or pass another --data-dir"
            )
    paths, ignored = {}, []
    for path in sorted(images.iterdir()):
        if path.name[0] == ".":
            continue
        if path.suffix.lower() not in EXTENSIONS:
            ignored.append(path)
            continue
        if path.stem in paths:
            raise UserError(f"{paths[path.stem]} and {path} would share a mask: rename one")
        paths[path.stem] = path
    pairs = [(path, masks / f"{stem}.png") for stem, path in paths.items()]
    missing = [pair for pair in pairs if not pair[1].is_file()]
    if missing:
        raise UserError(
            f"{missing[0][1]} is missing, the mask of {missing[0][0]}, one of {len(missing)} "
            f"images without a mask: add the masks, or remove the images"
        )
    used = {mask for _, mask in pairs}
    ignored += [path for path in sorted(masks.iterdir()) if path not in used]
    ignored = [str(path) for path in ignored if path.name[0] != "."]
    if ignored and is_main_process():
        text = f"ignored {len(ignored)} files, such as {ignored[0]}: none is an image"
        warn(f"{text} ({', '.join(EXTENSIONS)}) with a mask")
    return pairs


def split_pairs(
    pairs: Sequence[Pair], val_fraction: float, seed: int
) -> tuple[list[Pair], list[Pair]]:
    """The pairs to train with, the pairs to validate with: the first by a hash of seed and name.

    Raises UserError if there are not enough pairs for both.
    """
    if len(pairs) < 2:
        raise UserError(
            f"training and validation need an image each, but there are {len(pairs)} with one of "
            f"the extensions {', '.join(EXTENSIONS)}: add images, or pass another --data-dir"
        )

    def order(pair):
        return hashlib.sha256(os.fsencode(f"{seed}/{pair[0].stem}")).digest()

    count = min(max(1, round(val_fraction * len(pairs))), len(pairs) - 1)
    chosen = set(sorted(pairs, key=order)[:count])
    return [pair for pair in pairs if pair not in chosen], sorted(chosen)
