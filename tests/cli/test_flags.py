"""Commands, and flags: names of other programs, sizes, what samples, and what is a warning or a mistake."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import sharesd_command
from benchmark.__main__ import make_parser as bench_parser
from serve.command import make_parser as serve_parser
from sharesd import EngineConfig, SamplingParams
from sharesd.cli import chat, generate_file, options
from sharesd.cli import main as answering
from sharesd.cli.console import main_guard, warn
from sharesd.cli.flags import sampling_params
from sharesd.cli.main import make_parser
from sharesd.cli.parse_types import size, whole_or_auto
from sharesd.cli.parser import SECOND_NAMES, Parser, parse
from sharesd.drafters import registry, selection
from sharesd.reports import environment
from sharesd_command import COMMANDS, HELP
from sharesd_command import main as command
from sharesd_files import cache_root
from tests.helpers.paths import ROOT
from train.__main__ import make_parser as train_parser

MODES, HEADS = registry.modes(), registry.names("head")
VALUES = {"--num-speculative-tokens": "3", "--temperature": "0.5", "--max-context": "auto"}
VALUES |= {"--max-batch": "4", "--max-new-tokens": "7", "--tensor-parallel": "2"}


def parsers_in(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers_in(below)


MAKERS = (make_parser, serve_parser, train_parser, bench_parser)
EVERY = [each for make in MAKERS for each in parsers_in(make("sharesd"))]


def generate(*argv: str) -> argparse.Namespace:
    return parse(make_parser(), ["generate", *argv])


def config_of(*argv: str, modes: tuple[str, ...] = ("share",)) -> EngineConfig:
    return options.engine_config(generate(*argv), modes=modes)  # type: ignore[arg-type]


@pytest.mark.parametrize("parser", EVERY, ids=lambda parser: parser.prog)
def test_second_names_do_what_first_names_do_and_no_help_shows_them(parser: Parser) -> None:
    shown = {name for action in parser._actions for name in action.option_strings}
    words = set(parser.format_help().replace(",", " ").replace("]", " ").replace("[", " ").split())
    needs_more = any(action.required for action in parser._actions)
    for flag in SECOND_NAMES.keys() & shown:
        assert not {*SECOND_NAMES[flag]} & words
        for other in () if needs_more else {*SECOND_NAMES[flag]} - shown:
            value = VALUES.get(flag, "name")
            assert vars(parse(parser, [flag, value])) == vars(parse(parser, [other, value]))


def test_second_names_are_not_shown_in_mistakes_and_those_of_modes_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        generate("--num-draft", "few")
    assert capsys.readouterr().err.startswith("error: argument --num-speculative-tokens: 'few' is not a whole number;")
    assert options.mode_of(generate("--mode", "sd-classic")) == "classic"
    assert not [parser.prog for parser in EVERY if "sd-classic" in parser.format_help()]
    with pytest.raises(ValueError, match="mode is 'fast'; choose one of ") as error:
        options.mode_of(generate("--mode", "fast"))
    assert "sd-" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("2G", 2**31), ("2GiB", 2**31), ("2GB", 2 * 10**9), ("512M", 2**29), ("512MB", 512 * 10**6)),
        *(("4k", 4096), ("1.5g", 3 * 2**29), ("1TiB", 2**40), ("2tb", 2 * 10**12), ("7B", 7)),
    ],
)
def test_sizes_are_read_alike_everywhere(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes
    served = parse(serve_parser(), ["--memory-limit", text, "--max-body", text, "--cpu-memory-limit", text])
    assert served.memory_limit == served.max_body == served.host_memory == num_bytes
    assert generate("--max-memory", f"0={text}").max_memory == ((0, num_bytes),)
    offload = config_of("--cpu-memory-limit", text, "--gpu-memory-limit", text).offload
    assert offload.host_memory == offload.device_memory == num_bytes


def test_the_context_is_a_number_or_auto() -> None:
    assert generate("--max-context", "auto").max_context == "auto" == whole_or_auto("auto")
    assert generate("--max-context", "300").max_context == 300 == generate("--max-model-len", "300").max_context
    assert generate().max_context == EngineConfig().max_context


@pytest.mark.parametrize(
    ("argv", "temperature"),
    [
        *(("", 0.0), ("--temperature 0", 0.0), ("--temperature 1", 1.0), ("--temp 0.7", 0.7), ("--do-sample", 1.0)),
        ("--do-sample --temperature 0.3", 0.3),
    ],
)
def test_a_temperature_above_0_samples(argv: str, temperature: float) -> None:
    assert sampling_params(generate(*argv.split())) == SamplingParams(temperature=temperature, max_new_tokens=512)


def test_what_only_sampling_uses_is_a_warning_under_greedy_decoding(caplog: pytest.LogCaptureFixture) -> None:
    params = sampling_params(generate("--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "--seed", "3"))
    assert params.greedy and params.top_p == 0.9
    [message] = caplog.messages
    assert message == "no effect on greedy decoding: --top-p, --top-k, --min-p, --seed; --temperature 1 samples"
    caplog.clear()
    sampling_params(generate("--top-p", "0.9", "--temperature", "1"))
    assert not caplog.records
    with pytest.raises(ValueError, match="--do-sample and --temperature 0 contradict each other"):
        sampling_params(generate("--do-sample", "--temperature", "0"))


@pytest.mark.parametrize(
    ("argv", "modes", "warning"),
    [
        (("--tree", "2:4:8"), ("suffix",), "--tree: no effect, no mode is classic or share or "),
        (("--draft-window", "512"), ("classic",), "--draft-window: no effect, no mode is share"),
        (("--draft-window", "off", "--hybrid-drafters", "suffix"), ("hybrid",), "--draft-window: no effect"),
        (("--draft-device", "cpu"), ("share",), "--draft-device: no effect, no mode is classic"),
        (("--head-quant", "hqq:8:64"), ("share",), "--head-quant: no effect, no mode is eagle or parallel or glide"),
        (("--draft-quant", "hqq:8:64"), ("suffix",), "--draft-quant: no effect, no mode is share or classic"),
        (("--quant-skip", "proj=down"), ("naive",), "--quant-skip: no effect, no mode is share or classic"),
        (("--num-speculative-tokens", "3"), ("naive",), "--num-speculative-tokens: no effect, the only mode is naive"),
        (("--max-speculative-tokens", "3"), ("naive",), "--max-speculative-tokens: no effect, the only mode is naive"),
        (("--max-speculative-tokens", "3", "--num-draft", "2"), ("share",),
         "--max-speculative-tokens: no effect, --num-speculative-tokens sets the number"),
        (("--ngram-recent",), ("share",), "--ngram-recent: no effect, no mode is ngram"),
        (("--corpus", "a.npy"), ("recycle",), "--corpus: no effect, no mode is suffix"),
        (("--recycle-table", "a.npz"), ("suffix",), "--recycle-table: no effect, no mode is recycle"),
        (("--hybrid-drafters", "suffix"), ("suffix",), "--hybrid-drafters: no effect, no mode is hybrid"),
    ],
)  # fmt: skip
def test_flags_that_no_mode_uses_are_a_warning(argv: Any, modes: tuple[str, ...], warning: str, caplog: Any) -> None:
    config = config_of(*argv, modes=modes)
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.message.startswith(warning)
    assert config.head_quant is None and config.draft_device is None and config.explicit_tree is None


def test_flags_that_a_mode_or_a_file_uses_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    tree = ("--num-draft", "8", "--tree", "2:4:8")
    config_of(*tree, "--draft-window", "64", "--draft-quant", "hqq:8:64", modes=("share",))
    config_of("--head-quant", "hqq:8:64", "--hybrid-drafters", "eagle,suffix", "--corpus", "a.npy", modes=("hybrid",))
    config_of("--corpus", "empty", "--recycle-table", "empty", "--seed", "7", modes=("naive",))
    assert not caplog.records
    generate_file.check_options(generate("why", "--replicas", "2", "--max-batch", "3"))
    generate_file.check_options(generate("--prompts", "a.txt", "--out", "b", "--json"))
    assert caplog.messages == [
        "--max-batch, --replicas: no effect without --prompts FILE",
        "--json: no effect with --prompts, whose answers are JSON Lines in --out",
    ]


@pytest.mark.parametrize(
    ("argv", "modes", "message"),
    [
        (("--draft-model", "small"), ("share",), "--draft-model is 'small' but no mode is classic; add --mode classic"),
        (("--draft-head", "x"), ("share",), "--draft-head is 'x' but no mode is eagle or parallel or glide; add"),
        (("--draft-head", "x"), ("glide",), "--draft-head is 'x', of mode eagle, but no mode is eagle; add"),
        (("--head-quant", "awq"), ("share",), "quantization is 'awq'"),
    ],
)
def test_a_drafter_that_nothing_uses_is_a_mistake(argv: tuple[str, ...], modes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(*argv, modes=modes)


def test_a_warning_is_one_line_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert main_guard(lambda: warn("--draft-window: " + "no effect [here], " * 20)) == 0
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("warning: --draft-window: no effect [here], ")


def test_all_modes_have_the_heads_that_come_with_the_model() -> None:
    parser = Parser()
    options.add_model_options(parser)
    options.add_mode_option(parser, several=True)
    shipped = {mode for mode in HEADS if selection.head_of(EngineConfig(), mode)}
    assert {"eagle", "glide"} <= shipped
    for argv in ([], ["--mode", "all"]):
        modes = options.modes_of(parse(parser, argv), default=MODES)
        assert modes == tuple(mode for mode in MODES if mode not in HEADS or mode in shipped)
    assert not {*HEADS} & {*options.modes_of(parse(parser, ["--target", "no/such"]), default=MODES)}
    assert not {*HEADS} & {*options.modes_of(parse(parser, ["--tensor-parallel", "2"]), default=MODES)}
    given = options.modes_of(parse(parser, ["--target", "no/such", "--head", "a/b"]), default=MODES)
    assert {*HEADS} & {*given} == {"eagle"}


def test_help_of_chat_names_the_modes_that_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    talk = object.__new__(chat.Chat)
    talk._llm = SimpleNamespace(modes=("naive", "suffix"))  # type: ignore[assignment]
    talk._help()
    err = capsys.readouterr().err
    assert "/mode NAME" in err and "naive, suffix" in err and "{" not in err


def test_reports_show_the_command_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/sharesd", "bench", "grid", "--modes", "a b"])
    assert environment.command() == "sharesd bench grid --modes 'a b'"
    monkeypatch.setattr("sys.argv", ["benchmark/__main__.py", "grid"])
    assert environment.command() == "python -m benchmark grid"


def test_the_home_folder_is_expanded_where_a_shell_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/at/home")
    flags = ["--target=~/model", "--trace=~/trace", "--lora", "~/adapter", "--system", "~"]
    args = parse(make_parser(), ["generate", "~", *flags])
    assert (args.target, args.trace, args.lora) == ("/at/home/model", "/at/home/trace", "/at/home/adapter")
    assert (args.system, args.prompts) == ("~", ["~"])
    monkeypatch.setenv("SHARESD_CACHE_DIR", "~/cache")
    assert str(cache_root()) == "/at/home/cache"


def test_help_fits_one_screen_and_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert command(argv) == 0
        assert capsys.readouterr().out == HELP + "\n"
    lines = HELP.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(sum(line.startswith(f"  {name} ") for line in lines) == 1 for name in COMMANDS)


def test_help_and_versions_come_without_torch() -> None:
    code = (
        "import sys, sharesd_command\n"
        "assert not [name for name in sys.modules if name.startswith('sharesd.')]\n"
        "assert sharesd_command.main(['--help']) == sharesd_command.main(['--version']) == 0\n"
        "heavy = ('torch', 'transformers', 'numpy', 'benchmark', 'train', 'serve')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("[]\n") and done.stdout.splitlines()[-2].startswith("sharesd ")


def test_a_package_that_is_missing_does_not_hide_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Mock(side_effect=answering.metadata.PackageNotFoundError)
    monkeypatch.setattr(answering.metadata, "version", missing)
    assert answering.versions().endswith("torch not installed, transformers not installed")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["answer"], "unknown command 'answer'; see `sharesd --help`"),
        (["--bogus"], "unknown command '--bogus'; see `sharesd --help`"),
        (["bench"], "the following arguments are required: BENCHMARK; see `sharesd bench --help`"),
        (["generate", "a", "--bogus"], "unknown argument '--bogus'; see `sharesd generate --help`"),
        (["serve", "--bogus"], "unknown argument '--bogus'; see `sharesd serve --help`"),
        (["train", "corpus", "--out", "a", "--bogus"], "unknown argument '--bogus'; see `sharesd train corpus --help`"),
        (["bench", "mtbench", "--bogus"], "unknown argument '--bogus'; see `sharesd bench mtbench --help`"),
        (["tune", "--bogus"], "unknown argument '--bogus'; see `sharesd tune --help`"),
        (["verify", "--bogus"], "unknown argument '--bogus'; see `sharesd verify --help`"),
        (["cache", "info", "--bogus"], "unknown argument '--bogus'; see `sharesd cache info --help`"),
        (["verify", "--mode", "naive"], "--mode is only naive"),
    ],
)
def test_mistakes_cost_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = command(argv)
    except SystemExit as ended:  # argparse's own
        status = ended.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("name", ["serve", "verify", "chat"])
def test_help_names_the_command_that_was_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: sharesd {name} [-h]")


@pytest.mark.parametrize("module", ["sharesd", "serve", "train", "benchmark"])
def test_modules_that_are_started_name_themselves(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith(f"usage: python -m {module} [-h]")


def test_nothing_imports_the_command() -> None:
    for package in ("sharesd", "serve", "train", "benchmark", "compile", "quant", "offload", "multigpu"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if sharesd_command.__name__ not in text:
                continue
            tree = ast.parse(text)
            taken = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            taken |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            assert sharesd_command.__name__ not in taken, path


def test_the_reference_of_commands_is_what_the_parsers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of flags: `python scripts/cli_reference.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    reference = importlib.import_module("cli_reference")
    page = reference.page()
    assert page == reference.FILE.read_text(encoding="utf-8")
    assert all(f"## {command.name}\n" in page for command in reference.commands())
    anchors = {reference._anchor(line.removeprefix("## ")) for line in page.splitlines() if line.startswith("## ")}
    assert anchors >= set(re.findall(r"\]\(#([^)]*)\)", page))
