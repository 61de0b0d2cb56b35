"""Loaders for any map-style Dataset: the same batches on any number of ranks and workers."""

import ctypes
import random
import signal
from functools import cache
from itertools import combinations

import numpy
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, DistributedSampler, SequentialSampler, TensorDataset
from torchvision.datasets import FakeData
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import utils.data
from tests.launch import run_ranks
from utils.config import load_config
from utils.data import build_datasets, build_loader, describe_data
from utils.errors import UserError
from utils.metrics import Meter, evaluate
from utils.sampler import EpochSampler

CPU = torch.device("cpu")
BATCH, STEPS = 12, 3  # a global batch that 1 to 4 ranks can share; of 40 samples, 4 are dropped
COUNT = STEPS * BATCH + 4


def config(*flags):
    return load_config(argv=["--dataset=fake", f"--global-batch-size={BATCH}", *flags])


# Datasets that know nothing of this project


class Random(Dataset):
    """Images that draw from all three global generators."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        noise = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        return torch.tensor(noise).view(3, 1, 1) + torch.zeros(3, 4, 4), index % 5


class Pixels(Dataset):
    """uint8 images with a mean and a standard deviation."""

    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)

    def __init__(self, shape=(3, 6, 5)):
        generator = torch.Generator().manual_seed(1)
        size = (COUNT, *shape)
        self.images = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.images[index], index % 5


class Batched(Pixels):
    """The protocol for whole batches."""

    def __getitem__(self, index):
        raise AssertionError("get_batch() is there")

    def get_batch(self, indices, epoch):
        """The images, shifted by a number that depends on epoch and index."""
        assert indices.dtype == torch.int64 and indices.dim() == 1
        shift = (7 * epoch + indices).to(torch.uint8)
        return self.images[indices] + shift.view(-1, 1, 1, 1), indices % 5


def fake(transforms):
    return FakeData(COUNT, (3, 8, 8), 5, v2.Compose([*transforms, v2.ToImage(), to_float]))


to_float = v2.ToDtype(torch.float32, scale=True)
augmented = [v2.RandomCrop(8, padding=2), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5)]
vectors = torch.randn(COUNT, 7, generator=torch.Generator().manual_seed(0))
labels = torch.arange(COUNT) % 5
DATASETS = {
    "FakeData with random transforms": fake(augmented),
    "float images": TensorDataset(vectors[:, :6].view(COUNT, 2, 1, 3), labels),
    "feature vectors": TensorDataset(vectors, labels),
    "all global generators": Random(),
    "uint8 images": Pixels(),
    "whole batches": Batched(),
}
REPEATING = ("float images", "feature vectors", "uint8 images")  # no augmentation


def make_loader(dataset, rank=0, world_size=1, workers=0, flags=()):
    """A training loader, with the sampler of a script for this number of ranks."""
    cfg = config(f"--num-workers={workers}", "--loader=workers", *flags)
    sampler = DistributedSampler(dataset, world_size, rank, seed=cfg.seed, drop_last=True)
    if world_size == 1:
        sampler = EpochSampler(dataset, cfg.seed)
    return build_loader(dataset, sampler, BATCH // world_size, CPU, cfg, train=True)


def read(loader, epoch):
    """The (images, labels) of an epoch."""
    loader.sampler.set_epoch(epoch)
    return list(loader)


@cache
def reference():
    """{dataset: the global batches of two epochs}, by one process without workers."""
    found = {}
    for name, dataset in DATASETS.items():
        loader = make_loader(dataset)
        found[name] = [read(loader, epoch) for epoch in (0, 1)]
    return found


def is_share(batches, expected, rank, world_size):
    """Whether a rank's batches are its shares of the global batches, bit for bit."""
    return len(batches) == len(expected) and all(
        torch.equal(mine, whole[rank::world_size])
        for batch, whole_batch in zip(batches, expected, strict=True)
        for mine, whole in zip(batch, whole_batch, strict=True)
    )


class Guess(torch.nn.Module):
    """A model for inputs of any shape."""

    def forward(self, images):
        flat = images.flatten(1)
        return torch.stack([flat.sum(1), *flat[:, :4].T], 1)


def score(dataset, rank, world_size):
    """evaluate() without workers, in batches of 3."""
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=False)
    cfg = config(f"--global-batch-size={3 * world_size}", "--loader=workers", "--dtype=float64")
    result = evaluate(Guess(), build_loader(dataset, sampler, 3, CPU, cfg), Meter(CPU))
    return result["samples"], result["accuracy"], result["loss"]


