"""tasks/segmentation: shapes and files with masks, the U-Net, and a metric that is not a mean."""

import random

import numpy
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

import tasks.segmentation as task
from tasks.segmentation import data
from tasks.segmentation.data import (
    IGNORED,
    SHAPES,
    Masks,
    Shapes,
    find_pairs,
    is_inside,
)
from utils.config import ConfigError, load_config
from utils.errors import UserError

GOLDEN_CHECKSUMS = [1662570811, 2713214680]


def config(*flags):
    small = ["--synthetic-samples=64", "--image-size=16", "--width=4", "--device=cpu"]
    return load_config(task.Settings, argv=[*small, *flags])


def write_pair(folder, name, size=(20, 12), classes=3):
    """Write an image of noise, and a mask with a column for each class."""
    numbers = numpy.arange(size[0]) * classes // size[0]
    mask = numpy.broadcast_to(numbers, size[::-1]).astype("uint8")
    pixels = numpy.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype="uint8")
    for kind, array, suffix in (("images", pixels, "jpg"), ("masks", mask, "png")):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(folder / kind / f"{name}.{suffix}")


@pytest.fixture
def folder(tmp_path):
    for name in "abcdefghij":
        write_pair(tmp_path, name)
    return tmp_path


def build(folder, *flags):
    flags = [f"--data-dir={folder}", "--num-classes=3", *flags]
    return task.build_datasets(config("--dataset=folder", *flags))


def read_all(dataset):
    return [dataset[index] for index in range(len(dataset))]


# Settings


def test_settings_are_checked():
    for values, pattern in (
        ({"image_size": 30}, "^image_size .* 4, not 30"),
        ({"val_fraction": 1.0}, "^val_fraction .* 0 and 1, not 1.0"),
        ({"num_classes": 256, "dataset": "folder"}, "^num_classes .* 255, not 256"),
        ({"num_classes": 5}, "^dataset=synthetic .* 4 classes, not 5: .*num_classes"),
    ):
        with pytest.raises(ConfigError, match=pattern):
            task.Settings(**values).resolved()


# Shapes


def test_shapes_are_images_with_masks():
    train_set, val_set = task.build_datasets(config())
    assert (len(train_set), len(val_set)) == (64, 16)
    image, mask = train_set[0]
    assert image.shape == (3, 16, 16) and image.dtype == torch.float32
    assert mask.shape == (16, 16) and mask.dtype == torch.int64
    masks = torch.stack([mask for _, mask in read_all(train_set)])
    assert masks.unique().tolist() == [0, 1, 2, 3]
    frequencies = masks.flatten().bincount() / masks.numel()
    assert (frequencies > 0.02).all() and frequencies.argmax() == 0


def test_every_machine_draws_the_same_shapes():
    description = task.describe(*task.build_datasets(config("--image-size=32")))
    assert (description["train_samples"], description["val_samples"]) == (64, 16)
    assert description["checksums"] == GOLDEN_CHECKSUMS
    assert task.describe(*task.build_datasets(config("--seed=1")))["checksums"] != GOLDEN_CHECKSUMS


def test_a_sample_depends_on_seed_and_index_only():
    one, other = Shapes(9, 16, seed=5), Shapes(99, 16, seed=5)
    expected = read_all(one)
    torch.manual_seed(7)
    for index in (8, 3, 0):
        assert all(map(torch.equal, other[index], expected[index]))
    assert not torch.equal(one[3][0], one[4][0])
    assert not torch.equal(one[3][0], Shapes(9, 16, seed=6)[3][0])


