"""Rows of what `train generate` wrote: nothing lost or mixed up, the same at every start.

Their masks: under every kind of chat template, what the assistant said and its end of turn.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, processors
from torch import Tensor

from sharesd.models.tokenizer import Tokenizer
from tests.helpers.tiny_tokenizer import CHAT_TEMPLATE, make_backend
from train.data.loss_mask import Example, Turn, join, masked
from train.data.packed_dataset import OPEN_ROWS, PADDING, PackedRows, pack, read_split
from train.data.shards import AnswerShard

LENGTH = 32


def write(folder: Path, world: int, num: int = 60) -> list[Example]:
    """Answers to half as many prompts, two each, by so many processes; returns all sequences."""
    folder.mkdir()
    dice, every = random.Random(0), []
    shards = [AnswerShard(folder, rank, world) for rank in range(world)]
    for number in range(num):
        sequences = []
        for _ in range(1 + (number % 5 == 0)):
            prompt, answer = dice.randint(1, 20), dice.randint(1, 25)
            ids = [dice.randrange(1, 99) for _ in range(prompt + answer)]
            sequences.append(Example(ids, [(prompt, prompt + answer)]))
        every += sequences
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": f"prompt {number // 2}"}]
        stored = [example._asdict() for example in sequences]
        record = {"index": number // 2, "sample": number % 2, "messages": messages, "sequences": stored}
        shards[number % world].add(record)
    return every


def segments(row: dict[str, Tensor]) -> list[Example]:
    """A row taken apart again."""
    found = []
    for segment in range(int(row["segment_ids"].max()) + 1):
        here = row["segment_ids"] == segment
        ids, mask = row["token_ids"][here].tolist(), row["loss_mask"][here].tolist()
        assert row["position_ids"][here].tolist() == list(range(len(ids)))
        first = mask.index(True)
        assert mask == [False] * first + [True] * (len(mask) - first), "answers end these sequences"
        found.append(Example(ids, [(first, len(ids))]))
    padding = row["segment_ids"] == PADDING
    assert not row["loss_mask"][padding].any() and int(padding.sum()) + sum(len(e.token_ids) for e in found) == LENGTH
    return found


def test_every_sequence_is_in_one_row_and_cut_at_its_length(tmp_path: Path) -> None:
    every = write(tmp_path / "a", 1)
    split = read_split(tmp_path / "a", LENGTH, held_out=0)
    assert split.held_out == []
    rows = PackedRows(split.train, LENGTH)
    found = Counter(str(example) for i in range(len(rows)) for example in segments(rows[i]))
    assert found == Counter(str(example.cut(LENGTH)) for example in every)
    assert any(len(example.token_ids) > LENGTH for example in every) and len(rows) < len(every)
    [batch, *_] = torch.utils.data.DataLoader(rows, batch_size=4)
    names = ("token_ids", "position_ids", "segment_ids", "loss_mask")
    assert {name: tensor.shape for name, tensor in batch.items()} == dict.fromkeys(names, (4, LENGTH))
    unshuffled = PackedRows(split.train, LENGTH, shuffle=False)
    before = [unshuffled[i]["token_ids"].tolist() for i in range(len(unshuffled))]
    unshuffled.set_epoch(3)
    assert before == [unshuffled[i]["token_ids"].tolist() for i in range(len(unshuffled))]


def test_rows_do_not_depend_on_who_wrote_the_answers(tmp_path: Path) -> None:
    def rows(folder: Path, epoch: int, seed: int = 0) -> list[list[int]]:
        packed = PackedRows(read_split(folder, LENGTH).train, LENGTH, seed=seed)
        packed.set_epoch(epoch)
        return [packed[i]["token_ids"].tolist() for i in range(len(packed))]

    for world in (1, 3):
        write(tmp_path / str(world), world)
    first = rows(tmp_path / "1", 0)
    assert first == rows(tmp_path / "3", 0)
    second = rows(tmp_path / "1", 1)
    assert second == rows(tmp_path / "3", 1) and second != first != rows(tmp_path / "1", 0, seed=1)
    assert Counter(token for row in first for token in row if token) == Counter(t for row in second for t in row if t)


def test_held_out_are_whole_prompts_whatever_else_is_there(tmp_path: Path) -> None:
    write(tmp_path / "few", 1, 100)
    write(tmp_path / "many", 2, 400)
    few, many = (read_split(tmp_path / name, LENGTH, held_out=0.2) for name in ("few", "many"))
    held_out = {place.number for place in many.held_out}
    assert held_out.isdisjoint(place.number for place in many.train)
    assert {place.number for place in few.held_out} == {number for number in held_out if number < 50}
    assert 0.1 < len(held_out) / 200 < 0.3


def test_sequences_without_loss_in_reach_are_left_out(tmp_path: Path) -> None:
    every = write(tmp_path / "a", 1)
    split = read_split(tmp_path / "a", 10, held_out=0.5)
    num = sum(example.cut(10).num_in_loss > 0 for example in every)
    assert len(split.train) + len(split.held_out) == num < len(every)
    with pytest.raises(ValueError, match="a sequence has 10 tokens and rows have 9"):
        PackedRows(split.train, 9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no answer within 10 tokens; raise --max-length"):
        read_split(tmp_path / "empty", 10)


def test_packing_fills_rows() -> None:
    dice = random.Random(0)
    lengths = [dice.randint(1, 100) for _ in range(2000)]
    rows = pack(lengths, 256)
    assert sorted(number for row in rows for number in row) == list(range(2000))
    assert all(sum(lengths[i] for i in row) <= 256 for row in rows)
    assert sum(lengths) / (256 * len(rows)) > 0.97
    assert pack([5] * (OPEN_ROWS + 9), 9) == [[i] for i in range(OPEN_ROWS + 9)]
    assert pack([], 9) == []


CHATML = CHAT_TEMPLATE
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}"
    "{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
MISTRAL = (  # the system's words come before the last question, wherever that is
    "{{ bos_token }}{% set start = 1 if messages[0].role == 'system' else 0 %}{% for m in messages[start:] %}"
    "{% if m.role == 'user' %}[INST]{% if loop.last and start %} {{ messages[0].content }}\n{% endif %}"
    " {{ m.content }}[/INST]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN = (  # thoughts of all answers but the last are dropped, and the last gets empty ones where it has none
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = '<think>\n' + (thought if '</think>' in m.content else '') + '\n</think>\n\n' + text %}{% endif %}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
SPECIAL = ("<s>", "</s>", "<start_of_turn>", "<end_of_turn>")

TALK = [
    {"role": "user", "content": "why is the sky blue"},
    {"role": "assistant", "content": "the sky is blue, and\nthe cat sat on it 🎉"},
    {"role": "user", "content": "  how  "},
    {"role": "assistant", "content": "by mat"},
]
SYSTEM = {"role": "system", "content": "this is a cat"}


def tokenizer_of(template: str | None, *ends: str) -> Tokenizer:
    """With these ends of turn; the first is the template's."""
    ends = ends or ("<|im_end|>",)
    backend = make_backend()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    special, eos_ids = {"bos_token": "<s>", "eos_token": ends[0]}, [backend.token_to_id(end) for end in ends]
    return Tokenizer(backend, special=special, chat_template=template, eos_ids=eos_ids)


