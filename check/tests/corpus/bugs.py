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
    Script("gan"),
    Script("one_process"),
    Script("finetune", resume_arguments="--resume", needs=("tensorboard",)),
    Script("stream"),
    Script("accelerate_loop", resume_arguments="--resume_from_checkpoint", needs=("accelerate",)),
    Script("fabric_loop", needs=("lightning",)),
    Script("hf_trainer", notes=("rate-by-step",), needs=("transformers", "accelerate")),
    Script("contrastive"),
    Script("distillation", notes=("buffers-differ",)),
    Script("detection", notes=("rate-by-step",)),
    Script("imbalanced"),
    Script("join_uneven"),
    Script("fsdp_dcp"),
    Script("tensor_parallel"),
    Script("pipeline"),
    Script("lora", needs=("safetensors",), is_module=True),
    Script("wgan"),
    Script(
        "timm_like",
        ("--resume", "output/last.pth.tar"),
        notes=("batchnorm-per-rank", "host-synchronization"),
    ),
    Script("lbfgs"),
    Script("reinforce", needs=("tensorboard",)),
    Script("within_epoch", notes=("rate-by-step",)),
    Script("by_slices"),
    Script("own_files"),
    Script("by_processes"),
    Script("config_trainer", ("optim.lr=0.002", "data.batch_size=10")),
    Script("graph"),
    Script("generator_loader"),
    Script("divided_stream"),
    Script("compiled_amp"),
    Script("accumulate_no_sync"),
    Script("fsdp2_full_state", notes=("rate-by-step",)),
    Script("c10d_flat"),
    Script("sharpness"),
    Script("two_networks", notes=("batchnorm-per-rank",)),
    Script("counted_batches"),
]

