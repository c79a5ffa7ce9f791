"""Schemas of request bodies.

`serve.fields` has parameters that are accepted without effect. An unknown parameter is an error that names it. Types
are strict: a string is not accepted as a number.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import Request
from pydantic import Field, ValidationError, model_validator

from serve.errors import invalid, of_schema, unknown_nulls
from serve.fields import WITHOUT_EMPTY, Accepted, Strict, unset
from serve.messages import Function, Messages, ToolChoice, Tools, tool_policy
from sharesd.sampling_params import SamplingParams


class StreamOptions(Strict):
    """Options of a stream's last chunk."""

    include_usage: bool | None = None
    """True: the last chunk has the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """True: all chunks have the usage so far."""
    include_obfuscation: Literal[False] | None = None
    """False or null: obfuscation is not supported."""


class JsonSchema(Strict):
    """JSON schema of the answer; always strict."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class Format(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise invalid("response_format: json_schema belongs to the type json_schema only", "response_format")
        return self


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`, with exactly one key."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """Grammar in llguidance's dialect of Lark."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(part is not None for part in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise invalid("structured_outputs: give one of json, regex, choice and grammar", "structured_outputs")
        return self


MAX_CHOICES = 128
"""Maximum of `n`; the queue's limit may be lower."""
MAX_TOP_LOGPROBS = 20
"""Maximum alternatives per token."""
MAX_STOPS = 64
"""Maximum stop texts; editors send more than twenty."""

Body = TypeVar("Body", bound=Strict)
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Limit = Annotated[int, Field(ge=-1, lt=2**31)]
"""Token limit; -1: none, so up to the end of the context."""
Name = Annotated[str | None, unset("")]
Key = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
"""Token id as a JSON key."""

# Validation stops at a list's first wrong item: collecting an error for each would take seconds.
Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]


async def read(request: Request, kind: type[Body]) -> Body:
    """Return the validated body of a request; ApiError if invalid."""
    text = await request.body()
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        unknown = unknown_nulls(error)
        if not unknown:
            raise of_schema(error) from None
    known = {name: value for name, value in json.loads(text).items() if name not in unknown}
    try:
        return kind.model_validate_json(json.dumps(known))
    except ValidationError as error:
        raise of_schema(error) from None


def chat_body(fields: dict[str, Any]) -> ChatBody:
    """Return a chat with these fields, of another API; ApiError if invalid."""
    try:
        return ChatBody.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise of_schema(error) from None


class Generation(Accepted):
    """Parameters shared by chats and completions."""

    model: Name = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n_predict: Limit | None = None
    """Name of `max_tokens` in llama.cpp."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[Key, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[Annotated[int, Field(ge=0, lt=2**63)] | None, unset(-1)] = None
    stop: Annotated[Stop | Stops | None, WITHOUT_EMPTY] = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    speculate: bool | None = None
    """Extension: false disables drafts for this request."""
    token_details: bool | None = None
    """Extension: true returns each token's source and speculation figures."""
    round_details: bool | None = None
    """Extension: true returns each round's draft, acceptance and times."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream; set stream to true, or leave it out", "stream_options")
        if len(set(self._limits.values())) > 1:
            given = " and ".join(f"{name} is {value}" for name, value in self._limits.items())
            raise invalid(f"{given}; give one of them", next(iter(self._limits)))
        asking = self.shaped_by
        if len(asking) > 1:
            raise invalid(f"{' and '.join(asking)} both constrain the answer; leave one out", asking[-1])
        return self

    @property
    def shaped_by(self) -> list[str]:
        """Names of the given parameters that constrain the answer's form."""
        has_format = self.response_format is not None and self.response_format.type != "text"
        asking = {"response_format": has_format, "structured_outputs": self.structured_outputs is not None}
        return [name for name, asked in asking.items() if asked]

    @property
    def choices_per_prompt(self) -> int:
        """Number of choices per prompt: `n`."""
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens per answer; None without a limit."""
        return next(iter(self._limits.values()), None)

    @property
    def _limits(self) -> dict[str, int]:
        names = ("max_tokens", "max_completion_tokens", "n_predict")
        return {name: value for name in names if (value := getattr(self, name)) not in (None, -1)}

    @property
    def says_limit(self) -> bool:
        """True if a limit is given, including -1 for none."""
        return not self.max_tokens is self.max_completion_tokens is self.n_predict is None

    @property
    def bias(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return {int(token): amount for token, amount in (self.logit_bias or {}).items()}

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return bool(self.token_details or (self.stream_options and self.stream_options.include_usage))

    @property
    def wants_usage_always(self) -> bool:
        """True if all chunks of a stream have the usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats and self.wants_usage)

    @property
    def num_top(self) -> int | None:
        """Number of top log-probabilities per token; None: no log-probabilities."""
        return None

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of the prompt are requested."""
        return False

    def params(self, *, token_limit: int, seed: int, grammar: str | None = None) -> SamplingParams:
        """Return the sampling parameters; OpenAI's default temperature is 1."""
        return SamplingParams(
            max_new_tokens=token_limit if self.scores_prompt else max(1, token_limit),
            min_new_tokens=self.min_tokens or 0,
            temperature=_or(self.temperature, 1.0),
            top_k=max(0, _or(self.top_k, 0)),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=self.bias,
            seed=seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.num_top is not None,
            top_logprobs=self.num_top or 0,
            prompt_logprobs=self.scores_prompt,
            speculate=_or(self.speculate, True),
            grammar=grammar,
        )


class ChatBody(Generation):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    add_generation_prompt: bool | None = None
    """False: the prompt ends after the last message, without assistant header."""
    continue_final_message: bool | None = None
    """True: the prompt ends in the last message's text."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    enable_thinking: bool | None = None
    """Variable of the chat template, ignored by templates that do not read it."""
    reasoning_effort: Annotated[str | None, unset("")] = None
    """As `enable_thinking`; "none" is the same as that of false."""
    include_reasoning: bool | None = None
    """False: the answer has no reasoning, though the model writes it."""
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    """As `--reasoning-format`, for this request."""
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _has_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs; set logprobs to true, or leave it out", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _has_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if twice is not None:
            raise invalid(f"tools has two functions named {twice}; give each a different name", "tools")
        choice = tool_policy(self.tool_choice)
        for wanted in choice.names or () if choice.mode != "none" else ():
            if wanted not in names:
                raise invalid(f"tool_choice is {wanted}, which is not a function in tools; add it", "tool_choice")
        if choice.mode == "required" and not self.shown_functions:
            raise invalid("tool_choice is required, but tools has no function; add one", "tool_choice")
        return self

    @property
    def shaped_by(self) -> list[str]:
        return super().shaped_by + (["tools"] if self.shown_functions else [])

    @property
    def shown_functions(self) -> list[Function]:
        """Functions in the prompt."""
        return [] if tool_policy(self.tool_choice).mode == "none" else [tool.function for tool in self.tools or ()]

    @property
    def callable_functions(self) -> list[Function]:
        """Functions that may be called."""
        names = tool_policy(self.tool_choice).names
        return [function for function in self.shown_functions if names is None or function.name in names]

    @property
    def must_call(self) -> bool:
        """True if one of the functions must be called."""
        return tool_policy(self.tool_choice).mode == "required"

    @property
    def max_calls(self) -> int | None:
        """Maximum calls in one answer; None: no limit."""
        return 1 if self.parallel_tool_calls is False or tool_policy(self.tool_choice).is_one else None

    @property
    def begun(self) -> str | None:
        """Text of the message that the answer continues, or None."""
        return (self.messages[-1].text or "") if self.continue_final_message else None

    @property
    def preferences(self) -> dict[str, Any]:
        """Variables of the chat template, without effect in others."""
        effort, thinks = self.reasoning_effort, self.enable_thinking
        thinks = False if effort == "none" and thinks is None else thinks
        given = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        return {name: value for name, value in given.items() if value is not None and value != "none"}

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Generation):
    """Body of `POST /v1/completions`."""

    prompt: str | Texts | Ids | ManyIds
    echo: bool | None = None
    logprobs: Annotated[Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None, unset(False)] = None
    suffix: Literal[""] | None = None

    add_special_tokens: bool | None = None
    """False: a text is encoded without the beginning-of-text token."""

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the list of prompts."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else self.prompt  # type: ignore[list-item, return-value]


class PredictBody(Strict):
    """Body of `POST /predict`."""

    prompt: Annotated[str, Field(min_length=1)]


class TokenizeBody(Strict):
    """Body of `POST /tokenize`: a text, or messages for the chat template."""

    model: Name = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    """True: the answer has each token's text, too."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        of_chats = ["tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"]
        for wrong in of_chats if self.messages is None else ["add_special_tokens"]:
            if getattr(self, wrong) is not None:
                raise invalid(f"{wrong} has no effect here; leave it out", wrong)
        return self


class DetokenizeBody(Strict):
    """Body of `POST /detokenize`."""

    model: Name = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


Value = TypeVar("Value")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
