"""Runs the command in forks of one warm process, each in surroundings of its own.

Reads a JSON object from stdin: name -> code that makes the surroundings; more arguments for the command may be put into
`more`. Writes name -> [status, stdout, stderr]. The parent imports everything and computes nothing, so that no thread
is lost in the forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import sharesd.cli.startup
import sharesd.runtime  # noqa: F401
import sharesd_command

CANNOT = 77
"""Status of surroundings that cannot be made here."""
AT_ONCE = 2


def mount(folder: str, *options: str) -> None:
    """Mount a temporary file system for this process alone."""
    os.makedirs(folder, exist_ok=True)
    if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
        os._exit(CANNOT)
    for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", *options, "none", folder]):
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            os._exit(CANNOT)


def limit(name: str, value: int) -> None:
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def child(code: str, arguments: list[str], out: int, err: int) -> None:
    status = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(tempfile.mkdtemp(dir=os.getcwd()))
        given: dict[str, Any] = {"os": os, "env": os.environ, "mount": mount, "limit": limit, "more": [], "Path": Path}
        exec(code, given)
        sys.argv = ["sharesd", *arguments, *given["more"]]
        status = sharesd_command.main(sys.argv[1:])
        with contextlib.suppress(ValueError):
            sys.stdout.flush()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(status)


def main(arguments: list[str]) -> None:
    waiting, running, ended = list(json.load(sys.stdin).items()), dict[int, Any](), {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name, code = waiting.pop(0)
            files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
            process = os.fork()
            if process == 0:
                child(code, arguments, *(file.fileno() for file in files))
            running[process] = name, files
        process, status = os.wait()
        name, files = running.pop(process)
        for file in files:
            file.seek(0)
        texts = [file.read().decode(errors="replace") for file in files]
        ended[name] = [os.waitstatus_to_exitcode(status), *texts]
    json.dump(ended, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
