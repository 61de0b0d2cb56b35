"""The corpus: scripts without a bug, and bugs that are planted in them by a replacement of text."""

from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


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
        return (SCRIPTS / f"{self.name}.py").read_text()

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
        text = (SCRIPTS / f"{self.script}.py").read_text()
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {text.count(old)} places in {self.script}: {old!r}")
            text = text.replace(old, new)
        return text


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
    Script("hf_trainer", needs=("transformers", "accelerate")),
    Script("contrastive"),
    Script("distillation"),
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
        "ddp-bypassed",
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
                "    torch.manual_seed(3)\n    inputs = torch.randn(300, 12)\n",
                '    inputs = torch.randn(300, 12, generator=torch.Generator().manual_seed(0))\n    torch.manual_seed(3 + int(os.environ["RANK"]))\n',
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
        "ddp-bypassed",
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
        "models-start-differently",
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
        also=("model-not-restored", "optimizer-not-restored"),
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
]
