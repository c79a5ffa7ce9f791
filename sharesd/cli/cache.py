"""`cache info` and `cache clear`, which never touch files of other programs."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sharesd.cli.console import console, print_line
from sharesd_files import SCRATCH, cache_root

_KEY = "[0-9a-f]" * 16
_LEFT_OVERS = (f"{SCRATCH}*", "partial-*", "tmp????????", f"hqq-{_KEY}*.tmp", f".*-{_KEY}.json.*")
"""Patterns of files that killed processes leave behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePart:
    """One folder of the cache."""

    holds: str
    names: tuple[str, ...]


PARTS = {
    "native": CachePart(holds="CPU kernels", names=(f"kernels-{_KEY}.so",)),
    "checkpoints": CachePart(holds="converted models", names=(f"*-{_KEY}", f"*-{_KEY}-stored")),
    "quant": CachePart(holds="quantized weights", names=(f"hqq-{_KEY}.safetensors", f"calibrated-{_KEY}")),
    "records": CachePart(holds="stored weights in the layout of CPU kernels", names=(f"records-{_KEY}.bin",)),
    "offload": CachePart(holds="blocks offloaded to disk", names=(f"blocks-{_KEY}.store", f"blocks-{_KEY}.part")),
    "settings": CachePart(holds="measured settings", names=(f"*-{_KEY}*.json",)),
    "tiles": CachePart(holds="tiles measured on GPUs", names=("*.json", "low-bits-*.txt")),
    "inductor": CachePart(holds="code compiled by Inductor", names=("*",)),
    "triton": CachePart(holds="kernels compiled by Triton", names=("*",)),
    "nvrtc": CachePart(holds="kernels compiled by NVRTC", names=(f"*-{_KEY}.cubin",)),
    "openvino": CachePart(holds="models for OpenVINO", names=(f"*-{_KEY}-*",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    part: str
    entries: tuple[Path, ...]
    num_bytes: int


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="show or delete cached files",
        description="Files that ShareSD caches; SHARESD_CACHE_DIR sets the folder.",
    )
    parser.set_defaults(parser=parser)
    actions = parser.add_subparsers(title="actions", required=True, metavar="info | clear")
    info = actions.add_parser("info", help="show the cache folder and its parts", description="Show the cache folder.")
    info.set_defaults(run=lambda args: show_info(), parser=info)
    clear = actions.add_parser(
        "clear",
        help="delete all of it, or one part",
        description="Delete cached files. They are created again when needed.",
    )
    clear.set_defaults(run=lambda args: clear_cache(args.part, yes=args.yes), parser=clear)
    clear.add_argument("--part", choices=PARTS, help="delete this part only")
    clear.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def contents(root: Path, part: str) -> Contents:
    entries = sorted({path for pattern in (*PARTS[part].names, *_LEFT_OVERS) for path in (root / part).glob(pattern)})
    return Contents(part=part, entries=tuple(entries), num_bytes=sum(map(_num_bytes, entries)))


def show_info() -> int:
    """Print the cache folder and a table of its parts."""
    root = _root()
    print_line(f"cache folder: {root}")
    console.print(_table([contents(root, part) for part in PARTS]))
    return 0


def clear_cache(part: str | None = None, *, yes: bool = False) -> int:
    """Delete entries after confirmation; ValueError if stdin is not a terminal."""
    root = _root()
    found = [contents(root, name) for name in ([part] if part else PARTS)]
    found = [each for each in found if each.entries]
    if not found:
        print_line(f"nothing to delete in {root / part if part else root}")
        return 0
    print_line(f"to delete from {root}:")
    console.print(_table(found))
    if not yes:
        if not sys.stdin.isatty():
            raise ValueError("cannot ask for confirmation: stdin is not a terminal; pass --yes")
        if console.input("delete? \\[y/N] ").strip().lower() not in ("y", "yes"):
            console.print("nothing was deleted")
            return 1
    for each in found:
        for entry in each.entries:
            _delete(entry)
        folder = root / each.part
        if not any(folder.iterdir()):
            folder.rmdir()
    console.print(f"deleted {_size(sum(each.num_bytes for each in found))}", highlight=False)
    return 0


def _root() -> Path:
    return cache_root()


def _table(rows: list[Contents]) -> Table:
    table = Table(box=None, header_style="")
    table.add_column("part")
    table.add_column("holds")
    table.add_column("entries", justify="right")
    table.add_column("size", justify="right")
    for row in rows:
        table.add_row(row.part, PARTS[row.part].holds, str(len(row.entries)), _size(row.num_bytes))
    if len(rows) > 1:
        total = sum(row.num_bytes for row in rows)
        table.add_row("total", "", str(sum(len(row.entries) for row in rows)), _size(total), style="bold")
    return table


def _num_bytes(entry: Path) -> int:
    """Return bytes of a file or folder; links count as themselves."""
    if entry.is_symlink() or not entry.is_dir():
        return entry.lstat().st_size
    return sum(path.lstat().st_size for path in entry.rglob("*") if path.is_symlink() or not path.is_dir())


def _delete(entry: Path) -> None:
    if entry.is_symlink() or not entry.is_dir():
        entry.unlink()
    else:
        shutil.rmtree(entry)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
