"""`sharesd bench gpu`: everything that ShareSD promises of a GPU, measured in half an hour at most.

Each step is a process of its own with a time limit (`agenda.py` lists them, most valuable first), so that one which
crashes or hangs costs no more than its time. What a step finds is on disk as soon as it is found.
"""

from benchmark.gpu.command import add_parser, run

__all__ = ["add_parser", "run"]
