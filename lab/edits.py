"""Edits of the loop: those that tests/test_edits.py tries, and docs/editing.md lists.

Each is the text of a script with a few changes. The task is tests/edits_task.py.
"""

from typing import NamedTuple

from tools.copy import ANY_TASK_LINE
from tools.lib.edits import changed
from tools.lib.ladder import ROOT
from tools.lib.markdown import markdown_table

SCRIPTS = ("train_1gpu.py", "train_ddp.py", "train_fsdp.py")

# What the edits replace. It is the same in the three scripts.
IMPORT = "from utils.checkpoint import Checkpointer\n"
FUNCTION = "def train_one_epoch(model, loader, optimizer, scheduler, meter, checkpoint, cfg):\n"
LOOP = "    for inputs, targets in loader:  # on the device\n"
OUTPUTS = "        outputs = model(inputs)\n"
ZERO = "        optimizer.zero_grad()\n"
BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n        scheduler.step()\n"
METER = (
    "        meter.update(loss_sum, outputs, targets)  # on the device: .item() would synchronize\n"
)
SAVE = (
    "        checkpoint.step()  # calls the guards, and saves within the epoch when a save is due\n"
)
CALL = "            model, train_loader, optimizer, scheduler, meter, checkpoint, cfg\n"
BUILD = "build_loader(train_set, train_sampler, batch_size, device, cfg, train=True)\n"
LOADER = f"    train_loader = {BUILD}"
OPTIMIZER = "    optimizer = build_optimizer(model, cfg)\n"
SCHEDULER = "    scheduler = build_scheduler(optimizer, cfg, steps_per_epoch=len(train_loader))\n"
STATE = '        "metrics": metrics,\n'
EPOCHS = "    for epoch in range(start_epoch, cfg.epochs):\n"
SET_EPOCH = "        train_sampler.set_epoch(epoch)  # otherwise, every epoch has the same order\n"
TRAIN = f"        train_result = train_one_epoch(\n{CALL}        )\n"
EVALUATE = "        val_result = evaluate(model, val_loader, task)\n"
CHECK = "    check_task(task, model, train_loader)  # fails now, not after an epoch\n"


class Edit(NamedTuple):
    """An edit of the loop.

    what: people want; how: they write it; changes: pairs of texts (old, new), of which {sampler}
    stands for a second sampler; keeps: the weights stay those of the script; error: words of the
    error with which it is refused, where it is.
    """

    name: str
    what: str
    how: str
    changes: list
    keeps: bool = False
    scripts: tuple = SCRIPTS
    error: tuple = ()


def after(line, text):
    """A change that adds lines behind a line."""
    return line, line + text


def before(line, text):
    """A change that adds lines in front of a line."""
    return line, text + line


ISLICE = before(IMPORT, "from itertools import islice\n\n")
SECOND = [  # a second training loader
    before(IMPORT, "from utils.sample_random import draws_named\n"),
    (FUNCTION, FUNCTION.replace("loader", "loader, more_loader")),
    (CALL, CALL.replace("train_loader", "train_loader, more_loader")),
    after(
        LOADER,
        "    more_set = task.Points(40, 2)\n"
        "    more_sampler = {sampler}\n"
        "    more_loader = "
        "build_loader(more_set, more_sampler, batch_size, device, cfg, train=True)\n",
    ),
    before(STATE, '        "more_loader": more_loader,\n'),
    after(SET_EPOCH, "        more_sampler.set_epoch(epoch)\n"),
    before(
        ZERO,
        '        with draws_named("more"):\n'
        "            loss = loss + 0.1 * model(more).square().mean()\n\n",
    ),
]

