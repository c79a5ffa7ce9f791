"""Figures from records of turns; speeds exclude prefill and first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmark.questions.records import Key, TurnRecord
from sharesd.engine.stats import Stats, ratio
from sharesd.reports.tables import spread

Records = Mapping[Key, TurnRecord]
CATEGORY = ("tokens_per_second", "tau", "alpha")
RATIOS: tuple[str, ...] = (*CATEGORY, "tau_drafted", "draft_share", "drafted_per_round")
RATIOS += ("draft_step_ms", "draft_ms", "verify_ms", "overhead_ms", "overhead_share")
"""Figures of `Stats.to_dict` that are medians of runs."""
COUNTS: tuple[str, ...] = ("prompt_tokens", "new_tokens", "decoded_tokens", "rounds", "drafted_rounds")
COUNTS += ("drafted_round_tokens", "drafted_tokens", "draft_steps", "prefill_s", "draft_s", "verify_s", "overhead_s")
"""Fields of a turn that are those of `Stats`."""
NOISE = 0.03  # share by which a turn may be slower than the base without being called slower
BASE = "naive"  # mode that speedups and identity are measured against


def summarize(records: Mapping[str, Records], keys: Sequence[Key]) -> dict[str, dict[str, Any]]:
    """Return figures of modes with turns; `keys` are a complete measurement's."""
    base = records.get(BASE) or None
    return {mode: _mode(found, base, keys) for mode, found in records.items() if found}


def _mode(records: Records, base: Records | None, keys: Sequence[Key]) -> dict[str, Any]:
    timed = whole_runs(records, keys)
    runs, whole = [_run_figures(run) for run in _by_run(timed.values())], total(timed.values()).to_dict()
    plain = {run[0].run: total(run).to_dict()["verify_ms"] for run in _by_run((base or {}).values())}
    for figures in runs:
        figures["c"] = ratio(figures["draft_step_ms"], plain.get(figures["run"]))
        figures["v"] = ratio(figures["verify_ms"], plain.get(figures["run"]))
    identity = compare(records, base) if base else {}
    accepted = sum((Counter(r.accepted_by) for r in records.values()), Counter[str]())
    return {
        "num_turns": len(records),
        "num_runs": len(runs),
        **{name: value for name, value in whole.items() if name not in RATIOS},
        **{key: value for name in (*RATIOS, "c", "v") for key, value in spread(name, runs).items()},
        **speedups(timed, base),
        "last_run_over_first": ratio(*(runs[i]["tokens_per_second"] for i in (-1, 0))) if runs[1:] else None,
        "identical_to_naive": identity.get("share"),
        "num_compared": identity.get("num_compared"),
        "first_divergences": identity.get("first_divergences"),
        "identical_across_runs": identical_across_runs(records),
        "first_token_s": median(r.prefill_s for r in timed.values()),
        "by_category": by_category(timed, base),
        "accepted_by": dict(accepted.most_common()),
    }


def total(turns: Iterable[TurnRecord]) -> Stats:
    """Return the sums of counts and times of turns."""
    found = Stats()
    for turn in turns:
        counts: dict[str, Any] = {name: getattr(turn, name) for name in COUNTS}
        counts |= {name: list(getattr(turn, name)) for name in ("accepted_at", "reached_at")}
        found.merge(Stats(**counts, steps=turn.rounds, sources=Counter(turn.sources)))
    return found


def _run_figures(turns: Sequence[TurnRecord]) -> dict[str, Any]:
    return {"run": turns[0].run, **total(turns).to_dict()}


def whole_runs(records: Records, keys: Sequence[Key]) -> dict[Key, TurnRecord]:
    """Return the turns of complete runs, or all if none is complete."""
    wanted: dict[int, set[Key]] = {}
    for key in keys:
        wanted.setdefault(key[0], set()).add(key)
    whole = {run for run, turns in wanted.items() if turns <= records.keys()}
    return {key: record for key, record in records.items() if key[0] in whole or not whole}


