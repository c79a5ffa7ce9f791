"""Sizes of the project: lines and files, what of it a run imports and calls, and imports that stand in functions.

    python scripts/measures.py [--json]

A run is `LLM(mode="share")` on a tiny random model, on a CPU. The engine alone is `import sharesd.engine.engine`.
Called are files of which a function runs: from `LLM(...)` to the first token, and in a round with a draft.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sharesd", "compile", "quant", "offload", "multigpu")
PROGRAMS = ("benchmark", "train", "serve")
SHARE = """
from sharesd import LLM, SamplingParams

with LLM({folder!r}, mode="share", device="cpu", max_context=64) as llm:
    llm.generate("abcabc", SamplingParams(max_new_tokens=4))
"""
CALLED = """
import sys, threading

def note(frame, event, arg):
    if event == "call" and frame.f_code.co_name != "<module>":
        called.add(frame.f_code.co_filename)

def profile(function):
    threading.setprofile(function)
    sys.setprofile(function)

called = set()
profile(note)
from sharesd import LLM, SamplingParams

llm = LLM({folder!r}, mode="share", device="cpu", max_context=64, num_draft=3)
chunks = llm.stream("abcabc", SamplingParams(max_new_tokens=40, ignore_eos=True))
next(chunks)
if {in_round}:
    next(chunks), called.clear(), next(chunks)
profile(None)
print(*called, sep=chr(10))
"""
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
ENGINE = "import sharesd.engine.engine"
LIST = "\nimport sys\nprint('\\n'.join(str(getattr(module, '__file__', '')) for module in [*sys.modules.values()]))"


def main(argv: list[str]) -> int:
    """Print the table, or JSON."""
    with tempfile.TemporaryDirectory() as folder:
        measures = {
            "sharesd/": size(sources("sharesd")),
            "product, all packages": size(path for each in (*PACKAGES, *PROGRAMS) for path in sources(each)),
            "tests/": size(sources("tests")),
            "imported by a share run through LLM": size(ours(SHARE.format(folder=tiny_model(folder)) + LIST)),
            "imported by the engine alone": size(ours(ENGINE + LIST)),
            "called before the first token": size(ours(CALLED.format(folder=folder, in_round=False))),
            "called in a round": size(ours(CALLED.format(folder=folder, in_round=True))),
            "files with imports in functions, and these imports": late_imports(),
        }
    if "--json" in argv:
        print(json.dumps(measures))
        return 0
    print("| measure | files | lines |\n| --- | ---: | ---: |")
    for name, (files, lines) in measures.items():
        print(f"| {name} | {files:,} | {lines:,} |")
    return 0


def tiny_model(folder: str) -> str:
    """Write a checkpoint in a process of its own; return its folder."""
    code = "import pathlib, sys; from benchmark.studies.oracle_checkpoint import write_oracle as write; "
    subprocess.run([sys.executable, "-c", f"{code}write(pathlib.Path(sys.argv[1]))", folder], cwd=ROOT, check=True)
    return folder


def sources(package: str) -> list[Path]:
    """Return the Python files of a package that are committed or new."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{package}/*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def ours(code: str) -> list[Path]:
    """Return our files among the lines that `code` prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    paths = {Path(line) for line in done.stdout.splitlines() if line.endswith(".py")}
    return sorted(path for path in paths if any(path.is_relative_to(ROOT / package) for package in PACKAGES))


def late_imports() -> tuple[int, int]:
    """Return the number of files with imports in functions, and that of these imports, over all packages."""
    counts = []
    for path in (path for package in (*PACKAGES, *PROGRAMS) for path in sources(package)):
        functions = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, FUNCTION))
        late = {node for each in functions for node in ast.walk(each) if isinstance(node, ast.Import | ast.ImportFrom)}
        counts.append(len(late))
    return sum(map(bool, counts)), sum(counts)


def size(files: Iterable[Path]) -> tuple[int, int]:
    """Return the number of files, and that of their lines."""
    lines = [len(path.read_text("utf-8").splitlines()) for path in files]
    return len(lines), sum(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
