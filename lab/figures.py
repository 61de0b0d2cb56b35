"""python -m lab.figures: draw docs/figures/*.svg, one figure per script.

Each figure shows which device holds what, and in which order things are computed and sent. A test
fails if a file is out of date.
"""

import textwrap
from html import escape
from typing import NamedTuple

from tools.lib.ladder import ROOT

FOLDER = ROOT / "docs" / "figures"
WIDTH, MARGIN, PADDING = 880, 20, 10
BAR, ROW, LANE, NAMES = 10, 30, 30, 128  # heights in pixels; width of the column of lane names
TEXT, LINE, PALE, BACKGROUND, EMPTY = "#1f2328", "#59636e", "#d0d7de", "#ffffff", "#f6f8fa"
BLUE, ORANGE, GREEN, VIOLET = "#b6d4f0", "#f7c9a9", "#bfe3c0", "#dccbf0"
COLORS = {"parameters": BLUE, "gradients": ORANGE, "optimizer-state": GREEN, "activations": VIOLET}
COLORS |= {"forward": BLUE, "backward": ORANGE, "optimizer": GREEN, "send": "#f4e285"}
COLORS |= {"batch": "#d0d5db", "other": "#e4e7eb"}


class Figure(NamedTuple):
    """What to draw. Bars and blocks are written as "START-END KIND TEXT | START-END KIND ...", in
    percent of what train_1gpu.py holds (bars) or of the time shown (blocks)."""

    title: str
    processes: dict  # name of a process -> {name of a device: its bars}
    lanes: dict  # name of a lane -> its blocks
    notes: str
    sends: str = ""  # arrows: "START END LANE>LANE | ...", with the numbers of the lanes
    timeline: str = "One step"


def draw(figure):
    """The SVG text of a Figure."""
    parts = [_text(MARGIN, 30, figure.title, size=16, bold=True)]
    parts.append(_text(MARGIN, 60, "Who holds what (full width: what train_1gpu.py holds)"))
    y = _draw_processes(parts, figure.processes, 72)
    parts.append(_text(MARGIN, y + 30, figure.timeline))
    y = _draw_lanes(parts, figure, y + 42)
    for line in textwrap.wrap(figure.notes, 132):
        parts.append(_text(MARGIN, y + 14, line, size=12, color=LINE))
        y += 18
    height = y + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(figure.title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker>'
            "</defs>",
            _box(0.5, 0.5, WIDTH - 1, height - 1, fill=BACKGROUND, radius=8),
            *parts,
            "</svg>\n",
        ]
    )


def parse(spec):
    """[(start, end, kind, text)]: without a text, the kind is the text; "-" stands for no text."""
    items = []
    for item in filter(None, spec.split("|")):
        times, kind, *text = item.split(maxsplit=2)
        text = text[0].strip() if text else kind
        items.append((*map(float, times.split("-")), kind, text.removeprefix("-")))
    return items


def _draw_processes(parts, processes, y):
    """Boxes of processes side by side, with their devices inside; returns the lower edge."""
    count = sum(len(devices) for devices in processes.values())
    rows = max(len(parse(bars)) for devices in processes.values() for bars in devices.values())
    gaps = PADDING * (count + 2 * len(processes) - 1)
    width, height = (WIDTH - 2 * MARGIN - gaps) / count, 34 + rows * ROW
    x = MARGIN
    for name, devices in processes.items():
        outer = len(devices) * (width + PADDING) + PADDING
        parts.append(_box(x, y, outer, height + 38, dashed=True))
        parts.append(_text(x + PADDING, y + 18, name, size=12, bold=True))
        for i, (device, bars) in enumerate(devices.items()):
            left = x + PADDING + i * (width + PADDING)
            parts.append(_box(left, y + 28, width, height, fill=EMPTY))
            parts.append(_text(left + 8, y + 46, device, size=12, bold=True))
            for row, bar in enumerate(parse(bars)):
                _draw_bar(parts, bar, left + 8, y + 56 + row * ROW, width - 16)
        x += outer + PADDING
    return y + height + 38


