"""Full disks and folders that cannot be written: one line each, and nothing half written."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from huggingface_hub import constants

import sharesd_files
from compile import cpp_extension
from multigpu.journal import Journal, keep_settings
from offload.block_file import StoreContent, StoreError, Writer
from offload.block_layout import RecordLayout
from quant.config import QuantConfig
from quant.weight_cache import write_store
from sharesd.cli.console import describe, log_file, main_guard
from sharesd.drafters.suffix.datastore import build_datastore
from sharesd.engine.stats import Stats
from sharesd.models import hub
from sharesd.models.checkpoint import write_tensors
from sharesd.models.gguf.convert import converted_folder
from sharesd.reports.environment import write_results
from sharesd.weights.offload_rates import acceptance_recorder
from sharesd_files import JsonCache, atomic_write
from tests.helpers.gguf_files import write_gguf

SIZE = 64 * 1024
"""Bytes of the small disk, and of the largest file."""
REASONS = "No space left on device|File too large|Read-only file system|GB are needed and"


class Disk(NamedTuple):
    folder: Path
    filled: Callable[[], AbstractContextManager[None]]
    """Makes writes fail while it is entered."""

    @property
    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


@contextmanager
def small_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(params=["limit", "full", "read-only"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A folder where large files cannot be written, a small disk, and one that cannot be written at all."""
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(sharesd_files, "_warned", set())
    if request.param == "limit":
        yield Disk(folder, small_files)
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")

    @contextmanager
    def read_only() -> Iterator[None]:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        try:
            yield
        finally:
            subprocess.run(["mount", "-o", "remount,rw", folder], check=True)

    try:
        yield Disk(folder, nullcontext if request.param == "full" else read_only)
    finally:
        subprocess.run(["umount", folder], check=True)


def line_of(error: BaseException) -> str:
    """The line that the user sees; it names the folder or file."""
    line = describe(error)
    assert "\n" not in line and "LOGLEVEL" not in line
    return line


def test_a_report(disk: Disk) -> None:
    path = disk.folder / "report.json"
    atomic_write(path, "before")
    with disk.filled(), pytest.raises(OSError) as failed:
        write_results(path, {"text": "x" * 2 * SIZE})
    line = line_of(failed.value)
    assert line.startswith(f"{disk.folder}: ") and any(reason in line for reason in REASONS.split("|"))
    assert ("free some space there" in line) == (failed.value.errno not in (errno.EROFS, errno.EFBIG))
    assert disk.files == {"report.json"} and path.read_text() == "before"


def test_weights_and_other_arrays(disk: Disk) -> None:
    with disk.filled():
        for write in (
            lambda: write_tensors({"x": torch.zeros(SIZE)}, disk.folder / "model.safetensors"),
            lambda: build_datastore(list(range(SIZE)), disk.folder / "corpus.npy"),
        ):
            with pytest.raises(OSError) as failed:
                write()
            assert str(disk.folder) in line_of(failed.value)
    assert disk.files <= {"model.safetensors"}


def test_a_conversion(disk: Disk, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    with (
        disk.filled(),
        pytest.raises(ValueError, match=f"cannot convert .*({REASONS}).*set SHARESD_CACHE_DIR") as failed,
    ):
        converted_folder(file)
    assert str(file) in line_of(failed.value) and str(disk.folder) in line_of(failed.value) and not disk.files
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "another"))
        assert (converted_folder(file) / "model.safetensors").is_file()


