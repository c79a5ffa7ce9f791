"""OpenAI's API of responses by its official client, over real HTTP with a fake engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.serve_requests import error_of
from tests.helpers.served_model import Served
from tests.helpers.tiny_tokenizer import TOOL_TEMPLATE
from tests.serve.common import prompt_of

PATH = "/v1/responses"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "d",
    "parameters": CITY,
    "strict": None,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "the mat"}}\n</tool_call>'
TEMPLATE = TOOL_TEMPLATE.replace(
    "{{ m.role }}\n", "{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
)
SERVED = {"template": TEMPLATE, "max_context": 2048}
SCRIPTS = {"the weather": f"<think>why is it red</think>\nI look.\n{CALL}", "the mat is": "the cat sat on the mat"}


def test_a_text_has_the_clients_shape(server: Served) -> None:
    done = server.openai().responses.create(model="fake", input="the mat is", instructions="be on the mat")
    assert (done.object, done.status, done.model, done.error) == ("response", "completed", "fake", None)
    assert done.output_text == "the cat sat on the mat" and len(done.output) == 1
    assert done.usage is not None and done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert "<|im_start|>system\nbe on the mat<|im_end|>\n<|im_start|>user\nthe mat is<|im_end|>" in prompt_of(server)


def test_a_cut_answer_is_incomplete(server: Served) -> None:
    done = server.openai().responses.create(model="fake", input="the mat is", max_output_tokens=3)
    assert done.status == "incomplete" and done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"


def test_reasoning_and_calls_are_items_and_are_taken_back(server: Served) -> None:
    client = server.openai()
    talk: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "the weather"}]}]
    done = client.responses.create(model="fake", input=talk, tools=[TOOL], store=False)  # type: ignore[list-item]
    thought, said, call = done.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "why is it red"
    assert said.type == "message" and done.output_text == "I look."
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "the mat"}
    talk += [*done.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    client.responses.create(model="fake", input=talk, tools=[TOOL])  # type: ignore[list-item]
    turn = f"assistant\n<think>why is it red</think>I look.{CALL}<|im_end|>"
    assert f"{turn}\n<|im_start|>tool\nsunny<|im_end|>" in prompt_of(server)


@pytest.mark.parametrize("question", ["the weather", "the mat is", "the sky"])
def test_a_stream_is_the_whole_answer(server: Served, question: str) -> None:
    client = server.openai()
    body: dict[str, Any] = {"model": "fake", "input": question, "tools": [TOOL], "temperature": 0}
    whole = client.responses.create(**body, max_output_tokens=300)
    events = list(client.responses.create(**body, max_output_tokens=300, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{whole.status}"

    def plain(response: Any) -> Any:
        items = [item.model_dump(exclude={"id", "call_id", "status"}, exclude_none=True) for item in response.output]
        for part in (part for item in items for part in item.get("content", ())):
            part.pop("parsed", None)
        return items, response.usage.output_tokens, response.status

    assert plain(last.response) == plain(whole)
    pieces: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            pieces[event.item_id] = pieces.get(event.item_id, "") + event.delta
    done = [event.item for event in events if event.type == "response.output_item.done"]
    texts = [item.arguments if item.type == "function_call" else item.content[0].text for item in done]
    assert list(pieces.values()) == texts and [item.id for item in done] == list(pieces)
    if whole.status == "completed":  # the client's own accumulator knows no other end
        with client.responses.stream(**body, max_output_tokens=300) as stream:
            assert plain(stream.get_final_response()) == plain(whole)


def test_schemas_and_choices_are_those_of_chats(server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "hex-color"}}}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    done = server.post(PATH, input="the cat", text=form, max_output_tokens=4)
    assert done.status_code == 200 and done.json()["warnings"]
    assert server.engine.added[-1].params.grammar
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        assert server.post(PATH, input="the", tools=[TOOL], tool_choice=choice, max_output_tokens=4).status_code == 200
        assert "get_weather" in (server.engine.added[-1].params.grammar or "")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input_image"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": [{"role": "user", "content": "x"}], "temperature": -1}, "temperature"),
        ({"unknown_key": 1}, "unknown_key"),
        ({"input": []}, "input"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Served, more: dict[str, Any], named: str) -> None:
    assert named in error_of(server.post(PATH, **{"input": "the", **more}))["message"]


def test_errors_are_the_clients(server: Served) -> None:
    import openai

    with pytest.raises(openai.NotFoundError):
        server.openai().responses.create(model="other", input="the")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        server.openai().responses.create(model="fake", input="the cat " * 3000)
