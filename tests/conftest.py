import os

import torch

torch.set_num_threads(1)  # a pool of OpenMP threads would not survive the forks of run_ranks
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks, and torchrun need not warn
threads = []  # what the tests of this process asked for instead
torch.set_num_threads = threads.append
