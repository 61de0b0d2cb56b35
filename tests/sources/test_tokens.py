"""sources/tokens.py and tools.tokens: files of tokens, and how they are made of texts."""

import json
import pickle
import struct
import sys

import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import tools.tokens
from sources.packing import Packed
from sources.tokens import MAGIC, TokenDocuments, TokenFiles, write_index
from tasks.text_folder import packed_splits
from tests.forked import ROUNDING, fork_script, killed_at, largest_difference
from tests.recipes import TEXT
from tools.verify.run import project_with_task
from utils.checkpoint import read_checkpoint
from utils.errors import UserError

WORDS = [f"word{number}" for number in range(300)]


def write(path, tokens, dtype="uint16"):
    path.write_bytes(numpy.array(tokens, dtype).tobytes())
    return path


def index_of(lengths, bounds, code=8, itemsize=2):
    """The bytes of an index of Megatron-LM; code: of the type, by default uint16."""
    lengths, bounds = numpy.array(lengths, "<i4"), numpy.array(bounds, "<i8")
    places = (lengths.cumsum() - lengths).astype("<i8") * itemsize
    head = MAGIC + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    return head + lengths.tobytes() + places.tobytes() + bounds.tobytes()


def test_every_token_is_predicted_once(tmp_path):
    """Of several files, each in pieces of one length; in a different process, too."""
    a, b = range(1000, 1011), range(50000, 50005)
    files = TokenFiles([write(tmp_path / "a.bin", a), write(tmp_path / "b.bin", b)], size=4)
    assert files.shard_sizes == [3, 1]
    copy = pickle.loads(pickle.dumps(files))
    pieces = [copy[index] for index in range(len(copy))]
    assert {piece.dtype for piece in pieces} == {torch.int64}
    assert [len(piece) for piece in pieces] == [5, 5, 3, 5]
    predicted = torch.cat([piece[1:] for piece in pieces]).tolist()
    assert predicted == [*a[1:], *b[1:]]


def test_index_of_megatron_says_the_type(tmp_path):
    path = write(tmp_path / "a.bin", [7, 65535, 9], "int32")
    (tmp_path / "a.idx").write_bytes(index_of([3], [0, 1], 4, 4))
    assert TokenFiles([path], 8, dtype="uint16")[0].tolist() == [7, 65535, 9]


def test_index_of_megatron_tells_documents_apart(tmp_path):
    """Also of several sequences each, and in several files; packed, they are the same pieces."""
    a = write(tmp_path / "a.bin", range(10, 20), "int32")
    (tmp_path / "a.idx").write_bytes(index_of([3, 4, 0, 3], [0, 2, 3, 4], 4, 4))
    b = write(tmp_path / "b.bin", [1, 2], "uint8")
    (tmp_path / "b.idx").write_bytes(index_of([1, 1], [0, 1, 2], 1, 1))
    documents = pickle.loads(pickle.dumps(TokenDocuments([a, b])))
    found = [documents[index].tolist() for index in range(len(documents))]
    assert found == [[*range(10, 17)], [], [17, 18, 19], [1], [2]]
    assert documents.lengths.tolist() == [7, 0, 3, 1, 1]
    assert documents.shard_sizes == [3, 2]
    packed = Packed(documents, documents.lengths, 4)
    assert packed[0].tolist() == [10, 11, 12, 13, 14]
    assert packed[2].tolist() == [18, 19, 1, 2]
    with pytest.raises(UserError, match=r"no .*c\.idx"):
        TokenDocuments([write(tmp_path / "c.bin", [1, 2])])


def test_written_index_is_that_of_megatron(tmp_path):
    write_index(tmp_path / "a.idx", "uint16", [3, 0, 2])
    assert (tmp_path / "a.idx").read_bytes() == index_of([3, 0, 2], [0, 1, 2, 3])


def test_other_contents_have_another_description(tmp_path):
    facts = []
    for tokens in ([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 3, 4]):
        files = TokenFiles([write(tmp_path / "a.bin", tokens)], 4)
        facts.append(files.describe("train")["train_tokens"])
    assert facts[0] == facts[1]
    assert len(set(facts)) == 3
    assert "1 files, 3 tokens" in facts[0]


