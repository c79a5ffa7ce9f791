"""Tokenizer of a .gguf file to tokenizer.json: byte-level and sentencepiece BPE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.gguf.config import layout_of
from sharesd.models.gguf.reader import GGUFFile

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_WORDS: dict[str, str | None] = {
    **dict.fromkeys(("gpt-2", "smollm")),  # as GPT-2 splits
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
}
"""Pre-tokenizer -> pattern of a word; None for that of GPT-2."""
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe")
"""Pre-tokenizers whose words are tokens if the vocabulary has them, without merges."""

_SPACE = "\u2581"  # sentencepiece's


def check_tokenizer(file: GGUFFile) -> None:
    """Raise UnsupportedArchitecture if `write_tokenizer` lacks the file's tokenizer."""
    kind, words = file.tokenizer("model"), file.tokenizer("pre", "default")
    if kind == "gpt2" and words not in _WORDS:
        raise UnsupportedArchitecture(f"pre-tokenizer {words!r} is not known")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedArchitecture(f"tokenizer {kind!r} is not known")
    for key in ("tokens", "token_type", *(("merges",) if kind == "gpt2" else ("scores",))):
        if file.tokenizer(key) is None:
            raise UnsupportedArchitecture(f"a {kind} tokenizer without {key} is not known")


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    tokenizer = _byte_level(file) if file.tokenizer("model") == "gpt2" else _sentencepiece(file)
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
            for token, kind in zip(file.tokenizer("tokens"), file.tokenizer("token_type"), strict=True)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and tokenizer.token_to_id(token) is not None
        ]
    )
    special = special_tokens(file)
    _add_ends(tokenizer, file, special)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if template := file.metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """Return role -> token, in the naming of tokenizer_config.json."""
    tokens = file.tokenizer("tokens", [])
    roles = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    ids = {role: file.tokenizer(f"{key}_token_id") for key, role in roles.items()}
    return {role: tokens[i] for role, i in ids.items() if i is not None and i < len(tokens)}


def _byte_level(file: GGUFFile) -> Tokenizer:
    words = file.tokenizer("pre", "default")
    tokens = {token: i for i, token in enumerate(file.tokenizer("tokens"))}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in file.tokenizer("merges"))]
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges, ignore_merges=words in _WHOLE_WORDS))
    split = _WORDS[words]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words == "smollm" else []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    tokens, style = file.tokenizer("tokens"), layout_of(file)[1].sentencepiece
    if style == "no_prefix":  # runs of spaces are stored as such
        tokens = [token if token.strip(" ") else _SPACE * len(token) for token in tokens]
    ranks = [-i for i in range(len(tokens))] if style == "no_prefix" else file.tokenizer("scores")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(tokens, ranks),
            unk_token=special_tokens(file).get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "no_prefix":
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif not file.tokenizer("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    else:
        steps.append(decoders.Strip(" ", left=1))
        if style == "segment_prefix":
            prefix, spaces = normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)
            tokenizer.normalizer = normalizers.Sequence([prefix, spaces])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(tokens: list[str], ranks: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that merge into a token.

    Sorted by the merged token, best first, then by the left part, longest first.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    found = [
        (-rank, -i, len(token) - i, ids[token[:i]], ids[token[i:]])
        for token, rank in zip(tokens, ranks, strict=True)
        for i in range(1, len(token))
        if token[:i] in ids and token[i:] in ids
    ]
    found.sort(key=lambda pair: (pair[0], pair[1], -pair[2]))
    return [(tokens[left], tokens[right]) for *_, left, right in found]


def _add_ends(tokenizer: Tokenizer, file: GGUFFile, special: dict[str, str]) -> None:
    """Add the tokens before and after every text."""
    llama = file.tokenizer("model") == "llama" or file.tokenizer("pre") in _WHOLE_WORDS  # where the file is silent
    begin = special.get("bos_token") if file.tokenizer("add_bos_token", llama) else None
    end = special.get("eos_token") if file.tokenizer("add_eos_token", False) else None
    if begin is None and end is None:
        return
    single = [*([begin] if begin else []), "$A", *([end] if end else [])]
    used = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)
