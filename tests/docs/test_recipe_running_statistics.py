"""docs/recipes/running-statistics.md: buffers that are updated from the samples of all ranks."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.forked import ROUNDING, largest_difference
from tests.processes import run_ranks
from tests.recipes import applied, import_new
from tests.utils.test_checkpoint import outcome
from utils.errors import UserError
from utils.guards.replicas import compare_replicas


def test_codebook_does_not_depend_on_the_number_of_ranks(tmp_path, monkeypatch):
    folder = applied("running-statistics", tmp_path / "copy")
    module = import_new("utils.codebook", folder, monkeypatch)
    torch.manual_seed(1)
    points = torch.randn(3, 12, 4, dtype=torch.float64)

    def train(rank, ranks):
        torch.manual_seed(0)
        layers = nn.Linear(4, 3), module.Codebook(5, 3, decay=0.7), nn.Linear(3, 2)
        model = DistributedDataParallel(nn.Sequential(*layers).double())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in points:
            optimizer.zero_grad()
            (model(batch[rank::ranks]).square().sum() * ranks / 12).backward()
            optimizer.step()
        compared = outcome(lambda: compare_replicas(model, optimizer, between_steps=True))
        return compared, {name: t.numpy() for name, t in model.module.state_dict().items()}

    def tensors(ranks):
        (first, *_) = returned = run_ranks(train, ranks, ranks)
        assert all(compared == (None, "") for compared, _ in returned)
        return {name: torch.from_numpy(array) for name, array in first[1].items()}

    one = tensors(1)
    assert largest_difference(one, tensors(2)) < ROUNDING
    assert largest_difference(one, tensors(3)) < ROUNDING
    monkeypatch.setattr(module, "all_reduce", lambda tensor: tensor)
    for (kind, text), _ in run_ranks(train, 2, 2):
        assert kind is UserError and "1.sums" in text
