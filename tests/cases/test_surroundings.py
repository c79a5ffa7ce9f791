"""The commands in surroundings of all kinds: closed streams, limits, missing folders, locales, full disks.

Each ends with an answer, or with one line and a status; never with a traceback.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sharesd.cli.process import of_surroundings
from sharesd.shadowing import ROOT
from tests.helpers.surroundings_worker import CANNOT

pytestmark = [pytest.mark.subprocess, pytest.mark.skipif(sys.platform != "linux", reason="of Linux")]

Outcome = tuple[int, str, str]
NO_KERNELS = "CPU kernels do not run here"
NEW = "env.update(CXX='/nonexistent/g++')\n"
"""A new cache folder has no kernels, whose building takes a minute."""
UNKEPT = rf"{NO_KERNELS}|cannot be written"

FORKED: dict[str, tuple[str, int, str]] = {
    "plain": ("", 0, ""),
    "no environment": ("env.clear()\n" + NEW, 0, NO_KERNELS),
    "no HOME": ("[env.pop(name, 0) for name in ('HOME', 'SHARESD_CACHE_DIR', 'XDG_CACHE_HOME')]\n" + NEW, 0, UNKEPT),
    "HOME missing": ("env.pop('SHARESD_CACHE_DIR', 0); env['HOME'] = '/nonexistent/x'\n" + NEW, 0, UNKEPT),
    "HOME is /proc": ("env.pop('SHARESD_CACHE_DIR', 0); env['HOME'] = '/proc'\n" + NEW, 0, UNKEPT),
    "cache is a file": ("Path('a').touch(); env['SHARESD_CACHE_DIR'] = os.path.abspath('a')\n" + NEW, 0, UNKEPT),
    "cache below a file": ("Path('a').touch(); env['SHARESD_CACHE_DIR'] = os.path.abspath('a/b')\n" + NEW, 0, UNKEPT),
    "cache with spaces": ("env['SHARESD_CACHE_DIR'] = os.path.abspath('ca che\\'\"x')\n" + NEW, 0, NO_KERNELS),
    "cache relative": ("env['SHARESD_CACHE_DIR'] = 'relative'\n" + NEW, 0, NO_KERNELS),
    "cache empty": ("env['SHARESD_CACHE_DIR'] = ''; env['HOME'] = os.getcwd()\n" + NEW, 0, NO_KERNELS),
    "cache with bytes": ("env['SHARESD_CACHE_DIR'] = os.path.abspath('\\udcff')\n" + NEW, 0, NO_KERNELS),
    "cache in ~": ("env.update(SHARESD_CACHE_DIR='~/kept', HOME='/dev/null')\n" + NEW, 0, "/dev/null/kept/|" + UNKEPT),
    "compiler in ~": ("env.update(CXX='~/no', SHARESD_CACHE_DIR='new', HOME='/nowhere')", 0, "/nowhere/no"),
    "compiler fails": ("env.update(CXX='/bin/false', SHARESD_CACHE_DIR='new')", 0, NO_KERNELS),
    "no compiler": ("env.pop('CXX', 0); env.update(PATH='/nothing', SHARESD_CACHE_DIR='new')", 0, "no C.. compiler"),
    "flags of no compiler": ("env.update(SHARESD_CXXFLAGS='-nosuchflag', SHARESD_CACHE_DIR='new')", 0, NO_KERNELS),
    "read-only cache": ("mount('ro', '-o', 'ro'); env['SHARESD_CACHE_DIR'] = os.path.abspath('ro')\n" + NEW, 0, UNKEPT),
    "cache of 8 kB": (
        "mount('s', '-o', 'size=8k'); env['SHARESD_CACHE_DIR'] = os.path.abspath('s')\n" + NEW,
        0,
        UNKEPT,
    ),
    "noexec cache": (
        "mount('s', '-o', 'noexec'); env['SHARESD_CACHE_DIR'] = os.path.abspath('s')\n" + NEW,
        0,
        NO_KERNELS,
    ),
    "no /dev/shm": ("mount('/dev/shm', '-o', 'ro,size=4k')", 0, ""),
    "read-only /tmp": ("mount('/tmp/', '-o', 'ro') if not os.getcwd().startswith('/tmp/') else None", 0, ""),
    "no TMPDIR": ("env['TMPDIR'] = '/nonexistent'", 0, ""),
    "one core": ("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", 0, ""),
    "500 threads": ("more += ['--threads', '500']", 0, r"500 threads.*cores: \d+ threads are used"),
    "0 threads": ("more += ['--threads', '0']", 2, "error: .*threads.* 0"),
    "40 files": ("limit('NOFILE', 40)", 0, ""),
    "16 files": ("limit('NOFILE', 16)", 0, ""),
    **{f"{n} files": (f"limit('NOFILE', {n})", 2, "error: .*Too many open files; raise the limit") for n in (5, 6, 8)},
    "small stack": ("limit('STACK', 256 << 10)", 0, ""),
    "small files": ("limit('FSIZE', 1024); env['SHARESD_CACHE_DIR'] = 'new'\n" + NEW, 0, UNKEPT),
    "little memory": ("limit('AS', 64 << 20)", 2, r"error: out of memory .*raise the limit on memory, 67 MB"),
    "trace on a full disk": ("more += ['--trace', '/dev/full']", 2, "error: .*No space left"),
    "trace in ~": ("env['HOME'] = '/nowhere'; more += ['--trace=~/trace']", 2, "error: .*/nowhere/trace"),
    "output full": ("os.dup2(os.open('/dev/full', 1), 1)", 2, "error: stdout: No space left"),
    "JSON full": ("os.dup2(os.open('/dev/full', 1), 1); more += ['--json']", 2, "error: stdout: No space left"),
    "messages full": ("os.dup2(os.open('/dev/full', 1), 2); more += ['--threads', '500']", 0, ""),
    "output read by nobody": ("a, b = os.pipe(); os.close(a); os.dup2(b, 1); more += ['--json']", 141, ""),
    "umask": ("os.umask(0o777); env['SHARESD_CACHE_DIR'] = 'new'\n" + NEW, 0, UNKEPT),
    "narrow terminal": ("env.update(COLUMNS='1', LINES='1', TERM='dumb', NO_COLOR='1'); more += ['-v']", 0, "(?s).*"),
    "strange log level": ("env['LOGLEVEL'] = 'loud'", 2, "error: LOGLEVEL is 'loud'"),
    "prompt of bytes": ("more += ['\\udcff\\udcfe']", 2, "error: the prompt is not UTF-8"),
}
"""Code that makes the surroundings, exit status, and what stderr says: nothing, or one line of this kind.