EDITS = [
    Edit(
        "break",
        "end an epoch early",
        "`if loader.step == 3: break`, at the top of the body",
        [after(LOOP, "        if loader.step == 3:\n            break\n")],
    ),
    Edit(
        "limit",
        "the same, with a limit",
        "`for inputs, targets in islice(loader, 3 - loader.step):`",
        [ISLICE, (LOOP, LOOP.replace("in loader", "in islice(loader, 3 - loader.step)"))],
    ),
    Edit(
        "skip",
        "skip a batch, on all ranks",
        "`if loader.read == 2: continue`",
        [after(LOOP, "        if loader.read == 2:\n            continue\n")],
    ),
    Edit(
        "peek",
        "look at a batch before the epochs",
        "`images, _ = next(iter(train_loader))`",
        [before(EPOCHS, "    batches = iter(train_loader)\n    print(next(batches)[0].mean())\n")],
        keeps=True,
    ),
    Edit(
        "look",
        "look at other batches within an epoch",
        "`next(iter(loader))`, after `checkpoint.step()`",
        [ISLICE, before(SAVE, "        print(len(list(islice(loader, 2))))\n")],
        keeps=True,
    ),
    Edit(
        "evaluate",
        "evaluate within an epoch",
        "`evaluate(model, val_loader, task)`, after `checkpoint.step()`",
        [
            (FUNCTION, FUNCTION.replace("loader", "loader, val_loader")),
            (CALL, CALL.replace("train_loader", "train_loader, val_loader")),
            after(SAVE, "        print(evaluate(model, val_loader, task))\n"),
        ],
        keeps=True,
    ),
    Edit(
        "training set",
        "evaluate the training set, too",
        "`evaluate(model, train_loader, task)`, before or after the validation",
        [after(EVALUATE, "        print(evaluate(model, train_loader, task))\n")],
        keeps=True,
    ),
    Edit(
        "every second epoch",
        "validate every k epochs",
        "`val_result = evaluate(model, val_loader, task) if epoch % 2 else {}`",
        [(EVALUATE, EVALUATE.replace("task)", "task) if epoch % 2 else {}"))],
        keeps=True,
    ),
    Edit(
        "second loader",
        "train on a second loader",
        "`for (inputs, targets), (more, _) in zip(loader, more_loader):`, with it in `state`",
        [
            *SECOND,
            (
                LOOP,
                "    for (inputs, targets), (more, _) in zip(loader, more_loader, strict=False):\n",
            ),
        ],
    ),
    Edit(
        "second loader, now and then",
        "the same, in some steps only",
        "`more, _ = next(more_batches)`, from `iter(more_loader)` in each epoch",
        [
            *SECOND[:-1],
            before(LOOP, "    more_batches = iter(more_loader)\n"),
            before(
                ZERO,
                "        if loader.read % 2:\n"
                "            more, _ = next(more_batches)\n"
                '            with draws_named("more"):\n'
                "                loss = loss + 0.1 * model(more).square().mean()\n\n",
            ),
        ],
    ),
    Edit(
        "accumulate",
        "step every second batch",
        "`if loader.read % 2 and loader.read < len(loader): continue`, after `meter.update()`, in "
        "front of the optimizer's step",
        [
            (ZERO, ""),
            (STEP, ""),
            (METER, METER),
            before(
                SAVE,
                "        if loader.read % 2 and loader.read < len(loader):\n"
                f"            continue\n{STEP}{ZERO}",
            ),
        ],
    ),
    Edit(
        "groups",
        "parameter groups",
        '`torch.optim.AdamW([{"params": ..., "lr": ...}, ...])`',
        [
            (
                OPTIMIZER,
                "    *weights, bias = model.parameters()\n"
                '    groups = [{"params": weights}, {"params": [bias], "lr": 0.1}]\n'
                "    optimizer = torch.optim.AdamW(groups, cfg.lr)\n",
            )
        ],
    ),
    Edit(
        "dtypes",
        "an optimizer whose state has dtypes of its own",
        "`optimizer = MyOptimizer(model.parameters(), cfg.lr)`",
        [(OPTIMIZER, "    optimizer = task.Coarse(model.parameters(), cfg.lr)\n")],
    ),
    Edit(
        "hooks",
        "hooks of the optimizer, and anything else with a state",
        "`optimizer.register_step_pre_hook(warmth)`, with `warmth` in `state`",
        [
            after(
                OPTIMIZER,
                "    warmth = task.Warmth()\n    optimizer.register_step_pre_hook(warmth)\n",
            ),
            before(STATE, '        "warmth": warmth,\n'),
        ],
    ),
    Edit(
        "second optimizer",
        "a second optimizer, such as of the head",
        "`second = torch.optim.AdamW([last], cfg.lr)`, with it in `state`; not with FSDP",
        [
            (
                OPTIMIZER,
                "    *most, last = model.parameters()\n"
                "    optimizer = torch.optim.SGD(most, cfg.lr, momentum=0.9)\n"
                "    second = torch.optim.AdamW([last], 0.01)\n",
            ),
            before(STATE, '        "second": second,\n'),
            (FUNCTION, FUNCTION.replace("optimizer,", "optimizer, second,")),
            (CALL, CALL.replace("optimizer,", "optimizer, second,")),
            before(ZERO, "        second.zero_grad()\n"),
            after(STEP, "        second.step()\n"),
        ],
        scripts=SCRIPTS[:2],
    ),
    Edit(
        "plateau",
        "a scheduler of PyTorch, stepped once per epoch",
        '`scheduler.step(val_result["loss"])`, of a `ReduceLROnPlateau`',
        [
            (
                SCHEDULER,
                "    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(\n"
                "        optimizer, patience=0, threshold=0.5\n    )\n",
            ),
            (STEP, STEP.replace("        scheduler.step()\n", "")),
            after(EVALUATE, '        scheduler.step(val_result["loss"])\n'),
        ],
    ),
    Edit(
        "noise",
        "random numbers in the loop",
        '`inputs + 0.1 * normal("noise", inputs.shape, inputs.device)`, of `utils.sample_random`',
        [
            before(IMPORT, "from utils.sample_random import normal\n"),
            before(
                OUTPUTS,
                '        inputs = inputs + 0.1 * normal("noise", inputs.shape, inputs.device)\n',
            ),
        ],
    ),
    Edit(
        "noise on gradients",
        "the same noise on the gradients of all ranks",
        "`torch.Generator().manual_seed(derive_seed(cfg.seed, loader.epoch, loader.step))`, of "
        "`utils.seeds`, for `torch.randn()` in front of the optimizer's step; not with FSDP",
        [
            before(IMPORT, "from utils.seeds import derive_seed\n"),
            before(
                STEP,
                "        seed = derive_seed(cfg.seed, loader.epoch, loader.step)\n"
                "        generator = torch.Generator().manual_seed(seed)\n"
                "        for p in model.parameters():\n"
                "            p.grad += 0.1 * torch.randn(p.shape, generator=generator)\n",
            ),
        ],
        scripts=SCRIPTS[:2],
    ),
    Edit(
        "forward hook",
        "a hook on a layer, such as a BatchNorm",
        "`model[1].register_forward_hook(hook)`, after `check_task()`",
        [after(CHECK, "    model[1].register_forward_hook(task.shifted)\n")],
    ),
    Edit(
        "predict",
        "a prediction by rank 0 alone",
        "`unwrap(model)(inputs)`, of `utils.checkpoint`, under `torch.no_grad()` and in evaluation "
        "mode; with FSDP, and where the model is divided, all ranks must call the model",
        [
            before(IMPORT, "from utils.checkpoint import unwrap\n"),
            after(
                EVALUATE,
                "        if device.index in (None, 0) and int(os.environ.get('RANK', 0)) == 0:\n"
                "            with torch.no_grad():\n"
                "                print(unwrap(model).eval()(next(iter(val_loader))[0]).shape)\n",
            ),
            before(IMPORT, "import os\n"),
        ],
        keeps=True,
        scripts=SCRIPTS[:2],
    ),
]

