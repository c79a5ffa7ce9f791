"""Random damage of model files: bytes, JSON values, fields of .gguf headers."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass, field
from typing import Any

Dice = random.Random
EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 63, 1000, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 10**30),
    *(0.5, -0.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "64", "<|im_end|>", "\0", "\ud800", "a" * 100_000, "../../etc/passwd"),
    *([], {}, [[]], [None], [1, 2], ["a", "b"], [0] * 1000, {"a": 1}, {"content": None}, {"content": "x", "id": -1}),
)
"""Values of wrong types and sizes."""
INTEGERS = (0, 1, 2, 3, 8, 9, 13, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
DEEP = 100_000
"""Brackets of a nesting that exceeds every stack."""


def damaged_bytes(data: bytes, dice: Dice, end: int | None = None) -> bytes:
    """Return bytes with one random damage; most of it before `end`."""
    end = min(end or len(data), len(data))
    at, changed = dice.randrange(end) if end else 0, bytearray(data)
    match dice.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[: dice.randrange(len(data) + 1)]
        case 2:
            for _ in range(dice.choice((1, 1, 2, 8, 64))):
                if end:
                    changed[dice.randrange(end)] ^= 1 << dice.randrange(8)
        case 3:
            size = dice.choice((1, 4, 8, 100))
            changed[at : at + size] = dice.randbytes(size)
        case 4:
            del changed[at : at + dice.choice((1, 2, 8, 100, 1000))]
        case 5:
            changed[at:at] = dice.choice((b"\0", b"\xff", b"\xff\xfe", b"\x80", b"{", b'"', dice.randbytes(16)))
        case 6:
            other = dice.randrange(end) if end else 0
            changed[at : at + 64] = data[other : other + 64]
        case _:
            return dice.choice((b"", b"\0", b"\xef\xbb\xbf" + data, data + data, b"\0" * len(data), dice.randbytes(64)))
    return bytes(changed)


def damaged_json(text: str, dice: Dice, more: dict[str, Any] | None = None) -> bytes:
    """Return a JSON text with one to three damages; `more`: fields that may be added at the top."""
    if dice.random() < 0.2:
        return damaged_bytes(text.encode(), dice)
    root = [json.loads(text)]
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        _damage_value(root, dice, more or {})
    written = json.dumps(root[0], ensure_ascii=dice.random() < 0.9)
    match dice.randrange(12):
        case 0:
            written = _with_deep(written, dice)
        case 1:  # a key a second time, with another value
            keys = list(root[0]) if isinstance(root[0], dict) else []
            if keys:
                again = json.dumps({dice.choice(keys): dice.choice(EXTREMES)})
                written = again[:-1] + ", " + written[1:] if dice.random() < 0.5 else written[:-1] + ", " + again[1:]
        case 2:
            written = written.replace(":", dice.choice((": 1e999,", ": " + "9" * 5000 + ",", ":,", "::")), 1)
    return written.encode("utf-8", "surrogatepass")


def _damage_value(root: list[Any], dice: Dice, more: dict[str, Any]) -> None:
    """Walk down a random way and damage what is there."""
    if more and isinstance(root[0], dict) and dice.random() < 0.35:
        name = dice.choice(list(more))
        value = more[name]
        if dice.random() < 0.5 and isinstance(value, dict):
            value = value | {dice.choice(list(value)): dice.choice(EXTREMES)}
        root[0][name] = value if dice.random() < 0.6 else dice.choice(EXTREMES)
        return
    holder, key = root, 0
    while isinstance(holder[key], dict | list) and holder[key] and dice.random() < (1.0 if holder is root else 0.7):
        holder = holder[key]
        key = dice.choice(list(holder)) if isinstance(holder, dict) else dice.randrange(len(holder))
    value = holder[key]
    match dice.randrange(8):
        case 0 if holder is not root:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[dice.choice((key + "_", key.upper(), "", "x", *holder))] = holder.pop(key)
        case 2 if isinstance(holder, list) and holder is not root:
            holder.insert(key, value)
        case 3 if isinstance(value, int | float):
            holder[key] = dice.choice((-value, value + 1, value * 2, value * 1000, value / 3, str(value), [value]))
        case 4 if isinstance(value, str):
            holder[key] = dice.choice((value[:-1], value + "x", value * 3, value.upper(), [value], {value: value}))
        case 5:
            holder[key] = [value]
        case _:
            holder[key] = dice.choice(EXTREMES)


def _with_deep(text: str, dice: Dice) -> str:
    """Return a JSON text with a value of thousands of brackets."""
    levels = dice.choice((200, 2000, DEEP))
    deep = "[" * levels + "]" * levels if dice.random() < 0.5 else '{"a":' * levels + "1" + "}" * levels
    return deep if dice.random() < 0.3 or not text.startswith("{") or text == "{}" else f'{{"deep": {deep}, {text[1:]}'


_FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Type of a .gguf value -> its format."""


