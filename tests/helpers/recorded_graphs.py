"""CUDA graphs on a CPU: what a capture does is recorded and undone, and a replay does it again with the same tensors.

Stricter than CUDA, so that mistakes show: before each replay all memory that graphs of the pool made is poisoned, but
for what the functions returned; and a capture that reads a tensor on the host, or takes numbers from it, fails.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import compile.attention
import compile.kv_compact
import compile.kv_layout
import compile.state_update
import compile.topk
import compile.tree_expand
import sharesd.kvcache.static
from compile.attention import rotate
from compile.cuda_graphs import Graphs
from compile.kv_layout import SLOT_MULTIPLE
from sharesd.drafters import tree_draft
from sharesd.drafters.eagle import drafter as eagle_drafter
from sharesd.drafters.glide import head as glide_head
from sharesd.drafters.hybrid import drafter as hybrid_drafter
from sharesd.models import decoder
from sharesd.sampling import acceptance, logits_processors, sampler

T = TypeVar("T")
READS = ("tolist", "numpy", "item", "cpu", "data_ptr", "__bool__", "__int__", "__index__", "__float__")
"""Methods through which the host sees what a tensor holds; data_ptr is how kernels for CPUs get it."""
SYNCHRONISING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "lift_fresh")
"""Operations that wait for the device, or bring data from the host."""


class HostRead(RuntimeError):
    """A capture depends on the host."""


class Recording(TorchDispatchMode):
    """The operations of one capture, as long as it is entered; a graph from then on."""

    in_progress = False
    """Whether any is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable, tuple, dict, list[Tensor]]] = []  # an operation, and what it made
        self._made: dict[int, Tensor] = {}  # a tensor of each storage that was made here
        self._found: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # changed ones, and copies
        self._alive: list[Any] = []  # storages are told apart by their addresses
        self.returned: set[int] = set()
        """Storages that the captured function returned: they stay as they are while other functions are replayed."""
        self.operations: Counter[str] = Counter()
        """Names of what a replay runs."""
        self.num_replays = 0
        self._is_poisoned = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name in SYNCHRONISING:
            refuse(name)
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep_before(value)
        out = func(*args, **kwargs)
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        fresh = [t for t in tree_leaves(out) if isinstance(t, Tensor) and _storage(t) not in given]
        self._alive.append((args, kwargs, out))
        if fresh or func._schema.is_mutable:  # all else are views, which stay where they are
            self._steps.append((func, args, kwargs, fresh))
            self._made |= {_storage(t): t for t in fresh}
            self.operations[name] += 1
        return out

    def _keep_before(self, changed: Any) -> None:
        for tensor in tree_leaves(changed):
            place = _storage(tensor)
            if place not in self._made and place not in self._found:
                self._alive.append(tensor)
                self._found[place] = (tensor.untyped_storage(), tensor.untyped_storage().clone())

    def undo(self) -> None:
        """What the capture changed is as it was before."""
        for storage, before in self._found.values():
            storage.copy_(before)
        self._found.clear()

    def poison(self, *, returned: bool) -> None:
        """Overwrite what was made here since the last time; what was returned, too, if so wanted."""
        kept, scratch = self._kept_and_scratch
        for tensor in (*(kept if returned else ()), *(() if self._is_poisoned else scratch)):
            tensor.fill_(math.nan if tensor.is_floating_point() else 2**40 if tensor.dtype == torch.int64 else 1)
        self._is_poisoned = True

    @cached_property
    def _kept_and_scratch(self) -> tuple[list[Tensor], list[Tensor]]:
        """What was made here, by whether it was returned."""
        made = self._made.items()
        return tuple([tensor for at, tensor in made if (at in self.returned) == kept] for kept in (True, False))

    def replay(self) -> None:
        self.num_replays += 1
        self._is_poisoned = False
        for func, args, kwargs, fresh in self._steps:
            again = func(*args, **kwargs)
            made = (again,) if isinstance(again, Tensor) else tree_leaves(again) if fresh else ()
            for tensor, new in zip(fresh, (t for t in made if isinstance(t, Tensor)), strict=bool(fresh)):
                tensor.copy_(new)


