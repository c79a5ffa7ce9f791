"""auto-round: planes as those of GPTQ, AWQ or compressed-tensors, and settings of single modules."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

from sharesd.models.quantized.affine import AWQ, GPTQ, awq_linear, gptq_linear
from sharesd.models.quantized.compressed_tensors import CompressedTensors
from sharesd.models.quantized.floats import packed_mxfp4, packed_nvfp4
from sharesd.models.quantized.layout import FolderLayout, Planes, QuantSection, StoredLinear

_FORMATS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round", "auto_round:gptqmodel")
_FLOAT_FORMAT = "auto_round:llm_compressor"
_OTHER_NAMES = {"gptq": "auto_gptq", "awq": "auto_awq", "autoround": "auto_round"}
_KERNELS = ("exllamav2", "tritonv2", "triton", "marlin", "gemm", "cuda")
"""Last parts of the names of formats in old versions, which do not change the planes."""
_FLOATS = {
    **dict.fromkeys(("mx_fp", "mx_fp4", "mx_fp_rceil", "mx_fp4e2m1"), packed_mxfp4),
    **dict.fromkeys(("nv_fp", "nv_fp4", "nv_fp4_with_static_gs"), packed_nvfp4),
}
"""Types of data of 4 bits -> reader of a linear."""
_PLAIN_BITS = 16


class AutoRound(FolderLayout):
    """Layout of auto-round's checkpoints of its own format."""

    def __init__(self, settings: QuantSection) -> None:
        """Read the settings; ValueError for those that are not supported."""
        for key in ("rotation_config", "spinquant_config"):
            if settings.get(key):
                raise settings.error(key, "none")
        self._settings, self._format = settings, _format_of(settings)
        is_float = self._format == _FLOAT_FORMAT
        settings.one_of("data_type", tuple(_FLOATS) if is_float else ("int",), None if is_float else "int")
        if not is_float and settings.get("act_bits", _PLAIN_BITS) < _PLAIN_BITS:
            raise settings.error("act_bits", f"{_PLAIN_BITS} next to integers")
        planes: type[FolderLayout] = CompressedTensors if is_float else AWQ if self._format.endswith("awq") else GPTQ
        self.names, self.codes, self.left_out = planes.names, planes.codes, planes.left_out
        self._extra = {key: settings.section("extra_config").section(key) for key in settings.get("extra_config", {})}
        self._blocks = _blocks_of(settings)
        for own in (settings, *self._extra.values()):
            self._check(own)

    def _check(self, own: QuantSection) -> None:
        """Raise ValueError for settings of modules that have no reader."""
        if own.get("bits", 0) >= _PLAIN_BITS:
            return
        is_float = self._format == _FLOAT_FORMAT
        if own.get("data_type") is not None:
            own.one_of("data_type", tuple(_FLOATS) if is_float else ("int",))
        if own is self._settings or own.get("bits") is not None:
            own.one_of("bits", (4,) if is_float or self._format.endswith("awq") else tuple(range(2, 9)))
        own.size("group_size", -1)

    def _own(self, module: str) -> QuantSection | None:
        """Return the settings of a module: by its name, or by the first expression that matches it."""
        if module in self._extra:
            return self._extra[module]
        return next((own for key, own in self._extra.items() if _finds(key, module)), None)

    def _setting(self, module: str, key: str, default: Any = None) -> Any:
        own = self._own(module)
        return self._settings.get(key, default) if own is None else own.get(key, self._settings.get(key, default))

    def excludes(self, module: str) -> bool:
        return bool(self._setting(module, "bits") >= _PLAIN_BITS)

    def includes(self, module: str) -> bool:
        in_blocks = not self._blocks or module.startswith(self._blocks)
        return not self.excludes(module) and (in_blocks or module in self._extra)

    def linear(self, planes: Planes) -> StoredLinear:
        bits, size = (self._setting(planes.module, key, -1) for key in ("bits", "group_size"))
        if self._format == _FLOAT_FORMAT:
            own = QuantSection({"group_size": size}, "quantization_config")
            return _FLOATS[self._setting(planes.module, "data_type")](planes, own)
        if self._format.endswith("awq"):
            return awq_linear(planes, size)
        return gptq_linear(planes, bits, size, stores_minus_one=self._format.endswith("auto_gptq"))


def _format_of(settings: QuantSection) -> str:
    """Return the format of the planes in its present name."""
    key = "packing_format" if settings.get("packing_format") is not None else "backend"
    stored = settings.get(key, "auto")
    if stored == "auto":
        return _FORMATS[0]
    parts = [_OTHER_NAMES.get(part, part) for part in str(stored).split(":")]
    while parts and parts[-1] in _KERNELS:
        parts.pop()
    name = ":".join(parts if parts[:1] == ["auto_round"] else ["auto_round", *parts])
    if name not in (*_FORMATS, _FLOAT_FORMAT):
        raise settings.error(key, f"one of {', '.join((*_FORMATS, _FLOAT_FORMAT))}")
    return name


def _blocks_of(settings: QuantSection) -> tuple[str, ...]:
    """Return the beginnings of the names of quantized modules; none if all blocks are."""
    key = "block_name_to_quantize"
    stored = settings.get(key, [])
    names = stored.split(",") if isinstance(stored, str) else stored
    if not isinstance(names, list):
        raise settings.error(key, "a text, or a list of them")
    flat = [*chain.from_iterable([each] if isinstance(each, str) else each for each in names)]
    if not all(isinstance(each, str) for each in flat):
        raise settings.error(key, "a text, or a list of them")
    return tuple(each.strip() for each in flat)


def _finds(expression: str, module: str) -> bool:
    try:
        return re.search(expression, module) is not None
    except re.error:  # auto-round skips it, too
        return False
