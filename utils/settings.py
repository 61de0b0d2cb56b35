"""Every setting: its name, type, default, and what it does. config.py reads files and flags."""

from dataclasses import dataclass, field, fields

import yaml


def _field(default, help, choices=None, low=None, free=False):
    """A Config field. `free`: may change on resume, because it cannot change the trajectory."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, free=free))


@dataclass(frozen=True)
class Config:
    """What to train and how. Facts of the running process (rank, device index) are not in here."""

    dataset: str = _field(
        "auto",
        "auto is cifar10 where data_dir holds it and synthetic elsewhere; cifar10 is downloaded "
        "if need be; imagefolder reads data_dir/{train,val,test} or {trainset,valset,testset}",
        choices=("auto", "cifar10", "imagefolder", "synthetic"),
    )
    data_dir: str = _field("data", "where the images are, or are downloaded to", free=True)
    synthetic_samples: int = _field(8192, "training images of the synthetic set", low=1)
    val_fraction: float = _field(
        0.0,
        "imagefolder without a val folder: part of each class to validate with, chosen by file "
        "name and seed alone; output_dir/split.json keeps the choice",
        low=0.0,
    )
    image_size: int = _field(
        0, "height and width in pixels that the model sees; 0: the weights' own, else 32", low=0
    )
    augment: str = _field(
        "crop_flip",
        "crop_flip pads by an eighth, crops and mirrors; resized_crop is ImageNet's "
        "RandomResizedCrop and mirrors (loader=workers only)",
        choices=("none", "crop_flip", "resized_crop"),
    )
    loader: str = _field(
        "auto",
        "workers: a DataLoader; device: the whole set as uint8 on the training device, augmented "
        "there by the batch; auto: device where the set fits. All give the same batches",
        choices=("auto", "workers", "device"),
        free=True,
    )
    num_workers: int = _field(
        -1, "worker processes a rank; -1: by the cores that are free", low=-1, free=True
    )
    num_threads: int = _field(
        0,
        "of a rank on the CPU; 0: by the cores that nothing else keeps busy at the start. Another "
        "number rounds float32 sums otherwise; a resumed run keeps the number that it had",
        low=0,
        free=True,
    )
    on_bad_sample: str = _field(
        "error",
        "an image that cannot be decoded: stop and name it, or check every file before the first "
        "epoch and leave the bad ones out on all ranks alike",
        choices=("error", "skip"),
    )
    cache_dir: str = _field(
        "", "where decoded image folders are kept; empty: data_dir/.cache", free=True
    )

    model: str = _field(
        "resnet18", "any torchvision classification model, by name; or resnet20, resnet9"
    )
    weights: str = _field(
        "",
        "start from these instead of random numbers, but for a new head: DEFAULT or another of "
        "torchvision's names for the model (downloaded once a node), a file of such weights, or a "
        "checkpoint. Pixels are normalised as the weights expect",
    )
    freeze: str = _field(
        "none",
        "backbone: train the head alone; all other weights and the BatchNorm statistics stay put",
        choices=("none", "backbone"),
    )
    stem: str = _field(
        "imagenet",
        "cifar: a 3x3 first convolution of stride 1 and no max-pooling, for small images (ResNets)",
        choices=("imagenet", "cifar"),
    )
    norm: str = _field(
        "batch",
        "group puts GroupNorm in place of BatchNorm, so that no sample depends on the others of "
        "its batch",
        choices=("batch", "group"),
    )
    sync_bn: bool = _field(True, "BatchNorm statistics over all ranks; off: of each rank alone")
    dtype: str = _field(
        "float32",
        "of weights and activations; float64 is for proofs",
        choices=("float32", "float64"),
    )
    amp_dtype: str = _field(
        "bfloat16",
        "train_ddp_amp.py only: autocast's precision (changes numerics); float16 adds a GradScaler",
        choices=("bfloat16", "float16"),
    )

    tf32: bool = _field(
        False,
        "on CUDA: float32 convolutions and matrix products in TensorFloat-32, with 10 bits instead "
        "of 23 (changes numerics)",
    )
    compile: str = _field(
        "none",
        "the model by torch.compile, in its mode of that name (changes numerics by rounding; 20 to "
        "60 s at the start). reduce-overhead uses CUDA graphs. Not with DataParallel or stages",
        choices=("none", "default", "reduce-overhead", "max-autotune"),
    )
    gradient_dtype: str = _field(
        "float32",
        "DistributedDataParallel adds gradients up in this precision: half the bytes on the way "
        "(changes numerics)",
        choices=("float32", "bfloat16", "float16"),
    )
    micro_batches: int = _field(
        1,
        "parts that a process computes its batch in: train_ddp_accum.py one after another to save "
        "memory, train_mp.py and train_ddp_mp.py to keep all devices busy. Changes numerics where "
        "the model has BatchNorm, whose statistics are a part's (--norm group has none)",
        low=1,
    )
    devices: str = _field(
        "auto",
        "train_mp.py and train_ddp_mp.py: where a process has the stages of its model, such as "
        "cuda:0,cuda:1 or cpu,cpu; cuda,cuda: the next two of this node, process by process; "
        "auto: an equal share of the visible GPUs, or cpu,cpu",
        free=True,
    )
    split: str = _field(
        "",
        "train_mp.py and train_ddp_mp.py: layers a stage, such as 6,4; empty: about as many "
        "parameters in each",
        free=True,
    )
    spawn_processes: int = _field(
        0, "train_ddp_spawn.py: processes to start; 0: one a visible GPU", low=0, free=True
    )
    fsdp_dtype: str = _field(
        "none",
        "train_fsdp.py: gather parameters and compute in bfloat16 (changes numerics); gradients "
        "are summed in float32, weights stay as they are",
        choices=("none", "bfloat16"),
    )
    fsdp_offload: bool = _field(
        False, "train_fsdp.py: keep the shards in the CPU's memory", free=True
    )

    epochs: int = _field(10, "passes over the training set", low=1)
    global_batch_size: int = _field(256, "samples an optimizer step, over all ranks", low=1)
    per_process_batch_size: int = _field(
        0,
        "0: off. Otherwise the tutorials' convention instead of global_batch_size: each process "
        "takes this many, so the updates change with the number of processes",
        low=0,
    )
    lr_scaling: str = _field(
        "linear",
        "with per_process_batch_size, linear multiplies lr by the number of processes "
        "(Goyal et al. 2017, arXiv 1706.02677)",
        choices=("linear", "none"),
    )
    optimizer: str = _field(
        "sgd", "adam and adamw want a far smaller lr, about 1e-3", choices=("sgd", "adam", "adamw")
    )
    lr: float = _field(0.1, "peak learning rate", low=0.0)
    momentum: float = _field(0.9, "of SGD", low=0.0)
    nesterov: bool = _field(False, "Nesterov's momentum")
    weight_decay: float = _field(
        5e-4, "on all trained parameters; of adamw, decoupled from the gradient", low=0.0
    )
    warmup_epochs: float = _field(1.0, "epochs of linear warm-up from 0 to lr", low=0.0)
    lr_schedule: str = _field(
        "cosine",
        "after the warm-up; cosine and linear fall to 0 step by step, step falls by lr_gamma every "
        "lr_step_epochs",
        choices=("cosine", "linear", "step", "constant"),
    )
    lr_step_epochs: float = _field(30.0, "of lr_schedule=step", low=0.01)
    lr_gamma: float = _field(0.1, "of lr_schedule=step", low=0.0)
    clip_norm: float = _field(0.0, "largest global L2 norm of the gradient; 0: no clipping", low=0)

    output_dir: str = _field(
        "", "checkpoints and metrics; empty: runs/<name of the script>", free=True
    )
    seed: int = _field(0, "of the weights, the order of the samples and the augmentation", low=0)
    device: str = _field("auto", "auto, cpu, cuda, or one device such as cuda:0", free=True)
    timeout: float = _field(
        300.0, "seconds that a collective waits for the other ranks", low=1, free=True
    )
    resume: str = _field(
        "auto",
        "auto: continue the run in output_dir if there is one; always: it is an error if there is "
        "none; never: start anew, the old files move to output_dir/previous-N",
        choices=("auto", "always", "never"),
        free=True,
    )
    allow_config_change: bool = _field(
        False, "resume although a setting differs that changes the trajectory", free=True
    )
    save_steps: int = _field(
        0, "save also within an epoch, after every so many steps; 0: off", low=0, free=True
    )
    save_minutes: float = _field(
        10.0, "save also within an epoch, every so many minutes; 0: off", low=0.0, free=True
    )
    save_sharded: bool = _field(
        False,
        "each rank writes its own part, through torch.distributed.checkpoint: for models too large "
        "for one process. Every script reads both kinds",
        free=True,
    )
    check_replicas_every: int = _field(
        0,
        "steps between two checks that all ranks hold the same parameters, buffers and optimizer "
        "state; 0: at every epoch's end only",
        low=0,
        free=True,
    )
    audit: bool = _field(
        False, "state at every epoch's end which samples were trained, and how often", free=True
    )
    keep_last: int = _field(
        2, "epoch checkpoints kept beside last.pt and best.pt", low=1, free=True
    )

    def global_batch(self, world_size):
        """Samples an optimizer step, over all `world_size` ranks."""
        return self.per_process_batch_size * world_size or self.global_batch_size

    def peak_lr(self, world_size):
        """The learning rate after the warm-up, by the linear scaling rule where it is in force."""
        linear = self.per_process_batch_size and self.lr_scaling == "linear"
        return self.lr * world_size if linear else self.lr

    def must_match(self):
        """The settings that decide which weights a run reaches: these bind a resumed run."""
        if self.allow_config_change:
            return {}
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata["free"]}

    def dump(self):
        """The resolved config as YAML text."""
        return yaml.safe_dump(vars(self), sort_keys=False)