@pytest.mark.parametrize(
    ("world_size", "worker_counts"), [(1, (1, 2)), (2, (0, 2)), (3, (0,)), (4, (0, 1))]
)
def test_any_dataset_gives_the_same_global_batches(world_size, worker_counts):
    """For any number of ranks and workers: reshuffled in each epoch, and evaluated exactly."""

    def body(rank):
        wrong, scores = [], []
        for name, dataset in DATASETS.items():
            for workers in worker_counts:
                loader = make_loader(dataset, rank, world_size, workers)
                batches = [read(loader, epoch) for epoch in (0, 1)]
                assert loader.name == "workers" and loader.reader.num_workers == workers
                for mine, whole in zip(batches, reference()[name], strict=True):
                    if len(mine) != STEPS or not is_share(mine, whole, rank, world_size):
                        wrong.append((name, workers))
            scores.append(score(dataset, rank, world_size))
        return wrong, scores

    reference()  # once, before the ranks are forked
    exact = [score(dataset, 0, 1) for dataset in DATASETS.values()]
    for wrong, scores in run_ranks(body, world_size):
        assert wrong == []
        for mine, (samples, accuracy, loss) in zip(scores, exact, strict=True):
            assert mine == (samples, pytest.approx(accuracy), pytest.approx(loss))
            assert samples == COUNT


def test_expected_batches_are_shuffled_and_augmented_in_each_epoch():
    """Otherwise, the comparison above would prove little."""
    for name, (first, second) in reference().items():
        samples = torch.cat([images for images, _ in first])
        again = torch.cat([images for images, _ in second])
        flat = {tuple(image.flatten().tolist()) for image in samples}
        assert len(flat) == STEPS * BATCH  # each sample at most once
        assert not torch.equal(samples, again)
        if name in REPEATING:
            assert len(flat & {tuple(image.flatten().tolist()) for image in again}) >= 32
        else:
            assert not flat & {tuple(image.flatten().tolist()) for image in again}
    for name in DATASETS:
        other = read(make_loader(DATASETS[name], flags=["--seed=1"]), 0)
        assert not is_share(other, reference()[name][0], 0, 1)
    dataset = Random()  # in the same order, the seed changes the augmentation
    one, same, other = (
        next(iter(build_loader(dataset, range(COUNT), BATCH, CPU, config(f"--seed={seed}"))))[0]
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same) and not torch.isin(one, other).any()


def test_forgotten_set_epoch_repeats_the_first_epoch():
    """The mistake that the scripts' comment warns of, in order and augmentation."""
    loader = make_loader(DATASETS["FakeData with random transforms"])
    first, second = list(loader), list(loader)
    assert is_share(second, first, 0, 1)


def test_random_state_of_the_process_is_left_alone():
    def state():
        numbers = numpy.random.get_state()
        return torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2]

    dataset, cfg = DATASETS["all global generators"], config("--num-workers=0")
    before = state()
    for _ in build_loader(dataset, SequentialSampler(dataset), BATCH, CPU, cfg):
        assert state() == before
    assert state() == before


def test_dropout_of_a_step_does_not_depend_on_how_samples_are_read():
    def noise(dataset, workers, start=0):
        loader = make_loader(DATASETS[dataset], workers=workers)
        loader.load_state_dict({"step": start, "global_batch": BATCH})
        return [torch.rand(()).item() for _ in loader]

    expected = noise("whole batches", 0)
    assert len(set(expected)) == STEPS
    assert noise("all global generators", 0) == noise("feature vectors", 1) == expected
    assert noise("FakeData with random transforms", 0, start=1) == expected[1:]


# Resuming


