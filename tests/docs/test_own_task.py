"""docs/own-task.md as a user follows it: the page's code, in a copy of train_ddp.py."""

import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from tools.lib.ladder import ROOT
from tools.lib.runs import read_rows

PAGE = (ROOT / "docs" / "own-task.md").read_text()


def blocks(language):
    """The page's code blocks in that language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def shell(command, folder, *flags):
    """Run a line of the page, with this Python."""
    program, *arguments = command.split()
    assert program == "python", command
    result = subprocess.run(
        [sys.executable, *arguments, *flags],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_terms_with_targets_of_their_own():
    names = {"torch": torch, "cross_entropy": cross_entropy}
    exec(blocks("python")[2], names)
    outputs = {"classes": torch.zeros(4, 3), "box": torch.ones(4, 2)}
    has_box = torch.tensor([True, False, False, True])
    targets = {"class": torch.arange(4) % 3, "box": torch.zeros(4, 2), "has_box": has_box}
    sums = {"loss": names["loss"](outputs, targets), "count": names["count"](targets)}
    assert names["summarize"](sums)["boxes"] == 5.0 * 2 and sums["count"].tolist() == [4, 2]
    assert names["summarize"](sums)["loss"].item() == pytest.approx(10 + math.log(3))


def test_losses_of_dicts():
    """The page's example of a model, a loss and a count for batches that are dicts."""
    names = {"cross_entropy": cross_entropy}
    exec(blocks("python")[3], names)
    model = SimpleNamespace(embed=torch.eye(5).__getitem__, head=lambda features: 2 * features)
    batch = {
        "input_ids": torch.tensor([[1, 2], [3, 4]]),
        "labels": torch.tensor([[1, -100], [2, 2]]),
    }
    outputs = names["forward"](model, batch)
    chances = outputs["logits"].softmax(-1)
    expected = -(chances[0, 0, 1] * chances[1, 0, 2] * chances[1, 1, 2]).log()
    assert torch.isclose(names["loss"](outputs, batch), expected) and names["count"](batch) == 3


@pytest.mark.slow
def test_own_task_trains_on_two_processes(tmp_path):
    first, training, *_ = (block.replace("\\\n", "") for block in blocks("sh"))
    copying, entering = first.splitlines()
    assert " ../my_project " in copying and entering == "cd ../my_project"
    printed = shell(copying.replace("..", str(tmp_path)), ROOT)
    assert "Write my_task.py" in printed and "torchvision" not in printed
    folder = tmp_path / "my_project"
    assert not (folder / "tasks").exists() and not (folder / "configs").exists()

    _, task, *_, settings = blocks("python")
    (folder / "my_task.py").write_text(task)
    shell(training, folder, "--device=cpu", "--num-workers=1")
    rows = read_rows(folder / "runs" / "train_ddp")
    assert [row["world_size"] for row in rows] == [2] * 5
    assert [row["train_samples"] for row in rows] == [1000] * 5
    assert rows[-1]["val_samples"] == 201 and rows[-1]["val_error"] < 0.6 * rows[0]["val_error"]

    line = "from utils.config import Config as Settings\n"
    assert task.count(line) == 1
    task = task.replace(line, "").replace("import torch\n", f"import torch\n{settings}", 1)
    (folder / "my_task.py").write_text(task)
    shell(training, folder, "--device=cpu", "--width=8", "--epochs=1", "--output-dir=new")
    assert "width: 8" in (folder / "new" / "config.yaml").read_text()
