"""Flags: names of other programs, sizes, what samples, and what is a warning or a mistake."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from benchmark.__main__ import make_parser as bench_parser
from serve.command import make_parser as serve_parser
from sharesd.cli import chat, generate_file, options
from sharesd.cli.flags import sampling_params
from sharesd.cli.main import make_parser
from sharesd.cli.parse_types import size, whole_or_auto
from sharesd.cli.parser import SECOND_NAMES, Parser, parse
from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.reports import environment
from sharesd.sampling_params import SamplingParams
from sharesd_files import cache_root
from train.__main__ import make_parser as train_parser

MODES, HEADS = registry.modes(), registry.names("head")
VALUES = {
    "--num-speculative-tokens": "3",
    "--temperature": "0.5",
    "--max-context": "auto",
    "--max-batch": "4",
    "--max-new-tokens": "7",
    "--tensor-parallel": "2",
}


def parsers_in(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers_in(below)


EVERY = [
    each for make in (make_parser, serve_parser, train_parser, bench_parser) for each in parsers_in(make("sharesd"))
]


def generate(*argv: str) -> argparse.Namespace:
    """Parsed flags of `generate`."""
    return parse(make_parser(), ["generate", *argv])


def config_of(*argv: str, modes: tuple[str, ...] = ("share",)) -> EngineConfig:
    """The config of model options."""
    return options.engine_config(generate(*argv), modes=modes)  # type: ignore[arg-type]


# Names


@pytest.mark.parametrize("parser", EVERY, ids=lambda parser: parser.prog)
def test_second_names_do_what_first_names_do_and_no_help_shows_them(parser: Parser) -> None:
    shown = {name for action in parser._actions for name in action.option_strings}
    words = set(parser.format_help().replace(",", " ").replace("]", " ").replace("[", " ").split())
    for flag, others in SECOND_NAMES.items():
        if flag not in shown:
            continue
        for other in others:
            assert other not in words
        if any(action.required for action in parser._actions):
            continue
        for other in set(others) - shown:
            value = VALUES.get(flag, "name")
            assert vars(parse(parser, [flag, value])) == vars(parse(parser, [other, value]))


def test_a_mistake_behind_a_second_name_names_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        generate("--num-draft", "few")
    assert capsys.readouterr().err.startswith("error: argument --num-speculative-tokens: 'few' is not a whole number;")


def test_second_names_of_modes_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.mode_of(generate("--mode", "sd-classic")) == "classic"
    assert not [parser.prog for parser in EVERY if "sd-classic" in parser.format_help()]
    with pytest.raises(ValueError, match="mode is 'fast'; choose one of ") as error:
        options.mode_of(generate("--mode", "fast"))
    assert "sd-" not in str(error.value)


# Values


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("2G", 2**31), ("2GiB", 2**31), ("2GB", 2 * 10**9), ("512M", 2**29), ("512MB", 512 * 10**6)),
        *(("4k", 4096), ("1.5g", 3 * 2**29), ("1TiB", 2**40), ("7B", 7)),
    ],
)
def test_sizes_are_read_alike_everywhere(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes
    served = parse(serve_parser(), ["--memory-limit", text, "--max-body", text, "--cpu-memory-limit", text])
    assert served.memory_limit == served.max_body == served.host_memory == num_bytes
    assert generate("--max-memory", f"0={text}").max_memory == ((0, num_bytes),)


def test_the_context_is_a_number_or_auto() -> None:
    assert generate("--max-context", "auto").max_context == "auto" == whole_or_auto("auto")
    assert generate("--max-context", "300").max_context == 300 == generate("--max-model-len", "300").max_context
    assert generate().max_context == EngineConfig().max_context


# Sampling


@pytest.mark.parametrize(
    ("argv", "temperature"),
    [
        ((), 0.0),
        (("--temperature", "0"), 0.0),
        (("--temperature", "1"), 1.0),
        (("--temp", "0.7"), 0.7),
        (("--do-sample",), 1.0),
        (("--do-sample", "--temperature", "0.3"), 0.3),
    ],
)
def test_a_temperature_above_0_samples(argv: tuple[str, ...], temperature: float) -> None:
    assert sampling_params(generate(*argv)) == SamplingParams(temperature=temperature, max_new_tokens=512)


def test_sampling_at_temperature_0_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match="--do-sample and --temperature 0 contradict each other"):
        sampling_params(generate("--do-sample", "--temperature", "0"))


def test_what_only_sampling_uses_is_a_warning_under_greedy_decoding(caplog: pytest.LogCaptureFixture) -> None:
    params = sampling_params(generate("--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "--seed", "3"))
    assert params.greedy and params.top_p == 0.9
    assert [record.message for record in caplog.records] == [
        "no effect on greedy decoding: --top-p, --top-k, --min-p, --seed; --temperature 1 samples"
    ]
    caplog.clear()
    sampling_params(generate("--top-p", "0.9", "--temperature", "1"))
    assert not caplog.records


# What has no effect


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
        (
            ("--max-speculative-tokens", "3", "--num-speculative-tokens", "2"),
            ("share",),
            "--max-speculative-tokens: no effect, --num-speculative-tokens sets the number",
        ),
        (("--ngram-recent",), ("share",), "--ngram-recent: no effect, no mode is ngram"),
        (("--corpus", "a.npy"), ("recycle",), "--corpus: no effect, no mode is suffix"),
        (("--recycle-table", "a.npz"), ("suffix",), "--recycle-table: no effect, no mode is recycle"),
        (("--hybrid-drafters", "suffix"), ("suffix",), "--hybrid-drafters: no effect, no mode is hybrid"),
    ],
)
def test_flags_that_no_mode_uses_are_a_warning(
    argv: tuple[str, ...], modes: tuple[str, ...], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(*argv, modes=modes)
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.message.startswith(warning)
    assert config.head_quant is None and config.draft_device is None and config.explicit_tree is None


def test_flags_that_a_mode_uses_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    config_of(
        "--num-draft", "8", "--tree", "2:4:8", "--draft-window", "64", "--draft-quant", "hqq:8:64", modes=("share",)
    )
    config_of("--head-quant", "hqq:8:64", "--hybrid-drafters", "eagle,suffix", "--corpus", "a.npy", modes=("hybrid",))
    config_of("--corpus", "empty", "--recycle-table", "empty", "--seed", "7", modes=("naive",))
    assert not caplog.records


@pytest.mark.parametrize(
    ("argv", "modes", "message"),
    [
        (("--draft-model", "small"), ("share",), "--draft-model is 'small' but no mode is classic; add --mode classic"),
        (("--draft-head", "x"), ("share",), "--draft-head is 'x' but no mode is eagle or parallel or glide; add"),
        (
            ("--draft-head", "x"),
            ("glide",),
            "--draft-head is 'x', of mode eagle, but no mode is eagle; add",
        ),
        (("--head-quant", "awq"), ("share",), "quantization is 'awq'"),
    ],
)
def test_a_drafter_that_nothing_uses_is_a_mistake(argv: tuple[str, ...], modes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(*argv, modes=modes)


def test_flags_of_a_file_of_prompts(caplog: pytest.LogCaptureFixture) -> None:
    generate_file.check_options(generate("why", "--replicas", "2", "--max-batch", "3"))
    generate_file.check_options(generate("--prompts", "a.txt", "--out", "b", "--json"))
    assert [record.message for record in caplog.records] == [
        "--max-batch, --replicas: no effect without --prompts FILE",
        "--json: no effect with --prompts, whose answers are JSON Lines in --out",
    ]


def test_a_warning_is_one_line_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    from sharesd.cli.console import main_guard, warn

    assert main_guard(lambda: warn("--draft-window: " + "no effect [here], " * 20)) == 0
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("warning: --draft-window: no effect [here], ")


# Modes


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
    class Loaded:
        modes = ("naive", "suffix")

    talk = object.__new__(chat.Chat)
    talk._runtime = Loaded()  # type: ignore[assignment]
    talk._help()
    err = capsys.readouterr().err
    assert "/mode NAME" in err and "naive, suffix" in err and "{" not in err


# Benchmarks


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["/usr/bin/sharesd", "bench", "grid", "--modes", "a b"], "sharesd bench grid --modes 'a b'"),
        (["benchmark/__main__.py", "grid"], "python -m benchmark grid"),
    ],
)
def test_reports_show_the_command_that_was_typed(typed: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", typed)
    assert environment.command() == shown


def test_the_home_folder_is_expanded_where_a_shell_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/at/home")
    flags = ["--target=~/model", "--trace=~/trace", "--lora", "~/adapter", "--system", "~"]
    args = parse(make_parser(), ["generate", "~", *flags])
    assert (args.target, args.trace, args.lora) == ("/at/home/model", "/at/home/trace", "/at/home/adapter")
    assert (args.system, args.prompts) == ("~", ["~"])
    monkeypatch.setenv("SHARESD_CACHE_DIR", "~/cache")
    assert str(cache_root()) == "/at/home/cache"
