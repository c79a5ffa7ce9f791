"""Folders in the cache stand for the sources that were given, as they are now."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sharesd_files
from sharesd.config import EngineConfig
from sharesd.models.checkpoint import content_hash, copy_texts, eos_ids, identity, source_of
from sharesd.models.conversion_cache import converted
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.hub import resolve, resolve_target
from sharesd.models.tokenizer import load_tokenizer
from sharesd_files import SCRATCH, clean_cache, file_identity, scratch_folder
from tests.helpers.gguf_files import write_gguf
from tests.helpers.quantized_folders import write_quantized
from tests.helpers.tiny_models import make_checkpoint
from tests.models.folders import edit_config
from tests.models.test_lora import adapter_of

pytestmark = pytest.mark.usefixtures("own_cache")


def template_of(folder: Path) -> str | None:
    return load_tokenizer(folder).chat_template


def prepared_by(kind: str, folder: Path) -> Callable[[Path], Path]:
    """Write a source of this kind; return what makes a folder of the cache of it."""
    write_quantized(folder, "fp8") if "fp8" in kind else make_checkpoint(folder)
    if kind == "fp8":
        return resolve
    if kind.endswith("without a key"):
        edit_config(folder, more_key=1)
        return lambda path: resolve(path, ignored=["more_key"])
    lora = str(adapter_of(folder, folder.parent / "adapter")) if kind == "adapter" else None
    quant: Any = "q8_0" if kind == "type" else None
    return lambda path: resolve_target(EngineConfig(target=str(path), target_quant=quant, lora=lora))


@pytest.mark.parametrize("kind", ["fp8", "type", "adapter", "plain without a key", "fp8 without a key"])
def test_texts_are_those_of_the_source_as_it_is_now(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "one/model"
    prepared = prepared_by(kind, folder)
    (folder / "chat_template.jinja").write_text("A")
    assert template_of(prepared(folder)) == "A"
    copy = tmp_path / "two/model"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text("B")
    assert template_of(prepared(copy)) == "B" and template_of(prepared(folder)) == "A"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("TOOLS")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (folder / "chat_template.jinja").write_text("C")
    found = load_tokenizer(prepared(folder))
    assert (found.chat_template, found.tool_template) == ("C", "TOOLS") and 7 in found.eos_ids
    assert 7 in eos_ids(prepared(folder)) and 7 not in eos_ids(prepared(copy))
    shutil.copy(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="one/model/tokenizer.json is damaged"):
        load_tokenizer(prepared(folder))
    shutil.move(tmp_path / "tokenizer.json", folder / "tokenizer.json")
    moved = folder.rename(tmp_path / "moved")
    assert template_of(prepared(moved)) == "C" and source_of(prepared(moved)) == moved
    copy_texts(prepared(moved), make_checkpoint(tmp_path / "draft"))
    assert load_tokenizer(tmp_path / "draft").tool_template == "TOOLS"


def test_a_link_to_another_folder_is_another_source(tmp_path: Path) -> None:
    """As snapshots of the hub are: folders of links, in part to the same weights."""
    write_quantized(tmp_path / "blobs", "fp8")
    snapshots = tmp_path / "models--owner--name/snapshots"
    for name in ("A", "B"):
        (snapshots / name).mkdir(parents=True)
        for file in (tmp_path / "blobs").iterdir():
            (snapshots / name / file.name).symlink_to(file)
        (snapshots / name / "chat_template.jinja").write_text(name)
    now = tmp_path / "now"
    now.symlink_to(snapshots / "A")
    first = resolve(now)
    assert template_of(first) == "A"
    now.unlink()
    now.symlink_to(snapshots / "B")
    assert (template_of(resolve(now)), template_of(first)) == ("B", "A")
    assert identity(resolve(now)) == identity(first)  # the same weights, expanded once


def test_an_edited_config_counts(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", "fp8")
    assert 7 not in eos_ids(resolve(folder))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    for i in (4, 5):
        edit_config(folder, eos_token_id=[3, i])
        assert eos_ids(resolve(folder)) == (7, 3, i)


@pytest.mark.parametrize("small", [1, 2**30])
@pytest.mark.parametrize("in_place", [True, False])
def test_bytes_of_the_same_size_and_time_are_others(
    in_place: bool, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharesd_files, "SMALL_BYTES", small)
    file = write_gguf(tmp_path / "tiny.gguf")
    folder, status = converted_folder(file), file.stat()
    before, content = (folder / "model.safetensors").read_bytes(), bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    written = file if in_place else tmp_path / "other"
    written.write_bytes(content)
    written.replace(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert (converted_folder(file) / "model.safetensors").read_bytes() != before


def test_large_files_are_not_read_for_their_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharesd_files, "SMALL_BYTES", 2)
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"ab")
    link.symlink_to(file)
    file.chmod(0)
    first = file_identity(link)
    assert first == file_identity(file) and first[:2] == [str(file.resolve()), 2]


def test_texts_and_places_do_not_change_the_hash_of_a_checkpoint(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "one/model", "fp8")
    shutil.copytree(folder, tmp_path / "two/model")
    assert content_hash(resolve(folder)) == content_hash(resolve(tmp_path / "two/model"))
    (folder / "chat_template.jinja").write_text("A")
    assert content_hash(resolve(folder)) != content_hash(resolve(tmp_path / "two/model"))


def test_a_linked_folder_that_was_changed_is_made_again(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    config = EngineConfig(target=str(folder), target_quant="q8_0")
    linked = resolve_target(config)
    before = {file.name: file.read_bytes() for file in linked.iterdir()}
    for name in ("target_quant.json", "source_folder.json", "model.safetensors"):
        (linked / name).unlink()
        (linked / name).write_text("")
        assert resolve_target(config) == linked
        assert {file.name: file.read_bytes() for file in linked.iterdir()} == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), ValueError("damaged")])
def test_what_was_begun_is_removed(error: BaseException, tmp_path: Path, own_cache: Path) -> None:
    def write(fresh: Path) -> None:
        (fresh / "model.safetensors").write_bytes(b"half")
        raise error

    (tmp_path / "source").touch()
    with pytest.raises((KeyboardInterrupt, ValueError)):
        converted(tmp_path, [tmp_path / "source"], stem="model", key=None, write=write)
    assert not list((own_cache / "checkpoints").iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from sharesd_files import scratch_folder
with scratch_folder(Path(sys.argv[1])) as scratch:
    (scratch / "half").write_text("")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_scratch_folders_of_killed_processes_are_removed_at_the_next_start(own_cache: Path) -> None:
    part = own_cache / "checkpoints"
    done = subprocess.run([sys.executable, "-c", KILLED, part])
    (left,) = part.iterdir()
    assert done.returncode == -signal.SIGKILL and left.name.startswith(SCRATCH) and (left / "half").exists()
    with scratch_folder(part) as mine:
        clean_cache()
        assert [*part.iterdir()] == [mine]
    assert not [*part.iterdir()]


def test_a_new_scratch_folder_that_another_start_removes_is_replaced(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, removed = os.open, []

    def open_late(path: Path, flags: int) -> int:
        if not removed:
            removed.append(path)
            os.rmdir(path)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", open_late)
    with scratch_folder(own_cache) as mine:
        assert removed and mine.is_dir() and mine not in removed
