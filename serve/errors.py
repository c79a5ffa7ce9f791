"""Errors in OpenAI's format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from itertools import islice
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from sharesd.data.request_errors import NonFiniteLogits, RequestError

MAX_SHOWN = 40
"""Maximum characters of an invalid value in a message."""
MAX_ERRORS = 1000
"""Maximum validation errors of a body to examine; each takes microseconds."""

REMEDIES = {
    "prompt": "give a text, a list of texts, a list of token ids, or a list of such lists, none of them empty",
    "stop": "give a text or a list of up to 64 texts, none of them empty or longer than 1,000 characters",
    "content": "give a text, or a list of parts of type text",
    "tools": 'give up to 128 of {"type": "function", "function": {"name", "description", "parameters", "strict"}}',
    "tool_choice": 'give none, auto, required, or {"type": "function", "function": {"name"}}',
    "response_format": "give the type text, json_object, or json_schema with json_schema.schema",
    "structured_outputs": "give one of json (a schema), regex, choice (a list of texts) and grammar (Lark)",
    "logit_bias": "give up to 1,024 token ids with numbers from -100 to 100",
}
"""Parameter -> remedy in messages, if the type is not enough."""
NAME = 'give 1 to 64 of the letters A-Z and a-z, digits, "_", "-" and "."'
"""Remedy for names of functions."""


ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models")
"""Paths that are listed in the error for an unknown one."""
ANTHROPIC = {
    **dict.fromkeys((400, 405, 408, 415), "invalid_request_error"),
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status -> type of error in Anthropic's API."""


class ApiError(Exception):
    """Error response: status, message and parameter."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Response body, `{"error": ...}`."""
        return {"error": {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """Response body in Anthropic's format."""
        return {"type": "error", "error": {"type": ANTHROPIC.get(self.status, "api_error"), "message": self.message}}

    def response(self, path: str = "") -> JSONResponse:
        """Return the error in the format of the path's API."""
        body = self.anthropic_body if path.startswith("/v1/messages") else self.body
        return JSONResponse(body, self.status, headers=self.headers)


class ContextOverflow(ApiError):
    """Error of prompt and answer that do not fit the context.

    Clients search for this wording.
    """

    def __init__(self, prompt: int, answer: int | None, limit: int, param: str) -> None:
        """Store the numbers of tokens of prompt, answer (None: no limit was given) and context."""
        self.prompt, self.answer, self.limit = prompt, answer, limit
        message = (
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + (answer or 1)} "
            f"tokens ({prompt} in the {param}, {answer or 'at least 1'} in the completion). Please reduce the length "
            f"of the {param} or completion (context_length_exceeded)."
        )
        super().__init__(400, message, param=param, code="context_length_exceeded")

    @property
    def anthropic_body(self) -> dict[str, Any]:
        if self.prompt >= self.limit or self.answer is None:
            message = f"prompt is too long: {self.prompt} tokens > {self.limit - 1} maximum"
        else:
            message = (
                f"input length and `max_tokens` exceed context limit: {self.prompt} + {self.answer} > {self.limit}, "
                "decrease input length or `max_tokens` and try again"
            )
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def _kind(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 429:
            return "rate_limit_error"
        case 503:
            return "service_unavailable_error"
        case _:
            return "server_error" if status >= 500 else "invalid_request_error"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for an invalid value of a parameter."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """Return the error of a server that is not ready."""
    return ApiError(503, message, headers={"retry-after": "1"})


def engine_failed() -> ApiError:
    """Return the error of running requests after a failure of the engine.

    The log has the reason.
    """
    return ApiError(500, "the engine failed and the server stops; the request itself was valid")


def of_request(error: RequestError) -> ApiError:
    """Return the error of a request that the engine ended; other requests continue."""
    return ApiError(500 if isinstance(error, NonFiniteLogits) else 400, str(error), code=error.code)


def of_status(status: int, path: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """Return a routing error: an unknown path or a wrong method."""
    remedy = f"; this server has {', '.join(ENDPOINTS)}" if status == 404 else ""
    return ApiError(status, f"{HTTPStatus(status).phrase}: {path[:MAX_SHOWN]}{remedy}", headers=headers)


def unknown_nulls(error: ValidationError) -> set[str]:
    """Return unknown keys of value null, if there are no other errors."""
    if error.error_count() > MAX_ERRORS:
        return set()
    found = error.errors(include_url=False, include_context=False)
    if any(one["type"] != "extra_forbidden" or one["input"] is not None or len(one["loc"]) > 1 for one in found):
        return set()
    return {str(one["loc"][0]) for one in found}


def of_schema(error: ValidationError) -> ApiError:
    """Return the error for the first, or for too many, invalid values."""
    if error.error_count() > MAX_ERRORS:
        return invalid(f"the body has {error.error_count()} wrong values or unknown keys; leave them out")
    first = error.errors(include_url=False, include_context=False)[0]
    place = first["loc"]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not place:
        return invalid(_reason(first["msg"]))
    own = first["type"] == "extra_forbidden"  # the last part is the client's name for it, which may look like a type
    names = [str(part) for part in place[:-1] if not KIND.fullmatch(str(part))]
    names += [str(part) for part in place[-1:] if own or not KIND.fullmatch(str(part))]
    param = ".".join(name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]} …" for name in names)
    name = next((str(part) for part in reversed(place) if part in REMEDIES), "")
    if own and not name:
        return invalid(f"{param} is not a parameter here; leave it out", param)
    if first["type"] == "missing":
        return invalid(f"{param} is missing", param)
    shown = _beginning(first["input"])
    shown = shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 2] + " …"
    if first["type"] == "string_pattern_mismatch" and place[-1] == "name":
        return invalid(f"{param} is {shown}; {NAME}", param.partition(".")[0])
    other = _other_part(first["input"]) if name == "content" else None
    if other is not None:
        return invalid(f"{param} has a part of type {other}, but this model accepts only text; {REMEDIES[name]}", param)
    if name:
        return invalid(f"{param} is {shown}; {REMEDIES[name]}", param.partition(".")[0])
    return invalid(f"{param} is {shown}; {_reason(first['msg'])}", param)


KIND = re.compile(r"str|int|float|bool|constrained-\w+|(list|dict|literal)\[.*\]|\[key\]|[A-Z]\w+")
"""Names of union members and keys in pydantic's error locations."""


def _beginning(value: Any) -> str:
    """Return a value as JSON, cut to what a message shows."""
    parts = json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value)
    return "".join(islice(parts, MAX_SHOWN + 1))


def _other_part(content: Any) -> str | None:
    """Return the type of the first part that is not text."""
    parts = content if isinstance(content, list) else ()
    types = [part.get("type") for part in parts if isinstance(part, Mapping)]
    return next((kind[:MAX_SHOWN] for kind in types if isinstance(kind, str) and kind != "text"), None)


def _reason(message: str) -> str:
    message = message.removeprefix("Value error, ").replace("Input should be", "it should be")
    message = re.sub(r"^\w+ should have (.*) after validation, .*", r"it should have \1", message)
    return message[0].lower() + message[1:]
