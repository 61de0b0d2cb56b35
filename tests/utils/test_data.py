"""Loaders for any map-style dataset: the same batches on any number of ranks and workers."""

import random
import signal
from functools import cache

import numpy
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)
from torchvision.datasets import FakeData
from torchvision.transforms import v2
from torchvision.tv_tensors import Image as TVTensor

import tasks.images
import utils.contract
import utils.data
from tasks.images.arrays import ArrayDataset
from tests.any_batch import CASES, COUNT, Boxes, Numbered, Rows, as_rank, noise, samples_of
from utils.batches import as_pair, collate, map_tensors, tensors_of
from utils.config import load_config
from utils.contract import CompareSamples, compare_samples
from utils.data import BatchDataset, build_loader, describe_datasets, fetch_samples
from utils.errors import UserError
from utils.sampler import EpochSampler
from utils.seeds import SampleSeeds
from utils.signals import SIGNALS

CPU = torch.device("cpu")
BATCH, STEPS = 12, 3  # a global batch that 1 to 4 ranks can share; of 40 samples, 4 are dropped
PAIRS = [(torch.tensor([float(i)]), i) for i in range(COUNT)]  # a list is a dataset, too


def config(*flags):
    return load_config(argv=[f"--global-batch-size={BATCH}", "--num-workers=0", *flags])


def images_of_torchvision():
    transforms = [v2.RandomCrop(8, padding=2), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5)]
    transforms += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    return FakeData(COUNT, (3, 8, 8), 5, v2.Compose(transforms))


vectors = torch.randn(COUNT, 7, generator=torch.Generator().manual_seed(0))
DATASETS = {
    "torchvision's transforms": images_of_torchvision(),
    "tensors": TensorDataset(vectors, torch.arange(COUNT) % 5),  # never augmented
    **{name: dataset for name, (dataset, _, _) in CASES.items()},
}


def make_loader(dataset, rank=0, world_size=1, flags=(), micro_batches=None):
    """A training loader, with the sampler of a script for this number of ranks."""
    cfg = config("--loader=workers", *flags)
    sampler = DistributedSampler(dataset, world_size, rank, seed=cfg.seed, drop_last=True)
    if world_size == 1:
        sampler = EpochSampler(dataset, cfg.seed)
    batch_size = BATCH // world_size
    return build_loader(dataset, sampler, batch_size, CPU, cfg, True, micro_batches)


def eval_loader(dataset, *flags):
    cfg = config(*flags)
    return build_loader(dataset, SequentialSampler(dataset), cfg.global_batch_size, CPU, cfg)


def end_workers(loader):
    """After an error, which keeps the loader alive: the garbage collector would take 5 seconds."""
    if loader.reader.num_workers:
        loader.reader._iterator._shutdown_workers()


def read(loader, epoch):
    """The samples of each batch of an epoch, as comparable values."""
    loader.sampler.set_epoch(epoch)
    return [samples_of(batch) for batch in loader]


def flat(batches):
    return [sample for batch in batches for sample in batch]


@cache
def reference(name):
    """The global batches of two epochs, by one process without workers."""
    loader = make_loader(DATASETS[name])
    return [read(loader, epoch) for epoch in (0, 1)]


def share(batches, rank, world_size):
    """A rank's share of the global batches."""
    return [batch[rank::world_size] for batch in batches]


@pytest.mark.parametrize("name", DATASETS)
def test_any_dataset_gives_the_same_global_batches(name):
    """For any number of ranks, workers and micro-batches; reshuffled in each epoch."""
    dataset, epochs = DATASETS[name], reference(name)
    for world_size in (2, 3, 4):
        for rank in range(world_size):
            with as_rank(rank, world_size):
                loader = make_loader(dataset, rank, world_size)
                for epoch, whole in enumerate(epochs):
                    assert read(loader, epoch) == share(whole, rank, world_size)
    with as_rank(1, 2):  # 6 samples in 4 parts
        for batch, whole in zip(make_loader(dataset, 1, 2, (), 4), epochs[0], strict=True):
            parts = [samples_of(part) for part in batch]
            assert [len(part) for part in parts] == [2, 2, 1, 1]
            assert flat(parts) == whole[1::2]


@pytest.mark.parametrize("name", DATASETS)
def test_workers_change_nothing(name):
    epochs = reference(name)
    with as_rank(1, 2):
        loader = make_loader(DATASETS[name], 1, 2, ["--num-workers=1"])
        assert loader.name == "workers" and loader.reader.num_workers == 1
        for epoch, whole in enumerate(epochs):
            assert read(loader, epoch) == share(whole, 1, 2)
    if name in ("torchvision's transforms", "boxes"):
        loader = make_loader(DATASETS[name], 0, 1, ["--num-workers=2"], micro_batches=5)
        batches = [[samples_of(part) for part in batch] for batch in loader]
        assert [flat(parts) for parts in batches] == epochs[0]


