"""gpu.md: what the steps found, and what could not be found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark import arguments
from benchmark.gpu.agenda import STEPS


def markdown(values: Mapping[str, Any]) -> str:
    """The report of gpu.json."""
    machine, steps = values["environment"], values["steps"]
    device = next((name for outcome in steps.values() if (name := outcome.get("found", {}).get("device"))), None)
    about = {step.name: step.about for step in STEPS}
    parts = [
        f"# ShareSD on {device or machine['cpu']}",
        f"{machine['date']}, torch {machine['torch']}, triton {machine['triton']}, gemlite {machine['gemlite']}",
        f"    {values['command']}",
        arguments.markdown_table(
            ("step", "what became of it", "seconds"),
            [[name, _state(outcome), f"{outcome.get('seconds', 0):.0f}"] for name, outcome in steps.items()],
            left=2,
        ),
    ]
    missing = {name: outcome for name, outcome in steps.items() if outcome["state"] != "done"}
    if missing:
        parts.append("## What could not be found")
        for name, outcome in missing.items():
            tail = f"\n\n{_indented(outcome['tail'])}" if outcome.get("tail") else ""
            parts.append(f"- {name} ({about.get(name, '')}): {outcome['state']}: {outcome['reason']}{tail}")
    for name, outcome in steps.items():
        if outcome.get("found"):
            note = "" if outcome["state"] == "done" else ": unfinished"
            parts += [f"## {name}: {about.get(name, '')}{note}", *_findings(outcome["found"])]
    return "\n\n".join(parts) + "\n"


def _state(outcome: Mapping[str, Any]) -> str:
    return outcome["state"] if outcome["state"] == "done" else f"{outcome['state']}: {outcome['reason']}"


def _findings(found: Mapping[str, Any]) -> list[str]:
    """Figures as a list, then tables and texts under their names."""
    lists = {name: value for name, value in found.items() if isinstance(value, list) and value}
    texts = {name: value for name, value in found.items() if isinstance(value, str) and "\n" in value}
    plain = {name: value for name, value in found.items() if name not in lists and name not in texts}
    parts = ["\n".join(f"- {_words(name)}: {_shown(value)}" for name, value in plain.items())] if plain else []
    for name, rows in lists.items():
        head = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[_shown(row.get(key)) for key in head] for row in rows]
        left = sum(all(isinstance(row.get(key), str | None) for row in rows) for key in head)
        parts += [f"**{_words(name)}**", arguments.markdown_table(head, cells, left=left)]
    for name, text in texts.items():
        parts += [f"**{_words(name)}**", _indented(text)]
    return parts


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
