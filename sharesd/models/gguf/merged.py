"""Tensors of a .gguf file under the names, and in the parts, that files usually have.

llama.cpp's converter writes merged ones with --fuse-gate-up-exps and --fuse-qkv: their parts are views. Ollama's has
names of its own for a few, and keeps towers of pictures in the same file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sharesd.models.gguf.config import fields_of, layout_of
from sharesd.models.gguf.reader import GGUFFile, StoredTensor

_MERGED = re.compile(r"(?P<block>blk\.\d+\.)(?P<part>ffn_gate_up_exps|attn_qkv)\.(?P<kind>weight|bias)")

_BLOCK = re.compile(r"blk\.\d+\.")


def parts_apart(file: GGUFFile) -> GGUFFile:
    """Return a file with the usual tensors: parts of merged ones, where its family has such parts, and usual names.

    Raises UnsupportedArchitecture as `layout_of`.
    """
    _, layout = layout_of(file)
    tensors: dict[str, StoredTensor] = {}
    for given, tensor in file.tensors.items():
        if given.startswith(layout.left_out):
            continue
        block = _BLOCK.match(given)
        begin = block[0] if block is not None else ""
        name = begin + layout.other_names.get(given.removeprefix(begin), given.removeprefix(begin))
        match, parts = _MERGED.fullmatch(name), dict[str, StoredTensor]()
        if match is not None:
            is_qkv = match["part"] == "attn_qkv"
            parts = _queries_keys_values(file, match["block"], tensor) if is_qkv else _gate_and_up(tensor)
        fits = parts and layout.block_names.keys() >= parts.keys()
        found = {f"{match['block']}{part}.{match['kind']}": each for part, each in parts.items()} if match else {}
        tensors |= found if fits and file.tensors.keys().isdisjoint(found) else {name: tensor}
    return replace(file, tensors=tensors)


def _gate_and_up(tensor: StoredTensor) -> dict[str, StoredTensor]:
    """Return the halves of each expert's rows; [experts, rows, inputs], or a bias [experts, rows]."""
    if len(tensor.shape) < 2 or tensor.shape[1] % 2:
        return {}
    count, rows, *inputs = tensor.shape
    halves = tensor.data.reshape(count, 2, -1)
    shape = (count, rows // 2, *inputs)
    return {
        f"ffn_{part}_exps": replace(tensor, shape=shape, data=halves[:, i]) for i, part in enumerate(("gate", "up"))
    }


def _queries_keys_values(file: GGUFFile, block: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
    """Return rows of queries, perhaps with gates, then of keys and values; none for a block without attention."""
    output, fields = file.tensors.get(f"{block}attn_output.weight"), fields_of(file)
    heads = _most(fields, "attention.head_count")
    kv_heads = _most(fields, "attention.head_count_kv") or heads
    if output is None or not heads or len(output.shape) < 2:
        return {}
    keys = output.shape[1] // heads * kv_heads
    queries = tensor.shape[0] - 2 * keys
    if queries <= 0:
        return {}
    parts, row, first = {}, tensor.data.size // tensor.shape[0], 0
    for part, rows in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
        data = tensor.data[first * row : (first + rows) * row]
        parts[part] = replace(tensor, shape=(rows, *tensor.shape[1:]), data=data)
        first += rows
    return parts


def _most(fields: Mapping[str, Any], key: str) -> int:
    """Return a number of heads, the largest of a list; 0 if there is none."""
    value = fields.get(key, 0)
    numbers = value if isinstance(value, list) else [value]
    return max((each for each in numbers if type(each) is int), default=0)