@pytest.mark.parametrize("name", DATASETS)
def test_samples_are_those_of_the_dataset_with_its_own_seeds(name):
    """By (seed, epoch, index). And shuffled, and augmented in each epoch; otherwise, the
    comparisons above would prove little."""
    dataset = DATASETS[name]
    loader = make_loader(dataset, flags=["--seed=3"])
    loader.sampler.set_epoch(2)
    batch, indices = next(iter(loader)), loader.indices.tolist()
    if name not in ("whole batches", "only __getitems__"):
        with SampleSeeds(3, 2) as seeds:
            own = []
            for index in indices:
                seeds.seed(index)
                own.append(dataset[index])
        contents = getattr(dataset, "collate_fn", collate)(own)
        contents = map_tensors(lambda t: t.float() if t.is_floating_point() else t, contents)
        assert samples_of(batch) == samples_of(as_pair(contents))
    first, second = (flat(batches) for batches in reference(name))
    other_seed = flat(read(make_loader(dataset, flags=["--seed=1"]), 0))
    assert len(set(first)) == STEPS * BATCH  # each sample at most once
    assert first != second and first != other_seed
    repeated = set(first) & (set(second) | set(other_seed))
    assert len(repeated) >= 32 if name == "tensors" else not repeated


def forked_draw():
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


# In the third batch: the first one of each loader process is read with seeds.
LATE = list(EpochSampler(range(COUNT), 0))[2 * BATCH]


def draw_or_fail():
    """What an augmentation does that cannot use some numbers: here, all but that of its sample."""
    with SampleSeeds(0, 0) as seeds:
        seeds.seed(LATE)
        expected = random.random()
    if random.random() != expected:
        raise ValueError
    return expected


DRAWS = {
    "torch": lambda: torch.rand(()).item(),
    "random": random.random,
    "numpy": numpy.random.rand,
    "failing": draw_or_fail,
}
# They leave the generators as they were, which is found out in the first batch only.
HIDDEN_DRAWS = {
    "fork_rng": forked_draw,
    "initial_seed": lambda: numpy.random.default_rng(torch.initial_seed()).random(),
}


class Drawing(Dataset):
    """Some samples draw a number."""

    is_pure = True

    def __init__(self, draw, drawing):
        self.draw, self.drawing = draw, drawing

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index, self.draw() if index in self.drawing else 0.0


@pytest.mark.parametrize("name", [*DRAWS, *HIDDEN_DRAWS])
def test_samples_are_seeded_if_one_of_them_draws(name, monkeypatch):
    """Also if those before it do not, and were read without seeds, which would take longer."""
    monkeypatch.setattr(utils.data.time, "perf_counter", lambda: 0.0)  # no sample takes long
    dataset = Drawing((DRAWS | HIDDEN_DRAWS)[name], [LATE] if name in DRAWS else range(COUNT))
    for flags in ([], ["--num-workers=2"]):
        loader = make_loader(dataset, flags=flags)
        for inputs, targets in loader:
            expected = fetch_samples(dataset, loader.indices, 0, loader.seed)
            assert torch.equal(inputs, expected[0])
            assert torch.equal(targets, expected[1].float())


@pytest.mark.parametrize(("is_pure", "batches"), [(True, 1), (False, STEPS)])
def test_generators_are_seeded_once_for_pure_samples_that_draw_nothing(
    is_pure, batches, monkeypatch
):
    """It takes longer than reading a short text. Others may keep what they drew without seeds."""
    monkeypatch.setattr(utils.data.time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(Drawing, "is_pure", is_pure)
    seeded = []
    monkeypatch.setattr(SampleSeeds, "seed", lambda seeds, index: seeded.append(index))
    read(make_loader(Subset(Drawing(None, []), range(COUNT))), 0)
    assert len(seeded) == batches * BATCH


def test_forgotten_set_epoch_repeats_the_first_epoch():
    """The mistake that the scripts' comment warns of, in order and augmentation."""
    loader = make_loader(DATASETS["torchvision's transforms"])
    first, second = ([samples_of(batch) for batch in loader] for _ in range(2))
    assert first == second


def test_random_state_of_the_process_is_left_alone():
    def state():
        numbers = numpy.random.get_state()
        return torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2]

    before = state()
    for _ in eval_loader(DATASETS["regression with an L1 loss"]):
        assert state() == before
    assert state() == before


