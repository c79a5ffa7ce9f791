"""The pages of docs/reference, docs/explanation and docs/results against the code."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.__main__ import COMMANDS as BENCHMARKS
from compile.start_times import FIRST, OTHER
from offload.prefetcher import TransferStats
from quant.config import QuantConfig
from quant.formats import FORMATS
from quant.formats.hqq.solver import solve
from sharesd.cli.cache import PARTS
from sharesd.cli.display import stats_table
from sharesd.config import EngineConfig, OffloadConfig, PipelineConfig
from sharesd.drafters import registry
from sharesd.drafters.heads.config import ARCHITECTURES as HEADS
from sharesd.engine.outputs import Completion
from sharesd.engine.stats import Stats
from sharesd.loading.report import LoadReport
from sharesd.models.architectures import architectures, config_from_hf, model_types
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.loader import decoder_config
from sharesd.models.quantized.folder import METHODS
from sharesd.sampling_params import SamplingParams
from train.__main__ import COMMANDS as TRAINING

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for folder in ("reference", "explanation", "results") for page in (DOCS / folder).glob("*.md"))
WRITTEN = [page for page in PAGES if page.name not in ("cli.md", "http-api.md")]
"""Pages whose plan is checked here; the others are generated, or checked by test_docs."""

sys.path.insert(0, str(ROOT / "scripts"))
import results_tables  # noqa: E402
import room_diagram  # noqa: E402


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows_of(text: str) -> list[list[str]]:
    """The cells of every line of a table, heads included."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]


def marked(page: str, name: str) -> list[list[str]]:
    """The rows of the table between two markers, without its head."""
    found = re.search(rf"<!-- {name}[^>]*-->\n(.*?)<!-- /{name} -->", text_of(page), re.DOTALL)
    assert found, f"{page} has no table between <!-- {name} --> markers"
    return rows_of(found[1])[2:]


def commands_of(modules: Sequence[str]) -> set[str]:
    """Names of the subcommands in these modules."""
    commands = argparse.ArgumentParser().add_subparsers()
    for module in modules:
        importlib.import_module(module).add_parser(commands)
    return set(commands.choices)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_pages_are_short_and_their_lines_too(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and line[0] not in "|<"] == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_files_that_pages_name_exist(page: Path) -> None:
    folders = ("", "sharesd/", "sharesd/engine/", "sharesd/drafters/", "compile/", "compile/cpu/", "compile/cuda/")
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|h|cpp|sh))`", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not any((ROOT / folder / name).is_file() for folder in folders)]
    assert [name for name in missing if name != "sharesd_command.py"] == []


# Models


def test_the_support_table_has_every_architecture() -> None:
    rows = marked("reference/models.md", "architectures")
    native = {row[1]: row for row in rows if row[2] == "native"}
    gguf = {each.gguf.name: each.model_type for each in architectures() if each.gguf}
    assert sorted(native) == model_types()
    assert {row[3] for row in rows} - {"no"} == set(gguf)
    for model_type, row in native.items():
        if row[3] != "no" and model_type != "mistral":  # whose files say llama
            assert gguf[row[3]] == model_type
    assert [row[1:4] for row in rows if row[2] != "native"] == [["other", "fallback", "no"]] * 2


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "mixtral", "qwen3_moe", "mamba", "t5"])
def test_what_the_support_table_calls_other_has_no_native_decoder(model_type: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=model_type):
        config_from_hf({"model_type": model_type})


def test_the_page_on_quantization_names_what_folders_may_hold(tmp_path: Path) -> None:
    text = text_of("reference/quantization.md")
    for method in METHODS:
        assert f"`{method}`" in text
    config = {"model_type": "llama", "quantization_config": {"quant_method": "aqlm"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"quant_method = aqlm, and one of {', '.join(METHODS)} is supported"):
        decoder_config(tmp_path)


# Modes, quantization


def test_every_mode_has_a_section_and_a_row() -> None:
    text = text_of("reference/modes.md")
    first = [row[0].strip("`") for row in rows_of(text)]
    for mode in registry.modes():
        assert f"\n## {mode}\n" in text and mode in first