def said(tokenizer: Tokenizer, *examples: Example) -> list[str]:
    """The text of every span in the loss."""
    spans = [example.token_ids[start:end] for example in examples for start, end in example.loss_spans]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in spans]


@pytest.mark.parametrize(
    ("template", "end", "around"),
    [
        (CHATML, "<|im_end|>", "{}<|im_end|>"),
        (LLAMA_2, "</s>", " {} </s>"),
        (MISTRAL, "</s>", " {}</s>"),
        (ZEPHYR, "</s>", "\n{}</s>"),  # its prompt ends before the line does, so the target has to end it
        (GEMMA, "<end_of_turn>", "{}<end_of_turn>"),
        (MARKED, "<|im_end|>", "{}<|im_end|>"),
        (MARKED_WITHOUT_END, "<|im_end|>", "{}<|im_end|>"),
    ],
)
def test_what_the_assistant_said_is_in_the_loss(template: str, end: str, around: str) -> None:
    tokenizer = tokenizer_of(template, end)
    [example] = masked(tokenizer, TALK)
    assert said(tokenizer, example) == [around.format(TALK[1]["content"]), around.format(TALK[3]["content"])]
    whole = tokenizer.chat(TALK, add_generation_prompt=False)
    assert whole[: len(example.token_ids)] == example.token_ids, "nothing but the very tokens of the template"
    first, _ = example.loss_spans[0]
    assert example.token_ids[:first] == tokenizer.chat(TALK[:1]), "the prompt is what the engine would read"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_system_prompt_is_not(template: str) -> None:
    tokenizer = tokenizer_of(template, "<|im_end|>", "<end_of_turn>")
    examples = masked(tokenizer, [SYSTEM, *TALK])
    assert [text.rpartition("<|")[0] for text in said(tokenizer, *examples)] == [TALK[1]["content"], TALK[3]["content"]]
    text = tokenizer.decode(examples[0].token_ids, skip_special_tokens=False)
    assert text.count("this is a cat") == 1


