"""utils/sample_random.py: random numbers that depend on the sample, not on ranks or batches."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.processes import run_isolated
from utils import sample_random
from utils.errors import UserError
from utils.rungs.pipeline import part_of_batch
from utils.sample_random import (
    Dropout,
    StochasticDepth,
    convert_dropout,
    draws_named,
    normal,
    uniform,
)
from utils.seeds import derive_seed, start_batch

CPU = torch.device("cpu")
INDICES = torch.tensor([5, 3, 9, 1, 0, 7])


def draw(indices, name="draw", epoch=1, seed=0, shape=(4, 5), function=uniform):
    start_batch(seed, epoch, torch.as_tensor(indices))
    return function(name, (len(indices), *shape), CPU)


def test_numbers_belong_to_the_sample():
    numbers = draw(INDICES)
    assert torch.equal(draw(INDICES.flip(0)), numbers.flip(0))
    assert torch.equal(draw([9]), numbers[2:3])
    longer = draw(INDICES, shape=(6, 5))  # as of a batch that is padded to another length
    assert torch.equal(longer[:, :4], numbers)
    others = [draw(INDICES, name="other"), draw(INDICES, epoch=2), draw(INDICES, seed=1)]
    others.append(draw([0, 1, 2, 4, 6, 8]))
    for other in others:
        assert (other != numbers).float().mean() > 0.9


def test_micro_batches_have_the_numbers_of_the_batch():
    numbers = draw(INDICES)
    start_batch(0, 1, INDICES)
    parts = [uniform("draw", (count, 4, 5), CPU) for count in (2, 3, 1)]
    assert torch.equal(torch.cat(parts), numbers)
    start_batch(0, 1, INDICES)
    for number in (2, 0, 1, 0):  # a pipeline computes them in an order of its own
        with part_of_batch(number, 3):
            assert torch.equal(uniform("draw", (2, 4, 5), CPU), numbers.split(2)[number])


def test_numbers_are_normal():
    numbers = draw(torch.arange(20_000), shape=(50,), function=normal)
    assert abs(numbers.mean()) < 0.005 and abs(numbers.std() - 1) < 0.005
    assert abs((numbers**4).mean() - 3) < 0.05


def test_both_implementations_are_philox():
    """The known answer for key 0 and counter 0 (Random123, kat_vectors, philox4x32 10)."""
    known = torch.tensor([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]) & 0xFFFFFF
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    keys = torch.tensor([derive_seed(n) - 2**62 for n in range(12)]).view(6, 2)
    for philox in (sample_random._philox_of_int64, sample_random._philox):
        assert torch.equal(philox(zeros, (1, 4))[0], known / 2**24)
        assert torch.equal(philox(keys, (6, 5, 7)), sample_random._philox(keys, (6, 5, 7)))


def test_name_that_is_used_twice_in_a_step_is_refused():
    model = convert_dropout(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))).train()
    start_batch(0, 1, INDICES)
    inputs = torch.ones(6, 3)
    first = model(inputs)
    with pytest.raises(UserError, match=r"draw '1' .* 12 samples .* 6: .* draws_named"):
        model(inputs)
    with draws_named("second"):
        assert not torch.equal(model(inputs), first)
    with pytest.raises(UserError, match=r"draw 'flattened' .* 24 samples .* 6: .*first dimension"):
        uniform("flattened", (6 * 4, 3), CPU)


def test_draw_for_some_of_the_samples_is_refused():
    """Their numbers would be those of the first samples."""
    start_batch(0, 1, INDICES)
    with torch.no_grad():
        uniform("chosen", (4, 3), CPU)
    with pytest.raises(UserError, match=r"'chosen' took 4 .* 6: .*all samples.*afterwards"):
        start_batch(0, 1, INDICES)
    start_batch(0, 1, INDICES)
    with part_of_batch(0, 2), pytest.raises(UserError, match=r"'part' takes 4 .* 6: .*draws_named"):
        uniform("part", (2, 3), CPU)


def test_draw_without_samples_is_refused():
    """In training. Where a task is checked, all samples have the same numbers, as if they were one:
    the loss of two is the sum of theirs."""
    with torch.no_grad():
        numbers = uniform("draw", (2, 3), CPU)
    assert torch.equal(numbers[0], numbers[1])
    with pytest.raises(UserError, match=r"'draw' .*Loader.* start_batch\("):
        uniform("draw", (2, 3), CPU)


def test_threads_of_data_parallel_are_refused():
    start_batch(0, 1, INDICES)
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(uniform, "draw", (3, 2), CPU)
        with pytest.raises(UserError, match=r"nn\.DataParallel runs forward passes"):
            thread.result()


def test_pipeline_repeats_samples_in_evaluation():
    numbers = draw([5, 3, 9, 1], name="eval")
    start_batch(0, 1, torch.tensor([5, 3, 9, 1]))
    with torch.no_grad(), part_of_batch(1, 2):  # of a batch of six, which four samples fill
        assert torch.equal(uniform("eval", (3, 4, 5), CPU), numbers[[3, 0, 1]])


def test_keys_stay_where_a_cuda_graph_reads_them():
    """Also if batches of a different size come between, as in evaluation."""
    addresses = []
    for count in (6, 4, 6):
        start_batch(0, 1, INDICES[:count])
        addresses.append(sample_random._step.take("draw", count, CPU).data_ptr())
    assert addresses[0] == addresses[2] != addresses[1]


def test_recomputed_activations_drop_the_same_elements():
    layer = Dropout(0.5, "layer").train()
    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        start_batch(0, 1, INDICES)
        inputs = torch.ones(6, 100, requires_grad=True)
        for part in inputs.split(3):
            (run(part) ** 2).sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(*gradients) and (gradients[0] == 0).float().mean() == pytest.approx(
        0.5, abs=0.1
    )


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout, (200, 30)),
        (nn.Dropout2d, (200, 30, 4, 4)),
    ],
)
def test_dropout_is_that_of_pytorch(kind, shape):
    """The same shape of the mask, and the same mean."""
    layer, values = convert_dropout(kind(0.2)), torch.ones(shape, dtype=torch.float64)
    start_batch(0, 1, torch.arange(200))
    dropped = layer.train()(values)
    assert dropped.unique().tolist() == pytest.approx([0, 1.25])
    assert abs(dropped.mean() - 1) < 0.05
    if len(shape) > 2:
        assert (dropped.flatten(2).amin(2) == dropped.flatten(2).amax(2)).all()
    assert layer.eval()(values) is values
    assert torch.equal(Dropout(1.0, "all").train()(values), torch.zeros_like(values))


def test_converted_model_keeps_its_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layers = nn.Dropout(0.1), nn.ModuleList([nn.Linear(2, 2)])
            self.again = self.first

    model = Model().eval()
    names = [*model.state_dict()]
    assert convert_dropout(model) is model and [*model.state_dict()] == names
    assert isinstance(model.first, Dropout) and model.again is model.first
    assert (model.first.p, model.first.name, model.first.training) == (0.1, "first", False)


def test_stochastic_depth_is_that_of_torchvision():
    ops = pytest.importorskip("torchvision").ops
    layer = convert_dropout(nn.Sequential(ops.StochasticDepth(0.2, "row")))[0]
    assert type(layer) is StochasticDepth and (layer.p, layer.name) == (0.2, "0")
    values = torch.ones(200, 3, 2, dtype=torch.float64)
    start_batch(0, 1, torch.arange(200))
    rows = layer.train()(values).flatten(1)
    assert rows.unique().tolist() == pytest.approx([0, 1.25])  # as torchvision scales them
    assert (rows.amin(1) == rows.amax(1)).all()
    assert layer.eval()(values) is values
    with pytest.raises(UserError, match=r"StochasticDepth.* random numbers .*dropout to 0"):
        convert_dropout(ops.StochasticDepth(0.2, "batch"))


def test_layers_that_cannot_be_given_their_numbers_are_refused():
    for layer in (nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(2, 2, 2, dropout=0.1)):
        with pytest.raises(UserError, match=r"^0.*, a \w+, draws random numbers .*dropout"):
            convert_dropout(nn.Sequential(layer))
    convert_dropout(nn.Sequential(nn.MultiheadAttention(4, 2)))


class Calling(nn.Module):
    """Has its dropout as a call, in a graph of torch.fx."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_model_that_has_been_compiled_with_its_dropout_is_refused():
    compiled, traced = torch.compile(nn.Dropout()), torch.fx.symbolic_trace(Calling())
    scripted = torch.jit.trace(nn.Dropout(), torch.ones(2, 2), check_trace=False)
    for module in (compiled, traced, scripted):
        with pytest.raises(UserError, match=r"^0, a .* compiled .*convert_dropout\(\) first"):
            convert_dropout(nn.Sequential(module))
    graph = convert_dropout(torch.fx.symbolic_trace(nn.Sequential(nn.Dropout())))
    assert isinstance(graph.get_submodule("0"), Dropout)  # a graph of modules can be converted


@pytest.mark.slow
@pytest.mark.rare
def test_compiled_model_drops_the_same_elements():
    def body():
        model = convert_dropout(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5))).train()
        compiled = torch.compile(model, fullgraph=True)
        inputs = torch.randn(6, 8)
        for epoch in range(2):
            start_batch(0, epoch, INDICES)
            expected = model(inputs)
            start_batch(0, epoch, INDICES)
            torch.testing.assert_close(compiled(inputs), expected)

    run_isolated(body)
