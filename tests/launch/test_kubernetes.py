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
COPIED = set(" ".join(re.findall("^COPY (.*) ", DOCKERFILE, re.M)).split())
ENTRYPOINT = json.loads(re.search("^ENTRYPOINT (.*)", DOCKERFILE, re.M)[1])
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


SPEC = JOB["spec"]
POD = SPEC["template"]["spec"]
(CONTAINER,) = POD["containers"]


def environment(index):
    """The variables of the pod with this index, as Kubernetes sets them."""
    values = {}
    for entry in CONTAINER["env"]:
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
    assert SPEC["completions"] == SPEC["parallelism"] == int(environment(0)["PET_NNODES"])
    assert SPEC["completionMode"] == "Indexed"
    job, service = JOB["metadata"]["name"], SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"job-name": job}
    assert POD["subdomain"] == service
    assert environment(0)["PET_MASTER_ADDR"] == f"{job}-0.{service}"
    assert environment(0)["PET_NODE_RANK"] == "0"
    assert environment(1)["PET_NODE_RANK"] == "1"
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == int(environment(0)["PET_NPROC_PER_NODE"])


def test_both_run_the_same_command_in_the_same_pods():
    trainer = TRAINJOB["spec"]["trainer"]
    assert trainer["command"] == ENTRYPOINT
    assert trainer["args"] == CONTAINER["args"]
    assert trainer["image"] == CONTAINER["image"]
    assert trainer["numNodes"] == SPEC["completions"]
    assert trainer["resourcesPerNode"] == CONTAINER["resources"]
    (patch,) = TRAINJOB["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    for name in ("securityContext", "terminationGracePeriodSeconds", "volumes"):
        assert pod[name] == POD[name]
    (container,) = pod["containers"]
    for name in ("securityContext", "volumeMounts"):
        assert container[name] == CONTAINER[name]


def test_restricted_clusters_accept_the_pods():
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = CONTAINER["securityContext"]
    assert security == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    group = POD["securityContext"]["fsGroup"]
    assert re.search(f"^USER [1-9][0-9]*:{group}$", DOCKERFILE, re.M)  # a name would be refused


def test_only_pods_of_the_job_connect_and_none_holds_a_token():
    """Whoever can connect to a rank can execute code as its user."""
    pods = {"podSelector": {"matchLabels": SERVICE["spec"]["selector"]}}
    assert NETWORK["spec"] == pods | {"policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
    assert POD["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ["job.yaml", "trainjob.yaml"])
def test_lines_for_rdma_only_have_to_lose_their_mark(name):
    text = (FOLDER / name).read_text()
    assert text.count("# RDMA: ") == 6
    changed = str(list(yaml.safe_load_all(text.replace("# RDMA: ", "")))[-1])
    for added in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "IPC_LOCK", "rdma/hca_shared_devices_a"):
        assert f"'{added}'" in changed


def test_restarts_count_for_each_pod_and_saved_runs_do_not_count():
    assert "backoffLimit" not in SPEC
    assert SPEC["backoffLimitPerIndex"] > 0
    assert SPEC["maxFailedIndexes"] == 0
    rules = [rule for rule in SPEC["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    saved, wrong = rules
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (wrong["action"], wrong["onExitCodes"]["values"]) == ("FailJob", [ConfigError.exit_code])
    assert wrong["onExitCodes"]["containerName"] == CONTAINER["name"]


def test_image_holds_what_the_command_needs():
    assert all(list(ROOT.glob(source)) for source in COPIED)
    assert {"tools", "configs", "train_*.py"} <= COPIED
    code = [*ROOT.glob("train_*.py"), ROOT / "tools" / "launch.py"]
    for folder in ("utils", "tasks", "sources"):
        code += (ROOT / folder).rglob("*.py")
    for path in code:
        packages = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M)
        assert {name for name in packages if (ROOT / name).is_dir()} <= COPIED, path
    script, config, *_ = CONTAINER["args"]
    assert (ROOT / script).exists()
    assert (ROOT / config.removeprefix("--config=")).exists()
    assert " g++ " in DOCKERFILE  # for --compile


def test_build_context_holds_what_is_copied():
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert {rule[1:] for rule in rules if rule.startswith("!")} == COPIED


@pytest.mark.slow
@pytest.mark.rare
@needs_namespaces
def test_pods_train(tmp_path):
    """The image's entry point with the manifest's arguments and variables, on smaller data."""
    smaller = SMALL | {"synthetic_samples": 48, "image_size": 8, "output_dir": tmp_path}
    command = [sys.executable, *ENTRYPOINT[1:], *CONTAINER["args"], *flag_list(smaller)]
    processes = []
    with hosts(2, names=["train-0.train", "train-1.train"]) as pods:
        for index, pod in enumerate(pods):
            variables = environment(index) | {"PET_NPROC_PER_NODE": "1"}
            processes.append(pod.start(command, variables))
        runs = finish(processes, tmp_path)
    assert [run.code for run in runs] == [0, 0], [run.stderr for run in runs]
    assert "batch: 12 = 2 replicas x 6" in runs[0].stdout
    assert (tmp_path / "best.pt").exists()
