"""Header of a .gguf file: metadata and places of tensors.

The tables of known keys come first. The layout is that of versions 2 and 3 (little-endian): counts, key-value pairs, a
table of tensors, then their data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from sharesd.models.checkpoint import what_begins_so

WITHOUT_EFFECT = frozenset(
    {"vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"}
    | {"rope.dimension_sections", "rope.mrope_interleaved", "mrope_sections"}  # of positions in pictures
)
"""Keys below the architecture that change no result."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (0, 1),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "norm_top_k_prob": (True,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
"""Keys below the architecture -> values that switch nothing on."""

TOKENIZER_USED = frozenset(
    f"tokenizer.ggml.{key}"
    for key in (
        *("model", "pre", "tokens", "token_type", "scores", "merges"),
        *("add_bos_token", "add_eos_token", "add_space_prefix", "eos_token_ids"),
        *(f"{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding")),
        *(f"fim_{role}_token_id" for role in ("pad", "rep", "sep")),
    )
) | {"tokenizer.chat_template"}
"""Keys of the tokenizer that the conversion reads, besides `tokenizer.chat_template.NAME`."""

TOKENIZER_WITHOUT_EFFECT = frozenset(
    f"tokenizer.ggml.{key}"
    for key in (
        "token_type_count",
        *(f"{role}_token_id" for role in ("seperator", "separator", "cls", "mask", "prefix", "suffix", "middle")),
        *(f"fim_{role}_token_id" for role in ("pre", "suf", "mid")),
    )
) | {"tokenizer.chat_templates", "tokenizer.huggingface.json", "tokenizer.rwkv.world"}
"""Keys of the tokenizer that change no result.

They name tokens and templates, or hold copies for other programs.
"""

TOKENIZER_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{f"tokenizer.ggml.add_{role}_token": (False,) for role in ("sep", "unknown", "padding", "cls", "mask")},
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.precompiled_charsmap": ([],),
    "tokenizer.ggml.suppress_tokens": ([],),
    "tokenizer.ggml.normalizer.lowercase": (False,),
    "tokenizer.ggml.normalizer.strip_accents": (False,),
}
"""Keys of the tokenizer -> values that switch nothing on."""

CHAT_TEMPLATES = "tokenizer.chat_template."
"""Beginning of the keys of named chat templates."""


class UnknownKey(ValueError):
    """Error for a key or tensor whose meaning is not known."""


def unknown_key(key: str, value: Any) -> UnknownKey:
    """Return the error that names a key and the remedy."""
    shown = f"[{len(value)} values]" if isinstance(value, list) else repr(value)
    return UnknownKey(
        f"key {key!r} = {shown[:60]} is not supported here and may change the answers; "
        f"give another file, or load it without this key: --ignore-key {key}"
    )


def unknown_tensor(name: str, why: str = "has no place in this architecture") -> UnknownKey:
    """Return the error that names a tensor and the remedy."""
    return UnknownKey(
        f"tensor {name!r} {why} and may change the answers; "
        f"give another file, or load it without this tensor: --ignore-key {name}"
    )


