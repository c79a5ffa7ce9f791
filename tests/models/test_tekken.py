"""Folders whose only tokenizer is Mistral's tekken.json: ids of mistral-common 1.13.1 for the same files."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sharesd.models.checkpoint import read_config, weight_files
from sharesd.models.hub import resolve
from sharesd.models.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.tiny_models import make_checkpoint

WORDS = r"th the _the in ing _in aa aaa aaaa _a an ana nan == ==== \n\n __ ____ é 日 ll llo Hello user"
PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] "
    "[ARGS] [CALL_ID]"
)
NUM_SPECIAL, UNUSED = 30, 5


def tekken(version: str, *, special: bool = True) -> dict[str, Any]:
    """A file of the format, with tokens at its end that are not used."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [word.replace("_", " ").replace(r"\n", "\n").encode() for word in WORDS.split()]
    tokens += [f"unused {i}".encode() for i in range(UNUSED)]
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for i, token in enumerate(tokens)
    ]
    config = {"pattern": PATTERN, "version": version, "num_vocab_tokens": len(tokens)}
    config |= {"default_vocab_size": len(tokens) - UNUSED + NUM_SPECIAL, "default_num_special_tokens": NUM_SPECIAL}
    listed = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(SPECIAL.split())]
    return {"config": config, "vocab": vocab} | ({"special_tokens": listed} if special else {})


TEXTS = {
    "Hello, the thing": [1, 308, 74, 288, 62, 286, 290],
    "aaaaaaa banana  \n\n\n x": [1, 294, 293, 62, 128, 296, 297, 302, 301, 40, 62, 150],
    "日é== ====\t12": [1, 260, 181, 195, 304, 299, 62, 300, 39, 79, 80],
    "    in\r\n  the = user": [1, 302, 62, 291, 43, 40, 62, 288, 62, 91, 62, 147, 145, 131, 144],
}


def message_of(role: str) -> Callable[[Any], dict[str, Any]]:
    return lambda content: {"role": role, "content": content}


system, user, answer = map(message_of, ("system", "user", "assistant"))
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "the"}]
CHATS = [
    [user("Hello")],
    [system("in the"), user(" Hello "), answer("ok  "), user("12")],
    [system("a"), user("b"), system("c"), user("d"), user("e")],
    [user("a"), user(""), user("b"), answer("c"), answer("d"), user(PARTS)],
    [system(PARTS), user("é")],
]
V3 = [
    [1, 3, 308, 4],
    [1, 3, 62, 102, 131, 307, 62, 4, 141, 137, 2, 3, 289, 288, 301, 79, 80, 4],
    [1, 3, 128, 4, 3, 127, 301, 129, 301, 130, 301, 131, 4],
    [1, 3, 127, 301, 128, 4, 129, 301, 130, 2, 3, 127, 301, 287, 4],
    [1, 3, 127, 301, 287, 301, 304, 4],
]
V7 = [
    [1, 3, 308, 4],
    [1, 17, 289, 288, 18, 3, 62, 102, 131, 307, 62, 4, 141, 137, 2, 3, 79, 80, 4],
    [1, 17, 127, 18, 3, 128, 4, 17, 129, 18, 3, 130, 301, 131, 4],
    [1, 3, 127, 301, 128, 4, 129, 301, 130, 2, 3, 127, 301, 287, 4],
    [1, 17, 127, 301, 287, 18, 3, 304, 4],
]
IDS = {"v3": V3, "v7": V7, "v11": V7, "v13": V7}
pytestmark = pytest.mark.usefixtures("own_cache")


def folder_with(tmp_path: Path, said: dict[str, Any]) -> Path:
    folder = make_checkpoint(tmp_path / "model", layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "tekken.json").write_text(json.dumps(said))
    return folder


def load(tmp_path: Path, version: str, *, special: bool = True) -> Tokenizer:
    return load_tokenizer(resolve(folder_with(tmp_path, tekken(version, special=special))))


@pytest.mark.parametrize(
    ("version", "special"), [("v3", False), ("v3", True), ("v7", True), ("v11", True), ("v13", True)]
)
def test_ids_are_those_of_mistral_common(version: str, special: bool, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, version, special=special)
    for text, ids in TEXTS.items():
        assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
    for messages, ids in zip(CHATS, IDS[version], strict=True):
        assert tokenizer.chat(messages) == ids
    assert tokenizer.vocab_size == tekken(version)["config"]["default_vocab_size"]
    assert 2 in tokenizer.eos_ids and not tokenizer.takes_tools


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([user("a"), {"role": "tool", "content": "b"}], "tools take a chat template"),
        ([user("a"), {"role": "assistant", "content": "", "tool_calls": [1]}], "tools take a chat template"),
        ([user([{"type": "image_url"}])], "content of type image_url is not supported"),
        ([answer("a")], "the first message is to be of the user"),
        ([user("a"), answer("")], "a message of the assistant has no content"),
        ([user("a"), answer("b"), system("c")], "a system message does not follow one of the assistant"),
    ],
)
def test_what_the_template_has_no_tokens_for_is_refused(messages: list, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "v11").render_chat(messages)


def test_versions_without_a_template_take_plain_prompts(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "v15")
    assert tokenizer.ask("Hello, the thing") == TEXTS["Hello, the thing"]
    with pytest.raises(ValueError, match="this checkpoint has no chat template"):
        tokenizer.chat([user("a")])


def test_what_a_folder_has_beside_tekken_counts(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, tekken("v11"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[IMG]"}))
    tokenizer = load_tokenizer(resolve(folder))
    assert tokenizer.special["pad_token"] == "[IMG]" and tokenizer.special["bos_token"] == "<s>"
    assert tokenizer.chat([user("the")]) == [287]


def damaged(**changes: Any) -> dict[str, Any]:
    said = tekken("v7")
    return said | {"config": said["config"] | changes}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (damaged(default_vocab_size=500), "config names 500 and 30; download it again"),
        (damaged(default_num_special_tokens=3), "config names"),
        (damaged(pattern="("), "its vocabulary or pattern cannot be used"),
        (tekken("v7") | {"vocab": [{"token_bytes": "%"}]}, "token_bytes that are not base64"),
        ({}, "has a value that cannot be used"),
    ],
)
def test_damaged_files_are_refused_by_name(said: dict[str, Any], message: str, tmp_path: Path, own_cache: Path) -> None:
    folder = folder_with(tmp_path, said)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(resolve(folder))
    assert str(folder / "tekken.json") in str(caught.value)
    assert not list(own_cache.rglob("tokenizer.json"))


def test_the_format_of_mistral_is_refused_with_its_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "params.json").write_text("{}")
    (folder / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is in Mistral's own format \(params.json\); download its config.json and "):
        read_config(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    with pytest.raises(ValueError, match="has weights in Mistral's own format .consolidated.safetensors.; download"):
        weight_files(folder)