def test_resumed_epoch_continues_with_the_next_global_batch_at_any_world_size():
    def body(rank, world_size, states, steps, workers):
        wrong, stopped = [], {}
        for name, dataset in DATASETS.items():
            loader = make_loader(dataset, rank, world_size, workers)
            if states:
                loader.load_state_dict(states[name])
            start, mine = loader.start, []
            for batch in loader:
                mine.append(batch)
                if len(mine) == steps:
                    break
            if not is_share(mine, reference()[name][0][start:][:steps], rank, world_size):
                wrong.append((name, start))
            stopped[name] = loader.state_dict()
            if steps is None and not is_share(
                read(loader, 1), reference()[name][1], rank, world_size
            ):  # the next epoch is a complete one
                wrong.append((name, "next epoch"))
        return wrong, stopped

    reference()  # once, before the ranks are forked
    states = None
    for world_size, steps, workers in ((2, 1, 1), (2, 1, 0), (3, None, 0)):
        ranks = run_ranks(body, world_size, world_size, states, steps, workers)
        assert [wrong for wrong, _ in ranks] == [[]] * world_size
        before, states = states, ranks[0][1]
        assert all(stopped == states for _, stopped in ranks)
        step = 0 if steps is None else 1 + (before["whole batches"]["step"] if before else 0)
        assert states["whole batches"] == {"step": step, "global_batch": BATCH}
    after_one = {name: {"step": 1, "global_batch": BATCH} for name in DATASETS}
    assert run_ranks(body, 1, 1, after_one, None, 2)[0][0] == []
    assert run_ranks(body, 4, 4, after_one, None, 0)[3][0] == []


def test_persistent_workers_resume_within_a_later_epoch():
    name = "all global generators"
    loader = make_loader(DATASETS[name], workers=2)
    read(loader, 0)
    loader.load_state_dict({"step": 2, "global_batch": BATCH})
    assert is_share(read(loader, 1), reference()[name][1][2:], 0, 1)
    assert is_share(read(loader, 1), reference()[name][1], 0, 1)


def test_epoch_cannot_continue_with_another_global_batch_size():
    loader = make_loader(Pixels())
    state = {"step": 3, "global_batch": 5}
    with pytest.raises(UserError, match=r"3 global batches of 5.*with the same batch size, not 12"):
        loader.load_state_dict(state)
    loader.load_state_dict(state | {"step": 0})
    assert len(list(loader)) == STEPS


def test_audited_epoch_reports_its_samples_after_a_resume(tmp_path, capfd):
    def body(rank, world_size, state):
        flags = ["--audit", f"--output-dir={tmp_path}"]
        loader = make_loader(Pixels(), rank, world_size, flags=flags)
        if state:
            loader.load_state_dict(state)
        for _ in loader:
            if not state:
                break
        return loader.state_dict()

    state = run_ranks(body, 2, 2, None)[0]
    first_batch = list(make_loader(Pixels()).sampler)[:BATCH]
    assert sorted(state["seen"].tolist()) == sorted(first_batch)
    assert "seen" not in run_ranks(body, 3, 3, state)[0]
    output = capfd.readouterr().out
    assert "epoch 0 trained on 36 of 40 samples exactly once and dropped 4" in output


# Images


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_uint8_images_are_normalized_as_by_torchvision(dtype):
    dataset, cfg = Pixels(), config(f"--dtype={dtype}", "--global-batch-size=7")
    images = [i for i, _ in build_loader(dataset, SequentialSampler(dataset), 7, CPU, cfg)]
    assert all(batch.is_contiguous(memory_format=torch.channels_last) for batch in images)
    scaled = F.to_dtype(dataset.images, cfg.torch_dtype, scale=True)
    expected = F.normalize(scaled, dataset.mean, dataset.std)
    tolerance = {"float32": 1e-6, "float64": 1e-14}[dtype]
    torch.testing.assert_close(torch.cat(images)[:COUNT], expected, atol=tolerance, rtol=0)


def test_all_batches_of_an_evaluation_have_the_same_size():
    """Or torch.compile would compile once more. evaluate() does not count the repeated samples."""
    dataset = TensorDataset(torch.arange(16.0)[:, None], torch.arange(16))
    for size, count in ((7, 3), (5, 4), (8, 2), (30, 1)):
        cfg = config(f"--global-batch-size={size}")
        loader = build_loader(dataset, SequentialSampler(dataset), size, CPU, cfg)
        for _ in range(2):
            sizes = [len(labels) for _, labels in loader]
            assert sizes == [size] * count and len(loader) == count


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_uint8_images_without_mean_and_std_are_scaled_to_one(channels):
    images = Pixels((channels, 6, 5)).images
    dataset = TensorDataset(images, labels)
    loader = build_loader(dataset, SequentialSampler(dataset), BATCH, CPU, config())
    result = torch.cat([images for images, _ in loader])[:COUNT]
    torch.testing.assert_close(result, images / 255, atol=1e-6, rtol=0)


