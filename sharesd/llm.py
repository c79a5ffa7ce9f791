"""`LLM`: Python interface to a loaded model and its drafters."""

from __future__ import annotations

import gc
import operator
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from sharesd.config import Mode
from sharesd.data.chat_messages import EXAMPLE, for_template
from sharesd.drafters import registry
from sharesd.engine.batch_runner import CHUNK
from sharesd.engine.call_queue import Call, CallQueue
from sharesd.engine.outputs import Completion, TokenChunk
from sharesd.loading import option_values
from sharesd.models.chat_prompt import encode_chat
from sharesd.models.tokenizer import Tokenizer
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.weights.quant_tuning_cache import best_quant

DEFAULT_MODE: Mode = "auto"
"""Mode of an LLM without `mode` and `modes`."""
MAX_BATCH = 8
"""Prompts that an LLM decodes together, as the server does."""

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A loaded model and its drafters.

    Methods may be called from any thread, while others run.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        mode: Mode | None = None,
        modes: Sequence[Mode] | None = None,
        **fields: Any,
    ) -> None:
        """Load, compile and warm up.

        Args:
            target: checkpoint folder, .gguf file or hub id; None = the embedded SmolLM2-135M-Instruct.
            mode: mode of calls without one; None = the first of `modes`.
            modes: modes to load.
            fields: fields of `EngineConfig`; nested ones are objects or texts: quant="hqq:4:64,head=4",
                head_quant="hqq:8:64", tree="2:4:8", hybrid_with="share,suffix", split="cuda:0,cuda:1", offload="off".

        `max_batch` is 8 here: a list of prompts is decoded eight at a time, a single prompt is not slower on a CPU,
        and eight rows cost the memory of the KV cache alone (1.4 GB for the embedded model with all of its 8,192
        tokens, 0.4 GB with max_context=2048).

        Raises:
            ValueError: options that cannot be honoured, with the remedy.
        """
        if "drafter_module" in fields:
            fields["drafter_modules"] = option_values.texts(fields.pop("drafter_module"))
        registry.load_modules(fields.get("drafter_modules", ()))
        loaded = tuple(dict.fromkeys(modes or (mode or DEFAULT_MODE,)))
        for name in (*loaded, mode or loaded[0]):
            if name not in registry.modes():
                raise ValueError(f"mode is {name!r}; choose one of {', '.join(registry.modes())}")
        self._modes: tuple[Mode, ...] = loaded
        self._mode = self._loaded(mode or loaded[0])
        given = {"max_batch": MAX_BATCH, "prefill_chunk": CHUNK, "target": target and str(target), **fields}
        config = option_values.engine_config(given, modes=(self._mode, *loaded), best=best_quant)
        self._runtime: Runtime | None = Runtime(config, loaded)
        self._tokenizer, self._max_context = self._runtime.tokenizer, self._runtime.max_context
        self._vocab_size = self._runtime.target.vocab_size
        runtime, warm = self._runtime, SamplingParams()
        self._calls = CallQueue({name: runtime.engine(name, warm=warm, each_kind=True) for name in loaded})

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with its chat template."""
        return self._tokenizer

    @property
    def max_context(self) -> int:
        """Maximum tokens of a prompt and its answer together."""
        return self._max_context

    @property
    def mode(self) -> Mode:
        """The mode of calls without one."""
        return self._mode

    @property
    def modes(self) -> tuple[Mode, ...]:
        """All modes that are loaded."""
        return self._modes

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | None = None, *, mode: Mode | None = None
    ) -> list[Completion]:
        """Continue texts or token ids, without a chat template.

        Texts do not depend on the mode, or on other texts decoded together with them.

        Args:
            prompts: a text, token ids (a single list of ids is one prompt), or a list of such.
            params: for all prompts, each with noise by its place in the call; or one for each, with noise by its seed.
            mode: one of the loaded modes; None = the default.

        Returns:
            One Completion per prompt, in order. Times in `Completion.stats` are those of the request: reading its
            prompt, and its rounds as a whole, though other rows shared them; waiting for a row is not in them.

        Raises:
            ValueError: prompts and parameters that cannot be honoured.
            RuntimeError: a call of another thread was interrupted in the middle of a step.
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
        """Answer a conversation, or a list of them, through the chat template.

        Args:
            messages: `{"role": ..., "content": ...}` with texts, or a list of such lists.
            params: as in `generate`.
            tools: functions as OpenAI describes them, which the model calls in its text.
            mode: as in `generate`.

        Returns:
            A Completion; a list of them for a list of conversations. Errors are those of `generate`.
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
        """Stream one answer in chunks with `.text` and `.token_ids`.

        The last chunk has `.finish_reason`. Closing the iterator cancels the request. Other calls may run between
        chunks.

        Args:
            prompt: a text or token ids, as in `generate`, or messages, as in `chat`.
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
        """Free the model, its KV cache, and threads and processes beside it.

        Calls in other threads end with an error, and so do later ones. May be called twice.
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
        return encode_chat(self._tokenizer, for_template(messages), tools=tools or ())

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
            return Call(name, [(ids, given, place) for place, ids in enumerate(asked)], collected_at_end=whole)
        if len(given) != len(asked):
            raise ValueError(f"params are {len(given)} and prompts {len(asked)}; give one, or one for each")
        return Call(name, [(ids, own, 0) for ids, own in zip(asked, given, strict=True)], collected_at_end=whole)


def _closed() -> ValueError:
    return ValueError("this LLM is closed; make a new one")


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list."""
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
