"""The pages of docs/reference, docs/explanation and docs/results against the code."""

from __future__ import annotations

import argparse
import csv
import importlib
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import COMMANDS as BENCHMARKS
from compile.start_times import FIRST, OTHER
from offload.prefetcher import TransferStats
from quant.formats import FORMATS
from quant.quantize_model import QuantReport
from scripts import results_tables, room_diagram
from sharesd.cli.cache import PARTS
from sharesd.cli.display import stats_table
from sharesd.config import EngineConfig, OffloadConfig, PipelineConfig
from sharesd.drafters import registry
from sharesd.drafters.heads.config import ARCHITECTURES as HEADS
from sharesd.engine.outputs import Completion
from sharesd.engine.stats import Stats
from sharesd.models.architectures import architectures, config_from_hf, model_types
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.gguf import reader as keys
from sharesd.models.gguf.tokenizer import PATTERNS
from sharesd.models.quantized.folder import METHODS
from sharesd.runtime import LoadReport
from sharesd.sampling_params import SamplingParams
from tests.helpers.paths import ROOT
from train.__main__ import COMMANDS as TRAINING

DOCS = ROOT / "docs"
PAGES = sorted(page for folder in ("reference", "explanation", "results") for page in (DOCS / folder).glob("*.md"))
WRITTEN = [page for page in PAGES if page.name not in ("cli.md", "http-api.md")]
"""Pages whose plan is checked here; the others are generated, or checked by test_docs."""


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
    commands = argparse.ArgumentParser().add_subparsers()
    for module in modules:
        importlib.import_module(module).add_parser(commands)
    return set(commands.choices)


