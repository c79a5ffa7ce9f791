"""Child process of a runtime; PeerError if it ends or is late."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmark.peers.peer import PEERS, Peer, PeerSettings

LIMIT_S = 900.0  # longest wait for an answer, loading and converting a model included


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Times and tokens of an answer to a prompt."""

    token_ids: list[int]
    num_prompt: int  # tokens of the prompt
    num_first: int  # tokens of the first delivery
    first_s: float  # seconds until then: prefill, and a first round of runtimes that draft before they deliver
    decode_s: float  # seconds from then to the last token


class PeerError(Exception):
    """Failure of a measurement; `dead` is true if the process has ended."""

    def __init__(self, reason: str, *, dead: bool = False) -> None:
        super().__init__(reason)
        self.dead = dead


class Worker:
    """Handle of a runtime's process."""

    def __init__(self, name: str, settings: PeerSettings, *, limit_s: float = LIMIT_S) -> None:
        """Start the process; PeerError with `dead` if the runtime does not load."""
        context = get_context("spawn")
        self._limit_s, self._output = limit_s, tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed in close)
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, name, settings, self._output.name)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except PeerError as error:
            self.close()
            raise PeerError(str(error), dead=True) from error

    def prepare(self, variant: str, prompt: list[int]) -> None:
        """Load and warm up a variant; PeerError if that fails."""
        self._ask(False, variant, prompt)

    def measure(self, variant: str, prompt: list[int]) -> Sample:
        """Return the timed answer to a prompt; PeerError if it fails."""
        return self._ask(True, variant, prompt)

    def close(self) -> None:
        self._process.kill()  # it holds nothing that needs care, and may be busy
        self._process.join()
        self._pipe.close()
        self._output.close()

    def _ask(self, *request: Any) -> Any:
        try:
            self._pipe.send(request)
        except OSError:
            raise PeerError(self._last_words(), dead=True) from None
        return self._receive()

    def _receive(self) -> Any:
        try:
            if not self._pipe.poll(self._limit_s):
                self._process.kill()
                raise PeerError(f"no answer within {self._limit_s:g} s", dead=True)
            found = self._pipe.recv()
        except (EOFError, OSError):
            raise PeerError(self._last_words(), dead=True) from None
        if isinstance(found, str):
            raise PeerError(found)
        return found

    def _last_words(self) -> str:
        self._process.join()
        status = self._process.exitcode or 0
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        with open(self._output.name, errors="replace") as output:
            last = next((line.strip() for line in reversed(output.readlines()) if line.strip()), "")
        return f"its process ended {how}{f': {last}' if last else ''}"[:300]


def serve(pipe: Connection, name: str, settings: PeerSettings, output: str) -> None:
    """Answer requests with a sample, None after warm-up, or an error's text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(settings.num_threads)
    file = os.open(output, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    warm: set[str] = set()
    try:
        peer = PEERS[name](settings)
        pipe.send(None)
    except Exception as error:  # whatever a foreign runtime raises becomes its row of the table
        pipe.send(describe(error))
        return

    while True:
        try:
            is_measured, variant, prompt = pipe.recv()
        except EOFError:
            return
        try:
            if variant not in warm:
                peer.prepare(variant)
                timed(peer, variant, prompt)
                warm.add(variant)
            pipe.send(timed(peer, variant, prompt) if is_measured else None)
        except Exception as error:
            pipe.send(describe(error))


def timed(peer: Peer, variant: str, prompt: list[int]) -> Sample:
    """Return the timed answer; ValueError for wrong length or a single delivery."""
    wanted, token_ids, times = peer.settings.num_tokens, list[int](), list[tuple[float, int]]()
    started = time.perf_counter()

    def deliver(ids: Sequence[int]) -> None:
        if ids:
            token_ids.extend(ids)
            times.append((time.perf_counter(), len(token_ids)))

    peer.answer(variant, prompt, deliver)
    if len(token_ids) != wanted:
        raise ValueError(f"it returned {len(token_ids)} tokens instead of {wanted}")
    if len(times) == 1:
        raise ValueError(f"all {wanted} tokens came at once, so decoding cannot be timed; raise --max-new-tokens")
    (first, num_first), (last, _) = times[0], times[-1]
    about = {"num_prompt": len(prompt), "num_first": num_first, "first_s": first - started}
    return Sample(token_ids=token_ids, **about, decode_s=last - first)  # type: ignore[arg-type]


def describe(error: Exception) -> str:
    """Return an error as one line of at most 300 characters."""
    text = " ".join(str(error).split())
    name = "" if isinstance(error, ValueError) and text else f"{type(error).__name__}: "
    return f"{name}{text}"[:300]
