"""The tests, in groups with processes of their own: a crash ends its group at most, and the test that ran is named.

python scripts/run_tests.py [flags of pytest, for every group]
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TOGETHER = ["-n", "logical", "--maxprocesses", "4", "--dist", "worksteal"]
"""Flags of pytest-xdist for the many tests that compute little: several at once. `-n 0` ends it."""
GROUPS: dict[str, dict[str, str]] = {
    "compiled by Inductor": {"TEST_GROUP": "inductor"},
    "Triton's kernels, interpreted": {"TEST_GROUP": "interpreted", "TRITON_INTERPRET": "1"},
    "kernels, a guard page behind each region": {"TEST_GROUP": "kernels", "GUARD_PAGES": "behind"},
    "kernels, a guard page before each region": {"TEST_GROUP": "kernels", "GUARD_PAGES": "before"},
    "all others": {"TEST_GROUP": "others"},
}
"""What tells them apart is in tests/helpers/grouping.py."""
OLDER = {"x86-64-v2": "before", "x86-64-v3": "behind"}
"""Processors without AVX-512, for which the kernels are built again where this one can run them, and where guard pages
lie then."""
NO_TESTS = 5
"""What pytest returns where flags select none."""


def main(flags: list[str]) -> int:
    started, counts = time.monotonic(), Counter[str]()
    crashes: list[str] = []
    for name, settings in {**GROUPS, **for_older_processors()}.items():
        print(f"\n-- {name}", flush=True)
        status, summary, running = run(settings, [*(TOGETHER if settings["TEST_GROUP"] == "others" else []), *flags])
        counts.update({word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summary)})
        if status < 0:
            crashes.append(f"{name}: {signal.Signals(-status).name} in {running}")
            print(f"crashed: {crashes[-1]}", flush=True)
        elif status > 1 and status != NO_TESTS:
            return status  # interrupted, or flags that pytest does not know
    print("\n== all groups")
    for crash in crashes:
        print(f"CRASHED {crash}")
    counts["failed"] += len(crashes)
    order = ("failed", "passed", "skipped", "deselected", "xfailed", "warnings", "errors", "error")
    parts = [f"{counts[word]} {word}" for word in order if counts[word]]
    print(f"{', '.join(parts) or 'no tests ran'} in {time.monotonic() - started:.2f}s")
    return int(bool(counts["failed"] + counts["errors"] + counts["error"] or not counts["passed"]))


def for_older_processors() -> dict[str, dict[str, str]]:
    """The kernels' tests for each of OLDER which this processor surpasses."""
    loader = Path("/lib64/ld-linux-x86-64.so.2")  # knows which of these levels the processor has
    if not loader.exists():
        return {}
    known = subprocess.run([loader, "--help"], capture_output=True, text=True).stdout
    flags = os.environ.get("SHARESD_CXXFLAGS", "")
    return {
        f"kernels, built for {level}": {
            "TEST_GROUP": "kernels",
            "GUARD_PAGES": place,
            "SHARESD_CXXFLAGS": f"{flags} -march={level}".strip(),
        }
        for level, place in OLDER.items()
        if f"{level} (supported" in known
    }


def run(settings: dict[str, str], flags: list[str]) -> tuple[int, str, str]:
    """Status (negative: a signal), the summary line, and the test that was begun last."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "running"
        environment = {**os.environ, **settings, "RUNNING_TEST": str(note)}
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", *flags]
        last = ""
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line if " in " in line and re.search(r"\d+ [a-z]+", line) else last
        return process.returncode, last.partition(" in ")[0], note.read_text() if note.exists() else "no test"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
