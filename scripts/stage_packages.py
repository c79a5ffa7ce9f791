"""Copies installed packages into a folder, to be packed: python stage_packages.py FOLDER CUDA NAME...

Of bitsandbytes the libraries for other devices stay behind.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

OPTIONAL = ("gemlite", "einops")
"""Left out, with a word, where they are not installed."""


def main(folder: Path, cuda: str, names: list[str]) -> int:
    """Returns the exit status."""
    for name in names:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            if name not in OPTIONAL:
                print(f"error: {name} is not installed here; make the environment first", file=sys.stderr)
                return 2
            print(f"{name} is not installed here, and not packed", file=sys.stderr)
            continue
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            if is_wanted(str(file), cuda) and source.is_file():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, folder / file)
        print(f"{name} {found.version}")
    if "bitsandbytes" in names and not list(folder.glob(f"bitsandbytes/libbitsandbytes_cuda{cuda}.*")):
        print(f"error: bitsandbytes has no library for CUDA {cuda}; name another version", file=sys.stderr)
        return 2
    return 0


def is_wanted(file: str, cuda: str) -> bool:
    """Not what lies outside the packages (programs), what Python makes again, and libraries for other devices."""
    if file.startswith("..") or "__pycache__" in file:
        return False
    library = re.search(r"libbitsandbytes_([a-z]+)(\d*)", file)
    return library is None or library[1] == "cpu" or (library[1], library[2]) == ("cuda", cuda)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
