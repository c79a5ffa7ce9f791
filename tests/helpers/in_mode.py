"""An engine whose calls are all of one mode, for tests that compare modes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from sharesd.config import Mode
from sharesd.drafters.base import Drafter
from sharesd.engine.call_queue import decode
from sharesd.engine.engine import Engine, Prompt
from sharesd.engine.loaded_mode import DecodeVariant, LoadedMode
from sharesd.engine.outputs import Completion, TokenChunk
from sharesd.engine.request import Request
from sharesd.engine.stats import Stats
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams


class InMode:
    """An engine's calls, drafter, policies and counts of one mode; all else is the engine's."""

    def __init__(self, engine: Engine, mode: str) -> None:
        vars(self).update(engine=engine, mode=mode, _stats=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.engine, name, value)

    @property
    def loaded(self) -> LoadedMode:
        return self.engine.modes[self.mode]

    @property
    def drafter(self) -> Drafter | None:
        return self.loaded.drafter

    @property
    def num_draft(self) -> int:
        return self.loaded.num_draft

    @property
    def async_scheduling(self) -> bool:
        return self.loaded.async_scheduling

    @property
    def stats(self) -> Stats:
        """Those of the last call through this object, else the engine's."""
        return vars(self)["_stats"] or self.engine.stats

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]:
        """The answers; raises the first RequestError after the last chunk."""
        done = [Completion() for _ in prompts]
        for chunk in self.stream(prompts, params, **options):
            done[chunk.row].add(chunk)
        return done

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        mode: str | None = None,
        **options: Any,
    ) -> Generator[TokenChunk, None, None]:
        """`decode`, with the numbers of emitted tokens of all requests in `stats`; ends earlier calls."""
        self.engine.cancel_all()
        chunks = decode(self.engine, prompts, params or SamplingParams(), mode=mode or self.mode, **options)
        found, error = list[Request](), None
        with closing(chunks):
            for chunk in chunks:
                if chunk.request not in found:
                    found.append(chunk.request)
                error = error or chunk.error
                vars(self)["_stats"] = stats = self.engine.stats
                in_order = sorted(found, key=lambda request: request.index)
                stats.accept_lengths = [request.stats.accept_lengths[0] for request in in_order]
                yield chunk
        if error is not None:
            raise error

    def add(self, *args: Any, **options: Any) -> Request:
        return self.engine.add(*args, **{"mode": self.mode, **options})

    def check(self, prompt: Any, params: SamplingParams, mode: str | None = None) -> list[int]:
        return self.engine.check(prompt, params, mode or self.mode)

    def variant(self, params: SamplingParams, mode: str | None = None) -> DecodeVariant:
        return self.engine.variant(params, mode or self.mode)


def in_one_engine(*engines: Any) -> dict[str, Any]:
    """Return one engine in the mode of each of these engines, which have one cache."""
    first, drafters = engines[0], {each.mode: each.drafter for each in engines}
    parts = {"target": first.target, "tokenizer": first.tokenizer, "cache": first.cache, "options": first.options}
    engine = Engine(**parts, drafters=drafters)
    return {mode: InMode(engine, mode) for mode in drafters}


def in_mode(
    runtime: Runtime, mode: Mode | None = None, *, warm: SamplingParams | None = None, each_kind: bool = False
) -> Any:
    """Warm up a mode of a runtime, its own one by default, and return the engine in it."""
    mode = mode or runtime.config.mode
    return InMode(runtime.warm_up(mode, warm, each_kind=each_kind), mode)