BUGS = [
    Bug(
        "counted batches: dropout in the evaluation",
        "counted_batches",
        "no-eval-mode",
        (("    model.eval()\n", ""),),
    ),
    Bug(
        "counted batches: evaluates with gradients",
        "counted_batches",
        "no-no-grad",
        (("    with torch.no_grad():\n", "    if epoch:\n"),),
    ),
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
        "counted batches, no all_reduce",
        "tutorial",
        "metric-of-one-rank",
        (
            ("        dist.all_reduce(sums)\n", ""),
            (
                "        for source, targets in self.train_data:\n",
                "        batches = iter(self.train_data)\n"
                "        for _ in range(len(self.train_data)):\n"
                "            source, targets = next(batches)\n",
            ),
        ),
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
        "optimizer restored on rank 0 alone",
        "tutorial",
        "optimizer-not-restored",
        (
            (
                '        self.optimizer.load_state_dict(snapshot["optimizer"])\n',
                '        if self.gpu_id == 0:\n            self.optimizer.load_state_dict(snapshot["optimizer"])\n',
            ),
        ),
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
        "scheduler lost",
        "tutorial",
        "scheduler-not-restored",
        (
            ('        self.scheduler.load_state_dict(snapshot["scheduler"])\n', ""),
            (
                '        self.optimizer.load_state_dict(snapshot["optimizer"])\n',
                '        self.optimizer.load_state_dict(snapshot["optimizer"])\n        self.optimizer.param_groups[0]["lr"] = 0.05\n',
            ),
        ),
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
        "optimizer lost, sharded by ZeRO",
        "tutorial",
        "optimizer-not-restored",
        (
            (
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)\n",
                "    from torch.distributed.optim import ZeroRedundancyOptimizer\n\n"
                "    optimizer = ZeroRedundancyOptimizer(\n"
                "        model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9\n"
                "    )\n",
            ),
            ('            "optimizer": self.optimizer.state_dict(),\n', ""),
            ('        self.optimizer.load_state_dict(snapshot["optimizer"])\n', ""),
        ),
        also=("scheduler-not-restored",),
    ),
    Bug(
        "epoch one too small",
        "tutorial",
        "epoch-not-restored",
        (('"epochs_run": epoch + 1', '"epochs_run": epoch'),),
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
        "spawn: no set_epoch",
        "imagenet_style",
        "no-set-epoch",
        (("        train_sampler.set_epoch(epoch)\n", ""),),
        also=("order-after-resume",),
    ),
    Bug(
        "spawn: BatchNorm per rank",
        "imagenet_style",
        "batchnorm-per-rank",
        (("    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n", ""),),
    ),
    Bug(
        "spawn: saved by all",
        "imagenet_style",
        "saved-by-every-rank",
        (
            (
                '        if gpu == 0:\n            print(f" * epoch',
                '        if gpu >= 0:\n            print(f" * epoch',
            ),
        ),
        also=("fails-on-two", "collectives-differ", "resume-fails"),
    ),
    Bug(
        "spawn: meter of one rank",
        "imagenet_style",
        "metric-of-one-rank",
        (("    top1.all_reduce()\n", ""),),
    ),
    Bug(
        "spawn: padded validation",
        "imagenet_style",
        "padding-counted",
        (
            (
                "    val_dataset = Subset(val_dataset, range(gpu, len(val_dataset), ngpus))\n    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=args.batch_size)\n",
                "    val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False)\n    val_loader = torch.utils.data.DataLoader(\n        val_dataset, batch_size=args.batch_size, sampler=val_sampler\n    )\n",
            ),
        ),
    ),
    Bug(
        "spawn: in place",
        "imagenet_style",
        "written-in-place",
        (
            (
                '            torch.save(state, "checkpoint.pth.tar.new")\n            os.rename("checkpoint.pth.tar.new", "checkpoint.pth.tar")\n',
                '            torch.save(state, "checkpoint.pth.tar")\n',
            ),
        ),
    ),
    Bug(
        "spawn: optimizer lost",
        "imagenet_style",
        "optimizer-not-restored",
        (('        optimizer.load_state_dict(checkpoint["optimizer"])\n', ""),),
        also=("scheduler-not-restored",),
    ),
    Bug(
        "spawn: epoch lost",
        "imagenet_style",
        "epoch-not-restored",
        (('        start_epoch = checkpoint["epoch"]\n', ""),),
    ),
    Bug("spawn: no eval mode", "imagenet_style", "no-eval-mode", (("    model.eval()\n", ""),)),
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
        "windows: never synchronized",
        "nanogpt_like",
        "never-synchronized",
        (
            (
                "micro_step == gradient_accumulation_steps - 1",
                "micro_step == gradient_accumulation_steps",
            ),
        ),
    ),
    Bug(
        "windows: optimizer lost",
        "nanogpt_like",
        "optimizer-not-restored",
        (('    optimizer.load_state_dict(checkpoint["optimizer"])\n', ""),),
    ),
    Bug(
        "windows: loss not divided",
        "nanogpt_like",
        "loss-not-divided",
        (("            loss = loss / gradient_accumulation_steps\n", ""),),
    ),
    Bug(
        "windows: saved by all",
        "nanogpt_like",
        "saved-by-every-rank",
        (("iter_num > 0 and master_process:", "iter_num > 0:"),),
        also=("fails-on-two", "collectives-differ", "resume-fails"),
    ),
    Bug(
        "windows: iteration lost",
        "nanogpt_like",
        "scheduler-not-restored",
        (('    iter_num = checkpoint["iter_num"]\n', ""),),
        also=("order-after-resume",),
    ),
    Bug(
        "windows: the same ones after a restart",
        "nanogpt_like",
        "order-after-resume",
        (("    torch.manual_seed(1337 + seed_offset + 1000 * iter_num)\n", ""),),
    ),
    Bug(
        "windows: no zero_grad",
        "nanogpt_like",
        "no-zero-grad",
        (("    optimizer.zero_grad(set_to_none=True)\n", ""),),
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
        "amp: split per rank",
        "amp_trainer",
        "validation-in-training",
        (
            (
                "    train_set, test_set = torch",
                '    torch.manual_seed(3 + int(os.environ["RANK"]))\n    train_set, test_set = torch',
            ),
        ),
        also=("shares-overlap", "padding-counted", "evaluation-repeated"),
    ),
    Bug(
        "amp: loss divided by ranks",
        "amp_trainer",
        "gradient-scale",
        (
            (
                "self.scaler.scale(loss / self.accumulation)",
                "self.scaler.scale(loss / self.accumulation / self.world)",
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
        "amp: in place",
        "amp_trainer",
        "written-in-place",
        (
            (
                '        with open("snapshot.pth.part", "wb") as f:\n            torch.save(snapshot, f)\n        os.replace("snapshot.pth.part", "snapshot.pth")\n',
                '        with open("snapshot.pth", "wb") as f:\n            torch.save(snapshot, f)\n',
            ),
        ),
    ),
    Bug(
        "by hand: summed",
        "hand_all_reduce",
        "gradient-scale",
        (("        param.grad.data /= size\n", ""),),
    ),
    Bug(
        "by hand: not averaged",
        "hand_all_reduce",
        "gradients-not-averaged",
        (("            average_gradients(model)\n", ""),),
    ),
    Bug(
        "by hand: seed per rank",
        "hand_all_reduce",
        "models-start-differently",
        (("torch.manual_seed(1234)", "torch.manual_seed(1234 + rank)"),),
        also=("other-step-after-resume",),
    ),
    Bug(
        "by hand: order of each rank",
        "hand_all_reduce",
        "shares-overlap",
        (("manual_seed(self.epoch)", "manual_seed(self.epoch * 10 + self.rank)"),),
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
        "by hand: accuracy of one rank",
        "hand_all_reduce",
        "metric-of-one-rank",
        (
            ("        dist.all_reduce(correct)\n", ""),
            (
                "            for i in range(rank, len(test_set), size):\n                x, y = test_set[i]\n                correct += model(x[None]).argmax() == y\n",
                "            for x, y in DataLoader(\n                torch.utils.data.Subset(test_set, range(rank, len(test_set), size)), 8\n            ):\n                correct += (model(x).argmax(1) == y).sum()\n",
            ),
        ),
    ),
    Bug(
        "by hand: epoch lost",
        "hand_all_reduce",
        "epoch-not-restored",
        (('        start = saved["epoch"]\n', ""),),
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
        "fsdp: no set_epoch",
        "fsdp2",
        "no-set-epoch",
        (("        sampler.set_epoch(epoch)\n", ""),),
        also=("order-after-resume",),
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
        "gan: one wrapper bypassed",
        "gan",
        "ddp-bypassed",
        (("        fake = netG(noise)\n", "        fake = netG.module(noise)\n"),),
    ),
    Bug("gan: no zero_grad", "gan", "no-zero-grad", (("        netG.zero_grad()\n", ""),)),
    Bug(
        "gan: no sampler",
        "gan",
        "same-samples",
        (("batch_size=16, sampler=sampler)", "batch_size=16)"),),
        also=("not-shuffled",),
    ),
    Bug(
        "gan: optimizer lost",
        "gan",
        "optimizer-not-restored",
        (
            ('    optimizerD.load_state_dict(ckpt["optimizerD"])\n    start', "    start"),
            ('    optimizerG.load_state_dict(ckpt["optimizerG"])\n', ""),
        ),
    ),
    Bug("alone: no eval mode", "one_process", "no-eval-mode", (("    net.eval()\n", ""),)),
    Bug(
        "alone: not shuffled",
        "one_process",
        "not-shuffled",
        (("batch_size=32, shuffle=True", "batch_size=32"),),
    ),
    Bug(
        "alone: optimizer lost",
        "one_process",
        "optimizer-not-restored",
        (('    optimizer.load_state_dict(state["optimizer"])\n', ""),),
        also=("scheduler-not-restored",),
    ),
    Bug(
        "alone: in place",
        "one_process",
        "written-in-place",
        (
            (
                '    torch.save(state, "net.pth.tmp")\n    os.replace("net.pth.tmp", "net.pth")\n',
                '    torch.save(state, "net.pth")\n',
            ),
        ),
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
        "finetune: same numbers on ranks",
        "finetune",
        "same-augmentation",
        (("(torch.initial_seed() + 1000 * dist_rank()) % 2**32", "torch.initial_seed() % 2**32"),),
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
        "finetune: scheduler lost",
        "finetune",
        "scheduler-not-restored",
        (('        scheduler.load_state_dict(state["scheduler"])\n', ""),),
        also=("settings-not-restored",),
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
        "stream: uneven",
        "stream",
        "uneven-batches",
        (
            (
                "if number % parts == self.rank * workers + worker:",
                "if number % (parts + 1) in (self.rank * workers + worker, parts + (self.rank if self.rank else 0)):",
            ),
        ),
        also=("hangs-on-two", "fails-on-two", "collectives-differ"),
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
        "accelerate: order starts anew",
        "accelerate_loop",
        "order-after-resume",
        (("        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),\n", ""),),
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
        "accelerate: wrapper bypassed",
        "accelerate_loop",
        "ddp-bypassed",
        (
            (
                'logits = model(batch["input_ids"], batch["attention_mask"])\n                loss',
                'logits = accelerator.unwrap_model(model)(batch["input_ids"], batch["attention_mask"])\n                loss',
            ),
        ),
        also=("replicas-drift",),
    ),
    Bug(
        "fabric: optimizer not in the state",
        "fabric_loop",
        "optimizer-not-restored",
        (('"optimizer": optimizer, "scheduler"', '"scheduler"'),),
        also=("scheduler-not-restored",),
    ),
    Bug(
        "fabric: order starts anew",
        "fabric_loop",
        "epoch-not-restored",
        (('        sampler.first_epoch = state["epoch"]\n', ""),),
        also=("order-after-resume",),
    ),
    Bug(
        "fabric: never synchronized",
        "fabric_loop",
        "ddp-bypassed",
        (("enabled=accumulating)", "enabled=True)"),),
        also=("replicas-drift",),
    ),
    Bug(
        "fabric: nothing reduced",
        "fabric_loop",
        "metric-of-one-rank",
        (('        hits = fabric.all_reduce(hits, reduce_op="sum")\n', ""),),
    ),
    Bug(
        "trainer: data not skipped",
        "hf_trainer",
        "epoch-repeated",
        (("        report_to=[],\n", "        report_to=[],\n        ignore_data_skip=True,\n"),),
    ),
    Bug(
        "trainer: mean times the number of processes",
        "hf_trainer",
        "gradient-scale",
        (
            (
                "        average_tokens_across_devices=False,  # the loss of this model is a mean already\n",
                "",
            ),
        ),
    ),
    Bug(
        "trainer: searches in vain",
        "hf_trainer",
        "needless-find-unused",
        (("ddp_find_unused_parameters=False", "ddp_find_unused_parameters=True"),),
    ),
    Bug(
        "contrastive: gradients of the own rank",
        "contrastive",
        "gradient-scale",
        (("        dist.all_reduce(grads)\n", ""),),
        also=("mean-of-means",),
    ),
    Bug(
        "contrastive: same views on ranks",
        "contrastive",
        "same-augmentation",
        (
            (
                "torch.manual_seed(1000 * (epoch + 1) + rank)",
                "torch.manual_seed(1000 * (epoch + 1))",
            ),
        ),
    ),
    Bug(
        "contrastive: optimizer lost",
        "contrastive",
        "optimizer-not-restored",
        (('        optimizer.load_state_dict(state["optimizer"])\n', ""),),
    ),
    Bug(
        "distillation: teacher learns statistics",
        "distillation",
        "frozen-batchnorm-learns",
        (
            ("mlp(64).eval().requires_grad_(False)", "mlp(64).requires_grad_(False)"),
            (
                "            with torch.no_grad():\n                targets",
                "            with torch.no_grad():\n                teacher.train()\n                targets",
            ),
        ),
    ),
    Bug(
        "distillation: batches not dealt out",
        "distillation",
        "same-samples",
        (("batches[self.rank : usable : self.num_replicas]", "batches[:usable]"),),
    ),
    Bug(
        "distillation: no eval mode",
        "distillation",
        "no-eval-mode",
        (("    model.eval()\n    stats", "    stats"),),
    ),
    Bug(
        "detection: results of one rank",
        "detection",
        "metric-of-one-rank",
        (("    dist.all_gather_object(merged, distances)\n", "    merged = [distances]\n"),),
    ),
    Bug(
        "detection: saved by all",
        "detection",
        "written-by-every-rank",
        (
            (
                '        if rank == 0:\n            logger.info("epoch %d test',
                '        if rank >= 0:\n            logger.info("epoch %d test',
            ),
        ),
        also=("saved-by-every-rank", "fails-on-two", "collectives-differ", "resume-fails"),
    ),
    Bug(
        "detection: in place",
        "detection",
        "written-in-place",
        (
            ('open("model_new.pkl", "wb")', 'open("model_last.pkl", "wb")'),
            ('            os.replace("model_new.pkl", "model_last.pkl")\n', ""),
        ),
    ),
    Bug(
        "detection: groups of each rank",
        "detection",
        "shares-overlap",
        (("manual_seed(self.epoch)", "manual_seed(self.epoch + 100 * self.rank)"),),
    ),
    Bug(
        "detection: optimizer lost",
        "detection",
        "optimizer-not-restored",
        (('        optimizer.load_state_dict(checkpoint["optimizer"])\n', ""),),
        also=("scheduler-not-restored",),
    ),
    Bug(
        "imbalanced: same draws",
        "imbalanced",
        "same-samples",
        (("drawn[self.rank :: self.world_size]", "drawn[: len(self)]"),),
    ),
    Bug(
        "imbalanced: stays in evaluation mode",
        "imbalanced",
        "no-train-mode",
        (("        self.model.train()\n", ""),),
    ),
    Bug(
        "imbalanced: scaler lost",
        "imbalanced",
        "scaler-not-restored",
        (('        self.scaler.load_state_dict(state["scaler"])\n', ""),),
    ),
    Bug(
        "imbalanced: one rank stops",
        "imbalanced",
        "collectives-differ",
        (
            ("        dist.broadcast(stop, src=0)\n", ""),
            ("PATIENCE = 20", "PATIENCE = 0"),
        ),
        also=("hangs-on-two", "fails-on-two"),
    ),
    Bug(
        "join: without Join",
        "join_uneven",
        "uneven-batches",
        (("        with Join([model]):\n", "        if model.training:\n"),),
        also=("hangs-on-two", "fails-on-two", "collectives-differ"),
    ),
    Bug(
        "join: all files on all ranks",
        "join_uneven",
        "same-samples",
        (("files[rank::world_size]", "files"),),
    ),
    Bug(
        "sharded: loss not divided",
        "fsdp_dcp",
        "loss-not-divided",
        (("targets.flatten()) / ACCUM", "targets.flatten())"),),
    ),
    Bug(
        "sharded: same windows",
        "fsdp_dcp",
        "same-samples",
        (("order[rank::world_size]", "order"),),
    ),
    Bug(
        "sharded: step lost",
        "fsdp_dcp",
        "scheduler-not-restored",
        (('        self.step = state["step"]\n', ""),),
        also=("order-after-resume",),
    ),
    Bug(
        "tensor: optimizer lost",
        "tensor_parallel",
        "optimizer-not-restored",
        (
            (
                '        set_state_dict(\n            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]\n        )\n',
                '        set_model_state_dict(model, state["model"])\n        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)\n',
            ),
            (
                "import get_state_dict, set_state_dict",
                "import get_state_dict, set_model_state_dict",
            ),
        ),
    ),
    Bug(
        "tensor: batches of each rank",
        "tensor_parallel",
        "different-samples",
        (("generator.manual_seed(epoch)", "generator.manual_seed(epoch + 10 * dist.get_rank())"),),
        also=("divided-model-differs",),
    ),
    Bug(
        "pipeline: batches of each rank",
        "pipeline",
        "different-samples",
        (("manual_seed(epoch)", "manual_seed(epoch + 10 * rank)"),),
    ),
    Bug(
        "tensor: no zero_grad",
        "tensor_parallel",
        "no-zero-grad",
        (("            optimizer.zero_grad()\n", ""),),
        also=("other-step-after-resume",),
    ),
    Bug(
        "pipeline: one file for all stages",
        "pipeline",
        "saved-by-every-rank",
        (('path = f"stage{rank}.pt"', 'path = "stage0.pt"'),),
        also=("fails-on-two", "collectives-differ", "resume-fails"),
    ),
    Bug(
        "pipeline: no zero_grad",
        "pipeline",
        "no-zero-grad",
        (("            optimizer.zero_grad()\n", ""),),
    ),
    Bug(
        "pipeline: optimizer lost",
        "pipeline",
        "optimizer-not-restored",
        (('        optimizer.load_state_dict(saved["optimizer"])\n', ""),),
    ),
    Bug(
        "lora: mean of means",
        "lora",
        "mean-of-means",
        (
            ("        dist.all_reduce(count)\n", ""),
            ("total * world_size / count", "total / count"),
        ),
    ),
    Bug(
        "lora: position lost",
        "lora",
        "order-after-resume",
        (("position=step * batch_size", "position=0"),),
    ),
    Bug(
        "lora: saved by all",
        "lora",
        "saved-by-every-rank",
        (
            ("if step % 4 == 0 and rank == 0:", "if step % 4 == 0:"),
            ("new.mkdir(parents=True)", "new.mkdir(parents=True, exist_ok=True)"),
        ),
        also=("fails-on-two", "collectives-differ", "resume-fails"),
    ),
    Bug(
        "wgan: critic not averaged",
        "wgan",
        "gradients-not-averaged",
        (("            reduce_gradients(critic)\n", ""),),
        also=("replicas-drift",),
    ),
    Bug(
        "wgan: no zero_grad",
        "wgan",
        "no-zero-grad",
        (("            optim_c.zero_grad()\n", ""),),
    ),
    Bug(
        "wgan: no set_epoch",
        "wgan",
        "no-set-epoch",
        (("        sampler.set_epoch(epoch)\n", ""),),
        also=("order-after-resume",),
    ),
    Bug(
        "timm: same crops on ranks",
        "timm_like",
        "same-augmentation",
        (("torch.manual_seed(42 + rank)", "torch.manual_seed(42)"),),
    ),
    Bug(
        "timm: in place",
        "timm_like",
        "written-in-place",
        (
            (
                "        torch.save(state, temporary)\n        os.replace(temporary, last)\n",
                "        torch.save(state, last)\n",
            ),
        ),
    ),
    Bug(
        "lbfgs: gradients of one rank",
        "lbfgs",
        "replicas-drift",
        (("                dist.all_reduce(flat)\n", ""),),
        also=("gradients-not-averaged",),
    ),
    Bug(
        "lbfgs: saved by all",
        "lbfgs",
        "written-by-every-rank",
        (("if rank == 0 and (iteration", "if (iteration"),),
        also=(
            "saved-by-every-rank",
            "fails-on-two",
            "collectives-differ",
            "resume-fails",
            "hangs-on-two",
        ),
    ),
    Bug(
        "lbfgs: in place",
        "lbfgs",
        "written-in-place",
        (
            ('open(OUT + ".tmp", "wb")', 'open(OUT, "wb")'),
            ('            os.replace(OUT + ".tmp", OUT)\n', ""),
        ),
    ),
    Bug(
        "reinforce: wrapper bypassed",
        "reinforce",
        "ddp-bypassed",
        (("logits, values = ddp(observations)", "logits, values = model(observations)"),),
        also=("replicas-drift",),
    ),
    Bug(
        "reinforce: one file for all ranks",
        "reinforce",
        "saved-by-every-rank",
        (
            (
                'torch.save(torch.get_rng_state(), f"rng-{rank}-{update}.pt")',
                'torch.save(torch.get_rng_state(), f"rng-{update}.pt")',
            ),
            ('torch.load(f"rng-{rank}-{update}.pt"', 'torch.load(f"rng-{update}.pt"'),
        ),
        also=("fails-on-two", "collectives-differ", "resume-fails", "same-samples"),
    ),
    Bug(
        "reinforce: same episodes",
        "reinforce",
        "same-samples",
        (
            ("Corridor(seed=100 + rank)", "Corridor(seed=100)"),
            ("torch.manual_seed(200 + rank)", "torch.manual_seed(200)"),
        ),
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
        "slices: the whole batch on each rank",
        "by_slices",
        "same-samples",
        (
            (
                "            items, numbers, labels = (x[rank::world_size] for x in (items, numbers, labels))\n",
                "",
            ),
        ),
    ),
    Bug(
        "slices: results of rank 0",
        "by_slices",
        "metric-of-one-rank",
        (("for other in range(world_size)]", "for other in range(1)]"),),
    ),
    Bug(
        "slices: epoch lost",
        "by_slices",
        "epoch-not-restored",
        (('        args.start_epoch = saved["epoch"] + 1\n', ""),),
    ),
    Bug(
        "own files: all of them on each rank",
        "own_files",
        "same-samples",
        (("Pictures(names[rank::world_size])", "Pictures(names)"),),
    ),
    Bug(
        "own files: an order of each rank",
        "own_files",
        "shares-overlap",
        (
            (
                "    train_set = Pictures(names[rank::world_size])\n",
                "    random.seed()\n    random.shuffle(names)\n    train_set = Pictures(names)\n",
            ),
            (
                "DataLoader(train_set, batch_size=8, shuffle=True, drop_last=True)",
                "DataLoader(train_set, 8, sampler=DistributedSampler(train_set), drop_last=True)",
            ),
        ),
        also=("no-set-epoch", "epoch-not-restored"),
    ),
    Bug(
        "own files: padding not cut off",
        "own_files",
        "padding-counted",
        (("[: len(val_set)].mean()", ".mean()"),),
    ),
    Bug(
        "own files: the same noise on all ranks",
        "own_files",
        "same-noise",
        (
            (
                "    torch.manual_seed(1000 * epoch + rank)  #",
                "    torch.manual_seed(1000 * epoch)  #",
            ),
            (
                "            assert inputs.is_cuda\n",
                "            inputs = pictures + 0.1 * torch.randn_like(pictures)\n",
            ),
        ),
    ),
    Bug(
        "own files: a generator of its own",
        "own_files",
        "same-augmentation",
        (
            (
                "        self.flip = flip\n",
                "        self.flip = flip\n        self.random = random.Random(0)\n",
            ),
            ("self.flip and random.random() < 0.5", "self.flip and self.random.random() < 0.5"),
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
        "processes: summed",
        "by_processes",
        "gradient-scale",
        (("        parameter.grad /= dist.get_world_size()\n", ""),),
    ),
    Bug(
        "processes: a rate of each rank",
        "by_processes",
        "rates-differ",
        (("lr=0.1)", "lr=0.1 * (rank + 1))"),),
    ),
    Bug(
        "tutorial: a schedule of each rank",
        "tutorial",
        "rates-differ",
        (
            (
                "torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)",
                "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
            ),
            (
                "        self.scheduler.step()\n",
                "        self.scheduler.step(F.cross_entropy(self.model(source), targets).item())\n".replace(
                    "(source)", "(source.to(self.gpu_id))"
                ).replace("targets)", "targets.to(self.gpu_id))"),
            ),
        ),
        also=("metric-of-one-rank",),
    ),
    Bug(
        "tutorial: micro-batches of one batch",
        "tutorial",
        "loss-not-divided",
        (
            (
                "        output = self.model(source)\n        loss = F.cross_entropy(output, targets)\n        loss.backward()\n",
                "        for part in range(0, len(source), 8):\n"
                "            output = self.model(source[part : part + 8])\n"
                "            F.cross_entropy(output, targets[part : part + 8]).backward()\n",
            ),
        ),
    ),
    Bug(
        "tutorial: mean by a method",
        "tutorial",
        "loss-not-divided",
        (
            ("        self.optimizer.zero_grad()\n", ""),
            (
                "        loss = F.cross_entropy(output, targets)\n        loss.backward()\n        self.optimizer.step()\n",
                '        F.cross_entropy(output, targets, reduction="none").mean().backward()\n'
                '        self.batches = getattr(self, "batches", 0) + 1\n'
                "        if self.batches % 2 == 0:\n"
                "            self.optimizer.step()\n"
                "            self.optimizer.zero_grad()\n",
            ),
        ),
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
        "sharpness: the gradient of the first pass kept",
        "sharpness",
        "no-zero-grad",
        (("optimizer.first_step(zero_grad=True)", "optimizer.first_step()"),),
    ),
    Bug(
        "graph: stays in evaluation mode",
        "graph",
        "no-train-mode",
        (("    model.train()\n", ""),),
    ),
    Bug(
        "no_sync: gradients left over",
        "accumulate_no_sync",
        "no-zero-grad",
        (
            ("            optimizer.zero_grad()\n", ""),
            ("(loss / len(group))", "(loss / ACCUMULATE)"),
            (
                "            torch.nn.utils.clip",
                "            if len(group) < ACCUMULATE:\n                continue\n"
                "            torch.nn.utils.clip",
            ),
            (
                "            optimizer.step()\n",
                "            optimizer.step()\n            optimizer.zero_grad()\n",
            ),
        ),
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
    Bug(
        "compiled: buffers lost",
        "compiled_amp",
        "buffers-not-restored",
        (
            ('{"model": raw.state_dict(),', '{"model": dict(raw.named_parameters()),'),
            ('raw.load_state_dict(state["model"])', 'raw.load_state_dict(state["model"], False)'),
        ),
    ),
    Bug(
        "divided stream: a counter of the loss lost",
        "divided_stream",
        "other-step-after-resume",
        (('        updates = state["updates"]\n', ""),),
    ),
    Bug(
        "gan: no gradient for the generator",
        "gan",
        "zero-gradients",
        (("        errG.backward()\n", ""),),
    ),
    Bug(
        "tensor parallel: sums of the ranks not joined",
        "tensor_parallel",
        "divided-model-differs",
        (
            (
                "RowwiseParallel()})",
                "RowwiseParallel(output_layouts=torch.distributed.tensor.Partial())})",
            ),
        ),
    ),
    Bug(
        "tensor parallel: loss divided by the ranks",
        "tensor_parallel",
        "gradient-scale",
        (("y.cuda())\n", "y.cuda()) / world_size\n"),),
    ),
    Bug(
        "pipeline: loss divided by the ranks",
        "pipeline",
        "gradient-scale",
        (
            (
                "cross_entropy(outputs, targets)",
                "cross_entropy(outputs, targets) / dist.get_world_size()",
            ),
        ),
    ),
]
