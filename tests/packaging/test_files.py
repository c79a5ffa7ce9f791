"""Atomic writes and cached JSON values of `sharesd_files`."""

from __future__ import annotations

import hashlib
import json
import logging
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import sharesd_files
from sharesd_files import JsonCache, atomic_files, atomic_path, atomic_write, cache_root, file_hash, made_once


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "new" / "x.txt"
    atomic_write(path, "é\n", durable=durable)
    assert path.read_bytes() == "é\n".encode() and names(path.parent) == ["x.txt"]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)  # no private file of mkstemp
    with atomic_path(path, durable=durable) as fresh:
        fresh.write_bytes(b"\0")
        assert path.read_bytes() == "é\n".encode() and fresh.suffix == ".txt"
    assert path.read_bytes() == b"\0" and names(path.parent) == ["x.txt"]


def test_several_files_and_folders_move_together_and_nothing_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="full"), atomic_files(tmp_path) as scratch:
        (scratch / "a").write_text("new")
        (scratch / "b").write_text("new")
        raise OSError("full")
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"
    with atomic_files(tmp_path) as scratch:
        (scratch / "folder").mkdir()
        (scratch / "folder" / "b").write_text("2")
        (scratch / "c").touch()
    assert names(tmp_path) == ["a", "c", "folder"] and (tmp_path / "folder" / "b").read_text() == "2"


def test_a_file_is_made_by_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x"
    made: list[int] = []

    def make(i: int) -> None:
        with made_once(path):
            if not path.exists():
                made.append(i)
                path.touch()

    with ThreadPoolExecutor() as pool:
        with made_once(path):
            calls = [pool.submit(make, i) for i in range(3)]
            assert not wait(calls, timeout=0.1).done and not made
        wait(calls)
    with made_once(Path("/proc/none/x")):  # where no lock can be made
        assert len(made) == 1 and names(path.parent) == ["x"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JsonCache:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    return JsonCache("settings", "costs", ("model", 1))


def test_values_are_cached_by_key(cache: JsonCache) -> None:
    assert cache.load(float) is None
    file = cache.save(2)
    assert file.parent == cache_root() / "settings" and cache.load(float) == 2.0
    assert JsonCache("settings", "costs", ("model", 1)).load(float) == 2.0
    assert JsonCache("settings", "costs", ("model", 2)).load(float) is None
    assert cache.with_key(4).load(float) is None and names(file.parent) == [file.name]
    cache.with_key(4).save(3)
    assert cache.with_key(4).load(float) == 3.0 and cache.load(float) == 2.0


DAMAGED = [b"", b"[]", b"\xff", b"[" * 100_000, b'{"tries": 1}', b'{"key": "other", "value": 1}', b"value"]


@pytest.mark.parametrize("content", DAMAGED)
def test_an_old_or_damaged_form_is_made_anew(content: bytes, cache: JsonCache, caplog: Any) -> None:
    file = cache.save(1)
    if content == b"value":
        content = json.dumps({**json.loads(file.read_text()), "value": "x"}).encode()
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cache.load(float) is None
    assert caplog.text.count(f"{file} cannot be read and is replaced") == 1
    cache.save(5)
    assert cache.load(float) == 5.0


@pytest.mark.usefixtures("cache")
def test_hashes_are_those_of_sha256sum_and_of_large_files_kept_until_they_change(
    tmp_path: Path, monkeypatch: Any
) -> None:
    paths = [tmp_path / "b.json", tmp_path / "a.bin"]
    for path in paths:
        path.write_bytes(path.name.encode())
    said = subprocess.run(["sha256sum", "a.bin", "b.json"], cwd=tmp_path, capture_output=True, check=True).stdout
    assert said.decode().split()[0] == file_hash(paths[1])
    assert sharesd_files.files_hash(paths) == hashlib.sha256(said).hexdigest()
    monkeypatch.setattr(sharesd_files, "KEPT_BYTES", 4)
    path = tmp_path / "weights"
    path.write_bytes(b"abcd")
    first = file_hash(path)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert file_hash(path) == first
    path.write_bytes(b"abce")
    assert file_hash(path) == hashlib.sha256(b"abce").hexdigest() != first
