"""A transformer that removes noise from images: a small DiT (Peebles and Xie 2022, arXiv
2212.09748) with the noise level as a separate token, called in-context conditioning there.

It predicts the image without noise (Li and He 2025, arXiv 2511.13720), on the straight path from an
image to noise of rectified flow (Liu et al. 2022, arXiv 2209.03003).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, scaled_dot_product_attention

from utils.sample_random import normal, uniform


class Denoiser(nn.Module):
    """image_size must be a multiple of patch_size, and width of 2 * heads.

    forward() adds noise that belongs to the sample (utils/sample_random.py), and removes it.
    """

    def __init__(
        self, image_size: int, patch_size: int, layers: int, heads: int, width: int
    ) -> None:
        super().__init__()
        self.side, self.patch_size = image_size // patch_size, patch_size
        self.patches = nn.Conv2d(3, width, patch_size, patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn(self.side**2, width))
        self.level = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 3 * patch_size**2)

    def forward(self, images: Tensor) -> Tensor:
        """images: (n, 3, size, size) -> what is left of them under noise, the same shape."""
        return self._pass_on(self.add_noise(images))

    def denoise(self, noisy: Tensor, levels: Tensor) -> Tensor:
        """noisy: (1 - level) * images + level * noise; levels: (n,), in [0, 1] -> the images."""
        return self._pass_on(self.embed(noisy, levels))

    def _pass_on(self, tokens):
        for block in self.blocks:
            tokens = block(tokens)
        return self.predict(tokens)

    def add_noise(self, images: Tensor) -> Tensor:
        """images: (n, 3, size, size) -> tokens of noisy ones, (n, 1 + patches, width)."""
        precise = torch.promote_types(images.dtype, torch.float32)  # of bfloat16, for sines
        levels = uniform("levels", images.shape[:1], images.device).to(precise)
        noise = normal("noise", images.shape, images.device).to(images.dtype)
        noisy = images.lerp(noise, levels.to(images.dtype)[:, None, None, None])
        return self.embed(noisy, levels)

    def embed(self, noisy: Tensor, levels: Tensor) -> Tensor:
        """See denoise() -> (n, 1 + patches, width), the first of which tells the level."""
        patches = self.patches(noisy).flatten(2).mT + self.positions
        level = self.level(_waves(levels, patches.shape[-1]).to(patches.dtype))
        return torch.cat([level[:, None], patches], 1)

    def predict(self, tokens: Tensor) -> Tensor:
        """(n, 1 + patches, width) -> images (n, 3, size, size)."""
        values = self.output(self.norm(tokens[:, 1:])).mT.unflatten(2, (self.side, self.side))
        return pixel_shuffle(values, self.patch_size)


def _waves(levels, width):
    """Sines and cosines of the levels, as of positions in a text; (n,) -> (n, width)."""
    exponents = torch.arange(width // 2, device=levels.device, dtype=levels.dtype) / (width // 2)
    angles = 1000 * levels[:, None] * torch.exp(-math.log(10000) * exponents)
    return torch.cat([angles.sin(), angles.cos()], 1)


class Block(nn.Module):
    """Attention and an MLP, each added to its input. Query, key and value are separate layers, so
    that tensor parallelism can give each rank the rows of its heads."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # its gradient would be 0: tasks/text.py
        self.output = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        normed = self.attention_norm(tokens)
        heads = (
            layer(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(*heads)
        tokens = tokens + self.output(mixed.transpose(1, 2).flatten(2))
        return tokens + self.mlp(self.mlp_norm(tokens))
