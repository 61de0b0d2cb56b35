"""Process groups on the null device. NCCL sends nothing, so what Python reads takes another way."""

import inspect
import os
from functools import wraps

OBJECT_COLLECTIVES = {  # name: its parameter that names the one peer, if it has one
    "all_gather_object": None,
    "gather_object": None,
    "broadcast_object_list": None,
    "send_object_list": "dst",
    "recv_object_list": "src",
}


def tell_sizes_of_splits(dist, library):
    """Tell the library how many ranks the next group has that is split off an NCCL group, and how
    far apart they are."""
    from torch.distributed import device_mesh

    core = dist.distributed_c10d
    color_of, split_group = core._process_group_color, dist.split_group

    def tell(ranks):
        apart = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        library.null_expect_split(len(ranks), apart)

    @wraps(color_of)
    def told_color_of(ranks):
        tell(ranks)
        return color_of(ranks)

    @wraps(split_group)
    def told_split_group(parent_pg=None, split_ranks=(), *args, **kwargs):
        rank = dist.get_rank()
        tell(next((ranks for ranks in split_ranks if rank in ranks), []))
        return split_group(parent_pg, split_ranks, *args, **kwargs)

    core._process_group_color = told_color_of
    core.split_group = dist.split_group = device_mesh.split_group = told_split_group


def join_fake_world(dist):
    """Be one rank of a group of which the others do not exist. NCCL's collectives return at once
    anyway; gloo is replaced by PyTorch's "fake" backend, and objects are gathered from this rank
    alone."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 # registers the backend

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.HashStore()
    if rank:
        store.set("0", "an id of rank 0, for NCCL")
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(ranks + 1)  # or it waits for several ids
    core = dist.distributed_c10d
    make_group = core._new_process_group_helper
    signature = inspect.signature(make_group)

    def rendezvous(*args, **kwargs):
        yield store, rank, ranks

    @wraps(make_group)
    def make_fake_group(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        backend = bound.arguments["backend"]  # "gloo", or with others, as "cpu:gloo,cuda:nccl"
        bound.arguments["backend"] = core.Backend(str(backend).replace("gloo", "fake"))
        return make_group(*bound.args, **bound.kwargs)

    def all_gather_object(values, value, group=None):
        values[:] = [value] * len(values)

    core.rendezvous = dist.rendezvous = rendezvous
    core._new_process_group_helper = make_fake_group
    dist.all_gather_object = all_gather_object
    dist.broadcast_object_list = lambda *args, **kwargs: None


def send_objects_over_gloo(dist):
    """Python objects that would travel through the GPUs of an NCCL group take a group of gloo."""
    groups = {}

    def gloo_group(ranks):
        key = tuple(sorted(ranks))
        if key not in groups:
            groups[key] = dist.new_group(key, backend="gloo", use_local_synchronization=True)
        return groups[key]

    def ranks_of(values, peer):
        """The ranks that take part in a call: the group's ranks, or a sender and a receiver."""
        group = values["group"] or dist.group.WORLD
        if peer is None:
            return dist.get_process_group_ranks(group)
        other = values[peer]
        if other is None:
            other = dist.get_global_rank(group, values[f"group_{peer}"])
        return other, dist.get_rank()

    def over_gloo(function, peer):
        signature = inspect.signature(function)

        @wraps(function)
        def wrapper(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = bound.arguments
            if "nccl" in dist.get_backend(values["group"]):
                values["group"] = gloo_group(ranks_of(values, peer))
                if "device" in values:
                    values["device"] = None
            return function(*bound.args, **bound.kwargs)

        return wrapper

    for name, peer in OBJECT_COLLECTIVES.items():
        setattr(dist, name, over_gloo(getattr(dist, name), peer))
