"""Options of the server, from the command line, and its certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import NamedTuple


class KeyPair(NamedTuple):
    """Paths of PEM files, under uvicorn's names."""

    ssl_certfile: str
    ssl_keyfile: str


def key_pair(certfile: str | None, keyfile: str | None) -> KeyPair | None:
    """Return the two files, None if neither is given.

    Raises ValueError if only one is given, and for files that cannot be read or do not match.
    """
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        given, other = ("certfile", "keyfile") if keyfile is None else ("keyfile", "certfile")
        raise ValueError(f"--ssl-{given} is {certfile or keyfile} but --ssl-{other} is missing; give both or neither")
    for option, path in (("certfile", certfile), ("keyfile", keyfile)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ValueError(f"--ssl-{option} {path} cannot be read ({error.strerror}); give a PEM file") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:  # ValueError: the key is encrypted, and a password is missing
        reason = getattr(error, "reason", None) or error
        raise ValueError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} are not a certificate and its key ({reason}); "
            "give matching PEM files, the key without a password"
        ) from error
    return KeyPair(certfile, keyfile)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and names of a server; raises ValueError for invalid values."""

    model_name: str
    """Name of the model in requests and metrics."""
    aliases: tuple[str, ...] = ()
    """Further names of the model in requests."""
    root: str
    """Source of the model, as given on the command line."""
    mode: str
    max_batch: int = 8
    """Maximum choices decoded as one batch."""
    max_queue: int = 64
    """Maximum choices in the queue."""
    max_body: int = 4 * 2**20
    """Maximum bytes of a request's body."""
    api_keys: tuple[str, ...] = ()
    """Accepted API keys; empty: no key is required."""
    cors_origins: tuple[str, ...] = ()
    key_pair: KeyPair | None = None
    """Files for TLS; None: plain HTTP."""
    shutdown_timeout: float = 30.0
    """Time limit in seconds for running requests after SIGTERM."""
    body_timeout: float = 30.0
    """Time limit in seconds for receiving a request's body."""
    keep_alive: float = 5.0
    """Seconds without output before a stream sends a comment."""
    tool_format: str | None = None
    """Format of tool calls; None: derived from the chat template."""
    reasoning_format: str = "auto"
    """`auto`: reasoning apart from the content; `none`: all is content."""
    json_log: bool = False
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name, low in {"max_batch": 1, "max_queue": 0, "max_body": 1, "shutdown_timeout": 0}.items():
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not all(self.api_keys):
            raise ValueError("an API key is empty; give a long random text")
        if any(key != key.strip() for key in self.api_keys):  # it would never match: keys of requests are stripped
            raise ValueError("an API key begins or ends with spaces; remove them")

        if any(not name.strip() or name != name.strip() for name in self.aliases):
            raise ValueError("a model alias is empty, or begins or ends with spaces; give a name")

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model in requests."""
        return tuple(dict.fromkeys((self.model_name, *self.aliases)))

    @property
    def num_places(self) -> int:
        """Maximum choices in the batch and the queue."""
        return self.max_batch + self.max_queue