@dataclass(slots=True)
class GGUFHeader:
    """Parts of a .gguf file by their bytes."""

    fields: list[tuple[str, bytes]] = field(default_factory=list)
    """Key, and type and value."""
    tensors: list[tuple[str, list[int], int, int]] = field(default_factory=list)
    """Name, dimensions, type and offset."""
    rest: bytes = b""

    @classmethod
    def read(cls, data: bytes) -> GGUFHeader:
        header, at = cls(), 24
        num_tensors, num_fields = struct.unpack_from("<QQ", data, 8)
        for _ in range(num_fields):
            key, begin = _text(data, at)
            at = _after_value(data, begin + 4, *struct.unpack_from("<I", data, begin))
            header.fields.append((key, data[begin:at]))
        for _ in range(num_tensors):
            name, at = _text(data, at)
            (num_dims,) = struct.unpack_from("<I", data, at)
            *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", data, at + 4)
            header.tensors.append((name, dims, kind, offset))
            at += 4 + 8 * num_dims + 12
        header.rest = data[-(-at // 32) * 32 :]
        return header

    def write(self, num_fields: int | None = None, num_tensors: int | None = None) -> bytes:
        """Return the file; the counts as given, or else right."""
        counts = (self.tensors, num_tensors), (self.fields, num_fields)
        written = b"GGUF" + struct.pack("<I", 3)
        written += b"".join(struct.pack("<Q", len(parts) if count is None else count) for parts, count in counts)
        written += b"".join(_packed(key) + value for key, value in self.fields)
        for name, dims, kind, offset in self.tensors:
            written += _packed(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        return written + b"\0" * (-len(written) % 32) + self.rest


def _text(data: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + size].decode(), at + 8 + size


def _packed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _after_value(data: bytes, at: int, kind: int) -> int:
    if kind == 8:
        return _text(data, at)[1]
    if kind != 9:
        return at + struct.calcsize(_FORMS[kind])
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    for _ in range(count):
        at = _after_value(data, at, kind)
    return at


def _random_value(dice: Dice) -> bytes:
    """Return type and value of a field, of any type and size."""
    kind = dice.choice((*_FORMS, 8, 8, 9, 9))
    if kind == 8:
        value = _packed(dice.choice(("", "x", "llama", "yarn", "\0", "\ud800", "a" * 100_000)))
    elif kind == 9:
        value = _random_array(dice)
    elif kind in (6, 12):
        number = dice.choice((0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("nan"), float("inf")))
        value = struct.pack(_FORMS[kind], number)
    else:
        value = struct.pack("<Q", dice.choice(INTEGERS))[: struct.calcsize(_FORMS[kind])]
    return struct.pack("<I", kind) + value


def _random_array(dice: Dice) -> bytes:
    kind, count = dice.choice((*_FORMS, 8, 9, 99)), dice.choice((0, 1, 2, 1000, *INTEGERS))
    if kind == 9 and dice.random() < 0.5:
        return struct.pack("<IQ", 9, 1) * dice.choice((3, 500, DEEP)) + struct.pack("<IQ", 4, 0)
    data = b"".join(_packed("a") for _ in range(min(count, 1000))) if kind == 8 else b"\0" * min(8 * count, 8000)
    return struct.pack("<IQ", kind, count) + data


def damaged_gguf(data: bytes, dice: Dice) -> bytes:
    header = GGUFHeader.read(data)
    end = len(data) - len(header.rest)
    act = dice.randrange(10)
    if act < 2:
        return damaged_bytes(data, dice, end)
    if act == 2:  # any number of the header; most texts are within the vocabulary
        at, size = dice.randrange(4, min(end, 2000)), dice.choice((4, 8))
        return data[:at] + struct.pack("<Q", dice.choice(INTEGERS))[:size] + data[at + size :]
    if act == 3:
        counts = [dice.choice((None, len(parts) + 1, *INTEGERS)) for parts in (header.fields, header.tensors)]
        return header.write(*counts)
    (_damage_tensor if act == 4 else _damage_field)(header, dice)
    return header.write()


def _damage_tensor(header: GGUFHeader, dice: Dice) -> None:
    at = dice.randrange(len(header.tensors))
    name, dims, kind, offset = header.tensors[at]
    match dice.randrange(7):
        case 0:
            del header.tensors[at]
            return
        case 1:
            header.tensors.insert(at, header.tensors[at])
        case 2:
            name = dice.choice((name + "x", "", "rope_freqs.weight", "blk.9.attn_q.weight"))
        case 3:
            many = [1] * dice.choice((4, 5, 1000))
            dims = dice.choice(([], [0], dims[::-1], [*dims, 1], [d * 2 for d in dims], many))
        case 4:
            dims = [dice.choice((d, *INTEGERS)) for d in dims]
        case 5:
            kind = dice.choice((*range(42), 99, 2**32 - 1))
        case _:
            offset = dice.choice((offset + 1, offset + 32, *INTEGERS))
    header.tensors[at] = (name, dims, kind, offset)


def _damage_field(header: GGUFHeader, dice: Dice) -> None:
    at = dice.randrange(len(header.fields))
    key, value = header.fields[at]
    number = value[4:] if len(value) in (5, 6, 8, 12) else b""
    match dice.randrange(8):
        case 0:
            del header.fields[at]
        case 1:
            header.fields.insert(dice.randrange(len(header.fields)), (key, dice.choice((value, _random_value(dice)))))
        case 2:
            header.fields[at] = (dice.choice((key + "x", "", "general.alignment", "split.count", key.upper())), value)
        case 3 if number:
            header.fields[at] = (key, value[:4] + struct.pack("<Q", dice.choice(INTEGERS))[: len(number)])
        case 4 if number:
            name = dice.choice(("general.alignment", "llama.rope.scaling.factor", "gemma3.attention.scale", "split.no"))
            header.fields.append((name, value[:4] + struct.pack("<Q", dice.choice(INTEGERS))[: len(number)]))
        case 5:
            header.fields[at] = (key, damaged_bytes(value, dice))
        case _:
            header.fields[at] = (key, _random_value(dice))


def damaged_safetensors(data: bytes, dice: Dice) -> bytes:
    (size,) = struct.unpack_from("<Q", data)
    act = dice.randrange(6)
    if act == 0:
        return damaged_bytes(data, dice, 8 + size)
    if act == 1:
        return struct.pack("<Q", dice.choice((size - 1, size + 1, len(data), *INTEGERS))) + data[8:]
    header = data[8 : 8 + size].decode()
    text = _damaged_tensors(json.loads(header), dice).encode() if act == 2 else damaged_json(header, dice)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def _damaged_tensors(header: dict[str, Any], dice: Dice) -> str:
    """Return a header whose entries contradict each other or the data."""
    names = [name for name in header if name != "__metadata__"]
    name, other = dice.choice(names), dice.choice(names)
    entry = header[name]
    match dice.randrange(7):
        case 0:
            entry["data_offsets"] = header[other]["data_offsets"]
        case 1:
            entry["data_offsets"] = [dice.choice((0, -1, *INTEGERS)) for _ in range(2)]
        case 2:
            entry["shape"] = [dice.choice((0, -1, *INTEGERS)) for _ in entry["shape"]]
        case 3:
            kinds = ("F64", "F32", "F16", "I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "C64", "F4", "BF8", "")
            entry["dtype"] = dice.choice(kinds)
        case 4:
            header[name], header[other] = header[other], header[name]
        case 5:
            kind, width = dice.choice((("F16", 1), ("I16", 1), ("U8", 2), ("BOOL", 2), ("I8", 2), ("F8_E4M3", 2)))
            entry["dtype"], entry["shape"] = kind, [*entry["shape"][:-1], entry["shape"][-1] * width]
        case _:
            entry["shape"] = entry["shape"][::-1] if dice.random() < 0.5 else [1, *entry["shape"]]
    return json.dumps(header)


def damaged_lines(text: str, dice: Dice) -> bytes:
    """Return JSON Lines with one damaged line, or damaged bytes."""
    lines = text.splitlines()
    if dice.random() < 0.3:
        return damaged_bytes(text.encode(), dice)
    written, at = [line.encode() for line in lines], dice.randrange(len(lines))
    written[at] = damaged_json(lines[at], dice)
    return b"\n".join(written)