def test_shapes_look_like_their_names():
    offsets = torch.arange(-20, 21)
    areas = {}
    for name in SHAPES[1:]:
        inside = is_inside(name, 10, offsets[:, None], offsets.abs())
        assert torch.equal(inside, inside.flip(1))
        rows, columns = offsets[inside.any(1)], offsets[inside.any(0)]
        for ends in (rows[[0, -1]].tolist(), columns[[0, -1]].tolist()):
            assert ends == [-10, 10]
        areas[name] = inside.sum().item()
        widths = inside.sum(1)[10:31].tolist()
        assert (widths == sorted(widths)) == (name != "disc")
        assert (widths[0] == 1) == (name != "square")
    assert areas["square"] == 21**2
    assert areas["disc"] == pytest.approx(3.14 * 10**2, rel=0.02)
    assert areas["triangle"] == pytest.approx(21**2 / 2, rel=0.02)


@pytest.mark.parametrize("kind", ["synthetic", "folder"])
def test_half_of_the_training_images_are_flipped_with_their_masks(kind, folder):
    train_set, val_set = build(folder) if kind == "folder" else task.build_datasets(config())
    for dataset, expected in ((train_set, {False, True}), (val_set, {False})):
        seen, plain = set(), None
        for seed in range(20):
            torch.manual_seed(seed)
            flips = bool(torch.randint(2, ()))
            torch.manual_seed(seed)
            image, mask = dataset[1]
            if dataset is train_set and flips:
                image, mask = image.flip(-1), mask.flip(-1)
            plain = plain or (image, mask)
            assert torch.equal(image, plain[0]) and torch.equal(mask, plain[1])
            seen.add(dataset is train_set and flips)
        assert seen == expected


# Files


def test_files_are_resized(folder):
    write_pair(folder, "c", size=(40, 90))
    dataset = Masks(find_pairs(folder), size=16, num_classes=3)
    assert len(dataset) == 10
    for image, mask in read_all(dataset):
        assert image.shape == (3, 16, 16) and image.dtype == torch.float32
        assert mask.shape == (16, 16) and mask.dtype == torch.int64
        assert mask.unique().tolist() == [0, 1, 2]  # no classes between two classes
        assert (mask == mask[0]).all() and (mask[0].diff() >= 0).all()
        assert -2 <= image.min() < 0 < image.max() < 2


def test_pixels_are_those_of_the_file(tmp_path):
    write_pair(tmp_path, "a", size=(8, 8))
    pixels = torch.arange(192).reshape(8, 8, 3)
    (tmp_path / "images" / "a.jpg").unlink()
    Image.fromarray(pixels.numpy().astype("uint8")).save(tmp_path / "images" / "a.png")
    image, _ = Masks(find_pairs(tmp_path), size=8, num_classes=3)[0]
    assert torch.equal(image * 64 + 128, pixels.permute(2, 0, 1).float())


@pytest.mark.parametrize("mode", ["L", "P", "1"])
def test_masks_hold_the_numbers_of_classes_in_every_mode(mode, folder):
    path = folder / "masks" / "a.png"
    expected = numpy.array(Image.open(path)) // 2
    mask = Image.fromarray(expected.astype("bool" if mode == "1" else "uint8"))
    if mode == "P":
        mask.putpalette([9, 9, 9, 200, 0, 0, 0, 0, 77])
    mask.save(path)
    assert Image.open(path).mode == mode
    dataset = Masks(find_pairs(folder), size=20, num_classes=2)
    assert dataset[0][1][0].tolist() == expected[0].tolist()


def test_photos_are_turned_upright(folder):
    write_pair(folder, "a", size=(20, 12))
    path = folder / "images" / "a.jpg"
    pixels = numpy.zeros((20, 12, 3), dtype="uint8")
    pixels[:10] = 255  # after a turn by 90 degrees: the right half
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(pixels).save(path, exif=exif)
    image, _ = Masks(find_pairs(folder), size=16, num_classes=3)[0]
    assert (image[:, :, 9:] > 1.5).all() and (image[:, :, :7] < -1.5).all()