def test_the_page_on_quantization_has_all_methods_bits_and_groups() -> None:
    rows = {row[0]: row[1] for row in rows_of(text_of("reference/quantization.md"))}
    for name, cell in (("bits", rows["BITS"]), ("group_sizes", rows["GROUP"])):
        assert cell == "; ".join(f"{f.name}: {', '.join(map(str, getattr(f, name)))}" for f in FORMATS.values())
    assert f"`{EngineConfig().quant.spec}`" in text_of("reference/quantization.md")


def test_8_bits_are_symmetric_with_a_scale_per_row() -> None:
    """As the page says, the group is ignored."""
    weight_NK = torch.randn(4, 128)
    solved = solve(weight_NK, 8, 64)
    assert solved.scale.shape == (4, 1) and bool((solved.zero == 128).all())
    assert torch.equal(solved.q.float() - 128, (weight_NK / solved.scale).round())
    assert QuantConfig.parse("hqq:8:64").bits == 8


# Python API


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams, Completion, OffloadConfig, PipelineConfig])
def test_every_field_is_on_the_page(kind: Any) -> None:
    text = text_of("reference/python-api.md")
    assert [field.name for field in fields(kind) if f"`{field.name}`" not in text] == []


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_defaults_on_the_page_are_those_of_the_code(kind: Any) -> None:
    section = text_of("reference/python-api.md").partition(f"\n## {kind.__name__}\n")[2].partition("\n## ")[0]
    shown: dict[str, str] = {}
    for names, defaults, *_ in rows_of(section)[2:]:
        split = re.findall(r"`(\w+)`", names)
        values = defaults.split(", ") if len(split) > 1 else [defaults]
        shown |= dict(zip(split, values, strict=True))
    assert set(shown) == {field.name for field in fields(kind)}
    for field in fields(kind):
        if field.default is not MISSING:
            plain = f"{field.default:g}" if type(field.default) is float else str(field.default)
            assert shown[field.name].strip("`") == plain, field.name


# Commands, files, output


def test_every_benchmark_has_a_row() -> None:
    named = [
        re.fullmatch(r"`sharesd bench ([\w-]+)`", row[0]) for row in marked("reference/benchmarks.md", "benchmarks")
    ]
    assert {match[1] for match in named if match} == commands_of(BENCHMARKS)


def test_every_command_of_train_and_every_kind_of_head_is_named() -> None:
    text = text_of("reference/training.md")
    assert [name for name in commands_of(TRAINING) if f"`{name}`" not in text and f"train {name}`" not in text] == []
    assert [name for name in HEADS.values() if f"`{name}`" not in text] == []


def test_every_part_of_the_cache_is_named() -> None:
    assert [row[0].strip("`") for row in marked("reference/environment.md", "cache")] == list(PARTS)


def test_every_line_of_the_statistics_is_explained() -> None:
    traffic = TransferStats(num_bytes=1, waited_s=0.0, busy_s=1.0, elapsed_s=2.0)
    stats = Stats(num_draft=2, draft_steps=1, steps=1, rounds=1, traffic=traffic)
    report = LoadReport(load_seconds=1.0, compile_seconds=1.0, weight_bytes=1, quant=None, predicted=1.0)
    labels = [str(cell) for cell in stats_table({"": stats}, report).columns[0].cells]
    assert [row[0] for row in marked("reference/environment.md", "verbose")] == labels


def test_every_phase_of_a_start_is_explained() -> None:
    sources = [
        path.read_text("utf-8") for name in ("compile", "sharesd", "serve") for path in (ROOT / name).rglob("*.py")
    ]
    phases = {name for source in sources for name in re.findall(r'START\.(?:phase|end)\("([^"]+)"\)', source)}
    shown = {name for row in marked("reference/environment.md", "start") for name in row[0].split(", ")}
    assert len(phases) > 10 and shown == phases | {FIRST, OTHER}


