"""launch/slurm on a real SLURM: two nodes, a time limit, a node that fails."""

import sys

import pytest

from tests.forked import fork_script
from tests.launch.test_clusters import published
from tests.launch.test_nodes import RUN, assert_same_weights
from tests.namespaces import Gate
from tests.processes import SMALL
from tests.slurm import cluster, needs_slurm, sbatch
from tools.lib.runs import ROOT, flag_list
from utils.checkpoint import read_checkpoint

pytestmark = [*needs_slurm, pytest.mark.slow]
FLAGS = SMALL | RUN | {"save_steps": 1}
ONE_GPU = ["--gpus-per-node=1", "--ntasks-per-node=1"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        running.environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        yield running


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory):
    """The last checkpoint of two ranks on one machine."""
    folder = tmp_path_factory.mktemp("one")
    assert fork_script("train_ddp.py", 2, output_dir=folder, **RUN).code == 0
    return read_checkpoint(folder / "last.pt")


def submit(slurm, folder, *options, job="train.sbatch", script="train_ddp.py"):
    arguments = [script, *flag_list(FLAGS | {"output_dir": folder / "run"})]
    options = [*ONE_GPU, *options]
    return sbatch(slurm, options, f"launch/slurm/{job}", arguments, folder / "log")


def finish(slurm, job, folder):
    log = folder / "log"
    slurm.wait(job, "COMPLETED", "FAILED", "TIMEOUT", log=log)
    assert slurm.show(job)["JobState"] == "COMPLETED", log.read_text()
    assert "batch: 12 = 2 replicas x 6" in log.read_text()


@pytest.mark.parametrize("job", ["train.sbatch", "train-tasks.sbatch"])
def test_time_limit_requeues_the_job_which_resumes(job, slurm, one_machine, tmp_path):
    gate = Gate(tmp_path, 3)
    number = submit(slurm, tmp_path, job=job, script=gate.script)
    gate.wait(2)
    slurm.reach_time_limit(number)  # --signal=TERM@120 comes at once
    slurm.start_now(number)  # as soon as it is requeued
    gate.open(10**6)
    finish(slurm, number, tmp_path)
    assert_same_weights(tmp_path / "run", one_machine)
    assert slurm.show(number)["Restarts"] == "1"
    log = (tmp_path / "log").read_text()
    assert log.count("stopped by a signal") == log.count("from epoch 0, step 0, in") == 1


def test_failed_node_requeues_the_job_which_resumes(slurm, one_machine, tmp_path):
    gate = Gate(tmp_path, 3)
    number = submit(slurm, tmp_path, script=gate.script)
    gate.wait(2)
    slurm.machines[1].crash()
    gate.open(10**6)
    slurm.wait(number, "PENDING", log=tmp_path / "log")
    slurm.start_node(slurm.machines[1])
    slurm.wait_for_nodes()
    slurm.start_now(number)
    finish(slurm, number, tmp_path)
    assert_same_weights(tmp_path / "run", one_machine)
    assert "from epoch 0, step 3, in" in (tmp_path / "log").read_text()


def test_published_commands_run(slurm, tmp_path):
    """As in README.md and docs/clusters.md, with one GPU per node and a small run."""
    commands = published("sbatch")
    assert len(commands) == 2 and commands[0] == commands[1]
    name, *options, script, file = commands[0][:4]
    flags = flag_list(FLAGS | {"output_dir": tmp_path / "run"})
    options = [*options, *ONE_GPU, f"--chdir={ROOT}", f"--output={tmp_path / 'log'}"]
    number = slurm.run(name, "--parsable", *options, script, file, *commands[0][4:], *flags)
    finish(slurm, number.strip(), tmp_path)
