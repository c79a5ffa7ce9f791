"""Console output of the commands: results, messages, errors and progress bars."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from sharesd.cli.process import BROKEN_PIPE, INTERRUPTED, drop_output, is_interrupt, of_surroundings, say
from sharesd.config import PlanOnly
from sharesd.data.request_errors import RequestError
from sharesd.models.checkpoint import Progress

PACKAGES = ("sharesd", "sharesd_files", "compile", "quant", "offload", "multigpu", "benchmark", "train", "serve")
"""Loggers whose level is LOGLEVEL; others log errors only."""
MIN_BYTES = 10**6
"""Totals of progress bars from this on are shown as bytes."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

MAX_MESSAGE = 1200
"""Maximum characters of an error; the middle of a longer one is cut."""

console = Console()
err_console = Console(stderr=True)

log = logging.getLogger(__name__)


def print_line(text: str, on: Console = console) -> None:
    """Print a text as it is, in one line."""
    on.print(text, markup=False, highlight=False, soft_wrap=True)


def main_guard(main: Callable[[], int | None]) -> int:
    """Run a command; errors become one line on stderr and exit status."""
    try:
        set_up_logging(os.environ.get("LOGLEVEL", "WARNING"))
        return main() or 0
    except PlanOnly as plan:
        console.print(plan_table(plan.lines))
        return 0
    except KeyboardInterrupt:
        return say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        drop_output()
        return BROKEN_PIPE
    except RequestError as error:
        return say(f"error: {error}", 1)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        return _ended_by(error)
    except Exception as error:
        if not type(error).__module__.startswith("triton"):  # Triton raises its own exception types
            raise
        why = str(error).strip().partition("\n")[0]
        return _ended_by(RuntimeError(f"a kernel does not compile or fit ({why}); use --kernels torch"))


def _ended_by(error: BaseException) -> int:
    if is_interrupt(error):
        return say("interrupted", INTERRUPTED)
    log.debug("traceback", exc_info=True)
    return say(f"error: {describe(error)}", 2)


def describe(error: BaseException) -> str:
    """Format an error as one line, with a remedy for missing memory."""
    message = " ".join(str(error).split())
    if len(message) > MAX_MESSAGE:  # names in damaged files can be arbitrarily long
        message = f"{message[: MAX_MESSAGE - 300]} ... {message[-250:]}"
    if message.startswith("CUDA out of memory"):  # only its first sentences help: sizes, and other processes
        needed = message.partition(" Of the allocated memory")[0].partition(" If reserved but")[0]
        return f"{needed} Lower --max-batch or --max-context, use --mode naive, or stop other programs on that GPU"
    known = of_surroundings(error, "use a smaller model, bfloat16 or a smaller --max-context")
    if known is not None:
        return known
    if isinstance(error, ValueError):
        return message
    return f"{message or type(error).__name__} (LOGLEVEL=DEBUG shows the traceback)"


def set_up_logging(level: str) -> None:
    """Send log messages and warnings to stderr; ValueError for an unknown level."""
    if level.upper() not in LEVELS:
        raise ValueError(f"LOGLEVEL is {level!r}; choose one of {', '.join(LEVELS)}")
    handler = _Lines(level.upper())
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level.upper())


def warn(text: str) -> None:
    """Log one line on an option without effect, or with unexpected effect."""
    log.warning(text)


class _Lines(logging.Handler):
    """Log handler of unwrapped lines above progress bars on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        name = "" if record.levelno == logging.WARNING else f"{record.name}: "
        text = f"{record.levelname.lower()}: {name}{self.format(record)}"
        print_line(text, err_console)


class _LogFile(logging.FileHandler):
    """Log file that stops with one warning if the disk is full."""

    is_full = False

    def handleError(self, record: logging.LogRecord) -> None:
        error, before, self.is_full = sys.exc_info()[1], self.is_full, True
        if not before:
            text = (
                f"warning: {self.baseFilename} cannot be written ({getattr(error, 'strerror', error)}); the log stops"
            )
            print_line(text, err_console)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Copy this project's log messages from INFO on to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
        handler.close()


class _Done(MofNCompleteColumn):
    """Steps done and in all, or bytes if there are millions."""

    def render(self, task: Task) -> Text:
        if task.total is None or task.total < MIN_BYTES:
            return super().render(task)
        return Text(f"{decimal(int(task.completed))} of {decimal(int(task.total))}")


@contextmanager
def loading_bars(enabled: bool = True) -> Iterator[Progress]:
    """Show progress bars on stderr if it is a terminal; they are erased at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), _Done(), TimeElapsedColumn(), TimeRemainingColumn())
    show = enabled and err_console.is_terminal
    with Bars(*columns, console=err_console, transient=True, disable=not show) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks or (done < total and bars.tasks[tasks[what]].finished):  # a second model, perhaps
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress


def plan_table(lines: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(title="plan", title_justify="left", box=None, show_header=False)
    for what, choice, why in lines:
        table.add_row(what, f"[bold]{choice}[/]", why)
    return table
