"""What a runtime must offer to be measured, and the one clock that times them all. Imports nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from quant.config import QuantConfig
from sharesd.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all runtimes are told."""

    config: EngineConfig
    """The model and its dtype; the rest of it concerns ShareSD alone."""
    num_tokens: int
    """Tokens to generate per prompt, whatever end-of-sequence ids come up."""
    num_threads: int
    """Threads on CPU."""

    @property
    def dtype(self) -> str:
        """The dtype in full, `auto` resolved as ShareSD does."""
        return "bfloat16" if self.config.dtype == "auto" else self.config.dtype

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the way back."""
        quant = {"spec": self.config.quant.spec, "skips": self.config.quant.skips}
        config = {**asdict(self.config), "quant": quant}
        return {"config": config, "num_tokens": self.num_tokens, "num_threads": self.num_threads}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Settings:
        """What `to_json` made."""
        quant = values["config"]["quant"]
        fields = {**values["config"], "hybrid_with": tuple(values["config"]["hybrid_with"])}
        config = EngineConfig(**{**fields, "quant": QuantConfig.parse(quant["spec"], quant["skips"])})
        return cls(**{**values, "config": config})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured answer."""

    token_ids: list[int]
    """The answer."""
    num_first: int
    """Tokens that came out first, together; not counted as decoded."""
    first_s: float
    """From the request to these: reading the prompt, and the first round where a runtime starts with one."""
    decode_s: float
    """From these to the last token."""
    others_busy: float = 0.0
    """Share of the machine's CPU time that other processes took meanwhile."""

    @property
    def num_decoded(self) -> int:
        """Tokens that came out during `decode_s`."""
        return len(self.token_ids) - self.num_first


class TokenClock:
    """Notes when tokens come out of a runtime. Starts when it is made: right before the request."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self._last = self._started
        self._ids: list[int] = []

    def add(self, ids: Sequence[int]) -> None:
        """Tokens came out now."""
        if not ids:
            return
        self._last = time.perf_counter()
        self._ids += ids
        self._first = self._first or (self._last, len(ids))

    def sample(self, num_tokens: int) -> Sample:
        """What was measured; ValueError unless `num_tokens` came out, and not all at once."""
        if len(self._ids) != num_tokens:
            raise ValueError(f"it gave {len(self._ids)} tokens where {num_tokens} were asked for")
        assert self._first is not None
        first_at, num_first = self._first
        if num_first == num_tokens:
            raise ValueError(f"it gave all {num_tokens} tokens at once, so decoding cannot be timed; ask for more")
        return Sample(
            token_ids=self._ids,
            num_first=num_first,
            first_s=first_at - self._started,
            decode_s=self._last - first_at,
        )


class Peer(Protocol):
    """One runtime, decoding greedily, in one or more ways. Made by its module's `open_peer(settings)`."""

    def prepare(self, variant: str) -> None:
        """Load, convert and compile whatever `generate` needs; errors say why this way of decoding is impossible."""
        ...

    def generate(self, variant: str, prompt: list[int]) -> Sample:
        """Answer a prompt with `settings.num_tokens` tokens, nothing of earlier prompts reused."""
        ...
