"""Encoding, streaming and chat templates, on tiny tokenizers made here and against transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sharesd.models.text_stream import TextStream
from sharesd.models.tokenizer import load_tokenizer, require_same_vocabulary
from tests.helpers.tiny_tokenizer import TOOL_TEMPLATE

LINES = ["the cat sat on the mat", "a naïve café — 日本語 🎉", "don't  stop\n\nnow 123"] * 3
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
HI = [{"role": "user", "content": "the cat"}]


def byte_level() -> Tokenizer:
    """GPT-2 style: every token is a run of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<s>", "</s>"]}
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=300, show_progress=False, **options))
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2 style: spaces are part of tokens, unknown characters are byte tokens."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdehmnost", "▁the", "▁cat", "!"]
    merges = ["▁ t", "▁t h", "▁th e", "▁ c", "▁c a", "▁ca t"]
    pieces = dict.fromkeys([*vocab, *(merge.replace(" ", "") for merge in merges)])
    pairs = [(left, right) for left, right in (merge.split() for merge in merges)]
    ids = {token: i for i, token in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(ids, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def write(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"pad_token": "<pad>"},
        {"added_tokens_decoder": {"320": {"content": "<tool>", "special": False, "normalized": False}}},
    ],
)
def test_ids_and_text_equal_those_of_transformers(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, KINDS[kind](), **config)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(theirs, PreTrainedTokenizerFast)
    for text in (*LINES, "", " the", "<s>the</s> <pad><tool> cat"):
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_streamed_pieces_are_the_whole_text(kind: str, skip_special: bool, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, KINDS[kind]()))
    dice = random.Random(5)
    emoji = tokenizer.encode("the 🎉日本 cat é!", add_special_tokens=False)
    for round_ in range(300):
        ids = [dice.randrange(tokenizer.vocab_size) for _ in range(20)]
        if round_ % 3 == 0:  # mostly well-formed text with a hole in it
            ids = emoji * 2
            del ids[dice.randrange(len(ids))]
        stream, shown, at = TextStream(tokenizer, skip_special), "", 0
        while at < len(ids):
            step = dice.randint(1, 4)
            shown += stream.push(ids[at : at + step])
            at += step
        assert shown + stream.finish() == tokenizer.decode(ids, skip_special)


@pytest.mark.parametrize("kind", KINDS)
def test_stream_shows_text_at_once_but_never_half_a_character(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, KINDS[kind]()))
    stream = TextStream(tokenizer)
    assert [stream.push([i]) for i in tokenizer.encode("the cat", False)] == ["the", " cat"]
    pieces = [stream.push([i]) for i in tokenizer.encode("ß!", False)]
    assert "".join(pieces).endswith("ß!") and not any("\ufffd" in piece for piece in pieces)
    stream = TextStream(tokenizer)
    assert stream.push([]) == stream.push([1]) == stream.finish() == ""


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    ids = load_tokenizer(write(tmp_path, backend)).encode("the cat sat on the mat")
    assert len(ids) > 3 and ids[-1] != 0


@pytest.mark.parametrize(
    "template",
    [
        CHAT,
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n  {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}",
        "{{ messages | tojson }}{{ {'ü': '<'} | tojson(indent=2) }}",
        "{{ strftime_now('%d') }}{% if tools is none %}no tools{% endif %}{% if add_generation_prompt %}go{% endif %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ],
)
def test_chat_templates_render_as_in_transformers(template: str, tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), chat_template=template)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chat = [*HI, {"role": "assistant", "content": " sat "}]
    for prompt in (True, False):
        wanted = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        assert ours.render_chat(chat, prompt) == wanted
        assert ours.chat(chat, prompt) == theirs.apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"]