def _draw_bar(parts, bar, x, y, width):
    start, end, kind, text = bar
    parts.append(_text(x, y + 11, text, size=12, limit=width))
    if kind != "other":
        parts.append(_box(x, y + 15, width, BAR, fill=BACKGROUND, radius=2, stroke=PALE))
    if end > start:
        left, length = x + start * width / 100, (end - start) * width / 100
        fill, temporary = COLORS[kind.removesuffix("*")], kind.endswith("*")
        parts.append(_box(left, y + 15, length, BAR, fill=fill, radius=2, dashed=temporary))


def _draw_lanes(parts, figure, y):
    """The timeline: one lane per device or kind of message; returns the lower edge."""
    left, right = MARGIN + NAMES, WIDTH - MARGIN
    scale, middles = (right - left) / 100, []
    for name, blocks in figure.lanes.items():
        parts.append(_text(MARGIN, y + 20, name, size=12, limit=NAMES))
        parts.append(_line(left, y + LANE / 2, right, y + LANE / 2, color=PALE))
        for start, end, kind, text in parse(blocks):
            x, width = left + start * scale, (end - start) * scale
            parts.append(_box(x, y, width, LANE, fill=COLORS[kind], radius=min(3, width / 4)))
            center = x + width / 2
            parts.append(_text(center, y + 19, text, size=12, anchor="middle", limit=width))
        middles.append(y + LANE / 2)
        y += LANE + 8
    for send in filter(None, figure.sends.split("|")):
        start, end, lanes = send.split()
        sender, receiver = (middles[int(lane)] for lane in lanes.split(">"))
        edge = LANE / 2 if receiver > sender else -LANE / 2
        x1, x2 = left + float(start) * scale, left + float(end) * scale
        parts.append(_line(x1, sender + edge, x2, receiver - edge, head=True))
    parts.append(_line(left, y + 6, right, y + 6, head=True))
    parts.append(_text(MARGIN, y + 10, "time", size=12, color=LINE))
    return y + 22


def _box(x, y, width, height, fill="none", radius=5, stroke=LINE, dashed=False):
    dash = ' stroke-dasharray="5 3"' if dashed else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:.5g}" height="{height:g}" rx="{radius:.3g}" '
        f'fill="{fill}" stroke="{stroke}"{dash}/>'
    )


def _line(x1, y1, x2, y2, color=LINE, head=False):
    end = ' marker-end="url(#head)"' if head else ""
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{color}" fill="none"{end}/>'


def _text(x, y, text, size=13, bold=False, color=TEXT, anchor="start", limit=WIDTH):
    """A line of text. Raises ValueError if it is wider than `limit` pixels."""
    if len(text) * size * 0.53 > limit:
        raise ValueError(f"{text!r} does not fit into {limit:.0f} pixels")
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
        f"{weight}>{escape(text)}</text>"
    )


FULL = "0-100 parameters | 0-100 gradients | 0-100 optimizer-state optimizer state"
HALF = "{0} parameters parameters: 1/2 | {0} gradients gradients: 1/2 | "
HALF += "{0} optimizer-state optimizer state: 1/2"
HALVES = ("0-50", "50-100")  # of the first and the second rank, or stage


def _replicas(activations, percent):
    """Two ranks with the whole model each, and `percent` of train_1gpu.py's activations."""
    return {
        f"process: rank {rank}": {
            f"cuda:{rank}": f"{FULL} | {50 * rank}-{50 * rank + percent} activations "
            f"{activations} | {half} batch batch: 1/2"
        }
        for rank, half in enumerate(HALVES)
    }


def _stages(first, activations, batch):
    """The devices of one process, cuda:`first` and the next, with half of the model each."""
    return {
        f"cuda:{first + stage}, stage {stage}": f"{HALF.format(HALVES[stage])} | "
        f"{activations[stage]} | {batch}: {('inputs', 'targets')[stage]}"
        for stage in range(2)
    }


def _ticks(first, last, step):
    """The small collectives of SyncBatchNorm, one per layer and pass."""
    return "|".join(f"{time}-{time + 0.8} send -" for time in range(first, last, step))


FIGURES = {}  # script -> Figure

FIGURES["train_1gpu.py"] = Figure(
    "train_1gpu.py: one process, one device",
    {"process": {"cuda:0": f"{FULL} | 0-100 activations | 0-100 batch"}},
    {
        "cuda:0": "0-12 other next batch | 12-40 forward forward, loss | 40-82 backward | "
        "82-93 optimizer | 93-100 other meter"
    },
    "Parameters, gradients and optimizer state have the size of the model; activations grow with "
    "the batch. Nothing is sent.",
)

