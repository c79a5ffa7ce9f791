"""An engine that says words, for tests of the server: as sharesd's it has add, step and cancel, rows and a queue.

A text depends on prompt, seed and index alone. Drafts make rounds of several tokens. The tokenizer is that
of tiny.py. `python -m tests.helpers.fake_engine FLAGS` is `python -m serve FLAGS` with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from serve.engine_thread import ServedModel
from sharesd.data.request_errors import GrammarTooComplex, NonFiniteLogits, RequestError
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import StopChecker
from sharesd.models.tokenizer import Tokenizer
from sharesd.sampling.constraints import Grammars
from sharesd.sampling_params import SamplingParams
from tests.helpers.tiny_tokenizer import CHAT_TEMPLATE, SPECIAL, WORDS, make_backend

DRAFT = 3
"""Draft tokens in each round that drafts."""
FAILING, REFUSED, SPOILT, LIMITED = "why red", "why blue", "why green", "why the cat"
"""Prompts with these words make a step fail, are not taken, or soon have no numbers or reach their grammar's limit."""


def make_tokenizer(template: str = CHAT_TEMPLATE) -> Tokenizer:
    backend = make_backend()
    special = {"eos_token": SPECIAL[2], "bos_token": SPECIAL[1]}
    return Tokenizer(backend, special=special, chat_template=template, eos_ids=[backend.token_to_id(SPECIAL[2])])


