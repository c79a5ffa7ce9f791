"""Lines of OpenAI's batch format: requests, and the lines of their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from sharesd.data.prompt_files import TALK_FIELDS, TEXT_FIELDS

WORK = "serve.batch:answer"
"""Function that answers requests with the server's handlers; by name, since `serve` may not be imported from here."""
PACKAGES = ("fastapi", "prometheus_client", "llguidance")
"""Packages of the server's handlers."""
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
FIELDS = ("custom_id", "url", "body")


class BatchLine(NamedTuple):
    """One line of a batch file."""

    custom_id: Any
    """A text, unless the line has an error."""
    url: str
    body: Any
    error: dict[str, Any] | None = None
    """Error of a line that cannot be sent: status code, and the fields of the API's errors."""


class _LineError(ValueError):
    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


def is_batch(found: Sequence[tuple[str, Any]]) -> bool:
    """Return True if a file's records, or the errors of reading them, are in OpenAI's batch format."""
    return any(_is_request(record) for _, record in found)


def batch_lines(found: Sequence[tuple[str, Any]]) -> list[tuple[str, BatchLine]]:
    """Return the lines of a batch file, and their places.

    A line that cannot be sent has an error, and others are not affected. ValueError if packages are missing.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{found[0][0]} is in OpenAI's batch format, whose requests need the packages {', '.join(missing)}; "
            "run: pip install 'sharesd[serve]'"
        )
    lines, places = [], dict[str, str]()
    for where, record in found:
        fields = record if isinstance(record, Mapping) else {}
        line = BatchLine(fields.get("custom_id"), str(fields.get("url")), fields.get("body"))
        try:
            _check(where, record, places)
        except _LineError as error:
            shown = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": None}
            line = line._replace(error={"status_code": error.status, **shown})
        lines.append((where, line))
    return lines


def answer_line(line: BatchLine, index: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of an answer."""
    response = {"status_code": 200, "request_id": request_id(index), "body": body}
    return {"id": f"batch_req_{index}", "custom_id": line.custom_id, "response": response, "error": None}


def failure_line(line: BatchLine, index: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of a request that failed, with an error as `BatchLine` has it."""
    return {"id": f"batch_req_{index}", "custom_id": line.custom_id, "response": None, "error": error}


def request_id(index: int) -> str:
    """Return the request id of a line, by its number in the file."""
    return f"batch-{index}"


def _is_request(record: Any) -> bool:
    if not isinstance(record, Mapping) or any(name in record for name in (*TEXT_FIELDS, *TALK_FIELDS)):
        return False
    return sum(name in record for name in FIELDS) > 1


def _check(where: str, record: Any, places: dict[str, str]) -> None:
    """Raise a _LineError for an invalid request; `places` has the lines of earlier custom ids."""
    if isinstance(record, ValueError):
        raise _LineError(f"the line is {record}")
    if not isinstance(record, Mapping):
        raise _LineError(f"the line is {_shown(record)}; give an object with custom_id, method, url and body")
    missing = next((name for name in FIELDS if record.get(name) is None), None)
    if missing is not None:
        raise _LineError(f"{missing} is missing; give custom_id, method, url and body", missing)
    custom_id, method, url, body = (record.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise _LineError(f"custom_id is {_shown(custom_id)}; give a text", "custom_id")
    before = places.setdefault(custom_id, where)
    if before != where:
        raise _LineError(
            f"custom_id is {_shown(custom_id)}, already used by {before}; give each line a different one", "custom_id"
        )
    if method not in ("POST", None):
        raise _LineError(f"method is {_shown(method)}; give POST", "method")
    if url not in URLS:
        raise _LineError(f"url is {_shown(url)}; give one of {', '.join(URLS)}", "url", status=404)
    if not isinstance(body, Mapping):
        raise _LineError(f"body is {_shown(body)}; give an object", "body")
    if body.get("stream") is True:
        raise _LineError("stream is true, but batch requests cannot be streamed; leave it out", "stream")


def _shown(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else shown[:58] + " …"
