"""Records of blocks: where their tensors lie, and the file that keeps them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload import block_file as store_module
from offload.block_file import StoreContent, StoreError, Writer, open_store
from offload.block_layout import ALIGNMENT, PAGE, RecordLayout, fill, views
from offload.transfer import host_memory
from tests.helpers.paths import ROOT

BLOCKS = 5


def test_a_record_gives_back_its_tensors() -> None:
    dice = torch.Generator().manual_seed(0)
    tensors = {
        "attn.qkv.weight": torch.randn(3, 5, 7, generator=dice).bfloat16(),
        "attn.o.weight": torch.randn(11, generator=dice).double(),
        "mlp.down.weight": torch.randint(0, 256, (1000, 3), generator=dice, dtype=torch.uint8),
    }
    layout = RecordLayout.of({name: tensor.to("meta") for name, tensor in tensors.items()})
    assert layout.record_bytes % PAGE == 0 and all(place.offset % ALIGNMENT == 0 for place in layout.places)
    slot = torch.full((layout.record_bytes,), 255, dtype=torch.uint8)
    fill(slot, layout, tensors)
    found = views(slot, layout)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert found[name].untyped_storage().data_ptr() == slot.untyped_storage().data_ptr()
    held = sum(tensor.view(torch.uint8).long().sum().item() for tensor in tensors.values())
    assert slot.long().sum().item() == held, "something lies between the tensors"


def _content(what: str = "weights") -> StoreContent:
    tensors = {"attn.qkv.weight": torch.empty(50, 60, device="meta"), "mlp.down.weight": torch.empty(9, device="meta")}
    return StoreContent(what={"name": what}, layouts=(RecordLayout.of(tensors),) * BLOCKS)


def _record(block: int) -> torch.Tensor:
    slot, dice = host_memory(_content().layouts[block].record_bytes), torch.Generator().manual_seed(block)
    return slot.random_(0, 256, generator=dice)


def _write(folder: Path, blocks: list[int] | None = None) -> None:
    with Writer(folder, _content()) as writer:
        for block in blocks or list(writer.missing):
            writer.write(block, _record(block))
        if not writer.missing:
            writer.finish()


def _read_all(folder: Path) -> None:
    store = open_store(folder, _content())
    for record in store.records:
        slot = host_memory(record.nbytes)
        assert record.offset % PAGE == 0
        store.read(record.block, slot)
        assert torch.equal(slot, _record(record.block))


def test_records_have_bytes_of_their_own(tmp_path: Path) -> None:
    layouts = tuple(RecordLayout.of({"w": torch.empty(size, device="meta")}) for size in (5, 5000, 2000))
    content = StoreContent(what={}, layouts=layouts)
    records = [torch.full((layout.record_bytes,), i, dtype=torch.uint8) for i, layout in enumerate(layouts)]
    with Writer(tmp_path, content) as writer:
        for block in (1, 2, 0):
            writer.write(block, records[block])
        store = writer.finish()
    assert [record.nbytes for record in store.records] == [PAGE, 5 * PAGE, 2 * PAGE]
    assert store.path.stat().st_size == content.nbytes == content.first_record + 8 * PAGE
    for record, wanted in zip(store.records, records, strict=True):
        slot = host_memory(record.nbytes)
        store.read(record.block, slot)
        assert torch.equal(slot, wanted)


def test_a_store_is_found_again_by_what_it_holds(tmp_path: Path) -> None:
    assert open_store(tmp_path, _content()) is None
    _write(tmp_path, [3, 0, 4, 1, 2])
    _read_all(tmp_path)
    assert open_store(tmp_path, _content("others")) is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".store"]
    a, b = (StoreContent(what=what, layouts=()) for what in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert (a.key, a.header) == (b.key, b.header)


def test_nothing_has_its_name_before_it_is_whole_and_what_is_missing_is_added(tmp_path: Path) -> None:
    _write(tmp_path, [1, 4])
    assert open_store(tmp_path, _content()) is None
    with Writer(tmp_path, _content()) as writer:
        assert writer.missing == [0, 2, 3]
        with pytest.raises(StoreError, match="is being written by another process"):
            Writer(tmp_path, _content())
    _write(tmp_path)
    _read_all(tmp_path)


@pytest.mark.subprocess
def test_killed_while_writing_nothing_is_lost(tmp_path: Path) -> None:
    """By a signal that no program can handle, in the middle of the third record."""
    code = f"""
import os, sys
sys.path[:0] = {[str(ROOT)]!r}
from offload import block_file as store
from tests.offload.test_offload_store import Path, Writer, _content, _record
with Writer(Path({str(tmp_path)!r}), _content()) as writer:
    writer.write(0, _record(0))
    writer.write(1, _record(1))
    def half(file, memory, offset):
        os.pwrite(file, memory[: len(memory) // 2], offset)
        os.kill(os.getpid(), 9)
    store._write = half
    writer.write(2, _record(2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    with Writer(tmp_path, _content()) as writer:
        assert writer.missing == [2, 3, 4]
    _write(tmp_path)
    _read_all(tmp_path)


def _spoil(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_files_that_are_damaged_are_told_and_not_used(tmp_path: Path) -> None:
    content = _content()
    path, table = content.path(tmp_path), len(content.header)
    other = content.header.replace(b'"format": 1', b'"format": 2')
    spoils = {
        "was cut short": lambda: os.truncate(path, content.nbytes - 1),
        "is damaged: its header": lambda: _spoil(path, 3, b"x"),
        "is damaged: its table lacks": lambda: _spoil(path, table + 8, bytes(4)),
        r"was written by another version \(format 2, this one reads 1\)": lambda: _spoil(path, 0, other),
    }
    for message, spoil in spoils.items():
        _write(tmp_path)
        spoil()
        with pytest.raises(StoreError, match=f"{message}.*; delete it"):
            open_store(tmp_path, content)
        path.unlink()
    for offset in (content.offset(3) + 7, table + 3 * 8 + 4):  # in the record, or its checksum
        _write(tmp_path)
        _spoil(path, offset, bytes([path.read_bytes()[offset] ^ 1]))
        store, slot = open_store(tmp_path, content), host_memory(content.layouts[3].record_bytes)
        store.read(2, slot)
        with pytest.raises(StoreError, match="block 3 does not have its checksum"):
            store.read(3, slot)
        path.unlink()


def test_free_space_is_looked_at_first_and_what_another_version_began_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, [0, 1])
    (part,) = tmp_path.iterdir()
    _spoil(part, 0, _content().header.replace(b'"format": 1', b'"format": 2'))
    with Writer(tmp_path, _content()) as writer:
        assert writer.missing == list(range(BLOCKS))
    _write(tmp_path, [0, 1])
    need = 3 * _content().layouts[0].record_bytes + store_module._MARGIN_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=need - 1))
    with pytest.raises(StoreError, match="free and the blocks need 36.9 kB; free some space"):
        Writer(tmp_path, _content())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=need))
    _write(tmp_path)
    _read_all(tmp_path)