def test_each_answer_is_behind_what_the_target_reads_before_it() -> None:
    """Dropped thoughts change earlier turns: each answer gets a sequence of its own."""
    qwen = tokenizer_of(QWEN)
    thinking = [dict(message) for message in TALK]
    thinking[1]["content"] = "<think>\nwhy\n</think>\n\nthe sky"
    thinking[3]["content"] = "<think>\nby\n</think>\n\nmat"
    first, second = masked(qwen, thinking)
    assert said(qwen, first, second) == [f"{thinking[i]['content']}<|im_end|>" for i in (1, 3)]
    assert second.token_ids[: second.loss_spans[0][0]] == qwen.chat(thinking[:3])
    assert "why\n</think>" not in qwen.decode(second.token_ids)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (QWEN, TALK, "changes the text of answer 1"),
        (CHATML, TALK[:1], "there is no assistant message"),
        (CHATML.replace("<|im_end|>", ""), TALK, "no end of turn follows answer 1"),
        (CHATML, [TALK[0], {"role": "assistant", "content": "the<|im_end|>cat"}], "changes the text of answer 1"),
        (CHATML.replace("m.content", "m.content | upper"), TALK, "changes the text of answer 1"),
        (CHATML.replace("assistant\n{% endif", "model\n{% endif"), TALK, "not the prompt that the chat template"),
        (GEMMA, [SYSTEM, *TALK], "no system"),
        (MISTRAL, [SYSTEM, *TALK], "not the prompt that the chat template"),
        (MARKED.replace("{{ m.content }}<|im_end|>{% endgen", "{% endgen"), TALK, "no end of turn follows answer 1"),
        (MARKED.replace("'assistant'", "'robot'"), TALK, "marks 0 of 1 answers"),
        (None, TALK, "no chat template"),
    ],
)
def test_what_is_not_sure_is_refused(template: str | None, messages: list[dict[str, str]], reason: str) -> None:
    tokenizer = tokenizer_of(template, "<|im_end|>", "<end_of_turn>")
    with pytest.raises(ValueError, match=reason):
        masked(tokenizer, messages)


def test_the_tokenizers_own_bos_is_not_added_to_the_templates() -> None:
    tokenizer = tokenizer_of(GEMMA, "<end_of_turn>")
    bos = tokenizer.backend.token_to_id("<s>")
    tokenizer.backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert tokenizer.encode("the")[0] == bos
    [example] = masked(tokenizer, TALK)
    assert example.token_ids.count(bos) == 1 and example.token_ids[0] == bos
    assert said(tokenizer, example)[1] == "by mat<end_of_turn>"


def test_an_answer_that_would_merge_with_its_prompt_is_cut_where_the_prompt_ends() -> None:
    """ "ca" + "t" is one token of the vocabulary, which a target that has read "ca" cannot say."""
    tokenizer = tokenizer_of(CHATML.replace("assistant\n{% endif", "assistant\nca{% endif"))
    messages = [TALK[0], {"role": "assistant", "content": "cat"}]
    with pytest.raises(ValueError, match="changes the text of answer"):
        masked(tokenizer, messages)
    glued = CHATML.replace("{{ m.content }}", "{{ 'ca' if m.role == 'assistant' else '' }}{{ m.content }}")
    tokenizer = tokenizer_of(glued.replace("assistant\n{% endif", "assistant\nca{% endif"))
    [example] = masked(tokenizer, [TALK[0], {"role": "assistant", "content": "t on"}])
    assert said(tokenizer, example) == ["t on<|im_end|>"]
    assert example.token_ids[: example.loss_spans[0][0]] == tokenizer.chat(TALK[:1])
    assert tokenizer.encode("cat") == [tokenizer.backend.token_to_id("cat")]


def test_joining_loses_no_answer_and_a_cut_keeps_what_lies_before_it() -> None:
    turns = [Turn([1, 2], [3, 4]), Turn([1, 2, 3, 4, 5], [6]), Turn([1, 2, 3, 9], [7])]
    assert join(turns) == [Example([1, 2, 3, 4, 5, 6], [(2, 4), (5, 6)]), Example([1, 2, 3, 9, 7], [(4, 5)])]
    example = Example(list(range(10)), [(2, 4), (6, 9)])
    assert example.cut(20) == example
    assert example.cut(8) == Example(list(range(8)), [(2, 4), (6, 8)])
    assert example.cut(6) == Example(list(range(6)), [(2, 4)])
    assert example.cut(2).num_in_loss == 0 and example.num_in_loss == 5
