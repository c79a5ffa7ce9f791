"""`LLM`: a model that answers, in a few lines of Python."""

from __future__ import annotations

import gc
import operator
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from sharesd.config import MODES, Mode, SamplingParams
from sharesd.data.chat_messages import EXAMPLE, for_template
from sharesd.engine.batch_runner import CHUNK
from sharesd.engine.call_queue import Call, Calls
from sharesd.engine.outputs import Completion, TokenChunk
from sharesd.loading import option_values
from sharesd.models.tokenizer import Tokenizer
from sharesd.runtime import Runtime
from sharesd.weights.quant_tuning_cache import best_quant

DEFAULT_MODE: Mode = "auto"
"""Mode of an LLM without `mode` and `modes`."""
MAX_BATCH = 8
"""Prompts that an LLM decodes together, as the server does."""

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A loaded model and its drafters. Its methods may be called from any thread, while others run too."""

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        mode: Mode | None = None,
        modes: Sequence[Mode] | None = None,
        **fields: Any,
    ) -> None:
        """Load, compile and warm up, so that the first call is as fast as later ones.

        `target`: a checkpoint folder, .gguf file or hub id; None = the embedded SmolLM2-135M-Instruct. `modes` are
        loaded, of which `mode` (default: the first) decodes where a call names none. `fields` are those of
        `EngineConfig`; nested ones are objects or texts: quant="hqq:4:64,head=4", head_quant="hqq:8:64",
        tree="2:4:8", hybrid_with="share,suffix", split="cuda:0,cuda:1", offload="off".

        `max_batch` is 8 here: a list of prompts is decoded eight at a time, a single prompt is not slower on a CPU, and
        what eight rows take of memory is the KV cache alone (1.4 GB for the embedded model with all of its 8,192
        tokens, 0.4 GB with max_context=2048).

        Raises ValueError, with the remedy, for whatever cannot be honoured.
        """
        loaded = tuple(dict.fromkeys(modes or (mode or DEFAULT_MODE,)))
        for name in (*loaded, mode or loaded[0]):
            if name not in MODES:
                raise ValueError(f"mode is {name!r}; choose one of {', '.join(MODES)}")
        self._modes: tuple[Mode, ...] = loaded
        self._mode = self._loaded(mode or loaded[0])
        given = {"max_batch": MAX_BATCH, "prefill_chunk": CHUNK, "target": target and str(target), **fields}
        config = option_values.engine_config(given, modes=(self._mode, *loaded), best=best_quant)
        self._runtime: Runtime | None = Runtime(config, loaded)
        self._tokenizer, self._max_context = self._runtime.tokenizer, self._runtime.max_context
        self._vocab_size = self._runtime.target.vocab_size
        runtime, warm = self._runtime, SamplingParams()
        self._calls = Calls({name: runtime.engine(name, warm=warm, each_kind=True) for name in loaded})

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with its chat template."""
        return self._tokenizer

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its answer together at most."""
        return self._max_context

    @property
    def mode(self) -> Mode:
        """The mode of calls that name none."""
        return self._mode

    @property
    def modes(self) -> tuple[Mode, ...]:
        """All modes that are loaded."""
        return self._modes

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | None = None, *, mode: Mode | None = None
    ) -> list[Completion]:
        """Go on with texts or token ids, without a chat template; one Completion per prompt, in order.

        A single text, or one list of token ids, gives a list of one. `params` are for all prompts, each of which has
        noise of its own by its place in the call; or one for each, whose noise is by its seed alone. No text depends on
        the mode, or on what else is decoded.

        The times in `Completion.stats` are those of the request: of reading its prompt, and of the rounds that it took
        part in, whole, though other rows shared them. Waiting for a row is not in them.

        Raises ValueError for prompts and parameters that cannot be honoured, RuntimeError where another thread's call
        was broken off in the middle of a step.
        """
        asked = [self._ids(prompt) for prompt in _prompts(prompts)]
        return self._complete(asked, params, mode)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mode: Mode | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mode: Mode | None = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mode: Mode | None = None,
    ) -> Completion | list[Completion]:
        """Answer a conversation, put to the model through its chat template: a Completion; a list of them for a list.

        Messages are `{"role": ..., "content": ...}` with texts; `tools` are functions as OpenAI describes them, which
        the model calls in its text. `params` and errors as in `generate`.
        """
        several = _is_conversations(messages)
        conversations = messages if several else [messages]
        asked = [self._chat_ids(each, tools) for each in conversations]  # type: ignore[arg-type]
        found = self._complete(asked, params, mode)
        return found if several else found[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        mode: Mode | None = None,
    ) -> Generator[TokenChunk, None, None]:
        """Pieces of one answer as they come, with `.text`, `.token_ids` and, the last one, `.finish_reason`.

        `prompt`: a text or token ids, as in `generate`, or messages, as in `chat`. Closing the iterator cancels the
        request. Other calls may run while it is half read; what comes meanwhile is kept for it.
        """
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            asked = [self._chat_ids(prompt, None)]  # type: ignore[arg-type]
        else:
            prompts = _prompts(prompt)  # type: ignore[arg-type]
            if len(prompts) != 1 or prompts[0] is not prompt:
                raise ValueError(f"stream takes one prompt, and these are {len(prompts)}; take generate for several")
            asked = [self._ids(prompts[0])]
        return self._calls.run(self._call(asked, params, mode, whole=False))

    def close(self) -> None:
        """Free the model, its KV cache, and threads or processes beside it. Calls that run elsewhere end with an error,
        and so do later ones. May be called twice.
        """
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        self._calls.close(_closed())
        runtime.close()
        on_gpu = runtime.device.type == "cuda"
        del runtime
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _loaded(self, mode: Mode) -> Mode:
        if mode not in self._modes:
            raise ValueError(f"mode {mode!r} is not loaded; loaded are {', '.join(self._modes)}")
        return mode

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise ValueError(
                f"the prompt {prompt!r:.80} is no text and no list of token ids; give one of the two"
            ) from None

    def _chat_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        if tools and not self._tokenizer.takes_tools:
            raise ValueError(f"{len(tools)} tools are given, and the model's chat template shows none; drop them")
        return self._tokenizer.chat(for_template(messages), tools=tools)

    def _complete(self, asked: list[list[int]], params: Params | None, mode: Mode | None) -> list[Completion]:
        call = self._call(asked, params, mode, whole=True)
        if not asked:
            return []
        chunks = list(self._calls.run(call))
        done = {request: Completion() for request in call.requests}
        for chunk in chunks:
            done[chunk.request].add(chunk)
        return list(done.values())

    def _call(self, asked: list[list[int]], params: Params | None, mode: Mode | None, *, whole: bool) -> Call:
        if self._runtime is None:
            raise _closed()
        name = self._loaded(mode or self._mode)
        given = params or SamplingParams()
        if isinstance(given, SamplingParams):
            return Call(name, [(ids, given, place) for place, ids in enumerate(asked)], whole=whole)
        if len(given) != len(asked):
            raise ValueError(f"params are {len(given)} and prompts {len(asked)}; give one, or one for each")
        return Call(name, [(ids, own, 0) for ids, own in zip(asked, given, strict=True)], whole=whole)


def _closed() -> ValueError:
    return ValueError("this LLM is closed; make a new one")


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, of which one by itself is one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts are {prompts!r:.80}; give a text, token ids, or a list of them")
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise ValueError("prompts hold messages; take chat for conversations")
    if prompts and all(hasattr(prompt, "__index__") for prompt in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_conversations(messages: Any) -> bool:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages are {messages!r:.80}; give at least one, as {EXAMPLE}")
    return not isinstance(messages[0], Mapping) and not isinstance(messages[0], str)