def is_neutral(key: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return True if a key's value (each of a list) is neutral."""
    values = value if isinstance(value, list) and value else [value]
    return key in neutral and all(each in neutral[key] for each in values)


def is_close(value: Any, wanted: float) -> bool:
    """Return True for a number that is equal in float32."""
    return isinstance(value, int | float) and math.isclose(value, wanted, rel_tol=1e-5)


def check_tokenizer_keys(metadata: Mapping[str, Any]) -> None:
    """Raise UnknownKey for a key of the tokenizer that is not known."""
    for key, value in metadata.items():
        if not key.startswith("tokenizer.") or key in TOKENIZER_USED or key in TOKENIZER_WITHOUT_EFFECT:
            continue
        name = key.removeprefix(CHAT_TEMPLATES)
        if name != key and name.replace("_", "").replace("-", "").isalnum() and isinstance(value, str):
            continue
        if not is_neutral(key, value, TOKENIZER_NEUTRAL):
            raise unknown_key(key, value)


_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Types of values -> numpy's names of them."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One stored tensor."""

    name: str
    shape: tuple[int, ...]
    """Outputs first, as torch has it."""
    kind: GGMLQuantizationType
    data: np.ndarray
    """uint8 [bytes], mapped from the file; or [pieces, bytes] with something else between the pieces."""

    def codes(self, begin: int, end: int) -> np.ndarray:
        """Return some of the bytes, uint8 [end - begin]; mapped, if they are of one piece."""
        pieces = self.data[None] if self.data.ndim == 1 else self.data
        size = pieces.shape[1]
        found = [
            pieces[number, max(begin - number * size, 0) : end - number * size]
            for number in range(begin // size, -(-end // size))
        ]
        return found[0] if len(found) == 1 else np.concatenate(found)


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """Metadata and tensors of a file."""

    metadata: dict[str, Any]
    """Keys and values: numbers, strings, lists."""
    tensors: dict[str, StoredTensor]
    """By name, in the file's order."""

    @property
    def architecture(self) -> str:
        """Name of the architecture in llama.cpp."""
        return self.metadata.get("general.architecture", "")

    def tokenizer(self, key: str, default: Any = None) -> Any:
        """Return a field of the tokenizer."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)


def read_gguf(path: Path) -> GGUFFile:
    """Map a .gguf file and read its header.

    Raises:
        ValueError: the file is no .gguf file, or incomplete.
    """
    with path.open("rb") as stream:
        what, remedy = what_begins_so(stream.read(16))
        if what:
            raise ValueError(f"{path} is not a readable GGUF file (it is {what}); {remedy}")
        try:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            return _Reader(data).file()
        except (ValueError, TypeError, LookupError, struct.error, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{path} is not a readable GGUF file ({error}); download it again") from error


class _Reader:
    """Position in the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def file(self) -> GGUFFile:
        if self.data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version = self.number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, not {' or '.join(map(str, _VERSIONS))}")
        num_tensors, num_fields = self.number("<Q"), self.number("<Q")
        metadata = {}
        for _ in range(num_fields):
            key = self.string()
            if key in metadata:
                raise ValueError(f"it has key {key!r} twice")
            metadata[key] = self.value(self.number("<I"))
        places = [self.place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its general.alignment is {str(alignment)[:60]}, not a number of bytes")
        if not isinstance(metadata.get("general.architecture", ""), str):
            raise ValueError("its general.architecture is not a text")
        begin = -(-self.at // alignment) * alignment
        tensors = {place[0]: self.tensor(begin, *place) for place in places}
        if len(tensors) < num_tensors:
            raise ValueError("two of its tensors have one name")
        for key in ("split.no", "split.count", "split.tensors.count"):
            if not isinstance(metadata.get(key, 0), int):
                raise ValueError(f"its {key} is {str(metadata[key])[:60]}, not a number")
        return GGUFFile(metadata, tensors)

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        (text,) = self.strings(1)
        return text

    def strings(self, count: int) -> list[str]:
        """Read many at once: vocabularies hold hundreds of thousands."""
        data, at, read, texts = self.data, self.at, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            begin = at + 8
            at = begin + read(data, at)[0]
            texts.append(data[begin:at].decode())
        if at > len(data):
            raise ValueError("it ends within a text")
        self.at = at
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalars(kind, 1)[0]
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        return self.scalars(kind, count)

    def scalars(self, kind: int, count: int) -> list[Any]:
        values = np.frombuffer(self.data, _SCALARS[kind], count, self.at)
        self.at += values.nbytes
        return values.tolist()

    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read name, shape, type and offset of a tensor."""
        name, num_dims = self.string(), self.number("<I")
        dims = tuple(self.number("<Q") for _ in range(num_dims))
        return name, dims[::-1], self.number("<I"), self.number("<Q")

    def tensor(self, begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        stored = GGMLQuantizationType(kind)
        block, num_bytes = GGML_QUANT_SIZES[stored]
        size = math.prod(shape) // block * num_bytes
        if size == 0:
            raise ValueError(f"tensor {name!r} has shape {list(shape)[:8]}, which holds no value")
        if begin + offset + size > len(self.data):
            raise ValueError(f"it ends before the end of tensor {name}")
        return StoredTensor(name, shape, stored, np.frombuffer(self.data, np.uint8, size, begin + offset))


def read_model(parts: list[Path], ignored: Collection[str] = ()) -> GGUFFile:
    """Return the header of a model, without `ignored` keys and tensors.

    Raises:
        ValueError: a part is damaged, or of another model.
    """
    files = [read_gguf(part) for part in parts]
    first, tensors = files[0], {}
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        count, found = file.metadata.get("split.count", 1), file.metadata.get("split.no", 0)
        if (count or 1) != len(parts) or found != number:
            raise ValueError(
                f"{part} says that it is part {found + 1} of {count}, and not {number + 1} of {len(parts)}; "
                "give the parts the names that they were published under"
            )
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ValueError(f"{part} repeats tensor {name!r} of another part; download all parts again")
            tensors[name] = tensor
    num_tensors = first.metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and num_tensors != len(tensors):
        raise ValueError(f"{parts[0]} and its other parts have {len(tensors)} of {num_tensors} tensors; download again")
    metadata = {key: value for key, value in first.metadata.items() if key not in ignored}
    return GGUFFile(metadata, {name: tensor for name, tensor in tensors.items() if name not in ignored})
