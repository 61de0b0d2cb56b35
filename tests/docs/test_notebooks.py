"""docs/notebooks.md: its cells work in a kernel, and the stop button saves."""

import os
import re
import signal
import threading
import time

import pytest

from tests.processes import SMALL
from tools.lib.ladder import ROOT
from tools.lib.runs import flag_list
from utils.checkpoint import read_checkpoint

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
PAGE = ROOT / "docs" / "notebooks.md"


class Notebook:
    """Runs cells in a kernel, in the folder of the scripts."""

    def __init__(self):
        self.notebook = nbformat.v4.new_notebook()
        resources = {"metadata": {"path": str(ROOT)}}
        self.client = nbclient.NotebookClient(self.notebook, timeout=120, resources=resources)

    def run(self, code):
        """Returns (what the cell has printed, its value as text)."""
        cell = nbformat.v4.new_code_cell(code)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        printed = [o.text for o in cell.outputs if o.output_type == "stream"]
        values = [o.data["text/plain"] for o in cell.outputs if o.output_type == "execute_result"]
        return "".join(printed), "".join(values)

    def press_stop(self):
        """Interrupt as Jupyter does: SIGINT to the process group of the kernel."""
        os.killpg(os.getpgid(self.client.km.provisioner.pid), signal.SIGINT)


@pytest.fixture
def notebook():
    notebook = Notebook()
    with notebook.client.setup_kernel():
        yield notebook


@pytest.mark.slow
@pytest.mark.rare
def test_cells_of_the_page(notebook, tmp_path):
    function, start, *readers = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    notebook.run(function)
    small = ", ".join(map(repr, flag_list(SMALL | {"epochs": 3})))
    start = start.replace('"runs/cell"', f'"runs/cell", {small}')
    start, *readers = (code.replace("runs/cell", str(tmp_path)) for code in (start, *readers))
    printed, code = notebook.run(start)
    assert code == "0" and "= 2 replicas x " in printed and printed.count("val loss") == 3
    assert [notebook.run(code)[1].count(",") for code in readers] == [2, 1]


@pytest.mark.slow
@pytest.mark.rare
def test_stop_button_saves_and_the_cell_continues(notebook, tmp_path):
    folder = tmp_path / "run"
    flags = SMALL | {"epochs": 1000, "output_dir": folder, "save_epochs": 1000}
    notebook.run(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    rows = folder / "metrics.jsonl"

    def run_and_stop(epochs):
        """Press the button once there are that many rows."""

        def stop():
            while not rows.exists() or rows.read_text().count("\n") < epochs:
                time.sleep(0.1)
            notebook.press_stop()

        threading.Thread(target=stop, daemon=True).start()
        return notebook.run(f"torchrun(2, 'train_ddp.py', *{flag_list(flags)})")

    printed, code = run_and_stop(1)
    assert code == "75" and "stopped by a signal" in printed, printed
    epoch = read_checkpoint(folder / "last.pt")["epoch"]
    printed, code = run_and_stop(epoch + 1)
    assert code == "75" and f"from epoch {epoch}, step" in printed, printed
