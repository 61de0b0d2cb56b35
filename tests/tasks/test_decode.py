"""Decoding image files of every kind."""

import errno
import os
import pickle
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from tasks.images import decode as decoding
from tasks.images.decode import BadImageError, decode
from tasks.images.files import is_image
from tests.images import photo
from utils.errors import UserError


def use_decoder(monkeypatch, *absent):
    """Decode as where these modules are absent."""
    for module in absent:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(decoding, "decode_jpeg_or_png", decoding._find_decoder())


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize("name", ["a.jpg", "b.png"])
def test_pixels_do_not_depend_on_the_decoder(name, tmp_path, monkeypatch):
    """Those of Pillow may differ, because of its libjpeg."""
    pytest.importorskip("torchcodec.decoders")
    pixels = numpy.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).resize((50, 40)).save(tmp_path / name)
    image = decode(tmp_path / name)
    use_decoder(monkeypatch, "torchcodec.decoders")
    assert torch.equal(decode(tmp_path / name), image)


KINDS = [
    ("a.jpg", "RGB"),
    ("b.jpg", "CMYK"),
    ("c.jpg", "L"),
    ("d.png", "P"),
    ("e.png", "RGBA"),
    ("f.png", "1"),
    ("g.bmp", "RGB"),
    ("h.webp", "RGBA"),
    ("i.tiff", "RGB"),
    ("j.GIF", "P"),
    ("k.ppm", "RGB"),
]
ABSENT = ["torchcodec.decoders", "torchvision.io"]  # a torchvision that no longer decodes


@pytest.mark.parametrize(("name", "mode"), KINDS)
@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize("absent", [[], ABSENT[:1], ABSENT])
def test_every_kind_of_image_is_decoded_in_color(name, mode, absent, tmp_path, monkeypatch):
    use_decoder(monkeypatch, *absent)
    photo(tmp_path / name, mode=mode)
    image = decode(tmp_path / name)
    assert image.shape == (3, 16, 20)
    assert image.dtype == torch.uint8
    assert image.float().mean() > 50
    assert is_image(Path(name), [])


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize("absent", [[], ABSENT[:1], ABSENT])
@pytest.mark.parametrize("name", ["a.png", "a.tiff"])
def test_16_bit_pixels_keep_their_upper_8_bits(name, absent, tmp_path, monkeypatch):
    use_decoder(monkeypatch, *absent)
    values = numpy.array([[0, 255, 256, 65535]], dtype="uint16")
    Image.fromarray(values).save(tmp_path / name)
    assert decode(tmp_path / name)[0].tolist() == [[0, 0, 1, 255]]


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tiff"])
def test_exif_rotation_is_applied(name, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    photo(tmp_path / name, exif=exif)
    assert decode(tmp_path / name).shape == (3, 20, 16)


@pytest.mark.parametrize("name", ["a.gif", "a.png"])
def test_animation_uses_first_frame(name, tmp_path):
    frames = [Image.new("RGB", (20, 16), color) for color in ("red", "lime", "blue")]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    image = decode(tmp_path / name)
    assert image.shape == (3, 16, 20)
    assert image[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_numbers_of_unknown_range_are_refused(dtype, tmp_path):
    """They turned all white or all black."""
    Image.fromarray(numpy.full((4, 6), 100, dtype)).save(tmp_path / "a.tiff")
    with pytest.raises(BadImageError, match=r"a\.tiff .*whose range is unknown"):
        decode(tmp_path / "a.tiff")


def test_read_errors_that_pass_are_not_damage(tmp_path, monkeypatch):
    """With --on-bad-sample skip, the file would be left out of this run and of later ones."""
    photo(tmp_path / "a.jpg")

    def refused(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(UserError, match=r"cannot read .*a\.jpg: Stale") as caught:
        decode(tmp_path / "a.jpg")
    assert not isinstance(caught.value, BadImageError)


@pytest.mark.parametrize("part", [0, 0.9])
def test_truncated_image_is_reported(part, tmp_path):
    path = tmp_path / "a.jpg"
    photo(path)
    os.truncate(path, int(part * path.stat().st_size))
    with pytest.raises(BadImageError, match=r"a\.jpg .*decoded.*--on-bad-sample skip") as caught:
        decode(path)
    copy = pickle.loads(pickle.dumps(caught.value))  # as a worker process sends it
    assert str(copy) == str(caught.value)
    assert (copy.path, copy.reason) == (str(path), caught.value.reason)
