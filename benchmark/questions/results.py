"""Results of a measurement, as files and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmark.questions.records import Key, TurnRecord
from benchmark.questions.run_config import RunConfig
from benchmark.questions.summary import BASE, accepted_positions, summarize
from benchmark.report import Report
from sharesd.cli.console import err_console
from sharesd.config import EngineConfig
from sharesd.drafters import selection
from sharesd.models.hub import resolve_target
from sharesd.reports.environment import FORMAT
from sharesd.reports.pictures import can_draw
from sharesd.reports.tables import (
    ABSENT,
    Section,
    bullets,
    has_drifted,
    number,
    percent,
    ranged,
    size,
    times,
    write_json,
)

WIDENED = "SmolLM2-135M-Instruct widened to"  # prefix of names that `sharesd bench widen` gives
MAX_DIVERGENCES = 10  # differences listed in the report; summary.json has all
HEADLINE = ("mode", "tok/s", "speedup", "tau", "alpha", "identical", "first token", "extra mem")
LEGEND = (
    "tok/s: tokens of the answers over the time of decoding. speedup: against `naive`, over the turns that both "
    "answered. tau: tokens per round. alpha: probability that a draft token is accepted. identical: turns with the "
    "token ids of `naive`. first token: median time to the first token. extra mem: weights and KV on top of `naive`."
)
ROUNDS_LEGEND = (
    "Speeds are over decoding alone, without loading, compiling, warming up and prefill with the first token. "
    "Means per round. c: a draft step over a step of `naive`; v: a verify step over a step of `naive`. Slowest turn: "
    "its speedup, the median of the runs; slower turns: those below 0.97x. With a single run these two measure the "
    "noise of the machine as well. Ranges are over the runs."
)
DRAFTS_LEGEND = (
    "tau: tokens per round. tau, drafted: of rounds with a draft only. alpha: probability that a draft token is "
    "accepted, given those before it. draft share: share of tokens from drafts. overhead share: "
    "share of the time of rounds."
)
FOUR_BIT_NOTE = (
    "The embedded model's weights came from a 4-bit file (blocks of 32): its quantized drafts agree with it more often "
    "than those of other models would: acceptance at 4 bits says little about other models."
)
Modes = Mapping[str, Any]


def write_results(run: RunConfig, state: Mapping[str, Any], done: Mapping[str, Mapping[Key, TurnRecord]]) -> None:
    """Write all files from the finished turns, and print the table."""
    from benchmark.questions.page import answers_of, rounds_by_turn
    from sharesd.models.tokenizer import load_tokenizer

    summary = summary_of(run, state, done)
    write_json(run.out_dir / "summary.json", summary)
    plots: list[str] = []
    if can_draw("speed.png", "acceptance.png"):
        from benchmark.plots import draw_plots

        name = f"{run.settings['model']} on {run.settings['questions']['label']}"
        plots = draw_plots(run.out_dir, f"{name}\n{tables_at_start(summary['settings'])}".strip(), summary)
    report = report_of(summary, plots)
    for mode, figures in summary["modes"].items():
        share = figures["identical_to_naive"]
        if share is not None and share < 1 and run.params.acceptance == "match":
            err_console.print(f"[bold red]{mode} differs from naive in some texts; see the report[/]")
    answers = [(mode, found[key]) for key in run.keys for mode, found in done.items() if key in found]
    tokenizer = load_tokenizer(resolve_target(run.config))
    shown = answers_of(run.questions.questions, answers, tokenizer)
    modes = summary["modes"]
    remarks = [tables_at_start(summary["settings"]), twins(summary["settings"]), *noise_remarks(modes)]
    num_tables = 2 if noise(modes).rows else 1
    shown |= {"complete": summary["status"]["complete"], "shown": num_tables, "remarks": remarks}
    report.publish(run.out_dir, "report", **shown, rounds=rounds_by_turn(run.config.trace, tokenizer))


def summary_of(
    run: RunConfig, state: Mapping[str, Any], done: Mapping[str, Mapping[Key, TurnRecord]]
) -> dict[str, Any]:
    """Return the contents of summary.json, from records and sessions."""
    sessions = state["sessions"]
    first = sessions[0]
    missing = sum(key not in found for found in done.values() for key in run.keys)
    shared = {name: first[name] for name in ("load_seconds", "weight_bytes", "kv_bytes")}
    shared["peak_memory_bytes"] = max(session["peak_memory_bytes"] for session in sessions)
    facts = {name: first[name] for name in ("architecture", "prompt_format")}
    load = max((session["load"] for session in sessions), key=lambda load: load["cores_of_others"])
    modes = summarize(done, run.keys)
    facts_of = {mode: facts for session in reversed(sessions) for mode, facts in session["modes"].items()}
    return {
        "format": FORMAT,
        "environment": {**state["environment"], **load},
        "settings": {**state["settings"], **first["settings"], **facts},
        "status": {"complete": missing == 0, "num_missing_turns": missing},
        "num_sessions": len(sessions),
        "added_modes": [mode for mode in modes if mode not in first["modes"]],
        "ready_seconds": first["ready_seconds"],
        "recompiles": sum(session["recompiles"] for session in sessions),
        "modes": {mode: {**figures, **shared, **facts_of[mode]} for mode, figures in modes.items()},
    }


def report_of(summary: Mapping[str, Any], plots: Sequence[str]) -> Report:
    """Return the report; the first section is the table for the terminal."""
    settings, modes = summary["settings"], summary["modes"]
    sections = [
        headline(modes),
        noise(modes),
        Section("Same text?", text=_exactness(summary)),
        categories(modes),
        _rounds(modes),
        _drafts(modes),
        _acceptance(modes, "acceptance_by_position", "all rounds"),
        _acceptance(modes, "conditional_acceptance", "rounds that accepted all before it"),
        drafters(modes),
        _start(summary),
        Section("Notes", text=bullets(_notes(summary))),
    ]
    return Report(
        title=f"{settings['model']} on {settings['questions']['label']}",
        intro=_introduction(summary),
        sections=[section for section in sections if section.rows or section.text],
        settings=settings,
        environment=summary["environment"],
        plots=plots,
    )


def headline(modes: Modes) -> Section:
    """Return the table with a row per mode."""
    rows = []
    for mode, figures in modes.items():
        extra = [figures.get("extra_weight_bytes"), figures.get("extra_kv_bytes")]
        rows.append(
            [
                mode,
                number(figures["tokens_per_second"]),
                times(figures["speedup"]),
                number(figures["tau"], 2),
                number(figures["alpha"], 3),
                percent(figures["identical_to_naive"]),
                f"{1e3 * figures['first_token_s']:.0f} ms",
                size(None if None in extra else sum(extra)),
            ]
        )
    return Section("", HEADLINE, rows, text=LEGEND)


def table(modes: Modes, title: str, columns: Mapping[str, str], text: str = "") -> Section:
    """Return a table of figures with their ranges, a row per mode."""
    rows = [[mode, *(ranged(figures, name) for name in columns.values())] for mode, figures in modes.items()]
    return Section(title, ("mode", *columns), rows, text=text if rows else "")


def noise(modes: Modes) -> Section:
    """Return medians and ranges of runs, without rows for one run."""
    several = {mode: figures for mode, figures in modes.items() if figures["num_runs"] > 1}
    columns = {"tok/s": "tokens_per_second", "speedup": "speedup", "tau": "tau"}
    return table(several, "Medians and ranges of runs", columns)


def noise_remarks(modes: Modes) -> list[str]:
    """Return remarks on single runs, and on a machine whose speed changed."""
    singles = [mode for mode, figures in modes.items() if figures["num_runs"] == 1]
    lines = []
    if singles:
        lines.append(f"Measured once, so the noise is unknown: {', '.join(singles)}; use --runs 3 for ranges.")
    drift = modes.get(BASE, {}).get("last_run_over_first")
    if has_drifted(drift):
        lines.append(
            f"The machine changed speed: naive was {drift:.2f} times as fast in the last run as in the first; compare "
            "ratios of the same run only, or measure again."
        )
    return lines


def twins(settings: Mapping[str, Any]) -> str:
    """Return a sentence on heads with the same weights; empty without."""
    by_hash: dict[str, list[str]] = {}
    for name, content in settings["files"].items():
        if name.startswith("head_"):
            by_hash.setdefault(content, []).append(name.removeprefix("head_"))
    same = ", ".join(" and ".join(names) for names in by_hash.values() if len(names) > 1)
    note = f"These have the same weights: {same}. Their figures differ by noise, including that of draft lengths."
    return note if same else ""


def tables_at_start(settings: Mapping[str, Any]) -> str:
    """Return a sentence on the drafters' tables before the first question.

    Reports include it next to the figures, since tables of the embedded model's answers raise the speed of it only.
    """
    used = (*settings["modes"], *(settings["hybrid_with"] if "hybrid" in settings["modes"] else ()))
    by_content: dict[str, list[str]] = {}
    for drafter, name in (("suffix", "corpus"), ("recycle", "recycle_table")):
        if drafter in used:
            file = settings[name]
            shipped = file in selection.files_shown(EngineConfig()).values() and file != "empty"
            content = "with the embedded model's own answers" if shipped else f"with {file}"
            by_content.setdefault(file if file == "empty" else content, []).append(drafter)
    parts = [f"{' and '.join(names)} {content}" for content, names in by_content.items()]
    return f"Tables at the start: {', '.join(parts)}." if parts else ""


def drafters(modes: Modes) -> Section:
    """Return the table of accepted tokens by drafter, empty if not recorded."""
    known = {mode: figures["accepted_by"] for mode, figures in modes.items() if figures.get("accepted_by")}
    names = list(dict.fromkeys(name for counts in known.values() for name in counts))
    rows = []
    for mode, counts in known.items():
        total = sum(counts.values())
        rows.append([mode, *(percent(counts[name] / total) if name in counts else ABSENT for name in names)])
    text = "Share of the accepted draft tokens of each drafter." if rows else ""
    return Section("Accepted tokens by drafter", ["mode", *names], rows, text=text)


def _introduction(summary: Mapping[str, Any]) -> str:
    settings, status = summary["settings"], summary["status"]
    questions, sampling = settings["questions"], settings["sampling"]
    greedy, seed = sampling["temperature"] == 0, sampling["seed"]
    how = "greedy" if greedy else f"sampled at temperature {sampling['temperature']:g}, seed {seed}"
    trees = {"off": "", "auto": " in chains or trees"}.get(str(settings["tree"]), f" in trees of {settings['tree']}")
    length = f"{settings['num_draft']} draft tokens per round{trees}"
    text = (
        f"{questions['num_questions']} of {questions['num_available']} questions, {questions['num_turns']} turns, "
        f"at most {sampling['max_new_tokens']} new tokens each, {how}, {settings['dtype']} on {settings['device']}, "
        f"{length}, drafts {settings['quant']}, compile {settings['compile']}."
    )
    runs = f"{settings['runs']} runs; figures are medians of runs." if settings["runs"] > 1 else ""
    shared = "processes shared the questions, at the same time on one machine; speeds are those of one of them."
    replicas = f"{settings['replicas']} {shared}" if settings.get("replicas") else ""
    turns = f"{status['num_missing_turns']} turns are missing; the figures are of the finished ones."
    missing = "" if status["complete"] else f"\n\n**Not complete:** {turns} Run the command again with `--resume`."
    return " ".join(filter(None, [text, tables_at_start(settings), runs, replicas, missing]))


def _exactness(summary: Mapping[str, Any]) -> str:
    modes, sampling = summary["modes"], summary["settings"]["sampling"]
    if "naive" not in modes:
        return "`naive` was not run, so there is nothing to compare with."
    lines = []
    if sampling["acceptance"] != "match" and sampling["temperature"] > 0:
        lines.append(f"Acceptance `{sampling['acceptance']}` keeps the distribution of `naive`, not its text.\n")
    for mode, figures in modes.items():
        if mode != "naive":
            share, compared = percent(figures["identical_to_naive"]), figures["num_compared"]
            lines.append(f"- `{mode}`: {share} of {compared} turns have the token ids of `naive`.")
            found = figures["first_divergences"]
            for each in found[:MAX_DIVERGENCES]:
                where = (
                    f"question {each['question_id']}, turn {each['turn']}, run {each['run']}, token {each['position']}"
                )
                lines.append(f"  - {where}: {each['token']} instead of {each['naive_token']}")
            lines += [f"  - and {len(found) - MAX_DIVERGENCES} more"] if len(found) > MAX_DIVERGENCES else []
    lines.append("\nAfter a first answer that differs, the second turn has another prompt and counts as different too.")
    for mode, figures in modes.items():
        share = figures["identical_across_runs"]
        if share is not None:
            lines.append(f"- `{mode}`: {percent(share)} of the turns of later runs equal those of the first run.")
    return "\n".join(lines)


def categories(modes: Modes) -> Section:
    """Return a column per category: the speed of plain decoding, and the speedup of each mode over it."""
    names = list(dict.fromkeys(name for figures in modes.values() for name in figures["by_category"]))
    rows = []
    for mode, figures in modes.items():
        column = "tokens_per_second" if mode == BASE or BASE not in modes else "speedup"
        cells = (ranged(figures["by_category"].get(name, {}), column) for name in names)
        rows.append([mode if column == "speedup" else f"{mode}, tok/s", *cells])
    return Section("Speed by category", ["mode", *names], rows)


def _rounds(modes: Modes) -> Section:
    columns = {"draft ms": "draft_ms", "verify ms": "verify_ms", "overhead ms": "overhead_ms", "c": "c", "v": "v"}
    found = table(modes, "Time of a round", columns, ROUNDS_LEGEND)
    rows = []
    for (mode, figures), row in zip(modes.items(), found.rows, strict=True):
        turns = figures["speedup_by_turn"] if mode != BASE else None
        slow = [times(turns["min"]), f"{turns['num_slower']} of {turns['num_turns']}"] if turns else [ABSENT, ABSENT]
        rows.append([*row, *slow])
    return replace(found, head=(*found.head, "slowest turn", "slower turns"), rows=rows)


def _drafts(modes: Modes) -> Section:
    columns = {"tau": "tau", "tau, drafted": "tau_drafted", "alpha": "alpha", "draft share": "draft_share"}
    columns |= {"drafted per round": "drafted_per_round", "overhead share": "overhead_share"}
    return table({mode: each for mode, each in modes.items() if mode != BASE}, "Drafts", columns, DRAFTS_LEGEND)


def _acceptance(modes: Modes, name: str, of: str) -> Section:
    """Return a row per position in the draft, a column per mode."""
    found = accepted_positions(modes, name)
    rows = [
        [str(number + 1), *(percent(shares[number]) if number < len(shares) else ABSENT for shares in found.values())]
        for number in range(max(map(len, found.values()), default=0))
    ]
    return Section(f"Acceptance by position, of {of}", ["position", *found], rows)


def _start(summary: Mapping[str, Any]) -> Section:
    modes = summary["modes"]
    rows = []
    for mode, figures in modes.items():
        sizes = (size(figures[name]) for name in ("weight_bytes", "extra_weight_bytes", "kv_bytes", "extra_kv_bytes"))
        rows.append([mode, number(figures["load_seconds"]), number(figures["compile_seconds"]), *sizes])
    peak = max((figures["peak_memory_bytes"] or 0 for figures in modes.values()), default=0)
    text = "Loading serves all modes together, and so do the target's weights and KV. The process, with all modes "
    text += f"loaded, held {size(peak)} at most. Graphs compiled after warm-up: {summary['recompiles']}."
    head = ("mode", "load s", "compile s", "weights", "extra weights", "KV", "extra KV")
    return Section("Start and memory", head, rows, text=text)


def _notes(summary: Mapping[str, Any]) -> list[str]:
    settings, recompiles = summary["settings"], summary["recompiles"]
    notes = [twins(settings), *noise_remarks(summary["modes"])]
    if settings["questions"]["source"] == "built-in":
        notes.append("The questions are ShareSD's own, in the categories of MT-Bench; they are not MT-Bench.")
    if settings["target"] is None or WIDENED in settings["model"]:
        notes.append(FOUR_BIT_NOTE)
    if settings["prompt_format"] == "plain":
        notes.append("The checkpoint has no chat template: prompts are `User: ...`, blank line, `Assistant:`.")
    if summary["num_sessions"] > 1:
        notes.append(f"Measured in {summary['num_sessions']} sessions; load and compile times are of the first.")
    if summary["added_modes"]:
        added = ", ".join(summary["added_modes"])
        notes.append(f"Added later: {added}. Their speedups are over naive in an earlier session.")
    if recompiles:
        notes.append(f"{recompiles} graphs were compiled during the measurement, which slowed it down.")
    return notes