def test_dropout_of_a_step_does_not_depend_on_how_samples_are_read():
    def numbers(name, *flags, start=0, micro_batches=None):
        loader = make_loader(DATASETS[name], 0, 1, flags, micro_batches)
        loader.load_state_dict({"step": start, "global_batch": BATCH})
        return [torch.rand(()).item() for _ in loader]

    expected = numbers("whole batches")
    assert len(set(expected)) == STEPS
    assert numbers("dicts") == numbers("tensors", "--num-workers=1") == expected
    assert numbers("boxes", start=1, micro_batches=2) == expected[1:]
    with as_rank(1, 2):
        loader = make_loader(DATASETS["dicts"], 1, 2)
        assert not {torch.rand(()).item() for _ in loader} & set(expected)


# Any batch


def test_pair_is_divided_and_all_else_is_both_inputs_and_targets():
    pairs = ("regression with an L1 loss", "several labels", "boxes", "whole batches", "tensors")
    for name, dataset in DATASETS.items():
        inputs, targets = next(iter(make_loader(dataset)))
        if name in ("dicts", "a forwarding wrapper", "tuples of three", "dataclasses"):
            assert inputs is targets
        elif name in pairs:
            assert inputs is not targets
    row, _ = next(iter(make_loader(Rows())))
    assert row.keys() == {"input_ids", "labels", "draws", "text"} and len(row["text"]) == BATCH


def test_wrapper_uses_its_own_getitem():
    """Though its __getattr__ offers the __getitems__ of the dataset in it. So does a subclass of a
    dataset with __getitems__."""
    row, _ = next(iter(make_loader(DATASETS["a forwarding wrapper"])))
    assert row["wrapped"].shape == (BATCH, 3)

    class Titled(Rows):
        def __getitem__(self, index):
            return super().__getitem__(index) | {"title": f"row {index:02}"}

    row, _ = next(iter(eval_loader(Titled())))
    assert row["title"] == [f"row {i:02}" for i in range(BATCH)]


def test_floating_point_tensors_get_the_dtype_of_the_run():
    for dtype in (torch.float32, torch.float64):
        flags = "--dtype=" + str(dtype).removeprefix("torch.")
        row, _ = next(iter(eval_loader(Rows(), flags)))
        assert (row["draws"].dtype, row["labels"].dtype) == (dtype, torch.int64)
        images, targets = next(iter(eval_loader(Boxes(), flags)))
        assert {image.dtype for image in images} == {dtype} == {t["boxes"].dtype for t in targets}
        _, label = next(iter(eval_loader([(vectors[0], 0.5)] * 20, flags)))
        assert label.dtype == dtype  # a Python number is a float64 tensor in a batch
        scaled, _ = next(iter(eval_loader(DATASETS["whole batches"], flags)))
        assert scaled.dtype == dtype
        waves, _ = next(iter(eval_loader([(torch.tensor([1 + 2j]), 0)] * 20, flags)))
        assert waves.dtype == dtype.to_complex() and waves[0].item() == 1 + 2j
    loader = eval_loader(DATASETS["tensors"])
    assert torch.equal(torch.cat([inputs for inputs, _ in loader]), vectors)


@pytest.mark.parametrize(
    "sample",
    [
        torch.randint(99, (7,)),  # words
        torch.randint(99, (7,), dtype=torch.int32),
        torch.ones(7, dtype=torch.bool),
        torch.randint(256, (7,), dtype=torch.uint8),
        torch.randint(256, (3, 5, 7), dtype=torch.uint8),  # an image; only its dataset scales it
        torch.zeros(7, dtype=torch.complex64),
    ],
    ids=lambda t: f"{t.dtype} {t.dim()}-D",
)
def test_other_tensors_stay_as_they_are(sample):
    inputs, _ = next(iter(make_loader([(sample, 1)] * COUNT)))
    assert inputs.dtype == sample.dtype and inputs[0].equal(sample)


