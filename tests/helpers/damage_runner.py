"""`python -m tests.helpers.damage_runner NUMBER`: load NUMBER damaged files of each kind, print a table of outcomes.

Child processes load them (tests/helpers/damage_worker.py), many each. One that hangs or crashes is replaced.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

from tests.helpers.paths import ROOT

KINDS = ("gguf", "weights", "tokenizer", "config", "heads", "adapter", "prompts")
START_SECONDS, CASE_SECONDS = 300.0, 60.0
"""Limits of a child's start, and of a file."""
CHUNK = 1000
"""Files per child at most."""
FINE = ("loaded", "refused")

Record = dict[str, Any]


def load_damaged(kind: str, first: int, last: int) -> list[Record]:
    records: list[Record] = []
    while first < last:
        with tempfile.TemporaryDirectory() as folder:
            found, end = _run_child([kind, str(first), str(last)], folder)
        records += found
        first += len(found)
        if first < last:
            lost = {"kind": kind, "number": first, "outcome": end, "text": ""}
            records.append({**lost, "seconds": CASE_SECONDS, "max_bytes": 0})
            first += 1
    return records


def load_few(first: Mapping[str, int], number: int) -> list[Record]:
    """Return the outcomes of `number` files of each kind, from a first one (or 0) on, by one child.

    Its fork for a kind ends where one of them ends it; none is replaced.
    """
    places = {kind: first.get(kind, 0) for kind in KINDS}
    jobs = [str(part) for kind, at in places.items() for part in (kind, at, at + number)]
    with tempfile.TemporaryDirectory() as folder:
        records, end = _run_child(jobs, folder)
    assert end == "exit status 0", end
    return records


def _run_child(jobs: list[str], folder: str) -> tuple[list[Record], str]:
    """Return the outcomes until the child ended, and the kind of its end."""
    command = [sys.executable, "-m", "tests.helpers.damage_worker", *jobs, folder]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "WARNING"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, env=settings, **pipes) as child:
        lines: queue.Queue[str] = queue.Queue()
        Thread(target=_read, args=(child, lines), daemon=True).start()
        said: list[Record] = []
        limit = CASE_SECONDS if len(jobs) == 3 else START_SECONDS  # several kinds have a start each
        try:
            while line := lines.get(timeout=limit if said else START_SECONDS):
                said.append(json.loads(line))
            end = f"exit status {child.wait()}"
        except queue.Empty:
            os.killpg(child.pid, signal.SIGKILL)  # its forks, too
            end = "hang"
        if not said:
            raise RuntimeError(f"the child for files {' '.join(jobs)} does not start ({end})")
        return [record for record in said if "outcome" in record], end


def _read(child: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put("")


def load_all(number: int) -> list[Record]:
    """Return the outcomes of `number` files of each kind, two children at a time."""
    chunks = [(kind, at, min(at + CHUNK, number)) for at in range(0, number, CHUNK) for kind in KINDS]
    with ThreadPoolExecutor(2) as pool:
        return [record for records in pool.map(lambda chunk: load_damaged(*chunk), chunks) for record in records]


def wrong(records: Sequence[Record]) -> list[str]:
    """Return a line for each file with another outcome than FINE."""
    others = [record for record in records if record["outcome"] not in FINE]
    return [f"{each['kind']} {each['number']}: {each['outcome']} ({each['text'][:600]})" for each in others]


def table(records: Sequence[Record]) -> str:
    """Return a Markdown table: outcomes, slowest file and memory by kind."""
    rows = ["| files | damaged | loaded | refused | other | slowest, s | peak, MB |", "| --- " * 7 + "|"]
    for kind in KINDS:
        here = [record for record in records if record["kind"] == kind]
        counts = Counter(record["outcome"] for record in here)
        loaded, refused = (counts[name] for name in FINE)
        slowest, peak = (max(record[name] for record in here) for name in ("seconds", "max_bytes"))
        numbers = f"{len(here)} | {loaded} | {refused} | {len(here) - loaded - refused} | {slowest:.1f}"
        rows.append(f"| {kind} | {numbers} | {peak / 1e6:.0f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    started = time.monotonic()
    outcomes = load_all(int(sys.argv[1]))
    print(table(outcomes))
    print(f"{len(outcomes)} files in {time.monotonic() - started:.0f} s")
    print(*wrong(outcomes), sep="\n")