FIGURES["train_1gpu_graph.py"] = Figure(
    "train_1gpu_graph.py: one launch per step instead of one per kernel",
    {
        "process": {
            "cuda:0": f"{FULL} | 0-100 activations | 0-100 batch batch: a copy, in the graph"
        }
    },
    {
        "CPU, eager": "0-55 other launches hundreds of kernels, one by one",
        "cuda:0, eager": "3-17 forward | 20-43 backward | 46-57 optimizer",
        "CPU, graph": "60-66 other launch",
        "cuda:0, graph": "63-65 batch - | 65-75 forward | 75-91 backward | 91-99 optimizer step",
    },
    "A step of a small model, first as train_1gpu.py runs it: the CPU cannot launch the kernels as "
    "fast as the GPU computes them. Then as a replay: the batch is copied into the tensors that "
    "were captured, and a single launch runs the step without gaps. The widths are not measured.",
)

FIGURES["train_dp.py"] = Figure(
    "train_dp.py: one process, one thread per GPU",
    {
        "process": {
            **_replicas("activations: 1/2", 50)["process: rank 0"],
            "cuda:1": "0-100 parameters* parameters: a new copy at every step | 0-100 gradients* "
            "gradients: of its share | 0-0 optimizer-state no optimizer state | "
            "50-100 activations activations: 1/2 | 50-100 batch batch: 1/2",
        }
    },
    {
        "cuda:0": "19-35 forward | 45-51 forward loss | 61-78 backward | 90-100 optimizer",
        "copies": "0-8 send scatter | 8-18 send replicate | 36-44 send gather | "
        "52-60 send scatter | 79-89 send add up",
        "cuda:1": "19-35 forward | 61-78 backward",
    },
    "At every step the batch is scattered, the model is copied from cuda:0 to the other GPUs, the "
    "outputs are gathered on cuda:0 for the loss, and the gradients are added up there. The other "
    "GPUs are idle in between. BatchNorm normalizes each GPU's share by itself.",
    "18 19 1>2 | 18 19 1>0 | 35 36 2>1 | 35 36 0>1 | 44 45 1>0 | 51 52 0>1 | 60 61 1>2 | "
    "60 61 1>0 | 78 79 2>1 | 78 79 0>1 | 89 90 1>0",
)

_rank = (
    "0-32 forward | 32-48 backward last layers | 48-64 backward | 64-80 backward first layers | "
    "91-100 optimizer"
)
FIGURES["train_ddp.py"] = Figure(
    "train_ddp.py: one process per device, gradients averaged during backward()",
    _replicas("activations: 1/2", 50),
    {
        "rank 0": _rank,
        "all-reduce": "48-62 send bucket | 64-78 send bucket | 80-91 send bucket",
        "SyncBatchNorm": _ticks(5, 79, 3),
        "rank 1": _rank,
    },
    "A bucket of gradients is all-reduced as soon as it is complete, while backward() is still "
    "computing earlier layers. Then every rank makes the same update. SyncBatchNorm sends "
    "a few numbers per layer and pass.",
)

_rank = (
    "0-20 forward | 20-34 backward last layers | 34-48 backward | 48-62 backward first layers | "
    "72-86 other unscale, clip | 86-100 optimizer scaler.step"
)
FIGURES["train_ddp_amp.py"] = Figure(
    "train_ddp_amp.py: most of forward and backward in 16 bits",
    _replicas("activations: 1/2, mostly 16-bit", 25),
    {
        "rank 0": _rank,
        "all-reduce": "34-46 send float32 | 48-60 send float32 | 62-72 send float32",
        "SyncBatchNorm": _ticks(5, 61, 2),
        "rank 1": _rank,
    },
    "Parameters, gradients and optimizer state stay in float32, and so do the gradients that are "
    "all-reduced; autocast casts the weights where it uses them. With float16, the check for "
    "overflow comes after the all-reduce, so that all ranks skip the same updates.",
)

