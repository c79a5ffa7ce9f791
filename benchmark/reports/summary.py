"""From the records of turns to the figures of a report. Pure functions; definitions are in the docstrings.

All speeds are taken over decoding alone: the prefill, and the one token of each answer that it gives, stand apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmark.questions.records import Key, TurnRecord

Records = Mapping[Key, TurnRecord]
NOISE = 0.03
"""By which a turn may be slower than the base without being called slower."""
BASE = "naive"
"""The mode that speedups and identity are measured against."""


def summarize(records: Mapping[str, Records], keys: Sequence[Key], *, num_draft: int) -> dict[str, dict[str, Any]]:
    """The figures of every mode that has at least one turn. `keys` are the turns of a complete measurement."""
    base = records.get(BASE) or None
    return {
        mode: _mode(found, base, keys, num_draft=0 if mode == BASE else num_draft)
        for mode, found in records.items()
        if found
    }


def _mode(records: Records, base: Records | None, keys: Sequence[Key], *, num_draft: int) -> dict[str, Any]:
    timed = whole_runs(records, keys)
    turns = list(timed.values())
    speeds = [tokens_per_second(run) for run in by_run(turns)]
    identity = compare(records, base) if base else None
    per_round = {part: per_round_ms(turns, part) for part in ("draft_s", "verify_s", "overhead_s")}
    base_verify = per_round_ms(whole_runs(base, keys).values(), "verify_s") if base else None
    return {
        "num_turns": len(records),
        "num_runs": len(by_run(turns)),
        "new_tokens": sum(r.new_tokens for r in turns),
        "decoded_tokens": sum(r.decoded_tokens for r in turns),
        "decode_s": sum(r.decode_s for r in turns),
        "tokens_per_second": _median(speeds),
        "tokens_per_second_range": _range(speeds),
        **speedups(timed, base),
        "mean_tokens_per_round": tau(turns),
        "acceptance_by_position": acceptance_by_position(turns, num_draft),
        "alpha": alpha(turns) if num_draft else None,
        "identical_to_naive": identity["share"] if identity else None,
        "num_compared": identity["num_compared"] if identity else None,
        "first_divergences": identity["first_divergences"] if identity else None,
        "identical_across_runs": identical_across_runs(records),
        "time_to_first_token_s": spread([r.prefill_s for r in turns]),
        "draft_ms": per_round["draft_s"],
        "verify_ms": per_round["verify_s"],
        "overhead_ms": per_round["overhead_s"],
        "mean_drafted_per_round": _ratio(sum(r.drafted_tokens for r in turns), sum(r.rounds for r in turns)),
        "cost_ratio_c": _cost_ratio(turns, base_verify),
        "verify_ratio_v": _ratio(per_round["verify_s"], base_verify),
        "by_category": by_category(timed, base, num_draft),
    }


def whole_runs(records: Records, keys: Sequence[Key]) -> dict[Key, TurnRecord]:
    """The turns that speeds are taken from: those of complete runs, or all of them where no run is complete."""
    wanted: dict[int, set[Key]] = {}
    for key in keys:
        wanted.setdefault(key[0], set()).add(key)
    whole = {run for run, turns in wanted.items() if turns <= records.keys()}
    return {key: record for key, record in records.items() if key[0] in whole or not whole}


def by_run(turns: Iterable[TurnRecord]) -> list[list[TurnRecord]]:
    """The turns of each run."""
    runs: dict[int, list[TurnRecord]] = {}
    for record in turns:
        runs.setdefault(record.run, []).append(record)
    return list(runs.values())


def tokens_per_second(turns: Iterable[TurnRecord]) -> float | None:
    """Tokens out of rounds over the time of the rounds; None where nothing was decoded."""
    turns = list(turns)
    return _ratio(sum(r.decoded_tokens for r in turns), sum(r.decode_s for r in turns))


def tau(turns: Iterable[TurnRecord]) -> float | None:
    """Mean tokens emitted per round, bonus or recovered included."""
    turns = list(turns)
    return _ratio(sum(r.decoded_tokens for r in turns), sum(r.rounds for r in turns))


def alpha(turns: Iterable[TurnRecord]) -> float | None:
    """Probability that a draft token is accepted, given that all before it were; None where none was tried."""
    turns = list(turns)
    accepted = sum(r.sources.get("accepted", 0) for r in turns)
    return _ratio(accepted, accepted + sum(r.sources.get("recovered", 0) for r in turns))


def acceptance_by_position(turns: Iterable[TurnRecord], num_draft: int) -> list[float]:
    """Share of all rounds in which the draft token at each position was accepted."""
    turns = list(turns)
    rounds = sum(r.rounds for r in turns)
    return [sum(r.accepted_at[i] for r in turns) / rounds for i in range(num_draft)] if rounds else []


def accepted_positions(modes: Mapping[str, Any]) -> dict[str, list[float]]:
    """`acceptance_by_position` of the modes that draft, up to the last that any had accepted: trees end early."""
    shares = {mode: figures["acceptance_by_position"] for mode, figures in modes.items()}
    reached = max((i + 1 for each in shares.values() for i, share in enumerate(each) if share), default=1)
    return {mode: each[:reached] for mode, each in shares.items() if each}


def per_round_ms(turns: Iterable[TurnRecord], part: str) -> float | None:
    """Mean milliseconds per round of `draft_s`, `verify_s` or `overhead_s`."""
    turns = list(turns)
    seconds = _ratio(sum(getattr(r, part) for r in turns), sum(r.rounds for r in turns))
    return None if seconds is None else 1e3 * seconds


def speedups(records: Records, base: Records | None) -> dict[str, Any]:
    """How much faster than the base, over the turns that both have finished.

    `speedup_vs_naive`: ratio of tokens per second, in each run, then the median of the runs (for identical texts that
    is the ratio of the decode times). `speedup_by_question`: median and quartiles of the ratios of single questions.
    `speedup_by_turn`: each turn's ratio is the median of its runs; the slowest, and how many are slower than the base
    by more than `NOISE`. The noise of single turns is only known with several runs.
    """
    pairs = [(record, base[key]) for key, record in records.items() if key in base] if base else []
    runs = [_speedup(pair for pair in pairs if pair[0].run == run) for run in dict.fromkeys(r.run for r, _ in pairs)]
    conversations: dict[tuple, list[tuple[TurnRecord, TurnRecord]]] = {}
    for pair in pairs:
        conversations.setdefault(pair[0].key[:2], []).append(pair)
    turns: dict[tuple, list[float | None]] = {}
    for pair in pairs:
        turns.setdefault(pair[0].key[1:], []).append(_speedup([pair]))
    by_turn = [ratio for ratio in map(_median, turns.values()) if ratio is not None]
    questions = [ratio for ratio in map(_speedup, conversations.values()) if ratio is not None]
    return {
        "speedup_vs_naive": _median(runs),
        "speedup_range": _range(runs),
        "speedup_by_question": {
            "p25": quantile(questions, 0.25),
            "median": _median(questions),
            "p75": quantile(questions, 0.75),
        }
        if questions
        else None,
        "speedup_by_turn": {
            "min": min(by_turn),
            "num_slower": sum(ratio < 1 - NOISE for ratio in by_turn),
            "num_turns": len(by_turn),
        }
        if by_turn
        else None,
    }


def _speedup(pairs: Iterable[tuple[TurnRecord, TurnRecord]]) -> float | None:
    ours, theirs = zip(*pairs, strict=True)
    return _ratio(tokens_per_second(ours), tokens_per_second(theirs))


def compare(records: Records, base: Records) -> dict[str, Any]:
    """Which answers have the base's token ids.

    A turn that follows a different answer has another prompt, so it counts as different too; only the first difference
    of a conversation is listed (`position` from 0; None for the token after an answer's end).
    """
    compared, identical = 0, 0
    diverged: set[tuple] = set()
    divergences: list[dict[str, Any]] = []
    for key in sorted(records.keys() & base.keys(), key=lambda key: (key[0], str(key[1]), key[2])):
        conversation, ours, theirs = key[:2], records[key].token_ids, base[key].token_ids
        compared += 1
        if conversation in diverged:
            continue
        if ours == theirs:
            identical += 1
            continue
        diverged.add(conversation)
        shorter = min(len(ours), len(theirs))
        at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
        divergences.append(
            {
                "run": key[0],
                "question_id": key[1],
                "turn": key[2],
                "position": at,
                "token": ours[at] if at < len(ours) else None,
                "naive_token": theirs[at] if at < len(theirs) else None,
            }
        )
    return {"share": _ratio(identical, compared), "num_compared": compared, "first_divergences": divergences}


def identical_across_runs(records: Records) -> float | None:
    """Share of the turns of later runs whose token ids are those of the first run; None for a single run."""
    later = [record for record in records.values() if (1, *record.key[1:]) in records and record.run > 1]
    same = sum(record.token_ids == records[(1, *record.key[1:])].token_ids for record in later)
    return _ratio(same, len(later))


def by_category(records: Records, base: Records | None, num_draft: int) -> dict[str, dict[str, Any]]:
    """Speed, tokens per round and speedup of each category, in the order of the questions."""
    groups: dict[str, dict[Key, TurnRecord]] = {}
    for key, record in records.items():
        groups.setdefault(record.category, {})[key] = record
    return {
        category: {
            "num_turns": len(group),
            "tokens_per_second": _median([tokens_per_second(run) for run in by_run(group.values())]),
            "mean_tokens_per_round": tau(group.values()),
            "alpha": alpha(group.values()) if num_draft else None,
            "speedup_vs_naive": speedups(group, base)["speedup_vs_naive"],
        }
        for category, group in groups.items()
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 90th percentile."""
    return {"mean": fmean(values), "median": median(values), "p90": quantile(values, 0.9)} if values else {}


def quantile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile, linear between neighbours."""
    if not values:
        return None
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _cost_ratio(turns: Sequence[TurnRecord], base_verify_ms: float | None) -> float | None:
    """Time of a draft model's step over that of a naive step; None where no model drafted."""
    draft_s, steps = sum(r.draft_s for r in turns), sum(r.draft_steps for r in turns)
    return _ratio(_ratio(1e3 * draft_s, steps), base_verify_ms)


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _range(values: Iterable[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