class SharedScripts(dict[str, str]):
    """Scripts in a file, for engines in several processes."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def items(self) -> Any:
        return json.loads(self._path.read_text()).items() if self._path.exists() else ()

    def __setitem__(self, prompt: str, answer: str) -> None:
        self |= {prompt: answer}

    def __ior__(self, more: Any) -> SharedScripts:  # type: ignore[override, misc]
        self._path.write_text(json.dumps(dict(self.items()) | more))
        return self


@dataclass(eq=True)
class FakeRequest:
    """Compares by value, which must not matter to anybody."""

    prompt_ids: list[int]
    params: SamplingParams
    index: int
    checker: StopChecker
    unread: int
    cached_tokens: int = 0
    position: int = 0
    finish_reason: str | None = None
    stats: Stats = field(default_factory=Stats)

    @property
    def prompt_logprobs(self) -> list[float] | None:
        return [-0.1 * place for place in range(1, len(self.prompt_ids))] if self.params.prompt_logprobs else None

    @property
    def prompt_top_logprobs(self) -> list[list[tuple[int, float]]] | None:
        scored = self.prompt_logprobs if self.params.top_logprobs else None
        return scored and [[(i, value)] for i, value in zip(self.prompt_ids[1:], scored, strict=True)]

    @property
    def num_read(self) -> int:
        return len(self.prompt_ids) - self.unread


class FakeEngine:
    """`delay`: seconds of a step. `piece`: prompt tokens that a step reads. `eager`: the step that reads a prompt's end
    has its first round, too. `scripts`: prompt text -> answer text, in a file if one is given. `held`:
    whether a step shall emit nothing, so that tests need no clock.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_batch: int = 4,
        max_context: int = 256,
        delay: float = 0.0,
        piece: int = 64,
        eager: bool = False,
        scripts: str | None = None,
    ) -> None:
        self.tokenizer, self.max_batch, self.max_context = tokenizer, max_batch, max_context
        self.delay, self.piece, self.eager = delay, piece, eager
        self.scripts: dict[str, str] = {} if scripts is None else SharedScripts(scripts)
        self.held: Callable[[], bool] = lambda: False
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.steps = 0
        self.added: list[FakeRequest] = []
        self._read: list[list[int]] = []
        self._spoken = [tokenizer.backend.token_to_id("Ġ" + word) for word in WORDS]

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def save_text(self) -> bool:
        return False

    def add(self, prompt: str | Sequence[int], params: SamplingParams, index: int = 0) -> FakeRequest:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if REFUSED in self.tokenizer.decode(ids):
            raise ValueError(f"the engine does not take {REFUSED!r}")
        room = self.max_context - len(ids)
        checker = StopChecker(self.tokenizer, params, eos_ids=self.tokenizer.eos_ids, room=room)
        request = FakeRequest(ids, params, index, checker, unread=len(ids))
        self.waiting.append(request)
        self.added.append(request)
        return request

    def cancel(self, request: FakeRequest) -> None:
        for rows in (self.running, self.waiting):
            rows[:] = [other for other in rows if other is not request]

    def step(self) -> list[Any]:
        self.steps += 1
        if self.delay:
            time.sleep(self.delay)
        while self.waiting and len(self.running) < self.max_batch:
            self.running.append(self._place(self.waiting.pop(0)))
        if self.held():
            time.sleep(0.002)
            return []
        chunks = []
        for request in list(self.running):
            if FAILING in self.tokenizer.decode(request.prompt_ids):
                raise RuntimeError("a step failed")
            if request.unread > self.piece:
                request.unread -= self.piece
                continue
            began = request.unread > 0
            chunks.append(self._emit(request))
            if began and self.eager and request.finish_reason is None:
                chunks.append(self._emit(request))
            if request.finish_reason is not None:
                self.cancel(request)
        return chunks

    def _place(self, request: FakeRequest) -> FakeRequest:
        prompt = request.prompt_ids
        shared = max((len(commonprefix([prompt, read])) for read in self._read), default=0)
        request.cached_tokens = min(shared, len(prompt) - 1)
        self._read.append(prompt)
        return request

    def _emit(self, request: FakeRequest) -> Any:
        first = request.unread > 0
        request.unread = 0
        sources = ["target"] if request.params.max_new_tokens else []
        if request.params.speculate and not first:
            accepted = self._dice(request, request.position, "accepted") % (DRAFT + 1)
            sources = ["accepted"] * accepted + ["bonus" if accepted == DRAFT else "recovered"]
        ids = [self._token(request, request.position + n) for n in range(len(sources))]
        count, text, reason = request.checker.push(ids)
        if not first:
            num_drafted = DRAFT if request.params.speculate else 0
            request.stats.record_round(num_drafted, num_drafted, sources.count("accepted"), count)
        start, request.position = request.position, request.position + count
        error: RequestError | None = None
        if SPOILT in self.tokenizer.decode(request.prompt_ids) and request.position > 2:
            reason, error = "error", NonFiniteLogits(f"the logits are not numbers at position {request.position}")
        if LIMITED in self.tokenizer.decode(request.prompt_ids) and request.position > 2:
            reason, error = "error", GrammarTooComplex(f"the grammar became too complex at position {request.position}")
        request.finish_reason = reason
        wanted, top = request.params.logprobs, request.params.top_logprobs
        others = [(i, float("-inf")) for i in self._spoken]
        tops = [[(i, -0.25), *(other for other in others if other[0] != i)][:top] for i in ids[:count]]
        return SimpleNamespace(
            request=request,
            token_ids=ids[:count],
            sources=sources[:count],
            drafters=["suffix" if source == "accepted" else None for source in sources[:count]],
            text=text,
            logprobs=[-0.5 * (start + n) for n in range(count)] if wanted else None,
            top_logprobs=tops if wanted and top else None,
            finish_reason=reason,
            error=error,
            round=None,
        )

    def _token(self, request: FakeRequest, position: int) -> int:
        prompt = self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        script = next((answer for asked, answer in self.scripts.items() if asked in prompt), None)
        if script is None:
            return self._spoken[self._dice(request, position, "token") % len(self._spoken)]
        ids = self.tokenizer.encode(script)
        return ids[position] if position < len(ids) else self.tokenizer.eos_ids[0]

    def _dice(self, request: FakeRequest, position: int, what: str) -> int:
        noise = None if request.params.greedy else (request.params.seed, request.index)
        return int.from_bytes(hashlib.md5(repr((request.prompt_ids, noise, position, what)).encode()).digest()[:4])


def fake_model(*, template: str = CHAT_TEMPLATE, **settings: Any) -> ServedModel:
    tokenizer = make_tokenizer(template)
    engine = FakeEngine(tokenizer, **settings)
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)
    return ServedModel(engine, tokenizer, engine.max_context, tokenizer.vocab_size, grammars)


if __name__ == "__main__":
    from serve.command import main

    def load(config: Any, mode: str, memory_limit: int | None) -> ServedModel:
        model = fake_model(max_batch=config.max_batch)
        model.engine.held = lambda: not Path(os.environ["ANSWERS_WHEN"]).exists()  # type: ignore[attr-defined]
        return model

    sys.exit(main(load=load))
