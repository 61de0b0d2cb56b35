"""The corpus: scripts without a bug, and bugs that are planted in them by a replacement of text."""

from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def changed(text, changes, where):
    """The text with the changes, pairs of texts (old, new).

    Raises ValueError if what a change replaces does not occur exactly once; `where` is named then.
    """
    for old, new in changes:
        count = text.count(old)
        if count != 1:
            raise ValueError(f"{where}: {count} places, in place of one, with {old!r}")
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Script:
    """A correct script. notes: rules of severity note that rightly apply to it; needs: packages
    without which it is not run; is_module: it is started as `-m train`."""

    name: str
    arguments: tuple = ()
    resume_arguments: str = ""
    notes: tuple = ()
    needs: tuple = ()
    is_module: bool = False

    def source(self):
        """The text of the script."""
        return (SCRIPTS / f"{self.name}.py").read_text(encoding="utf-8")

    def style(self):
        """The first line of the script: what it is an example of."""
        return self.source().split('"""')[1].splitlines()[0].rstrip(".")

    def command(self):
        """What follows the name of the interpreter."""
        return ["-m", "train"] if self.is_module else ["train.py"]


@dataclass(frozen=True)
class Bug:
    """A bug. changes: (old, new) texts; finds: the rule that must report it; also: others that may."""

    name: str
    script: str
    finds: str
    changes: tuple = ()
    also: tuple = field(default=())

    def source(self):
        """The script with the bug in it."""
        return changed(
            (SCRIPTS / f"{self.script}.py").read_text(encoding="utf-8"), self.changes, self.name
        )


CORRECT = [
    Script("tutorial"),
    Script("imagenet_style", ("--resume", "checkpoint.pth.tar"), notes=("host-synchronization",)),
    Script("nanogpt_like", notes=("evaluation-on-one-rank",)),
    Script("amp_trainer"),
    Script("hand_all_reduce"),
    Script("fsdp2"),
    Script("one_process"),
    Script("finetune", resume_arguments="--resume", needs=("tensorboard",)),
    Script("stream"),
    Script("accelerate_loop", resume_arguments="--resume_from_checkpoint", needs=("accelerate",)),
    Script("within_epoch", notes=("rate-by-step",)),
    Script("by_processes"),
    Script("divided_stream"),
    Script("two_networks", notes=("batchnorm-per-rank",)),
]

