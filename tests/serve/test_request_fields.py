"""The page of request fields, row by row, over real HTTP."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from serve.fields import IGNORED, NEUTRAL
from tests.helpers.serve_requests import CHAT, HELLO, TEXT, error_of
from tests.helpers.served_model import Served, served
from tests.serve.common import shown, stream

PAGE = (Path(__file__).parents[2] / "docs/reference/request-fields.md").read_text("utf-8")
BODIES: dict[str, dict[str, Any]] = {TEXT: {"prompt": "the cat"}, CHAT: {"messages": HELLO}}
PATHS = {"Values": [TEXT, CHAT], "Only completions": [TEXT], "Only chats": [CHAT]}


def rows(title: str) -> list[tuple[list[str], list[Any], str]]:
    """Fields, values and result of each row."""
    found, section = [], PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [re.findall("`([^`]+)`", cell) or [cell.strip()] for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            result = line.strip("| ").split(" | ")[-1]
            values = [] if cells[1] == ["none"] else [json.loads(value) for value in cells[1]]
            found.append((cells[0], values, result))
    return found


CASES = [
    (path, fields, values, result.split(" ")[0].rstrip(":,"))
    for title, paths in PATHS.items()
    for fields, values, result in rows(title)
    for path in paths
]


def asked(server: Served, path: str, **more: Any) -> Any:
    """Prompt and parameters of the engine, and whether the seed is the given one; without a token, how many."""
    server.engine.added.clear()
    response = server.post(path, **BODIES[path], **more)
    assert response.status_code == 200, response.text
    [request] = server.engine.added or [None]
    if request is None:
        return response.json()["usage"]["completion_tokens"]
    params = {name: getattr(request.params, name) for name in request.params.__slots__ if name != "seed"}
    return request.prompt_ids, params, request.params.seed == more.get("seed", -1)


@pytest.fixture(scope="module")
def plain(server: Served) -> dict[str, Any]:
    return {path: asked(server, path, seed=None) for path in BODIES}


@pytest.mark.parametrize(("path", "fields", "values", "result"), CASES, ids=lambda value: str(value)[:30])
def test_each_row_of_values(
    server: Served, plain: dict[str, Any], path: str, fields: list[str], values: list[Any], result: str
) -> None:
    for field, value in product(fields, [*values, None]):
        if value is not None and result == "refused":
            error = error_of(server.post(path, **BODIES[path], **{field: value}), 404 if field == "model" else 400)
            assert field in error["message"] and error["param"].partition(".")[0] == field
            continue
        found = asked(server, path, **{field: value})
        no_limit = path == CHAT and value == -1 and field in ("max_tokens", "max_completion_tokens", "n_predict")
        if value is None or result == "default" or no_limit:  # chats have none anyway
            assert found[:2] == plain[path][:2], (field, value)
        else:
            assert result == "done"
            assert not isinstance(found, tuple) or found[2] or found[:2] != plain[path][:2]


ODD = [0, -1, "", "x", 2.5, True, [], [1], {}, {"a": 1}]


def test_ignored_fields_have_no_effect(server: Served, plain: dict[str, Any]) -> None:
    listed = re.search("<!-- ignored -->(.*?)<!-- /ignored -->", PAGE, re.S)
    assert listed
    names = [name for line in listed[1].splitlines() for name in re.findall("`([^`]+)`", line.split(" | ")[0])]
    assert sorted(names) == sorted(IGNORED)
    for path in BODIES:
        for value in [*ODD, None]:
            assert asked(server, path, **dict.fromkeys(IGNORED, value))[:2] == plain[path][:2]


def test_neutral_fields_take_their_values_alone(server: Served, plain: dict[str, Any]) -> None:
    listed = {tuple(fields): values for fields, values, _ in rows("Accepted with these values only")}
    assert {name: tuple(values) for names, values in listed.items() for name in names} == NEUTRAL
    for path in BODIES:
        for place in range(2):
            body = {name: values[place % len(values)] if values else None for name, values in NEUTRAL.items()}
            assert asked(server, path, **body)[:2] == plain[path][:2]
        assert asked(server, path, **dict.fromkeys(NEUTRAL))[:2] == plain[path][:2]
        for at, (name, values) in enumerate(NEUTRAL.items()):
            for value in ODD[at % 3 :: 3]:
                if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
                    error = error_of(server.post(path, **BODIES[path], **{name: value}))
                    assert error["param"] == name and "is supported" in error["message"]


def test_the_limit_of_completions_may_be_the_context(server: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert asked(server, TEXT, **{name: -1})[1]["max_new_tokens"] == 256 - 3
    assert asked(server, TEXT, max_tokens=-1, n_predict=5)[1]["max_new_tokens"] == 5
    assert error_of(server.post(TEXT, prompt="the", max_tokens=4, n_predict=5))["param"] == "max_tokens"


@pytest.mark.parametrize("path", BODIES)
def test_no_tokens_are_no_tokens(server: Served, path: str) -> None:
    body = {**BODIES[path], "max_tokens": 0, "n": 2}
    done = server.post(path, **body).json()
    assert [choice["finish_reason"] for choice in done["choices"]] == ["length", "length"]
    assert done["usage"]["completion_tokens"] == 0 and done["usage"]["prompt_tokens"] > 0
    streamed = server.post(path, **body, stream=True).text.split("\n\n")
    assert streamed[-2] == "data: [DONE]" and streamed[0].count('"finish_reason":"length"') == 1
    assert server.post(path, **body, logprobs=True if path == CHAT else 1).status_code == 200
    assert server.complete()["choices"][0]["text"], "places are free again"


def test_min_tokens_must_fit(server: Served) -> None:
    for body in ({"min_tokens": 9, "max_tokens": 4}, {"min_tokens": 999}):
        error = error_of(server.post(TEXT, prompt="the", **body))
        assert error["param"] == "min_tokens" and str(body["min_tokens"]) in error["message"]


def test_usage_may_come_with_each_event(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = stream(server, prompt="the cat", max_tokens=6, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts) and counts[0] < counts[-1] == counts[-2] == 6


def test_unknown_keys_of_messages_are_left_out(server: Served) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "mat"}
    unknown = {"provider_specific_fields": {"a": 1}, "thinking_blocks": [], "annotations": [{"type": "url_citation"}]}
    unknown |= {"images": None, "id": "m1", "reasoning_details": [1]}
    bodies = [[*HELLO, message | unknown, *HELLO], [*HELLO, message, *HELLO]]
    first, second = (server.post("/tokenize", messages=messages).json() for messages in bodies)
    assert first == second and first["count"] > 5


def test_a_begun_message_is_continued_as_it_is(server: Served) -> None:
    said = {"role": "assistant", "content": "the cat  "}
    ended = shown(server, [*HELLO, said], continue_final_message=True)
    assert ended.endswith("<|im_start|>assistant\nthe cat  ")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error_of(server.post(CHAT, messages=HELLO, **both))["param"] == "continue_final_message"


def test_a_template_that_trims_is_continued_without_spaces() -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    with served(template=template) as running:
        said = [*HELLO, {"role": "assistant", "content": "the mat \n"}]
        assert shown(running, said, continue_final_message=True).endswith("[assistant] the mat")
    with served(template="{% for m in messages %}{{ m.role }}{% endfor %}") as running:
        error_of(running.post(CHAT, messages=HELLO, continue_final_message=True))


def test_the_tokenizers_texts_and_roles(server: Served) -> None:
    found = server.post("/tokenize", model="fake", prompt="the cat", return_token_strs=True).json()
    assert "".join(found["token_strs"]) == "the cat" and found["max_model_len"] == 256
    assert len(found["token_strs"]) == len(found["tokens"]) == found["count"]
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "the cat"}
    info = server.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("<|im_end|>", "<|im_start|>", None)
    assert info["chat_template"] == server.engine.tokenizer.chat_template
