"""Clients on a server with the embedded model: the same answers, calls, objects and errors.

Anthropic's client has tests of its own, with a fake engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from serve.command import load_model
from serve.engine_thread import ServedModel
from sharesd.config import EngineConfig
from sharesd.models.tokenizer import Tokenizer
from tests.helpers.serve_requests import CHAT
from tests.helpers.served_model import Served
from tests.helpers.tiny_tokenizer import TOOL_TEMPLATE
from tests.serve.common import real

pytestmark = [pytest.mark.real_model, pytest.mark.filterwarnings("ignore")]
KEY, NAME = "secret", "smollm"
COLOURS, WEATHER, ANNA = "Name three colours.", "Weather in Paris?", "Anna is 30 years old."
TOO_LONG = "cat " * 2000
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 64}
CITY = {"city": {"type": "string", "maxLength": 20}}
PARAMETERS = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@dataclass
class Said:
    """Answer, as a client has it."""

    text: str
    calls: list[tuple[str, dict[str, Any]]]
    input_tokens: int
    output_tokens: int
    message: Any = None
    """The client's own object, to be sent back."""


class OpenAI:
    """openai, chat completions."""

    errors = (openai.BadRequestError, openai.NotFoundError, openai.AuthenticationError)

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, talk: Any, *, tools: bool = False, key: str = KEY, name: str = NAME) -> Said:
        return _said(self._create(key, **self._body(talk, tools, name)))

    def stream(self, talk: Any, *, tools: bool = False) -> Said:
        body: Any = {"stream_options": {"include_usage": True}, **self._body(talk, tools, NAME)}
        with self._client(KEY).chat.completions.stream(**body) as stream:
            return _said(stream.get_final_completion())

    def person(self) -> Person | None:
        body: Any = {"messages": _user(ANNA), "response_format": Person, "model": NAME, **GREEDY}
        return self._client(KEY).chat.completions.parse(**body).choices[0].message.parsed

    def results(self, said: Said, talk: Any) -> Any:
        calls = said.message.tool_calls
        return [*talk, said.message, *({"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in calls)]

    def _client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def _body(self, talk: Any, tools: bool, name: str) -> dict[str, Any]:
        more = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False} if tools else {}
        return {"model": name, "messages": talk, **GREEDY, **more}

    def _create(self, key: str, **body: Any) -> Any:
        return self._client(key).chat.completions.create(**body)


class LiteLLM(OpenAI):
    """litellm, as a proxy in front of the server has it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks a server for prices
        module = self.module = pytest.importorskip("litellm")
        self.errors = (module.ContextWindowExceededError, module.NotFoundError, module.AuthenticationError)

    def stream(self, talk: Any, *, tools: bool = False) -> Said:
        body = {"stream": True, "stream_options": {"include_usage": True}, **self._body(talk, tools, NAME)}
        return _said(self.module.stream_chunk_builder(list(self._create(KEY, **body))))

    def person(self) -> Person | None:
        done = self._create(KEY, model=NAME, messages=_user(ANNA), response_format=Person, **GREEDY)
        return Person.model_validate_json(done.choices[0].message.content)

    def _create(self, key: str, **body: Any) -> Any:
        place = {"model": f"openai/{body.pop('model')}", "api_base": f"{self.url}/v1"}
        return self.module.completion(api_key=key, max_retries=0, **body, **place)


class LangChain:
    """langchain-openai, with chat completions or with responses."""

    def __init__(self, url: str, *, responses: bool = False) -> None:
        self.url, self.responses = url, responses
        self.module = pytest.importorskip("langchain_openai")
        from langchain_core.exceptions import ContextOverflowError, ModelAuthenticationError, ModelNotFoundError

        self.errors = (ContextOverflowError, ModelNotFoundError, ModelAuthenticationError)

    def ask(self, talk: Any, *, tools: bool = False, key: str = KEY, name: str = NAME) -> Said:
        return self._said(self._model(tools, key, name).invoke(talk))

    def stream(self, talk: Any, *, tools: bool = False) -> Said:
        first, *others = self._model(tools, KEY, NAME).stream(talk)
        for chunk in others:
            first += chunk
        return self._said(first)

    def person(self) -> Any:
        return self._model(False, KEY, NAME).with_structured_output(Person, method="json_schema").invoke(ANNA)

    def results(self, said: Said, talk: Any) -> Any:
        from langchain_core.messages import ToolMessage

        results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in said.message.tool_calls]
        return [*talk, said.message, *results]

    def _model(self, tools: bool, key: str, name: str) -> Any:
        settings = {"stream_usage": True, "use_responses_api": self.responses, "max_retries": 0, **GREEDY}
        model = self.module.ChatOpenAI(model=name, base_url=f"{self.url}/v1", api_key=key, **settings)
        return model.bind_tools([TOOL], tool_choice="any") if tools else model

    def _said(self, message: Any) -> Said:
        calls, usage = [(call["name"], call["args"]) for call in message.tool_calls], message.usage_metadata
        return Said(message.text, calls, usage["input_tokens"], usage["output_tokens"], message)


CLIENTS: dict[str, Callable[[str], Any]] = {
    "openai": OpenAI,
    "langchain": LangChain,
    "langchain responses": lambda url: LangChain(url, responses=True),
    "litellm": LiteLLM,
}


def _user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def _said(done: Any) -> Said:
    message, usage = done.choices[0].message, done.usage
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return Said(message.content or "", calls, usage.prompt_tokens, usage.completion_tokens, message)


def load(*args: Any) -> ServedModel:
    """Load the embedded model, with a chat template that has a place for tools."""
    model = load_model(*args)
    own = model.tokenizer
    shown = Tokenizer(own.backend, special=own.special, chat_template=TOOL_TEMPLATE, eos_ids=own.eos_ids)
    return replace(model, tokenizer=shown)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    config = EngineConfig(mode="suffix", max_batch=2, max_context=1024)
    with real(config, load, model_name=NAME, api_keys=(KEY,)) as running:
        running.http.headers["authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, server: Served) -> Any:
    return CLIENTS[request.param](server.url)


def test_an_answer_is_the_same_by_each_client_streamed_and_whole(server: Served, client: Any) -> None:
    wanted = server.post(CHAT, messages=_user(COLOURS), **GREEDY).json()
    text, usage = wanted["choices"][0]["message"]["content"], wanted["usage"]
    assert "Red" in text
    for said in (client.ask(_user(COLOURS)), client.stream(_user(COLOURS))):
        found = said.text, said.calls, said.input_tokens, said.output_tokens
        assert found == (text, [], usage["prompt_tokens"], usage["completion_tokens"])


def test_a_call_is_made_streamed_and_whole_and_its_result_is_taken_back(client: Any) -> None:
    talk = _user(WEATHER)
    said, streamed = client.ask(talk, tools=True), client.stream(talk, tools=True)
    assert said.calls == [("get_weather", {"city": "Paris"})] == streamed.calls
    answer = client.ask(client.results(said, talk))
    assert answer.text and answer.input_tokens > said.output_tokens


def test_an_answer_is_an_object_of_the_schema(client: Any) -> None:
    assert client.person() == Person(name="Anna", age=30)


def test_errors_have_the_clients_own_classes(client: Any) -> None:
    too_long, no_model, wrong_key = client.errors
    with pytest.raises(too_long, match="maximum context length"):
        client.ask(_user(TOO_LONG))
    with pytest.raises(no_model, match=NAME):
        client.ask(_user(COLOURS), name="other")
    with pytest.raises(wrong_key, match="key is wrong"):
        client.ask(_user(COLOURS), key="wrong")
