"""The namespace in which this package registers its operators with torch, so that Inductor can call them."""

from importlib.util import find_spec

import torch
from torch.library import Library

LIBRARY = Library("sharesd", "DEF")

HAS_TRITON = find_spec("triton") is not None
"""Whether kernels for GPUs can be compiled: torch brings Triton along on Linux."""


def runs_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run there."""
    return device.type == "cuda" and HAS_TRITON