def test_float_images_are_passed_on_in_the_dtype_of_the_model():
    for name in ("float images", "feature vectors"):
        dataset = DATASETS[name]
        cfg = config("--dtype=float64")
        loader = build_loader(dataset, SequentialSampler(dataset), BATCH, CPU, cfg)
        images, targets = next(iter(loader))
        assert (images.dtype, targets.dtype) == (torch.float64, torch.int64)
        assert torch.equal(images, dataset.tensors[0][:BATCH].double())
        assert torch.equal(targets, labels[:BATCH])
        if images.dim() == 4:
            assert images.is_contiguous(memory_format=torch.channels_last)


# Errors


class Broken(Pixels):
    """Has a sample that cannot be read, and one with a bug."""

    def __getitem__(self, index):
        if index == 17:
            raise UserError("17.jpg cannot be read: remove it")
        if index == 30:
            raise ValueError("a bug")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("index", "kind", "text"),
    [(17, UserError, r"^17\.jpg cannot be read: remove it$"), (30, ValueError, "a bug")],
)
def test_user_error_in_a_worker_is_one_line(workers, index, kind, text):
    loader = build_loader(Broken(), [index], BATCH, CPU, config(f"--num-workers={workers}"))
    with pytest.raises(kind, match=text) as caught:
        next(iter(loader))
    assert type(caught.value) is kind
    if workers:
        loader.reader._iterator._shutdown_workers()  # the garbage collector would take 5 seconds


def test_pil_images_are_refused_by_name():
    dataset = FakeData(COUNT, (3, 8, 8), 5)  # no transform
    assert isinstance(dataset[0][0], Image.Image)
    with pytest.raises(TypeError, match=r"must contain tensors.*found <class 'PIL.Image.Image'>"):
        next(iter(make_loader(dataset)))


