"""Mistral's tekken.json to tokenizer.json: byte-level BPE whose ranks are its merges."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from sharesd.models.checkpoint import copy_texts, damage_named, read_json, texts_of
from sharesd.models.conversion_cache import converted, name_of
from sharesd.models.special_tokens import TOOL_MARKS

TEKKEN = "tekken.json"
_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_OLD_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of the first files, which do not list them."""

_TURNS = """\
{%- macro text(message) -%}
    {%- if message.content is string or not message.content -%}
        {{- message.content or '' -}}
    {%- else -%}
        {%- set found = namespace(parts=[]) -%}
        {%- for part in message.content -%}
            {%- if part.type != 'text' -%}
                {{- raise_exception('content of type ' ~ part.type ~ ' is not supported') -}}
            {%- endif -%}
            {%- set found.parts = found.parts + ([part.text] if part.text else []) -%}
        {%- endfor -%}
        {{- found.parts | join('\\n\\n') -}}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(role=none, turns=[], system=[], last=0) -%}
{%- for message in messages -%}
    {%- if message.role not in ['system', 'user', 'assistant'] or message.tool_calls -%}
        {{- raise_exception('tools take a chat template, and tekken.json has none; add a chat_template.jinja') -}}
    {%- endif -%}
    {%- if message.role == 'system' and ns.role == 'assistant' -%}
        {{- raise_exception('a system message does not follow one of the assistant') -}}
    {%- endif -%}
    {%- set said = text(message) -%}
    {%- if message.role == 'system' and system_in_user -%}
        {%- set ns.system = ns.system + ([said] if said else []) -%}
    {%- elif message.role == ns.role and message.role != 'system' -%}
        {%- set both = [ns.turns[-1].text, said] | select | join('\\n\\n') -%}
        {%- set ns.turns = ns.turns[:-1] + [{'role': message.role, 'text': both}] -%}
    {%- else -%}
        {%- set ns.turns = ns.turns + [{'role': message.role, 'text': said}] -%}
    {%- endif -%}
    {%- set ns.role = message.role -%}
{%- endfor -%}
{%- if not ns.turns or ns.turns[0].role == 'assistant' -%}
    {{- raise_exception('the first message is to be of the user') -}}
{%- endif -%}
{%- for turn in ns.turns if turn.role == 'user' -%}
    {%- set ns.last = loop.length -%}
{%- endfor -%}
{{- bos_token -}}
{%- for turn in ns.turns -%}
    {%- if turn.role == 'user' -%}
        {%- set ns.last = ns.last - 1 -%}
        {{- '[INST]' -}}
        {%- if ns.system and not ns.last -%}
            {{- ns.system | join('\\n\\n') ~ '\\n\\n' -}}
        {%- endif -%}
        {{- turn.text ~ '[/INST]' -}}
    {%- elif turn.role == 'system' -%}
        {{- '[SYSTEM_PROMPT]' ~ turn.text ~ '[/SYSTEM_PROMPT]' -}}
    {%- else -%}
        {%- if not turn.text -%}
            {{- raise_exception('a message of the assistant has no content') -}}
        {%- endif -%}
        {{- turn.text.rstrip(' ') ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
_TEMPLATES = {
    "v3": "{%- set system_in_user = true -%}\n" + _TURNS,
    **dict.fromkeys(("v7", "v11", "v13"), "{%- set system_in_user = false -%}\n" + _TURNS),
}
"""Version of a tokenizer -> chat template that gives mistral-common's tokens for texts."""


def folder_with_tokenizer(folder: Path) -> Path:
    """Return a folder in the cache with a tokenizer.json that is made of a folder's tekken.json.

    It has the folder's other texts, and a chat template if the folder has none.

    Raises:
        ValueError: the file is damaged, or the cache cannot be written.
    """
    return converted(
        folder, texts_of(folder), stem=name_of(folder), key=TEKKEN, ending="-tokenizer", write=partial(_write, folder)
    )


def _write(base: Path, folder: Path) -> None:
    """Write tokenizer.json, and what a tokenizer's config and chat template lack."""
    said = read_json(base / TEKKEN)
    with damage_named(base / TEKKEN):
        tokenizer, version = _tokenizer(said), said["config"]["version"]
    copy_texts(base, folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.exists() else {}
    roles = {role: token for role, token in _ROLES.items() if tokenizer.token_to_id(token) is not None}
    file.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles, **config}), encoding="utf-8")
    files = [folder / name for name in ("chat_template.jinja", "chat_template.json")]
    has_template = "chat_template" in config or any(file.exists() for file in files)
    if not has_template and version in _TEMPLATES:
        (folder / "chat_template.jinja").write_text(_TEMPLATES[version], encoding="utf-8")


def _tokenizer(said: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a tekken.json: special tokens first, then the first tokens of the vocabulary."""
    config, listed = said["config"], said.get("special_tokens")
    num_special = config["default_num_special_tokens"]
    special = list(_OLD_SPECIAL) if listed is None else [each["token_str"] for each in listed]
    special += [f"<SPECIAL_{i}>" for i in range(len(special), num_special)]
    vocab = said["vocab"][: config["default_vocab_size"] - num_special]
    try:
        tokens = [base64.b64decode(each["token_bytes"], validate=True) for each in vocab]
    except binascii.Error as error:
        raise ValueError(f"its vocab has token_bytes that are not base64 ({error}); download it again") from error
    letters = _letters()
    names = [*special, *("".join(letters[byte] for byte in token) for token in tokens)]
    ids = {name: i for i, name in enumerate(names)}
    if len(ids) != config["default_vocab_size"] or len(special) != num_special or tokens[:256] != _BYTES:
        raise ValueError(
            f"its vocabulary has {len(ids)} different tokens, {len(special)} of them special, and config names "
            f"{config['default_vocab_size']} and {num_special}; download it again"
        )
    named = dict(zip(tokens, names[num_special:], strict=True))
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(_merges(named)), ignore_merges=True))
        words = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"its vocabulary or pattern cannot be used ({error}); download it again") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=token not in TOOL_MARKS) for token in special])
    begin = _ROLES["bos_token"]
    if begin in ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, ids[begin])]
        )
    return tokenizer


_BYTES = [bytes([byte]) for byte in range(256)]


def _merges(named: dict[bytes, str]) -> Iterator[tuple[str, str]]:
    """Yield all pairs of tokens that merge into a token, by its rank."""
    for token in named:
        for i in range(1, len(token)):
            left, right = named.get(token[:i]), named.get(token[i:])
            if left is not None and right is not None:
                yield left, right


def _letters() -> list[str]:
    """Return the character that stands for each byte in byte-level BPE."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]
