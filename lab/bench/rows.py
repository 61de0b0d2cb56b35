"""The rows of the benchmark: which script, on how many processes, with which settings."""

from dataclasses import dataclass, field

from tasks.images import Settings
from tools.lib.ladder import RUNGS
from tools.lib.runs import flag_list
from utils.config import load_config


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    script: str
    world_size: int = 1
    flags: dict = field(default_factory=dict)
    absent: str = ""  # why this machine cannot run it
    has_limits: bool = True  # False: it uses more devices than a process of lab.bench.limits

    @property
    def autocast(self):
        """Whether the script computes under autocast."""
        return self.script == "train_ddp_amp.py"

    def load_config(self, flags):
        """The settings of a run of the script with these flags, a dict."""
        return load_config(Settings, RUNGS[self.script].settings_class(), flag_list(flags))

    @property
    def limits_key(self):
        """Rows with equal keys have equal limits; an empty key has none."""
        if not self.has_limits:
            return ""
        parts = [f"x{self.world_size}"]
        if self.autocast:
            parts.append("amp")
        # The settings that affect how one device computes: neither micro-batches nor stages.
        names = ("global_batch_size", "dtype", "amp_dtype", "compile")
        parts += [f"{name}={self.flags[name]}" for name in names if name in self.flags]
        return " ".join(parts)


def rows_for(counts, gpus, batch, *, quick=False):
    """The rows for these numbers of processes, on a machine with `gpus` GPUs.

    batch: the global batch size. quick: only the rows of one process and of the most processes.
    """
    most = max(counts)
    rows = [Row("1 device", "train_1gpu.py")]
    rows += [Row(f"DDP x{n}", "train_ddp.py", n) for n in counts]
    rows += [Row(f"DDP + AMP x{n}", "train_ddp_amp.py", n) for n in counts]
    if quick:
        return [row for row in rows if row.world_size in (1, most)]
    if gpus:
        rows.append(Row("1 device as a CUDA graph", "train_1gpu_graph.py", has_limits=False))
        rows += precisions_and_compilers()
    absent = ""
    if gpus < 2:
        absent = f"DataParallel needs 2 GPUs; {gpus} are visible"
    rows.insert(1, Row("DataParallel", "train_dp.py", absent=absent, has_limits=False))
    rows += [
        Row(f"DDP x{n}, {batch} each", "train_ddp.py", n, {"global_batch_size": batch * n})
        for n in counts
        if n > 1
    ]
    rows.append(Row(f"accumulation x{most}", "train_ddp_accum.py", most, {"micro_batches": 2}))
    rows.append(Row(f"FSDP x{most}", "train_fsdp.py", most))
    devices = {"devices": "cpu,cpu"}
    if gpus == 1:
        devices = {"devices": "cuda:0,cuda:0"}
    elif gpus > 1:
        devices = {"devices": "cuda,cuda"}
    rows.append(Row("2 stages", "train_mp.py", 1, devices, has_limits=not gpus))
    if most > 1:
        absent = ""
        if 0 < gpus < 4:
            absent = f"it needs 4 GPUs; {gpus} are visible"
        name = "DDP x2, 2 stages"
        rows.append(Row(name, "train_ddp_mp.py", 2, devices, absent, has_limits=not gpus))
    return rows


def precisions_and_compilers():
    """Rows of one GPU in each precision: eager, compiled, and with CUDA graphs."""
    precisions = {name: ("train_1gpu.py", {"dtype": name}) for name in ("float32", "tf32")}
    precisions |= {
        name: ("train_ddp_amp.py", {"amp_dtype": name}) for name in ("bfloat16", "float16")
    }
    compilers = {"eager": "none", "compiled": "default", "CUDA graphs": "reduce-overhead"}
    return [
        Row(f"1 device, {precision}, {compiler}", script, 1, flags | {"compile": mode})
        for precision, (script, flags) in precisions.items()
        for compiler, mode in compilers.items()
    ]
