"""sources/tokens.py and tools.tokens: files of tokens, and how they are made of texts."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import sys

import numpy
import pytest
import torch

import tools.tokens
from sources.packing import Packed
from sources.tokens import KINDS, MAGIC, TokenDocuments, TokenFiles
from tasks.text_folder import packed_splits
from tests.forked import FORK, ROUNDING, fork_script, killed_at, largest_difference
from tests.recipes import TEXT
from tools.verify.run import project_with_task
from utils.checkpoint import read_checkpoint
from utils.errors import UserError

WORDS = [f"word{number}" for number in range(300)]


def write(path, tokens, dtype="uint16"):
    path.write_bytes(numpy.array(tokens, dtype).tobytes())
    return path


def index_of(lengths, bounds, code=8, version=1, places=None):
    """The bytes of an index of Megatron-LM."""
    size = numpy.dtype(KINDS.get(code, "uint16")).itemsize
    ends = numpy.cumsum(lengths) * size
    places = ends - numpy.array(lengths) * size if places is None else places
    head = MAGIC + struct.pack("<QBQQ", version, code, len(lengths), len(bounds))
    arrays = (lengths, "<i4"), (places, "<i8"), (bounds, "<i8")
    return head + b"".join(numpy.array(values, kind).tobytes() for values, kind in arrays)


def test_every_token_is_predicted_once(tmp_path):
    """Of several files, each in pieces of one length; in a different process, too."""
    a, b = range(1000, 1011), range(50000, 50005)
    files = TokenFiles([write(tmp_path / "a.bin", a), write(tmp_path / "b.bin", b)], size=4)
    assert len(files) == 4 and files.shard_sizes == [3, 1]
    copy = pickle.loads(pickle.dumps(files))
    pieces = [copy[index] for index in range(4)]
    assert {piece.dtype for piece in pieces} == {torch.int64}
    assert [len(piece) for piece in pieces] == [5, 5, 3, 5]
    predicted = torch.cat([piece[1:] for piece in pieces]).tolist()
    assert predicted == [*a[1:], *b[1:]]


@pytest.mark.parametrize(("code", "dtype"), [(8, "uint16"), (4, "int32")])
def test_index_of_megatron_says_the_type(code, dtype, tmp_path):
    path = write(tmp_path / "a.bin", [7, 65535, 9], dtype)
    path.with_suffix(".idx").write_bytes(index_of([3], [0, 1], code))
    assert TokenFiles([path], 8, dtype="uint32")[0].tolist() == [7, 65535, 9]


def test_index_of_megatron_tells_documents_apart(tmp_path):
    """Also of several sequences each, and in several files; packed, they are the same pieces."""
    a = write(tmp_path / "a.bin", range(10, 20), "int32")
    a.with_suffix(".idx").write_bytes(index_of([3, 4, 0, 3], [0, 2, 3, 4], code=4))
    b = write(tmp_path / "b.bin", [1, 2], "uint8")
    b.with_suffix(".idx").write_bytes(index_of([1, 1], [0, 1, 2], code=1))
    documents = pickle.loads(pickle.dumps(TokenDocuments([a, b])))
    found = [documents[index].tolist() for index in range(len(documents))]
    assert found == [[*range(10, 17)], [], [17, 18, 19], [1], [2]]
    assert documents.lengths.tolist() == [7, 0, 3, 1, 1] and documents.shard_sizes == [3, 2]
    packed = Packed(documents, documents.lengths, 4)
    assert [packed[index].tolist() for index in range(3)] == [
        [10, 11, 12, 13, 14],
        [14, 15, 16, 17, 18],
        [18, 19, 1, 2],
    ]
    with pytest.raises(UserError, match=r"no .*c\.idx"):
        TokenDocuments([write(tmp_path / "c.bin", [1, 2])])


@pytest.mark.parametrize(
    ("lengths", "bounds", "places"),
    [
        ([2, 1, 2], [0, 9, 1, 3], None),
        ([2, 1, 2], [0, 2, 1, 3], None),
        ([2, 1, 2], [0, 1, 2, 3], [0, 2, 6]),
        ([4, -1, 2], [0, 1, 2, 3], None),
    ],
    ids=str,
)
def test_damaged_bounds_of_documents_are_refused(lengths, bounds, places, tmp_path):
    path = write(tmp_path / "a.bin", range(5))
    path.with_suffix(".idx").write_bytes(index_of(lengths, bounds, places=places))
    with pytest.raises(UserError, match=r"a\.idx is damaged"):
        TokenDocuments([path])


def test_other_contents_have_another_description(tmp_path):
    facts = [
        TokenFiles([write(tmp_path / "a.bin", tokens)], 4).describe("train")["train_tokens"]
        for tokens in ([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 3, 4])
    ]
    assert facts[0] == facts[1] and len(set(facts)) == 3
    assert "1 files, 3 tokens" in facts[0]


def test_bad_files_are_refused_in_a_line(tmp_path):
    bad = [
        (b"\0\0\0", None, r"a\.bin .*3 bytes, .*uint16"),
        (b"\0\0", None, "nothing to predict"),
        (b"\0" * 8, b"other", r"a\.idx .*Megatron-LM"),
        (b"\0" * 8, b"", r"a\.idx .*Megatron-LM"),
        (b"\0" * 8, index_of([4], [0, 1])[:30], r"a\.idx .*Megatron-LM"),
        (b"\0" * 8, index_of([4], [0, 1], code=7), "version 1 and type 7"),
        (b"\0" * 8, index_of([4], [0, 1], version=2), "version 2"),
        (b"\0" * 8, index_of([4], [0, 1])[:-1], "61 bytes, .*1 sequences and 2 .* 62"),
        (b"\0" * 8, index_of([4], [0, 1]) + b"\1", "63 bytes, .* multimodal"),
        (b"\0" * 6, index_of([4], [0, 1]), r"a\.idx tells of 8 bytes in .*a\.bin, which has 6"),
        (b"\0" * 8, index_of([2, 2], [0, 1], places=[0, 2]), "a different dataset"),
    ]
    for contents, index, message in bad:
        path = tmp_path / "a.bin"
        path.write_bytes(contents)
        if index is not None:
            path.with_suffix(".idx").write_bytes(index)
        with pytest.raises(UserError, match=message):
            TokenFiles([path], 4)
    with pytest.raises(UserError, match=r"cannot read .*missing\.bin"):
        TokenFiles([tmp_path / "missing.bin"], 4)
    with pytest.raises(UserError, match=r"no files .*path"):
        TokenFiles([], 4)
    for name in ("train.bin", "val.bin"):
        write(tmp_path / name, [1, 2, 3])
    with pytest.raises(UserError, match=r"train\.bin holds the token 3, .* vocabulary"):
        packed_splits(str(tmp_path), 4, vocabulary=3)
    (tmp_path / "train-0.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"holds tokens and texts, train-0\.jsonl"):
        packed_splits(str(tmp_path), 4)
    (tmp_path / "folder.bin").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*folder\.bin: Is a directory"):
        TokenFiles([tmp_path / "folder.bin"], 4)
    with pytest.raises(UserError, match=r"b\.bin holds the token 300, .* below 300: .* vocabulary"):
        TokenFiles([write(tmp_path / "b.bin", [5, 300, 6])], 4, limit=300)
    for wide, narrow in (("uint32", "uint16"), ("int64", "uint16"), ("int64", "uint32")):
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
def texts(tmp_path):
    """A tokenizer that has a token for each word, and texts of these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate([*WORDS, "<end>", "<unknown>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    documents = [WORDS[first : first + first % 7] for first in range(97)]
    for name, part in (("a", documents[:60]), ("b", documents[60:])):
        lines = [json.dumps({"text": " ".join(words)}) + "\n" for words in part]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path, documents


def make(texts, monkeypatch, folder, processes, *options):
    monkeypatch.setattr(tools.tokens, "PER_PART", 10)
    arguments = [folder, texts / "a.jsonl", texts / "b.jsonl", "--end", "<end>", *options]
    arguments += ["--tokenizer", texts / "tokenizer.json", "--processes", processes]
    monkeypatch.setattr(sys, "argv", ["tools.tokens", *map(str, arguments)])
    tools.tokens.main.__wrapped__()


def interrupt(*_):
    raise KeyboardInterrupt


def test_files_do_not_depend_on_processes_or_interruptions(texts, monkeypatch, capsys):
    texts, documents = texts
    expected = {"train": [], "val": []}
    for number, words in enumerate(documents, start=1):
        expected["train" if number % 9 else "val"] += [*map(WORDS.index, words), 300]
    options = ["--val-every", "9"]
    make(texts, monkeypatch, texts / "one", 1, *options)
    assert "--vocabulary 302" in capsys.readouterr().out
    for split, tokens in expected.items():
        assert numpy.fromfile(texts / "one" / f"{split}.bin", numpy.uint16).tolist() == tokens
        found = TokenDocuments([texts / "one" / f"{split}.bin"])
        assert torch.cat([found[index] for index in range(len(found))]).tolist() == tokens
        assert all(found[index][-1] == 300 for index in range(len(found)))
    assert not (texts / "one" / ".parts").exists()

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tools.tokens, "join", interrupt)
        make(texts, patched, texts / "two", 2, *options)
    parts = sorted((texts / "two" / ".parts").glob("*.npz"))
    assert len(parts) == 10
    before = [path.stat().st_mtime_ns for path in parts[2:]]
    for path in parts[:2]:
        path.unlink()
    with pytest.raises(UserError, match="made with other"):
        make(texts, monkeypatch, texts / "two", 2, "--val-every", "8")
    join = tools.tokens.join

    def join_while_another_starts(*args):
        with pytest.raises(UserError, match=r"another process .* is writing to .*two: wait"):
            make(texts, patched, texts / "two", 1, *options)
        assert [path.stat().st_mtime_ns for path in parts[2:]] == before  # they are used again
        return join(*args)

    with monkeypatch.context() as patched:
        patched.setattr(tools.tokens, "join", join_while_another_starts)
        make(texts, patched, texts / "two", 3, *options)
    assert not (texts / "two" / ".parts").exists()
    for split in expected:
        for name in (f"{split}.bin", f"{split}.idx"):
            assert (texts / "two" / name).read_bytes() == (texts / "one" / name).read_bytes()


def test_a_killed_process_or_a_full_disk_ends_the_command_in_a_line(texts, monkeypatch):
    """The same command continues."""
    folder, _ = texts
    write_part = tools.tokens.Encoder.write_part

    def killed(encoder, number):
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        write_part(encoder, number)

    with monkeypatch.context() as patched:
        patched.setattr(tools.tokens.Encoder, "write_part", killed)
        patched.setattr(multiprocessing, "get_context", lambda: FORK)  # which knows of killed()
        with pytest.raises(UserError, match=r"one of 2 .* was killed.* continues; .*--processes"):
            make(folder, patched, folder / "x", 2, "--val-every", "9")

    def full(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(tools.tokens, "write_index", full)
        with pytest.raises(UserError, match=r"No space left .*\.idx.* same command"):
            make(folder, patched, folder / "x", 2, "--val-every", "9")
    make(folder, monkeypatch, folder / "x", 2, "--val-every", "9")


def test_parts_are_of_one_command_only(texts, monkeypatch):
    """Here, one that is interrupted while it removes them."""
    folder, _ = texts

    def removal(path, ignore_errors=False):
        if not ignore_errors:
            interrupt()

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", removal)
        make(folder, patched, folder / "x", 1, "--val-every", "9")
    with pytest.raises(UserError, match=r"train\.bin exists: remove it"):
        make(folder, monkeypatch, folder / "x", 1, "--val-every", "8")
    for split in ("train", "val"):
        (folder / "x" / f"{split}.bin").unlink()
    make(folder, monkeypatch, folder / "x", 1, "--val-every", "8")
    names = {path.name for path in (folder / "x").iterdir()}
    assert names == {"train.bin", "train.idx", "val.bin", "val.idx", ".cache", ".lock"}


def test_all_tokens_are_written_if_the_tokenizer_truncates_and_pads(texts, monkeypatch):
    from tokenizers import Tokenizer

    folder, documents = texts
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(folder / "tokenizer.json"))
    make(folder, monkeypatch, folder / "x", 1, "--val-every", "97")
    tokens = [token for words in documents[:96] for token in [*map(WORDS.index, words), 300]]
    assert numpy.fromfile(folder / "x" / "train.bin", numpy.uint16).tolist() == tokens


def test_a_line_that_cannot_be_read_is_to_be_corrected(texts, monkeypatch):
    """Here, nothing can leave it out."""
    (texts[0] / "b.jsonl").write_text('{"other": "text"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl .*restore or correct .*on_bad=\"skip\""):
        make(texts[0], monkeypatch, texts[0] / "x", 1)


@pytest.mark.slow
def test_text_task_trains_on_tokens(texts, monkeypatch, tmp_path):
    """The same weights on two ranks as on one, killed and resumed."""
    make(texts[0], monkeypatch, tmp_path / "data", 1, "--val-every", "9")
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
