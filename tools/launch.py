"""Run torchrun; if a rank fails, its error is the last line on the terminal.

    python -m tools.launch --standalone --nproc_per_node=4 train_ddp.py --epochs 3

The arguments are torchrun's. The exit code is 1 if a rank failed.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def root_cause(error):
    """The message of the first rank that failed, from the error file that this rank wrote."""
    rank, failure = error.get_first_failure()
    if isinstance(failure.message, dict):
        return failure.message["message"].rstrip()
    if failure.exitcode < 0:
        return f"error (rank {rank}): {failure.message}"
    return f"error (rank {rank}): exit code {failure.exitcode}; see the output above"


def main():
    try:
        run(parse_args(None))
    except ChildFailedError as error:
        sys.exit(root_cause(error))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
