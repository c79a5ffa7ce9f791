"""Loss masks: under every kind of chat template, the masked tokens are what the assistant said and its end of turn."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from sharesd.models.tokenizer import Tokenizer
from tests.helpers.tiny_tokenizer import CHAT_TEMPLATE, make_backend
from train.data.loss_mask import Example, Turn, join, masked

CHATML = CHAT_TEMPLATE
WITH_DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nthe cat<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}"
    "{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set text = '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot_id|>' %}"
    "{{ bos_token + text if loop.first else text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
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
SPECIAL = ("<s>", "</s>", "<|start|>", "<|end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>")

TALK = [
    {"role": "user", "content": "why is the sky blue"},
    {"role": "assistant", "content": "the sky is blue, and\nthe cat sat on it 🎉"},
    {"role": "user", "content": "  how  "},
    {"role": "assistant", "content": "by mat"},
]
SYSTEM = {"role": "system", "content": "this is a cat"}


def tokenizer_of(template: str | None, *, end: str = "<|im_end|>") -> Tokenizer:
    backend = make_backend()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    end_id = backend.token_to_id(end)
    special = {"bos_token": "<s>", "eos_token": end}
    return Tokenizer(backend, special=special, chat_template=template, eos_ids=[end_id])


def said(tokenizer: Tokenizer, examples: Iterable[Example]) -> list[str]:
    """The text of every span in the loss."""
    return [
        tokenizer.decode(example.token_ids[start:end], skip_special_tokens=False)
        for example in examples
        for start, end in example.loss_spans
    ]


@pytest.mark.parametrize(
    ("template", "end", "around", "num_sequences"),
    [
        (CHATML, "<|im_end|>", "{}<|im_end|>", 1),
        (WITH_DEFAULT_SYSTEM, "<|im_end|>", "{}<|im_end|>", 1),
        (LLAMA_2, "</s>", " {} </s>", 1),
        (LLAMA_3, "<|eot_id|>", "{}<|eot_id|>", 1),
        (MISTRAL, "</s>", " {}</s>", 1),
        (ZEPHYR, "</s>", "\n{}</s>", 1),  # its prompt ends before the line does, so the target has to end it
        (GEMMA, "<end_of_turn>", "{}<end_of_turn>", 1),
        (MARKED, "<|im_end|>", "{}<|im_end|>", 1),
        (MARKED_WITHOUT_END, "<|im_end|>", "{}<|im_end|>", 1),
    ],
)
def test_what_the_assistant_said_is_in_the_loss(template: str, end: str, around: str, num_sequences: int) -> None:
    tokenizer = tokenizer_of(template, end=end)
    examples = masked(tokenizer, TALK)
    assert said(tokenizer, examples) == [around.format(TALK[1]["content"]), around.format(TALK[3]["content"])]
    assert len(examples) == num_sequences
    [example] = examples
    whole = tokenizer.chat(TALK, add_generation_prompt=False)
    assert whole[: len(example.token_ids)] == example.token_ids, "nothing but the very tokens of the template"
    first, _ = example.loss_spans[0]
    assert example.token_ids[:first] == tokenizer.chat(TALK[:1]), "the prompt is what the engine would read"


@pytest.mark.parametrize("template", [CHATML, WITH_DEFAULT_SYSTEM, LLAMA_3, MARKED])
def test_a_system_prompt_is_not(template: str) -> None:
    tokenizer = tokenizer_of(template)
    tokenizer.eos_ids = tuple(map(tokenizer.backend.token_to_id, ("<|im_end|>", "<|eot_id|>")))  # type: ignore[arg-type]
    examples = masked(tokenizer, [SYSTEM, *TALK])
    assert [text.rpartition("<|")[0] for text in said(tokenizer, examples)] == [TALK[1]["content"], TALK[3]["content"]]
    text = tokenizer.decode(examples[0].token_ids, skip_special_tokens=False)
    assert text.count("this is a cat") == 1


def test_marks_agree_with_those_of_transformers() -> None:
    tokenizer = tokenizer_of(MARKED)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, chat_template=MARKED)
    found = theirs.apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True)
    [example] = masked(tokenizer, TALK)
    mask = [0] * len(found["input_ids"])
    for start, end in example.loss_spans:
        mask[start:end] = [1] * (end - start)
    assert mask == found["assistant_masks"] and sum(mask) == example.num_in_loss


def test_each_answer_is_behind_what_the_target_reads_before_it() -> None:
    """Dropped thoughts change earlier turns: each answer gets a sequence of its own."""
    qwen = tokenizer_of(QWEN)
    thinking = [dict(message) for message in TALK]
    thinking[1]["content"] = "<think>\nwhy\n</think>\n\nthe sky"
    thinking[3]["content"] = "<think>\nby\n</think>\n\nmat"
    first, second = masked(qwen, thinking)
    assert said(qwen, [first, second]) == [f"{thinking[i]['content']}<|im_end|>" for i in (1, 3)]
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
    tokenizer = tokenizer_of(template)
    tokenizer.eos_ids = tuple(map(tokenizer.backend.token_to_id, ("<|im_end|>", "<end_of_turn>")))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=reason):
        masked(tokenizer, messages)


def test_the_tokenizers_own_bos_is_not_added_to_the_templates() -> None:
    tokenizer = tokenizer_of(GEMMA, end="<end_of_turn>")
    bos = tokenizer.backend.token_to_id("<s>")
    tokenizer.backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert tokenizer.encode("the")[0] == bos
    [example] = masked(tokenizer, TALK)
    assert example.token_ids.count(bos) == 1 and example.token_ids[0] == bos
    assert said(tokenizer, [example])[1] == "by mat<end_of_turn>"


def test_an_answer_that_would_merge_with_its_prompt_is_cut_where_the_prompt_ends() -> None:
    """ "ca" + "t" is one token of the vocabulary, which a target that has read "ca" cannot say."""
    tokenizer = tokenizer_of(CHATML.replace("assistant\n{% endif", "assistant\nca{% endif"))
    messages = [TALK[0], {"role": "assistant", "content": "cat"}]
    with pytest.raises(ValueError, match="changes the text of answer"):
        masked(tokenizer, messages)
    glued = CHATML.replace("{{ m.content }}", "{{ 'ca' if m.role == 'assistant' else '' }}{{ m.content }}")
    tokenizer = tokenizer_of(glued.replace("assistant\n{% endif", "assistant\nca{% endif"))
    [example] = masked(tokenizer, [TALK[0], {"role": "assistant", "content": "t on"}])
    assert said(tokenizer, [example]) == ["t on<|im_end|>"]
    assert example.token_ids[: example.loss_spans[0][0]] == tokenizer.chat(TALK[:1])
    assert tokenizer.encode("cat") == [tokenizer.backend.token_to_id("cat")]


def test_a_cut_keeps_what_lies_before_it() -> None:
    example = Example(list(range(10)), [(2, 4), (6, 9)])
    assert example.cut(20) == example
    assert example.cut(8) == Example(list(range(8)), [(2, 4), (6, 8)])
    assert example.cut(6) == Example(list(range(6)), [(2, 4)])
    assert example.cut(2).num_in_loss == 0 and example.num_in_loss == 5


def test_joining_loses_no_answer() -> None:
    turns = [Turn([1, 2], [3, 4]), Turn([1, 2, 3, 4, 5], [6]), Turn([1, 2, 3, 9], [7])]
    assert join(turns) == [Example([1, 2, 3, 4, 5, 6], [(2, 4), (5, 6)]), Example([1, 2, 3, 9, 7], [(4, 5)])]