@pytest.mark.parametrize(
    ("orientation", "size", "mask_size"),
    [(3, (20, 12), (20, 12)), (6, (16, 16), (16, 16)), (6, (20, 12), (20, 12))],
)
def test_mask_that_exif_may_leave_behind_is_refused(orientation, size, mask_size, tmp_path):
    """Which of the two was meant cannot be seen: the pixels would not fit, without a word."""
    write_pair(tmp_path, "a", size=mask_size)
    exif = Image.Exif()
    exif[274] = orientation
    Image.new("RGB", size).save(tmp_path / "images" / "a.jpg", exif=exif)
    dataset = Masks(find_pairs(tmp_path), size=16, num_classes=3)
    with pytest.raises(UserError, match=rf"a\.jpg .*orientation {orientation} .*EXIF.*a\.png"):
        dataset[0]
    mask = Image.open(tmp_path / "masks" / "a.png")
    mask.save(tmp_path / "masks" / "a.png", exif=exif)  # both are turned
    assert dataset[0][1].shape == (16, 16)


def write_mask(folder, name, *numbers):
    mask = numpy.resize(numpy.array(numbers, "uint8"), (12, 20))
    Image.fromarray(mask).save(folder / "masks" / f"{name}.png")


def test_masks_of_0_and_255_are_refused(folder):
    """They trained on the background alone, with a mean IoU of 1."""
    for name in "abcdefghij":
        write_mask(folder, name, 0, IGNORED)
    with pytest.raises(UserError, match=r"masks/.\.png, .* 0 and 255.*: write 1 "):
        build(folder, "--num-classes=2")
    write_mask(folder, "a", 1, 0)
    write_mask(folder, "b", 1, 0)
    write_mask(folder, "c", 1, 0)
    assert len(build(folder, "--num-classes=2")[0]) == 8


def test_classes_that_never_occur_are_named(folder, capsys):
    build(folder, "--num-classes=3")
    assert capsys.readouterr().err == ""
    build(folder, "--num-classes=5")
    warning = capsys.readouterr().err
    assert "class 3, 4 of --num-classes 5" in warning and "none of 8 masks" in warning


def test_many_masks_are_sampled_unless_they_are_suspicious(folder, monkeypatch, capsys):
    monkeypatch.setattr(data, "ENOUGH", 3)
    for name in "abcdefghij":
        write_mask(folder, name, 0, IGNORED)
    write_mask(folder, "j", 0, 1)
    masks = [mask for _, mask in find_pairs(folder)]
    data.check_classes(masks, 2)
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="hold only 0 and 255"):
        data.check_classes(masks[:-1], 2)
    write_mask(folder, "a", 1)
    data.check_classes(masks, 3)
    assert "class 2 of" in capsys.readouterr().err


def test_the_validation_split_depends_on_names_and_seed(folder, capsys):
    write_pair(folder, ".hidden")
    (folder / "images" / "notes.txt").write_text("not an image")
    (folder / "masks" / "without-image.png").write_text("")
    train_set, val_set = build(folder, "--val-fraction=0.3")
    said = capsys.readouterr().err
    assert f"ignored 2 files, such as {folder}/images/notes.txt" in said and ".jpeg" in said
    names = [[path.stem for path, _ in dataset.pairs] for dataset in (train_set, val_set)]
    assert [len(part) for part in names] == [7, 3]
    assert sorted(names[0] + names[1]) == list("abcdefghij")
    same, _ = build(folder, "--val-fraction=0.3")
    assert same.pairs == train_set.pairs
    _, other = build(folder, "--val-fraction=0.3", "--seed=1")
    assert other.pairs != val_set.pairs and other.checksum() != val_set.checksum()
    assert all(mask.name == f"{image.stem}.png" for image, mask in train_set.pairs)
    for fraction, expected in ((0.001, 1), (0.999, 9)):
        assert len(build(folder, f"--val-fraction={fraction}")[1]) == expected


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
    write_pair(folder, "b", size=(20, 13))
    (masks / "b.png").write_bytes((masks / "a.png").read_bytes())
    (images / "c.jpg").write_bytes((images / "a.jpg").read_bytes()[:200])
    (masks / "d.png").write_text("not a picture")
    Image.new("RGB", (20, 12)).save(masks / "e.png")
    Image.fromarray(numpy.full((12, 20), 7, dtype="uint8")).save(masks / "f.png")
    (images / "g.jpg").unlink()
    Image.fromarray(numpy.full((12, 20), 700, dtype="uint16")).save(images / "g.png")
    for index, pattern in (
        (1, r"masks/b\.png .* 20 x 12 .*images/b\.jpg .* 20 x 13: .*same size"),
        (2, r"images/c\.jpg .*decoded \(.*\): .*remove"),
        (3, r"masks/d\.png .*decoded \(.*\): .*remove"),
        (4, r"masks/e\.png .*mode RGB: convert .* 1, L, P "),
        (5, r"masks/f\.png .*class 7, .* 3: .*--num-classes"),
        (6, r"images/g\.png .*mode I;16: convert .* 1, L, LA, P, RGB"),
    ):
        dataset = Masks(find_pairs(folder), size=16, num_classes=3)
        with pytest.raises(UserError, match=pattern):
            dataset[index]
    assert len(Masks(find_pairs(folder), size=16, num_classes=8)[5][1].unique()) == 1


