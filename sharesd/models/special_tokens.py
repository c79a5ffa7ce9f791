"""Roles and added tokens of checkpoints, in new and old layouts.

Older folders keep roles in special_tokens_map.json and added tokens in added_tokens.json. Both files count if
tokenizer_config.json has no `added_tokens_decoder`, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from sharesd.models.checkpoint import has_file, read_json

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles in the order in which missing tokens are added."""
EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""Names of further special tokens; the first that is there counts."""
TOOL_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")
"""Tokens around tool calls.

Treated as text even if a tokenizer lists them as special.
"""
REPEATED = "repeated_tokens"
"""Field of the config of a converted file: id -> id of another token with the same string."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, filled from the files of older layouts.

    Fields of null are left out.

    Raises:
        ValueError: a file is damaged.
    """
    config = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    roles = _read(folder / "special_tokens_map.json")
    if any(config.get(name) for name in EXTRA):
        roles.pop("additional_special_tokens", None)
    config |= roles
    added = _read(folder / "added_tokens.json")
    special = {*roles_of(config).values(), *(content_of(token) for token in _extra(config))}
    if not all(type(i) is int and i >= 0 for i in added.values()):
        raise ValueError(
            f"{folder / 'added_tokens.json'} is not a map of tokens and ids; download the checkpoint again"
        )
    if added:
        config["added_tokens_decoder"] = {
            str(i): {"content": token, "normalized": token not in special, "special": token in special}
            for token, i in added.items()
        }
    return config


def _read(file: Path) -> dict[str, Any]:
    if not has_file(file):
        return {}
    return {name: value for name, value in read_json(file).items() if value is not None}


def content_of(token: Any) -> str | None:
    """Return the text of a stored token, or None.

    Stored is a string, or an object with `content`.
    """
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _roles(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return role -> stored token, in the order of ROLES."""
    named: Mapping[str, Any] = next((config[name] for name in EXTRA if isinstance(config.get(name), Mapping)), {})
    stored = {k: v for k, v in config.items() if k.endswith("_token")} | dict(named)
    stored = {k: v for k, v in stored.items() if content_of(v) is not None}
    return {k: stored[k] for k in (*ROLES, *stored) if k in stored}


def _extra(config: Mapping[str, Any]) -> list[Any]:
    """Return the stored special tokens without a role."""
    found: Any = next((config[name] for name in EXTRA if config.get(name)), [])
    return [token for token in found if content_of(token) is not None] if isinstance(found, list) else []


def roles_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return role -> token of a tokenizer's config."""
    return {role: str(content_of(token)) for role, token in _roles(config).items()}


def add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add tokens that only the tokenizer's config lists."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in _listed(config):
        if token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)


def with_own_ids(backend: tokenizers.Tokenizer, file: Path) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """Return a tokenizer in which added tokens have the ids of its file, and ids whose strings others have, too.

    The package leaves out an added token whose string is known, and gives its id to the next one.
    """
    text = file.read_text("utf-8")
    begin = text.find('"added_tokens"')
    listed = json.JSONDecoder().raw_decode(text[text.index("[", begin) :])[0] if begin >= 0 else []
    if all(backend.id_to_token(token["id"]) == token["content"] for token in listed):
        return backend, {}
    written, vocab = json.loads(text), backend.get_vocab(with_added_tokens=False)
    ids, taken = dict[str, int](), set(vocab.values())
    repeated, tokens = dict[int, int](), list[dict[str, Any]]()
    for token in written["added_tokens"]:
        content, own = token["content"], token["id"]
        if content not in ids:
            ids[content] = vocab.get(content, own)
            tokens.append({**token, "id": ids[content]})
        if ids[content] != own and own not in taken:
            repeated[own] = ids[content]
            tokens.append({**token, "id": own, "content": f"<token {own}>", "special": True})  # keeps the place
    written["added_tokens"] = tokens
    return tokenizers.Tokenizer.from_str(json.dumps(written)), repeated


def _listed(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the tokens of a config, by id and then by role.

    Raises:
        ValueError: an entry is not a token.
    """
    entries = config.get("added_tokens_decoder", {})
    if not isinstance(entries, Mapping) or not all(str(i).isdigit() and content_of(e) for i, e in entries.items()):
        raise ValueError("the tokenizer's added tokens are not a map of ids and tokens; download the checkpoint again")
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        flags = {} if isinstance(entry, str) else {k: entry[k] for k in (*_FLAGS, "special") if k in entry}
        yield AddedToken(content_of(entry), **flags)
    for token in (*_roles(config).values(), *_extra(config)):
        flags = {k: token[k] for k in _FLAGS if k in token} if isinstance(token, Mapping) else {}
        yield AddedToken(content_of(token), **{"normalized": False, **flags}, special=True)