def test_what_is_kept_for_the_next_start_is_not(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """Costs, and solved linears; each place is named once."""
    with disk.filled():
        for _ in range(2):
            JsonCache("settings", "costs", 1).keep(["x" * 2 * SIZE])
            write_store(disk.folder / "cache" / "quant" / "hqq-1.safetensors", "key", {"x": torch.zeros(SIZE)})
    assert len(caplog.messages) == 2 and not disk.files
    for part, message in zip(("settings", "quant"), caplog.messages, strict=True):
        assert message.startswith(f"{disk.folder / 'cache' / part} cannot be written (")
        assert "os error" not in message and message.endswith("or set SHARESD_CACHE_DIR to another folder")


def test_kernels_are_loaded_from_elsewhere(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = Path(cpp_extension.library("float32")._name)
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nfor out; do :; done\nhead -c 100000000 "{built}" > "$out"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(cpp_extension, "library", functools.cache(cpp_extension.library.__wrapped__))
    with disk.filled() if disk.filled is not small_files else nullcontext():
        if disk.filled is small_files:  # the compiler has the limit, too
            monkeypatch.setattr(cpp_extension, "atomic_path", full_disk)
        library = cpp_extension.library("float32")
        assert library.attend_float32 and not Path(library._name).exists() and not disk.files
    [message] = caplog.messages
    assert message.startswith(f"{disk.folder / 'cache' / 'native'} cannot be written (")
    assert "CPU kernels are built again at each start" in message


def full_disk(path: Path) -> AbstractContextManager[Path]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_journal_keeps_whole_lines(disk: Disk) -> None:
    path = disk.folder / "answers.jsonl"
    with Journal(path, "--out-dir") as journal:
        journal.add({"index": 0})
        if disk.filled not in (small_files, nullcontext):
            return  # an open file keeps a file system from being read-only
        with disk.filled(), pytest.raises(OSError) as failed:
            journal.add({"index": 1, "text": "x" * 2 * SIZE})
        assert line_of(failed.value).startswith(f"{path}: ")
        assert path.read_text() == '{"index":0}\n'
        journal.add({"index": 1})
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1]


def test_settings_of_a_run(disk: Disk) -> None:
    with disk.filled(), pytest.raises(OSError) as failed:
        keep_settings(disk.folder / "settings.json", {"text": "x" * 2 * SIZE}, "--out-dir")
    assert line_of(failed.value).startswith(f"{disk.folder / 'settings.json'}: ") and not disk.files


def test_a_log_file(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("sharesd.disk")
    with log_file(disk.folder / "run.log"):
        if disk.filled not in (small_files, nullcontext):
            return  # an open file keeps a file system from being read-only
        with disk.filled():
            for _ in range(3):
                log.warning("x" * 2 * SIZE)
    lines = [line for line in capsys.readouterr().err.splitlines() if "xxx" not in line]
    assert len(lines) == 1 and re.match(rf"warning: .*run.log cannot be written .({REASONS}).; the log stops", lines[0])


def test_offloaded_blocks(disk: Disk) -> None:
    content = StoreContent(what={"x": 1}, layouts=(RecordLayout.of({"w": torch.zeros(SIZE)}),) * 2)
    remedy = f"({REASONS}|has .* free).*free some space there, or give --offload-dir on another disk"
    with disk.filled(), pytest.raises(StoreError, match=remedy), Writer(disk.folder / "offload", content) as writer:
        writer.write(0, torch.zeros(content.layouts[0].record_bytes, dtype=torch.uint8))
    assert not any(name.endswith(".store") for name in disk.files)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_download(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*args: object, **options: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_: ["config.json", "model.safetensors"])
    monkeypatch.setattr("sharesd.models.hub_download.snapshot_download", snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    message = f"owner/model cannot be kept in {tmp_path / 'hub'} .{os.strerror(number)}.; free some .*set HF_HOME"
    with pytest.raises(ValueError, match=message):
        hub.resolve("owner/model")


def test_an_answer_does_not_end_with_its_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts of acceptance are kept after each answer of an offloaded model."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    record, stats = acceptance_recorder(tmp_path, "share", QuantConfig(), 0), Stats()
    stats.sources["accepted"] += 3
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    record(stats)
    [message] = caplog.messages
    assert "settings cannot be written" in message


def test_an_error_without_a_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)

    def fails() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert main_guard(fails) == 2
    assert (
        capsys.readouterr().err == "error: a file cannot be written: No space left on device; free some space there\n"
    )
