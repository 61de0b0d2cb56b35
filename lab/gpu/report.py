"""The report of lab.gpu: gpu.md."""

import shutil
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen

from lab.bench.report import EPOCH, medians, run_counts
from lab.bench.runner import output_of
from tools.lib.markdown import markdown_table


def driver():
    """The version of the GPU's driver, or "none"."""
    versions = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.partition("\n")[0] or "none"


class Monitor:
    """Reads the clocks and the power of the GPUs once per second, while it is entered: a GPU that
    is throttled or shared shows there."""

    def __enter__(self):
        query = "--query-gpu=clocks.sm,power.draw"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "--loop=1"]
        self.process = None
        if shutil.which("nvidia-smi"):
            self.process = Popen(command, stdout=PIPE, stderr=DEVNULL, text=True)
        return self

    def __exit__(self, *_):
        if self.process:
            self.process.terminate()
            self.text, _ = self.process.communicate()

    def readings(self):
        """The highest clock of the multiprocessors, in MHz, and the highest power, in W: of the GPU
        and the seconds in which it worked. {} without an NVIDIA GPU."""
        lines = self.text.splitlines() if self.process else []
        with suppress(ValueError):  # "[N/A]"
            pairs = [[float(number) for number in line.split(",")] for line in lines]
            if pairs:
                clocks, power = zip(*pairs, strict=True)
                return {"clock": max(clocks), "power": max(power)}
        return {}


def stage(data, name):
    """{job: samples} of a stage."""
    parts = (key.partition(": ") for key in data["samples"])
    return {job: data["samples"][f"{s}: {job}"] for s, _, job in parts if s == name}


def speed_table(rows):
    """Seconds per epoch, as a table. The last column is relative to the tutorial as published."""
    head = ["model and settings", f"training, s / {EPOCH:,} images", "images/s"]
    head += ["whole epoch, s", "peak memory", "clock, MHz", "power, W"]
    head += ["speed relative to the tutorial"]
    seconds = {
        name: medians(samples, "train")[0] / samples[0]["samples"] * EPOCH
        for name, samples in rows.items()
    }
    published = {n.partition(":")[0]: s for n, s in seconds.items() if "restarted" in n}
    lines = []
    for name, samples in rows.items():
        first, tutorial = samples[0], published.get(name.partition(":")[0])
        ours = "whole" in first
        lines.append(
            [
                name,
                f"{seconds[name]:.2f}",
                f"{EPOCH / seconds[name]:,.0f}",
                f"{medians(samples, 'whole')[0]:.2f}" if ours else "",
                f"{first['memory'] / 2**30:.2f} GiB" if ours else "",
                *(f"{first[name]:.0f}" if name in first else "" for name in ("clock", "power")),
                f"{tutorial / seconds[name]:.1f} times" if tutorial else "",
            ]
        )
    return markdown_table(head, lines)


def recipe_cells(samples):
    """Accuracy, seconds of all epochs, and seconds of training per epoch, as text."""
    names = "val_accuracy", "total", "train"
    accuracy, total, train = (medians(samples, name)[0] for name in names)
    return [f"{accuracy:.2%}", f"{total:.2f}", f"{train:.3f}"]


def sections(data):
    """(title, text) of each part of the report."""
    if tests := stage(data, "tests"):
        lines = [[name, s[0]["last_line"], f"{s[0]['seconds']:.0f}"] for name, s in tests.items()]
        yield "GPU tests", markdown_table(["test", "result", "s"], lines)
    for samples in stage(data, "verify").values():
        yield "make verify", f"{samples[0]['last_line']}: [verify.md](verify.md)"
    if speeds := stage(data, "speed"):
        text = f"{run_counts(speeds.values())}, each without its first epoch. A whole epoch also "
        text += "includes the evaluation and the call that saves a checkpoint.\n\n"
        yield "Seconds per epoch", text + speed_table(speeds)
    if profiles := stage(data, "profile"):
        parts = [f"### {name}\n\n{samples[0]['text']}" for name, samples in profiles.items()]
        yield "Where the time goes", "\n".join(parts)
    if recipe := stage(data, "recipe"):
        lines = [[name, *recipe_cells(samples)] for name, samples in recipe.items()]
        lines.append(["median", *recipe_cells([samples[0] for samples in recipe.values()])])
        head = ["configs/cifar10-94.yaml", "accuracy", "all epochs, s", "training, s / epoch"]
        yield "94 %", markdown_table(head, lines)
    if reports := stage(data, "reports"):
        yield "Loading and saving", ", ".join(f"[{name}]({name})" for name in reports)
    if memory := stage(data, "memory"):
        lines = [[name, f"{s[0]['memory'] / 2**30:.2f} GiB"] for name, s in memory.items()]
        yield "Peak memory", markdown_table(["technique", "memory"], lines)
    if errors := data["errors"]:
        yield "Failed", "\n".join(f"{key}\n\n```\n{text}\n```\n" for key, text in errors.items())


def write(data, folder):
    """Write gpu.md."""
    facts = data["machine"]
    text = f"# Measured on {', '.join(facts['gpus']) or 'a machine without a GPU'}\n\n"
    text += f"Driver {facts['driver']}; {facts['cores']} cores of {facts['cpu']}; Python "
    text += f"{facts['python']}, torch {facts['torch']}, torchvision {facts['torchvision']}, "
    text += f"commit {facts['commit']}; `python -m lab.gpu {facts['command']}`.\n"
    for title, content in sections(data):
        text += f"\n## {title}\n\n{content}\n"
    (folder / "gpu.md").write_text(text)