REFUSED = [
    Edit(
        "iterator",
        "an iterator that lives longer than an epoch",
        "`batches = iter(train_loader)`, before the epochs, for all of them",
        [
            ISLICE,
            (LOOP, LOOP.replace("in loader", "in islice(loader, 3)")),
            before(EPOCHS, "    batches = iter(train_loader)\n"),
            (CALL, CALL.replace("train_loader", "batches")),
        ],
        error=("iterator", "epoch"),
    ),
    Edit(
        "prefetch",
        "a wrapper that reads a batch ahead",
        "`for inputs, targets in prefetched(loader):` (the loader has processes for that)",
        [
            (
                LOOP,
                "    batches = iter(loader)\n"
                "    following = next(batches)\n"
                "    while following:\n"
                "        (inputs, targets), following = following, next(batches, None)\n",
            ),
            after(CHECK, "    model[2].p = 0.0  # its dropout would refuse that at once\n"),
        ],
        error=("state", "read"),
    ),
    Edit(
        "another loader",
        "a loader that is replaced, for example by one of larger images",
        "`train_loader = build_loader(...)`, within the epochs",
        [
            after(
                EPOCHS,
                "        train_loader = build_loader(\n"
                "            train_set, train_sampler, batch_size, device, cfg, train=True\n"
                "        )\n",
            )
        ],
        error=("state", "read"),
    ),
    Edit(
        "save now and then",
        "to save only some epochs (`--save-epochs` does that)",
        "`if epoch % 2: checkpoint.save(...)`",
        [
            (
                "        checkpoint.save(epoch + 1, is_best=metrics.is_best(*task.BEST))\n",
                "        if epoch % 2:\n"
                "            checkpoint.save(epoch + 1, is_best=metrics.is_best(*task.BEST))\n",
            )
        ],
        error=("checkpoint.save()", "--save-epochs"),
    ),
    Edit(
        "twice",
        "two passes over the training set in an epoch",
        "`for _ in range(2): train_one_epoch(...)`",
        [(TRAIN, 2 * TRAIN)],
        error=("checkpoint.save()", "each pass"),
    ),
    Edit(
        "from the start",
        "to begin a resumed run with the first epoch",
        "`for epoch in range(cfg.epochs):`",
        [(EPOCHS, EPOCHS.replace("start_epoch, ", ""))],
        error=("epoch 0 was over", "checkpoint.load()"),
    ),
    Edit(
        "renamed",
        "an entry of `state` that is renamed, added or removed, when a run is resumed",
        '`"rows": metrics`',
        [(STATE, '        "rows": metrics,\n')],
        error=("metrics", "rows"),
    ),
    Edit(
        "no state",
        "an entry of `state` without `state_dict()` and `load_state_dict()`",
        '`"best": 0.0`',
        [after(STATE, '        "best": 0.0,\n')],
        error=("best", "load_state_dict"),
    ),
]
SAMPLERS = {"train_1gpu.py": "EpochSampler(more_set, seed=cfg.seed)"}
SAMPLER = "DistributedSampler(more_set, seed=cfg.seed, drop_last=True)"


def edited(script, edit, task):
    """The text of a script with an edit, and with a different task."""
    text, count = ANY_TASK_LINE.subn(f"import {task} as task", (ROOT / script).read_text("utf-8"))
    assert count == 1
    sampler = SAMPLERS.get(script, SAMPLER)
    changes = [(old, new.replace("{sampler}", sampler)) for old, new in edit.changes]
    return changed(text, changes, f"{edit.name} in {script}")


def table():
    """The edits that keep the promise."""
    rows = [[edit.what, edit.how, "yes" if edit.keeps else ""] for edit in EDITS]
    return markdown_table(["to", "write", "same weights as without the edit"], rows)


def refused_table():
    """The edits that are refused."""
    rows = [[edit.what, edit.how, f"`{' ... '.join(edit.error)}`"] for edit in REFUSED]
    return markdown_table(["edit", "such as", "words of the error"], rows)
