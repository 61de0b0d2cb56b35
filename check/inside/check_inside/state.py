"""What the observers of one process share."""

import weakref
from dataclasses import dataclass, field

# Dataset, model and optimizer -> ordinals, which are the same in all ranks that run the same code.


class Ordinals:
    """Numbers objects in the order in which they are first seen. weak: does not keep them alive."""

    def __init__(self, weak=False):
        self.numbers = {}
        self.objects = []
        self.weak = weak
        self.count = 0

    def __call__(self, thing):
        if id(thing) not in self.numbers:
            self.numbers[id(thing)] = self.count
            self.count += 1
            if self.weak:
                weakref.finalize(thing, self.numbers.pop, id(thing)).atexit = False
            else:
                self.objects.append(thing)
        return self.numbers[id(thing)]


@dataclass
class State:
    """Counters since the last step of an optimizer, and over the whole run."""

    datasets: Ordinals = field(default_factory=Ordinals)
    loaders: Ordinals = field(default_factory=lambda: Ordinals(weak=True))
    samplers: Ordinals = field(default_factory=Ordinals)
    models: Ordinals = field(default_factory=Ordinals)
    optimizers: Ordinals = field(default_factory=Ordinals)
    parameters: list = field(default_factory=list)  # of all optimizers, without repetitions
    parameter_ids: set = field(default_factory=set)
    schedulers: list = field(default_factory=list)  # weak references, in the order of their making
    wrapped: set = field(default_factory=set)  # ids of parameters in a DistributedDataParallel
    trained: set = field(default_factory=set)  # the id of a parameter of each model with gradients
    flat: set = field(default_factory=set)  # ids of parameters in a FullyShardedDataParallel
    names: dict = field(default_factory=dict)  # id of a parameter -> its name
    frozen: dict = field(default_factory=dict)  # id of a BatchNorm -> checksum of its weight
    steps: int = 0  # of the outermost optimizers
    training_epochs: int = 0  # epochs of loaders within which a backward was run
    steps_of_epochs: int = 0  # at the end of the last one
    backwards_of_run: int = 0
    depth: int = 0  # of forwards within forwards
    keywords: dict = field(default_factory=dict)  # of the outermost of them, arguments with a name
    fetching: bool = False  # inside of dataset[i]
    is_stage: bool = False  # this process holds a stage of a pipeline
    calibrating: bool = False  # inside of update_bn, which is not an evaluation
    active: list = field(default_factory=list)  # the epochs of loaders that are being iterated
    reader: int | None = None  # the number of the epoch that has handed out the last batch
    backwards: list = field(default_factory=list)  # since the last step: [place, loss is a mean]
    first_backward: int = 0  # of these, the first one that adds to no gradient of this step
    moved: object = None  # where a gradient was added to one of other weights, in this step
    batches: dict = field(default_factory=dict)  # since the last step, of each loader
    forwards: list = field(default_factory=list)  # since the last step, of models with parameters
    syncs: dict = field(default_factory=dict)  # since the last step: place -> number
    batch_norms: int = 0  # since the last step, calls that compute statistics of a batch
    noise: list = field(default_factory=list)  # generator_states(): after a batch, at its forward
    generators: list = field(default_factory=list)  # weak references to those that the script makes
    random_states: object = None  # of a run that is killed or resumed, after the last batch
    clips: list = field(default_factory=list)
    is_scaled: bool = False  # the gradients belong to a scaled loss
    scaler: object = None


STATE = State()