def _by_run(turns: Iterable[TurnRecord]) -> list[list[TurnRecord]]:
    runs: dict[int, list[TurnRecord]] = {}
    for record in turns:
        runs.setdefault(record.run, []).append(record)
    return [runs[run] for run in sorted(runs)]


def accepted_positions(modes: Mapping[str, Any], name: str = "acceptance_by_position") -> dict[str, list[float]]:
    """Return acceptance of drafting modes, up to the last accepted position."""
    shares = {mode: figures[name] for mode, figures in modes.items()}
    reached = max((i + 1 for each in shares.values() for i, share in enumerate(each) if share), default=1)
    return {mode: each[:reached] for mode, each in shares.items() if each}


def speedups(records: Records, base: Records | None) -> dict[str, Any]:
    """Return speedups over the base, on the turns that both have finished.

    `speedup`: median over runs of the ratio of tokens per second. `speedup_by_turn`: from each turn's median over runs,
    the minimum, and the number below 1 - `NOISE`.
    """
    pairs = [(record, base[key]) for key, record in records.items() if key in base] if base else []
    by_run: dict[Any, Any] = {}
    by_turn: dict[Any, Any] = {}
    for pair in pairs:
        by_run.setdefault(pair[0].run, []).append(pair)
        by_turn.setdefault(pair[0].key[1:], []).append(_speedup([pair]))
    turns = [found for each in by_turn.values() if (found := spread("speedup", each)["speedup"]) is not None]
    slower = sum(found < 1 - NOISE for found in turns)
    return {
        **spread("speedup", map(_speedup, by_run.values())),
        "speedup_by_turn": {"min": min(turns), "num_slower": slower, "num_turns": len(turns)} if turns else None,
    }


def _speedup(pairs: Iterable[tuple[TurnRecord, TurnRecord]]) -> dict[str, float | None]:
    ours, theirs = (total(turns).to_dict()["tokens_per_second"] for turns in zip(*pairs, strict=True))
    return {"speedup": ratio(ours, theirs)}


def compare(records: Records, base: Records) -> dict[str, Any]:
    """Return the share of answers equal to the base's, and divergences.

    Answers are equal if all token ids are. A turn after a different answer counts as different. Of each conversation
    the first divergence is returned: `position` counts from 0, and a token is None after an answer's end.
    """
    compared, identical = 0, 0
    diverged: set[tuple[Any, ...]] = set()
    divergences: list[dict[str, Any]] = []
    for key in sorted(records.keys() & base.keys(), key=lambda key: (key[0], str(key[1]), key[2])):
        ours, theirs = records[key].token_ids, base[key].token_ids
        compared += 1
        if key[:2] in diverged:
            continue
        if ours == theirs:
            identical += 1
            continue
        diverged.add(key[:2])
        at = first_difference(ours, theirs)
        tokens = [ids[at] if at < len(ids) else None for ids in (ours, theirs)]
        found = {"run": key[0], "question_id": key[1], "turn": key[2], "position": at}
        divergences.append({**found, "token": tokens[0], "naive_token": tokens[1]})
    return {"share": ratio(identical, compared), "num_compared": compared, "first_divergences": divergences}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the first differing position, else the shorter sequence's length."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def identical_across_runs(records: Records) -> float | None:
    """Return the share of later runs' turns with the first run's tokens."""
    later = [record for record in records.values() if (1, *record.key[1:]) in records and record.run > 1]
    same = sum(record.token_ids == records[(1, *record.key[1:])].token_ids for record in later)
    return ratio(same, len(later))


def by_category(records: Records, base: Records | None) -> dict[str, dict[str, Any]]:
    """Return figures and speedup of each category."""
    groups: dict[str, dict[Key, TurnRecord]] = {}
    for key, record in records.items():
        groups.setdefault(record.category, {})[key] = record
    found = {}
    for category, group in groups.items():
        runs = [_run_figures(run) for run in _by_run(group.values())]
        spreads = {key: value for name in CATEGORY for key, value in spread(name, runs).items()}
        found[category] = {"num_turns": len(group), **spreads, **speedups(group, base)}
    return found
