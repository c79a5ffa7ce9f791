"""Order in which weights have the inputs of a linear.

Legend: K inputs. An order has the input of each place, int32 [K].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def common_order(orders: Sequence[Tensor | None], num_inputs: int) -> Tensor | None:
    """Return the order of all parts; None: as the inputs come.

    Raises ValueError if parts differ, or the order is not a permutation of the inputs.
    """
    if not all(same_order(order, orders[0]) for order in orders):
        raise ValueError("parts of a linear have their inputs in different orders; use --dequantize")
    order = orders[0] if orders else None
    if order is None:
        return None
    inputs = torch.arange(num_inputs, dtype=torch.int32, device=order.device)
    if order.dtype != torch.int32 or not torch.equal(order.sort().values, inputs):
        raise ValueError(f"an order of {order.dtype} {list(order.shape)} is not int32 [{num_inputs}]")
    return order


def same_order(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if two orders are equal."""
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def order_words(order: Tensor | None) -> Tensor:
    """Return an order as rows of words, int64 [K / 8, 4]."""
    return torch.empty(0, 4, dtype=torch.int64) if order is None else order.view(torch.int64).view(-1, 4)