def test_batch_that_cannot_be_shared_or_filled_is_refused(monkeypatch):
    dataset, sampler = Pixels(), range(COUNT)
    with pytest.raises(UserError, match="40 training samples do not fill one global batch of 64"):
        build_loader(dataset, sampler, 64, CPU, config("--global-batch-size=64"), train=True)
    with pytest.raises(UserError, match="0 validation samples"):
        build_loader([], range(0), 64, CPU, config("--global-batch-size=64"))
    cfg = config("--global-batch-size=64")  # an evaluation may end with a part of a batch
    assert len(build_loader(dataset, sampler, 64, CPU, cfg)) == 1
    monkeypatch.setattr(utils.data, "dp_world_size", lambda: 3)
    cfg = config("--global-batch-size=7")
    with pytest.raises(UserError, match=r"cannot be divided evenly among 3 replicas: .*-size 9$"):
        build_loader(dataset, sampler, 7 // 3, CPU, cfg, train=True)


# Datasets by name


def test_fake_data_is_random_and_reproducible():
    cfg = config("--synthetic-samples=10", "--image-size=16")
    train, val, classes = build_datasets(cfg)
    assert (len(train), len(val), len(classes)) == (10, 2, 10)
    image, label = train[3]
    assert (image.shape, image.dtype, int(label) in range(10)) == ((3, 16, 16), torch.float32, True)
    assert torch.equal(build_datasets(cfg)[0][3][0], image)
    other = build_datasets(config("--synthetic-samples=10", "--image-size=16", "--seed=1"))[0][3][0]
    for one, another in combinations([image, train[0][0], val[0][0], val[1][0], other], 2):
        assert not torch.equal(one, another)
    assert len(build_datasets(config("--synthetic-samples=2"))[1]) == 1


def test_datasets_are_chosen_by_name():
    train, _, classes = build_datasets(config("--dataset=synthetic", "--synthetic-samples=9"))
    assert len(train) == 9 and classes[3] == "pattern 3"
    with pytest.raises(UserError, match="no train images"):
        build_datasets(config("--dataset=imagefolder", "--data-dir=/nowhere"))


@pytest.mark.parametrize(
    "sample",
    [
        torch.randint(99, (7,)),  # words
        torch.randint(99, (7,), dtype=torch.int32),
        torch.ones(7, dtype=torch.bool),
        torch.randint(256, (7,), dtype=torch.uint8),
        torch.randint(256, (5, 7), dtype=torch.uint8),
    ],
    ids=lambda t: f"{t.dtype} {t.dim()}-D",
)
def test_samples_that_are_no_images_stay_as_they_are(sample):
    images, _ = next(iter(make_loader([(sample, 1)] * COUNT)))
    assert images.dtype == sample.dtype and images[0].equal(sample)


@pytest.mark.parametrize(
    "label", [1, True, numpy.int32(1), numpy.uint8(1), torch.tensor(1, dtype=torch.int32)], ids=repr
)
def test_integer_labels_become_int64_and_others_stay(label):
    image = torch.zeros(3)
    _, labels = next(iter(make_loader([(image, label)] * COUNT)))
    assert labels.dtype == torch.int64 and set(labels.tolist()) == {1}
    _, labels = next(iter(make_loader([(image, 0.5)] * COUNT)))
    assert labels.is_floating_point()


@pytest.mark.parametrize("sample", [{"image": 1}, (1, 2, 3), torch.zeros(3, 4, 4)], ids=repr)
def test_sample_that_is_no_pair_fails_where_it_is_read(sample):
    with pytest.raises(ValueError, match="values to unpack") as caught:
        next(iter(make_loader([sample] * COUNT)))
    assert "image, label = self.dataset[index]" in str(caught.traceback[-1].statement)


def test_description_of_the_data_tells_datasets_apart():
    class Labelled(Pixels):
        def __init__(self, labels, **attributes):
            super().__init__()
            self.labels = labels
            vars(self).update(attributes)

    one = Labelled(torch.tensor([1, 2]), preprocessing={"image_size": 6})
    val = Labelled([0], split={"val_files": ["a.jpg"]})
    facts = describe_data(one, val, ("cat", "dog"))
    assert facts["classes"] == ["cat", "dog"]
    assert (facts["train_samples"], facts["val_samples"]) == (COUNT, COUNT)
    assert (facts["image_size"], facts["val_files"]) == (6, ["a.jpg"])
    assert facts == describe_data(one, val, ["cat", "dog"])
    swapped = describe_data(Labelled(torch.tensor([2, 1])), val, ["cat", "dog"])
    assert swapped["train_labels"] != facts["train_labels"]
    assert swapped["val_labels"] == facts["val_labels"]
    with_targets = Pixels()
    with_targets.targets = [2, 1]
    assert describe_data(with_targets, val, [])["train_labels"] == swapped["train_labels"]
    assert describe_data(DATASETS["feature vectors"], val, [])["train_samples"] == COUNT
    names = [describe_data(Labelled(list(n)), val, [])["train_labels"] for n in ("ab", "ba")]
    assert names[0] != names[1]
    describe_data(Labelled(None), val, [])  # an attribute of that name with another meaning


# Workers


class Process(Pixels):
    """Whether a worker ignores Ctrl-C, and the signal that it receives when its parent dies."""

    def __getitem__(self, index):
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # 2: PR_GET_PDEATHSIG
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN, number.value


def test_workers_leave_ctrl_c_to_their_rank_and_die_with_it():
    cfg = config("--num-workers=1", "--global-batch-size=1")
    ignored, numbers, _ = next(iter(build_loader(Process(), [0], 1, CPU, cfg).reader))
    assert (ignored.tolist(), numbers.tolist()) == ([True], [signal.SIGKILL])


def test_automatic_workers_leave_the_cores_to_training(monkeypatch):
    """None on a CPU, which is busy training; with a GPU, as many as there are spare cores."""
    readers = []

    class Reader:
        def __init__(self, *args, num_workers, pin_memory, **options):
            readers.append((num_workers, pin_memory))

    monkeypatch.setattr(utils.data, "DataLoader", Reader)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self)  # no GPU here
    for device, cores, flags in (
        ("cpu", 4, ()),
        ("cpu", 4, ("--num-workers=3",)),
        ("cuda", 1, ()),
        ("cuda", 4, ()),
        ("cuda", 32, ()),
        ("cuda", 64, ()),
        ("cuda", 4, ("--num-workers=0",)),
    ):
        monkeypatch.setattr(utils.data, "cores_per_rank", lambda cores=cores: cores)
        cfg = config("--loader=workers", *flags)
        build_loader(Pixels(), range(COUNT), BATCH, torch.device(device), cfg)
    assert readers == [
        (0, False),
        (3, False),
        (0, True),
        (3, True),
        (31, True),
        (32, True),
        (0, True),
    ]