@pytest.mark.parametrize(
    "label", [1, True, numpy.int32(1), numpy.uint8(1), torch.tensor(1, dtype=torch.int32)], ids=repr
)
def test_labels_of_any_integer_type_are_classified_alike(label):
    outputs = torch.eye(3)[[1] * 6 + [2] * 6]
    _, labels = next(iter(make_loader([(torch.zeros(3), label)] * COUNT)))
    expected = tasks.images.loss(outputs, torch.ones(BATCH, dtype=torch.int64))
    assert not labels.is_floating_point() and tasks.images.count(labels) == BATCH
    assert tasks.images.loss(outputs, labels).equal(expected)
    assert tasks.images.measure(outputs, labels)["correct"].item() == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_batched_is_one_line_that_says_what_was_found(workers):
    ragged = [{"ids": torch.zeros(1 + i % 2), "label": i} for i in range(COUNT)]
    for dataset, found in (
        (FakeData(COUNT, (3, 8, 8), 5), "(Image, int)"),  # no transform
        (ragged, r"{'ids': float32 \([12],\), 'label': int}"),
        ([(torch.zeros(2), None)] * COUNT, r"(float32 (2,), NoneType)"),
    ):
        found = found if "[12]" in found else found.replace("(", r"\(").replace(")", r"\)")
        loader = make_loader(dataset, flags=[f"--num-workers={workers}"])
        text = rf"^samples such as {found} .* collate_fn\(samples\)$"
        with pytest.raises(UserError, match=text) as caught:
            next(iter(loader))
        assert "\n" not in str(caught.value)
        end_workers(loader)
    assert isinstance(FakeData(1, (3, 8, 8), 5)[0][0], Image.Image)


def test_examples_are_what_the_model_gets():
    dataset, model, _ = CASES["dicts"]
    [(inputs, targets)] = make_loader(dataset).examples([0, 1])
    assert inputs["input_ids"].shape == (2, 6) and model(inputs)["logits"].shape == (2, 6, 11)
    assert targets is inputs
    boxes = make_loader(Boxes())
    (images, _), ((first, second), _) = boxes.examples([0, 1, 2], [2, 2])
    assert [image.shape for image in images] == [(3, 2, 2), (3, 3, 2), (3, 4, 2)]
    assert first.equal(second) and first.equal(images[2])  # the same transforms, too
    whole = DATASETS["whole batches"]
    resident = eval_loader(whole, "--loader=device")
    assert resident.name == "device"
    one, two = (next(loader.examples([1])) for loader in (resident, make_loader(whole)))
    assert all(mine.equal(other) for mine, other in zip(one, two, strict=True))


class OpenedAtFirstAccess(Numbered):
    """As everybody is told to: each loader process then opens the file itself."""

    file = None

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(__file__, "rb")  # noqa: SIM115
        return noise(), index


def test_what_is_tried_and_compared_is_read_by_a_loader_process():
    """Loader processes that are forked later would share the position in its file."""
    dataset = OpenedAtFirstAccess()
    loader = make_loader(dataset, flags=["--num-workers=1"])
    one, two = loader.examples([3], [3, 7])
    assert one[1].tolist() == [3] and two[1].tolist() == [3, 7]
    contents = compare_samples(loader)
    assert len(contents) == 3 and dataset.file is None
    without = make_loader(OpenedAtFirstAccess())
    assert compare_samples(without) == contents and without.source.file is not None
    without.source.file.close()


# Subsets


def test_subsets_are_collated_by_the_dataset_in_them():
    whole = Boxes()
    for dataset in (
        Subset(whole, range(20)),
        ConcatDataset([Subset(whole, range(10)), Boxes()]),
        Subset(ConcatDataset([whole, whole]), range(20)),
    ):
        images, targets = next(iter(make_loader(dataset)))
        assert isinstance(images, list) and isinstance(targets, list)
    with pytest.raises(UserError, match=r"ConcatDataset .*different .*collate_fn: give"):
        list(make_loader(ConcatDataset([whole, Numbered()])).examples([0]))


def test_subset_of_a_batch_dataset_is_refused():
    """It would yield raw pixels, or the same order of a stream in each epoch."""
    whole = DATASETS["whole batches"]
    hidden = Subset(whole, range(20))
    hidden.collate_fn = list
    both = ConcatDataset([Rows(), Subset(whole, range(20))])
    for dataset in (Subset(whole, range(20)), both, hidden):
        with pytest.raises(UserError, match=r"WholeBatches .*BatchDataset"):
            make_loader(dataset)