_rank = "|".join(
    f"{4 + 20 * i}-{12 + 20 * i} forward F{i + 1} | {12 + 20 * i}-{24 + 20 * i} backward B{i + 1}"
    for i in range(4)
)
_rank += "| 92-100 optimizer step"
FIGURES["train_ddp_accum.py"] = Figure(
    "train_ddp_accum.py --micro-batches 4: one all-reduce for four backward passes",
    _replicas("activations: of one micro-batch", 12.5),
    {
        "rank 0": _rank,
        "all-reduce": "76-80.5 send - | 81-86 send - | 86.5-92 send -",
        "SyncBatchNorm": _ticks(5, 84, 2),
        "rank 1": _rank,
    },
    "F and B are forward and backward of a micro-batch. Its activations are freed before the next "
    "one starts; the gradients add up in .grad. Only the last backward pass all-reduces them. "
    "SyncBatchNorm communicates in every micro-batch.",
)

FIGURES["train_mp.py"] = Figure(
    "train_mp.py --micro-batches 2: one process, one model on two devices",
    {
        "process": _stages(
            0,
            [f"{half} activations activations: 1/2" for half in HALVES],
            "0-100 batch batch",
        )
    },
    {
        "cuda:0": "0-11 forward F1 | 11-22 forward F2 | 57-74 backward B2 | 74-91 backward B1 | "
        "92-100 optimizer step",
        "cuda:1": "12-23 forward F1 | 23-34 forward F2 | 34-39 forward loss | 39-56 backward B2 | "
        "56-73 backward B1 | 92-100 optimizer step",
    },
    "F and B are forward and backward of a micro-batch in a stage. Arrows: activations on the way "
    "down, their gradients on the way back. Gaps are idle time; with a single micro-batch, only "
    "one device works at any time.",
    "11 12 0>1 | 22 23 0>1 | 56 57 1>0 | 73 74 1>0",
)

_first = "0-18 forward | 61-84 backward | 93-100 optimizer step"
_second = "19-33 forward | 33-38 forward loss | 38-60 backward | 93-100 optimizer step"
FIGURES["train_ddp_mp.py"] = Figure(
    "train_ddp_mp.py: two processes with two devices each",
    {
        f"process: rank {rank}": _stages(
            2 * rank,
            [
                f"{start}-{start + 25} activations activations: 1/4"
                for start in (50 * rank, 50 * rank + 25)
            ],
            f"{HALVES[rank]} batch batch: 1/2",
        )
        for rank in range(2)
    },
    {
        "cuda:0, rank 0": _first,
        "cuda:1, rank 0": _second,
        "all-reduce": "60-76 send stage 1 | 84-93 send stage 0",
        "cuda:2, rank 1": _first,
        "cuda:3, rank 1": _second,
    },
    "Within a process, activations and their gradients move between the stages, as in train_mp.py. "
    "Between the processes, DistributedDataParallel averages the gradients: cuda:0 with cuda:2, "
    "cuda:1 with cuda:3. Not shown: SyncBatchNorm.",
    "18 19 0>1 | 60 61 1>0 | 18 19 3>4 | 60 61 4>3",
)

_rank = (
    "8-17 forward F1 | 17-26 forward F2 | 26-35 forward F3 | 43-58 backward B3 | "
    "58-73 backward B2 | 73-88 backward B1 | 94-100 optimizer step"
)
FIGURES["train_fsdp.py"] = Figure(
    "train_fsdp.py: each rank keeps a shard of everything",
    {
        f"process: rank {rank}": {
            f"cuda:{rank}": f"{HALF.format(half)} | 0-33 parameters* parameters of a block, "
            f"gathered | {half} activations activations: 1/2 | {half} batch batch: 1/2"
        }
        for rank, half in enumerate(HALVES)
    },
    {
        "rank 0": _rank,
        "all-gather": "0-8 send 1 | 8.5-16.5 send 2 | 17.5-25.5 send 3 | 35-43 send 3 | "
        "43.5-51.5 send 2 | 58.5-66.5 send 1",
        "reduce-scatter": "58.5-67.5 send 3 | 73.5-82.5 send 2 | 88-94 send 1",
        "rank 1": _rank,
    },
    "A model of three blocks. The parameters of a block are gathered while the block before it "
    "computes, freed after its forward pass, and gathered again for its backward pass. Its "
    "gradients are reduce-scattered: each rank receives the mean for its shard, and updates that. "
    "Not shown: SyncBatchNorm.",
)

