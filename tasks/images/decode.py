"""Decoding image files: JPEG and PNG with torchcodec or torchvision, all others with Pillow."""

import io
import os
from pathlib import Path

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from utils.errors import UserError

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG"


def _find_decoder():
    """A function that decodes a JPEG or a PNG, uint8 (bytes,), to RGB (3, height, width), upright,
    of uint8 or uint16; None if there is only Pillow. All give the same pixels."""
    try:
        from torchcodec.decoders import decode_jpeg, decode_png

        return lambda data, is_png: (
            decode_png(data, output_dtype="auto") if is_png else decode_jpeg(data)
        )
    except (ImportError, OSError, RuntimeError):  # an extra; or one for a different torch
        pass
    try:
        from torchvision.io import ImageReadMode, decode_image

        return lambda data, is_png: decode_image(
            data, ImageReadMode.RGB, apply_exif_orientation=True
        )
    except ImportError:  # deprecated in torchvision 0.29; Pillow has half the speed
        return None


decode_jpeg_or_png = _find_decoder()


class BadImageError(UserError):
    """A file that cannot be decoded. Attributes: path and reason."""

    what = "cannot be decoded"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(str(path), reason)  # both, so that a worker process can pickle it
        self.path, self.reason = self.args

    def __str__(self) -> str:
        return (
            f"{readable(self.path)} {self.what} ({self.reason}): fix or remove the file, "
            f"or pass --on-bad-sample skip to leave such files out"
        )


class MissingImageError(BadImageError):
    """A name without a file, such as a dangling link."""

    what = "cannot be read"


def readable(text: str) -> str:
    """`text` in printable form: file names need not be valid Unicode."""
    return os.fsencode(text).decode(errors="replace")


def decode(path: str) -> Tensor:
    """An image file as uint8 (3, height, width), upright and in color. Raises BadImageError.

    Reads the first frame of an animation, ignores transparency, and keeps the upper 8 of 16 bits.
    """
    try:
        data = Path(path).read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise MissingImageError(path, error.strerror or "") from None
    except OSError as error:  # the file may be fine
        raise UserError(f"cannot read {readable(path)}: {error.strerror}") from None
    return decode_bytes(data, path)


def decode_bytes(data: bytes, path: str) -> Tensor:
    """The same for the contents of a file. path: how an error names it."""
    try:
        if decode_jpeg_or_png and data.startswith((JPEG, PNG)):
            return _decode_natively(data)
        return _decode_with_pillow(data)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's parsers raise all kinds of exceptions for broken files
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image in any known format"
        raise BadImageError(path, reason) from None


def _decode_natively(data):
    try:
        pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        image = decode_jpeg_or_png(pixels, data.startswith(PNG))
        return F.to_dtype(image, torch.uint8, scale=True)  # a PNG may have 16 bits
    except RuntimeError:  # broken, or a variant unknown to the decoder: Pillow decides
        return _decode_with_pillow(data)


def _decode_with_pillow(data):
    with Image.open(io.BytesIO(data)) as file:
        image = ImageOps.exif_transpose(file)
        if image.mode == "F":
            raise ValueError("floating-point pixels, whose range is unknown")
        if file.format == "TIFF" and file.mode == "I":  # of 32 bits, or signed
            raise ValueError("pixels of 32 bits or with a sign, whose range is unknown")
        if image.mode.startswith("I"):  # 16 bits, which convert() would clip at 255
            gray = F.pil_to_tensor(image.convert("I")).clamp(0, 65535) // 256
            return gray.to(torch.uint8).expand(3, -1, -1).contiguous()
        return F.pil_to_tensor(image.convert("RGB"))