class Epochs(Numbered):
    """Whose samples depend on set_epoch(), as curricula do."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor([float(self.epoch)]), index


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_learn_the_epoch_in_each_process(workers):
    dataset = Subset(Epochs(), range(COUNT))
    dataset.collate_fn = default_collate  # whose own methods hide none of what is in it
    loader = make_loader(dataset, flags=[f"--num-workers={workers}"])
    for epoch in (0, 1, 4):
        loader.sampler.set_epoch(epoch)
        assert {x for inputs, _ in loader for x in inputs.flatten().tolist()} == {epoch}


# Are the samples the same ones on all ranks, and after a resume?


class Labeled(Numbered):
    """Noise with a label, whose number depends on the order of the classes."""

    def __init__(self, *classes, change=lambda pixels: pixels):
        self.classes, self.change = classes, change

    def __getitem__(self, index):
        label = self.classes.index("abc"[index % 3])
        return self.change(index + noise()), label, f"/node-{id(self)}/{index}.png"


def comparison(*args, flags=(), step=0, **options):
    """The hook of a run that starts at this step."""
    loader = make_loader(Labeled(*args, **options), flags=flags)
    loader.start = step
    return CompareSamples(load_config(argv=flags), {"loader": loader})


def resume(hook, state):
    hook.load_state_dict(state)
    hook.after_load(None)


def state_of_a_run():
    hook = comparison("a", "b", "c")
    hook.after_load(None)
    return hook.state_dict()


def test_ranks_and_runs_with_different_samples_are_refused(monkeypatch):
    """As of classes = list(set(names)), or of files in the order of os.listdir()."""
    state, other = state_of_a_run(), comparison("b", "a", "c")
    text = r"different training samples: .* Sort .*set\(\), os.listdir\(\)"
    ranks = lambda mine: [state["contents"], mine]  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(utils.contract, "all_gather_object", ranks)
        with pytest.raises(UserError, match=f"^rank 0 has {text}"):
            other.after_load(None)
    with pytest.raises(UserError, match=f"^the checkpoint has {text}.*, or pass --allow-config-ch"):
        resume(other, state)
    flags = ["--allow-config-change"]
    resume(comparison("b", "a", "c", flags=flags), state)
    with pytest.raises(UserError, match=text):  # within an epoch, they would be mixed
        resume(comparison("b", "a", "c", flags=flags, step=1), state)
    with pytest.raises(UserError, match=text):  # in another order
        resume(comparison("a", "b", "c", change=lambda pixels: 40 - pixels), state)


@pytest.mark.parametrize(
    "change",
    [
        lambda pixels: pixels * 1.01,  # decoded differently on a different machine
        lambda pixels: pixels + torch.from_numpy(numpy.random.default_rng().normal(size=3)) * 9,
        lambda pixels: pixels.flip(0) if numpy.random.default_rng().random() < 0.5 else pixels,
        lambda pixels: object(),
        lambda pixels: 1 / 0,
    ],
    ids=["decoded", "random numbers of its own", "flipped at random", "no tensors", "unreadable"],
)
def test_samples_that_may_differ_are_not_compared(change):
    state = state_of_a_run()
    for _ in range(5):
        resume(comparison("a", "b", "c", change=change), state)


def test_streams_have_no_samples_to_compare():
    hook = comparison("a", "b", "c")
    hook.loader.source = type("Stream", (BatchDataset,), {"in_order": True})()
    resume(hook, {"contents": []})
    assert hook.state_dict() == {"contents": []}


# BatchDataset


def test_batches_of_a_batch_dataset_are_made_and_prepared_by_it():
    class Squares(BatchDataset):
        """With nothing but __getitem__ and on_device."""

        def __len__(self):
            return COUNT

        def __getitem__(self, index):
            return torch.tensor([index**2], dtype=torch.uint8), index

        def on_device(self, batch, dtype):
            inputs, targets = batch
            return inputs.to(dtype) / 2, {"targets": targets, "dtype": str(dtype)}

    loader = eval_loader(Squares(), "--dtype=float64")
    inputs, targets = next(iter(loader))
    assert loader.name == "workers" and inputs.dtype == torch.float64
    assert inputs[:, 0].tolist() == [i**2 / 2 for i in range(BATCH)]
    assert targets["targets"].tolist() == list(range(BATCH))
    assert targets["dtype"] == "torch.float64"


def test_override_that_would_have_no_effect_is_refused():
    text = r"Blurred .*__getitem__.* ArrayDataset\.get_batch\(\)"
    with pytest.raises(TypeError, match=text):

        class Blurred(ArrayDataset):
            def __getitem__(self, index):
                return super().__getitem__(index)

    class Mixin:
        def __getitem__(self, index):
            return 0

    with pytest.raises(TypeError, match="Mixed overrides __getitem__"):

        class Mixed(Mixin, ArrayDataset):
            pass

    class Named(ArrayDataset):  # adds something else
        name = "a"

    class Both(Named):
        def __getitem__(self, index):
            return super().__getitem__(index)

        def get_batch(self, indices, epoch, seed):
            return super().get_batch(indices, epoch, seed)

    class Plain(BatchDataset):
        def __getitem__(self, index):
            return index

    class Further(Plain):  # BatchDataset.get_batch() calls this
        def __getitem__(self, index):
            return -index

        def __len__(self):
            return COUNT

    assert next(iter(eval_loader(Further())))[0].tolist() == [-i for i in range(BATCH)]


def test_plain_dataset_cannot_be_kept_on_the_device():
    for dataset in (Rows(), PAIRS, DATASETS["a forwarding wrapper"]):
        assert eval_loader(dataset, "--loader=auto").name == "workers"
        with pytest.raises(UserError, match=rf"not a {type(dataset).__name__}: pass --loader work"):
            eval_loader(dataset, "--loader=device")
    whole = DATASETS["whole batches"]
    assert eval_loader(whole, "--loader=auto").name == "device"
    on_device = [samples_of(batch) for batch in eval_loader(whole, "--loader=device")]
    assert on_device == [samples_of(batch) for batch in eval_loader(whole, "--loader=workers")]


# Evaluation


def test_last_batch_of_an_evaluation_is_smaller():
    for size, sizes in ((7, [7, 7, 2]), (5, [5, 5, 5, 1]), (8, [8, 8]), (30, [16])):
        loader = eval_loader(PAIRS[:16], f"--global-batch-size={size}")
        for _ in range(2):
            batches = [labels.tolist() for _, labels in loader]
            assert [len(labels) for labels in batches] == sizes and len(loader) == len(sizes)
            assert flat(batches) == list(range(16))
            assert loader.samples == 16


def test_rank_without_samples_yields_batches_that_do_not_count():
    """As many as the other ranks, because a forward pass may communicate."""
    for count, world_size, batch_size in ((1, 3, 2), (4, 3, 2), (5, 3, 1), (7, 3, 2), (9, 4, 2)):
        seen, lengths = [], set()
        for rank in range(world_size):
            with as_rank(rank, world_size):
                cfg = config(f"--global-batch-size={batch_size * world_size}")
                sampler = DistributedSampler(range(count), world_size, rank, shuffle=False)
                loader = build_loader(PAIRS[:count], sampler, batch_size, CPU, cfg)
                batches = 0
                for _, labels in loader:
                    assert 1 <= len(labels) <= batch_size
                    seen += labels.tolist() if loader.counts else []
                    batches += 1
                assert loader.samples == len(range(rank, count, world_size))
                lengths.add(batches)
                assert batches == len(loader)
        assert sorted(seen) == list(range(count)) and len(lengths) == 1


# Resuming


@pytest.mark.parametrize("name", DATASETS)
def test_resumed_epoch_continues_with_the_next_global_batch_at_any_world_size(name):
    dataset, (first, second) = DATASETS[name], reference(name)
    state = {"step": 0, "global_batch": BATCH}
    for world_size, stop in ((2, 1), (4, 2), (3, None), (1, None)):
        after = []
        for rank in range(world_size):
            with as_rank(rank, world_size):
                loader, mine = make_loader(dataset, rank, world_size), []
                loader.load_state_dict(state)
                for batch in loader:
                    mine.append(samples_of(batch))
                    assert loader.samples == loader.step * BATCH // world_size
                    if loader.step == stop:
                        break
                assert mine == share(first[state["step"] : stop], rank, world_size)
                after.append(loader.state_dict())
                if stop is None:  # the next epoch is a complete one
                    assert read(loader, 1) == share(second, rank, world_size)
        assert after == [{"step": stop or 0, "global_batch": BATCH}] * world_size
        state = after[0] if stop else state


def test_persistent_workers_resume_within_a_later_epoch():
    loader = make_loader(DATASETS["dicts"], flags=["--num-workers=2"])
    read(loader, 0)
    loader.load_state_dict({"step": 2, "global_batch": BATCH})
    assert read(loader, 1) == reference("dicts")[1][2:]
    assert read(loader, 1) == reference("dicts")[1]


def test_epoch_cannot_continue_with_another_global_batch_size():
    loader = make_loader(PAIRS)
    state = {"step": 3, "global_batch": 5}
    with pytest.raises(UserError, match=r"3 global batches of 5.* not 12"):
        loader.load_state_dict(state)
    loader.load_state_dict(state | {"step": 0})
    assert len(list(loader)) == STEPS


# Errors


class Broken(Numbered):
    """Has a sample that cannot be read, and one with a bug."""

    def __getitem__(self, index):
        if index == 17:
            raise UserError("17.jpg cannot be read: remove it")
        if index == 30:
            raise ValueError("a bug")
        return noise(), index


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
    end_workers(loader)


def test_full_shared_memory_is_an_error(monkeypatch):
    """With an error in the worker's thread that sends batches, the rank would wait forever."""

    class Ready(BatchDataset):
        """Its batches are not made by default_collate(), which moves them to shared memory."""

        def __init__(self, size):
            self.size = size

        def __len__(self):
            return 8

        def get_batch(self, indices, epoch, seed):
            return torch.ones(self.size), indices

    def fail(storage):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", fail)
    loader = build_loader(Ready(2**14), [0], BATCH, CPU, config("--num-workers=1"))
    assert next(iter(loader))[0].sum() == 2**14  # 64 KiB are sent without shared memory
    end_workers(loader)
    loader = build_loader(Ready(2**14 + 1), [0], BATCH, CPU, config("--num-workers=1"))
    with pytest.raises(UserError, match=r"^a loader process .* No space .* --shm-size"):
        next(iter(loader))
    end_workers(loader)


