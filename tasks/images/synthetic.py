"""dataset=synthetic: images that a small model learns to tell apart, without any file."""

import torch

from tasks.images.arrays import ArrayDataset, augmented
from tasks.images.settings import Settings
from utils.seeds import derive_seed

NEUTRAL = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def build(cfg: Settings) -> tuple[ArrayDataset, ArrayDataset]:
    """Ten classes: each image blends its class's shifted pattern with a distractor and noise.

    The shifts defeat a linear model; a small ResNet learns them in a few epochs. It uses
    integers, so that every machine creates the same images.
    """
    classes, size, arrays = 10, cfg.image_size, []
    generator = torch.Generator().manual_seed(cfg.seed)
    cells = torch.arange(size) * 8 // size  # of a pattern: 8 x 8 squares
    patterns = torch.randint(256, (2, classes, 3, 8, 8), generator=generator)
    patterns = patterns[..., cells[:, None], cells]
    for split, count in enumerate((cfg.synthetic_samples, max(1, cfg.synthetic_samples // 4))):
        generator.manual_seed(derive_seed(cfg.seed, split))
        labels, distractors = torch.randint(classes, (2, count), generator=generator)
        shifts = torch.randint(size // 2 + 1, (count, 2), generator=generator).tolist()
        shape = count, 3, size, size
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        draws = zip(images, labels, distractors, shifts, strict=True)
        for image, label, distractor, shift in draws:
            mixed = 3 * patterns[0, label] + 2 * patterns[1, distractor]
            image.copy_((mixed.roll(shift, (1, 2)) + 3 * image) // 8)
        arrays.append((images, labels))
    return augmented(arrays, [f"pattern {i}" for i in range(classes)], NEUTRAL, cfg)
