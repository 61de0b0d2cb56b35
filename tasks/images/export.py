"""Export a trained model to a file that other programs can run.

    python -m tasks.images.export runs/x/best.pt --format onnx

onnx: for onnxruntime and many others; needs onnx, onnxscript and onnxruntime, from
requirements/extras.txt. exported-program: torch.export's format, for PyTorch and AOTInductor. Input
"images": float32 (n, 3, size, size), any n, normalized; output "outputs": float32 (n, classes). The
file also contains "facts" as JSON: the classes, and how to prepare images. It is first written to
a temporary file, run, and compared with the model.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.images.inference import load_trained
from utils.errors import UserError
from utils.reports import report_errors

TOLERANCE = 1e-4  # of the largest output
SUFFIX = {"onnx": ".onnx", "exported-program": ".pt2"}


def export_onnx(model: nn.Module, images: Tensor, path: Path, facts: str) -> None:
    """Write the model to `path`. Raises UserError if a required package is missing."""
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise UserError(
            f"--format onnx needs {error.name}: pip install -r requirements/extras.txt"
        ) from None
    program: Any = torch.onnx.export(
        model,
        (images,),
        input_names=["images"],
        output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("n")},),
        dynamo=True,
        verbose=False,
    )
    program.model.metadata_props["facts"] = facts
    numbers = sum(parameter.numel() for parameter in model.parameters())
    program.save(path, external_data=4 * numbers > 1_800_000_000)  # a protobuf has at most 2 GB
    onnx.checker.check_model(str(path))


def run_onnx(path: Path, images: Tensor) -> tuple[Tensor, str]:
    """The outputs of the file's model, and its facts."""
    try:
        import onnxruntime
    except ImportError:
        raise UserError(
            "--format onnx needs onnxruntime: pip install -r requirements/extras.txt"
        ) from None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"images": images.numpy()})
    return torch.from_numpy(outputs), session.get_modelmeta().custom_metadata_map["facts"]


def export_program(model: nn.Module, images: Tensor, path: Path, facts: str) -> None:
    """Write the model to `path`."""
    sizes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(model, (images,), dynamic_shapes=sizes)
    torch.export.save(program, path, extra_files={"facts": facts})


def run_program(path: Path, images: Tensor) -> tuple[Tensor, str]:
    """The outputs of the file's model, and its facts."""
    extra = {"facts": ""}
    program = torch.export.load(path, extra_files=extra)
    return program.module()(images), extra["facts"]


FORMATS = {"onnx": (export_onnx, run_onnx), "exported-program": (export_program, run_program)}


@torch.no_grad()
def export(checkpoint: str | Path, format: str, output: Path) -> float:
    """Write `output` if its outputs agree with the model's. Returns the largest difference,
    relative to the largest output. Raises UserError, without writing, if it exceeds TOLERANCE."""
    trained = load_trained(checkpoint)
    model = trained.model.float().to(memory_format=torch.contiguous_format)
    write, run = FORMATS[format]
    facts, size, worst = json.dumps(trained.facts), trained.facts["image_size"], 0.0
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=output.parent) as folder:
        path = Path(folder) / output.name
        with warnings.catch_warnings():  # about future changes of the exporters
            warnings.simplefilter("ignore")
            write(model, torch.randn(2, 3, size, size, generator=generator), path, facts)
        for count in (1, 2, 5):
            images = torch.randn(count, 3, size, size, generator=generator)
            expected, (outputs, kept) = model(images), run(path, images)
            worst = max(worst, float((outputs - expected).abs().max() / expected.abs().max()))
            if not worst <= TOLERANCE or kept != facts:
                raise UserError(
                    f"the exported model differs from the original by {worst:.1e} of its largest "
                    f"output, more than {TOLERANCE}: {output} was not written"
                )
        for file in sorted(Path(folder).iterdir(), key=lambda file: file == path):
            os.replace(file, output.with_name(file.name))
    return worst


@report_errors
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tasks.images.export", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", help="such as runs/x/best.pt")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--output", metavar="FILE", help="default: next to the checkpoint")
    args = parser.parse_args()
    output = Path(args.output or Path(args.checkpoint).with_suffix(SUFFIX[args.format]))
    if not output.parent.is_dir():
        raise UserError(f"there is no folder {output.parent}: create it, or pass another --output")
    worst = export(args.checkpoint, args.format, output)
    print(f"wrote {output}, whose outputs are the model's to within {worst:.1e} of the largest")


if __name__ == "__main__":
    sys.exit(main())
