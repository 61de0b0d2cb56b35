"""Faults that no test on a CPU can see: each has happened, and shows on the null device."""

import pytest
import torch

from lab.budgets import RUNS
from tests.null_device import SETTINGS, stop_and_resume
from tests.processes import planted
from tools.fit.candidates import text_of
from tools.lib.ladder import ROOT
from tools.null import report

RESNET = {"model": "resnet20"}  # has buffers: BatchNorm's statistics


def resume(device, script, folder, nproc=None, **flags):
    """stop_and_resume() as in RUNS, with these flags, too."""
    _, arguments, own = RUNS[script]
    arguments = {} if nproc else arguments
    return stop_and_resume(device, script, folder, nproc, arguments, **own | flags)


def test_sums_of_a_resumed_epoch_are_on_the_cpu_when_steps_are_skipped(null_device, tmp_path):
    resume(null_device, "train_1gpu.py", tmp_path, max_skipped_steps=3)


def test_offloaded_shards_and_buffers_are_on_two_devices_when_resumed(null_device, tmp_path):
    resume(null_device, "train_fsdp.py", tmp_path, fsdp_offload=True, optimizer="sgd", **RESNET)


def test_gradients_of_offloaded_shards_are_on_the_cpu_when_steps_are_skipped(null_device, tmp_path):
    resume(null_device, "train_fsdp.py", tmp_path, fsdp_offload=True, max_skipped_steps=3)


def test_messages_of_a_pipeline_do_not_wait_for_others(null_device, tmp_path):
    """Neither for collectives, nor, unless they form a batch, for those of other pairs of ranks."""
    run = resume(null_device, "train_pp.py", tmp_path, nproc=2)
    communicators = [
        {call.partition(" ")[0] for call in calls} for calls in run.reports[0]["calls"].values()
    ]
    messages = [kinds for kinds in communicators if kinds & {"send", "receive"}]
    two = [{"send", "receive"}] * 2  # of the batches, and of the pair
    # PyTorch 2.11 sends a single message as a batch, too.
    assert messages == two or (torch.__version__ < "2.14" and messages == two[:1])
    assert {"broadcast"} in communicators


@pytest.mark.parametrize(
    ("script", "optimizer"),
    [
        ("train_tp.py", "adamw"),
        pytest.param("train_tp.py", "sgd", marks=pytest.mark.slow),
        pytest.param("train_fsdp_tp.py", "adamw", marks=pytest.mark.slow),
        ("train_fsdp_tp.py", "sgd"),
    ],
)
def test_tensors_of_a_mesh_are_updated_together(script, optimizer, null_device, tmp_path):
    run = resume(null_device, script, tmp_path, optimizer=optimizer, max_skipped_steps=3)
    updates = "FusedAdam" if optimizer == "adamw" else "multi_tensor_apply_kernel"
    assert [name for name in run.step["kernel"] if updates in name]
    assert report.number(run.step, "kernel") < 400  # one by one, AdamW takes over 700


def test_all_of_a_checkpoint_is_copied_to_pinned_memory(null_device, tmp_path):
    """Also the state of a recipe, which may be as large as the gradients: a copy of it on the GPU
    would need as much memory again."""
    line, size = "    hooks = build_hooks(cfg, state)\n", 4 * 10**5
    state = "    state['errors'] = {'sums': torch.ones(10**5, device=device)}\n"
    copy = planted(tmp_path, "train_1gpu.py", line, state + line)
    run = null_device.run(copy, output_dir=tmp_path / "run", **SETTINGS)
    saved = report.total([*run.reports[0]["steps"][1:], run.reports[0]["end"]])["copy"]
    assert saved["device to host, pinned"][1] > size
    assert saved["device to host, pageable"][1] < size


def test_batchnorms_in_float32_are_gathered_together(null_device, tmp_path):
    """Not one by one, of which each would cost a message for a few numbers."""
    flags = SETTINGS | RESNET | {"fsdp_dtype": "bfloat16", "output_dir": tmp_path / "run"}
    run = null_device.run("train_fsdp.py", arguments={"ranks": 4, "steps": 3}, **flags)
    assert run.code == 0, run.stderr
    counts = {name.partition(",")[0]: n for name, (n, _) in run.step["collective"].items()}
    blocks = 9  # and the root, and the 21 BatchNorms together
    assert counts["reduce-scatter"] == blocks + 2


def test_gathered_tensors_are_not_copied_once_more(null_device, tmp_path):
    """The model and its state would take the memory of the host twice at each save."""
    count = (
        "copied, clone = [], torch.Tensor.__deepcopy__\n"
        "def copy_and_note(tensor, memo):\n"
        "    copied.append(tensor.nbytes * (id(tensor) not in memo))\n"
        "    return clone(tensor, memo)\n"
        "torch.Tensor.__deepcopy__ = copy_and_note\n"
        "import atexit; atexit.register(lambda: print('copied', sum(copied)))\n"
    )
    line = 'if __name__ == "__main__":\n'
    copy = planted(tmp_path, "train_fsdp.py", line, count + line)
    flags = SETTINGS | {"save_steps": 0, "optimizer": "adamw", "output_dir": tmp_path / "run"}
    run = null_device.run(copy, arguments={"ranks": 2}, **flags)  # saves at the end of the epoch
    assert run.code == 0, run.stderr
    assert int(run.stdout.rpartition("copied ")[2]) < 10**4  # of 16 * 10**5


PHOTOS = """
import sys
from dataclasses import dataclass
from types import SimpleNamespace
import torch
sys.path.insert(0, ROOT)
from utils.data import build_loader

@dataclass
class Photo:
    pixels: torch.Tensor

class PinnedPhoto(Photo):
    def pin_memory(self):
        return PinnedPhoto(self.pixels.pin_memory())

class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return KIND(torch.ones(3))

cfg = SimpleNamespace(seed=0, torch_dtype=torch.float32, global_batch_size=2, loader="workers")
cfg.num_workers, cfg.timeout = 0, 60
sampler = torch.utils.data.SequentialSampler(range(8))
for _ in build_loader(Photos(), sampler, 2, torch.device("cuda"), cfg, train=True):
    pass
"""


@pytest.mark.parametrize(("kind", "copies"), [("Photo", "pageable"), ("PinnedPhoto", "pinned")])
def test_dataclass_with_pin_memory_is_copied_without_waiting(kind, copies, null_device, tmp_path):
    script = tmp_path / "photos.py"
    script.write_text(PHOTOS.replace("KIND", kind).replace("ROOT", repr(str(ROOT))))
    run = null_device.run(script)
    assert run.code == 0, run.stderr
    assert run.reports[0]["end"]["copy"][f"host to device, {copies}"] == [4, 4 * 2 * 3 * 4]


def test_random_numbers_by_sample_are_drawn_for_a_dataset_on_the_gpu(null_device, tmp_path):
    """Its batches have indices that are there, too: no step waits for them."""
    script = tmp_path / "train_1gpu.py"
    text = text_of(ROOT / script.name, "tasks.diffusion", False)
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}")
    flags = {"dataset": "synthetic", "synthetic_samples": 40, "image_size": 8, "layers": 1}
    flags |= {"width": 16, "global_batch_size": 8, "num_workers": 0, "loader": "device"}
    run = null_device.run(script, output_dir=tmp_path / "run", arguments={"steps": 3}, **flags)
    assert run.code == 0, run.stderr
    assert len(run.reports[0]["steps"]) == 3 and "wait" not in run.step
