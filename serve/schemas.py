"""Schemas of request bodies.

Some parameters are accepted without effect. An unknown parameter is an error that names it. Types are strict: a string
is not accepted as a number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import Request
from pydantic import Field, ValidationError, model_validator

from serve.errors import invalid, of_schema
from serve.messages import Messages
from serve.strict import Strict
from serve.tools import Function, NamedTool, ToolChoice, Tools
from sharesd.sampling_params import SamplingParams

MAX_CHOICES = 128
"""Maximum of `n`; the queue's limit may be lower."""
MAX_TOP_LOGPROBS = 20
"""Maximum alternatives per token."""


Body = TypeVar("Body", bound=Strict)
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Number = Annotated[int, Field(ge=1, lt=2**31)]
Key = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
"""Token id as a JSON key."""

# Lists end at the first wrong item: an error for each would take seconds to collect.
Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]


async def read(request: Request, kind: type[Body]) -> Body:
    """Return the validated body of a request; ApiError if invalid."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise of_schema(error) from None


class StreamOptions(Strict):
    """Options of a stream's last chunk."""

    include_usage: bool | None = None
    """True: the last chunk has the usage and no choices."""
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
            raise invalid("response_format: give json_schema with the type json_schema, only", "response_format")
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


class Generation(Strict):
    """Parameters shared by chats and completions."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Literal[1] | None = None
    max_tokens: Number | None = None
    max_completion_tokens: Number | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[Key, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Stop | Stops | None = None
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

    # Accepted where they ask for nothing.
    min_tokens: Literal[0] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None

    # Accepted, and without effect on the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is given without stream; set that, or leave it out", "stream_options")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}"
            raise invalid(f"{message}; give one of the two", "max_tokens")
        asking = self.shaped_by
        if len(asking) > 1:
            raise invalid(f"{' and '.join(asking)} say both what the answer must be; leave one out", asking[-1])
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
        """Maximum tokens per answer; None if not given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def bias(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return {int(token): amount for token, amount in (self.logit_bias or {}).items()}

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return bool(self.token_details or (self.stream_options and self.stream_options.include_usage))

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
            max_new_tokens=token_limit,
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
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _has_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs is given without logprobs; set that, or leave it out", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _has_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise invalid(f"tools has two functions {twice}; give each a name of its own", "tools")
        if self.tool_choice not in (None, "none", "auto") and not self.must_call:
            wanted = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.function.name
            raise invalid(f"tool_choice is {wanted}, for which tools has no function; add it", "tool_choice")
        return self

    @property
    def shaped_by(self) -> list[str]:
        return super().shaped_by + (["tools"] if self.functions else [])

    @property
    def functions(self) -> list[Function]:
        """Functions in the prompt."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def must_call(self) -> list[Function]:
        """Functions of which one must be called; empty: calls are optional."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [function for function in self.functions if function.name == name]
        return self.functions if self.tool_choice == "required" else []

    @property
    def max_calls(self) -> int | None:
        """Maximum calls in one answer; None: no limit."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool) else None

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Generation):
    """Body of `POST /v1/completions`."""

    prompt: str | Texts | Ids | ManyIds
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: Literal[""] | None = None

    add_special_tokens: bool | None = None
    """False: a text is encoded without the beginning-of-text token."""

    @model_validator(mode="after")
    def _has_something_to_do(self) -> Self:
        if self.token_limit == 0 and not self.scores_prompt:
            raise invalid("max_tokens is 0, which is for scoring a prompt; give echo and logprobs, too", "max_tokens")
        return self

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

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give prompt or messages, one of the two", "prompt")
        of_chats = ["tools", "add_generation_prompt", "chat_template_kwargs"]
        for wrong in of_chats if self.messages is None else ["add_special_tokens"]:
            if getattr(self, wrong) is not None:
                raise invalid(f"{wrong} has no effect here; leave it out", wrong)
        return self


class DetokenizeBody(Strict):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


Value = TypeVar("Value")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
