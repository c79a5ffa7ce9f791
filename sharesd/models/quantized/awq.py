"""AWQ "gemm": integers packed along the outputs.

w = (q - z) * s.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sharesd.models.quantized.affine import Affine, unpack_outputs
from sharesd.models.quantized.layout import Layout, Planes, Settings, pattern_of

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Field of a word for each of its outputs."""


class AWQ(Layout):
    """Layout of AutoAWQ's kernels "gemm"."""

    names = pattern_of(("qweight", "qzeros", "scales"))
    codes = frozenset({"qweight"})

    def __init__(self, settings: Settings) -> None:
        """Read the settings; ValueError for those that are not supported."""
        if settings.get("backend") == "llm-awq":
            raise settings.error("backend", "autoawq")
        key = "version" if settings.get("version") is not None else "format"
        version = settings.get(key, "gemm")
        if str(version).lower() != "gemm":
            raise settings.error(key, "gemm")
        settings.one_of("w_bit" if settings.get("bits") is None else "bits", (4,), 4)
        self._group_size = settings.size("q_group_size" if settings.get("group_size") is None else "group_size", 128)
        self.excluded = settings.texts("modules_to_not_convert")

    def linear(self, planes: Planes) -> Affine:
        return awq_linear(planes, self._group_size)


def awq_linear(planes: Planes, group_size: int) -> Affine:
    """Return a linear; ValueError for planes that do not fit the settings."""
    qweight = planes.take("qweight", [torch.int32], (-1, -1))
    K, N = qweight.shape[0], qweight.shape[1] * 8
    size = K if group_size == -1 else group_size
    if K % size:
        raise planes.error("qweight", f"has {K} inputs, which groups of {size} do not divide")
    scale_GN = planes.scales("scales", (K // size, N))
    zero_NG = unpack_outputs(planes.take("qzeros", [torch.int32], (K // size, N // 8)), _ORDER)

    def codes(begin: int, end: int) -> Tensor:
        return unpack_outputs(qweight[:, begin // 8 : end // 8], _ORDER)

    return Affine(planes.module, codes, K, 4, scale_GN.t(), zero_NG)
