"""`python -m sharesd.cli.tp_worker DEVICE`: a rank that does what rank 0 says, which has started it."""

from __future__ import annotations

import logging
import os
import signal
import sys

from multigpu.failure_detector import LOST, RankLost
from multigpu.launch import join, local_device
from sharesd.cli.console import describe
from sharesd.devices.selection import device_of, use
from sharesd.runtime import follow_rank_0


def follow(device: str) -> int:
    """Join the group that was launched, and take part in rank 0's steps until it ends; returns an exit status.

    What goes wrong here, rank 0 tells; that rank 0 has ended unasked, rank 1 does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    logging.disable(logging.WARNING)  # rank 0 says the same
    own = local_device(device_of(device), 1)
    use(own)  # or each rank would have a context on the first GPU, too
    group = join(own)
    try:
        follow_rank_0(group)
    except RankLost as error:
        if group.rank == 1:
            print(f"error: {error}", file=sys.stderr, flush=True)
    except Exception as error:
        group.fail(describe(error))
    return LOST


if __name__ == "__main__":
    status = follow(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of a broken connection would end a process that is taken down in order, in their words
