"""Traces of rounds, and the file that they are written to as JSON Lines (`--trace FILE`).

A trace has the draft, the accepted and the emitted tokens of a round, and its times. The file is written about once a
second by a separate thread; until then, rounds are kept in memory.

Legend: B rows, N draft tokens.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from math import isnan
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from torch import Tensor

from multigpu.journal import lock, read_records, with_fields
from sharesd.devices.transfer import PinnedBuffers
from sharesd.engine.request import Request
from sharesd.speculation.draft_tree import DraftTree, model_shape, parents_tensor

Drafts = list[tuple[list[int], list[int] | None, list[float | None] | None]]
"""Tokens, parents and probabilities of each row's draft."""
NO_TOKENS: tuple[list[int], None, None] = [], None, None
REASONS = (
    *("no_drafter", "not_requested", "costs_not_measured", "budget_is_empty", "plain_until_next_check"),
    *("plain_step_is_timed", "plain_is_faster", "tables_pause", "no_match"),
)
"""Reasons why nothing was drafted."""


class Proposed(NamedTuple):
    """Tensors of a draft that the host reads with the round's result."""

    tokens_BN: Tensor
    parents_BN: Tensor | None
    """Parents of the nodes, -1 the root; None: a chain."""
    probs_BN: Tensor | None
    """Draft probabilities of the tokens, if the acceptance rule needs them."""

    @classmethod
    def of(cls, tree: DraftTree) -> Proposed:
        """Return a draft's parts, on its device."""
        index_BN1 = tree.tokens.clamp(min=0)[..., None]
        probs_BN = None if tree.probs is None else tree.probs.gather(-1, index_BN1)[..., 0]
        return cls(tree.tokens, None if tree.tree_mask is None else parents_tensor(tree), probs_BN)

    def copy_to_host(self, buffers: PinnedBuffers, times: int) -> Proposed:
        """Start copies to host memory, as for the round's result."""
        tokens_BN = buffers.copy("draft", self.tokens_BN, times)
        parents_BN = None if self.parents_BN is None else buffers.copy("parents", self.parents_BN, times)
        return Proposed(
            tokens_BN, parents_BN, None if self.probs_BN is None else buffers.copy("probs", self.probs_BN, times)
        )

    def to_lists(self) -> Drafts:
        """Return tokens, parents and probabilities of each row."""
        tokens = self.tokens_BN.tolist()
        parents, probs = (None if part is None else part.tolist() for part in (self.parents_BN, self.probs_BN))
        sizes = [row.index(-1) if -1 in row else len(row) for row in tokens]
        return [
            (tokens[line][:num], parents and parents[line][:num], probs and probs[line][:num])
            for line, num in enumerate(sizes)
        ]


class RowTrace(NamedTuple):
    """A round of one request."""

    request: int
    """Number of the request."""
    position: int
    """Tokens of prompt and answer before the round, root included."""
    tokens: list[int]
    """Draft tokens."""
    parents: list[int] | None
    """Parent of each draft token, -1 the root; None: the token before."""
    probs: list[float | None] | None
    """Probability of each draft token after its parent; None: unknown."""
    accepted: list[int]
    """Indices of accepted draft tokens, in order."""
    emitted: list[int]
    """New tokens: accepted ones, then one of the target.

    Tokens after the end of the text are left out.
    """


class RoundTrace(NamedTuple):
    """A round of all requests that were decoded together."""

    mode: str
    drafter: str | None
    """Drafter of the tokens; None: none drafted."""
    filler: str | None
    """Tables that added the last `filled` draft tokens."""
    filled: int
    depth: int
    """Most draft tokens on a path."""
    nodes: int
    """Draft tokens of each row, at most."""
    window: int
    """Last tokens that draft steps attend to; 0: all."""
    reasons: list[str]
    """Reasons why nothing was drafted."""
    draft_s: float
    verify_s: float
    overhead_s: float
    rows: list[RowTrace]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types; docs/reference/figures.md has the fields."""
        times = {name: round(getattr(self, name), 7) for name in ("draft_s", "verify_s", "overhead_s")}
        rows = [{**row._asdict(), "probs": row.probs and [*map(_rounded, row.probs)]} for row in self.rows]
        return {**self._asdict(), **times, "rows": rows}


def _rounded(prob: float | None) -> float | None:
    return None if prob is None or isnan(prob) else round(prob, 5)


def round_trace(
    mode: str,
    tree: DraftTree,
    reasons: Mapping[str, str],
    times: tuple[float, float, float],
    rows: list[RowTrace],
) -> RoundTrace:
    """Return the trace of a round; `times`: drafting, verifying, overhead."""
    nodes = tree.tokens.shape[1]
    why = [] if nodes else list(dict.fromkeys(reasons.values())) or ["no_match"]
    depth, window = (tree.depth, tree.window) if nodes else (0, 0)
    drafter = (tree.drafter or None) if nodes else None
    return RoundTrace(mode, drafter, tree.filler or None, tree.num_filled, depth, nodes, window, why, *times, rows)


def node_probs(
    tree: DraftTree, line: int, num: int, parents: Sequence[int] | None, draft_probs: Sequence[float]
) -> list[float | None] | None:
    """Return probabilities of a row's `num` draft tokens after their parents.

    `draft_probs`: those of a model, in host memory; tables have theirs in the draft. None: a drafter gave none.
    """
    num_model, path_probs = min(num, model_shape(tree).nodes), tree.path_probs[line] if tree.path_probs else ()
    found: list[float | None] = [*draft_probs[:num_model]]
    found += [None] * (num_model - len(found))
    for node in range(num_model, num):
        parent = node - 1 if parents is None else parents[node]
        above = path_probs[parent] if parent >= 0 and path_probs else 1.0
        found.append(min(1.0, path_probs[node] / above) if path_probs and above > 0 else None)
    return found if any(each is not None for each in found) else None


log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the format, which changes with names and meanings."""
FLAG = "--trace"
PERIOD_S = 1.0
"""Seconds between two writes."""


