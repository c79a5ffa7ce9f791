"""The commands, on a tiny random model: what they print, how they stop, what they say about mistakes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import tomllib
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import sharesd
from sharesd import Engine, EngineConfig, SamplingParams
from sharesd.cli import chat, display, startup
from sharesd.cli.main import main
from sharesd.engine.outputs import Completion, Source, TokenChunk
from sharesd.llm import LLM
from sharesd.runtime import Runtime
from tests.helpers.in_mode import in_mode
from tests.helpers.paths import ROOT
from tests.helpers.shared_runtimes import link_kernels
from tests.helpers.tiny_models import make_checkpoint

PROMPTS = ("why is the sky blue", "the cat sat on the mat")
FAST = ("--compile", "off", "--max-new-tokens", "40")
NAIVE, SHARE = ("--mode", "naive"), ("--mode", "share")
LONG = (*NAIVE, "--compile", "off", "--max-context", "8000", "--max-new-tokens", "7000")


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized weights go to a cache of the test's own, and logging stays as pytest set it up."""
    for module in ("sharesd_files", "sharesd.runtime", "sharesd.weights.quantize"):
        monkeypatch.setattr(f"{module}.cache_root", lambda: tmp_path)
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)


@pytest.fixture
def run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    def run(command: str, *args: str, status: int = 0) -> tuple[str, str]:
        assert main([command, "--target", str(tiny), *FAST, *args]) == status
        return capsys.readouterr()

    return run


@pytest.mark.parametrize("mode", ["naive", "share", "classic"])
def test_the_streamed_text_is_that_of_the_json(run: Callable, mode: str) -> None:
    text, err = run("generate", PROMPTS[0], "--mode", mode)
    out, _ = run("generate", PROMPTS[0], "--mode", mode, "--json", "--logprobs")
    found = json.loads(out)
    assert text == found["text"] + "\n" and found["text"] and err == ""
    assert found["mode"] == mode and found["prompt"] == PROMPTS[0] and found["finish_reason"] == "length"
    assert len(found["token_ids"]) == len(found["sources"]) == len(found["logprobs"]) == 40
    assert found["stats"]["new_tokens"] == 40
    drafts = found["stats"]["acceptance_by_position"]
    assert found["sources"].count("accepted") == round(sum(drafts) * found["stats"]["rounds"])
    assert (mode == "naive") == (drafts == [])


@pytest.mark.smoke
def test_all_modes_say_the_same(run: Callable) -> None:
    sampled = ("--temperature", "0.9", "--seed", "7")
    for how in ((), sampled):
        texts = {run("generate", PROMPTS[0], "--mode", mode, *how)[0] for mode in ("naive", "share", "sd-classic")}
        assert len(texts) == 1


def test_prompts_go_through_the_chat_template_unless_raw(run: Callable, tiny: Path, tmp_path: Path) -> None:
    wrapped = run("generate", PROMPTS[0], *NAIVE)[0]
    written = f"<|im_start|>user\n{PROMPTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    assert run("generate", written, "--raw", *NAIVE)[0] == wrapped
    raw = run("generate", PROMPTS[0], "--raw", *NAIVE)[0]
    assert raw != wrapped
    assert run("generate", PROMPTS[0], "--system", "be red", *NAIVE)[0] not in (raw, wrapped)
    plain = make_checkpoint(tmp_path / "plain", chat=False)
    assert run("generate", PROMPTS[0], "--target", str(plain), *NAIVE)[0] == raw


def test_several_prompts_are_answered_as_if_alone(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("generate", PROMPTS[0], *NAIVE)[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPTS[1] + "\n"))
    second = run("generate", "-", *NAIVE)[0]
    assert run("generate", *PROMPTS)[0] == f"[1/2] {PROMPTS[0]}\n{first}\n[2/2] {PROMPTS[1]}\n{second}"
    lines = run("generate", *PROMPTS, "--json", *NAIVE)[0].splitlines()
    assert [json.loads(line)["text"] + "\n" for line in lines] == [first, second]


