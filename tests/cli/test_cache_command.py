"""`cache info` and `cache clear`, and that nothing in the cache is trusted that is not what was written."""

from __future__ import annotations

import functools
import io
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile import cpp_extension
from sharesd.cli import cache as cache_command
from sharesd.cli.cache import PARTS, contents
from sharesd.cli.main import main
from sharesd.models import conversion_cache as convert
from sharesd.models.gguf.convert import converted_folder
from tests.helpers.gguf_files import write_gguf
from tests.helpers.paths import ROOT

KEY = "0123456789abcdef"
OURS = {
    "offload": (f"blocks-{KEY}.store", f"blocks-{KEY}.part"),
    "records": (f"records-{KEY}.bin",),
    "native": (f"kernels-{KEY}.so", "tmpa1b2c3d4/kernels.so"),
    "checkpoints": (
        *(f"tiny.Q4-{KEY}/model.safetensors", f"tiny.Q4-{KEY}-stored/config.json"),
        *("partial-xy/checkpoint/config.json", ".partial-xy/checkpoint/config.json"),
    ),
    "quant": (f"hqq-{KEY}.safetensors", f"hqq-{KEY}_x.tmp"),
    "settings": (f"quant-{KEY}.json", f".quant-{KEY}.json.123"),
    "tiles": ("nvidia-h100.json", "low-bits-nvidia-h100.txt"),
    "inductor": ("ab/cabxyz.py", "fxgraph/ab/x"),
    "triton": ("ABCDEFG/row_gemm.cubin",),
    "nvrtc": (f"stream-{KEY}.cubin",),
    "openvino": (f"tiny-{KEY}-F16-2026.1/model.bin",),
}
FOREIGN = ("notes.txt", "native/README", "checkpoints/my-training/model.safetensors", "quant/table.csv", "photos/a.png")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder, shared with other things, in which every entry has 1 MB."""
    root = tmp_path / "cache"
    for name in (*FOREIGN, *(f"{part}/{name}" for part, names in OURS.items() for name in names)):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(10**6))
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(root))
    return root


def files_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_every_part_of_the_cache_is_known() -> None:
    """Whoever adds a folder to the cache adds it to PARTS."""
    packages = ("sharesd", "compile", "quant", "benchmark")
    texts = [path.read_text("utf-8") for package in packages for path in (ROOT / package).rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'(?:cache_root\(\) / |JsonCache\()"(\w+)"', text)}
    assert named | {"inductor", "triton"} == PARTS.keys() == OURS.keys()


@pytest.mark.smoke
def test_info_counts_what_is_ours(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"cache folder: {cache}\n")
    rows = {line.split()[0]: line.split()[-3:] for line in out.splitlines()[1:] if line.strip()}
    assert rows["native"] == ["2", "2.0", "MB"] and rows["openvino"] == ["1", "1.0", "MB"]
    assert rows["total"] == ["20", "20.0", "MB"]


def test_info_of_a_cache_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "none"))
    assert main(["cache", "info"]) == 0 and "0.0 MB" in capsys.readouterr().out
    assert main(["cache", "clear", "--part", "quant"]) == 0 and "nothing to delete in" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_clear_deletes_what_is_ours_and_nothing_else(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "--part", "quant", "--yes"]) == 0
    out = capsys.readouterr().out
    assert out.index("to delete") < out.index("quantized weights") < out.index("deleted 2.0 MB")
    assert not contents(cache, "quant").entries and contents(cache, "native").num_bytes == 2 * 10**6
    link, elsewhere = cache / f"checkpoints/tiny.Q4-{KEY}", cache.with_name("elsewhere")
    shutil.move(link, elsewhere)
    link.symlink_to(elsewhere)
    assert main(["cache", "clear", "-y"]) == 0
    assert (elsewhere / "model.safetensors").exists() and not link.is_symlink(), "targets of links are kept"
    assert files_in(cache) == set(FOREIGN)
    assert not (cache / "tiles").exists()  # empty folders go, too


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_clear_asks_at_a_terminal_and_deletes_nothing_where_nobody_can_be_asked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["cache", "clear"]) == 2
    assert capsys.readouterr().err == "error: cannot ask for confirmation: stdin is not a terminal; pass --yes\n"
    for answer, status, left in (("n", 1, 25), ("", 1, 25), ("YES", 0, 5)):
        assert len(files_in(cache)) == 25
        monkeypatch.setattr(sys, "stdin", _Terminal(f"{answer}\n"))
        assert main(["cache", "clear"]) == status and len(files_in(cache)) == left
    (cache / "tiles").mkdir()
    (cache / "tiles/nvidia-h100.json").touch()
    monkeypatch.setattr(sys, "stdin", _Terminal("y\n"))
    assert main(["cache", "clear"]) == 0 and len(files_in(cache)) == 5


@pytest.mark.parametrize("argv", ["cache", "cache clear --part none", "cache info --part quant"])
def test_mistakes_cost_a_line_and_sizes_are_readable(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv.split())
    assert capsys.readouterr().err.count("\n") == 1
    assert [cache_command._size(n) for n in (0, 123_456, 1_234_567_890)] == ["0.0 MB", "0.1 MB", "1.23 GB"]


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "cut at the end": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: os.truncate(file, 0),
    "one bit in the middle": lambda file: flip(file, file.stat().st_size // 2),
    "the last bit": lambda file: flip(file, -1),
    "zeros of the right size": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}  # zeros are what a power cut leaves of a file whose name came to the disk before its contents
damages = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    source = write_gguf(tmp_path / "tiny.gguf")
    return source, converted_folder(source)


@damages
def test_damaged_checkpoints_are_converted_again(damage: Any, converted: tuple[Path, Path], caplog: Any) -> None:
    source, folder = converted
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != convert.MANIFEST}
    for name in ("model.safetensors", "tokenizer.json", convert.MANIFEST):
        damage(folder / name)
        caplog.clear()
        assert converted_folder(source) == folder
        if name != convert.MANIFEST:  # which may also say less than before, and be taken at its word
            assert f"{folder} is damaged or outdated; converted tiny.gguf again" in caplog.text
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in whole} == whole
    caplog.clear()
    assert converted_folder(source) == folder and not caplog.text


def test_converted_files_are_read_only_where_size_or_time_changed(
    converted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source, folder), read, hashed = converted, [], convert._sha256
    monkeypatch.setattr(convert, "_sha256", lambda file: read.append(file.name) or hashed(file))
    assert converted_folder(source) == folder and not read
    os.utime(folder / "tokenizer.json", ns=(0, 12345))
    assert converted_folder(source) == folder and read == ["tokenizer.json"]
    assert converted_folder(source) == folder and read == ["tokenizer.json"]  # its new time is known now


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that hands out the library built before, and notes in `log` that it was asked."""
    script = tmp_path / "c++"
    script.write_text(
        f'#!/bin/sh\necho asked >> "{tmp_path}/log"\nwhile [ "$1" != "-o" ]; do shift; done\n'
        f'cp "{cpp_extension.library("float32")._name}" "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(cpp_extension, "library", functools.cache(cpp_extension.library.__wrapped__))


@damages
@pytest.mark.usefixtures("compiler")
def test_damaged_kernels_are_built_again(
    damage: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without ever being loaded: many of these libraries would load, and crash or compute something else."""

    def load(folder: str) -> Path:
        monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / folder))
        cpp_extension.library.cache_clear()
        assert cpp_extension.library("float32").attend_float32
        return Path(cpp_extension.library("float32")._name)

    built = load("one")
    kept, damaged = (tmp_path / name / built.relative_to(tmp_path / "one") for name in ("two", "three"))
    for copy in (kept, damaged):
        copy.parent.mkdir(parents=True)
        shutil.copy(built, copy)
    assert load("two") == kept and not caplog.text
    damage(damaged)
    assert load("three") == damaged
    assert f"rebuilding {damaged}" in caplog.text
    assert (tmp_path / "log").read_text().count("asked") == 2
    assert damaged.read_bytes() == built.read_bytes()