class RecordedGraphs(Graphs):
    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Recording] = []
        self._recording: list[Recording] = []  # of the function that is being captured

    def _record(self, function: Callable[[], T]) -> tuple[Callable[[], object], T]:
        self._recording.clear()
        try:
            replay, result = super()._record(function)
        finally:
            with _disable_current_modes():  # whoever watches operations shall see those of replays alone
                for recording in reversed(self._recording):
                    recording.undo()
        ours = [*self._recording]
        for recording in ours:
            recording.returned = {_storage(t) for t in tree_leaves(result) if isinstance(t, Tensor)}
        self.recorded += ours

        def poisoned_before() -> None:
            with _disable_current_modes():
                for recording in self.recorded:
                    recording.poison(returned=recording in ours)
            replay()

        return poisoned_before, result

    @contextmanager
    def _graph(self) -> Iterator[Callable[[], object]]:
        recording = Recording()
        self._recording.append(recording)
        Recording.in_progress = True
        try:
            with host_reads(refuse), recording:
                yield recording.replay
        finally:
            Recording.in_progress = False

    @property
    def num_replays(self) -> int:
        return sum(recording.num_replays for recording in self.recorded)


@contextmanager
def host_reads(noticed: Callable[[str], None]) -> Iterator[None]:
    """Within the block, `noticed` is told of each method by which the host looks at a tensor."""

    def watched(name: str) -> Callable[..., Any]:
        read = getattr(Tensor, name)
        return lambda *args, **kwargs: (noticed(name), read(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, watched(name))
        yield


def refuse(name: str) -> None:
    raise HostRead(f"{name} in a capture")


def take_the_way_of_cuda(patch: pytest.MonkeyPatch) -> None:
    """On a CPU, run the tensor operations that run on CUDA, in place of kernels for CPUs."""

    def attend(
        q_BTHd: Tensor,
        k_BTKd: Tensor,
        v_BTKd: Tensor,
        *old: Tensor,
        rotary: Any = None,
        norms: Any = None,
        query_factors: Any = None,
        **how: Any,
    ) -> Tensor:
        assert query_factors is None
        k_cache, v_cache, lengths_B = old
        slots = k_cache.shape[2] * (SLOT_MULTIPLE if k_cache.dtype == torch.int8 else 1)
        lengths_B = lengths_B % slots  # idle rows, which kernels leave out, write behind all texts
        if norms is not None:
            q_BTHd, k_BTKd = norms[0](q_BTHd), norms[1](k_BTKd)
        if rotary is not None:
            angles = compile.attention.position_angles(rotary, q_BTHd.shape[1], lengths_B, how.get("tree_mask"))
            q_BTHd, k_BTKd = rotate(q_BTHd, *angles), rotate(k_BTKd, *angles)
        return compile.attention.attend_reference(q_BTHd, k_BTKd, v_BTKd, k_cache, v_cache, lengths_B, **how)

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *size, **how: make(*size, **{**how, "plain": True})

    accept_tree, expand = acceptance.accept_tree_reference, compile.tree_expand
    for module in (decoder, glide_head):
        patch.setattr(module, "attend", attend)
    for module in (logits_processors, hybrid_drafter):
        patch.setattr(module, "top_k", lambda x_RV, k: x_RV.topk(k).indices)
    ways: dict[Any, dict[str, Callable[..., Any]]] = {
        sharesd.kvcache.static: {
            "new_kv": plain(compile.kv_layout.new_kv),
            "kv_layout": plain(compile.kv_layout.kv_layout),
            "is_packed": lambda device, **_: False,
            "kv_compactor": lambda keys, values, sizes, _: compile.kv_compact.compactor_reference(keys, values, sizes),
            "compact_slots": compile.kv_compact.compact_slots_reference,
        },
        compile.state_update: {"count_finite": compile.state_update.count_finite_reference},
        eagle_drafter: {"append_tokens": compile.state_update.append_tokens_reference},
        logits_processors: {"arg_max": lambda x: x.argmax(-1)},
        sampler: {
            "top_logp": compile.topk.top_logp_reference,
            "accept_tree": lambda tree, target_BT: accept_tree(tree, tree.tree_mask, target_BT),
        },
        tree_draft: {"expand_tree": expand.expand_tree_reference, "select_nodes": expand.select_nodes_reference},
    }
    for module, functions in ways.items():
        for name, function in functions.items():
            patch.setattr(module, name, function)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