_rank = (
    "2-12 forward attention | 20-32 forward MLP | 40-46 forward loss | 46-60 backward MLP | "
    "68-80 backward attention | 90-100 optimizer step"
)
FIGURES["train_tp.py"] = Figure(
    "train_tp.py: each rank computes some heads and columns of every block",
    {
        f"process: rank {rank}": {
            f"cuda:{rank}": f"{HALF.format(half)} | {half} activations activations "
            "within blocks: 1/2 | 0-100 activations activations between blocks | 0-100 batch"
        }
        for rank, half in enumerate(HALVES)
    },
    {
        "rank 0": _rank,
        "all-reduce": "12-20 send outputs | 32-40 send outputs | 60-68 send grads | "
        "80-88 send grads",
        "rank 1": _rank,
    },
    "A model of one block. Each rank computes a partial sum of the block's outputs from its heads, "
    "and another one from its MLP columns; an all-reduce adds up the ranks' partial sums. In "
    "backward, the gradients of the blocks' inputs are added up in the same way. Embeddings, "
    "LayerNorm and classifier are not divided: every rank holds and computes them.",
)

QUARTERS = ("0-25", "25-50", "50-75", "75-100")
_rank = (
    "10-22 forward F1 | 24-36 forward F2 | 44-60 backward B2 | 62-78 backward B1 | "
    "94-100 optimizer step"
)
_within = "22-24 send - | 36-38 send - | 60-62 send - | 78-80 send -"
FIGURES["train_fsdp_tp.py"] = Figure(
    "train_fsdp_tp.py --fsdp-size 2 on four ranks: 2 data x 2 tensor",
    {
        f"replica {replica}": {
            f"rank {2 * replica + rank}": f"{part} parameters parameters: 1/4 | "
            f"{part} gradients gradients: 1/4 | {part} optimizer-state optimizer state: 1/4 | "
            f"{50 * rank}-{50 * rank + 17} parameters* its slice of a block | "
            f"{part} activations activations: 1/4 | {HALVES[replica]} batch batch: 1/2"
            for rank, part in enumerate(QUARTERS[replica::2])
        }
        for replica in range(2)
    },
    {
        "rank 0": _rank,
        "all-reduce 0, 1": _within,
        "gather 0, 2": "0-9 send slice 1 | 12-21 send slice 2 | 45-54 send slice 1",
        "scatter 0, 2": "62-74 send gradients 2 | 80-92 send gradients 1",
        "rank 2": _rank,
        "all-reduce 2, 3": _within,
    },
    "A model of two blocks; ranks 1 and 3, not shown, do the same. Ranks 0 and 1 hold one replica "
    "and all-reduce their partial sums within blocks, as in train_tp.py. Ranks 0 and 2 hold the "
    "same slices of all layers; they gather them and reduce-scatter their gradients, as in "
    "train_fsdp.py. The parameters of the last block stay gathered for backward.",
)

_rank = (
    "9-19 forward attention | 27-37 forward experts | 45-51 forward loss | "
    "59-69 backward experts | 77-87 backward attention | 91-100 optimizer"
)
FIGURES["train_ep.py"] = Figure(
    "train_ep.py: each rank holds half of the experts, and computes all tokens of these",
    {
        f"process: rank {rank}": {
            f"cuda:{rank}": f"{HALF.format(half)} | 0-12 parameters* parameters of a block, "
            f"gathered, except for experts | {half} activations activations: about 1/2 | "
            f"{half} batch batch: 1/2"
        }
        for rank, half in enumerate(HALVES)
    },
    {
        "rank 0": _rank,
        "all-to-all": "19-27 send tokens | 37-45 send outputs | 51-59 send grads | "
        "69-77 send grads",
        "all-gather": "0-9 send block | 60-69 send block",
        "reduce-scatter": "87-91 send -",
        "rank 1": _rank,
    },
    "A model of one block. The router of each rank sends its tokens to the ranks of their experts, "
    "which compute and send the outputs back; in backward, gradients go the same ways. All other "
    "parameters are sharded, gathered and reduce-scattered as in train_fsdp.py. The gradients of "
    "experts stay where they are.",
)

