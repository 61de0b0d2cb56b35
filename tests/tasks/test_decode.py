"""Decoding image files of every kind."""

import errno
import os
import pickle
import struct
import sys
import zlib
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

ABSENT = ["torchcodec.decoders", "torchvision.io"]  # a torchvision that no longer decodes


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize("name", ["a.jpg", "b.png"])
def test_pixels_do_not_depend_on_the_decoder(name, tmp_path, monkeypatch):
    """Those of Pillow may differ, because of its libjpeg."""
    pytest.importorskip("torchcodec.decoders")
    pixels = numpy.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).resize((50, 40)).save(tmp_path / name)
    image = decode(tmp_path / name)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    monkeypatch.setattr(decoding, "decode_jpeg_or_png", decoding._find_decoder())
    assert torch.equal(decode(tmp_path / name), image)


KINDS = [("a.jpg", "RGB"), ("b.jpg", "CMYK"), ("c.jpg", "L"), ("d.png", "P"), ("e.png", "RGBA")]
KINDS += [("f.png", "I;16"), ("g.png", "LA"), ("h.png", "1"), ("i.bmp", "RGB"), ("j.webp", "RGBA")]
KINDS += [("k.tiff", "RGB"), ("l.tiff", "I;16"), ("m.tiff", "CMYK"), ("n.gif", "P"), ("o.GIF", "L")]
KINDS += [("p.ppm", "RGB")]


@pytest.mark.parametrize(("name", "mode"), KINDS)
@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize("absent", [[], ["torchcodec.decoders"], ABSENT])
def test_every_kind_of_image_is_decoded_in_color(name, mode, absent, tmp_path, monkeypatch):
    for module in absent:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(decoding, "decode_jpeg_or_png", decoding._find_decoder())
    assert (decoding.decode_jpeg_or_png is None) == (absent == ABSENT)
    if mode == "I;16":
        Image.fromarray(numpy.full((16, 20), 40000, dtype="uint16")).save(tmp_path / name)
        assert (decode(tmp_path / name) == 40000 // 256).all()
    else:
        photo(tmp_path / name, mode=mode)
    image = decode(tmp_path / name)
    assert (image.shape, image.dtype) == ((3, 16, 20), torch.uint8)
    assert image.float().mean() > 50
    assert is_image((tmp_path / name).relative_to(tmp_path), [])


def test_16_bit_pixels_of_either_byte_order_keep_their_upper_8_bits(tmp_path):
    for name, dtype in (("little.tiff", "<u2"), ("big.tiff", ">u2")):
        values = numpy.array([[0, 255, 256, 65535]], dtype=dtype)
        image = Image.frombytes("I;16B" if dtype[0] == ">" else "I;16", (4, 1), values.tobytes())
        image.save(tmp_path / name)
        assert decode(tmp_path / name)[0].tolist() == [[0, 0, 1, 255]]


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tiff"])
def test_exif_rotation_is_applied(name, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    photo(tmp_path / name, exif=exif)
    assert decode(tmp_path / name).shape == (3, 20, 16)


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_animation_uses_first_frame(name, tmp_path):
    frames = [Image.new("RGB", (20, 16), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if name == "a.webp" else {}
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **options)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 16, 20)
    assert torch.equal(decode(tmp_path / name), red)


def test_decompression_bomb_is_refused(tmp_path):
    """A PNG of 10 KB that claims to have 10 gigapixels."""
    photo(tmp_path / "a.png")
    data = bytearray((tmp_path / "a.png").read_bytes())
    data[16:24] = (100_000).to_bytes(4) * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(BadImageError, match=r"a\.png .*decompression bomb"):
        decode(tmp_path / "a.png")


def chunk(kind, contents, checksum=None):
    """A chunk of a PNG."""
    checksum = zlib.crc32(kind + contents) if checksum is None else checksum
    return len(contents).to_bytes(4) + kind + contents + checksum.to_bytes(4)


LONG = zlib.compress(b"x" * 2_000_000)


@pytest.mark.parametrize(
    "extra",
    [
        chunk(b"zTXt", b"Comment\0\0" + LONG),
        chunk(b"iTXt", b"Comment\0\1\0\0\0" + LONG),
        chunk(b"iCCP", b"ICC\0\0" + LONG),
        b"".join(chunk(b"tEXt", b"k%d\0" % i + b"x" * 1_000_000) for i in range(70)),
        chunk(b"tEXt", b"Comment\0text", checksum=1),
    ],
    ids=["zTXt", "iTXt", "iCCP", "70 tEXt", "wrong checksum"],
)
def test_metadata_of_a_png_does_not_matter(extra, tmp_path):
    if decoding.decode_jpeg_or_png is None:
        pytest.skip("Pillow refuses such files")
    photo(tmp_path / "a.png")
    data, expected = (tmp_path / "a.png").read_bytes(), decode(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(data[:33] + extra + data[33:])
    assert torch.equal(decode(tmp_path / "a.png"), expected)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16"])
def test_integers_of_unknown_range_are_refused(dtype, tmp_path):
    """They turned all white or all black."""
    write_tiff(tmp_path / "a.tiff", numpy.full((4, 6), 100, dtype))
    with pytest.raises(BadImageError, match=r"a\.tiff .*32 bits .*sign"):
        decode(tmp_path / "a.tiff")


def write_tiff(path, pixels):
    """Without Pillow, which writes few types: little-endian, one strip."""
    code, bits = {"u": 1, "i": 2}[pixels.dtype.kind], 8 * pixels.dtype.itemsize
    height, width = pixels.shape
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: 1, 273: 134, 277: 1, 278: height}
    tags |= {279: pixels.nbytes, 339: code}
    entries = b"".join(struct.pack("<HHLL", tag, 4, 1, value) for tag, value in tags.items())
    head = b"II*\0" + struct.pack("<LH", 8, len(tags)) + entries + bytes(4)
    path.write_bytes(head.ljust(134, b"\0") + pixels.tobytes())


def test_read_errors_that_pass_are_not_damage(tmp_path, monkeypatch):
    """With --on-bad-sample skip, the file would be left out of this run and of later ones."""
    photo(tmp_path / "a.jpg")

    def refused(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(UserError, match=r"cannot read .*a\.jpg: Stale") as caught:
        decode(tmp_path / "a.jpg")
    assert not isinstance(caught.value, BadImageError)


def test_floating_point_pixels_are_refused(tmp_path):
    Image.fromarray(numpy.ones((4, 4), dtype="float32")).save(tmp_path / "a.tiff")
    with pytest.raises(BadImageError, match=r"a\.tiff .*floating-point"):
        decode(tmp_path / "a.tiff")


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
