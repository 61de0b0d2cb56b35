"""Publish what tools.fit says of GPTs of three sizes, and how that compares with measurements.

    python -m lab.fit                 # half an hour on two idle cores
    python -m lab.fit --only published

Writes lab/results/fit.json. Needs no GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tools.fit.text import gib
from tools.lib.ladder import RESULTS, ROOT
from tools.lib.markdown import markdown_table
from tools.lib.runs import flag_list

RESULT = RESULTS / "fit.json"
GPUS = 1, 8, 64, 1024
MODELS = {  # name: settings of the text task, and samples of a batch per GPU
    "0.1 billion": ({"layers": 12, "heads": 12, "width": 768, "context": 1024}, 8),
    "1 billion": ({"layers": 20, "heads": 16, "width": 2048, "context": 2048}, 4),
    "8 billion": ({"layers": 40, "heads": 32, "width": 4096, "context": 2048}, 1),
}
TEXT = "a file that is written"
PARAGRAPHS = 12000  # enough for two batches on all GPUs
# GiB that torchtitan's team has measured: the peak of what PyTorch's allocator had reserved.
PUBLISHED = [  # GPUs, with torch.compile, GiB
    (8, False, 82.4),
    (128, False, 67.0),
    (8, True, 77.0),
    (128, True, 62.0),
]
SAID = {"out of memory": "out of memory", "stopped": "refused"}  # by the script
LLAMA = "lab/fit/llama.py"


def fit(words, settings):
    """The answers of a run of tools.fit."""
    with tempfile.TemporaryDirectory(prefix="fit-") as folder:
        text, result = Path(folder) / "text.txt", Path(folder) / "fit.json"
        text.write_text(("x" * 2049 + "\n\n") * PARAGRAPHS, encoding="utf-8")
        command = [sys.executable, "-m", "tools.fit", *map(str, words), "--json", str(result)]
        named = flag_list({n: text if v == TEXT else v for n, v in settings.items()})
        run = subprocess.run([*command, "--", *named], cwd=ROOT, capture_output=True, text=True)
        if not result.exists():
            sys.exit(f"error: {' '.join(command)}:\n{run.stderr}")
        print(run.stdout.partition("What this")[0], flush=True)
        return json.loads(result.read_text(encoding="utf-8"))["answers"]


def evidence(name, gpus):
    """What fits, of the ways to train a model on so many GPUs."""
    model, samples = MODELS[name]
    script = "train_1gpu.py" if gpus == 1 else "train_fsdp.py"
    settings = model | {"text-file": TEXT, "num-workers": 0}
    settings["global-batch-size"] = samples * gpus
    words = [script, "--gpus", gpus, "--task", "tasks.text", "--no-search"]
    return fit(words, settings)[0]["candidates"]


def published():
    """What tools.fit says of the runs that others have measured."""
    kept = "outcome", "peak", "reserved", "parts", "module", "phase"
    found = []
    for gpus, compiles, _ in PUBLISHED:
        words = [LLAMA, "--gpus", gpus, "--memory", 95, "--no-search", "--limit", 1800]
        answer = fit(words, {"batch-size": 2} | ({"compile": True} if compiles else {}))[0]
        found.append({name: answer[name] for name in kept})
    return found


def comparison(result):
    """The published figures and the figures of tools.fit, as a Markdown table."""
    rows = []
    for (gpus, compiles, measured), found in zip(PUBLISHED, result["published"], strict=True):
        reserved = found["reserved"] / 2**30
        cells = [f"{measured:.1f}", f"{reserved:.1f}", f"{abs(reserved / measured - 1):.1%}"]
        rows.append([str(gpus), "yes" if compiles else "no", *cells, gib(found["peak"])])
    head = ["GPUs", "torch.compile", "measured, GiB", "tools.fit, GiB", "difference"]
    return markdown_table([*head, "of which tensors, at the peak"], rows)


def ways(result, name):
    """A table of a model: the ways to train, and the peak on each number of GPUs."""
    model, samples = MODELS[name]
    caption = (
        f"{name} parameters: {model['layers']} layers, width {model['width']}, {samples} x "
        f"{model['context']:,} bytes per GPU."
    )
    peaks = {}
    for gpus in GPUS:
        for one in result["evidence"].get(name, {}).get(str(gpus), []):
            way = one["way"]["name"]
            text = gib(one["peak"]) if one["outcome"] == "fits" else SAID.get(one["outcome"])
            if one["outcome"] == "fits" and one["retries"]:
                text += " (barely)"
            peaks.setdefault(way, {})[gpus] = text
    rows = [[way, *(found.get(gpus, "") for gpus in GPUS)] for way, found in peaks.items()]
    table = markdown_table(["way", *(f"{gpus:,} GPU{'s' * (gpus > 1)}" for gpus in GPUS)], rows)
    return f"{caption}\n\n{table}"


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.fit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=["published", *MODELS], help="a part")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    result["torch"] = torch.__version__
    if args.only in (None, "published"):
        result["published"] = published()
        save(result)
    for name in MODELS:
        if args.only in (None, name):
            for gpus in GPUS:
                found = result.setdefault("evidence", {}).setdefault(name, {})
                found[str(gpus)] = evidence(name, gpus)
                save(result)


def save(result):
    """Write what there is so far."""
    text = json.dumps(result, indent=1).replace(f"{ROOT}/", "")  # of lines that wait
    RESULT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
