"""File with the records of all blocks of a model.

    header   JSON: format number, key of the content, description of the weights; padded to whole pages
    table    8 bytes per block: 1 if its record is written, and the record's CRC-32; padded to whole pages
    records  one after the other, in the order of the blocks

Records are written once, block by block, into a `.part` file. A later start writes the blocks that are missing: a
record is on the disk before its entry in the table. The complete file is renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from offload.block_layout import PAGE, RecordLayout
from offload.plan import show_bytes
from offload.transfer import LinkError
from sharesd_files import sync_folder

FORMAT = 1
"""Format number of the file; increment it if the format changes."""
_ENTRY = struct.Struct("<II")
_MARGIN_BYTES = 64 * 10**6
"""Disk space left free."""


class StoreError(ValueError, LinkError):
    """Unusable block file; the message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class Record:
    """Position and checksum of a block's record in the file."""

    block: int
    offset: int
    nbytes: int
    checksum: int
    """CRC-32 of the record's bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreContent:
    """Content of a block file; equal contents have the same file name."""

    what: Mapping[str, object]
    """Description of the weights, as JSON.

    It includes all that determines the weights' values and order.
    """
    layouts: tuple[RecordLayout, ...]
    """Layout of each block's record."""

    @property
    def num_blocks(self) -> int:
        """Number of records."""
        return len(self.layouts)

    @property
    def key(self) -> str:
        """SHA-256 of the content's fields."""
        fields = {"what": self.what, "layouts": [layout.to_json() for layout in self.layouts]}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def path(self, folder: Path) -> Path:
        """Return the file's path in a folder."""
        return folder / f"blocks-{self.key[:16]}.store"

    @property
    def header(self) -> bytes:
        """Header of the file, padded to whole pages."""
        fields = {"format": FORMAT, "key": self.key, "what": self.what}
        text = json.dumps(fields, sort_keys=True).encode() + b"\n"
        return text.ljust(_pages(len(text)), b" ")

    @property
    def first_record(self) -> int:
        """Offset of the first record: bytes of header and table."""
        return len(self.header) + _pages(self.num_blocks * _ENTRY.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.offset(self.num_blocks)

    def offset(self, block: int) -> int:
        """Return the offset of a block's record."""
        return self.first_record + sum(layout.record_bytes for layout in self.layouts[:block])


class Store:
    """Complete block file, opened for reading."""

    def __init__(self, path: Path, content: StoreContent, checksums: list[int]) -> None:
        self.path = path
        sizes = (layout.record_bytes for layout in content.layouts)
        self.records = tuple(
            Record(i, content.offset(i), size, checksum)
            for i, (size, checksum) in enumerate(zip(sizes, checksums, strict=True))
        )

    def read(self, block: int, slot: Tensor) -> None:
        """Read a record into host memory (uint8 [record_bytes]).

        Raises StoreError if the file is too short or the checksum differs.
        """
        record, memory, done = self.records[block], slot.numpy().data, 0
        with self.path.open("rb", buffering=0) as file:
            while done < record.nbytes:
                count = os.preadv(file.fileno(), [memory[done:]], record.offset + done)
                if not count:
                    raise StoreError(f"{self.path} ends within block {block}; delete it, and it will be written again")
                done += count
            os.posix_fadvise(file.fileno(), record.offset, record.nbytes, os.POSIX_FADV_DONTNEED)
        self.check(block, slot)

    def check(self, block: int, slot: Tensor) -> None:
        """Raise StoreError if the slot's checksum is not that of the record.

        The slot is in host memory.
        """
        if _checksum(slot) != self.records[block].checksum:
            raise StoreError(
                f"{self.path} is damaged: block {block} does not have its checksum; delete it, and it will be written "
                "again"
            )


def open_store(folder: Path, content: StoreContent) -> Store | None:
    """Return the file with this content, or None if there is none.

    Raises StoreError if the file is unusable. A record's checksum is compared when the record is read.
    """
    path = content.path(folder)
    try:
        with path.open("rb") as file:
            header, size = file.read(len(content.header)), file.seek(0, os.SEEK_END)
            _check_header(path, header, content)
            if size != content.nbytes:
                raise StoreError(
                    f"{path} has {size} bytes and should have {content.nbytes}: it was cut short; delete it, and it "
                    "will be written again"
                )
            entries = _read_table(file.fileno(), content)
    except FileNotFoundError:
        return None
    if not all(done for done, _ in entries):
        raise StoreError(f"{path} is damaged: its table lacks blocks; delete it, and it will be written again")
    return Store(path, content, [checksum for _, checksum in entries])


class Writer:
    """Context manager that writes the missing blocks of a file.

    `finish` returns the complete file.
    """

    def __init__(self, folder: Path, content: StoreContent) -> None:
        """Create or continue a file.

        Raises StoreError if the disk has too little space, or if another process writes the same file.
        """
        self._content = content
        self._path = content.path(folder)
        self._part = self._path.with_suffix(".part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _unwritable(self._part, error) from error
        try:
            self._lock()
            try:
                entries = self._begun()
            except OSError as error:
                raise _unwritable(self._part, error) from error
            self.missing = [block for block, (done, _) in enumerate(entries) if not done]
            """Blocks still to be written."""
            self._check_space(folder)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def write(self, block: int, slot: Tensor) -> None:
        """Write a block's record durably to the disk.

        The slot is uint8 [record_bytes], in host memory.
        """
        assert block in self.missing and slot.nbytes == self._content.layouts[block].record_bytes
        offset, place = self._content.offset(block), len(self._content.header) + block * _ENTRY.size
        try:
            _write(self._file, slot.numpy().data, offset)
            os.fdatasync(self._file)
            os.posix_fadvise(self._file, offset, slot.nbytes, os.POSIX_FADV_DONTNEED)
            _write(self._file, memoryview(_ENTRY.pack(1, _checksum(slot))), place)
        except OSError as error:
            raise _unwritable(self._part, error) from error
        self.missing.remove(block)

    def finish(self) -> Store:
        """Rename the complete file, and return it for reading."""
        assert not self.missing, f"blocks {self.missing} are not written"
        checksums = [checksum for _, checksum in _read_table(self._file, self._content)]
        os.fsync(self._file)
        self._part.replace(self._path)
        sync_folder(self._path.parent)
        return Store(self._path, self._content, checksums)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{self._part} is being written by another process; wait for it") from None

    def _begun(self) -> list[tuple[int, int]]:
        """Return the table of the unfinished file.

        A file of another size or header is replaced by an empty one.
        """
        content = self._content
        whole = os.fstat(self._file).st_size == content.nbytes
        if whole and os.pread(self._file, len(content.header), 0) == content.header:
            return _read_table(self._file, content)
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, content.nbytes)
        _write(self._file, memoryview(content.header), 0)
        return _read_table(self._file, content)

    def _check_space(self, folder: Path) -> None:
        needed = sum(self._content.layouts[block].record_bytes for block in self.missing)
        free = shutil.disk_usage(folder).free - _MARGIN_BYTES
        if free < needed:
            raise StoreError(
                f"{folder} has {show_bytes(max(0, free))} free and the blocks need "
                f"{show_bytes(needed, round_up=True)}; free some space there, or give --offload-dir on another disk"
            )


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be written ({error.strerror}); free some space there, or give --offload-dir on another disk"
    )


def _check_header(path: Path, header: bytes, content: StoreContent) -> None:
    if header == content.header:
        return
    try:
        found = json.loads(header)["format"]
    except (ValueError, KeyError, TypeError):
        found = None
    if isinstance(found, int) and found != FORMAT:
        raise StoreError(
            f"{path} was written by another version (format {found}, this one reads {FORMAT}); delete it, and it will "
            "be written again"
        )
    raise StoreError(f"{path} is damaged: its header is not what was written; delete it, and it will be written again")


def _read_table(file: int, content: StoreContent) -> list[tuple[int, int]]:
    """Return (1 if written else 0, checksum) for every block."""
    return list(_ENTRY.iter_unpack(os.pread(file, content.num_blocks * _ENTRY.size, len(content.header))))


def _write(file: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(file, memory[done:], offset + done)


def _checksum(slot: Tensor) -> int:
    return zlib.crc32(slot.numpy().data)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
