"""The wait of a kernel that may begin before its predecessor has ended; `pdl` has the rules."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait for the end of the kernel before, and let the next one begin.

    PDL: 0 or False, nothing; 1 or True, in this order; 2, the next one first (see `pdl.attention_options`).
    """
    if PDL == 2:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()