def test_every_environment_variable_of_ours_is_named() -> None:
    packages = ("sharesd", "compile", "quant", "offload", "multigpu", "benchmark", "train", "serve")
    sources = [path.read_text(encoding="utf-8") for package in packages for path in (ROOT / package).rglob("*.py")]
    named = {name for source in sources for name in re.findall(r'"(SHARESD_[A-Z]+)"', source)}
    assert named and [name for name in named if f"`{name}`" not in text_of("reference/environment.md")] == []


def test_the_glossary_has_a_line_per_word() -> None:
    words = [row[0] for row in rows_of(text_of("reference/glossary.md"))[2:]]
    assert 40 <= len(words) <= 60 and len(set(words)) == len(words)
    assert words == sorted(words, key=str.lower)


# Results


def test_tables_of_results_are_those_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert results_tables.main(["--check"]) == 0, capsys.readouterr().out


def test_every_figure_has_its_conditions() -> None:
    files = sorted((DOCS / "results").glob("*.csv"))
    assert 5 <= len(files) <= 12
    for file in files:
        with file.open(newline="", encoding="utf-8") as lines:
            header, *rows = csv.reader(lines)
        assert header[:4] == ["date", "host", "commit", "command"], file.name
        hosts = re.findall(r"^\| ([\w-]+) \| ", text_of("results/README.md"), re.MULTILINE)
        for row in rows:
            assert len(row) == len(header) and all(row[:4]), (file.name, row)
            assert row[0] == "unknown" or re.fullmatch(r"20\d\d-\d\d-\d\d", row[0])
            assert row[1] in [*hosts, "unknown"], (file.name, row[1])
        assert f"`{file.name}`" in text_of("results/README.md")


def test_the_readmes_table_has_medians_and_spread() -> None:
    header = results_tables.MTBENCH.read_text(encoding="utf-8").splitlines()[0].split(",")
    made = []
    for mode, speedups in {"naive": (1, 1, 1), "share": (1.1, 1.4, 1.2)}.items():
        for run, speedup in enumerate(speedups, 1):
            values = ["2026-01-02", "epyc", "abc", "sharesd bench mtbench", mode, "0", str(run), str(100 * speedup)]
            made.append(dict(zip(header, [*values, str(speedup), "2", "75.6", "1"], strict=True)))
    old = {**made[0], "date": "2025-01-01", "mode": "gone"}
    text = results_tables.readme_table([old, *made])
    assert "| `share` | 120.0 | 1.20x (1.10 to 1.40) | 2.00 | 75.6 MB |" in text
    assert "commit abc. Medians of 3 runs" in text and "gone" not in text
    assert "identical to those of `naive`" in text
    made[-1]["identical"] = "0.98"
    assert "Identical texts: 98.0% at least" in results_tables.readme_table(made)


def test_markers_that_match_nothing_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    file.write_text("a,b\n1,x\n2,y\n")
    assert results_tables.table(file, "b=y", "a as A, b") == "| A | b |\n| ---: | --- |\n| 2 | y |\n"
    with pytest.raises(ValueError, match="no column 'c'; it has a, b"):
        results_tables.table(file, "c=1", "a")
    with pytest.raises(ValueError, match="no row with b=z"):
        results_tables.table(file, "b=z", "a")
    file.write_text("a,b\n1,x,3\n")
    with pytest.raises(ValueError, match="some.csv:2 has another number of fields"):
        results_tables.table(file, "", "a")


def test_cards_have_data_licences_and_recipes() -> None:
    cards = sorted((ROOT / "sharesd/drafters").rglob("README.md"))
    assert len(cards) >= 3
    for card in cards:
        text = card.read_text(encoding="utf-8")
        assert all(word in text for word in ("SmolLM2-135M-Instruct", "4-bit", "MIT", "Apache-2.0", "Data", "$ "))


def test_the_diagram_of_rooms_is_that_of_the_imports() -> None:
    assert room_diagram.page() == room_diagram.PAGE.read_text("utf-8"), "run python scripts/room_diagram.py"
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert room_diagram.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
