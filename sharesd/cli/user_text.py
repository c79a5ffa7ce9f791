"""Texts of users: checks that they are UTF-8, and their encoding as token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from sharesd.data.chat_messages import for_template

if TYPE_CHECKING:
    from sharesd.models.tokenizer import Tokenizer


_REMEDY = "convert it, for example with `iconv -f LATIN1 -t UTF-8`"


def require_utf8(text: str, what: str) -> str:
    """Return the text, or raise ValueError if its bytes were not UTF-8.

    `what`: name of the text in the message. Python keeps such bytes of arguments as lone surrogates.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        found = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a character, 0x{code:04x}"
        raise ValueError(f"{what} is not UTF-8 ({found} after {error.start} characters); {_REMEDY}") from None
    return text


def read_text(stream: TextIO, what: str) -> str:
    """Return the rest of a stream; ValueError if it is not UTF-8."""
    return _without_zeros(_decoded(stream.read, what), what)


def read_line(stream: TextIO, what: str) -> str:
    """Return the next line with its end.

    At the end of the stream it is empty. After a ValueError for a line that is not UTF-8, the next one can be read.
    """
    binary = getattr(stream, "buffer", None)
    if binary is None or (stream.encoding or "").lower().replace("-", "") not in ("utf8", "ascii"):
        return _without_zeros(_decoded(stream.readline, what), what)
    text = binary.readline().decode("utf-8", "surrogateescape")
    return _without_zeros(text.removesuffix("\r\n") + "\n" if text.endswith("\r\n") else text, what)


def _without_zeros(text: str, what: str) -> str:
    """Return the text, or raise ValueError if it is not UTF-8.

    UTF-16 without a byte order mark can be read as UTF-8, with zero bytes.
    """
    if "\0" in require_utf8(text, what):
        place = text.index("\0")
        raise ValueError(f"{what} is not UTF-8 (zero byte after {place} characters, as in UTF-16); {_REMEDY}")
    return text


def _decoded(read: Callable[[], str], what: str) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{what} is not UTF-8 (byte 0x{byte:02x} after {error.start} bytes); {_REMEDY}") from None


def encode(
    tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], *, raw: bool, system: str | None
) -> list[int]:
    """Return token ids, through the chat template unless `raw` is set.

    `system` yields to a conversation's own system prompt. ValueError if a conversation or `system` lacks a template.
    """
    from sharesd.models.chat_prompt import encode_chat  # late: its packages are slow to import

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(prompt, str) and (raw or not tokenizer.has_chat_template):
        if system is not None:
            raise ValueError("--system needs a chat template, which this checkpoint lacks; put it into the prompt")
        return tokenizer.encode(prompt)
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return encode_chat(tokenizer, for_template(messages))
