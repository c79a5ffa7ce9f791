"""`LLM`: Python interface to a loaded model and its drafters."""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from sharesd.config import OFFLINE_CHUNK, EngineConfig, Mode
from sharesd.data.chat_messages import EXAMPLE, for_template
from sharesd.drafters import registry
from sharesd.engine.call_queue import Call, CallPrompt, CallQueue
from sharesd.engine.outputs import Completion, TokenChunk
from sharesd.field_types import DefaultLimit, as_list, converted, plain, shown, typed
from sharesd.models.chat_prompt import encode_chat
from sharesd.models.tokenizer import Tokenizer
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams, cut_by_context
from sharesd.startup import option_values

log = logging.getLogger(__name__)

DEFAULT_MODE: Mode = "auto"
"""Mode of an LLM without `mode` and `modes`."""
MAX_BATCH = DefaultLimit(8)
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
        and eight rows cost only the memory of the KV cache (1.4 GB for the embedded model with all of its 8,192
        tokens, 0.4 GB with max_context=2048). Without `max_batch` there are fewer rows if recurrent layers would keep
        too much of eight.

        Raises:
            ValueError: options that cannot be honoured, with the remedy.
        """
        if "drafter_module" in fields:
            fields["drafter_modules"] = fields.pop("drafter_module")
        registry.load_modules(converted(EngineConfig, "drafter_modules", fields.get("drafter_modules", ())))
        mode = typed(str | None, "mode", mode)
        modes = typed(tuple[str, ...] | None, "modes", modes)
        if modes == ():
            raise ValueError("modes is empty; give at least one, or leave it out")
        loaded = tuple(dict.fromkeys(modes or (DEFAULT_MODE if mode is None else mode,)))
        mode = loaded[0] if mode is None else mode
        for name in (*loaded, mode):
            if name not in registry.modes():
                raise ValueError(f"mode is {name!r}; choose one of {', '.join(registry.modes())}")
        if mode not in loaded:
            raise _not_loaded(mode, loaded)
        if fields.get("max_batch", 0) is None:
            del fields["max_batch"]
        given = {"max_batch": MAX_BATCH, "prefill_chunk": OFFLINE_CHUNK, "target": target, **fields}
        config = option_values.engine_config(given, modes=(mode, *loaded))
        self._load(config, loaded)
        for name in loaded:
            self.runtime.warm_up(name, each_kind=True)

    @classmethod
    def from_config(cls, config: EngineConfig, modes: Sequence[Mode] = (), *, reuse: bool = True, **hooks: Any) -> LLM:
        """Load a model without a warm-up; `runtime.warm_up` then compiles and times what is needed of each mode.

        Args:
            config: all options; its mode is that of calls without one.
            modes: modes to load; none: the config's.
            reuse: prompts are not read again as far as a row has their beginning. False: to time all of them.
            hooks: keywords of `Runtime`, such as `progress`.
        """
        made = cls.__new__(cls)
        made._load(config, tuple(modes) or (config.mode,), reuse=reuse, **hooks)
        return made

    def _load(self, config: EngineConfig, modes: tuple[Mode, ...], *, reuse: bool = True, **hooks: Any) -> None:
        self._runtime: Runtime | None = Runtime(config, modes, **hooks)
        self._mode, self._modes = self._runtime.engine.mode, self._runtime.modes
        self._tokenizer, self._max_context = self._runtime.tokenizer, self._runtime.max_context
        self._reuse = reuse
        self.calls = CallQueue(self._runtime.engine)
        """Calls that share the engine; conversations add prompts to one of theirs."""

    @property
    def runtime(self) -> Runtime:
        """The loaded model, with its engine: for statistics, reports and warm-ups, while no call runs."""
        if self._runtime is None:
            raise _closed()
        self.calls.drop_closed()
        return self._runtime

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

        Texts do not depend on the mode, or on other texts decoded together with them. If a given `max_new_tokens` is
        more than the context has room for, one warning per call is logged, and the answer ends with the context.

        Args:
            prompts: a text, token ids (a single list of ids is one prompt), or a list of such.
            params: one for all prompts, whose noise depends on the seed and the prompt's index; or one for each
                prompt, whose noise depends on its seed alone.
            mode: one of the loaded modes; None = the default.

        Returns:
            One Completion per prompt, in order. Times in `Completion.stats` are those of the request: reading its
            prompt, and its rounds as a whole, though other rows shared them; waiting for a row is not in them.

        Raises:
            ValueError: prompts and parameters that cannot be honoured.
            RuntimeError: a call of another thread was interrupted in the middle of a step.
        """
        return self._complete([self._ids(prompt) for prompt in _prompts(prompts)], params, mode)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mode: Mode | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mode: Mode | None = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mode: Mode | None = None,
    ) -> Completion | list[Completion]:
        """Answer a conversation, or a list of them, through the chat template.

        Args:
            messages: `{"role": ..., "content": ...}` with texts, or a list of such lists.
            params: as in `generate`.
            tools: functions as OpenAI describes them, which the model calls in its text.
            chat_template_kwargs: values of the chat template's variables, such as enable_thinking.
            mode: as in `generate`.

        Returns:
            A Completion; a list of them for a list of conversations. Errors are those of `generate`.
        """
        several, conversations = _conversations(messages)
        shown_tools = typed(tuple[Mapping[str, Any], ...] | None, "tools", tools)
        variables = typed(Mapping[str, Any] | None, "chat_template_kwargs", chat_template_kwargs)
        found = self._complete([self._chat_ids(each, shown_tools, variables) for each in conversations], params, mode)
        return found if several else found[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt] | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        mode: Mode | None = None,
    ) -> Generator[TokenChunk, None, None]:
        """Stream an answer in chunks with `.text` and `.token_ids`.

        The last chunk of an answer has `.finish_reason`. Closing the iterator cancels the rest. Other calls may run
        between chunks.

        Args:
            prompt: a text or token ids, as in `generate`, or messages, as in `chat`; or a list of texts and token ids,
                whose chunks come in any order: `.row` is the index of the prompt.
        """
        items = as_list(prompt)
        if items and isinstance(items[0], Mapping):
            prompt_ids = [self._chat_ids(items)]
        else:
            prompt_ids = [self._ids(each) for each in _prompts(prompt, "prompt")]
        if not prompt_ids:
            raise ValueError(f"prompt is {shown(prompt)}; give a text, token ids or messages")
        return self.calls.run(self._call(prompt_ids, params, mode, whole=False))

    def close(self) -> None:
        """Free the model, its KV cache, and its threads and processes.

        Calls in other threads end with an error, and so do later ones. May be called twice.
        """
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        self.calls.close(_closed())
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
            raise _not_loaded(mode, self._modes)
        return mode

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _chat_ids(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        return encode_chat(self._tokenizer, for_template(messages), tools=tools or (), variables=variables)

    def _complete(self, prompt_ids: list[list[int]], params: Params | None, mode: Mode | None) -> list[Completion]:
        call = self._call(prompt_ids, params, mode, whole=True)
        if not prompt_ids:
            return []
        chunks = list(self.calls.run(call))
        done: dict[int, Completion] = {}
        for chunk in chunks:
            done.setdefault(chunk.request.number, Completion()).add(chunk)
        return [done[number] for number in sorted(done)]  # the engine gets prompts in order

    def _call(self, prompt_ids: list[list[int]], params: Params | None, mode: Mode | None, *, whole: bool) -> Call:
        if self._runtime is None:
            raise _closed()
        mode = typed(str | None, "mode", mode)
        name = self._mode if mode is None else self._loaded(mode)
        given = typed(SamplingParams | tuple[SamplingParams, ...] | None, "params", params)
        given = SamplingParams() if given is None else given
        if isinstance(given, SamplingParams):
            prompts = [CallPrompt(ids, given, index) for index, ids in enumerate(prompt_ids)]
        elif len(given) == len(prompt_ids):
            prompts = [CallPrompt(ids, own) for ids, own in zip(prompt_ids, given, strict=True)]
        else:
            raise ValueError(f"there are {len(given)} params for {len(prompt_ids)} prompts; give one, or one for each")
        cut = cut_by_context(((len(each.ids), each.params) for each in prompts), self._max_context)
        if cut is not None:
            log.warning("answers may be cut: %s", cut)
        return Call(name, prompts, collected_at_end=whole, reuse=self._reuse)


def _not_loaded(mode: Mode, modes: Sequence[Mode]) -> ValueError:
    return ValueError(f"mode {mode!r} is not loaded; loaded are {', '.join(modes)}")


def _closed() -> ValueError:
    return ValueError("this LLM is closed; make a new one")


def _prompts(prompts: Any, name: str = "prompts") -> list[str | list[int]]:
    """Return prompts as a list of texts and lists of token ids; ValueError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    items = as_list(prompts)
    if items is None:
        raise ValueError(f"{name} is {shown(prompts)}; give a text, a list of token ids, or a list of such prompts")
    if items and _is_number(items[0]):
        return [list(typed(tuple[int, ...], name, items))]
    return [_prompt(f"{name}[{index}]", each) for index, each in enumerate(items)]


def _prompt(name: str, prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        raise ValueError(f"{name} is {shown(prompt)}; give a text or a list of token ids, and use chat for messages")
    items = as_list(prompt)
    if items is None:
        raise ValueError(f"{name} is {shown(prompt)}; give a text or a list of token ids")
    return list(typed(tuple[int, ...], name, items))


def _is_number(value: Any) -> bool:
    return isinstance(plain(value), (int, float))


def _conversations(messages: Any) -> tuple[bool, list[list[Any]]]:
    """Return whether there is a list of conversations, and all conversations as lists."""
    items = as_list(messages)
    if not items:
        raise ValueError(f"messages are {shown(messages)}; give at least one, as {EXAMPLE}")
    if isinstance(items[0], (Mapping, str)):
        return False, [items]
    found = [as_list(each) for each in items]
    for index, conversation in enumerate(found):
        if conversation is None:
            raise ValueError(f"messages[{index}] is {shown(items[index])}; give a list of messages, as {EXAMPLE}")
    return True, found  # type: ignore[return-value]
