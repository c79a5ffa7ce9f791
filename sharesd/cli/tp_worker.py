"""`python -m sharesd.cli.tp_worker DEVICE`: a tensor-parallel worker, started by rank 0."""

from __future__ import annotations

import logging
import os
import signal
import sys

from multigpu.failure_detector import EXIT_RANK_LOST, RankLost
from multigpu.launch import join, local_device
from sharesd.cli.console import describe
from sharesd.devices.selection import device_of, use
from sharesd.startup.loaded_model import run_tp_worker


def follow(device: str) -> int:
    """Join the launched group, run rank 0's steps, return an exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    logging.disable(logging.WARNING)  # rank 0 logs the same
    own = local_device(device_of(device), 1)
    use(own)  # otherwise each rank would also have a context on the first GPU
    group = join(own)
    try:
        run_tp_worker(group)
    except RankLost as error:
        if group.rank == 1:
            print(f"error: {error}", file=sys.stderr, flush=True)
    except Exception as error:
        group.fail(describe(error))
    return EXIT_RANK_LOST


if __name__ == "__main__":
    status = follow(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skip atexit: NCCL/gloo threads would abort with their own message
