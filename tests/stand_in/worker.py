"""Calls of functions under the stand-in driver, in a process of .venv-cuda, which no test needs to be itself.

    run([partial(function, 1, 2), ...], FAKE_DEVICES="2")

gives an Outcome for each. Functions go there by name, so they lie in modules that both environments can import.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.paths import ROOT

PYTHON = ROOT / ".venv-cuda" / "bin" / "python"
_BEGINS = "== call "
_SHOWN = 30
"""Lines of what went wrong."""
PATIENCE = 600.0
"""Seconds after which a process hangs that has returned from no call."""


@dataclass(frozen=True, slots=True)
class Outcome:
    value: Any
    error: str
    """Its traceback, where it raised something; "" where it did not."""
    log: str
    """Lines that were printed meanwhile, by processes that it started, too."""

    @property
    def violations(self) -> dict[str, int]:
        return dict(Counter(re.findall(r"^VIOLATION (.*)", self.log, re.M)))

    @property
    def trouble(self) -> str:
        """Account of a failure in a few lines; "" for none."""
        broken = [f"{number} x {rule}" for rule, number in self.violations.items()]
        first = self.log[self.log.index("VIOLATION") :].splitlines()[:_SHOWN] if broken else []
        return "\n".join([*self.error.splitlines()[-_SHOWN:], *broken, *first])


def run(calls: Sequence[Callable[[], Any]], **settings: str) -> list[Outcome]:
    """Call one after the other in one process, with these environment variables.

    Rules that are broken give the error that a driver gives, unless FAKE_STRICT says otherwise. Where the process ends
    before its time, the call that it was at has the error, and so have those behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, given, log = (Path(folder) / name for name in ("calls", "outcomes", "log"))
        asked.write_bytes(pickle.dumps(list(calls)))
        given.touch()
        environment = {**os.environ, "FAKE_STRICT": "1", "PYTHONUNBUFFERED": "1", **settings}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        command = [str(ROOT / "tests/stand_in/run.sh"), "-m", "tests.stand_in.worker", str(asked), str(given)]
        with (
            log.open("wb") as printed,
            subprocess.Popen(command, env=environment, stdout=printed, stderr=printed) as process,
        ):
            how = _wait(process, given)
        before, *logs = re.split(rf"^{_BEGINS}.*\n", log.read_text("utf-8", "replace"), flags=re.M)
        found: list[Outcome] = []
        with given.open("rb") as file:
            for text in logs:
                try:
                    found.append(Outcome(*pickle.load(file), log=text))
                except EOFError:
                    found.append(Outcome(None, f"the process {how} in this call:\n{text[-4000:]}", text))
        last = (logs or [before])[-1]
        missing = Outcome(None, f"the process {how} before this call:\n{last[-4000:]}", last)
        return [*found, *[missing] * (len(calls) - len(found))]


def _wait(process: subprocess.Popen, given: Path) -> str:
    """Wait until it has ended, or hangs; returns how it ended."""
    while True:
        size = given.stat().st_size
        try:
            return f"ended with status {process.wait(PATIENCE)}"
        except subprocess.TimeoutExpired:
            if given.stat().st_size == size:
                process.kill()
                return f"was ended, since it took more than {PATIENCE:.0f} s"


def _serve(asked: str, given: str) -> None:
    """Call what a file holds; outcomes go into another, each at once."""
    for number, call in enumerate(pickle.loads(Path(asked).read_bytes())):
        print(f"{_BEGINS}{number}", file=sys.stderr, flush=True)
        value, error = None, ""
        try:
            value = call()
        except Exception:
            error = traceback.format_exc()
        with Path(given).open("ab") as file:
            pickle.dump((value, error), file)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
