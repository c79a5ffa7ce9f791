"""Who imports whom, that every module imports on a machine without a GPU, and that the options are quick to import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmark.__main__ import COMMANDS as BENCHMARKS
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint

LOW = {"compile", "quant", "offload", "multigpu"}
ALLOWED = {package: {package} for package in LOW} | {
    "sharesd": {"sharesd", *LOW},
    "benchmark": {"benchmark", "sharesd", *LOW},
    "train": {"train", "sharesd", *LOW},
    "serve": {"serve", "sharesd", *LOW},
}
"""Package -> packages of this project that it may import: arrows go down only (docs/explanation/architecture.md)."""
LEAVES = {"sharesd_files"}
"""Modules next to the packages that all may import; they import nothing of the project."""
ORDER = """
    field_types | config shadowing devices data | sampling_params | kvcache | speculation | models | sampling
    | drafters records | engine | weights | execution parallel | startup | runtime | llm | conversations | cli
    | reports __main__
"""
ROOMS = [rooms.split() for rooms in ORDER.split("|")]
"""Rooms of `sharesd`, lowest first: each imports from lower ones alone. `__init__` passes names on."""
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
FILES = sorted(path for package in ALLOWED for path in (ROOT / package).rglob("*.py"))
SCRIPTS = sorted(path for folder in ("scripts", "examples") for path in (ROOT / folder).glob("*.py"))
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in FILES
    if path.name != "__main__.py"
    and not any(
        re.search(rf"^(import|from) {package}\b", path.read_text(), re.M) and not find_spec(package)
        for package in ("triton", "ray")
    )
]


class Parsed(NamedTuple):
    imports: list[ast.Import | ast.ImportFrom]
    classes: list[str]
    unpacked: list[int]
    """Lines that take five or more parts of one value by position."""


@cache
def parsed(source: str) -> Parsed:
    """What tests ask about a file, wherever it stands."""
    found = Parsed([], [], [])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append(node)
        elif isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None) or getattr(node, "iter", None)
        large = (target for target in targets if isinstance(target, ast.Tuple) and len(target.elts) > 4)
        found.unpacked.extend(target.lineno for target in large if not isinstance(value, ast.Tuple))
    return found


def imports_of(source: str, path: str) -> Iterator[tuple[int, str, bool]]:
    """Line, module and whether names are taken from it, of every import, wherever it stands."""
    for node in parsed(source).imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        else:
            assert node.level == 0, f"{path}:{node.lineno} has a relative import; write the package's name"
            assert node.module is not None
            yield node.lineno, node.module, True


def wrong_imports(source: str, path: str, allowed: set[str]) -> list[str]:
    wrong = []
    for line, module, takes_names in imports_of(source, path):
        package = module.partition(".")[0]
        if package in ALLOWED and package not in allowed:
            wrong.append(f"{path}:{line} imports {module}")
        if module == "compile" or (package == "compile" and not takes_names):
            wrong.append(f"{path}:{line} hides the builtin compile; write `from compile.x import y`")
    return wrong


def test_imports_go_down_only() -> None:
    wrong: list[str] = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        wrong += wrong_imports(path.read_text(encoding="utf-8"), name, ALLOWED[name.split("/")[0]])
    for leaf in LEAVES:
        wrong += wrong_imports((ROOT / f"{leaf}.py").read_text(encoding="utf-8"), f"{leaf}.py", set())
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "package", "num"),
    [
        ("import torch\nfrom compile.graphs import Replayed\nfrom quant.switch_linear import Switch", "sharesd", 0),
        ("from quant.switch_linear import Switch", "compile", 1),
        ("def f():\n    from sharesd.engine.engine import Engine", "quant", 1),
        ("if True:\n    import benchmark.mtbench", "sharesd", 1),
        ("import compile", "sharesd", 1),
        ("import compile.cuda_graphs", "sharesd", 1),
        ("from compile import graphs", "sharesd", 1),
        ("import quantiles, sharesdx", "compile", 0),
    ],
)
def test_wrong_imports_are_found(source: str, package: str, num: int) -> None:
    assert len(wrong_imports(source, "file.py", ALLOWED[package])) == num


def upward_imports(source: str, room: str) -> list[str]:
    """Return the modules of `sharesd` that a file of this room imports from rooms that are not lower."""
    modules = []
    for node in parsed(source).imports:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        else:
            package = node.module == "sharesd"
            modules += [f"sharesd.{alias.name}" for alias in node.names] if package else [str(node.module)]
    rooms = {module: module.split(".")[1] for module in modules if module.startswith("sharesd.")}
    return [
        module for module, used in rooms.items() if used in LEVELS and used != room and LEVELS[used] >= LEVELS[room]
    ]


def test_rooms_import_from_lower_rooms() -> None:
    wrong: dict[str, list[str]] = {}
    rooms: set[str] = set()
    for path in (ROOT / "sharesd").rglob("*.py"):
        room = path.relative_to(ROOT / "sharesd").parts[0].removesuffix(".py")
        if room != "__init__":
            rooms.add(room)
            wrong[str(path)] = upward_imports(path.read_text(encoding="utf-8"), room)
    assert rooms == {*LEVELS}
    assert {path: modules for path, modules in wrong.items() if modules} == {}


@pytest.mark.parametrize(
    ("source", "room", "num"),
    [
        ("from sharesd.kvcache.static import StaticKVCache", "engine", 0),
        ("def f():\n    from sharesd.engine.engine import Engine", "kvcache", 1),
        ("from sharesd import data, runtime", "startup", 1),
        ("import sharesd.parallel.ranks", "execution", 1),
        ("from sharesd.engine.stats import Stats", "engine", 0),
    ],
)
def test_upward_imports_are_found(source: str, room: str, num: int) -> None:
    assert len(upward_imports(source, room)) == num


def test_relative_imports_are_found() -> None:
    with pytest.raises(AssertionError, match="file.py:1 has a relative import"):
        wrong_imports("from . import engine", "file.py", ALLOWED["sharesd"])


def uses_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> those that it imports, late imports and those for types included."""
    uses: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in parsed(path.read_text(encoding="utf-8")).imports:
            if isinstance(node, ast.Import):
                uses[name] |= {alias.name for alias in node.names}
            else:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                uses[name] |= {full if full in modules else str(node.module) for full in names}
    return {name: found & modules.keys() for name, found in uses.items()}