def test_pixels_without_a_label_are_no_class(folder):
    mask = numpy.full((12, 20), 2, dtype="uint8")
    mask[:, :10] = IGNORED
    Image.fromarray(mask).save(folder / "masks" / "a.png")
    _, mask = Masks(find_pairs(folder), size=20, num_classes=3)[0]
    assert mask[0].tolist() == [IGNORED] * 10 + [2] * 10


# Loss and metrics


def random_batch(classes=3, ignored=0.3):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, classes, 8, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(classes, (4, 8, 8), generator=generator)
    targets[torch.rand(4, 8, 8, generator=generator) < ignored] = IGNORED
    return outputs.requires_grad_(), targets


def sums_of(outputs, targets):
    sums = {"loss": task.loss(outputs, targets).detach(), "count": task.count(targets)}
    return {name: value.double() for name, value in (sums | task.measure(outputs, targets)).items()}


def as_outputs(predictions, classes):
    return 9.0 * torch.nn.functional.one_hot(predictions, classes).permute(0, 3, 1, 2)


def test_the_loss_is_a_mean_over_labeled_pixels():
    outputs, targets = random_batch()
    expected = cross_entropy(outputs, targets, ignore_index=IGNORED)
    loss = task.loss(outputs, targets) / task.count(targets)
    torch.testing.assert_close(loss, expected)
    assert task.count(targets) == (targets < 3).sum() < targets.numel()
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert torch.equal(gradient.abs().sum(1) > 0, targets != IGNORED)


