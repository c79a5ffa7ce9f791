"""Types of matrices in memory, where several run as one linear (q, k and v; gate and up)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from torch import Tensor

from compile.block_linear import BLOCK_TYPES, LANES, NUMBERS
from compile.input_order import same_order
from sharesd.models.architectures import architecture_of
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.weight_mapping import LAYERS, Cuts, module_of

log = logging.getLogger(__name__)

_EXPANDED = "F16"


class StoredTypes(NamedTuple):
    """What runs as it is stored, by the decoder's names."""

    types: Mapping[str, str]
    """Types of matrices in blocks, and of numbers in one linear with blocks."""
    expanded: Mapping[str, str]
    """Matrices among these that are expanded -> reason."""

    @classmethod
    def of(
        cls,
        stored: Mapping[str, str],
        config: DecoderConfig,
        *,
        orders: Mapping[str, Tensor | None] | None = None,
        reasons: Mapping[str, str] | None = None,
    ) -> StoredTypes:
        """Choose a type for each matrix.

        A linear runs in the kernels of blocks if one of its parts is stored in blocks. Its other parts run as the
        numbers that they are, or are expanded. `orders`: of inputs. `reasons`: why a matrix has no kernel.
        """
        types, orders = {name: kind for name, kind in stored.items() if kind in BLOCK_TYPES}, orders or {}
        expanded: dict[str, str] = {}
        rows = Cuts.of(config).first
        for names in _merged(config):
            blocks = [name for name in names if name in types]
            if not blocks:
                continue
            first = max(blocks, key=lambda name: sum(same_order(orders.get(name), orders.get(each)) for each in blocks))
            for name in names:
                if name not in types and stored[name] in NUMBERS:
                    types[name] = stored[name]
                elif name not in types:
                    expanded[name] = (reasons or {}).get(name, f"stored as {stored[name]}, which has no kernel")
                elif not same_order(orders.get(name), orders.get(first)):
                    expanded[name] = f"its inputs are in another order than those of {first}"
            types |= {name: _EXPANDED for name in names if name in expanded}
            end = 0
            for name, following in zip(names, names[1:], strict=False):
                end += sum(rows[module_of(name)])
                if end % LANES and types[name] != types[following]:
                    reason = f"types of a linear change at output {end}, which is no multiple of {LANES}"
                    expanded |= dict.fromkeys(names, reason)
                    types |= dict.fromkeys(names, _EXPANDED)
                    break
        return cls(types, expanded)

    def say(self, source: object, names: Mapping[str, str] | None = None) -> None:
        """Log a line if something of a file is expanded; `names` has those in the file."""
        if self.expanded:
            name, reason = next(iter(self.expanded.items()))
            more = f", and {len(self.expanded) - 1} more" if len(self.expanded) > 1 else ""
            _warn(f"{source}: {(names or {}).get(name, name)} is expanded to float16 ({reason}){more}")


@cache
def _warn(line: str) -> None:
    """Log a line once, however often the weights are read."""
    log.warning("%s", line)


def _merged(config: DecoderConfig) -> Iterator[list[str]]:
    """Yield the names of matrices that run as one."""
    groups = [names for names in architecture_of(config.model_type).block_names.values() if len(names) > 1]
    for layer in range(config.num_hidden_layers):
        for names in groups:
            yield [f"{LAYERS}{layer}.{name}.weight" for name in names]