class TraceFile:
    """Writer of one file, to which each start appends."""

    def __init__(self, path: Path, *, modes: Sequence[str], **start: Any) -> None:
        """Open the file and write a line of the start.

        Raises ValueError if the file cannot be written, is not a trace, or is in use by another process.
        """
        self.path, self._waiting, self._numbers = path, deque[RoundTrace | dict[str, Any]](), count()
        self._mutex, self._is_closing, self._failed = Lock(), Event(), False
        try:
            self._file = path.open("ab", buffering=0)
            lock(self._file, path, fcntl.LOCK_EX, FLAG)
            check_trace(path)
            begun = datetime.now().astimezone().isoformat(timespec="seconds")
            self._write([{"event": "start", "format": FORMAT, "time": begun, "modes": list(modes), **start}])
        except OSError as error:
            remedy = "free some space there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise ValueError(f"trace {path} cannot be written ({error.strerror}); {remedy}name another file") from error
        self._thread = Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, found: RoundTrace) -> None:
        """Queue a round to be written."""
        self._waiting.append(found)

    def add_request(self, request: Request, mode: str, emitted: Sequence[int]) -> None:
        """Queue a request's line, after its prefill."""
        self._waiting.append(
            {
                "event": "request",
                "request": request.number,
                "mode": mode,
                "label": {"index": request.index, **request.label},
                "prompt_tokens": len(request.prompt_ids),
                "cached_tokens": request.cached_tokens,
                "prefill_s": round(request.stats.prefill_s, 7),
                "emitted": list(emitted),
            }
        )

    def flush(self) -> None:
        """Write queued lines; an error is logged and ends the trace."""
        with self._mutex:
            lines = []
            while self._waiting:
                lines.append(_line(self._waiting.popleft(), self._numbers))
                time.sleep(0)  # rounds need the interpreter's lock, too
            if not lines or self._failed:
                return
            try:
                self._write(lines)
            except OSError as error:
                self._failed = True
                log.warning("the trace %s ends here (%s); decoding continues", self.path, error.strerror)

    def close(self) -> None:
        """Write what is queued and close the file. May be called twice."""
        atexit.unregister(self.close)
        if not self._is_closing.is_set():
            self._is_closing.set()
            self._thread.join()
            self._file.close()

    def _run(self) -> None:
        while not self._is_closing.wait(PERIOD_S):
            self.flush()
        self.flush()

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        while data:
            data = data[self._file.write(data) :]


def _line(found: RoundTrace | dict[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    return {"event": "round", "round": next(numbers), **found.to_dict()} if isinstance(found, RoundTrace) else found


def check_trace(path: Path) -> None:
    """Raise ValueError for other files; remove an incomplete last line."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        first = file.readline()
        try:
            found = json.loads(first)
            version = found["format"] if found["event"] == "start" else None
        except (ValueError, LookupError, TypeError, RecursionError):
            version = None
        if version != FORMAT:
            why = "is not a trace" if version is None else f"has format {version!r}, and this version writes {FORMAT}"
            raise ValueError(f"trace {path} {why}; name another file")
        file.seek(0)
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all lines; raise ValueError for a wrong one."""
    for _, record in read_records(path, FLAG, with_fields("event")):
        yield record


class TracedRequest(NamedTuple):
    """A request of a trace and its rounds."""

    mode: str
    label: dict[str, Any]
    emitted: list[int]
    """All tokens of the answer."""
    rounds: list[dict[str, Any]]
    """Fields of each round, and of its row for this request."""


def requests_of(path: Path) -> Iterator[TracedRequest]:
    """Yield the requests of a file in order of their prefill."""
    found: dict[tuple[int, int], TracedRequest] = {}
    starts = 0
    for line in read_trace(path):
        starts += line["event"] == "start"
        if line["event"] == "request":
            request = TracedRequest(line["mode"], line["label"], list(line["emitted"]), [])
            found[starts, line["request"]] = request
        for row in line.get("rows", ()):
            if (request := found.get((starts, row["request"]))) is not None:  # type: ignore[assignment]
                request.emitted.extend(row["emitted"])
                request.rounds.append({**line, **row})
    yield from found.values()