def test_tools_and_variables_render_as_in_transformers(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": TOOL_TEMPLATE}, {"name": "default", "template": CHAT}]
    folder = write(tmp_path, byte_level(), chat_template=several)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"b": "<é>"}}}
    chat = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    function = {"name": "f", "description": "é", "parameters": {"type": "object", "properties": {}}}
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "thinking": True}
    for given in (None, [{"type": "function", "function": function}]):
        wanted = theirs.apply_chat_template(chat, tools=given, **options)
        assert ours.render_chat(chat, tools=given, variables={"thinking": True}) == wanted
    assert ours.takes_tools and ours.template_variables == {"thinking"}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
    ],
)
def test_chats_that_cannot_be_rendered_are_explained(template: str | None, message: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), chat_template=template))
    assert tokenizer.has_chat_template == (template is not None)
    with pytest.raises(ValueError, match=message):
        tokenizer.chat(HI)


def test_eos_ids_come_from_everywhere(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens(["<|im_end|>", "<|eot_id|>"])
    folder = write(tmp_path, backend, chat_template="{{ messages[0].content }}<|im_end|>")
    assert load_tokenizer(folder).eos_ids == (1, backend.token_to_id("<|im_end|>"))
    (folder / "config.json").write_text('{"eos_token_id": 9}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert load_tokenizer(folder).eos_ids == (8, 9, 1, backend.token_to_id("<|im_end|>"))


def test_added_tokens_of_one_string_keep_their_ids(tmp_path: Path) -> None:
    """The package leaves the second one out, and would give its id to the next token."""
    written, backend = json.loads(byte_level().to_str()), byte_level()
    num, known = backend.get_vocab_size(), backend.token_to_id("a")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    contents = ["<x>", "<x>", "a", "</s>", "<y>"]
    for i, content in enumerate(contents, num):
        written["added_tokens"].append({"id": i, "content": content, "special": content in ("</s>", "<y>"), **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    tokenizer = load_tokenizer(tmp_path)
    ids = range(num, num + len(contents))
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in ids] == contents
    assert [tokenizer.decode([i]) for i in ids] == ["<x>", "<x>", "a", "", ""]
    assert tokenizer.encode("<x>a<y>") == [num, known, num + 4] and tokenizer.vocab_size == num + len(contents)


def test_draft_models_need_the_same_vocabulary(tmp_path: Path) -> None:
    target = load_tokenizer(write(tmp_path / "a", byte_level()))
    require_same_vocabulary(target, load_tokenizer(write(tmp_path / "b", byte_level(), chat_template=CHAT)))
    longer = byte_level()
    longer.add_tokens([AddedToken("<more>")])
    for other, first in ((byte_fallback(), "token 0 is '<unk>', the target's is '<s>'"), (longer, "is '<more>'.*None")):
        draft = load_tokenizer(write(tmp_path / "c", other))
        assert draft.fingerprint() != target.fingerprint()
        with pytest.raises(ValueError, match=first):
            require_same_vocabulary(target, draft)


def test_folders_without_tokenizer_json_are_converted(tmp_path: Path) -> None:
    backend = byte_level()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt, as GPT-2 has them
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 1}')
    tokenizer = load_tokenizer(tmp_path)
    text = "the cat sat on a naïve café"
    assert tokenizer.encode(text, False) == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == (1,)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"bos_token": None}, {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": "<pad>"}}),
        ({}, {"special_tokens_map.json": {"mask_token": {"content": "<tool>", "lstrip": True, "rstrip": False}}}),
        ({}, {"added_tokens.json": {"<tool>": 301, "<pad>": 300}}),
        ({"additional_special_tokens": ["<tool>"]}, {"added_tokens.json": {"<tool>": 301, "<pad>": 300}}),
        ({"extra_special_tokens": ["<tool>"]}, {"special_tokens_map.json": {"additional_special_tokens": ["<pad>"]}}),
        ({"extra_special_tokens": {"image": "<tool>"}}, {}),
        (
            {"added_tokens_decoder": {"300": {"content": "<tool>", "special": False}}},
            {"added_tokens.json": {"<pad>": 301}, "special_tokens_map.json": {"pad_token": "<pad>"}},
        ),
    ],
)
def test_old_layouts_equal_those_of_transformers(config: dict[str, Any], files: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), **config)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("<s>the</s> <pad> <tool> cat", "the<tool><pad>"):
        ids = ours.encode(text, False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)
    assert {k: v for k, v in ours.special.items() if k in theirs.special_tokens_map} == theirs.special_tokens_map