_rank = (
    "2-12 forward block | 22-33 forward attention | 35-43 forward loss | "
    "45-56 backward attention | 66-76 backward block | 91-100 optimizer"
)
FIGURES["train_cp.py"] = Figure(
    "train_cp.py: each rank computes two of four chunks of every sequence",
    {
        f"process: rank {rank}": {
            f"cuda:{rank}": f"{HALF.format('0-100').replace(': 1/2', '')} | "
            f"{chunks[0]} activations activations: chunk {rank + 1} | "
            f"{chunks[1]} activations activations: chunk {4 - rank} | 0-100 batch batch"
        }
        for rank, chunks in enumerate((("0-25", "75-100"), ("25-50", "50-75")))
    },
    {
        "rank 0": _rank,
        "all-gather": "12-22 send keys",
        "reduce-scatter": "56-66 send grads",
        "all-reduce": "76-91 send gradients",
        "rank 1": _rank,
    },
    "A model of one block. A query sees the keys before it: rank 0 has the first and the last "
    "chunk, rank 1 those between, which together see as many keys. Attention gathers the keys and "
    "values of all positions; in backward, their gradients are added up where they came from. "
    "DistributedDataParallel all-reduces the gradients of the parameters.",
)

FIGURES["train_pp.py"] = Figure(
    "train_pp.py --micro-batches 4 --schedule 1F1B: one stage per rank",
    {
        f"process: rank {rank}": {
            f"cuda:{rank}, stage {rank}": f"{HALF.format(half)} | {half} activations activations "
            f"of its layers: 1/2 | 0-100 batch batch: {('inputs', 'targets')[rank]}"
        }
        for rank, half in enumerate(HALVES)
    },
    {
        "rank 0": "0-7 forward F1 | 7-14 forward F2 | 26.5-37 backward B1 | 37-44 forward F3 | "
        "44-54.5 backward B2 | 54.5-61.5 forward F4 | 63.5-74 backward B3 | 81-91.5 backward B4 | "
        "93-100 optimizer step",
        "rank 1": "8-15 forward F1 | 15-25.5 backward B1 | 25.5-32.5 forward F2 | "
        "32.5-43 backward B2 | 45-52 forward F3 | 52-62.5 backward B3 | 62.5-69.5 forward F4 | "
        "69.5-80 backward B4 | 93-100 optimizer step",
    },
    "F and B are forward and backward of a micro-batch in a stage. Arrows: activations on the way "
    "down, their gradients on the way back. Once the pipeline is full, each rank alternates "
    "between the two, and keeps the activations of no more micro-batches than there are ranks. Not "
    "shown: the last rank sends its loss and metrics to all, and the norms of the gradients are "
    "added up.",
    "7 8 0>1 | 14 15 0>1 | 25.5 26.5 1>0 | 43 44 1>0 | 44 45 0>1 | 61.5 62.5 0>1 | 62.5 63.5 1>0 | "
    "80 81 1>0",
)

_rank = "import torch | {}-{} other set_environment | {}-88 forward main(), as train_ddp.py"
FIGURES["train_ddp_spawn.py"] = Figure(
    "train_ddp_spawn.py: a parent process starts the ranks",
    {
        "process: parent": {
            "no device": "0-0 other TCPStore on a free port | 0-0 other list of its processes"
        },
        **_replicas("activations: 1/2", 50),
    },
    {
        "parent": "0-10 other host_store | 10-20 other mp.spawn | 20-100 other wait_for_ranks",
        "rank 0": f"22-36 other {_rank.format(36, 51, 51)} | 88-95 other exit",
        "rank 1": f"24-38 other {_rank.format(38, 53, 53)} | 88-95 other exit",
    },
    "mp.spawn starts a Python interpreter per rank, which imports this script and calls "
    "run_rank(local_rank, world_size, port). The rest, communication included, is train_ddp.py. "
    "When a rank fails, the parent ends the others.",
    "20 22 0>1",
    timeline="The whole job",
)


def path_of(script):
    """The file of a script's figure."""
    return FOLDER / script.replace(".py", ".svg")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for script, figure in FIGURES.items():
        path_of(script).write_text(draw(figure))
