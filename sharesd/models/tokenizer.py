"""Tokenizer and chat templates, without importing transformers (which takes seconds).

Reads tokenizer.json with the `tokenizers` package and renders chat templates as transformers does. Folders without a
tokenizer.json are converted by transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from sharesd.models import chat_template, template_probes
from sharesd.models.checkpoint import damage_named, eos_ids, has_file, raise_open_files, source_of
from sharesd.models.special_tokens import (
    REPEATED,
    TOOL_MARKS,
    add_missing_tokens,
    read_tokenizer_config,
    roles_of,
    with_own_ids,
)

CHANNEL_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end an answer in channels.

There `<|end|>` ends a message.
"""
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>")
"""Tokens that end an answer.

Used if the chat template or the vocabulary's end token has them.
"""

LONG = 2000
"""Characters from which a text is encoded with the interpreter lock released."""

_TOKENIZER_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "*.bpe", "tekken.json")
_MARK = "\ue000"
"""Character of no meaning, which marks a place in a template's text."""


class Tokenizer:
    """A checkpoint's tokenizer with its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        eos_ids: Iterable[int] = (),
        origin: str = "",
        repeated: Mapping[int, int] | None = None,
    ) -> None:
        """Wrap a tokenizer.

        Args:
            special: role (`bos_token`, ...) -> token, for the chat template.
            tool_template: template for conversations with tools; `chat_template` if None.
            repeated: id that the package does not know -> id of a token with the same string.
            origin: folder of the chat template, as errors name it.
        """
        self._repeated = dict(repeated or {})
        self._set(backend)
        self.special = dict(special or {})
        self.chat_template, self.tool_template = chat_template, tool_template or chat_template
        self._origin = origin
        self._content_forms: dict[tuple[str, bool], template_probes.ContentForm] = {}
        ends = list(eos_ids)
        ends += [i for i, known in self._repeated.items() if known in ends]
        self.eos_ids = tuple(dict.fromkeys(ends))
        self.has_bytes = any(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
        """True if there are tokens of single bytes, like <0x0A>."""

    def _set(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special} - {*self._repeated}
        self.special_ids = frozenset(special | {i for i, known in self._repeated.items() if known in special})

    def show_as_text(self, marks: Collection[str]) -> None:
        """Show these tokens in decoded texts, even if they are special."""
        self._set(_with_text(self.backend, marks))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included.

        A model's logits may have more columns (padding).
        """
        unknown = sum(self.backend.id_to_token(i) is None for i in self._repeated)
        return self.backend.get_vocab_size(with_added_tokens=True) + unknown

    @property
    def has_chat_template(self) -> bool:
        """True if `chat` can be used."""
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of a text; special tokens in it are recognised.

        Raises:
            ValueError: the text has half a character, as bytes do that are not UTF-8.
        """
        try:
            return self._encode(text, add_special_tokens)
        except TypeError as error:  # of the package, for text that it cannot write as UTF-8
            if not isinstance(text, str):
                raise
            raise ValueError("the text has half a character (a lone surrogate); give text that is UTF-8") from error

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` keeps the interpreter to itself, for seconds with megabytes; batches let go of it.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Padding ids of the vocabulary give nothing.
        """
        if self._repeated:
            ids = [self._repeated.get(i, i) for i in ids]
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it; None for padding ids."""
        return self.backend.id_to_token(self._repeated.get(token_id, token_id))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return token ids of messages, as `render_chat` writes them.

        A message is `{"role": ..., "content": ...}`.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt, tools=tools, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def ask(self, question: str) -> list[int]:
        """Return token ids of a user message.

        In the chat template if there is one.
        """
        if self.chat_template is None:
            return self.encode(question)
        return self.chat([{"role": "user", "content": question}])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that `chat` encodes.

        `tools`: functions in OpenAI's form; `variables`: values of `template_variables`. The content of a message is
        a text or a list of text parts, or None next to `tool_calls`. Parts are given to templates that iterate over
        them, and joined by line breaks for others.
        """
        messages = template_probes.with_contents_in_form(messages, partial(self._content_form, with_tools=bool(tools)))
        return self._render_calls(messages, add_generation_prompt, tools=tools, variables=variables)

    def _render_calls(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if any(message.get("tool_calls") for message in messages):
            messages = template_probes.with_calls_in_form(messages, self._call_form)
        return self._render(messages, add_generation_prompt, tools=tools, variables=variables)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        source = self.tool_template if tools else self.chat_template
        if source is None:
            raise ValueError(
                "this checkpoint has no chat template; use a plain prompt or an instruction-tuned checkpoint"
            )
        return chat_template.render(
            source,
            self.special
            | dict(variables or {})
            | {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
            | {"tools": list(tools) if tools else None, "documents": None},
            self._origin,
        )

    @cached_property
    def _call_form(self) -> template_probes.CallForm:
        return template_probes.call_form(self._render)

    def _content_form(self, role: str, with_tools: bool) -> template_probes.ContentForm:
        key = (role, with_tools)
        if key not in self._content_forms:
            self._content_forms[key] = template_probes.content_form(self._render_calls, role, with_tools)
        return self._content_forms[key]

    def render_begun(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text up to the end of the last message's content.

        Raises:
            ValueError: as `chat`, or the template does not show the message's text.
        """
        content = messages[-1].get("content") or ""
        text = content if isinstance(content, str) else content[-1]["text"]
        begun, spaces = text.rstrip(), text[len(text.rstrip()) :]
        ended: Any = begun + _MARK + spaces
        if not isinstance(content, str):
            ended = [*content[:-1], {"type": "text", "text": ended}]
        marked = [*messages[:-1], {**messages[-1], "content": ended}]
        shown, mark, rest = self.render_chat(marked, False, tools=tools, variables=variables).rpartition(_MARK)
        if not mark:
            raise ValueError("the chat template does not show the last message, which is to be continued")
        return shown + spaces if rest.startswith(spaces) else shown

    @cached_property
    def takes_tools(self) -> bool:
        """True if the chat template shows tools to the model."""
        return "tools" in self._variables

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Variables of the chat template that `render_chat` does not set itself."""
        given = {"messages", "add_generation_prompt", "tools", "documents", *self.special}
        return self._variables - given

    @cached_property
    def _variables(self) -> frozenset[str]:
        return chat_template.variables_of(self.tool_template or "")

    def fingerprint(self) -> str:
        """Return a hash that is equal for equal vocabularies."""
        vocab = sorted((i, token) for token, i in self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()


def load_tokenizer(folder: Path, named: str | Path | None = None) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder.

    `named`: what the folder was made of, as errors name it; None: its source.

    Raises:
        ValueError: it is missing or damaged.
    """
    source = source_of(folder)
    if has_file(source / "tekken.json") and not has_file(source / "tokenizer.json"):
        from sharesd.models.tekken import folder_with_tokenizer  # whose parts take time to import

        source = folder_with_tokenizer(source)
    backend, repeated = None, dict[int, int]()
    if has_file(source / "tokenizer.json"):
        backend, repeated = _read_backend(source / "tokenizer.json")
    with damage_named(source / "tokenizer_config.json"):
        config = read_tokenizer_config(source)
        special = roles_of(config)
        if backend is not None:
            add_missing_tokens(backend, config)
            repeated |= {int(i): known for i, known in config.get(REPEATED, {}).items()}
        else:
            backend, special = _convert(source)
        backend = _with_text(backend, TOOL_MARKS)
        template, for_tools = (chat_template.read_template(source, config, name) for name in ("default", "tool_use"))
        ends = _end_ids(folder, backend, special, template)
        return Tokenizer(
            backend,
            special=special,
            chat_template=template,
            tool_template=for_tools,
            eos_ids=ends,
            origin=f" of {named or source}",
            repeated=repeated,
        )


def _read_backend(file: Path) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """Return a tokenizer, and ids of tokens whose strings others have, too."""
    try:
        return with_own_ids(tokenizers.Tokenizer.from_file(str(file)), file)
    except Exception as error:  # the package raises nothing narrower
        raise_open_files(error, file)
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{file} is damaged ({reason}); download it again") from error


def require_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ValueError with the first token that differs between two vocabularies."""
    if target.fingerprint() == draft.fingerprint():
        return
    for i in range(max(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.token(i), draft.token(i)
        if ours != theirs:
            raise ValueError(
                f"the draft model has another vocabulary: token {i} is {theirs!r}, the target's is {ours!r} "
                f"(sizes {draft.vocab_size} and {target.vocab_size}); give a draft model of the target's family"
            )
    raise ValueError(
        "the draft model has another vocabulary: token ids beyond both sizes differ; give one of the target's family"
    )


def _convert(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    from transformers import AutoTokenizer

    from sharesd.models.hf import quiet_transformers

    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise ValueError(f"{folder} has no file of a tokenizer; add its tokenizer.json")
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # for damaged files, of its packages' own kinds
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{folder} has no tokenizer that can be read ({reason}); add its tokenizer.json") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{folder} has a {type(tokenizer).__name__}, which is not supported; add a tokenizer.json")
    special = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    return tokenizer.backend_tokenizer, special


def _with_text(backend: tokenizers.Tokenizer, marks: Collection[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer in which these tokens are text, not special."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if special.isdisjoint(marks):
        return backend
    written = json.loads(backend.to_str())
    for token in written["added_tokens"]:
        token["special"] &= token["content"] not in marks
    return tokenizers.Tokenizer.from_str(json.dumps(written))


def ends_of_turn(template: str | None) -> list[str]:
    """Return the tokens that end an answer in a chat template."""
    template = template or ""
    if all(token in template for token in CHANNEL_ENDS):
        return [token for token in (*CHANNEL_ENDS, *END_OF_TURN) if token in template and token != "<|end|>"]
    return [token for token in END_OF_TURN if token in template]


def _end_ids(
    folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str], template: str | None
) -> list[int]:
    ends = [special.get("eos_token"), *ends_of_turn(template)]
    named = [backend.token_to_id(token) for token in ends if token is not None]
    return [*eos_ids(folder), *(i for i in named if i is not None)]
