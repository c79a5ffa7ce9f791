"""Short timings of a large decoder, by its first blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from compile.block_ranges import BlockRange
from compile.decoder_stack import NativeStack
from sharesd.drafters.base import num_bytes
from sharesd.engine.engine import Engine
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder

SAMPLE_BYTES = 2**29
"""Weights of the blocks that are timed, more than caches hold."""


class BlockSample:
    """First blocks of a decoder, which stand for all of them.

    Only the C++ kernel runs a part of a decoder without being compiled anew. Other models are timed whole.
    """

    def __init__(self, model: CausalModel | None, *, is_timed: bool = True) -> None:
        """`is_timed`: take enough blocks for timings, or all of them."""
        self._model = model if isinstance(model, Decoder) and is_native(model) else None
        self._num_blocks, self._scale = 0, 1.0
        if self._model is None or self._model.split.crosses_devices:
            self._model = None
            return
        blocks = self._model.blocks
        self.num_all = len(blocks)
        self.model_bytes = len(blocks) * num_bytes(blocks[0])
        """Weights of all blocks."""
        self._num_blocks = max(1, -(-SAMPLE_BYTES // num_bytes(blocks[0])))
        self._scale = len(blocks) / self._num_blocks
        if is_timed and self._scale < 2:
            self._model = None

    @property
    def is_whole(self) -> bool:
        """True if all blocks are timed."""
        return self._model is None

    def seconds(self, function: Callable[[], object]) -> float:
        """Return the seconds of a function that runs the model.

        Those of the timed blocks are scaled to all.
        """
        if self._model is None:
            return _timed(function)
        with self.blocks(0):
            rest = _timed(function)
        with self.blocks(self._num_blocks):
            return rest + self._scale * max(0.0, _timed(function) - rest)

    @contextmanager
    def blocks(self, num_blocks: int) -> Iterator[None]:
        """Run so many of the first blocks inside the context."""
        model = self._model
        if model is None:
            yield
            return
        whole = model.ranges
        model.ranges = lambda: (BlockRange(0, num_blocks),)
        try:
            yield
        finally:
            model.ranges = whole


def is_native(model: CausalModel) -> bool:
    """Return True if the C++ kernel runs the model."""
    return isinstance(model, Decoder) and isinstance(model.run_stack, NativeStack)


@contextmanager
def first_blocks(engine: Engine) -> Iterator[None]:
    """Run one block of each native model of an engine."""
    if engine.offloaded:
        yield
        return
    models = [engine.target, *(model for model, _ in (engine.drafter.prompt_readers() if engine.drafter else ()))]
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(BlockSample(model, is_timed=False).blocks(1))
        yield


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
