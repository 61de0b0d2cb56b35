"""tasks/text.py: padding, causality, tied weights, and a loss that is a mean over bytes."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import tasks.text as task
from tests.forked import ROUNDING
from utils.config import ConfigError, load_config
from utils.errors import UserError

PARAGRAPHS = [f"Paragraph {i}: {'the cat sat on the mat. ' * (i % 3)}".encode() for i in range(40)]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\n\n".join(PARAGRAPHS))
    return path


def config(*flags):
    sizes = ["--context=16", "--layers=2", "--heads=2", "--width=8", "--device=cpu"]
    return load_config(task.Settings, argv=[*sizes, *flags])


def small_model(**sizes):
    torch.manual_seed(0)
    model = task.GPT(**{"context": 16, "layers": 2, "heads": 2, "width": 8} | sizes).double()
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros, no ones, and larger than the initial ones
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def random_bytes(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


# Settings


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"width 10 .*heads 4"):
        task.Settings(width=10, heads=4).resolved()


# The text


def test_the_default_text_is_the_documentation_and_code_of_this_project():
    train_set, val_set = task.build_datasets(config())
    assert len(train_set) > 5 * len(val_set) > 0
    names = [path.relative_to(task.ROOT).as_posix() for path in task._project_files()]
    assert {"README.md", "train_ddp.py", "tasks/text.py"} <= set(names)


def test_hidden_files_and_tests_are_no_text(tmp_path, monkeypatch):
    hidden = [".c.md", "docs/.d/e.md", "lab/h.py", "i.txt", "tests/j.py"]
    for name in ["b.md", "a.py", "docs/f/g.md", *hidden]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(task, "ROOT", tmp_path)
    assert task._read("") == b"a.py\n\nb.md\n\ndocs/f/g.md"


def test_every_tenth_paragraph_is_for_validation(text_file):
    train_set, val_set = task.build_datasets(config(f"--text-file={text_file}", "--context=500"))
    assert val_set.pieces == PARAGRAPHS[9::10]
    assert train_set.pieces == [p for i, p in enumerate(PARAGRAPHS) if i % 10 != 9]


def test_paragraphs_end_at_blank_lines_of_any_kind(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\r\n \t\r\n".join([b"one\nline", b"x"] + [b"  indented"] * 9))
    train_set, val_set = task.build_datasets(config(f"--text-file={path}"))
    assert train_set.pieces == [b"one\nline"] + [b"  indented"] * 8  # a single byte has no next one
    assert val_set.pieces == [b"  indented"]


@pytest.mark.parametrize("length", [2, 17, 18, 34, 100])
def test_each_byte_but_the_first_is_a_target_once(length):
    paragraph = bytes(range(length))
    pieces = task._cut(paragraph, 16)
    assert all(2 <= len(piece) <= 17 for piece in pieces)
    assert b"".join(piece[1:] for piece in pieces) == paragraph[1:]


def test_a_sample_is_bytes_and_the_next_bytes(text_file):
    train_set, _ = task.build_datasets(config(f"--text-file={text_file}"))
    inputs, targets = train_set[0]
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert bytes(inputs.tolist()) == b"Paragraph 0:"
    assert bytes(targets.tolist()) == b"aragraph 0: "


def test_errors_name_the_file_and_what_to_do(tmp_path):
    missing = tmp_path / "missing.txt"
    with pytest.raises(UserError, match=r"missing\.txt: No such file.*--text-file"):
        task.build_datasets(config(f"--text-file={missing}"))
    (tmp_path / "short.txt").write_text("one line\n" * 99)
    with pytest.raises(UserError, match=r"short.txt has 1 paragraphs.*needs 10"):
        task.build_datasets(config(f"--text-file={tmp_path / 'short.txt'}"))


def test_the_description_notices_a_changed_text(text_file):
    cfg = config(f"--text-file={text_file}", "--context=500")
    before = task.describe(*task.build_datasets(cfg))
    assert before == task.describe(*task.build_datasets(cfg))
    assert (before["train_samples"], before["val_samples"]) == (36, 4)
    text_file.write_bytes(text_file.read_bytes().replace(b"Paragraph 19", b"Paragraph XY"))
    after = task.describe(*task.build_datasets(cfg))
    assert after["text_checksum"] != before["text_checksum"]


# Batches


def test_batches_are_padded_to_their_longest_sample_or_to_the_context():
    for padding, length in (("longest", 4), ("context", 16)):
        dataset = task.Documents([b"abc", b"vwxyz"], context=16, padding=padding)
        inputs, targets = dataset.collate_fn([dataset[0], dataset[1]])
        assert inputs.shape == targets.shape == (2, length)
        assert inputs[0].tolist() == [97, 98] + [0] * (length - 2)
        assert targets[0].tolist() == [98, 99] + [task.IGNORED] * (length - 2)
        assert bytes(inputs[1, :4].tolist()) == b"vwxy"
        assert bytes(targets[1, :4].tolist()) == b"wxyz"
        assert task.count(targets) == 2 + 4


def test_padding_changes_neither_the_loss_nor_the_gradients():
    model, pieces = small_model(), [b"abc", b"vwxyz", b"0123456789"]
    results = []
    for padding in ("longest", "context"):
        dataset = task.Documents(pieces, context=16, padding=padding)
        inputs, targets = dataset.collate_fn([dataset[i] for i in range(3)])
        loss = task.loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append([loss.detach(), task.count(targets), *gradients])
    torch.testing.assert_close(*results, rtol=ROUNDING, atol=ROUNDING)


def test_the_loss_is_a_mean_over_bytes_not_over_samples_or_batches():
    model, pieces = small_model(), [b"abc", b"vwxyz", b"0123456789"]
    dataset = task.Documents(pieces, context=16)
    outputs = [model(dataset[i][0][None])[0] for i in range(3)]  # one at a time: no padding
    targets = [dataset[i][1] for i in range(3)]
    mean = cross_entropy(torch.cat(outputs), torch.cat(targets)).item()
    sums = {"loss": 0.0, "count": 0.0}
    for indices in ([0, 1], [2]):
        inputs, targets = dataset.collate_fn([dataset[i] for i in indices])
        sums["loss"] += task.loss(model(inputs), targets).detach()
        sums["count"] += task.count(targets).double()
    assert sums["count"] == 2 + 4 + 9
    results = task.summarize(sums)
    assert results == pytest.approx({"loss": mean, "perplexity": math.exp(mean)}, rel=ROUNDING)
    assert ("perplexity", min) == task.BEST


def test_a_loss_that_overflows_gives_an_infinite_perplexity():
    sums = {"loss": torch.tensor(1e6).double(), "count": torch.tensor(1.0).double()}
    assert task.summarize(sums) == {"loss": 1e6, "perplexity": math.inf}


# The model


def test_no_byte_sees_a_later_one():
    model, inputs = small_model(), random_bytes(2, 16)
    before = model(inputs)
    for position in range(16):
        changed = inputs.clone()
        changed[:, position] = (changed[:, position] + 1) % 256
        after = model(changed)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.isclose(after[:, position:], before[:, position:]).all(-1).any()


def test_attention_is_that_of_pytorch():
    attention = small_model().blocks[0].attention
    query, key, value = attention.query, attention.key, attention.value
    reference = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([query.weight, key.weight, value.weight]))
        no_bias = torch.zeros(8).double()
        reference.in_proj_bias.copy_(torch.cat([query.bias, no_bias, value.bias]))
    reference.out_proj.load_state_dict(attention.output.state_dict())
    hidden = torch.randn(3, 5, 8).double()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected, _ = reference(hidden, hidden, hidden, attn_mask=mask)
    torch.testing.assert_close(attention(hidden), expected)


def test_every_parameter_has_a_gradient_that_is_not_just_rounding():
    """Adam divides a gradient by its size: it would train on rounding errors."""
    model = small_model()
    task.loss(model(random_bytes(4, 16)), random_bytes(4, 16).flip(0)).backward()
    assert all(parameter.grad.abs().max() > 1e-6 for parameter in model.parameters())


def test_embedding_and_output_are_one_parameter():
    model = small_model()
    assert [n for n, p in model.named_parameters() if 256 in p.shape] == ["embedding.weight"]
    assert dict(model.named_parameters()).keys() == model.state_dict().keys()
    outputs = model(torch.zeros(1, 1, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(outputs[0, 0, 255], model.embedding.weight)
    assert gradient[0].any() and gradient[255].any()  # of the input, and of the output


def test_a_new_model_knows_nothing_and_depends_on_the_seed_only():
    cfg = config("--context=32", "--layers=4", "--width=64")
    weights = []
    for seed in (1, 0, 0):
        torch.manual_seed(seed)
        model = task.build_model(cfg, train_set=None)
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])
    inputs, targets = random_bytes(8, 64).chunk(2, 1)
    outputs = model(inputs)
    assert outputs.shape == (8, 32, 256)
    loss = cross_entropy(outputs.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)
    first, _, second, _ = model.blocks[0].mlp
    assert first.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert second.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert not first.bias.any()


def test_the_outputs_are_on_the_device_of_the_embedding():
    model = small_model()
    model.embedding.to("meta")
    outputs = model.predict(torch.zeros(2, 3, 8).double())  # where the last block and norm are
    assert outputs.device.type == "meta" and outputs.shape == (2, 3, 256)


# What the scripts need to divide the model


def test_layers_one_after_another_are_the_model():
    model, inputs = small_model(layers=3), random_bytes(2, 16)
    hidden, held = inputs, set()
    for function, parts in task.layers(model):
        hidden = function(hidden)
        held |= {parameter for part in parts for parameter in part.parameters()}
    assert torch.equal(hidden, model(inputs))
    assert held == set(model.parameters())
    first, *middle, last = task.layers(model)
    assert model.embedding in first[1]
    assert model.embedding in last[1]
    assert [parts for _, parts in middle] == [[block] for block in model.blocks]


def test_heads_and_columns_are_divided_among_ranks():
    model = small_model(layers=3)
    plan = task.tensor_parallel_plan(model, 2)
    assert [block for block, _ in plan] == task.blocks(model) == [*model.blocks]
    linear = {n for n, m in model.blocks[0].named_modules() if isinstance(m, torch.nn.Linear)}
    assert [styles.keys() for _, styles in plan] == [linear] * 3
    with pytest.raises(UserError, match=r"2 attention heads and 32 MLP columns.* 3 ranks.*--heads"):
        task.tensor_parallel_plan(model, 3)
