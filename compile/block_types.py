"""Types of blocks, the rows of `cpu/block_types.def`, which C++ includes too; imports no torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).parent / "cpu" / "block_types.def"
_ROW = re.compile(
    r"BLOCK_TYPE\((?P<name>\w+), +(?P<sizes>\d+, +\d+, +\d+, +\d+), +"
    r"GPU\((?P<gpu>[^)]*)\), +(?P<quantize>[\w<>]+), +.+\)"
)


class BlockType(NamedTuple):
    """A row of the table."""

    inputs: int
    """Inputs of a block."""
    bytes: int
    """Bytes of a block in a file."""
    unit: int
    """Inputs of a unit in memory, on a CPU."""
    unit_bytes: int
    """Bytes of codes and scales of a unit of 16 outputs."""
    gpu: dict[str, Any]
    """Fields of `cuda.block_form.BlockForm`."""
    quantizes: bool
    """True if numbers can be quantized to it, without statistics of activations."""


def read_table(text: str) -> dict[str, BlockType]:
    """Return the types of a table by name, in order of their numbers.

    Raises ValueError for a row that cannot be read.
    """
    types: dict[str, BlockType] = {}
    for line in text.splitlines():
        if not line.startswith("BLOCK_TYPE"):
            continue
        row = _ROW.fullmatch(line)
        if row is None:
            raise ValueError(f"{TABLE.name}: cannot read the row {line!r}")
        call = ast.parse(f"dict({row['gpu']})", mode="eval").body
        assert isinstance(call, ast.Call)
        gpu = {str(field.arg): ast.literal_eval(field.value) for field in call.keywords}
        inputs, size, unit, unit_bytes = map(int, row["sizes"].split(","))
        types[row["name"]] = BlockType(inputs, size, unit, unit_bytes, gpu, row["quantize"] != "cannot_quantize")
    return types


TYPES = read_table(TABLE.read_text(encoding="utf-8"))
"""Types with a kernel, by name."""
