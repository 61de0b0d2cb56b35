"""A closure optimizer on the whole dataset, mp.spawn with a file, weights in NumPy's format."""

import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset

OUT = "solution.npz"


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 20, dtype=torch.float64)
        self.b = torch.nn.Linear(20, 1, dtype=torch.float64)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def problem(rank, world_size):
    g = torch.Generator().manual_seed(4)
    x = torch.rand(400, 3, generator=g, dtype=torch.float64) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:]
    return x[rank::world_size], y[rank::world_size], len(x)


def worker(rank, world_size, init_file):
    dist.init_process_group(
        "gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    model = Net()
    x, y, total = problem(rank, world_size)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))  # all of this rank's part
    start = 0
    if os.path.exists(OUT):
        with np.load(OUT) as arrays:
            start = int(arrays["iteration"])
            names = [name for name in arrays.files if name != "iteration"]
            model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in names})
    for iteration in range(start, 30):
        # The history of each outer iteration starts anew, so there is no state to be saved.
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

        for inputs, targets in loader:

            def closure(optimizer=optimizer, inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = (model(inputs) - targets).pow(2).sum() / total
                loss.backward()
                gradients = [p.grad for p in model.parameters()]
                flat = torch.cat([loss.detach().reshape(1), *(g.reshape(-1) for g in gradients)])
                dist.all_reduce(flat)
                parts = flat[1:].split([g.numel() for g in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))
                return flat[0]

            loss = optimizer.step(closure)
        if rank == 0 and (iteration + 1) % 2 == 0:
            print(f"iteration {iteration + 1}: {float(loss):.6f}")
            arrays = {name: value.numpy() for name, value in model.state_dict().items()}
            with open(OUT + ".tmp", "wb") as f:
                np.savez(f, iteration=iteration + 1, **arrays)
            os.replace(OUT + ".tmp", OUT)
    dist.destroy_process_group()


if __name__ == "__main__":
    processes = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(processes, os.path.join(folder, "init")), nprocs=processes)
