"""Chat on the terminal: `sharesd chat`; KV of earlier turns stays cached."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace

from rich.text import Text

from compile.start_times import START
from sharesd.cli.console import err_console, warn
from sharesd.cli.display import AnswerWriter, legend, one_line, shows_colors, start_table, stats_table
from sharesd.cli.startup import answer, warm_up
from sharesd.cli.user_text import read_line, require_utf8
from sharesd.config import Mode
from sharesd.data.request_errors import RequestError
from sharesd.drafters import registry
from sharesd.engine.outputs import Completion
from sharesd.engine.stats import Stats
from sharesd.field_types import DefaultLimit
from sharesd.llm import LLM
from sharesd.sampling_params import SamplingParams, cut_by_context

HELP = {
    "/mode NAME": "switch to a loaded mode: {loaded}; /mode without a name shows the current one",
    "/system [TEXT]": "set the system prompt, or remove it",
    "/reset": "forget the conversation",
    "/stats": "statistics of the last answer and of each mode",
    "/help": "this list",
    "/exit": "leave; so does Ctrl-D",
}
TIPS = "A line that ends with \\ continues on the next line. Ctrl-C stops an answer."


class Chat:
    """One conversation, whose mode may change between answers."""

    def __init__(self, llm: LLM, mode: Mode, params: SamplingParams, *, system: str | None, verbose: bool) -> None:
        if not llm.tokenizer.has_chat_template:
            raise ValueError(
                "this checkpoint has no chat template; use `generate --raw`, or an instruction-tuned checkpoint"
            )
        cut = cut_by_context([(1, params)], llm.max_context)
        if cut is not None:
            warn(f"answers may be cut: {cut}")
        # Later turns have less room; an answer that is cut is reported then.
        params = replace(params, max_new_tokens=DefaultLimit(params.max_new_tokens))
        self._llm, self._params, self._system, self._verbose = llm, params, system, verbose
        self._messages: list[dict[str, str]] = []
        self._warm_modes: set[Mode] = set()
        self._totals: dict[Mode, Stats] = {}
        self._last: Stats | None = None
        self._switch(mode)
        START.end()

    def run(self) -> int:
        """Read and answer messages until the user exits; return the exit status.

        The status is 2 if a line of a pipe was not UTF-8, else 0.
        """
        note(f"mode {self._mode}; /help lists the commands, Ctrl-D leaves")
        if self._verbose:
            err_console.print(start_table(START))
            if shows_colors():
                err_console.print(legend())
        leaving, status = False, 0
        while True:
            try:
                line = read_message()
            except EOFError:
                if sys.stdin.isatty():
                    note("")
                return status
            except KeyboardInterrupt:
                if leaving:
                    return 0
                leaving = True
                note("\nCtrl-C again leaves, and so does Ctrl-D")
                continue
            except ValueError as error:
                status = 0 if sys.stdin.isatty() else 2
                note(str(error))
                continue
            leaving = False
            try:
                if not self._handle(line):
                    return status
            except KeyboardInterrupt:
                note("\nstopped")
            except (ValueError, RequestError) as error:
                note(str(error))

    def _handle(self, line: str) -> bool:
        """Run a command or answer a message; return False to exit."""
        command, _, text = line.strip().partition(" ")
        if not line.startswith("/"):
            if command:
                self._answer(line)
            return True
        match command, text.strip():
            case "/exit", "":
                return False
            case "/help", "":
                self._help()
            case "/reset", "":
                self._messages.clear()
                note("the conversation is forgotten")
            case "/stats", "":
                self._stats()
            case "/mode", name:
                self._set_mode(name)
            case "/system", name:
                self._system = name or None
                note(
                    "the system prompt is "
                    + ("set" if name else "removed")
                    + "; /reset forgets the conversation so far"
                )
            case _:
                note(f"unknown command {line.strip()!r}; /help lists all, and a space before / sends it as a message")
        return True

    def _answer(self, message: str) -> None:
        """Answer a message, unless stopped before text; ValueError beyond the context."""
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked = [*self._messages, {"role": "user", "content": message}]
        ids = self._llm.tokenizer.chat([*head, *asked])
        if len(ids) >= self._llm.max_context:
            raise ValueError(
                f"the conversation has {len(ids)} tokens and the context holds {self._llm.max_context}; "
                "/reset forgets it, or start with a larger --max-context"
            )
        writer = AnswerWriter(self._llm.tokenizer, titles=[message], by_source=self._verbose)
        try:
            (done,) = answer(self._llm, [ids], self._params, writer.write, mode=self._mode)
        finally:
            writer.end()
        self._last = stats = self._llm.runtime.engine.stats
        self._totals.setdefault(self._mode, Stats()).merge(stats)
        if done.text or done.finish_reason:
            self._messages = [*asked, {"role": "assistant", "content": done.text}]
        self._tell_end(done, len(ids) + len(done.token_ids))
        if self._verbose:
            note(one_line(stats))

    def _tell_end(self, done: Completion, num_tokens: int) -> None:
        limit = self._llm.max_context
        if done.finish_reason is None:
            note("stopped")
        elif done.finish_reason == "length" and num_tokens >= limit:
            note(f"cut: the context holds {limit} tokens; /reset forgets the conversation")
        elif done.finish_reason == "length":
            note(f"cut at {self._params.max_new_tokens} tokens; --max-new-tokens allows more")

    def _set_mode(self, name: str) -> None:
        loaded = self._llm.modes
        if not name:
            note(f"mode {self._mode}; loaded: {', '.join(loaded)}")
        elif name not in registry.modes():
            note(f"unknown mode {name!r}; loaded: {', '.join(loaded)}")
        elif name not in loaded:
            note(f"mode {name} is not loaded; start with --mode {name}")
        else:
            self._switch(name)
            note(f"mode {name}")

    def _switch(self, mode: Mode) -> None:
        if mode not in self._warm_modes:
            warm_up(self._llm, mode, self._params)
            self._warm_modes.add(mode)
        self._mode = mode

    def _stats(self) -> None:
        if self._last is None:
            note("no answer yet")
        else:
            columns = {"last answer": self._last} | {f"all {mode}": total for mode, total in self._totals.items()}
            err_console.print(stats_table(columns, self._llm.runtime.report(self._mode)))

    def _help(self) -> None:
        width = max(map(len, HELP))
        for command, meaning in HELP.items():
            note(f"{command:{width}}  {meaning.format(loaded=', '.join(self._llm.modes))}")
        note(TIPS)


def note(text: str) -> None:
    err_console.print(Text(text, style="dim"), soft_wrap=True)


def read_message() -> str:
    """Read a message, whose lines continue after backslashes; EOFError at the end."""
    lines = [_read_line("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(_read_line(". "))
        except EOFError:
            break
    return "\n".join(lines)


def _read_line(prompt: str) -> str:
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows has its own line editing
            import readline  # noqa: F401 (input() uses it)
        return require_utf8(input(prompt), "the line")
    line = read_line(sys.stdin, "the line")
    if not line:
        raise EOFError
    return line.removesuffix("\n")
