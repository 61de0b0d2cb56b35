"""A part of the real CIFAR-10, as JPEG files. Skipped where the archive is missing."""

import tarfile

import pytest

from tests.processes import ROOT, run_script

ARCHIVES = [*ROOT.glob("data/cifar10-jpg.tar.xz"), *ROOT.parent.glob("*/data/cifar10-jpg.tar.xz")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ARCHIVES, reason="data/cifar10-jpg.tar.xz is missing"),
]


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """A folder with 300 training and 50 test images of each class."""
    folder = tmp_path_factory.mktemp("cifar10")
    counts = {}
    with tarfile.open(ARCHIVES[0]) as archive:
        for member in archive:
            split, _, rest = member.name.removeprefix("./").partition("/")
            name = (split, rest.partition("/")[0])
            counts[name] = counts.get(name, 0) + member.isfile()
            if member.isfile() and counts[name] <= {"train": 300, "test": 50}[split]:
                archive.extract(member, folder, filter="data")
    return folder


def test_two_processes_learn_real_images(cifar10, tmp_path):
    flags = {"dataset": "imagefolder", "data_dir": cifar10, "image_size": 32, "epochs": 2}
    flags |= {"global_batch_size": 50, "lr": 0.05, "output_dir": tmp_path}
    run = run_script("train_ddp.py", 2, **flags)
    assert run.code == 0, run.stderr
    assert "data: Resident, 3,000 training samples" in run.stdout  # it fits in memory
    assert run.rows[-1]["val_samples"] == 500
    assert run.rows[-1]["val_accuracy"] > 0.2  # chance is 0.1
