"""The diffusion task: noise of the sample, a loss that is a sum, and images from a checkpoint."""

import pytest
import torch
from PIL import Image

import tasks.diffusion as task
from tasks.diffusion.sample import draw, load_denoiser, main, sample
from tests.forked import fork_script
from tests.recipes import applied
from tools.copy import with_task
from utils.config import load_config
from utils.errors import UserError
from utils.seeds import start_batch

FLAGS = {
    "dataset": "synthetic",
    "synthetic_samples": 48,
    "image_size": 8,
    "patch_size": 2,
    "layers": 2,
    "heads": 2,
    "width": 16,
    "epochs": 1,
    "global_batch_size": 8,
    "lr": 0.01,
    "device": "cpu",
}


def config(*flags):
    own = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
    return load_config(task.Settings, argv=[*own, *flags])


def model_of(cfg):
    torch.manual_seed(0)
    return task.build_model(cfg, None).double()


def test_images_are_inputs_and_targets():
    cfg = config()
    train_set, val_set = task.build_datasets(cfg)
    assert (len(train_set), len(val_set)) == (48, 12)
    batch = train_set.get_batch(torch.tensor([3, 5]), 0, 0)
    assert batch.dtype == torch.uint8
    assert torch.equal(batch[1], train_set[5])
    images = train_set.on_device(batch, torch.float64)
    assert images.shape == (2, 3, 8, 8)
    assert images.abs().max() <= 2
    assert task.describe(train_set, val_set)["mean"] == [0.5, 0.5, 0.5]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="of patch_size 4"):
        task.Settings(image_size=9).resolved()
    with pytest.raises(UserError, match="of 8, twice the heads"):
        task.Settings(width=20).resolved()


def test_noise_is_on_the_straight_path_to_the_image():
    model, seen = model_of(config()), []
    images = torch.randn(2000, 3, 8, 8, dtype=torch.float64)
    model.embed = lambda noisy, levels: seen.append((noisy, levels))
    start_batch(0, 0, torch.arange(2000))
    model.add_noise(images)
    [(noisy, levels)] = seen
    level = levels[:, None, None, None]
    noise = (noisy - (1 - level) * images) / level
    middle = noise[(levels > 0.1)]
    assert abs(middle.mean()) < 0.01
    assert abs(middle.std() - 1) < 0.01
    assert levels.min() >= 0
    assert abs(levels.mean() - 0.5) < 0.03


def test_levels_are_precise_in_bfloat16():
    """As with --fsdp-dtype bfloat16, which has 8 bits: sines of up to 1000 need more."""
    model, images = model_of(config()), torch.randn(4, 3, 8, 8)
    start_batch(0, 0, torch.arange(4))
    expected = model.float()(images)
    start_batch(0, 0, torch.arange(4))
    outputs = model.bfloat16()(images.bfloat16())
    assert outputs.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.float(), expected, rtol=0.1, atol=0.1)


def test_loss_is_the_mean_squared_error_of_a_value():
    outputs, targets = torch.randn(2, 5, 3, 8, 8)
    sums = {"loss": task.loss(outputs, targets), "count": task.count(targets)}
    expected = (outputs - targets).square().mean().item()
    assert task.summarize(sums)["loss"] == pytest.approx(expected)


def test_every_parameter_takes_part():
    model = model_of(config())
    start_batch(0, 0, torch.arange(4))
    images = torch.randn(4, 3, 8, 8).double()
    task.loss(model(images), torch.zeros_like(images)).backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_parts_of_the_model():
    model = model_of(config())
    assert len(task.blocks(model)) == 2
    with pytest.raises(UserError, match=r"2 attention .*64 MLP .* 3 ranks"):
        task.tensor_parallel_plan(model, 3)


def test_perfect_model_leads_from_noise_to_its_image():
    image, noise = torch.randn(2, 3, 3, 8, 8, dtype=torch.float64)
    asked = []

    class Perfect:
        def denoise(self, noisy, levels):
            asked.append(levels)
            level = levels[:, None, None, None]
            torch.testing.assert_close(noisy, (1 - level) * image + level * noise)
            return image

    torch.testing.assert_close(sample(Perfect(), noise, 4), image)
    assert torch.equal(torch.stack(asked)[:, 0], torch.tensor([1, 0.75, 0.5, 0.25]).double())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a run with the averages of docs/recipes/ema.md."""
    folder = applied("ema", tmp_path_factory.mktemp("copy") / "ema")
    script = folder / "train_ddp.py"
    script.write_text(with_task(script, "diffusion"))
    run = fork_script(script, 1, settings=FLAGS, output_dir=folder / "run")
    assert run.code == 0, run.stderr
    return folder / "run" / "last.pt"


def test_images_are_drawn_with_the_averages(trained):
    model, data = load_denoiser(trained)
    checkpoint = torch.load(trained, weights_only=True)
    state = checkpoint["optimizer"]["state"]["output.weight"]
    assert torch.equal(model.output.weight, state["average"])
    assert not torch.equal(model.output.weight, checkpoint["model"]["output.weight"])
    many = draw(model, data, 5, steps=3, seed=0)
    assert 0 <= many.min() < many.max() <= 1
    torch.testing.assert_close(draw(model, data, 2, steps=3, seed=0), many[:2])
    assert not torch.equal(draw(model, data, 5, steps=3, seed=1), many)


def test_picture_is_written(trained, monkeypatch, tmp_path):
    picture = tmp_path / "grid.png"
    arguments = [str(trained), str(picture), "--images=5", "--steps=2", "--device=cpu"]
    monkeypatch.setattr("sys.argv", ["sample", *arguments])
    main()
    assert Image.open(picture).size == (3 * 10 + 2, 2 * 10 + 2)  # images with a border of 2
