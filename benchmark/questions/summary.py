"""Figures from records of turns; speeds exclude prefill and first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmark.questions.records import Key, TurnRecord

Records = Mapping[Key, TurnRecord]
Turns = Sequence[TurnRecord]
Figure = Callable[[Turns], float | None]  # of the turns of a run
NOISE = 0.03  # share by which a turn may be slower than the base without being called slower
BASE = "naive"  # mode that speedups and identity are measured against


def summarize(records: Mapping[str, Records], keys: Sequence[Key], *, num_draft: int) -> dict[str, dict[str, Any]]:
    """Return figures of modes with turns; `keys` are a complete measurement's."""
    base = records.get(BASE) or None
    return {
        mode: _mode(found, base, keys, num_draft=0 if mode == BASE else num_draft)
        for mode, found in records.items()
        if found
    }


def _mode(records: Records, base: Records | None, keys: Sequence[Key], *, num_draft: int) -> dict[str, Any]:
    timed = whole_runs(records, keys)
    runs, turns = _by_run(timed.values()), list(timed.values())
    plain = {run[0].run: per_round_ms(run, "verify_s") for run in _by_run((base or {}).values())}
    identity = compare(records, base) if base else {}
    accepted = sum((Counter(r.accepted_by) for r in records.values()), Counter[str]())

    def over_plain(run: Turns, value: float | None) -> float | None:
        return _ratio(value, plain.get(run[0].run))

    figures: dict[str, Figure] = {
        "tokens_per_second": tokens_per_second,
        "mean_tokens_per_round": tau,
        "draft_ms": lambda run: per_round_ms(run, "draft_s"),
        "verify_ms": lambda run: per_round_ms(run, "verify_s"),
        "overhead_ms": lambda run: per_round_ms(run, "overhead_s"),
        "mean_drafted_per_round": lambda run: _ratio(_sum(run, "drafted_tokens"), _sum(run, "rounds")),
        "cost_ratio_c": lambda run: over_plain(run, _ratio(1e3 * _sum(run, "draft_s"), _sum(run, "draft_steps"))),
        "verify_ratio_v": lambda run: over_plain(run, per_round_ms(run, "verify_s")),
        "alpha": alpha if num_draft else lambda run: None,
    }
    return {
        "num_turns": len(records),
        "num_runs": len(runs),
        **{name: _sum(turns, name) for name in ("new_tokens", "decoded_tokens", "decode_s")},
        **{key: value for name, figure in figures.items() for key, value in spread(name, map(figure, runs)).items()},
        **speedups(timed, base),
        "last_run_over_first": _ratio(tokens_per_second(runs[-1]), tokens_per_second(runs[0])) if runs[1:] else None,
        "acceptance_by_position": acceptance_by_position(turns, num_draft),
        "identical_to_naive": identity.get("share"),
        "num_compared": identity.get("num_compared"),
        "first_divergences": identity.get("first_divergences"),
        "identical_across_runs": identical_across_runs(records),
        "time_to_first_token_s": {"median": median(r.prefill_s for r in turns)},
        "by_category": by_category(timed, base, num_draft),
        "accepted_by": dict(accepted.most_common()),
    }


def spread(name: str, values: Iterable[float | None]) -> dict[str, Any]:
    """Return median and range of the runs' values, as `name` and `name_range`."""
    known = [value for value in values if value is not None]
    return {name: median(known) if known else None, f"{name}_range": [min(known), max(known)] if known else None}


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


def _sum(turns: Iterable[TurnRecord], name: str) -> float:
    return sum(getattr(record, name) for record in turns)


def tokens_per_second(turns: Iterable[TurnRecord]) -> float | None:
    """Return decoded tokens per second of the rounds; None without any."""
    turns = list(turns)
    return _ratio(sum(r.decoded_tokens for r in turns), sum(r.decode_s for r in turns))


def tau(turns: Iterable[TurnRecord]) -> float | None:
    """Return the mean tokens per round, bonus or recovered token included."""
    turns = list(turns)
    return _ratio(sum(r.decoded_tokens for r in turns), sum(r.rounds for r in turns))


