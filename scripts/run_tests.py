"""The tests by tiers, in groups that need settings of their own; a last line that sums all groups up.

python scripts/run_tests.py [--all | --long] [flags of pytest, for every group]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

Group = tuple[str, dict[str, str], str]
"""A name, environment variables, and the markers of its tests as pytest's -m takes them."""
LATER = "inductor or interpreted or cuda or stand_in"
QUICK: Group = "quick", {}, f"not ({LATER} or slow or subprocess or real_model or browser)"
GROUPS: list[Group] = [
    QUICK,
    (
        "slow, processes, browser",
        {"PYTEST_ADDOPTS": "-n 3"},  # some processes wait for others, so three workers keep two cores busy
        f"(slow or subprocess or real_model or browser) and not ({LATER})",
    ),
    ("compiled by Inductor", {}, "inductor and not cuda"),
    ("Triton's kernels, interpreted", {"TRITON_INTERPRET": "1"}, "interpreted and not inductor"),
]
KERNELS = f"kernels and not ({LATER})"
OLDER = {"x86-64-v3": "before", "x86-64-v2": "behind"}
"""Processors without AVX-512, for which the kernels are built again where this one can run them, and where guard pages
lie then (in the quick group: behind each region); the second one in --long alone."""
GUARDED: Group = "kernels, a guard page before each region", {"GUARD_PAGES": "before"}, KERNELS
CUDA: Group = "on a GPU", {"TEST_GPU": "1"}, "cuda"
STAND_IN: Group = "the CUDA path, under a stand-in driver", {}, "stand_in"
CUDA_ENV = Path("scripts/cuda_env.sh")
NO_TESTS = 5
"""What pytest returns where flags select none."""


def main(argv: list[str]) -> int:
    """Run each group; 0 where some tests passed and none failed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("-m", default="", dest="markers")
    args, flags = parser.parse_known_args(argv)
    started, counts, groups = time.monotonic(), Counter[str](), [QUICK]
    if args.all or args.long:
        groups = [
            *GROUPS,
            *([*older_processors(), GUARDED] if args.long else [*older_processors(), GUARDED][:1]),
            *([CUDA] if shutil.which("nvidia-smi") else []),
        ]
        if has_cuda_build(make=args.long):
            groups.append(STAND_IN)
        else:
            counts["skipped"] += 1
    for name, settings, markers in groups:
        print(f"\n-- {name}", flush=True)
        # The slow ones among the kernels' tests run once, with the kernels of this processor.
        left_out = [] if args.long else ["not long", *(["not slow"] if markers == KERNELS else [])]
        wanted = [markers, *left_out, *([args.markers] if args.markers else [])]
        flags_of_group = [*flags, "-m", " and ".join(f"({each})" for each in wanted)]
        status, summary = run(settings, [*(["-n", "0"] if name == CUDA[0] else []), *flags_of_group])
        counts.update({word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summary)})
        if status < 0:
            counts["failed"] += 1
            print(f"crashed by signal {-status}: {name}", flush=True)
        elif status > 1 and status != NO_TESTS:
            return status  # interrupted, or flags that pytest does not know
    order = ("failed", "passed", "skipped", "deselected", "xfailed", "warnings", "errors", "error")
    parts = [f"{counts[word]} {word}" for word in order if counts[word]]
    print("\n== all groups")
    print(f"{', '.join(parts) or 'no tests ran'} in {time.monotonic() - started:.2f}s")
    return int(bool(counts["failed"] + counts["errors"] + counts["error"] or not counts["passed"]))


def has_cuda_build(*, make: bool) -> bool:
    """True where .venv-cuda is there and up to date, or has been made; else a line says that its tests are skipped."""
    if not CUDA_ENV.exists() or subprocess.run(["bash", CUDA_ENV, *([] if make else ["--check"])]).returncode:
        print(f"skipped: {STAND_IN[0]}; bash {CUDA_ENV} makes .venv-cuda for it (5.3 GB, 2 to 10 minutes)", flush=True)
        return False
    return True


def older_processors() -> list[Group]:
    """The kernels' tests for each of OLDER which this processor surpasses."""
    loader = Path("/lib64/ld-linux-x86-64.so.2")  # knows which of these levels the processor has
    if not loader.exists():
        return []
    known = subprocess.run([loader, "--help"], capture_output=True, text=True).stdout
    flags = os.environ.get("SHARESD_CXXFLAGS", "")
    return [
        (
            f"kernels, built for {level}",
            {"GUARD_PAGES": place, "SHARESD_CXXFLAGS": f"{flags} -march={level}".strip()},
            KERNELS,
        )
        for level, place in OLDER.items()
        if f"{level} (supported" in known
    ]


def run(settings: dict[str, str], flags: list[str]) -> tuple[int, str]:
    """Status (negative: a signal), and the summary line."""
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", *flags]
    last = ""
    environment = {**os.environ, **settings}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if " in " in line and re.search(r"\d+ [a-z]+", line) else last
    return process.returncode, last.partition(" in ")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
