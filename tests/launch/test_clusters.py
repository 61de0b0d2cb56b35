"""Every command of docs/clusters.md, and of README.md's part about several nodes, runs."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.namespaces import finish, hosts, needs_namespaces
from tests.processes import SMALL
from tools.lib.runs import ROOT, flag_list

RUN = SMALL | {"synthetic_samples": 48, "image_size": 8, "num_threads": 1, "timeout": 20}
PAGES = [
    (ROOT / "README.md").read_text().partition("## Multiple nodes")[2].partition("\n## ")[0],
    (ROOT / "docs" / "clusters.md").read_text(),
]


def published(*starts):
    """The published commands that start with one of these words, as lists of words."""
    commands = []
    for block in re.findall("```sh\n(.*?)```", "\n".join(PAGES), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith(starts) and not line.startswith("#"):
                commands.append(shlex.split(line))
    return [words for words in commands if words]


ON_EVERY_NODE = published("torchrun", "python -m tools.launch")
STARTS = ("torchrun", "python -m tools.launch", "python -m tools.doctor", "sbatch", "kubectl")


def on_host(words, head, rank, output_dir):
    """The words of a published command for one host, with one process and a small run."""
    start = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else words[1:3]
    words = words[1:] if words[0] == "torchrun" else words[3:]
    values = {"HOST": head.name, "ADDRESS": head.address, "RANK": str(rank)}
    values |= {"nproc_per_node=8": "nproc_per_node=1", "/shared/my_run": str(output_dir)}
    for name, value in values.items():
        words = [re.sub(f"(?<![A-Z]){name}(?![A-Z])", value, word) for word in words]
    flags = flag_list(RUN) if "train_ddp.py" in words else ["--device=cpu"]
    return [sys.executable, *start, *words, *([] if words[-1] == "tools.doctor" else flags)]


def test_no_command_is_left_out():
    assert published("") == published(*STARTS)
    assert len(ON_EVERY_NODE) == 5
    for words in published("kubectl", "sbatch"):
        (path,) = (word for word in words if word.startswith("launch/"))
        assert (ROOT / path).exists()


STUBS = {
    "srun": '[ "$1" = --overlap ] && exit "$LOST"; exit "$CODE"',
    "scontrol": '[ "$1" = requeue ] && touch requeued; echo node0',
}


@pytest.mark.parametrize("job", ["train.sbatch", "train-tasks.sbatch"])
def test_batch_script_requeues_after_a_signal_or_a_lost_node(job, tmp_path):
    """75: saved; 143 and 138: ended by SIGTERM or SIGUSR1. A wrong setting stays wrong."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", ROOT / "launch" / "slurm" / job, "train_ddp.py"]
    requeued = tmp_path / "requeued"
    for code, lost, is_requeued in (
        (0, 0, False),
        (75, 0, True),
        (143, 0, True),
        (138, 0, True),
        (2, 0, False),
        (1, 1, True),
    ):
        variables = environment | {"CODE": str(code), "LOST": str(lost)}
        run = subprocess.run(command, cwd=tmp_path, env=variables)
        assert run.returncode == code
        assert requeued.exists() == is_requeued, (code, lost)
        requeued.unlink(missing_ok=True)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("words", ON_EVERY_NODE, ids=lambda words: " ".join(words)[:45])
def test_command_trains_on_two_nodes(words, tmp_path):
    with hosts(2) as machines:
        first, second = machines
        processes = [
            first.start(on_host(words, first, 0, tmp_path)),
            second.start(on_host(words, first, 1, tmp_path)),
        ]
        runs = finish(processes, tmp_path)
    text = "".join(run.stdout for run in runs)
    assert [run.code for run in runs] == [0, 0], [text, *(run.stderr for run in runs)]
    assert "batch: 12 = 2 replicas x 6" in text or "ok       the same versions" in text


@needs_namespaces
@pytest.mark.slow
@pytest.mark.rare
def test_doctor_command_runs(tmp_path):
    ((*_, module, rendezvous, endpoint, _, _),) = published("python -m tools.doctor")
    with hosts(1) as (host,):
        arguments = [rendezvous, endpoint.replace("HOST", host.name), "--output-dir", tmp_path]
        (run,) = finish([host.start([sys.executable, "-m", module, *arguments])])
    assert run.code == 0 and "node0:29500 is this machine" in run.stdout