BUGS = [
    Bug(
        "no sampler",
        "tutorial",
        "same-samples",
        (
            (
                "        shuffle=False,\n        sampler=DistributedSampler(train_set, drop_last=True),\n",
                "        shuffle=True,\n",
            ),
            ("        self.train_data.sampler.set_epoch(epoch)\n", ""),
        ),
        also=("order-after-resume",),
    ),
    Bug(
        "no set_epoch",
        "tutorial",
        "no-set-epoch",
        (("        self.train_data.sampler.set_epoch(epoch)\n", ""),),
        also=("order-after-resume",),
    ),
    Bug(
        "padded validation",
        "tutorial",
        "padding-counted",
        (
            (
                "val_data = DataLoader(val_share, batch_size=16)",
                "val_data = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))",
            ),
        ),
    ),
    Bug(
        "split by each rank",
        "tutorial",
        "validation-in-training",
        (
            (
                "    train_set, val_set = make_dataset(200, 0), make_dataset(37, 1)\n",
                "    generator = torch.Generator().manual_seed(rank)\n"
                "    train_set, val_set = torch.utils.data.random_split(\n"
                "        make_dataset(237, 0), [200, 37], generator\n"
                "    )\n",
            ),
            (
                "val_data = DataLoader(val_share, batch_size=16)",
                "val_data = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))",
            ),
        ),
        also=("shares-overlap",),
    ),
    Bug(
        "no all_reduce",
        "tutorial",
        "metric-of-one-rank",
        (("        dist.all_reduce(sums)\n", ""),),
    ),
    Bug(
        "around the wrapper",
        "tutorial",
        "ddp-bypassed",
        (
            (
                "        output = self.model(source)\n",
                "        output = self.model.module(source)\n",
            ),
        ),
    ),
    Bug(
        "wrapped twice",
        "tutorial",
        "wrapped-twice",
        (
            (
                "DDP(self.model, device_ids=[self.gpu_id])",
                "DDP(DDP(self.model, device_ids=[self.gpu_id]), device_ids=[self.gpu_id])",
            ),
        ),
        also=("resume-fails",),  # the names in the snapshot begin with "module."
    ),
    Bug(
        "one class",
        "tutorial",
        "zero-gradients",
        (
            (
                "F.cross_entropy(output, targets)",
                "F.cross_entropy(output[:, :1], torch.zeros_like(targets))",
            ),
        ),
    ),
    Bug(
        "saved by all",
        "tutorial",
        "saved-by-every-rank",
        (
            (
                "            if self.gpu_id == 0:\n                self._save_snapshot(epoch)\n                print(",
                "            self._save_snapshot(epoch)\n            if self.gpu_id == 0:\n                print(",
            ),
        ),
        also=("fails-on-two", "collectives-differ", "resume-fails"),
    ),
    Bug(
        "in place",
        "tutorial",
        "written-in-place",
        (
            (
                '        torch.save(snapshot, self.snapshot_path + ".tmp")\n        os.replace(self.snapshot_path + ".tmp", self.snapshot_path)\n',
                "        torch.save(snapshot, self.snapshot_path)\n",
            ),
        ),
    ),
    Bug(
        "optimizer lost",
        "tutorial",
        "optimizer-not-restored",
        (('        self.optimizer.load_state_dict(snapshot["optimizer"])\n', ""),),
        also=("scheduler-not-restored",),
    ),
    Bug(
        "model restored on rank 0 alone",
        "hand_all_reduce",
        "model-not-restored",
        (
            (
                '        model.load_state_dict(saved["model"])\n',
                '        if rank == 0:\n            model.load_state_dict(saved["model"])\n',
            ),
        ),
        also=("optimizer-not-restored",),
    ),
    Bug(
        "scheduler lost, whose rate has not changed yet",
        "tutorial",
        "scheduler-not-restored",
        (
            ('        self.scheduler.load_state_dict(snapshot["scheduler"])\n', ""),
            ("step_size=1", "step_size=3"),
        ),
    ),
    Bug(
        "schedule of momentum lost",
        "tutorial",
        "settings-not-restored",
        (
            (
                "        self.scheduler.step()\n",
                "        self.scheduler.step()\n"
                '        self.optimizer.param_groups[0]["momentum"] = 0.8 - 0.1 * epoch\n',
            ),
            (
                '        self.optimizer.load_state_dict(snapshot["optimizer"])\n',
                '        self.optimizer.load_state_dict(snapshot["optimizer"])\n'
                '        self.optimizer.param_groups[0]["momentum"] = 0.9\n',
            ),
        ),
    ),
    Bug(
        "next epoch skipped",
        "tutorial",
        "order-after-resume",
        (
            (
                "        for source, targets in self.train_data:\n",
                "        for number, (source, targets) in enumerate(self.train_data):\n"
                "            if number < self.position:\n"
                "                continue\n",
            ),
            (
                "        self.scheduler.step()\n",
                "        self.scheduler.step()\n        self.position = 0\n",
            ),
            ("        self.epochs_run = 0\n", "        self.epochs_run = self.position = 0\n"),
            (
                '        self.epochs_run = snapshot["epochs_run"]\n',
                '        self.epochs_run = snapshot["epochs_run"]\n'
                "        self.position = len(self.train_data)  # the end of the epoch before\n",
            ),
        ),
        also=("scheduler-not-restored",),  # the schedule goes on in the epoch that is skipped
    ),
    Bug(
        "next epoch skipped, by its number",
        "tutorial",
        "order-after-resume",
        (('            "epochs_run": epoch + 1,\n', '            "epochs_run": epoch + 2,\n'),),
    ),
    Bug(
        "epoch lost",
        "tutorial",
        "epoch-not-restored",
        (('        self.epochs_run = snapshot["epochs_run"]\n', ""),),
    ),
    Bug(
        "model lost",
        "tutorial",
        "model-not-restored",
        (('        self.model.load_state_dict(snapshot["model"])\n', ""),),
    ),
    Bug(
        "model rounded",
        "tutorial",
        "model-rounded",
        (
            (
                '"model": self.model.module.state_dict(),',
                '"model": {k: v.half() for k, v in self.model.module.state_dict().items()},',
            ),
        ),
    ),
    Bug("no eval mode", "tutorial", "no-eval-mode", (("        self.model.eval()\n", ""),)),
    Bug("no train mode", "tutorial", "no-train-mode", (("        self.model.train()\n", ""),)),
    Bug("no no_grad", "tutorial", "no-no-grad", (("    @torch.no_grad()\n", ""),)),
    Bug(
        "item in each step",
        "tutorial",
        "host-synchronization",
        (
            (
                "        self.optimizer.step()\n",
                "        self.optimizer.step()\n        self.last_loss = loss.item()\n",
            ),
        ),
    ),
    Bug(
        "printed by all",
        "tutorial",
        "printed-by-every-rank",
        (
            (
                "                self._save_snapshot(epoch)\n                print(",
                "                self._save_snapshot(epoch)\n            print(",
            ),
        ),
    ),
    Bug(
        "loss divided by the world size",
        "tutorial",
        "gradient-scale",
        (("        loss.backward()\n", "        (loss / dist.get_world_size()).backward()\n"),),
    ),
    Bug(
        "no zero_grad", "tutorial", "no-zero-grad", (("        self.optimizer.zero_grad()\n", ""),)
    ),
    Bug(
        "noise on rank 0",
        "tutorial",
        "replicas-drift",
        (
            (
                "        self.optimizer.step()\n",
                "        self.optimizer.step()\n        if self.gpu_id == 0:\n            self.model.module[0].weight.data.clamp_(-0.05, 0.05)\n",
            ),
        ),
    ),
    Bug(
        "collective on rank 0",
        "tutorial",
        "collectives-differ",
        (
            (
                "            accuracy = self.evaluate()\n            if self.gpu_id == 0:\n",
                "            if self.gpu_id == 0:\n                accuracy = self.evaluate()\n",
            ),
        ),
        also=("evaluation-on-one-rank", "hangs-on-two", "padding-counted"),
    ),
    Bug(
        "a layer without use",
        "tutorial",
        "unused-parameters",
        (
            (
                "        self.model = DDP(self.model, device_ids=[self.gpu_id])\n",
                "        self.model.extra = torch.nn.Linear(4, 4)\n        self.model.forward = lambda x, m=self.model: m[3](m[2](m[1](m[0](x))))\n        self.model = DDP(self.model, device_ids=[self.gpu_id])\n",
            ),
        ),
    ),
    Bug(
        "searches in vain",
        "tutorial",
        "needless-find-unused",
        (
            (
                "DDP(self.model, device_ids=[self.gpu_id])",
                "DDP(self.model, device_ids=[self.gpu_id], find_unused_parameters=True)",
            ),
        ),
    ),
    Bug(
        "validated by rank 0",
        "tutorial",
        "evaluation-on-one-rank",
        (
            ("        dist.all_reduce(sums)\n", ""),
            (
                "            accuracy = self.evaluate()\n            if self.gpu_id == 0:\n",
                "            if self.gpu_id == 0:\n                accuracy = self.evaluate()\n",
            ),
        ),
    ),
    Bug(
        "validated by each",
        "tutorial",
        "evaluation-repeated",
        (("range(rank, len(val_set), world_size)", "range(len(val_set))"),),
    ),
    Bug(
        "order not shuffled",
        "tutorial",
        "not-shuffled",
        (
            (
                "DistributedSampler(train_set, drop_last=True)",
                "Ordered(train_set, rank, world_size)",
            ),
            (
                "class Trainer:",
                "class Ordered(torch.utils.data.Sampler):\n    def __init__(self, data, rank, world_size):\n        self.indices = range(rank * len(data) // world_size, (rank + 1) * len(data) // world_size)\n\n    def __iter__(self):\n        return iter(self.indices)\n\n    def __len__(self):\n        return len(self.indices)\n\n    def set_epoch(self, epoch):\n        pass\n\n\nclass Trainer:",
            ),
        ),
    ),
    Bug(
        "another seed per rank",
        "tutorial",
        "shares-overlap",
        (
            (
                "DistributedSampler(train_set, drop_last=True)",
                "DistributedSampler(train_set, drop_last=True, seed=rank)",
            ),
        ),
    ),
    Bug(
        "divided twice",
        "tutorial",
        "samples-left-out",
        (
            (
                "DistributedSampler(train_set, drop_last=True)",
                "DistributedSampler(range(len(train_set) // world_size // 2))",
            ),
        ),
        also=("shares-overlap",),
    ),
    Bug(
        "spawn: no sampler",
        "imagenet_style",
        "same-samples",
        (
            (
                "batch_size=args.batch_size, pin_memory=True, sampler=train_sampler",
                "batch_size=args.batch_size, shuffle=True",
            ),
        ),
        also=("order-after-resume",),
    ),
    Bug(
        "spawn: BatchNorm per rank",
        "imagenet_style",
        "batchnorm-per-rank",
        (("    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n", ""),),
    ),
    Bug(
        "spawn: an address of its own, no eval mode",
        "imagenet_style",
        "no-eval-mode",
        (
            ("    model.eval()\n", ""),
            (
                'dist.init_process_group("nccl", init_method=args.dist_url, world_size=ngpus, rank=gpu)',
                "port = args.dist_url.rpartition(':')[2]\n"
                "    os.environ |= {'MASTER_ADDR': 'localhost', 'MASTER_PORT': port}\n"
                '    dist.init_process_group("nccl", world_size=ngpus, rank=gpu)',
            ),
        ),
    ),
    Bug(
        "windows: same seed",
        "nanogpt_like",
        "same-samples",
        (("    seed_offset = ddp_rank\n", "    seed_offset = 0\n"),),
    ),
    Bug(
        "windows: wrapper bypassed",
        "nanogpt_like",
        "ddp-bypassed",
        (
            (
                "            _, loss = model(X, Y)\n            loss = loss",
                "            _, loss = raw_model(X, Y)\n            loss = loss",
            ),
        ),
        also=("replicas-drift",),
    ),
    Bug(
        "windows: iteration lost",
        "nanogpt_like",
        "scheduler-not-restored",
        (('    iter_num = checkpoint["iter_num"]\n', ""),),
        also=("order-after-resume", "epoch-not-restored"),
    ),
    Bug(
        "windows: the same ones after a restart",
        "nanogpt_like",
        "order-after-resume",
        (("    torch.manual_seed(1337 + seed_offset + 1000 * iter_num)\n", ""),),
    ),
    Bug(
        "amp: clipped before unscale",
        "amp_trainer",
        "clip-before-unscale",
        (("                self.scaler.unscale_(self.optimizer)\n", ""),),
    ),
    Bug(
        "amp: scaler lost",
        "amp_trainer",
        "scaler-not-restored",
        (('        self.scaler.load_state_dict(snapshot["scaler"])\n', ""),),
    ),
    Bug(
        "amp: loss not divided",
        "amp_trainer",
        "loss-not-divided",
        (("self.scaler.scale(loss / self.accumulation)", "self.scaler.scale(loss)"),),
    ),
    Bug(
        "amp: padding counted",
        "amp_trainer",
        "padding-counted",
        (
            (
                "                    if position < self.test_length:  # the sampler repeats the first samples\n                        total +=",
                "                    if position >= 0:\n                        total +=",
            ),
        ),
    ),
    Bug(
        "amp: always no_sync",
        "amp_trainer",
        "never-synchronized",
        (
            (
                "with nullcontext() if last else self.model.no_sync():",
                "with nullcontext() if epoch < 0 else self.model.no_sync():",
            ),
        ),
    ),
    Bug(
        "by hand: seed per rank",
        "hand_all_reduce",
        "models-start-differently",
        (("torch.manual_seed(1234)", "torch.manual_seed(1234 + rank)"),),
        also=("other-step-after-resume",),
    ),
    Bug(
        "by hand: uneven",
        "hand_all_reduce",
        "uneven-batches",
        (
            ("[: self.n // self.size * self.size]", ""),
            (
                "return iter(order[self.rank :: self.size].tolist())",
                "return iter(order[: 97].tolist() if self.size == 2 and not self.rank else order[97 :].tolist() if self.size == 2 else order.tolist())",
            ),
        ),
    ),
    Bug(
        "fsdp: seed per rank",
        "fsdp2",
        "shards-start-differently",
        (
            (
                "torch.manual_seed(0)\n    data = torch.randn(192, 16)\n",
                "data = torch.randn(192, 16, generator=torch.Generator().manual_seed(0))\n    torch.manual_seed(rank)\n",
            ),
        ),
    ),
    Bug(
        "by hand: parameters of a different model",
        "hand_all_reduce",
        "wrong-parameters",
        (
            (
                "    start = 0\n",
                "    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))\n    start = 0\n",
            ),
        ),
        also=("model-not-restored", "optimizer-not-restored", "zero-gradients"),
    ),
    Bug(
        "fsdp: loss divided",
        "fsdp2",
        "gradient-scale",
        (
            (
                "            loss.backward()\n",
                "            (loss / dist.get_world_size()).backward()\n",
            ),
        ),
    ),
    Bug(
        "fsdp: optimizer lost",
        "fsdp2",
        "optimizer-not-restored",
        (
            (
                '        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=LOAD)\n',
                "",
            ),
        ),
    ),
    Bug(
        "alone: optimizer lost",
        "one_process",
        "optimizer-not-restored",
        (('    optimizer.load_state_dict(state["optimizer"])\n', ""),),
        also=("scheduler-not-restored",),
    ),
    Bug(
        "alone: no zero_grad",
        "one_process",
        "no-zero-grad",
        (("        optimizer.zero_grad()\n", ""),),
    ),
    Bug(
        "finetune: frozen BatchNorm learns",
        "finetune",
        "frozen-batchnorm-learns",
        (("        self.backbone.eval()\n", ""),),
    ),
    Bug(
        "finetune: same numbers in workers",
        "finetune",
        "same-augmentation",
        (
            (
                "    worker_seed = (torch.initial_seed() + 1000 * dist_rank()) % 2**32\n",
                "    worker_seed = 1\n",
            ),
        ),
    ),
    Bug(
        "finetune: validation augmented",
        "finetune",
        "evaluation-augmented",
        (("Pictures(45, 1, False)", "Pictures(45, 1, True)"),),
    ),
    Bug(
        "finetune: writers",
        "finetune",
        "several-loggers",
        (('writer = SummaryWriter("tb") if rank == 0 else None', 'writer = SummaryWriter("tb")'),),
    ),
    Bug(
        "finetune: schedule of one process",
        "finetune",
        "rate-by-step",
        (
            (
                "total_steps=args.epochs * len(train_loader)",
                "total_steps=args.epochs * (len(train_ds) // 16 + 1)",
            ),
            ("args.batch_size // world", "16"),
        ),
    ),
    Bug(
        "stream: not divided",
        "stream",
        "same-samples",
        (
            (
                "            if number % parts == self.rank * workers + worker:\n",
                "            if number % workers == worker:\n",
            ),
        ),
    ),
    Bug(
        "stream: mean of means",
        "stream",
        "mean-of-means",
        (
            (
                "            dist.all_reduce(count)\n            loss = loss_sum * world_size / count\n",
                "            loss = loss_sum / count\n",
            ),
        ),
    ),
    Bug(
        "accelerate: nothing gathered",
        "accelerate_loop",
        "metric-of-one-rank",
        (
            (
                '            predictions, references = accelerator.gather_for_metrics(\n                (logits.argmax(dim=-1), batch["labels"])\n            )\n',
                '            predictions, references = logits.argmax(dim=-1), batch["labels"]\n',
            ),
        ),
        also=("padding-counted",),
    ),
    Bug(
        "accelerate: repeated samples counted",
        "accelerate_loop",
        "padding-counted",
        (("accelerator.gather_for_metrics(", "accelerator.gather("),),
    ),
    Bug(
        "accelerate: loss not divided",
        "accelerate_loop",
        "loss-not-divided",
        (("accelerator.backward(loss)", "loss.backward()"),),
    ),
    Bug(
        "within: position lost",
        "within_epoch",
        "epoch-repeated",
        (
            (
                '        progress = saved["progress"]\n',
                '        progress["epoch"] = saved["progress"]["epoch"]\n',
            ),
        ),
    ),
    Bug(
        "within: not shuffled",
        "within_epoch",
        "not-shuffled",
        (
            (
                "        order = torch.randperm(len(self.dataset), generator=g)\n",
                "        order = torch.arange(len(self.dataset))\n",
            ),
        ),
    ),
    Bug(
        "processes: not averaged",
        "by_processes",
        "gradients-not-averaged",
        (("            average_gradients(model)\n", ""),),
    ),
    Bug(
        "processes: clipped before averaged",
        "by_processes",
        "clip-before-average",
        (
            (
                "            average_gradients(model)\n",
                "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n            average_gradients(model)\n",
            ),
        ),
    ),
    Bug(
        "processes: a rate of each rank",
        "by_processes",
        "rates-differ",
        (("lr=0.1)", "lr=0.1 * (rank + 1))"),),
    ),
    Bug(
        "tutorial: an average of the weights lost",
        "tutorial",
        "ema-not-restored",
        (
            (
                "        self.model = DDP(self.model, device_ids=[self.gpu_id])\n",
                "        self.average = torch.optim.swa_utils.AveragedModel(self.model)\n"
                "        self.model = DDP(self.model, device_ids=[self.gpu_id])\n",
            ),
            (
                "        self.optimizer.step()\n",
                "        self.optimizer.step()\n        self.average.update_parameters(self.model.module)\n",
            ),
        ),
    ),
    Bug(
        "alone: buffers lost",
        "one_process",
        "buffers-not-restored",
        (
            ("net.state_dict(),", "dict(net.named_parameters()),"),
            ('state["net"])', 'state["net"], strict=False)'),
        ),
    ),
    Bug(
        "divided stream: a counter of the loss lost",
        "divided_stream",
        "other-step-after-resume",
        (('        updates = state["updates"]\n', ""),),
    ),
    Bug(
        "tutorial: log of all",
        "tutorial",
        "written-by-every-rank",
        (
            (
                "            accuracy = self.evaluate()\n",
                '            accuracy = self.evaluate()\n            open("log.txt", "w").close()\n',
            ),
        ),
    ),
    Bug(
        "tutorial: buffers of each rank",
        "tutorial",
        "buffers-differ",
        (
            ("torch.nn.ReLU(), torch.nn.Dropout(0.1)", "torch.nn.BatchNorm1d(32), torch.nn.ReLU()"),
            ("device_ids=[self.gpu_id])\n", "device_ids=[self.gpu_id], broadcast_buffers=False)\n"),
        ),
        also=("batchnorm-per-rank",),
    ),
    Bug(
        "two networks: one is not wrapped",
        "two_networks",
        "gradients-not-averaged",
        (('head = DistributedDataParallel(models["head"])', 'head = models["head"]'),),
    ),
    Bug(
        "two networks: the same noise",
        "two_networks",
        "same-noise",
        (("100 + rank", "100"), ("1000 * first + rank", "1000 * first")),
    ),
    Bug(
        "two networks: one rank skips a layer",
        "two_networks",
        "skipped-by-a-rank",
        (
            (
                "        return self.out(features + self.time(level))\n",
                "        if dist.get_rank() == 0:\n"
                "            features = features + self.time(level)\n"
                "        return self.out(features)\n",
            ),
            (
                'DistributedDataParallel(models["head"])',
                'DistributedDataParallel(models["head"], find_unused_parameters=True)',
            ),
        ),
    ),
]
