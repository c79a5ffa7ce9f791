"""Tokenizer of a .gguf file to tokenizer.json: byte-level and sentencepiece BPE, and how texts are split before."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sharesd.models.architecture import GGUFLayout
from sharesd.models.gguf.reader import CHAT_TEMPLATES, GGUFFile, check_tokenizer_keys, unknown_key
from sharesd.models.special_tokens import REPEATED

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_OTHERS}|{_SPACES}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED_CODER = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_LETTERS}|\p{{N}}|{_OTHERS}|\s*[\r\n]|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str) -> str:
    """Return a pattern that also splits before capitals."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{_UPPER}*{_LOWER}+{ending}|{lead}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT4O, _TEKKEN = _cased(f"{_ENDINGS}?", r"\p{N}{1,3}"), _cased("", r"\p{N}")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _CJK,
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_MARKS = r"[\p{P}\$\+<=>\^~\|]+"

PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (_MARKS, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), (_LLAMA3,)),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "seed-coder": (_SEED_CODER,),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
}
"""Name in `tokenizer.ggml.pre` -> patterns."""

WHOLE_WORDS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
"""Names whose words are tokens if the vocabulary has them, without merges.

Their texts begin with `bos` if the file is silent about it.
"""


def pre_tokenizer(name: str) -> Any:
    """Return the pre-tokenizer of this name, which must be in PATTERNS."""
    patterns, steps = PATTERNS[name], []
    last_is_gpt2 = patterns[-1] == _GPT2  # the package has it
    for pattern in patterns[: len(patterns) - last_is_gpt2]:
        digits = pattern == _DIGIT
        split: Any = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        steps.append(pre_tokenizers.Digits(individual_digits=True) if digits else split)
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=last_is_gpt2)])


log = logging.getLogger(__name__)

_SPACE = "\u2581"  # sentencepiece's
_NO_TOKEN = (-1, 2**32 - 1)
"""Ids that stand for none."""
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Roles of tokens that end an answer."""
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 after which spaces stay."""
_TEXT = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
"""Types of tokens that are decoded to their string."""


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {str}


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {int, float} and all(map(math.isfinite, values))


_TYPES: dict[str, Callable[[Any], bool]] = {
    **{f"tokenizer.ggml.{key}": _are_texts for key in ("tokens", "merges")},
    **{f"tokenizer.ggml.{key}": _are_numbers for key in ("scores", "token_type")},
    **{f"tokenizer.ggml.add_{key}": _is_flag for key in ("bos_token", "eos_token", "space_prefix")},
    "tokenizer.ggml.eos_token_ids": lambda values: isinstance(values, list) and set(map(type, values)) <= {int},
    "tokenizer.ggml.pre": lambda value: isinstance(value, str),
    "tokenizer.chat_template": lambda value: isinstance(value, str),
}
"""Keys that the conversion reads -> checks of their values."""


def check_tokenizer(file: GGUFFile) -> None:
    """Raise ValueError if `write_tokenizer` lacks the file's tokenizer."""
    kind = file.tokenizer("model")
    if kind is None:
        raise ValueError(
            "it has no tokenizer (tokenizer.ggml.model); give a file with one, or a safetensors checkpoint"
        )
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"its tokenizer {kind!r} (tokenizer.ggml.model) is not supported; give a safetensors checkpoint"
        )
    if kind == "gpt2" and pre_name(file) not in PATTERNS:
        raise ValueError(
            f"its pre-tokenizer {pre_name(file)!r} (tokenizer.ggml.pre) is not known; give a safetensors checkpoint"
        )
    if kind == "gpt2" and file.tokenizer("pre") is None:
        log.warning("the file names no pre-tokenizer (tokenizer.ggml.pre); words are split as llama.cpp splits them")
    check_tokenizer_keys(file.metadata)
    tokens = file.tokenizer("tokens")
    for key in ("tokens", "token_type", *(("merges",) if kind == "gpt2" else ("scores",))):
        found = file.tokenizer(key)
        if not isinstance(found, list) or (key != "merges" and len(found) != len(tokens)):
            raise ValueError(f"its {kind} tokenizer has no complete tokenizer.ggml.{key}; download it again")
    for key, is_right in _TYPES.items():
        if key in file.metadata and not is_right(file.metadata[key]):
            raise ValueError(f"its {key} has a value of a wrong type; download it again")
    for key, value in file.metadata.items():
        named = key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and value not in _NO_TOKEN
        if named and not (isinstance(value, int) and 0 <= value < len(tokens)):
            raise unknown_key(key, value)
    kinds = file.tokenizer("token_type")
    for token, ids in _repeated(tokens).items():
        if len({"text" if kinds[i] in _TEXT else kinds[i] for i in ids}) > 1:
            raise ValueError(
                f"its token {token!r} has ids {ids[0]} and {ids[-1]} of different types (tokenizer.ggml.token_type), "
                "which decode to different texts; give another file"
            )