def test_a_given_length_beyond_the_context_is_one_warning(run: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """One for all prompts; FAST gives 40 tokens."""
    run("generate", *PROMPTS[:2], "--max-context", "64", *NAIVE)
    [record] = caplog.records
    assert "max_new_tokens is 40 and the context of 64 tokens has room for " in record.getMessage()


@pytest.mark.parametrize("stop", [(), ("--stop", "sky")])
def test_colors_change_nothing_but_colors(run: Callable, monkeypatch: pytest.MonkeyPatch, stop: tuple) -> None:
    """And verbose answers end with statistics."""
    pinned = ("--num-speculative-tokens", "4")  # left to itself, the policy may find that drafts do not pay
    text, plain = run("generate", *PROMPTS, "-v", *stop, *pinned)
    labels = "tok/s", "tau", "alpha", "by position", "draft", "verify", "overhead", "prefill", "start"
    assert all(label in plain for label in labels) and "\x1b" not in text + plain
    monkeypatch.setattr(display, "shows_colors", lambda: True)
    out, err = run("generate", *PROMPTS, "-v", *stop, *pinned)
    assert "\x1b[32m" in out and "\x1b[33m" in out and "accepted draft" in err
    names = re.compile(r"\x1b\[2m\[([a-z+]+)\]\x1b\[0m")
    assert names.search(out)
    for answer in out.split("[2/2]"):
        assert all(one != other for one, other in pairwise(names.findall(answer))), "named where another one begins"
    assert re.sub(r"\x1b\[(32|33|36|0)m", "", names.sub("", out)) == text


def test_every_piece_of_text_belongs_to_its_token() -> None:
    class Letters:
        """Token i is the i-th letter; 100 and 101 make one character together."""

        has_bytes = False

        def decode(self, ids: list[int], skip: bool) -> str:
            text = "".join({100: "<", 101: ">"}.get(i, chr(97 + i)) for i in ids)
            return text.replace("<>", "é").replace("<", "\ufffd").replace(">", "\ufffd")

    def chunk(ids: list[int], sources: list[Source], text: str, end: Any = None) -> TokenChunk:
        return TokenChunk(0, ids, sources, ["share" if x == "accepted" else None for x in sources], text, None, end)

    pieces = display.SourcedText(Letters())  # type: ignore[arg-type]
    assert pieces.split(chunk([0], ["target"], "a")) == [("a", "target", None)]
    assert pieces.split(chunk([1, 2, 100], ["accepted", "accepted", "recovered"], "b")) == [("b", "accepted", "share")]
    last = chunk([101, 3, 4], ["accepted", "accepted", "bonus"], "céd", "stop")  # "e" began a stop string
    assert pieces.split(last) == [(text, "accepted", "share") for text in "céd"]


class Talk:
    """Runs `chat` on given lines, and keeps what the engine was asked and what it answered."""

    def __init__(self, run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run, self._monkeypatch = run, monkeypatch
        self.asked: list[list[int]] = []
        self.kept: list[int] = []
        self.answers: list[Completion] = []
        admit = Engine._admit

        def spy(llm: LLM, prompts: list, params: SamplingParams, shown: Callable, **how: Any) -> list:
            done = startup.answer(llm, prompts, params, shown, **how)
            self.asked += prompts
            self.answers += done
            return done

        def noted(engine: Engine) -> Any:
            request = admit(engine)
            self.kept.append(request.cached_tokens)
            return request

        monkeypatch.setattr(chat, "answer", spy)
        monkeypatch.setattr(Engine, "_admit", noted)

    def __call__(self, *lines: str, args: tuple[str, ...] = (), status: int = 0) -> tuple[str, str]:
        self._monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return self._run("chat", *args, status=status)

    @property
    def texts(self) -> list[str]:
        return [done.text for done in self.answers]


@pytest.fixture
def talk(run: Callable, monkeypatch: pytest.MonkeyPatch) -> Talk:
    return Talk(run, monkeypatch)


def test_chat_remembers_and_reads_only_what_is_new(talk: Talk, run: Callable, tiny: Path) -> None:
    """A line that ends with a backslash continues on the next one."""
    out, _ = talk("the cat \\", "sat", PROMPTS[1])
    (first, second), kept = talk.answers, talk.kept[-1]
    assert out == f"{first.text}\n{second.text}\n"
    assert run("generate", "the cat \nsat", *NAIVE)[0] == first.text + "\n"
    runtime = Runtime(EngineConfig(target=str(tiny), mode="naive", compile="off"))
    said = [("user", "the cat \nsat"), ("assistant", first.text), ("user", PROMPTS[1])]
    asked = runtime.tokenizer.chat([{"role": role, "content": text} for role, text in said])
    assert talk.asked[1] == asked
    assert len(talk.asked[0]) <= kept < len(asked)
    (fresh,) = in_mode(runtime).generate([asked], SamplingParams(max_new_tokens=40))
    assert fresh.token_ids == second.token_ids


@pytest.mark.smoke
def test_chat_modes_give_the_same_answer(talk: Talk) -> None:
    lines = [PROMPTS[0], "/mode naive", "/reset", PROMPTS[0], "/mode classic", "/reset", PROMPTS[0], "/mode suffix"]
    _, err = talk(*lines, "/reset", PROMPTS[0], "/mode", "/stats", args=("--mode", "classic"))
    assert len(set(talk.texts)) == 1 and len(talk.texts) == 4
    assert "mode suffix; loaded: naive, classic, ngram, suffix, recycle\n" in err
    assert all(f"all {mode}" in err for mode in ("naive", "suffix", "classic"))


def test_chat_goes_on_after_a_change_of_mode(talk: Talk, tiny: Path) -> None:
    elsewhere = ("/mode naive", "/reset", PROMPTS[1], "/mode share", "/reset")  # another text in the same cache
    talk(PROMPTS[0], "/mode naive", PROMPTS[1], "/mode share", PROMPTS[1], *elsewhere, *PROMPTS, args=SHARE)
    engine = in_mode(Runtime(EngineConfig(target=str(tiny), mode="naive", compile="off")))
    fresh = [engine.generate([asked], SamplingParams(max_new_tokens=40))[0] for asked in talk.asked]
    assert [done.token_ids for done in fresh] == [done.token_ids for done in talk.answers]


def test_chat_commands(talk: Talk) -> None:
    out, err = talk(
        "/stats", "/help", "/what", "/mode fast", "/mode classic", "", "/system be blue", PROMPTS[0], "/system",
        "/reset", PROMPTS[0], "/exit", "never read",
    )  # fmt: skip
    assert "no answer yet" in err and "/reset" in err and "unknown command '/what'" in err
    assert "unknown mode 'fast'; loaded: naive, ngram, suffix, recycle, auto\n" in err
    assert "mode classic is not loaded; start with --mode classic" in err
    assert len(talk.answers) == 2 and talk.texts[0] != talk.texts[1]
    assert out == "".join(text + "\n" for text in talk.texts)


def test_a_full_context_is_told_in_one_line(talk: Talk) -> None:
    _, err = talk(PROMPTS[0], PROMPTS[1], "/reset", PROMPTS[0], args=(*NAIVE, "--max-context", "48"))
    told = err.splitlines()[1:]
    assert told[0].startswith("cut: the context holds 48 tokens; /reset")
    assert told[1].startswith("the conversation has ") and told[1].endswith("with a larger --max-context")
    assert len(talk.answers) == 2 and talk.texts[0] == talk.texts[1]


def press_ctrl_c(patch: pytest.MonkeyPatch, *behind: int) -> None:
    """After pieces of answers of these numbers."""
    real, calls = display.AnswerWriter.write, count(1)

    def write(writer: display.AnswerWriter, chunk: TokenChunk) -> None:
        real(writer, chunk)
        if next(calls) in behind:
            signal.raise_signal(signal.SIGINT)

    patch.setattr(display.AnswerWriter, "write", write)


@pytest.mark.parametrize("mode", ["naive", "share", "classic"])
def test_ctrl_c_ends_the_answer_and_not_the_chat(talk: Talk, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    talk(PROMPTS[0], PROMPTS[1], args=("--mode", mode))
    full, after_full = talk.answers
    press_ctrl_c(monkeypatch, 4)
    handler = signal.getsignal(signal.SIGINT)
    out, err = talk(PROMPTS[0], PROMPTS[1], "/reset", PROMPTS[0], args=("--mode", mode))
    _, _, part, after_part, again = talk.answers
    assert signal.getsignal(signal.SIGINT) is handler
    assert "stopped" in err and out == f"{part.text}\n{after_part.text}\n{again.text}\n"
    assert part.finish_reason is None and 4 <= len(part.token_ids) < 40
    assert full.text.startswith(part.text) and again.token_ids == full.token_ids
    assert len(talk.asked[3]) < len(talk.asked[1]) and talk.kept[-2] >= len(talk.asked[2])  # the part is remembered
    assert after_part.finish_reason == after_full.finish_reason == "length"


def test_ctrl_c_in_the_middle_of_a_round_leaves_engines_usable(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_config(EngineConfig(target=str(tiny), compile="off"), ("naive", "share", "classic"))
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)
    for mode in llm.modes:
        llm.runtime.warm_up(mode)
        ids, other = (llm.tokenizer.encode(prompt) for prompt in PROMPTS)
        (whole,), (whole_other,) = llm.generate(ids, params, mode=mode), llm.generate(other, params, mode=mode)
        for fail_at in (1, 8):  # in the prompt, and in a round
            llm.runtime.engine.forget()
            llm.generate(other, params, mode=mode)
            real, calls = type(llm.runtime.engine.target).forward, count(1)

            def forward(*args: Any, real: Any = real, fail: int = fail_at, calls: Any = calls, **named: Any) -> Any:
                logits = real(*args, **named)
                if next(calls) == fail:
                    raise KeyboardInterrupt
                return logits

            with monkeypatch.context() as patch:
                patch.setattr(type(llm.runtime.engine.target), "forward", forward)
                (part,) = startup.answer(llm, [ids], params, lambda chunk: None, mode=mode)
            assert part.finish_reason is None and whole.text.startswith(part.text)
            for prompt, expected in ((other, whole_other), (ids, whole)):
                (again,) = llm.generate(prompt, params, mode=mode)
                assert again.token_ids == expected.token_ids


def test_ctrl_c_ends_generate_with_what_there_is(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run("generate", PROMPTS[0], *NAIVE)[0]
    press_ctrl_c(monkeypatch, *range(40))
    out, err = run("generate", PROMPTS[0], "-v", *NAIVE, status=130)
    assert text.startswith(out.removesuffix("\n")) and len(out) < len(text) and "tok/s" in err


def test_two_ctrl_c_at_the_prompt_leave(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [KeyboardInterrupt, PROMPTS[0], KeyboardInterrupt, KeyboardInterrupt]
    monkeypatch.setattr(chat, "read_message", Mock(side_effect=keys))
    _, err = talk(args=NAIVE)
    assert len(talk.answers) == 1 and err.count("Ctrl-C again leaves") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: command"),
        (["generate", "hi", "--bogus"], "unknown argument '--bogus'; see `python -m sharesd generate --help`"),
        (["generate", "hi", "--mode", "fast"], "mode is 'fast'; choose one of"),
        (["generate", "hi", "--mode", "naive,share"], "--mode is 'naive,share'; give one mode"),
        (["generate", "hi", "--mode", "all"], "--mode is 'all'; give one mode"),
        (["generate", "hi", "--mode", "glide", "--draft-head", "x"], "--draft-head is 'x', of mode eagle, but no mode"),
        (["generate", " "], "the prompt ' ' is empty"),
        (["generate", "-", "-"], "the prompt - is given twice"),
        (["generate", "-"], "stdin is empty"),
        (["generate", "hi", "--raw", "--system", "x"], "--system has no effect with --raw"),
        (["generate", "hi", "--logprobs"], "--logprobs needs --json"),
        (["generate", "hi", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["generate", "hi", "--tree", "2:4"], "'2:4' is not K:DEPTH:BUDGET, auto or off; for example"),
        (["generate", "hi", "--tree", "2:4:99"], "tree is 2:4:99; K must be at least 2"),
        (["generate", "hi", "--draft-window", "0"], "draft_window is 0; it must be at least 1"),
        (["generate", "hi", "--draft-window", "few"], "'few' is not a whole number"),
        (["generate", "hi", "--tree", "2:4:8", "--num-speculative-tokens", "3"], "num_draft is 3 and tree is 2:4:8"),
        (["chat", "--target", "/no/where"], "/no/where does not exist; give a checkpoint folder"),
        (["chat", "extra"], "unknown argument 'extra'"),
    ],
)
def test_mistakes_cost_one_line_and_status_2(args: list[str], message: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    try:
        status = main(args)
    except SystemExit as leaving:  # argparse's own
        status = leaving.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_mistakes_about_the_checkpoint(run: Callable, tmp_path: Path) -> None:
    plain = ("--target", str(make_checkpoint(tmp_path / "plain", chat=False)))
    for args, message in (
        (("generate", "hi " * 200, "--max-context", "64", *NAIVE), "a prompt has "),
        (("generate", "hi", "--num-speculative-tokens", "0", *SHARE), "num_draft is 0"),
        (("generate", "hi", "--system", "x", *plain, *NAIVE), "--system needs a chat template, which this checkpoint"),
        (("chat", *plain, *NAIVE), "this checkpoint has no chat template"),
    ):
        out, err = run(*args, status=2)
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def program(*args: str, **options: Any) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "sharesd", *args], cwd=ROOT, **options)


def test_help_and_mistakes_come_without_torch() -> None:
    code = (
        "import sys, contextlib, sharesd.cli.main as c\n"
        "with contextlib.suppress(SystemExit): c.main(['generate', '--help'])\n"
        "assert c.main(['generate', 'hi', '--mode', 'fast']) == 2\n"
        "from sharesd import SamplingParams, EngineConfig, QuantConfig\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert 'LLM' in dir(sharesd := sys.modules['sharesd'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--raw" in done.stdout


@pytest.mark.subprocess
def test_a_reader_that_goes_away_ends_it_quietly(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path / "long", context=8192))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = program("generate", "the", "--target", model, *LONG, **pipes)
    assert len(running.stdout.read(5)) == 5
    running.stdout.close()
    assert running.stderr.read() == b""
    running.stderr.close()
    assert running.wait() == 141


@pytest.mark.subprocess
def test_chat_on_a_terminal(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path / "long", context=8192))
    ours, theirs = pty.openpty()
    shown = ""

    def wait_for(text: str) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([ours], [], [], 600)[0], f"waited for {text!r} after {shown!r}"
            shown += os.read(ours, 65536).decode()
        shown = shown[shown.index(text) + len(text) :]

    link_kernels(tmp_path)
    environment = {**os.environ, "TERM": "xterm", "SHARESD_CACHE_DIR": str(tmp_path)}
    terminal = {"start_new_session": True, "preexec_fn": _take_terminal, "env": environment}
    terminal |= dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    running = program("chat", "--target", model, *LONG, "-v", **terminal)
    os.close(theirs)
    wait_for("> ")
    os.write(ours, b"the cat\n")
    wait_for("the cat\r\n")
    wait_for(" ")
    os.write(ours, b"\x03")
    wait_for("stopped")
    wait_for("> ")
    os.write(ours, b"\x03")
    while "Ctrl-C again leaves" not in shown:
        if select.select([ours], [], [], 1)[0]:
            shown += os.read(ours, 65536).decode()
        else:  # readline shows its prompt before it listens; a signal in between waits for the end of the line
            os.write(ours, b"\n")
    wait_for("Ctrl-C again leaves")
    wait_for("> ")
    os.write(ours, b"\x15\x04")  # the line is emptied
    assert running.wait() == 0
    os.close(ours)


def _take_terminal() -> None:
    """Make stdin the controlling terminal, so that Ctrl-C becomes a signal, which jobs in the background ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.smoke
def test_public_names() -> None:
    assert all(getattr(sharesd, name) for name in sharesd.__all__)
    assert set(sharesd.__all__) <= set(dir(sharesd))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project.get("version", sharesd.__version__) == sharesd.__version__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = sharesd.Nothing  # type: ignore[attr-defined]
