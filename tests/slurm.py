"""A SLURM cluster in a temporary folder: a controller and two nodes, each a network namespace."""

import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.namespaces import hosts, needs_namespaces
from tools.lib.runs import ROOT

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged")
_missing = [name for name in PROGRAMS if not shutil.which(name)]
needs_slurm = [
    needs_namespaces,
    pytest.mark.skipif(bool(_missing), reason=f"needs slurm-wlm and munge: {_missing} missing"),
]

CONFIG = """ClusterName=test
SlurmctldHost=node2(10.77.0.3)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
MessageTimeout=5
KillWait=10
MinJobAge=3600
GresTypes=gpu
NodeName=node0 NodeAddr=10.77.0.1 CPUs=2 Gres=gpu:2
NodeName=node1 NodeAddr=10.77.0.2 CPUs=2 Gres=gpu:2
PartitionName=all Nodes=node0,node1 Default=YES MaxTime=INFINITE
"""


class Cluster:
    """Commands of SLURM, from the host of its controller."""

    def __init__(self, machines, folder):
        self.machines, self.folder = machines, folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command, **environment):
        """The output of a command; AssertionError if it fails."""
        process = self.machines[2].start(command, self.environment | environment)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, (command, stdout, stderr)
        return stdout

    def start_node(self, machine):
        """Start SLURM's daemon on a node, as when the machine starts."""
        daemon = machine.start(["slurmd", "-N", machine.name], self.environment)
        _, stderr = daemon.communicate(timeout=30)
        assert daemon.returncode == 0, stderr

    def wait_for_nodes(self, limit=60):
        """Wait until both nodes are idle."""
        end = time.monotonic() + limit
        while self.run("sinfo", "--noheader", "-N", "-o", "%t").split() != ["idle", "idle"]:
            logs = [log.read_text()[-1000:] for log in self.folder.glob("*.log")]
            assert time.monotonic() < end, logs
            time.sleep(0.5)

    def show(self, job):
        """The fields of a job, as scontrol shows them."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job, *states, limit=120, log=""):
        """Wait until a job is in one of `states`."""
        end = time.monotonic() + limit
        while (state := self.show(job)["JobState"]) not in states:
            output = Path(log).read_text() if log and Path(log).exists() else ""
            assert time.monotonic() < end, (job, state, output)
            time.sleep(0.5)

    def reach_time_limit(self, job):
        """Make the time limit of a running job come within two minutes."""
        hours, minutes, _ = map(int, self.show(job)["RunTime"].split(":"))
        self.run("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 2}")

    def start_now(self, job):
        """Start a requeued job, which SLURM would hold for two minutes, with a new time limit."""
        self.wait(job, "PENDING")
        time.sleep(8)  # at once, a job that has lost a node would start with one node
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")


@contextmanager
def cluster(folder):
    """Yield a Cluster with idle nodes node0 and node1; nothing of it is left afterwards."""
    keys = folder / "munge"
    for path in (keys, folder / "state", folder / "spool-node0", folder / "spool-node1"):
        path.mkdir(parents=True)
    keys.chmod(0o711)
    (keys / "key").write_bytes(os.urandom(1024))
    (keys / "key").chmod(0o600)
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    options = [f"--{name}={keys / file}" for name, file in {**files, "seed-file": "seed"}.items()]
    with hosts(3) as machines:
        slurm = Cluster(machines, folder)
        slurm.run("munged", "--force", *options)  # ends with its host, like the other daemons
        slurm.run("slurmctld", "-i")
        for machine in machines[:2]:
            slurm.start_node(machine)
        slurm.wait_for_nodes()
        yield slurm


def sbatch(slurm, options, script, arguments, log):
    """Submit a job of the project's folder. Returns its number."""
    output = slurm.run(
        "sbatch", "--parsable", f"--chdir={ROOT}", f"--output={log}", *options, script, *arguments
    )
    return output.strip()
