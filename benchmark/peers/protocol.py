"""What a runtime must offer to be measured, and the one clock that times them all. Imports nothing heavy.

A batch is the prompts (token ids) that a runtime is asked at the same moment: one, or as many as `config.max_batch`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from quant.config import QuantConfig
from sharesd.config import EngineConfig, OffloadConfig, SplitConfig

Batch = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all runtimes are told."""

    config: EngineConfig
    """The model and its dtype, and prompts that are answered together; the rest of it concerns ShareSD alone."""
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
        lists = ("hybrid_with", "auto_drafters", "heads")
        fields = {**values["config"], **{name: tuple(values["config"][name]) for name in lists}}
        split = fields["split"]  # of lists, where it was JSON
        stages = {"devices": tuple(split["devices"]), "max_memory": tuple(map(tuple, split["max_memory"]))}
        parsed = {
            "quant": QuantConfig.parse(quant["spec"], quant["skips"]),
            "offload": OffloadConfig(**fields["offload"]),
            "split": SplitConfig(**{**split, **stages}),
        }
        config = EngineConfig(**{**fields, **parsed})
        return cls(**{**values, "config": config})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The measured answers to one batch."""

    answers: list[list[int]]
    """By prompt."""
    num_read: int
    """Tokens of the prompts."""
    num_first: int
    """Tokens that had come out when the last of the prompts got its first ones."""
    first_s: float
    """From the request to then: reading the prompts, and whatever a runtime decodes meanwhile."""
    decode_s: float
    """From then to the last token."""
    others_busy: float = 0.0
    """Share of the machine's CPU time that other processes took meanwhile."""

    @property
    def work(self) -> tuple[int, float]:
        """Tokens and seconds that speed is made of. Alone, what came after the first delivery: decoding. Of several
        prompts everything, since runtimes read some while they decode others."""
        num_tokens = sum(map(len, self.answers))
        if len(self.answers) == 1:
            return num_tokens - self.num_first, self.decode_s
        return num_tokens, self.first_s + self.decode_s


class TokenClock:
    """Notes when tokens come out of a runtime. Starts when it is made: right before the request."""

    def __init__(self, batch: Batch) -> None:
        self._num_read = sum(map(len, batch))
        self._answers: Batch = [[] for _ in batch]
        self._num_first = 0
        self._started = self._first = self._last = time.perf_counter()

    def add(self, ids: Sequence[int], row: int = 0) -> None:
        """Tokens of the answer to a prompt of the batch came out now."""
        if not ids:
            return
        self._last = time.perf_counter()
        is_first = not self._answers[row]
        self._answers[row] += ids
        if is_first and all(self._answers):
            self._first, self._num_first = self._last, sum(map(len, self._answers))

    def sample(self, num_tokens: int) -> Sample:
        """What was measured; ValueError unless `num_tokens` of each answer came out, and not all at once."""
        wrong = next((len(ids) for ids in self._answers if len(ids) != num_tokens), None)
        if wrong is not None:
            raise ValueError(f"it gave {wrong} tokens where {num_tokens} were asked for")
        if self._first == self._last:
            raise ValueError(f"it gave all {num_tokens} tokens at once, so decoding cannot be timed; ask for more")
        return Sample(
            answers=self._answers,
            num_read=self._num_read,
            num_first=self._num_first,
            first_s=self._first - self._started,
            decode_s=self._last - self._first,
        )


def require_alone(settings: Settings, name: str) -> None:
    """ValueError where several prompts are to be answered together."""
    if settings.config.max_batch > 1:
        raise ValueError(f"{name} answers one prompt at a time")


class Peer(Protocol):
    """One runtime, decoding greedily, in one or more ways. Made by its module's `open_peer(settings)`."""

    def prepare(self, variant: str) -> None:
        """Load, convert and compile whatever `generate` needs; errors say why this way of decoding is impossible."""
        ...

    def generate(self, variant: str, batch: Batch) -> Sample:
        """Answer each prompt with `settings.num_tokens` tokens, nothing of earlier prompts reused."""
        ...
