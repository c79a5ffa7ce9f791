"""Options of the server, from the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and names. Wrong values raise ValueError."""

    model_name: str
    """Name of the model in requests."""
    root: str
    """Source of the model, as it was given."""
    mode: str
    max_batch: int = 8
    """Choices that are decoded together."""
    max_queue: int = 64
    """Choices that may wait."""
    max_body: int = 4 * 2**20
    """Bytes of a request's body."""
    api_keys: tuple[str, ...] = ()
    """Accepted API keys; empty: no key is required."""
    cors_origins: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    """Seconds for running requests after SIGTERM."""
    body_timeout: float = 30.0
    """Seconds for a request's body to come."""
    keep_alive: float = 5.0
    """Seconds of silence in a stream before a comment."""
    tool_format: str | None = None
    """Format of tool calls; None: derived from the chat template."""
    json_log: bool = False
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name, low in {"max_batch": 1, "max_queue": 0, "max_body": 1, "shutdown_timeout": 0}.items():
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not all(self.api_keys):
            raise ValueError("an API key is empty; give a text that is hard to guess")
        if any(key != key.strip() for key in self.api_keys):  # what clients send is stripped: it would never match
            raise ValueError("an API key has spaces at its ends; leave them out")

    @property
    def num_places(self) -> int:
        """Choices that may run or wait."""
        return self.max_batch + self.max_queue
