"""A summary as a page to read: report.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmark.reports.summary import accepted_positions
from benchmark.reports.table import HEADLINE, headline, tables_from
from benchmark.reports.text import ABSENT, number, percent, size, times

WIDENED = "SmolLM2-135M-Instruct widened to"
"""How `benchmark.studies.widen` names the widened embedded model."""

MAX_DIVERGENCES = 10
"""Differences that the report lists; summary.json has all."""


def markdown(summary: Mapping[str, Any], plots: Sequence[str]) -> str:
    """The whole report."""
    settings, modes = summary["settings"], summary["modes"]
    parts = [
        f"# {settings['model']} on {settings['questions']['label']}",
        _introduction(summary),
        _table(HEADLINE, headline(summary)),
        "tok/s: tokens of the answers over the time of decoding. speedup: against `naive`, over the turns that both "
        "answered. tau: tokens per round. alpha: probability that a draft token is accepted. identical: turns with "
        "exactly the token ids of `naive`. first token: median time of reading a prompt. extra mem: weights and KV "
        "on top of `naive`.",
        *_section("Same text?", _exactness(summary)),
        *_section("Speed by category", _table(*category_rows(modes))),
        *(f"![{name.removesuffix('.png')}]({name})" for name in plots),
        *_section("Where a round's time goes", _rounds(modes)),
        *_section("Acceptance by position", _acceptance(modes)),
        *_section("Accepted tokens by drafter", _drafters(modes)),
        *_section("Start and memory", _start(summary)),
        *_section("What the times leave out", _left_out(summary)),
        *_section("Notes", _bullets(_notes(summary))),
        *_section("How it was run", _run(summary)),
        *_section("Machine", _pairs(summary["environment"])),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _draft_length(settings: Mapping[str, Any]) -> str:
    length = f"0 to {settings['max_draft']}" if settings["num_draft"] == "auto" else str(settings["num_draft"])
    return f"{length}, trees of {settings['tree']} at most" if settings.get("tree") else length


def _introduction(summary: Mapping[str, Any]) -> str:
    settings, status = summary["settings"], summary["status"]
    questions, sampling = settings["questions"], settings["sampling"]
    how = (
        "greedy"
        if sampling["temperature"] == 0
        else f"sampled at temperature {sampling['temperature']:g}, seed {sampling['seed']}"
    )
    text = (
        f"{questions['num_questions']} of {questions['num_available']} questions, {questions['num_turns']} turns, "
        f"at most {sampling['max_new_tokens']} new tokens each, {how}, {settings['dtype']} on {settings['device']}, "
        f"{_draft_length(settings)} draft tokens per round, drafts {settings['quant']}, compile {settings['compile']}."
    )
    if tables := tables_from(settings):
        text += f" {tables}"
    if settings["runs"] > 1:
        text += f" {settings['runs']} runs; figures are medians of runs."
    if settings.get("replicas"):
        text += (
            f" {settings['replicas']} processes shared the questions, at the same time on one machine; speeds are "
            "those of one of them."
        )
    if not status["complete"]:
        text += (
            f"\n\n**Not complete:** {status['num_missing_turns']} turns are missing; "
            "figures are those of what is there. Run the command again with `--resume`."
        )
    return text


def _exactness(summary: Mapping[str, Any]) -> str:
    modes, acceptance = summary["modes"], summary["settings"]["sampling"]["acceptance"]
    if "naive" not in modes:
        return "`naive` was not run, so there is nothing to compare with."
    lines = []
    if acceptance != "match" and summary["settings"]["sampling"]["temperature"] > 0:
        lines.append(f"Acceptance `{acceptance}` promises the distribution of `naive`, not its text.\n")
    for mode, figures in modes.items():
        if mode == "naive":
            continue
        share, compared = figures["identical_to_naive"], figures["num_compared"]
        lines.append(f"- `{mode}`: {percent(share)} of {compared} turns have the token ids of `naive`.")
        found = figures["first_divergences"]
        for each in found[:MAX_DIVERGENCES]:
            lines.append(
                f"  - question {each['question_id']}, turn {each['turn']}, run {each['run']}, "
                f"token {each['position']}: {each['token']} instead of {each['naive_token']}"
            )
        if len(found) > MAX_DIVERGENCES:
            lines.append(f"  - and {len(found) - MAX_DIVERGENCES} more, see summary.json")
    lines.append(
        "\nA second turn's prompt holds the mode's own first answer. After a first answer that differs, the second "
        "turn counts as different too."
    )
    for mode, figures in modes.items():
        share = figures["identical_across_runs"]
        if share is not None:
            lines.append(f"- `{mode}`: {percent(share)} of the turns of later runs equal those of the first run.")
    return "\n".join(lines)


def category_rows(modes: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of speeds by category."""
    names = list(dict.fromkeys(name for figures in modes.values() for name in figures["by_category"]))
    head, rows = ["category"], [[name] for name in names]
    for mode, figures in modes.items():
        head.append(f"{mode} tok/s")
        if mode != "naive":
            head += ["tau", "speedup"]
        for row in rows:
            found = figures["by_category"].get(row[0], {})
            row.append(number(found.get("tokens_per_second")))
            if mode != "naive":
                row += [number(found.get("mean_tokens_per_round"), 2), times(found.get("speedup_vs_naive"))]
    return head, rows