@pytest.mark.parametrize(
    ("size", "index", "message"),
    [
        (3, None, r"a\.bin .*3 bytes, .*uint16"),
        (0, None, r"a\.bin .*0 bytes, .*uint16"),
        (8, b"other", r"a\.idx .*Megatron-LM"),
        (8, index_of([4], [0, 1])[:-1], r"a\.idx .*cut off"),
        (6, index_of([4], [0, 1]), r"a\.idx tells of 8 bytes in .*a\.bin, which has 6"),
    ],
)
def test_files_that_are_cut_off_or_of_another_kind_are_refused(size, index, message, tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(size))
    if index is not None:
        (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(UserError, match=message):
        TokenFiles([tmp_path / "a.bin"], 4)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    for name in ("train.bin", "val.bin"):
        write(tmp_path / name, [1, 2, 3])
    with pytest.raises(UserError, match=r"train\.bin holds the token 3, .* vocabulary"):
        packed_splits(str(tmp_path), 4, vocabulary=3)
    (tmp_path / "train-0.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"holds tokens and texts, train-0\.jsonl"):
        packed_splits(str(tmp_path), 4)
    with pytest.raises(UserError, match=r"no files .*path"):
        TokenFiles([], 4)


@pytest.mark.parametrize(
    ("wide", "narrow"), [("uint32", "uint16"), ("int64", "uint16"), ("int64", "uint32")]
)
def test_wider_tokens_are_refused(wide, narrow, tmp_path):
    path = write(tmp_path / "c.bin", [1, 70, 2, 99, 5, 80, 7] * 20, wide)
    with pytest.raises(UserError, match=rf"c.bin .*{wide[-2:]} bits.* read as {narrow}"):
        TokenFiles([path], 4, narrow)


def test_uint32_is_told_from_padding(tmp_path):
    """Also if only the end of a file is of uint32, and of a vocabulary of 262,144."""
    tokens = numpy.random.default_rng(0).integers(2, 60_000, 300_000).astype(numpy.uint16)
    for padding in (3000, 2047):  # more tokens than a block, or one less
        TokenFiles([write(tmp_path / "a.bin", [*tokens, *[0] * padding])], 128)
    wide = numpy.array(tokens[:3000] * 4.3, numpy.uint32)
    (tmp_path / "b.bin").write_bytes(tokens.tobytes() + wide.tobytes())
    for path in (write(tmp_path / "c.bin", wide, "uint32"), tmp_path / "b.bin"):
        with pytest.raises(UserError, match=f"{path.name} .* 32 bits"):
            TokenFiles([path], 128)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder with a tokenizer that has a token for each word, and texts of these words."""
    monkeypatch.setattr(tools.tokens, "PER_PART", 10)
    vocabulary = {word: number for number, word in enumerate([*WORDS, "<end>", "<unknown>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(3)  # which would lose tokens
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, first, stop in (("a", 0, 60), ("b", 60, 97)):
        lines = [json.dumps({"text": " ".join(document(n))}) + "\n" for n in range(first, stop)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def document(number):
    return WORDS[number : number + number % 7]


def make(texts, monkeypatch, name, processes=1, val_every=9, second="b.jsonl"):
    arguments = [texts / name, texts / "a.jsonl", texts / second, "--end", "<end>"]
    arguments += ["--tokenizer", texts / "tokenizer.json"]
    arguments += ["--processes", processes, "--val-every", val_every]
    monkeypatch.setattr(sys, "argv", ["tools.tokens", *map(str, arguments)])
    tools.tokens.main.__wrapped__()


def test_files_hold_all_tokens_of_all_documents(texts, monkeypatch, capsys):
    """Also if the tokenizer truncates and pads."""
    expected = {"train": [], "val": []}
    for number in range(97):
        split = "val" if number % 9 == 8 else "train"
        expected[split] += [*map(WORDS.index, document(number)), 300]
    make(texts, monkeypatch, "x")
    assert "--vocabulary 302" in capsys.readouterr().out
    for split, tokens in expected.items():
        path = texts / "x" / f"{split}.bin"
        assert numpy.fromfile(path, numpy.uint16).tolist() == tokens
        documents = list(TokenDocuments([path]))
        assert torch.cat(documents).tolist() == tokens
        assert all(found.tolist().index(300) == len(found) - 1 for found in documents)
    names = {path.name for path in (texts / "x").iterdir()}
    assert names == {"train.bin", "train.idx", "val.bin", "val.idx", ".cache", ".lock"}
    with pytest.raises(UserError, match=r"train\.bin exists: remove it"):
        make(texts, monkeypatch, "x")


def test_texts_of_two_kinds_are_refused(texts, monkeypatch):
    """The lines of JSON would be read as text."""
    (texts / "b.txt").write_text("w0 w1\n")
    with pytest.raises(UserError, match="one kind"):
        make(texts, monkeypatch, "x", second="b.txt")


def test_an_interrupted_command_continues(texts, monkeypatch):
    """With any number of processes, to the same bytes; a different command does not."""
    make(texts, monkeypatch, "one")
    join, parts = tools.tokens.join, texts / "two" / ".parts"

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(tools.tokens, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(texts, monkeypatch, "two", processes=2)
    first, second, *others = sorted(parts.glob("*.npz"))
    assert len(others) == 8
    before = [path.stat().st_mtime_ns for path in others]
    first.unlink()
    second.unlink()
    with pytest.raises(UserError, match="made with other"):
        make(texts, monkeypatch, "two", val_every=8)

    def join_while_another_starts(*args):
        with pytest.raises(UserError, match=r"another process .* is writing to .*two: wait"):
            make(texts, monkeypatch, "two")
        assert [path.stat().st_mtime_ns for path in others] == before  # they are used again
        return join(*args)

    monkeypatch.setattr(tools.tokens, "join", join_while_another_starts)
    make(texts, monkeypatch, "two", processes=3)
    assert not parts.exists()
    for name in ("train.bin", "train.idx", "val.bin", "val.idx"):
        assert (texts / "two" / name).read_bytes() == (texts / "one" / name).read_bytes()


@pytest.mark.slow
def test_text_task_trains_on_tokens(texts, monkeypatch, tmp_path):
    """The same weights on two ranks as on one, killed and resumed."""
    make(texts, monkeypatch, "data")
    script = project_with_task("text", tmp_path / "project") / "train_ddp.py"
    settings = TEXT | {"text_file": tmp_path / "data", "vocabulary": 302, "context": 4}

    def last(nproc, name, before=None, **flags):
        flags |= {"output_dir": tmp_path / name}
        run = fork_script(script, nproc, before, settings=settings, **flags)
        assert run.code in (0, -9), run.stderr
        return read_checkpoint(tmp_path / name / "last.pt")

    one = last(1, "one")
    assert one["model"]["embedding.weight"].shape == (302, 16)
    last(2, "killed", killed_at(1, 3), save_steps=2)
    end = last(2, "killed")
    assert largest_difference(end["model"], one["model"]) < ROUNDING