def test_mean_iou_of_an_example_by_hand():
    targets = torch.tensor([[[0, 0, 0, 1], [1, 1, IGNORED, IGNORED]]])
    predictions = torch.tensor([[[0, 0, 1, 1], [1, 2, 0, 2]]])
    sums = sums_of(as_outputs(predictions, 4), targets)
    assert sums["confusion"].tolist() == [[2, 1, 0, 0], [0, 2, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    # Class 0: 2 of 3 pixels; class 1: 2 of 4; class 2: 0 of 1; class 3 does not occur.
    results = task.summarize(sums)
    assert results["mean_iou"] == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)
    assert results["accuracy"] == pytest.approx(4 / 6)
    assert results["loss"] == pytest.approx((sums["loss"] / 6).item())
    assert ("mean_iou", max) == task.BEST


def test_mean_iou_is_not_a_mean_over_samples_or_batches():
    targets = torch.tensor([[[0, 0, 0, 0]], [[0, 1, 1, 1]]])
    predictions = torch.tensor([[[0, 0, 0, 1]], [[1, 1, 1, 1]]])
    outputs = as_outputs(predictions, 2)
    batches = [sums_of(outputs[i : i + 1], targets[i : i + 1]) for i in range(2)]
    together = {name: batches[0][name] + batches[1][name] for name in batches[0]}
    whole = sums_of(outputs, targets)
    assert all(torch.equal(together[name], whole[name]) for name in ("count", "confusion"))
    mean_iou = task.summarize(together)["mean_iou"]
    assert mean_iou == pytest.approx((3 / 5 + 3 / 5) / 2)
    each = [task.summarize(batch)["mean_iou"] for batch in batches]
    assert each == pytest.approx([(3 / 4 + 0) / 2, (0 + 3 / 4) / 2])


def test_measure_counts_each_labeled_pixel_once():
    outputs, targets = random_batch(classes=5)
    (confusion,) = task.measure(outputs, targets).values()
    expected = torch.zeros(5, 5, dtype=torch.int64)
    pixels = zip(targets.flatten().tolist(), outputs.argmax(1).flatten().tolist(), strict=True)
    for target, prediction in pixels:
        if target != IGNORED:
            expected[target, prediction] += 1
    assert torch.equal(confusion, expected) and confusion.sum() == task.count(targets)


# The model


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_outputs_have_the_size_of_the_images(norm):
    cfg = config("--dataset=folder", "--num-classes=7", f"--norm={norm}")
    model = task.build_model(cfg, train_set=None)
    for height, width in ((16, 16), (8, 20)):
        assert model(torch.randn(2, 3, height, width)).shape == (2, 7, height, width)
    norms = {type(module).__name__ for module in model.modules() if "Norm" in str(type(module))}
    assert norms == {"BatchNorm2d" if norm == "batch" else "GroupNorm"}


def test_group_norm_looks_at_each_sample_for_itself():
    torch.manual_seed(0)
    model = task.build_model(config("--norm=group"), train_set=None).double()
    images = torch.randn(3, 3, 16, 16).double()
    torch.testing.assert_close(model(images)[1:], model(images[1:]))


def test_every_pixel_sees_the_details_of_its_level():
    """A gradient through each skip connection, and through the bottom."""
    torch.manual_seed(0)
    model = task.build_model(config("--norm=group"), train_set=None)
    loss = model(torch.randn(2, 3, 16, 16)).square().sum()
    loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    for merge, encoder in ((model.decoder1, model.encoder1), (model.decoder2, model.encoder2)):
        assert merge[0].in_channels == 2 * encoder[0].out_channels


def test_blocks_are_the_pairs_of_convolutions():
    model = task.build_model(config(), train_set=None)
    blocks = task.blocks(model)
    convolutions = [
        m for block in blocks for m in block.modules() if isinstance(m, torch.nn.Conv2d)
    ]
    assert len(blocks) == 5 and len(convolutions) == 10
    others = set(model.children()) - set(blocks)
    assert others == {model.up1, model.up2, model.head}


def test_the_model_cannot_be_cut_into_layers():
    model = task.build_model(config(), train_set=None)
    with pytest.raises(UserError, match=r"not a sequence .*train_fsdp\.py"):
        task.layers(model)
    with pytest.raises(UserError, match=r"only convolutions: use train_fsdp.py"):
        task.tensor_parallel_plan(model, 2)


# Training


def test_mean_iou_rises_in_seconds():
    cfg = config("--synthetic-samples=16", "--width=8", "--norm=group")
    train_set, _ = task.build_datasets(cfg)
    torch.manual_seed(0)
    model = task.build_model(cfg, train_set)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = torch.utils.data.default_collate(read_all(train_set))
    curve = []
    for _ in range(60):
        outputs = model(inputs)
        curve.append(task.summarize(sums_of(outputs, targets))["mean_iou"])
        loss = task.loss(outputs, targets) / task.count(targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert curve[0] < 0.2 and curve[-1] > 0.5


def test_random_numbers_are_those_of_the_global_generator_only():
    train_set, _ = task.build_datasets(config())
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    torch.manual_seed(3)
    first = train_set[5]
    torch.manual_seed(3)
    assert all(map(torch.equal, first, train_set[5]))
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())