def _repeated(tokens: list[str]) -> dict[str, list[int]]:
    """Return the ids of each string that several tokens have; empty strings are padding."""
    ids: dict[str, list[int]] = {}
    if len(set(tokens)) < len(tokens):
        for i, token in enumerate(tokens):
            ids.setdefault(token, []).append(i)
    return {token: found for token, found in ids.items() if len(found) > 1 and token}


def _ids_of(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Return the id that each string is encoded to.

    Of several it is the last, as in llama.cpp before it refused such files; those of the user come before others.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    for token, found in _repeated(tokens).items():
        ids[token] = max(found, key=lambda i: (kinds[i] == TokenType.USER_DEFINED, i))
    return ids


def pre_name(file: GGUFFile) -> str:
    """Return the name of the pre-tokenizer; files before 2024 have none."""
    return file.tokenizer("pre", "default")


def write_tokenizer(file: GGUFFile, folder: Path, layout: GGUFLayout | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat templates.

    `layout`: of the file's family, if it is native.
    """
    try:
        is_gemma = layout is not None and layout.sentencepiece == "no_prefix"
        tokens = _strings(file, is_gemma)
        ids = _ids_of(tokens, file.tokenizer("token_type"))
        is_byte_level = file.tokenizer("model") == "gpt2"
        tokenizer = _byte_level(file, ids) if is_byte_level else _sentencepiece(file, tokens, ids, is_gemma)
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"its tokenizer is damaged ({error}); download it again") from error
    strips = strips_after_special_tokens(file)
    tokenizer.add_tokens(
        [
            AddedToken(
                token, normalized=False, special=kind == TokenType.CONTROL, rstrip=strips and token not in _KEEPS_SPACES
            )
            for token, kind in zip(file.tokenizer("tokens"), file.tokenizer("token_type"), strict=True)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and tokenizer.token_to_id(token) is not None
        ]
    )
    special = special_tokens(file)
    _add_ends(tokenizer, file, special)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if repeated := {i: ids[token] for token, found in _repeated(tokens).items() for i in found if i != ids[token]}:
        first, known = next(iter(repeated.items()))
        log.warning(
            "%d tokens of the file have the string of another one (such as %d and %d, %r): all are decoded, and text "
            "gets the id of the other one; llama.cpp refuses such files",
            len(repeated),
            first,
            known,
            tokens[first],
        )
        config[REPEATED] = repeated
    if template := file.metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    templates = {k.removeprefix(CHAT_TEMPLATES): v for k, v in file.metadata.items() if k.startswith(CHAT_TEMPLATES)}
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def strips_after_special_tokens(file: GGUFFile) -> bool:
    """Return True for Phi-3: no space after special tokens counts.

    Only the model's name says so, as in llama.cpp.
    """
    name = str(file.metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name


def token_id(file: GGUFFile, role: str) -> int | None:
    """Return the id of a role's token; sentencepiece has usual ones."""
    usual = {"bos": 1, "eos": 2, "unknown": 0} if file.tokenizer("model") == "llama" else {}
    found = file.tokenizer(f"{role}_token_id", usual.get(role))
    return found if found is not None and 0 <= found < len(file.tokenizer("tokens", [])) else None


def end_ids(file: GGUFFile) -> list[int]:
    """Return the tokens that end an answer, `eos` first."""
    ids, num_tokens = [token_id(file, role) for role in _ENDS], len(file.tokenizer("tokens", []))
    ids += [i if 0 <= i < num_tokens else None for i in file.tokenizer("eos_token_ids", [])]  # of Ollama's converter
    return list(dict.fromkeys(i for i in ids if i is not None))


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """Return role -> token, in the naming of tokenizer_config.json."""
    tokens = file.tokenizer("tokens", [])
    roles = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    ids = {role: token_id(file, key) for key, role in roles.items()}
    return {role: tokens[i] for role, i in ids.items() if i is not None}


def _strings(file: GGUFFile, is_gemma: bool) -> list[str]:
    """Return the strings of all tokens; files of Gemma write some spaces as they are."""
    tokens = list(file.tokenizer("tokens"))
    if is_gemma and file.tokenizer("model") == "llama":
        for i, (token, kind) in enumerate(zip(tokens, file.tokenizer("token_type"), strict=True)):
            if kind != TokenType.USER_DEFINED and not token.strip(" "):
                tokens[i] = _SPACE * len(token)
    return tokens


def _byte_level(file: GGUFFile, ids: dict[str, int]) -> Tokenizer:
    name = pre_name(file)
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in file.tokenizer("merges"))]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=name in WHOLE_WORDS))
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str], ids: dict[str, int], is_gemma: bool) -> Tokenizer:
    """Return sentencepiece's BPE, as llama.cpp runs it.

    Pieces of the user are found first, the longest at each place. Each text between them and control tokens gets a
    space before it, if the file asks for it.
    """
    ranks = [-i for i in range(len(tokens))] if is_gemma else file.tokenizer("scores")
    merges = _merges(tokens, ranks, ids)
    if num_tied := _num_tied(merges, ids, ranks):
        log.warning(
            "%d tokens of the file's tokenizer share a score (tokenizer.ggml.scores): the lower one is merged first, "
            "where llama.cpp merges the leftmost",
            num_tied,
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=special_tokens(file).get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    if file.tokenizer("add_space_prefix", not is_gemma):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), tokenizer.normalizer])
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(tokens: list[str], ranks: list[float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that merge into a token.

    Sorted by the merged token, best first, then by the left part, longest first.
    """
    found = [
        (-ranks[number], -i, len(token) - i, ids[token[:i]], ids[token[i:]])
        for token, number in ids.items()
        for i in range(1, len(token))
        if token[:i] in ids and token[i:] in ids
    ]
    found.sort(key=lambda pair: (pair[0], pair[1], -pair[2]))
    return [(tokens[left], tokens[right]) for *_, left, right in found]


def _num_tied(merges: list[tuple[str, str]], ids: dict[str, int], ranks: list[float]) -> int:
    """Return the number of merged tokens whose rank others have too."""
    merged = {left + right for left, right in merges}
    counts = Counter(ranks[number] for token, number in ids.items() if token in merged)
    return sum(num for num in counts.values() if num > 1)


def _add_ends(tokenizer: Tokenizer, file: GGUFFile, special: dict[str, str]) -> None:
    """Add the tokens before and after every text."""
    llama = file.tokenizer("model") == "llama" or file.tokenizer("pre") in WHOLE_WORDS  # where the file is silent
    begin = special.get("bos_token") if file.tokenizer("add_bos_token", llama) else None
    end = special.get("eos_token") if file.tokenizer("add_eos_token", False) else None
    if begin is None and end is None:
        return
    single = [*([begin] if begin else []), "$A", *([end] if end else [])]
    used = [(token, token_id(file, role)) for token, role in {end: "eos", begin: "bos"}.items() if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)