def sources_of(*packages: str) -> list[str]:
    return [path.read_text(encoding="utf-8") for package in packages for path in (ROOT / package).rglob("*.py")]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_lines_of_pages_are_short_and_files_that_they_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > 120 and line[0] not in "|<"] == []
    folders = ("", "sharesd/", "sharesd/engine/", "sharesd/drafters/", "compile/", "compile/cpu/", "compile/cuda/")
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|h|cpp|sh))`", text)
    missing = [name for name in named if not any((ROOT / folder / name).is_file() for folder in folders)]
    assert [name for name in missing if name != "sharesd_command.py"] == []


def test_the_support_table_has_every_architecture() -> None:
    rows = marked("reference/models.md", "architectures")
    native = {row[1]: row for row in rows if row[2] == "native"}
    gguf = {each.model_type: each.gguf.name for each in architectures() if each.gguf}
    assert sorted(native) == model_types()
    assert {row[3] for row in rows} - {"no"} == set(gguf.values())
    for model_type, row in native.items():
        if row[3] != "no" and model_type != "mistral":  # whose files say llama
            assert gguf[model_type] == row[3]
    assert [row[1:4] for row in rows if row[2] != "native"] == [["other", "fallback", "no"]] * 2
    for other in ("gpt2", "bloom", "olmoe", "mamba", "t5"):
        with pytest.raises(UnsupportedArchitecture, match=other):
            config_from_hf({"model_type": other})


def test_the_families_whose_layers_predict_more_tokens_are_listed() -> None:
    found = re.search(r"\(modes.md#mtp\): those of (.*?)\. Those of other", text_of("reference/models.md"), re.DOTALL)
    assert found is not None
    assert re.findall(r"`(\w+)`", found[1]) == sorted(each.model_type for each in architectures() if each.mtp)


def test_all_known_keys_and_pre_tokenizers_of_gguf_files_are_listed() -> None:
    text = text_of("reference/models.md")
    table = re.search(r"<!-- gguf keys.*?-->\n(.*?)<!-- /gguf keys -->", text, re.DOTALL)
    known = {*keys.WITHOUT_EFFECT, *keys.NEUTRAL, *keys.TOKENIZER_USED, *keys.TOKENIZER_WITHOUT_EFFECT}
    known |= {*keys.TOKENIZER_NEUTRAL, "tokenizer.chat_template.NAME"}
    assert table is not None and set(re.findall(r"`([^`]+)`", table[1])) == known
    splits = re.search(r"a pre-tokenizer that is not one of these:\n(.*?)\n\n", text, re.DOTALL)
    assert splits is not None and set(re.findall(r"`([^`]+)`", splits[1])) == PATTERNS.keys()


def test_every_mode_has_a_section_and_a_row() -> None:
    text = text_of("reference/modes.md")
    first = [row[0].strip("`") for row in rows_of(text)]
    assert all(f"\n## {mode}\n" in text and mode in first for mode in registry.modes())


def test_the_page_on_quantization_has_all_methods_bits_groups_and_kinds_of_folders() -> None:
    text = text_of("reference/quantization.md")
    rows = {row[0]: row[1] for row in rows_of(text)}
    made = [each for each in FORMATS.values() if not each.keeps_weights]
    for name, cell in (("bits", rows["BITS"]), ("group_sizes", rows["GROUP"])):
        assert cell == "; ".join(f"{f.name}: {', '.join(map(str, getattr(f, name)))}" for f in made)
    assert all(f"`{each}`" in text for each in (EngineConfig().quant.spec, *METHODS))


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_fields_on_the_page_are_those_of_the_code_with_their_defaults(kind: Any) -> None:
    text = text_of("reference/python-api.md")
    others = [field.name for each in (Completion, OffloadConfig, PipelineConfig) for field in fields(each)]
    assert [name for name in others if f"`{name}`" not in text] == []
    section = text.partition(f"\n## {kind.__name__}\n")[2].partition("\n## ")[0]
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


def test_every_benchmark_has_a_row_and_every_command_of_train_and_kind_of_head_is_named() -> None:
    rows = marked("reference/benchmarks.md", "benchmarks")
    named = [re.fullmatch(r"`sharesd bench ([\w-]+)`", row[0]) for row in rows]
    assert {match[1] for match in named if match} == commands_of(BENCHMARKS)
    text = text_of("reference/training.md")
    assert [name for name in commands_of(TRAINING) if f"`{name}`" not in text and f"train {name}`" not in text] == []
    assert [name for name in HEADS.values() if f"`{name}`" not in text] == []


def test_every_line_of_the_statistics_is_explained() -> None:
    traffic = TransferStats(num_bytes=1, waited_s=0.0, busy_s=1.0, elapsed_s=2.0)
    stats = Stats(num_draft=2, draft_steps=1, steps=1, rounds=1, traffic=traffic)
    quant = QuantReport(spec="hqq:4:64", num_linears=1, full_bytes=4, quantized_bytes=1, seconds=1.0, from_cache=False)
    report = LoadReport(load_seconds=1.0, compile_seconds=1.0, weight_bytes=1, quant=quant, predicted=1.0)
    labels = [str(cell) for cell in stats_table({"": stats}, report).columns[0].cells]
    assert [row[0] for row in marked("reference/environment.md", "verbose")] == labels


def test_phases_of_a_start_parts_of_the_cache_and_variables_are_explained() -> None:
    sources = "\n".join(sources_of("compile", "sharesd", "serve"))
    phases = set(re.findall(r'START\.(?:phase|end)\("([^"]+)"\)', sources))
    shown = {name for row in marked("reference/environment.md", "start") for name in row[0].split(", ")}
    assert len(phases) > 10 and shown == phases | {FIRST, OTHER}
    assert [row[0].strip("`") for row in marked("reference/environment.md", "cache")] == list(PARTS)
    sources += "\n".join(sources_of("quant", "offload", "multigpu", "benchmark", "train"))
    named, text = set(re.findall(r'"(SHARESD_[A-Z]+)"', sources)), text_of("reference/environment.md")
    assert named and [name for name in named if f"`{name}`" not in text] == []


def test_the_glossary_has_a_line_per_word() -> None:
    words = [row[0] for row in rows_of(text_of("reference/glossary.md"))[2:]]
    assert 40 <= len(words) <= 60 and len(set(words)) == len(words)
    assert words == sorted(words, key=str.lower)


def test_every_figure_has_its_conditions() -> None:
    files = sorted((DOCS / "results").glob("*.csv"))
    assert 5 <= len(files) <= 14
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


def test_tables_of_results_are_those_of_the_files_and_the_diagram_of_rooms_that_of_the_imports(capsys: Any) -> None:
    assert results_tables.main(["--check"]) == 0, capsys.readouterr().out
    assert room_diagram.page() == room_diagram.PAGE.read_text("utf-8"), "run python scripts/room_diagram.py"
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert room_diagram.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
