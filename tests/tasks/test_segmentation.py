"""tasks/segmentation: shapes and files with masks, the U-Net, and a metric that is not a mean."""

import numpy
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

import tasks.segmentation as task
from tasks.segmentation.data import IGNORED, Masks, Shapes, find_pairs
from utils.config import ConfigError, load_config
from utils.errors import UserError

GOLDEN_CHECKSUMS = [1662570811, 2713214680]


def config(*flags):
    small = ["--synthetic-samples=64", "--image-size=16", "--width=4", "--device=cpu"]
    return load_config(task.Settings, argv=[*small, *flags])


def write_pair(folder, name, width=20, height=12):
    """Write an image of noise, and a mask with a column for each of three classes."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "masks").mkdir(exist_ok=True)
    pixels = numpy.random.default_rng(0).integers(0, 256, (height, width, 3), dtype="uint8")
    Image.fromarray(pixels).save(folder / "images" / f"{name}.jpg")
    mask = numpy.tile(numpy.arange(width) * 3 // width, (height, 1)).astype("uint8")
    Image.fromarray(mask).save(folder / "masks" / f"{name}.png")


@pytest.fixture
def folder(tmp_path):
    for name in "abcdefghij":
        write_pair(tmp_path, name)
    return tmp_path


def build(folder, *flags):
    flags = [f"--data-dir={folder}", "--num-classes=3", *flags]
    return task.build_datasets(config("--dataset=folder", *flags))


# Settings


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"^image_size .* 4, not 30"):
        task.Settings(image_size=30).resolved()
    with pytest.raises(ConfigError, match=r"^val_fraction .* 0 and 1, not 20"):
        task.Settings(val_fraction=20).resolved()
    with pytest.raises(ConfigError, match=r"^dataset=synthetic .* 4 classes, not 5: .*num_classes"):
        task.Settings(num_classes=5).resolved()


# Shapes


def test_shapes_are_images_with_masks():
    train_set, val_set = task.build_datasets(config())
    assert (len(train_set), len(val_set)) == (64, 16)
    image, mask = train_set[0]
    assert (image.shape, image.dtype) == ((3, 16, 16), torch.float32)
    assert (mask.shape, mask.dtype) == ((16, 16), torch.int64)
    masks = torch.stack([train_set[i][1] for i in range(64)])
    frequencies = masks.flatten().bincount() / masks.numel()
    assert len(frequencies) == 4
    assert frequencies.min() > 0.02
    assert frequencies.argmax() == 0


def test_every_machine_draws_the_same_shapes():
    description = task.describe(*task.build_datasets(config("--image-size=32")))
    assert (description["train_samples"], description["val_samples"]) == (64, 16)
    assert description["checksums"] == GOLDEN_CHECKSUMS
    assert task.describe(*task.build_datasets(config("--seed=1")))["checksums"] != GOLDEN_CHECKSUMS


def test_a_sample_depends_on_seed_and_index_only():
    image, mask = Shapes(9, 16, seed=5)[3]
    torch.manual_seed(7)
    same_image, same_mask = Shapes(99, 16, seed=5)[3]
    assert torch.equal(same_image, image)
    assert torch.equal(same_mask, mask)
    assert not torch.equal(Shapes(9, 16, seed=6)[3][0], image)


@pytest.mark.parametrize("kind", ["synthetic", "folder"])
def test_training_images_are_flipped_with_their_masks(kind, folder):
    train_set, val_set = build(folder) if kind == "folder" else task.build_datasets(config())
    seen = {}
    for seed in range(20):
        torch.manual_seed(seed)
        is_flipped = bool(torch.randint(2, ()))
        torch.manual_seed(seed)
        seen[is_flipped] = train_set[1]
        torch.manual_seed(seed)
        seen["validation", is_flipped] = val_set[1]
    assert torch.equal(seen[True][0], seen[False][0].flip(-1))
    assert torch.equal(seen[True][1], seen[False][1].flip(-1))
    assert torch.equal(seen["validation", True][0], seen["validation", False][0])


# Files


def test_files_are_resized(folder):
    write_pair(folder, "c", 40, 90)
    dataset = Masks(find_pairs(folder), size=16, num_classes=3)
    assert len(dataset) == 10
    for index in range(10):
        image, mask = dataset[index]
        assert (image.shape, image.dtype) == ((3, 16, 16), torch.float32)
        assert (mask.shape, mask.dtype) == ((16, 16), torch.int64)
        assert mask[0].unique_consecutive().tolist() == [0, 1, 2]  # none between two classes
        assert (mask == mask[0]).all()


def test_pixels_are_those_of_the_file(tmp_path):
    write_pair(tmp_path, "a", 8, 8)
    pixels = torch.arange(192).reshape(8, 8, 3)
    (tmp_path / "images" / "a.jpg").unlink()
    Image.fromarray(pixels.numpy().astype("uint8")).save(tmp_path / "images" / "a.png")
    image, _ = Masks(find_pairs(tmp_path), size=8, num_classes=3)[0]
    assert torch.equal(image * 64 + 128, pixels.permute(2, 0, 1).float())


@pytest.mark.parametrize("mode", ["L", "P", "1"])
def test_masks_hold_the_numbers_of_classes_in_every_mode(mode, folder):
    path = folder / "masks" / "a.png"
    expected = numpy.array(Image.open(path)) // 2
    if mode == "L":
        expected[:, :5] = IGNORED  # pixels without a label are no class
    mask = Image.fromarray(expected.astype("bool" if mode == "1" else "uint8"))
    if mode == "P":
        mask.putpalette([9, 9, 9, 200, 0, 0, 0, 0, 77])
    mask.save(path)
    assert Image.open(path).mode == mode
    dataset = Masks(find_pairs(folder), size=20, num_classes=2)
    assert dataset[0][1][0].tolist() == expected[0].tolist()


def test_photos_are_turned_upright(folder):
    pixels = numpy.zeros((20, 12, 3), dtype="uint8")
    pixels[:10] = 255  # after a turn by 90 degrees: the right half
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(pixels).save(folder / "images" / "a.jpg", exif=exif)
    image, _ = Masks(find_pairs(folder), size=16, num_classes=3)[0]
    assert (image[:, :, 9:] > 1.5).all()
    assert (image[:, :, :7] < -1.5).all()


@pytest.mark.parametrize("orientation", [3, 6])
def test_mask_that_exif_may_leave_behind_is_refused(orientation, tmp_path):
    """Which of the two was meant cannot be seen: the pixels would not fit, without a word."""
    write_pair(tmp_path, "a", 16, 16)
    exif = Image.Exif()
    exif[274] = orientation
    Image.new("RGB", (16, 16)).save(tmp_path / "images" / "a.jpg", exif=exif)
    dataset = Masks(find_pairs(tmp_path), size=16, num_classes=3)
    with pytest.raises(UserError, match=rf"a\.jpg .*orientation {orientation} .*EXIF.*a\.png"):
        dataset[0]
    mask = Image.open(tmp_path / "masks" / "a.png")
    mask.save(tmp_path / "masks" / "a.png", exif=exif)  # both are turned
    assert dataset[0][1].shape == (16, 16)


def write_masks(folder, names, *numbers):
    mask = numpy.resize(numpy.array(numbers, "uint8"), (12, 20))
    for name in names:
        Image.fromarray(mask).save(folder / "masks" / f"{name}.png")


def test_masks_of_0_and_255_are_refused(folder):
    """They trained on the background alone, with a mean IoU of 1."""
    write_masks(folder, "abcdefghij", 0, IGNORED)
    with pytest.raises(UserError, match=r"masks/.\.png, .* 0 and 255.*: write 1 "):
        build(folder, "--num-classes=2")
    write_masks(folder, "abc", 1, 0)
    assert len(build(folder, "--num-classes=2")[0]) == 8


def test_classes_that_never_occur_are_named(folder, capsys):
    build(folder, "--num-classes=3")
    assert capsys.readouterr().err == ""
    build(folder, "--num-classes=5")
    warning = capsys.readouterr().err
    assert "class 3, 4 of --num-classes 5" in warning and "none of 8 masks" in warning


def test_the_validation_split_depends_on_names_and_seed(folder, capsys):
    write_pair(folder, ".hidden")
    (folder / "images" / "notes.txt").write_text("not an image")
    (folder / "masks" / "without-image.png").write_text("")
    train_set, val_set = build(folder, "--val-fraction=0.3")
    said = capsys.readouterr().err
    assert f"ignored 2 files, such as {folder}/images/notes.txt" in said
    assert (len(train_set), len(val_set)) == (7, 3)
    pairs = train_set.pairs + val_set.pairs
    assert sorted(image.stem for image, _ in pairs) == list("abcdefghij")
    assert all(mask.stem == image.stem for image, mask in pairs)
    same, _ = build(folder, "--val-fraction=0.3")
    assert same.pairs == train_set.pairs
    _, other = build(folder, "--val-fraction=0.3", "--seed=1")
    assert other.pairs != val_set.pairs
    assert other.checksum() != val_set.checksum()
    assert len(build(folder, "--val-fraction=0.001")[1]) == 1
    assert len(build(folder, "--val-fraction=0.999")[1]) == 9


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"/images .*not a folder: .*/masks.*--data-dir"):
        build(tmp_path)
    write_pair(tmp_path, "a")
    with pytest.raises(UserError, match=r"there are 1 .*\.jpg.*: add .*--data-dir"):
        build(tmp_path)
    write_pair(tmp_path, "b")
    write_pair(tmp_path, "c")
    (tmp_path / "masks" / "b.png").unlink()
    with pytest.raises(UserError, match=r"masks/b\.png .*missing, .*images/b\.jpg, .* 1 "):
        build(tmp_path)
    (tmp_path / "images" / "b.jpg").rename(tmp_path / "images" / "a.png")
    with pytest.raises(UserError, match=r"a\.jpg and .*a\.png .*mask: rename"):
        build(tmp_path)


def test_bad_files_are_named(folder):
    images, masks = folder / "images", folder / "masks"
    Image.new("RGB", (20, 13)).save(images / "a.jpg")
    (images / "b.jpg").write_bytes((images / "c.jpg").read_bytes()[:200])
    Image.new("RGB", (20, 12)).save(masks / "c.png")
    write_masks(folder, "d", 7)
    dataset = Masks(find_pairs(folder), size=16, num_classes=3)
    for index, pattern in (
        (0, r"masks/a\.png .* 20 x 12 .*images/a\.jpg .* 20 x 13: .*same size"),
        (1, r"images/b\.jpg .*decoded"),
        (2, r"masks/c\.png .*mode RGB: convert .* 1, L, P "),
        (3, r"masks/d\.png .*class 7, .* 3: .*--num-classes"),
    ):
        with pytest.raises(UserError, match=pattern):
            dataset[index]


# Loss and metrics


def sums_of(predictions, targets):
    outputs = torch.nn.functional.one_hot(predictions, 4).permute(0, 3, 1, 2).double()
    loss, count = task.loss(outputs, targets), task.count(targets)
    return task.measure(outputs, targets) | {"loss": loss, "count": count}


def test_the_loss_is_a_mean_over_labeled_pixels():
    outputs = torch.randn(4, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(3, (4, 8, 8))
    targets[:, :3] = IGNORED
    loss = task.loss(outputs, targets) / task.count(targets)
    torch.testing.assert_close(loss, cross_entropy(outputs, targets, ignore_index=IGNORED))
    assert task.count(targets) == 4 * 5 * 8
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert torch.equal(gradient.abs().sum(1) > 0, targets != IGNORED)


def test_mean_iou_is_that_of_all_pixels_together():
    """Not a mean over samples or batches."""
    targets = torch.tensor([[[0, 0, 0, 1]], [[1, 1, IGNORED, IGNORED]]])
    predictions = torch.tensor([[[0, 0, 1, 1]], [[1, 2, 0, 2]]])
    first = sums_of(predictions[:1], targets[:1])
    second = sums_of(predictions[1:], targets[1:])
    sums = {name: first[name] + second[name] for name in first}
    assert sums["confusion"].tolist() == [[2, 1, 0, 0], [0, 2, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    # Class 0: 2 of 3 pixels; class 1: 2 of 4; class 2: 0 of 1; class 3 does not occur.
    results = task.summarize(sums)
    assert results["mean_iou"] == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)
    assert results["accuracy"] == pytest.approx(4 / 6)
    assert results["loss"] == pytest.approx((sums["loss"] / 6).item())
    assert ("mean_iou", max) == task.BEST


# The model


@pytest.mark.parametrize(("norm", "kind"), [("batch", "BatchNorm2d"), ("group", "GroupNorm")])
def test_outputs_have_the_size_of_the_images(norm, kind):
    cfg = config("--dataset=folder", "--num-classes=7", f"--norm={norm}")
    model = task.build_model(cfg, train_set=None)
    assert model(torch.randn(2, 3, 8, 20)).shape == (2, 7, 8, 20)
    kinds = {type(module).__name__ for module in model.modules()}
    assert {kind} == kinds & {"BatchNorm2d", "GroupNorm"}


def test_blocks_are_the_pairs_of_convolutions():
    model = task.build_model(config(), train_set=None)
    blocks = task.blocks(model)
    assert len(blocks) == 5
    assert set(model.children()) == {*blocks, model.up1, model.up2, model.head}


def test_the_model_cannot_be_cut_into_layers():
    model = task.build_model(config(), train_set=None)
    with pytest.raises(UserError, match=r"not a sequence .*train_fsdp\.py"):
        task.layers(model)
    with pytest.raises(UserError, match=r"only convolutions: use train_fsdp.py"):
        task.tensor_parallel_plan(model, 2)
