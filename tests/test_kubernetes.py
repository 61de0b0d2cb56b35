"""launch/kubernetes: valid manifests, whose command trains in pods (network namespaces)."""

import json
import re
import sys

import pytest
import yaml

from tests.launch import SMALL
from tests.namespaces import finish, hosts, needs_namespaces
from tools.runs import ROOT, flag_list

FOLDER = ROOT / "launch" / "kubernetes"
SERVICE, JOB = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
TRAINJOB = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
ENTRYPOINT = json.loads(re.search("^ENTRYPOINT (.*)", (FOLDER / "Dockerfile").read_text(), re.M)[1])
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def container():
    (only,) = JOB["spec"]["template"]["spec"]["containers"]
    return only


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
    for document in (SERVICE, JOB):
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


def test_image_holds_what_the_command_needs():
    lines = re.findall("^COPY (.*)", (FOLDER / "Dockerfile").read_text(), re.M)
    sources = [word for line in lines for word in line.split()[:-1]]
    assert all(list(ROOT.glob(source)) for source in sources)
    assert {"tools", "configs", "train_*.py"} <= set(sources)
    code = [*ROOT.glob("train_*.py"), *(ROOT / "utils").rglob("*.py"), ROOT / "tools" / "launch.py"]
    for path in code:
        packages = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M)
        assert {name for name in packages if (ROOT / name).is_dir()} <= set(sources), path
    assert container()["args"][0] in [path.name for path in ROOT.glob("train_*.py")]
    assert (ROOT / container()["args"][1].removeprefix("--config=")).exists()


@pytest.mark.slow
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
