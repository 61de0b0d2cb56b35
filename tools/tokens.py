"""Make files of tokens from texts, with a tokenizer of Hugging Face's `tokenizers`.

    python -m tools.tokens DEST --tokenizer tokenizer.json --end "<|endoftext|>" texts/*.jsonl

The texts are JSON lines of {"text": "..."}, or texts in UTF-8, whose paragraphs are the documents.
Writes DEST/train.bin and DEST/val.bin (every --val-every-th document): the tokens of all documents,
one after another, each followed by the token --end, as uint16, or as uint32 if the vocabulary has
more than 65,536. DEST/train.idx and DEST/val.idx tell the documents apart, for Megatron-LM and for
sources.tokens.TokenDocuments. The same bytes for any number of processes. If it is interrupted, the
same command continues with what is missing.

Train with them: docs/streams.md.
"""

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

import numpy

from sources.shards import Shards
from sources.tokens import write_index
from utils.distributed import die_with_parent
from utils.errors import UserError, required_by, say
from utils.reports import report_errors

PER_PART = 2000  # documents that one process encodes at a time


class Encoder:
    """Encodes parts of the documents. Made once in each process."""

    def __init__(self, args):
        self.args, self.tokenizer = args, load_tokenizer(args.tokenizer)
        self.documents = load_documents(args)
        self.dtype = dtype_of(self.tokenizer)
        self.end = self.tokenizer.token_to_id(args.end)

    def write_part(self, number):
        """Write the documents of a part, one file per split, unless they are there."""
        target = part_path(self.args, number)
        if target.exists():
            return
        parts = {split: [numpy.empty(0, self.dtype)] for split in ("train", "val")}
        lengths = {split: [] for split in parts}
        first = number * PER_PART
        for index in range(first, min(first + PER_PART, len(self.documents))):
            split = "val" if (index + 1) % self.args.val_every == 0 else "train"
            ids = self.tokenizer.encode(self.documents[index], add_special_tokens=False).ids
            parts[split].append(numpy.array([*ids, self.end], self.dtype))
            lengths[split].append(len(ids) + 1)
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        with open(temporary, "wb") as file:
            arrays = {split: numpy.concatenate(each) for split, each in parts.items()}
            numpy.savez(file, **arrays, **{f"{split}_lengths": n for split, n in lengths.items()})
        temporary.replace(target)