def test_workers_keep_dtypes_and_strides():
    images = torch.rand(2, 3, 8, 8)
    batch = {
        "floats": images,
        "channels last": images.to(memory_format=torch.channels_last),
        "transposed": images.mT,
        "scalar": images.sum(),
        "none": images[:0],
        "halves": images.bfloat16(),
        "conjugated": torch.complex(images, images).conj(),
        "large": torch.ones(2**15),
        "sparse": images[0, 0].to_sparse(),
        "shapes": [TVTensor(images), torch.ones(2, dtype=torch.bool)],
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),  # looks at its tensors
    }

    class Made(BatchDataset):
        def __len__(self):
            return 8

        def get_batch(self, indices, epoch, seed):
            return batch

    read = []
    for workers in (0, 1):
        loader = build_loader(Made(), [0], BATCH, CPU, config(f"--num-workers={workers}"))
        read.append(next(iter(loader))[0])
        end_workers(loader)
    assert read[0].keys() == read[1].keys() == batch.keys()
    for own, got in zip(*map(tensors_of, read), strict=True):
        assert (type(got), got.dtype, got.layout) == (type(own), own.dtype, own.layout)
        assert own.layout == torch.sparse_coo or got.stride() == own.stride()
        assert torch.equal(got.to_dense(), own.to_dense())


