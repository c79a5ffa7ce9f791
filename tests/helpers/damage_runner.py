"""`python -m tests.helpers.damage_runner NUMBER`: load NUMBER damaged files of each kind, print a table of outcomes.

Child processes load them (tests/helpers/damage_worker.py), many each. One that hangs or crashes is replaced.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
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
    """Return the outcomes of files `first` to before `last` of a kind."""
    records: list[Record] = []
    while first < last:
        with tempfile.TemporaryDirectory() as folder:
            found, end = _run_child(kind, first, last, folder)
        records += found
        first += len(found)
        if first < last:
            records.append({"number": first, "outcome": end, "seconds": CASE_SECONDS, "text": "", "max_bytes": 0})
            first += 1
    return [{"kind": kind, **record} for record in records]


def _run_child(kind: str, first: int, last: int, folder: str) -> tuple[list[Record], str]:
    """Return the outcomes until the child ended, and the kind of its end."""
    command = [sys.executable, "-m", "tests.helpers.damage_worker", kind, str(first), str(last), folder]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "WARNING"}
    with subprocess.Popen(command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True) as child:
        lines: queue.Queue[str] = queue.Queue()
        Thread(target=_read, args=(child, lines), daemon=True).start()
        records: list[Record] = []
        limit, began = START_SECONDS, False
        while True:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                child.kill()
                line, end = "", "hang"
            else:
                end = "" if line else f"exit status {child.wait()}"
            if not line:
                if not began:
                    raise RuntimeError(f"the child for files {kind} {first} to {last} does not start ({end})")
                return records, end
            limit, began, record = CASE_SECONDS, True, json.loads(line)
            if "outcome" in record:
                records.append(record)


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
    return [
        f"{record['kind']} {record['number']}: {record['outcome']} ({record['text'][:600]})"
        for record in records
        if record["outcome"] not in FINE
    ]


def table(records: Sequence[Record]) -> str:
    """Return a Markdown table: outcomes, slowest file and memory by kind."""
    rows = ["| files | damaged | loaded | refused | other | slowest, s | peak, MB |", "| --- " * 7 + "|"]
    for kind in KINDS:
        here = [record for record in records if record["kind"] == kind]
        counts = Counter(record["outcome"] for record in here)
        fine = [counts[name] for name in FINE]
        slowest = max(record["seconds"] for record in here)
        peak = max(record["max_bytes"] for record in here) / 1e6
        rows.append(
            f"| {kind} | {len(here)} | {fine[0]} | {fine[1]} | {len(here) - sum(fine)} | {slowest:.1f} | {peak:.0f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    started = time.monotonic()
    outcomes = load_all(int(sys.argv[1]))
    print(table(outcomes))
    print(f"{len(outcomes)} files in {time.monotonic() - started:.0f} s")
    print(*wrong(outcomes), sep="\n")
