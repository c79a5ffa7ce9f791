"""`sharesd bench peers`: other runtimes beside ours, on the same prompts and token counts.

One file per runtime; each runs in a process of its own (`worker.py`), and all are timed by one clock (`protocol.py`).
"""

from benchmark.peers.command import add_parser, run

__all__ = ["add_parser", "run"]
