"""The diagram of the rooms of `sharesd` in docs/explanation/architecture.md, drawn from the imports.

    python scripts/room_diagram.py           write it into the page
    python scripts/room_diagram.py --check   exit status 1 if the page is out of date

An arrow is an import. Arrows that follow from others are left out: A -> C, where A -> B and B -> C.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/explanation/architecture.md"
PACKAGE = "sharesd"
LEFT_OUT = {"__init__", "__main__", "shadowing"}
"""Modules that start the package and are read by nobody."""
_DIAGRAM = re.compile(r"(<!-- rooms: [^>]*-->\n).*?(<!-- /rooms -->)", re.DOTALL)


def imports() -> dict[str, set[str]]:
    """Return, for each folder or file of the package, those it imports."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        room = _room(file.relative_to(ROOT).with_suffix("").parts)
        modules = {module for node in ast.walk(ast.parse(file.read_text("utf-8"))) for module in _modules(node)}
        found.setdefault(room, set()).update(_room(module.split(".")) for module in modules)
    return {room: targets - {room} - LEFT_OUT for room, targets in found.items() if room not in LEFT_OUT}


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the transitive reduction of a graph without cycles."""
    below: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in below:
            below[room] = set().union(*({each} | reach(each) for each in graph.get(room, ())))
        return below[room]

    return {
        room: {each for each in targets if not any(each in reach(other) for other in targets - {each})}
        for room, targets in graph.items()
    }


def diagram() -> str:
    """Return the diagram in Mermaid's language."""
    lines = [
        f"  {_shown(room)} --> {' & '.join(map(_shown, sorted(targets)))}"
        for room, targets in sorted(reduced(imports()).items())
        if targets
    ]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```", ""])


def page() -> str:
    """Return the page with the diagram of today."""
    return _DIAGRAM.sub(lambda found: found[1] + diagram() + found[2], PAGE.read_text("utf-8"))


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        # `from sharesd import x` imports the file or folder x, if there is one
        names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == PACKAGE else [node.module]
    else:
        names = []
    return [name for name in names if name.startswith(f"{PACKAGE}.") and _is_room(name.split(".")[1])]


def _is_room(name: str) -> bool:
    return (ROOT / PACKAGE / name).is_dir() or (ROOT / PACKAGE / f"{name}.py").exists()


def _room(parts: tuple[str, ...] | list[str]) -> str:
    return parts[1]


def _shown(room: str) -> str:
    return f'{room}["{room}.py"]' if (ROOT / PACKAGE / f"{room}.py").exists() else room


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(int(text != PAGE.read_text("utf-8")))
    PAGE.write_text(text, "utf-8")