def _rounds(modes: Mapping[str, Any]) -> str:
    head = ("mode", "draft ms", "verify ms", "overhead ms", "c", "v", "slowest turn", "slower turns")
    rows = [
        [
            mode,
            number(figures["draft_ms"], 2),
            number(figures["verify_ms"], 2),
            number(figures["overhead_ms"], 2),
            number(figures["cost_ratio_c"], 3),
            number(figures["verify_ratio_v"], 3),
            *_slow_turns(figures["speedup_by_turn"] if mode != "naive" else None),
        ]
        for mode, figures in modes.items()
    ]
    legend = (
        "Means per round. c: a draft step over a step of `naive`; v: a verify step over a step of `naive`. Slowest "
        "turn: its speedup, the median of the runs; slower turns: those below 0.97x. With a single run these two "
        "measure the noise of the machine as well."
    )
    return f"{_table(head, rows)}\n\n{legend}"


def _slow_turns(by_turn: Mapping[str, Any] | None) -> tuple[str, str]:
    return (
        (times(by_turn["min"]), f"{by_turn['num_slower']} of {by_turn['num_turns']}") if by_turn else (ABSENT, ABSENT)
    )


def _acceptance(modes: Mapping[str, Any]) -> str:
    drafters = accepted_positions(modes)
    if not drafters:
        return ""
    width = max(map(len, drafters.values()))
    rows = [[mode, *map(percent, shares)] for mode, shares in drafters.items()]
    table = _table(["mode", *map(str, range(1, width + 1))], rows)
    return f"{table}\n\nShare of rounds in which the draft token at this position was accepted; none was further on."


def drafter_rows(modes: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of accepted tokens by who drafted them; no rows where that is not known."""
    known = {mode: figures["accepted_by"] for mode, figures in modes.items() if figures.get("accepted_by")}
    names = list(dict.fromkeys(name for counts in known.values() for name in counts))
    rows = []
    for mode, counts in known.items():
        total = sum(counts.values())
        rows.append([mode, *(percent(counts[name] / total) if name in counts else ABSENT for name in names)])
    return ["mode", *names], rows


def _drafters(modes: Mapping[str, Any]) -> str:
    head, rows = drafter_rows(modes)
    return f"{_table(head, rows)}\n\nShare of the accepted draft tokens that each drafter guessed." if rows else ""


def _start(summary: Mapping[str, Any]) -> str:
    head = ("mode", "load s", "compile s", "weights", "extra weights", "KV", "extra KV")
    rows = [
        [
            mode,
            number(figures["load_seconds"]),
            number(figures["compile_seconds"]),
            *(size(figures[name]) for name in ("weight_bytes", "extra_weight_bytes", "kv_bytes", "extra_kv_bytes")),
        ]
        for mode, figures in summary["modes"].items()
    ]
    peak = max((f["peak_memory_bytes"] or 0 for f in summary["modes"].values()), default=0)
    return (
        f"{_table(head, rows)}\n\nLoading serves all modes together, and so do the target's weights and KV. "
        f"The process, with all modes loaded, held {size(peak)} at most. "
        f"Graphs compiled after warm-up: {summary['recompiles']}."
    )


def _left_out(summary: Mapping[str, Any]) -> str:
    return (
        "Speeds are over decoding alone. Loading, quantizing, compiling and warming up are not in them (see above), "
        "nor is reading the prompt together with the first token that it gives (see first token). The modes answer "
        "each question right after each other, in changing order, so that a machine that slows down slows all of them."
    )


def _notes(summary: Mapping[str, Any]) -> list[str]:
    settings = summary["settings"]
    notes = []
    if settings["questions"]["source"] == "built-in":
        notes.append("The questions are ShareSD's own, in the categories of MT-Bench; they are not MT-Bench.")
    if settings["target"] is None or WIDENED in settings["model"]:
        notes.append(
            "The embedded model's weights came from a 4-bit file (blocks of 32), so that its quantized drafts agree "
            "with it more often than those of other models would: acceptance at 4 bits says little about other models."
        )
    if settings["prompt_format"] == "plain":
        notes.append("The checkpoint has no chat template: prompts are `User: ...`, blank line, `Assistant:`.")
    if summary["num_sessions"] > 1:
        notes.append(f"Measured in {summary['num_sessions']} sessions; load and compile times are of the first.")
    if summary["recompiles"]:
        notes.append(f"{summary['recompiles']} graphs were compiled during the measurement, which costs time in it.")
    return notes


def _run(summary: Mapping[str, Any]) -> str:
    settings = dict(summary["settings"])
    command = settings.pop("command")
    return f"```\n{command}\n```\n\n{_pairs(_flat(settings))}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.") if value else {f"{prefix}{name}": "none"}
        else:
            flat[f"{prefix}{name}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return flat


def _pairs(values: Mapping[str, Any]) -> str:
    return _bullets(f"{name}: {value}" for name, value in values.items() if value not in (None, ""))


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _section(title: str, body: str) -> list[str]:
    return [f"## {title}", body] if body else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