def load_tokenizer(path):
    """A tokenizers.Tokenizer, which returns all tokens of a text, and only these, also if its file
    asks for truncation or padding. Raises UserError if it cannot be read."""
    with required_by("tools.tokens"):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise UserError(f"cannot read the tokenizer {path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_documents(args):
    """The texts of all files, as a dataset of str."""
    is_text = args.texts[0].suffix == ".txt"
    cache = args.folder / ".cache"
    return Shards(args.texts, _text_of, str(cache), paragraphs=is_text, length="text")


def _text_of(value):
    return value if isinstance(value, str) else value["text"]


def vocabulary_of(tokenizer):
    """The number of embeddings that the tokens need: some numbers may be of no token."""
    return max(256, 1 + max(tokenizer.get_vocab().values()))


def dtype_of(tokenizer):
    """The smallest type that holds all tokens."""
    return numpy.uint16 if vocabulary_of(tokenizer) <= 2**16 else numpy.uint32


def part_path(args, number):
    """The file of the tokens of a part, until all parts are there."""
    return args.folder / ".parts" / f"{number:06}.npz"


def start_process(args):
    """Starts a process of the pool. Ctrl-C is for the parent, and a killed parent leaves nobody who
    would print that its pipe is gone."""
    global encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    encoder = Encoder(args)


def write_part(number):
    """Write a part, in a process of the pool."""
    encoder.write_part(number)


def write_parts(args, count):
    """Write all parts that are missing, in several processes."""
    with ProcessPoolExecutor(args.processes, None, start_process, [args]) as pool:
        try:
            parts = [pool.submit(write_part, number) for number in range(count)]
            for done, part in enumerate(as_completed(parts), start=1):
                part.result()
                if done % 50 == 0 or done == count:
                    say(f"{done} of {count} parts, of {PER_PART} documents each")
        except BaseException:  # Ctrl-C, for example: do not wait for what has started
            for process in multiprocessing.active_children():
                process.kill()
            raise


@contextmanager
def locked(folder):
    """Create the folder, and keep other processes from writing to it at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(lock, folder)
        yield
    finally:
        os.close(lock)


def _lock(file, folder):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process of tools.tokens is writing to {folder}: wait until it ends, or name "
            f"a different folder"
        ) from None
    except OSError:  # a file system without locks
        pass


def fingerprint(args):
    """What the parts depend on."""
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in args.texts]
    tokenizer = hashlib.sha256(args.tokenizer.read_bytes()).hexdigest()
    return {"texts": facts, "tokenizer": tokenizer, "end": args.end, "val_every": args.val_every}


def join(args, count):
    """Write DEST/train.bin and DEST/val.bin of all parts, in order, and their .idx. Returns their
    numbers of tokens."""
    totals = {"train": 0, "val": 0}
    for split in totals:
        lengths = []
        with open(args.folder / f"{split}.tmp", "wb") as file:
            for number in range(count):
                with numpy.load(part_path(args, number)) as part:
                    tokens = part[split]
                    lengths.append(part[f"{split}_lengths"])
                file.write(tokens.tobytes())
            file.flush()
            os.fsync(file.fileno())
        lengths = numpy.concatenate(lengths).astype(numpy.int64)
        totals[split] = int(lengths.sum())
        write_index(args.folder / f"{split}.idx.tmp", tokens.dtype, lengths)
    for split in totals:
        for name, kind in ((f"{split}.idx.tmp", "idx"), (f"{split}.tmp", "bin")):
            (args.folder / name).replace(args.folder / f"{split}.{kind}")
    return totals


@report_errors
def main():
    parser = argparse.ArgumentParser(prog="python -m tools.tokens", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", metavar="DEST", type=Path)
    parser.add_argument("texts", metavar="TEXT", type=Path, nargs="+")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--end", required=True, help="the token that ends a document")
    parser.add_argument("--val-every", metavar="N", type=int, default=100, help="(default: 100)")
    parser.add_argument("--processes", metavar="N", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if {path.suffix for path in args.texts} not in ({".jsonl"}, {".txt"}):
        raise UserError("pass texts of one kind, .jsonl or .txt")
    with locked(args.folder):
        make_files(args)


def make_files(args):
    """Write all files of DEST. Raises UserError if DEST has some of another command."""
    parts = args.folder / ".parts"  # until all is done
    found = [p for p in (args.folder / "train.bin", args.folder / "val.bin") if p.exists()]
    if found and not parts.exists():
        raise UserError(f"{found[0]} exists: remove it, or name a different folder")
    tokenizer = load_tokenizer(args.tokenizer)
    if tokenizer.token_to_id(args.end) is None:
        raise UserError(f"{args.tokenizer} has no token {args.end!r}: pass --end with one it has")
    documents = len(load_documents(args))
    if documents < args.val_every:
        raise UserError(
            f"the texts have {documents} documents, of which every {args.val_every}th is for "
            f"validation: pass a smaller --val-every"
        )
    parts.mkdir(exist_ok=True)
    known, facts = parts / "made_of.json", json.loads(json.dumps(fingerprint(args)))
    stored = json.loads(known.read_text(encoding="utf-8")) if known.exists() else None
    if stored != facts and (found or any(parts.glob("*.npz"))):
        raise UserError(
            f"{parts} was made with other texts, another tokenizer or other options: remove it to "
            f"start over"
        )
    temporary = known.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts), encoding="utf-8")
    temporary.replace(known)
    count = -(-documents // PER_PART)
    write_parts(args, count)
    totals = join(args, count)
    shutil.rmtree(parts)
    say(
        f"{args.folder}: {totals['train']} tokens to train with, {totals['val']} to validate with. "
        f"Train with --text-file {args.folder} --vocabulary {vocabulary_of(tokenizer)}"
    )


if __name__ == "__main__":
    main()