def stop():
    raise StopIteration


def raise_error_of_local_class():
    class NoSuchKey(Exception):
        """pickle does not find it, like those that botocore makes."""

    raise NoSuchKey("7.jpg")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: lambda: None, "batch.*pickle.* --num-workers 0"),
        (stop, "the dataset raised StopIteration"),
        (raise_error_of_local_class, "NoSuchKey: 7.jpg"),
        (lambda: torch.ones(2, requires_grad=True) * 2, r"requires_grad.* detach\(\)"),
    ],
    ids=["cannot be pickled", "StopIteration", "error that cannot be", "requires a gradient"],
)
def test_batch_that_a_worker_cannot_send_is_an_error(make, text):
    """The rank would wait forever, or end its epoch early."""

    class Unsendable(Dataset):
        def __len__(self):
            return BATCH

        def __getitem__(self, index):
            return torch.ones(2), make()

        def collate_fn(self, samples):
            return samples

    cfg = config("--num-workers=1", "--timeout=2")
    loader = build_loader(Unsendable(), range(BATCH), BATCH, CPU, cfg)
    with pytest.raises((UserError, RuntimeError), match=text):
        next(iter(loader))
    end_workers(loader)


def test_batch_that_cannot_be_shared_or_filled_is_refused():
    sampler = range(COUNT)
    with pytest.raises(UserError, match=r"40 training samples .* 64: .*--global-batch-size"):
        build_loader(PAIRS, sampler, 64, CPU, config("--global-batch-size=64"), train=True)
    with pytest.raises(UserError, match=r"12 training samples .* 64: .*--global-batch-size"):
        build_loader(PAIRS, range(12), 64, CPU, config("--global-batch-size=64"), train=True)
    with pytest.raises(UserError, match=r"no validation samples.*build_datasets\(\)"):
        build_loader([], range(0), 64, CPU, config("--global-batch-size=64"))
    cfg = config("--global-batch-size=64")  # an evaluation may end with a part of a batch
    assert len(build_loader(PAIRS, sampler, 64, CPU, cfg)) == 1
    cfg = config("--global-batch-size=7")
    text = r"global_batch_size 7 .* 3 replicas: .*--global-batch-size 9$"
    with as_rank(0, 3), pytest.raises(UserError, match=text):
        build_loader(PAIRS, sampler, 7 // 3, CPU, cfg, train=True)


# What a checkpoint stores about the data


def test_description_of_the_data_tells_datasets_apart():
    def images(labels, **options):
        pixels = torch.zeros(len(labels), 3, 6, 6, dtype=torch.uint8)
        return ArrayDataset(pixels, labels, ("cat", "dog"), [0.5] * 3, [0.2] * 3, 6, **options)

    facts = {"train_samples": 40, "train_subsets": [], "val_samples": 40, "val_subsets": []}
    assert describe_datasets(PAIRS, Rows()) == facts
    one, val = images([1, 0, 1]), images([0])
    facts = tasks.images.describe(one, val)
    assert facts["classes"] == ["cat", "dog"]
    assert (facts["train_samples"], facts["val_samples"], facts["image_size"]) == (3, 1, 6)
    assert facts == tasks.images.describe(images([1, 0, 1], augment="crop_flip"), val)
    swapped = tasks.images.describe(images([0, 1, 1]), val)
    assert swapped["train_labels"] != facts["train_labels"]
    assert swapped["val_labels"] == facts["val_labels"]
    val.split = {"val_files": ["a.jpg"]}
    assert tasks.images.describe(one, val) == facts | {"val_files": ["a.jpg"]}


class Transformed(Dataset):
    """Transforms the samples of a different dataset, which refers back to it."""

    def __init__(self, dataset):
        self.source, dataset.user = dataset, self

    def __len__(self):
        return len(self.source)


def test_description_of_the_data_tells_splits_apart():
    """Also of datasets without labels, and in whatever contains the Subset."""
    rows = Rows()

    def facts(*indices):
        subsets = [Subset(rows, part) for part in indices]
        return describe_datasets(ConcatDataset(subsets), Transformed(Subset(subsets[0], [1, 0])))

    expected = facts([3, 1], [2])
    assert expected["train_samples"] == 3 and len(expected["train_subsets"]) == 2
    assert expected["val_samples"] == 2 and len(expected["val_subsets"]) == 2
    assert facts(torch.tensor([3, 1]), numpy.arange(6)[2:3]) == expected
    assert facts(numpy.array([3, 0, 1, 0])[::2], range(2, 3)) == expected
    for changed in ([1, 3], [3, 2]):
        other = facts(changed, [2])
        assert {name for name in other if other[name] != expected[name]} == {
            "train_subsets",
            "val_subsets",
        }
    assert facts([3], [1, 2])["train_subsets"] != expected["train_subsets"]


# Workers


class Process(Numbered):
    """Whether a worker blocks each of the signals that stop a run."""

    def __getitem__(self, index):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return torch.tensor([number in blocked for number in SIGNALS]), 0


def test_workers_leave_signals_to_their_rank():
    cfg = config("--num-workers=1", "--global-batch-size=1")
    blocked, _ = next(iter(build_loader(Process(), [0], 1, CPU, cfg)))
    assert blocked.all()


def test_workers_are_forked_by_their_rank(monkeypatch):
    """Also where a server would fork them, which Python 3.14 starts."""
    monkeypatch.setattr(utils.data.multiprocessing, "get_start_method", lambda: "forkserver")
    reader = build_loader(PAIRS, range(COUNT), BATCH, CPU, config("--num-workers=1")).reader
    assert reader.multiprocessing_context.get_start_method() == "fork"
    monkeypatch.setattr(utils.data.multiprocessing, "get_start_method", lambda: "spawn")
    for flags in (["--num-workers=1"], ["--num-workers=0"]):
        reader = build_loader(PAIRS, range(COUNT), BATCH, CPU, config(*flags)).reader
        assert reader.multiprocessing_context is None


def test_automatic_workers_leave_the_cores_to_training(monkeypatch):
    """None on a CPU, which is busy training; with a GPU, as many as there are spare cores."""
    readers = []

    class Reader:
        def __init__(self, *args, num_workers, pin_memory, **options):
            readers.append((num_workers, pin_memory))

    monkeypatch.setattr(utils.data, "DataLoader", Reader)
    for device, cores, flags in (
        ("cpu", 4, ["--num-workers=-1"]),
        ("cpu", 4, ["--num-workers=3"]),
        ("cuda", 1, ["--num-workers=-1"]),
        ("cuda", 4, ["--num-workers=-1"]),
        ("cuda", 32, ["--num-workers=-1"]),
        ("cuda", 64, ["--num-workers=-1"]),
        ("cuda", 4, ["--num-workers=0"]),
    ):
        monkeypatch.setattr(utils.data, "cores_per_rank", lambda cores=cores: cores)
        build_loader(PAIRS, range(COUNT), BATCH, torch.device(device), config(*flags))
    assert readers == [
        (0, False),
        (3, False),
        (0, True),
        (3, True),
        (31, True),
        (32, True),
        (0, True),
    ]