Written for a warm process, see `surroundings_worker`.
"""
STARTED: dict[str, tuple[str, int, str]] = {
    "stdout closed": ("{} >&-", 2, "error: stdout is closed; redirect it"),
    "stdin closed": ("{} <&-", 0, ""),
    "stdin closed, prompt -": ("{} - <&-", 2, "error: stdin is closed; redirect it"),
    "stderr closed": ("{} 2>&-", 0, ""),
    "all closed": ("{} <&- >&- 2>&-", 2, ""),
    "100 MB": ("ulimit -v 100000; {}", 2, r"error: the limit on memory is 102 MB \(ulimit -v\).*raise"),
    "650 MB": ("ulimit -v 650000; {}", 2, r"error: the limit on memory is 666 MB \(ulimit -v\).*raise"),
    "folder deleted": ("mkdir gone; cd gone; rmdir ../gone; {}", 2, "error: the working directory: it was deleted"),
    "64 threads of OpenMP": ("OMP_NUM_THREADS=64 {}", 0, r"|OMP_NUM_THREADS asks for 64 threads"),
    "OMP_NUM_THREADS=abc": ("OMP_NUM_THREADS=abc {}", 0, "|OMP_NUM_THREADS|libgomp"),
    "output in ASCII": ("PYTHONIOENCODING=ascii {}", 0, ""),
    "C locale": ("LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 {}", 0, ""),
    "hidden package": ("echo >tokenizers.py; PYTHONPATH=.:$PYTHONPATH {}", 2, "error: .*tokenizers.py"),
    "hidden module of Python": ("echo >typing.py; PYTHONPATH=.:$PYTHONPATH {}", 2, "error: .*typing.py"),
    "warnings are errors": ("PYTHONWARNINGS=error {}", 0, ""),
}
"""Shell lines, for what is settled before Python runs."""
OTHERS = {
    "chat": "chat --target {}",
    "serve": "serve --port 0 --target {}",
    "train": "train table --out t.npy --target {}",
    "bench": "bench sweep --out-dir o --target {}",
    "tune": "tune --out-dir o --target {}",
    "verify": "verify --out-dir o --target {}",
    "cache": "cache info",
    "help": "--help",
}
CRASHING = {
    "stdout closed": ("{} >&-", 2, "error: stdout is closed"),
    "all closed": ("{} <&- >&- 2>&-", 2, ""),
    "100 MB": ("ulimit -v 100000; {}", 2, "error: the limit on memory is 102 MB|error: "),
    "folder deleted": ("mkdir gone; cd gone; rmdir ../gone; {}", 2, "error: the working directory: it was deleted"),
    "stdin closed": ("{} <&-", 2, "error: "),
}
WITHOUT_TORCH = ("cache", "help")
LONG = {f"{command}: stdin closed" for command in ("train", "bench", "tune", "verify")}
"""Cases that begin to load a model, as others of the same surroundings do."""


def cases_of_others() -> dict[str, tuple[str, int, str]]:
    """Commands that need a model are cut short by one that is missing, where the surroundings would let them run."""
    found = {}
    for command, line in OTHERS.items():
        for name, (script, status, said) in CRASHING.items():
            if command in WITHOUT_TORCH and name in ("100 MB", "stdin closed"):
                continue
            target = "./missing" if name == "stdin closed" else "$MODEL"
            call = f"{sys.executable} -m sharesd_command {line.format(target)}"
            found[f"{command}: {name}"] = script.replace("{}", call), status, said
    return found


HANG_S = 1800
"""Longer than these take on a busy machine."""


@pytest.fixture(scope="module")
def outcomes(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Outcome]:
    """All outcomes that are wanted, of two processes at a time."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {item.callspec.params["name"] for item in tests}
    environment = {**os.environ, "PYTHONPATH": ROOT, "MODEL": str(tiny), "HF_HUB_OFFLINE": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    command = ["generate", "--raw", "--target", str(tiny), "--max-new-tokens", "4", "--mode", "naive", "the cat"]
    call = f"{sys.executable} -m sharesd_command " + " ".join(f"'{part}'" for part in command)

    def start(script: str) -> Outcome:
        done = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            cwd=tmp_path_factory.mktemp("started"),
            env=environment,
            timeout=HANG_S,
        )
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    started = {name: script.replace("{}", call) for name, (script, _, _) in STARTED.items()}
    started |= {name: script for name, (script, _, _) in cases_of_others().items()}
    started = {name: script for name, script in started.items() if name in wanted}
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(started, pool.map(start, started.values()), strict=True))
    forked = subprocess.run(
        [sys.executable, "-m", "tests.helpers.surroundings_worker", *command],
        input=json.dumps({name: code for name, (code, _, _) in FORKED.items() if name in wanted}),
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("forked"),
        env=environment,
        timeout=HANG_S,
    )
    assert forked.returncode == 0, forked.stderr
    found |= {name: tuple(each) for name, each in json.loads(forked.stdout).items()}
    return found.__getitem__


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in LONG else name
        for name in (*FORKED, *STARTED, *cases_of_others())
    ],
)
def test_surroundings(name: str, outcomes: Callable[[str], Outcome]) -> None:
    _, status, said = (FORKED | STARTED | cases_of_others())[name]
    found, out, err = outcomes(name)
    if found == CANNOT:
        pytest.skip("file systems cannot be mounted here")
    lines = [line for line in err.splitlines() if line]
    assert "Traceback" not in err and found == status, (found, err[-2000:])
    assert (not lines and re.fullmatch(said, "") is not None) or re.search(said, err), err
    assert len(lines) <= (3 if UNKEPT in said else 1) or said == "(?s).*", err
    is_shown = name in FORKED | STARTED and status == 0 and "full" not in name
    assert not is_shown or out.strip(), "no answer"


def test_a_parser_of_python_without_memory_is_reported_as_such() -> None:
    said = of_surroundings(SystemError("error return without exception set"))
    assert said is not None and said.startswith("out of memory")
