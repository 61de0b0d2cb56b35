"""python -m tools.export runs/x/best.pt --format onnx: a file that other programs can run.

onnx: for onnxruntime and many more (onnx, onnxscript and onnxruntime, from
requirements-extras.txt). exported-program: torch.export's, for PyTorch and AOTInductor. Input
"images": float32 (n, 3, size, size), any n, normalised; output "outputs": float32 (n, classes).
How to prepare images, and the classes, are in the file too, as "facts" in JSON. What was written
is run and compared with the model before it gets its name.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from tools.inference import load_trained
from utils.conv import restore_convolutions
from utils.distributed import UserError, report_errors

TOLERANCE = 1e-4  # of the largest output
SUFFIX = {"onnx": ".onnx", "exported-program": ".pt2"}


def export_onnx(model, images, path, facts):
    """Write the model to `path`. UserError where the packages for it are missing."""
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise UserError(
            f"--format onnx needs {error.name}: pip install -r requirements-extras.txt"
        ) from None
    program = torch.onnx.export(
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
    program.save(path, external_data=4 * numbers > 1_800_000_000)  # a protobuf ends at 2 GB
    onnx.checker.check_model(str(path))


def run_onnx(path, images):
    """-> outputs of the file's model, and its facts."""
    try:
        import onnxruntime
    except ImportError:
        raise UserError(
            "--format onnx needs onnxruntime: pip install -r requirements-extras.txt"
        ) from None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"images": images.numpy()})
    return torch.from_numpy(outputs), session.get_modelmeta().custom_metadata_map["facts"]


def export_program(model, images, path, facts):
    """Write the model to `path`."""
    sizes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(model, (images,), dynamic_shapes=sizes)
    torch.export.save(program, path, extra_files={"facts": facts})


def run_program(path, images):
    """-> outputs of the file's model, and its facts."""
    extra = {"facts": ""}
    program = torch.export.load(path, extra_files=extra)
    return program.module()(images), extra["facts"]


FORMATS = {"onnx": (export_onnx, run_onnx), "exported-program": (export_program, run_program)}


@torch.no_grad()
def export(checkpoint, format, output):
    """Write `output`, once its outputs equal the model's. Returns the largest difference.

    Relative to the largest output. UserError where that is above TOLERANCE: nothing is written.
    """
    model, _, facts = load_trained(checkpoint, torch.device("cpu"))
    model = model.float().to(memory_format=torch.contiguous_format)
    restore_convolutions(model)  # their form for this machine's CPU is no other's
    write, run = FORMATS[format]
    facts, size, worst = json.dumps(facts), facts["image_size"], 0.0
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=output.parent) as folder:
        path = Path(folder) / output.name
        with warnings.catch_warnings():  # of what the exporters will do differently one day
            warnings.simplefilter("ignore")
            write(model, torch.randn(2, 3, size, size, generator=generator), path, facts)
        for count in (1, 2, 5):
            images = torch.randn(count, 3, size, size, generator=generator)
            expected, (outputs, kept) = model(images), run(path, images)
            worst = max(worst, float((outputs - expected).abs().max() / expected.abs().max()))
            if not worst <= TOLERANCE or kept != facts:
                raise UserError(
                    f"the exported model differs from the original by {worst:.1e} of its largest "
                    f"output, more than {TOLERANCE}: {output} is not written"
                )
        for file in sorted(Path(folder).iterdir(), key=lambda file: file == path):
            os.replace(file, output.with_name(file.name))
    return worst


@report_errors
def main():
    parser = argparse.ArgumentParser(prog="python -m tools.export", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", help="such as runs/x/best.pt")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--output", metavar="FILE", help="default: beside the checkpoint")
    args = parser.parse_args()
    output = Path(args.output or Path(args.checkpoint).with_suffix(SUFFIX[args.format]))
    if not output.parent.is_dir():
        raise UserError(f"there is no folder {output.parent}: make it, or pass another --output")
    try:
        worst = export(args.checkpoint, args.format, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    print(f"{output}: equal to the model but for {worst:.1e} of its largest output")


if __name__ == "__main__":
    sys.exit(main())
