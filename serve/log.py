"""Request log on stderr: a line per request, text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO


class RequestLog:
    """Writer of log lines to a stream."""

    def __init__(self, *, as_json: bool, stream: TextIO | None = None) -> None:
        self._as_json, self._stream = as_json, stream or sys.stderr

    def write(self, facts: Mapping[str, Any]) -> None:
        """Write a line with all fields that are not None."""
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        line |= {name: round(v, 4) if isinstance(v, float) else v for name, v in facts.items() if v is not None}
        if self._as_json:
            text = json.dumps(line)
        else:
            text = " ".join(f"{name}={_plain(value)}" for name, value in line.items())
        print(text, file=self._stream, flush=True)


def _plain(value: Any) -> str:
    """Return a value quoted if it has spaces or line breaks."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    simple = text.isascii() and text.isprintable() and not {*' "='} & {*text}
    return text if simple or not isinstance(value, str) else json.dumps(text)
