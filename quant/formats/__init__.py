"""Quantization formats: a module or a folder for each, with a `FORMAT`.

These have no heavy imports. Solvers and linears are named as "module:name" and imported on first use.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from quant.quantized_weight import QuantizedWeight

DEFAULT = "hqq"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantFormat:
    """Quantization format: bits, group sizes, solver and linears."""

    name: str
    """METHOD of the command-line syntax, e.g. `hqq`."""
    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    """Allowed numbers of weights along a row with one scale."""
    row_bits: tuple[int, ...] = ()
    """Bits with one scale per row, for any group size."""
    acceptance: Mapping[int, float]
    """Bits -> prior probability that the next draft token is accepted."""
    tree_misses: Mapping[int, Mapping[int, float]]
    """Bits -> parents per tree level -> rejections relative to a chain's."""
    planned_bits: tuple[int, ...] = ()
    """Bits that an offload plan may select."""
    nbytes: Callable[[int, int, int, int], int]
    """Function (outputs, inputs, bits, group size) -> bytes on a CPU."""
    check: str
    """Check (name, shape, bits=, group_size=, dtype=, device=, packs=); see `check_linear`."""
    solver: str | None = None
    """Solver (weight [N, K], bits, group size) -> `QuantizedWeight`.

    None: `linears` quantize.
    """
    cached_bits: tuple[int, ...] = ()
    """Bits with a slow solver, whose solutions are cached on disk."""
    calibrated_bits: tuple[int, ...] = ()
    """Bits that a calibration rounds, in place of the solver."""
    linears: Mapping[str, str]
    """Device type -> linear (name, weight, bias, bits=, group_size=, dtype=).

    `weight` is the solver's `QuantizedWeight`, or the full weight if the format has no solver.
    """
    is_nested: bool = False
    """True if `linears` take a linear with halves, and share its memory."""
    keeps_weights: bool = False
    """True if linears stay as they are, so that there are none to make."""

    def group(self, K: int, bits: int, group_size: int) -> int:
        """Return the number of weights per scale in rows of K weights."""
        return K if bits in self.row_bits else group_size

    def check_linear(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        bits: int,
        group_size: int,
        dtype: torch.dtype,
        device: torch.device,
        packs: bool = False,
    ) -> None:
        """Raise ValueError if the format has no linear of this shape.

        The message names the layer, the reason and the remedy. `packs`: the caller has a kernel of its own for the
        solver's result.
        """
        if device.type not in self.linears:
            devices = " or ".join(self.linears)
            raise ValueError(f"{name} is on {device.type}, where {self.name} has no kernel; use {devices}")
        load(self.check)(name, shape, bits=bits, group_size=group_size, dtype=dtype, device=device, packs=packs)

    def solve(self, weight_NK: Tensor, bits: int, group_size: int) -> QuantizedWeight:
        """Quantize a weight on its device.

        The format must have a solver. `group_size` divides K.
        """
        assert self.solver is not None
        return load(self.solver)(weight_NK, bits, group_size)

    def linear(
        self,
        name: str,
        weight: QuantizedWeight | Tensor,
        bias: Tensor | None,
        *,
        bits: int,
        group_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> nn.Module:
        """Return the linear for a device; the module has `nbytes`.

        Raises ValueError as `check_linear`.
        """
        make = load(self.linears[device.type])
        return make(name, weight, bias, bits=bits, group_size=group_size, dtype=dtype)

    def logit_noise(self, bits: int) -> float:
        """Return the estimated noise of the gap between two logits.

        Measured for SmolLM2-135M: 0.7 to 1 with 4 bits, and 0.1 with 8 bits, the resolution of bfloat16 logits.
        """
        return max(0.1, 0.8 * 2.0 ** (4 - bits))


def load(reference: str) -> Any:
    """Import the object that a "module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def import_optional(name: str) -> ModuleType:
    """Import an optional package, without its output and log lines.

    Raises ValueError, with the remedy, if the package is missing.
    """
    quiet_before = logging.root.manager.disable
    logging.disable(max(quiet_before, logging.WARNING))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ValueError(f"this quantization needs {package} ({error}); run: pip install {package}") from error
    finally:
        logging.disable(quiet_before)


def _formats() -> dict[str, QuantFormat]:
    names = [found.name for found in pkgutil.iter_modules(__path__)]
    formats = [import_module(f"{__name__}.{name}").FORMAT for name in names]
    return {each.name: each for each in sorted(formats, key=lambda each: (each.name != DEFAULT, each.name))}


FORMATS: dict[str, QuantFormat] = _formats()
"""Name -> format, the default first."""
