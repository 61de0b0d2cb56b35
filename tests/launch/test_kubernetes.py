"""launch/kubernetes: valid manifests, whose command trains in pods (network namespaces)."""

import json
import re
import sys

import pytest
import yaml

from tests.namespaces import finish, hosts, needs_namespaces
from tests.processes import SMALL
from tools.lib.runs import ROOT, flag_list
from utils.config import ConfigError

FOLDER = ROOT / "launch" / "kubernetes"
SERVICE, NETWORK, JOB = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
TRAINJOB = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
ENTRYPOINT = json.loads(re.search("^ENTRYPOINT (.*)", DOCKERFILE, re.M)[1])
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def container(pod=None):
    (only,) = (pod or JOB["spec"]["template"]["spec"])["containers"]
    return only


def patched_pod():
    """What the TrainJob changes in the pods of its runtime."""
    (patch,) = TRAINJOB["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def environment(index):
    """The variables of the pod with this index, as Kubernetes sets them."""
    values = {}
    for entry in container()["env"]:
        if "value" not in entry:
            assert entry["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
        values[entry["name"]] = entry.get("value", str(index))
    return values


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_job_and_service_are_valid(version):
    validator = pytest.importorskip("kubernetes_validate", reason="make test-kubernetes")
    for document in (SERVICE, NETWORK, JOB):
        validator.validate(document, version, strict=True)


def test_trainjob_is_valid():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="make test-kubernetes")
    parsed = models.TrainerV1alpha1TrainJob.from_dict(TRAINJOB)
    assert json.loads(parsed.to_json()) == json.loads(json.dumps(TRAINJOB))  # no unknown key


def test_nodes_agree_and_find_each_other():
    spec = JOB["spec"]
    assert spec["completions"] == spec["parallelism"] == int(environment(0)["PET_NNODES"])
    assert spec["completionMode"] == "Indexed"
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert spec["template"]["spec"]["subdomain"] == SERVICE["metadata"]["name"]
    name = f"{JOB['metadata']['name']}-0.{SERVICE['metadata']['name']}"
    assert environment(0)["PET_MASTER_ADDR"] == name
    assert {environment(index)["PET_NODE_RANK"] for index in range(2)} == {"0", "1"}
    gpus = container()["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == int(environment(0)["PET_NPROC_PER_NODE"])


def test_both_run_the_same_command():
    trainer = TRAINJOB["spec"]["trainer"]
    assert trainer["command"] == ENTRYPOINT
    assert trainer["args"] == container()["args"]
    assert trainer["image"] == container()["image"]
    assert trainer["numNodes"] == JOB["spec"]["completions"]
    assert trainer["resourcesPerNode"] == container()["resources"]
    pod = JOB["spec"]["template"]["spec"]
    for name in ("securityContext", "terminationGracePeriodSeconds", "volumes"):
        assert patched_pod()[name] == pod[name]
    for name in ("securityContext", "volumeMounts"):
        assert container(patched_pod())[name] == container()[name]


def test_restricted_clusters_accept_the_pods():
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    pod = JOB["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    user, group = map(int, re.search("^USER (.*)", DOCKERFILE, re.M)[1].split(":"))
    assert user and group == pod["securityContext"]["fsGroup"]  # a name would be refused


def test_only_pods_of_the_job_connect_and_none_holds_a_token():
    """Whoever can connect to a rank can execute code as its user."""
    pods = {"podSelector": {"matchLabels": SERVICE["spec"]["selector"]}}
    assert NETWORK["spec"] == pods | {"policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
    assert JOB["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ["job.yaml", "trainjob.yaml"])
def test_lines_for_rdma_only_have_to_lose_their_mark(name):
    text = (FOLDER / name).read_text()
    assert text.count("# RDMA: ") == 6
    changed = str(list(yaml.safe_load_all(text.replace("# RDMA: ", "")))[-1])
    for added in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "IPC_LOCK", "rdma/hca_shared_devices_a"):
        assert f"'{added}'" in changed


def test_restarts_count_for_each_pod_and_saved_runs_do_not_count():
    spec = JOB["spec"]
    assert "backoffLimit" not in spec and spec["backoffLimitPerIndex"] > 0
    assert spec["maxFailedIndexes"] == 0
    rules = spec["podFailurePolicy"]["rules"]
    actions = [(r["action"], r["onExitCodes"]["values"]) for r in rules if "onExitCodes" in r]
    assert actions == [("Ignore", [75]), ("FailJob", [ConfigError.exit_code])]
    assert container()["name"] == rules[-1]["onExitCodes"]["containerName"]


def test_image_holds_what_the_command_needs():
    lines = re.findall("^COPY (.*)", DOCKERFILE, re.M)
    sources = [word for line in lines for word in line.split()[:-1]]
    assert all(list(ROOT.glob(source)) for source in sources)
    assert {"tools", "configs", "train_*.py"} <= set(sources)
    code = [*ROOT.glob("train_*.py"), ROOT / "tools" / "launch.py"]
    code += [
        path for folder in ("utils", "tasks", "sources") for path in (ROOT / folder).rglob("*.py")
    ]
    for path in code:
        packages = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M)
        assert {name for name in packages if (ROOT / name).is_dir()} <= set(sources), path
    assert container()["args"][0] in [path.name for path in ROOT.glob("train_*.py")]
    assert (ROOT / container()["args"][1].removeprefix("--config=")).exists()
    assert " g++ " in DOCKERFILE  # for --compile


def test_build_context_holds_only_what_is_copied():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first, *rules = [line for line in lines if not line.startswith("#")]
    copied = re.findall("^COPY (.*) ", DOCKERFILE, re.M)
    assert first == "*"
    assert {rule[1:] for rule in rules if rule[0] == "!"} == set(" ".join(copied).split())
    assert [rule for rule in rules if rule[0] != "!"] == ["**/__pycache__"]


@pytest.mark.slow
@pytest.mark.rare
@needs_namespaces
def test_pods_train(tmp_path):
    """The image's entry point with the manifest's arguments and variables, on smaller data."""
    smaller = SMALL | {"synthetic_samples": 48, "image_size": 8, "output_dir": tmp_path}
    command = [sys.executable, *ENTRYPOINT[1:], *container()["args"], *flag_list(smaller)]
    names = [f"train-{index}.train" for index in range(2)]
    with hosts(2, names=names) as pods:
        runs = finish(
            [
                pod.start(command, environment(index) | {"PET_NPROC_PER_NODE": "1"})
                for index, pod in enumerate(pods)
            ],
            tmp_path,
        )
    assert [run.code for run in runs] == [0, 0], [run.stderr for run in runs]
    assert "batch: 12 = 2 replicas x 6" in runs[0].stdout
    assert (tmp_path / "best.pt").exists()
