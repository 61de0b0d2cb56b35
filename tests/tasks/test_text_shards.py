"""The text task from a folder of shards: pieces of one length, and runs that agree."""

import json
import sys

import pytest
import torch

import tasks.text as task
from sources.samplers import ShardOrder
from tools.shards import main
from utils.config import load_config
from utils.errors import UserError

TEXTS = {"train": [["one", "two t\u00e9"], ["", "four\nlines"], ["six"]], "val": [["seven", "8"]]}


def write(folder, texts=TEXTS):
    folder.mkdir(exist_ok=True)
    for split, files in texts.items():
        for number, documents in enumerate(files):
            lines = [json.dumps({"text": document}) + "\n" for document in documents]
            (folder / f"{split}-{number}.jsonl").write_text("".join(lines))
    return folder


def datasets(folder, *flags):
    base = [f"--text-file={folder}", "--context=4", "--device=cpu"]
    return task.build_datasets(load_config(task.Settings, argv=[*base, *flags]))


def predicted(dataset):
    """The bytes that are targets, in the order of the samples."""
    targets = torch.cat([dataset[index][1] for index in range(len(dataset))])
    return bytes(targets.tolist())


def test_every_byte_is_predicted_once(tmp_path):
    train, val = datasets(write(tmp_path / "x"))
    text = "one\0two t\u00e9\0\0four\nlines\0six\0".encode()
    assert predicted(train) == text[1:]
    assert predicted(val) == b"even\x008\x00"
    assert train.pieces[1] == text[4:9]
    inputs, targets = train[0]
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert bytes(inputs.tolist()) == text[:4]
    assert sorted(ShardOrder(train.pieces.shard_sizes)) == list(range(len(train)))


def test_documents_of_a_text_and_the_cache(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "train-0.txt").write_bytes(b"\r\none\r\ntwo\r\n\r\n\r\nthree\r\n")
    (folder / "val-0.txt").write_bytes(b"four")
    train, val = datasets(folder, f"--cache-dir={tmp_path / 'cache'}")
    assert predicted(train) == b"ne\r\ntwo\0three\0"
    assert predicted(val) == b"our\0"
    assert not (folder / ".cache").exists()
    assert list((tmp_path / "cache").glob("*.npy"))


def test_what_tools_shards_writes_is_trained_on(tmp_path, monkeypatch):
    book = tmp_path / "book.txt"
    paragraphs = [f"paragraph {i}\n\u00fc" for i in range(25)]
    book.write_text("\n\n".join(paragraphs), encoding="utf-8")
    flags = ["shards", str(tmp_path / "x"), "--text", str(book), "--per-shard=10"]
    monkeypatch.setattr(sys, "argv", flags)
    main()
    train, val = datasets(tmp_path / "x")
    text = "p" + predicted(val).decode()
    assert sorted(text.split("\0")[:-1]) == sorted(paragraphs[9::10])
    assert len(train.pieces.documents) == 23
    assert len(train.pieces.documents.paths) == 3


def test_a_changed_folder_is_noticed(tmp_path):
    before = task.describe(*datasets(write(tmp_path / "x")))
    assert before == task.describe(*datasets(write(tmp_path / "y")))  # the folder may change
    assert before["train_shards"].startswith("3 files, 5 samples")
    texts = TEXTS | {"val": [["seven", "9 "]]}
    after = task.describe(*datasets(write(tmp_path / "y", texts)))
    assert after["train_shards"] == before["train_shards"]
    assert after["val_shards"] != before["val_shards"]


def test_documents_of_a_task_of_ones_own(tmp_path):
    """Made of the same pieces, as the recipe for Hugging Face does."""
    sets = datasets(write(tmp_path / "x"))
    own = [task.Documents(each.pieces, 4) for each in sets]
    assert task.describe(*own) == task.describe(*sets)


def test_missing_files_are_named(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    with pytest.raises(UserError, match=r"/train-\*\.jsonl.* \(.*tools\.shards.* but none$"):
        datasets(folder)
    write(folder, {"train": TEXTS["train"]})
    with pytest.raises(UserError, match=r"/val-\*\.jsonl.* \(.*tools\.shards.* but train-0.jsonl"):
        datasets(folder)