def alpha(turns: Iterable[TurnRecord]) -> float | None:
    """Return a draft token's acceptance probability, given all earlier ones accepted."""
    turns = list(turns)
    accepted = sum(r.sources.get("accepted", 0) for r in turns)
    return _ratio(accepted, accepted + sum(r.sources.get("recovered", 0) for r in turns))


def acceptance_by_position(turns: Iterable[TurnRecord], num_draft: int) -> list[float]:
    """Return the share of rounds with an accepted draft token, by position."""
    turns = list(turns)
    rounds = sum(r.rounds for r in turns)
    return [sum(r.accepted_at[i] for r in turns) / rounds for i in range(num_draft)] if rounds else []


def accepted_positions(modes: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return `acceptance_by_position` of drafting modes, up to the last accepted position."""
    shares = {mode: figures["acceptance_by_position"] for mode, figures in modes.items()}
    reached = max((i + 1 for each in shares.values() for i, share in enumerate(each) if share), default=1)
    return {mode: each[:reached] for mode, each in shares.items() if each}


def per_round_ms(turns: Iterable[TurnRecord], part: str) -> float | None:
    """Return mean milliseconds per round of `draft_s`, `verify_s` or `overhead_s`."""
    turns = list(turns)
    return _ratio(1e3 * sum(getattr(r, part) for r in turns), sum(r.rounds for r in turns))


def speedups(records: Records, base: Records | None) -> dict[str, Any]:
    """Return speedups over the base, on the turns that both have finished.

    `speedup_vs_naive`: median over runs of the ratio of tokens per second. `speedup_by_turn`: from each turn's median
    over runs, the minimum, and the number below 1 - `NOISE`.
    """
    pairs = [(record, base[key]) for key, record in records.items() if key in base] if base else []
    by_run, by_turn = ({}, {})  # type: dict, dict
    for pair in pairs:
        by_run.setdefault(pair[0].run, []).append(pair)
        by_turn.setdefault(pair[0].key[1:], []).append(_speedup([pair]))
    turns = [ratio for each in by_turn.values() if (ratio := spread("of", each)["of"]) is not None]
    slower = sum(ratio < 1 - NOISE for ratio in turns)
    return {
        **spread("speedup_vs_naive", map(_speedup, by_run.values())),
        "speedup_by_turn": {"min": min(turns), "num_slower": slower, "num_turns": len(turns)} if turns else None,
    }


def _speedup(pairs: Iterable[tuple[TurnRecord, TurnRecord]]) -> float | None:
    ours, theirs = zip(*pairs, strict=True)
    return _ratio(tokens_per_second(ours), tokens_per_second(theirs))


def compare(records: Records, base: Records) -> dict[str, Any]:
    """Return the share of answers equal to the base's, and divergences.

    Answers are equal if all token ids are. A turn after a different answer counts as different. Of each conversation
    the first divergence is returned: `position` counts from 0, and a token is None after an answer's end.
    """
    compared, identical = 0, 0
    diverged: set[tuple] = set()
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
    return {"share": _ratio(identical, compared), "num_compared": compared, "first_divergences": divergences}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the first differing position, else the shorter sequence's length."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def identical_across_runs(records: Records) -> float | None:
    """Return the share of later runs' turns with the first run's tokens."""
    later = [record for record in records.values() if (1, *record.key[1:]) in records and record.run > 1]
    same = sum(record.token_ids == records[(1, *record.key[1:])].token_ids for record in later)
    return _ratio(same, len(later))


def by_category(records: Records, base: Records | None, num_draft: int) -> dict[str, dict[str, Any]]:
    """Return speed, tokens per round, alpha and speedup of each category."""
    groups: dict[str, dict[Key, TurnRecord]] = {}
    for key, record in records.items():
        groups.setdefault(record.category, {})[key] = record
    return {
        category: {
            "num_turns": len(group),
            **spread("tokens_per_second", map(tokens_per_second, _by_run(group.values()))),
            **spread("mean_tokens_per_round", map(tau, _by_run(group.values()))),
            "alpha": alpha(group.values()) if num_draft else None,
            **{name: value for name, value in speedups(group, base).items() if name != "speedup_by_turn"},
        }
        for category, group in groups.items()
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
