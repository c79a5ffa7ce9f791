"""The process around a command: standard streams, limits, and errors from the first import to the last flush.

Imports only the standard library: errors of other imports are handled here.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from sharesd.shadowing import LOWER, PROGRAMS, is_program

INTERRUPTED, BROKEN_PIPE = 130, 141
"""Exit statuses, as of processes that SIGINT or SIGPIPE ended."""
IMPORT_BYTES = 512 << 20
"""Address space that the import of torch takes in addition to its libraries."""
_STREAMS = ("stdin", "stdout", "stderr")
_NO_MEMORY = (
    *("allocate memory", "out of memory", "failed to map segment", "can't start new thread"),
    "error return without exception set",  # of CPython's parser, where an allocation fails
)
_REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.EFBIG: "use another disk, or raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def guarded(main: Callable[[], int]) -> int:
    """Run a program, its imports included, and return the exit status.

    What the process meets from outside is one line on stderr wherever it happens: an interrupt, too little memory,
    output that cannot be written. `sharesd.cli.console.main_guard` does the same for the errors of a command.
    """
    ended: SystemExit | None = None
    status = 0
    try:
        _prepare()
        status = main()
    except SystemExit as error:
        ended = error
    except KeyboardInterrupt:
        status = say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        status = BROKEN_PIPE
    except Exception as error:
        if is_interrupt(error):
            status = say("interrupted", INTERRUPTED)
        elif os.environ.get("LOGLEVEL", "").upper() != "DEBUG" and (line := _line_of(error)) is not None:
            status = say(f"error: {line}", 2)
        else:
            raise
    status = _flushed(status)
    if is_program() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to print
    if ended is not None and status == 0:
        raise ended
    return status


def say(line: str, status: int) -> int:
    """Print a line on stderr; returns the status."""
    print(line, file=sys.stderr)
    return status


def drop_output() -> None:
    """Discard what is still buffered for stdout."""
    with suppress(OSError, ValueError):
        _open_null(sys.stdout.fileno())


def _open_null(number: int) -> None:
    """Open /dev/null, for writing, as the descriptor with this number."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)


def of_surroundings(error: BaseException, advice: str = "") -> str | None:
    """Return a line for an error of memory, limits or files, with a remedy; None for others.

    `advice`: a further remedy if memory is exhausted.
    """
    text = " ".join(str(error).split())
    code = error.errno or 0 if isinstance(error, OSError) else 0
    if isinstance(error, MemoryError) or code == errno.ENOMEM or any(each in text for each in _NO_MEMORY):
        limit = _address_limit()
        raise_it = "" if limit is None else f"raise the limit on memory, {limit / 1e6:,.0f} MB (ulimit -v)"
        remedy = ", or ".join(filter(None, (advice, raise_it)))
        return f"out of memory ({text or type(error).__name__})" + (f"; {remedy}" if remedy else "")
    if not isinstance(error, OSError) or not error.strerror or (error.filename is None and code not in _REMEDIES):
        return None
    if code == errno.EBADF and error.filename in _STREAMS:
        way = "from" if error.filename == "stdin" else "to"
        return f"{error.filename} is closed; redirect it, for example {way} /dev/null"
    remedy = _REMEDIES.get(code, "")
    unnamed = "a file cannot be opened" if code == errno.EMFILE else "a file cannot be written"
    return f"{unnamed if error.filename is None else error.filename}: {error.strerror}{remedy and f'; {remedy}'}"


def _address_limit() -> int | None:
    """Return the limit on the address space (`ulimit -v`) in bytes, or None."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def is_interrupt(error: BaseException) -> bool:
    """Return True for an error into which other code turned Ctrl-C."""
    return "KeyboardInterrupt" in str(error) or isinstance(error.__cause__ or error.__context__, KeyboardInterrupt)


def _line_of(error: BaseException) -> str | None:
    """Return a line for an error of the surroundings or of a package; None for a bug."""
    is_of_package = isinstance(error, ImportError) or (isinstance(error, AttributeError) and _is_foreign(error.obj))
    if not is_of_package or any(each in str(error) for each in _NO_MEMORY):
        return of_surroundings(error)
    file = error.path if isinstance(error, ImportError) else getattr(getattr(error, "obj", None), "__file__", None)
    text = " ".join(str(error).split())
    where = f" ({file})" if file and file not in text else ""
    return f"a package cannot be used: {text}{where}; install it again, or rename the file that hides it"


def _is_foreign(owner: object) -> bool:
    """Return True for a module of other packages, such as a file that hides one of them."""
    return isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] not in (*PROGRAMS, *LOWER)


def _prepare() -> None:
    if is_program():
        _open_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, "it was deleted; change to another folder", "the working directory"
        ) from None
    if os.name == "posix" and _address_limit() is not None and "torch" not in sys.modules:
        sys.meta_path.insert(0, _BeforeTorch())


class _BeforeTorch:
    """Finder that finds nothing, and checks the limit on memory before torch is imported.

    The check comes first because libraries abort the process where memory is short, which cannot be caught.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torch":
            return
        sys.meta_path.remove(self)
        limit, needed = _address_limit(), IMPORT_BYTES + _library_bytes(PathFinder.find_spec("torch"))
        if limit is not None and limit < needed:
            have, need = f"{limit / 1e6:,.0f} MB", f"{needed / 1e6:,.0f} MB"
            line = f"the limit on memory is {have} (ulimit -v), and ShareSD with this torch needs at least {need}"
            raise SystemExit(say(f"error: {line}; raise the limit, for example with `ulimit -v unlimited`", 2))


def _library_bytes(torch: ModuleSpec | None) -> int:
    """Return the size of torch's libraries, with those of CUDA in packages next to it."""
    if torch is None or torch.origin is None:
        return 0
    folder = Path(torch.origin).parent
    files = [*folder.glob("lib/*.so*"), *folder.parent.glob("nvidia/*/lib/*.so*")]
    return sum(file.stat().st_size for file in files)


def _named(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of streams whose errors name the stream; stderr drops its own, which it could not report."""

    def named(stream: io.FileIO, *args: Any) -> Any:
        try:
            return call(stream, *args)
        except OSError as error:
            if stream.fileno() == 2:
                return len(args[0])
            raise OSError(error.errno, error.strerror, _STREAMS[stream.fileno()]) from None

    return named


class _Stream(io.FileIO):
    """Standard stream whose errors name it."""

    readinto, readall, write = _named(io.FileIO.readinto), _named(io.FileIO.readall), _named(io.FileIO.write)


def _open_streams() -> None:
    """Make errors of the standard streams name them, and open closed ones on /dev/null.

    Otherwise the next file that is opened would get the number of a closed one. stdin is opened for writing, so that
    reading it remains an error. A closed stdout is an error at once, since a command may print only after hours.
    """
    lacks_output = sys.stdout is None
    for number, name in enumerate(_STREAMS):
        old: Any = getattr(sys, name)
        settings: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
        if old is None:
            _open_null(number)
        else:
            settings = {key: getattr(old, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
        raw: Any = _Stream(number, "w" if number else "r", closefd=False)
        if not settings.get("write_through"):
            raw = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        stream = io.TextIOWrapper(raw, **settings)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if lacks_output:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "stdout")


def _flushed(status: int) -> int:
    """Flush stdout; returns another status if this fails where the command did not."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = status or BROKEN_PIPE
    except OSError as error:
        status = status or say(f"error: {of_surroundings(error)}", 2)
    else:
        return status
    drop_output()
    return status