@pytest.mark.smoke
def test_no_modules_import_each_other() -> None:
    """In a circle of any length; `sharesd/__init__.py` apart, which passes names on when they are asked for."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    del modules["sharesd"]
    uses = uses_of(modules)
    assert "sharesd.models.architectures" in uses["sharesd.models.loader"], "packages count as modules"
    assert len(list(TopologicalSorter(uses).static_order())) == len(modules)
    with pytest.raises(CycleError):
        TopologicalSorter({**uses, "sharesd.models.decoder_config": {"sharesd.models.architectures"}}).prepare()


def test_no_two_classes_share_a_name() -> None:
    """Else a search for one finds the other, too."""
    names = [name for path in (*FILES, *SCRIPTS) for name in parsed(path.read_text(encoding="utf-8")).classes]
    assert [name for name, times in Counter(names).items() if times > 1] == []


def test_parts_of_large_values_have_names() -> None:
    wrong = {str(path): parsed(path.read_text(encoding="utf-8")).unpacked for path in (*FILES, *SCRIPTS)}
    assert {path: lines for path, lines in wrong.items() if lines} == {}
    five = "a, b, c, d, e = f()\nfor a, b, c, d, *e in f: pass\n[a for a, b, c, d, e in f]"
    assert parsed(five).unpacked == [1, 2, 3]
    assert parsed("a, b, c, d = f()\na, b, c, d, e = 1, 2, 3, 4, 5").unpacked == []


def run_python(code: str) -> str:
    """Output of a fresh interpreter, run from the repository root."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.subprocess
def test_every_module_imports_without_a_gpu() -> None:
    """In one process in which CUDA shows no device. GPU-only packages must not be touched by an import."""
    assert len(MODULES) > 30
    code = (
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "import importlib, sys\n"
        f"for name in {MODULES!r}: importlib.import_module(name)\n"
        "print([name for name in ('gemlite', 'bitsandbytes', 'openvino_genai', 'llama_cpp') if name in sys.modules])"
    )
    assert run_python(code) == "[]"


OPTIONS = ["sharesd", "sharesd.config", "quant.config", "sharesd.cli.options", "serve.server", ", ".join(BENCHMARKS)]


@pytest.mark.parametrize("module", OPTIONS)
def test_options_are_quick_to_import(module: str) -> None:
    """`--help` and a mistyped flag shall not wait for torch, and a server shall listen before it is there."""
    heavy = ("torch", "transformers", "numpy", "hqq")
    assert run_python(f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])") == "[]"


@pytest.mark.subprocess
def test_loading_waits_for_nothing_that_native_decoders_do_not_need(tmp_path: Path) -> None:
    """Each of these takes a second or more to import."""
    heavy = ("transformers", "torch._dynamo", "sympy", "hqq", "triton")
    folder = make_checkpoint(tmp_path / "model")
    code = (
        "import sys, sharesd.runtime, torch\n"
        "from sharesd.models.loader import load_decoder\n"
        f"load_decoder(sharesd.runtime.Path({str(folder)!r}), dtype=torch.float32)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert run_python(code) == "[]"
