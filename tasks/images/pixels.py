"""What all image datasets share: uint8 images, which are normalized on the device."""

import torch

from utils.data import BatchDataset


class PixelDataset(BatchDataset):
    """A dataset of (image, label): uint8 images (3, height, width), normalized on the device.

    mean, std: of the pixels in [0, 1], per channel. classes: the names of the classes. labels:
    int64 (samples,). preprocessing: what inference must repeat, as plain values: "image_size",
    "resize", "interpolation", "mean", "std". split: facts about how the dataset was chosen.
    """

    def __init__(self, labels, classes, preprocessing, split=None):
        self.labels, self.classes = torch.as_tensor(labels), [str(name) for name in classes]
        self.preprocessing, self.split = preprocessing, split or {}
        self.mean, self.std = preprocessing["mean"], preprocessing["std"]
        self._scales = {}

    def __len__(self):
        return len(self.labels)

    def on_device(self, batch, dtype):
        """uint8 images (n, 3, height, width) -> normalized images of `dtype`, channels_last."""
        images, labels = batch
        scale, shift = self._scale_and_shift(images.device, dtype)
        images = images.to(dtype, memory_format=torch.channels_last)
        return images.mul_(scale).add_(shift), labels

    def _scale_and_shift(self, device, dtype):
        """(pixel / 255 - mean) / std = pixel * scale + shift; copied to the device once."""
        if (device, dtype) not in self._scales:
            std = torch.tensor(self.std, dtype=dtype)[:, None, None]
            mean = torch.tensor(self.mean, dtype=dtype)[:, None, None]
            self._scales[device, dtype] = (1 / (255 * std)).to(device), (-mean / std).to(device)
        return self._scales[device, dtype]
