"""What the draft policy and each part of it gain: replays of recorded drafts on made machines.

    python -m benchmark.studies.policy_replay record FOLDER    # on a CPU, about half an hour
    python -m benchmark.studies.policy_replay play FOLDER
    python -m benchmark.studies.policy_replay parts FOLDER

`record` decodes the tuning questions. `play` prints the speedup over plain decoding by group of cells, `parts` also
that without each part of the policy.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import exp, inf, log
from pathlib import Path
from statistics import mean
from unittest.mock import patch

from benchmark.documents import Documents, filler_texts
from benchmark.studies.draft_records import DraftRecords, record_drafts
from benchmark.studies.replay import Machine, Played, RecordedModel, play
from sharesd.config import EngineConfig
from sharesd.drafters.base import Drafter
from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.drafters.suffix import EMBEDDED_CORPUS
from sharesd.drafters.suffix.datastore import open_datastore
from sharesd.drafters.suffix.table import SuffixTable
from sharesd.reports.questions import first_turns, prompt_ids
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation import cost_model, draft_policy, draft_scorer, query_gate
from sharesd.speculation.cost_model import Costs, DraftCost
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_tree import DraftKind, chains, shapes_of
from sharesd.startup.cost_fit import of_more_rows

PLAIN = 8e-3
"""Seconds of a plain step; all costs below are multiples of it."""
STEPS = {
    "avx512": {1: 1.0, 2: 1.07, 3: 1.10, 5: 1.13, 9: 1.22},
    "avx2": {1: 1.0, 2: 1.15, 3: 1.25, 5: 1.45, 9: 1.9},
    "expensive": {1: 1.0, 2: 1.35, 3: 1.7, 5: 2.4, 9: 3.8},
    "gpu": {1: 1.0, 2: 1.02, 3: 1.03, 5: 1.05, 9: 1.08},
    "flat": {1: 1.0, 2: 1.0, 3: 1.005, 5: 1.01, 9: 1.02},
}
"""Machine -> a step by its tokens, with the demo model; on `expensive`, drafts barely pay, and on
`flat` one thread is bound by memory."""
DRAFTS = {
    ("avx512", "share"): (0.35, 0.04, 0.40, 0.0),
    ("avx2", "share"): (0.47, 0.03, 0.6, 0.0),
    ("expensive", "share"): (0.9, 0.0, 1.1, 0.0),
    ("gpu", "share"): (0.45, 0.0, 0.6, 0.0),
    ("avx512", "eagle"): (0.065, 0.045, 0.07, 0.047),
    ("avx2", "eagle"): (0.09, 0.05, 0.11, 0.05),
    ("expensive", "eagle"): (0.3, 0.1, 0.4, 0.1),
    ("gpu", "eagle"): (0.14, 0.02, 0.16, 0.02),
    ("flat", "eagle"): (0.08, 0.05, 0.07, 0.055),
    ("flat", "share"): (0.3, 0.04, 0.35, 0.0),
}
"""Machine and drafter -> a draft step, what the first takes longer, and the same of tree levels."""
READ = 0.005
"""What a head takes to read a token that it missed."""
EIGHT_ROWS = {"avx512": {1: 1.31, 2: 1.66, 4: 2.79}, "avx2": {1: 1.75, 2: 3.4, 4: 6.7}}
"""Machine -> a step of eight rows by its tokens per row: beyond about ten tokens, arithmetic takes the time."""
EIGHT_ROWS_DRAFTS = {"share": 3.0, "eagle": 2.0}
"""Drafter -> a draft step of eight rows over one of a row."""
PRIORS = {"share": 0.8, "eagle": 0.5}
RECORDED = [
    (drafter, temperature, context, num)
    for drafter in ("eagle", "share")
    for context, num in ((100, 24), (2000, 8), (6000, 6))
    for temperature in (0, 1)
]
"""Drafter, temperature, tokens of the prompts, number of questions."""
SEEDS = 2
SHORT = 64
"""Tokens of answers with a corpus, or where the policy starts again."""


@dataclass(frozen=True)
class Cell:
    machine: str
    model: str
    """Model drafters, joined by +; "": none."""
    table: bool = False
    temperature: int = 0
    rows: int = 1
    context: int = 100
    start_error: float = 0.05
    """Spread (of the logarithm) of the costs that the policy starts with."""
    start_factor: float = 1.0
    """Factor by which they make drafts and wide steps too expensive."""
    later_factor: float = 1.0
    """Factor by which drafts and wide steps take longer after a third of the texts."""
    corpus: bool = False
    """Tables have the embedded model's corpus, and answers are short."""
    texts: int = 0
    """Texts after which the policy starts again; 0: never."""
    confidence: float = 1.0
    """Power of the probabilities that the drafter gives; below 1, it is overconfident."""
    noise: float = 0.03
    stalls: float = 0.02

    @property
    def models(self) -> Sequence[str]:
        return self.model.split("+") if self.model else ()


GROUPS = {
    "one model": [
        *(Cell("avx2", "eagle"), Cell("avx512", "share"), Cell("gpu", "eagle"), Cell("avx2", "eagle", temperature=1)),
    ],
    "mixture": [
        *(Cell("avx2", "eagle", True), Cell("avx512", "eagle", True), Cell("gpu", "share", True)),
        Cell("avx2", "eagle", True, 1),
    ],
    "two models": [
        *(Cell(machine, "eagle+share", True, temperature) for machine in ("flat", "avx512") for temperature in (0, 1)),
    ],
    "tables": [*(Cell("avx2", "", True), Cell("avx2", "", True, 1), Cell("avx2", "", True, context=2000))],
    "long": [
        *(Cell("avx512", "eagle", True, temperature, context=2000) for temperature in (0, 1)),
        *(Cell("avx512", "eagle", True, temperature, context=6000) for temperature in (0, 1)),
    ],
    "corpus": [
        *(Cell(machine, "eagle", True, corpus=True) for machine in ("avx512", "avx2", "gpu")),
        *(Cell("avx512", "", True, corpus=True), Cell("avx512", "eagle", True, 1, corpus=True)),
        Cell("avx512", "eagle", True, context=2000, corpus=True),
    ],
    "starts": [
        Cell(machine, "eagle", True, temperature, corpus=corpus, texts=6, start_error=0.15)
        for machine in ("flat", "avx512")
        for temperature in (0, 1)
        for corpus in (False, True)
    ],
    "losing": [*(Cell("expensive", "eagle"), Cell("expensive", "share"), Cell("expensive", "eagle", temperature=1))],
    "eight rows": [
        *(Cell("avx2", "", True, rows=8), Cell("avx2", "eagle", True, rows=8), Cell("avx512", "share", rows=8)),
        *(Cell("avx512", model, True, rows=8, context=context) for model in ("", "eagle") for context in (100, 2000)),
    ],
    "noise": [
        Cell("avx2", "eagle", start_error=0.3),
        Cell("avx2", "eagle", noise=0.25, stalls=0.1),
        Cell("avx2", "eagle", True, start_factor=2.0),
    ],
    "wrong starts": [
        *(Cell("expensive", "eagle", start_factor=0.3), Cell("expensive", "share", start_factor=0.4)),
        Cell("avx512", "share", start_factor=3.0),
    ],
    "changes": [
        *(Cell("avx2", "eagle", later_factor=1.6), Cell("avx512", "share", later_factor=2.0)),
        Cell("avx2", "eagle", True, later_factor=2.0),
    ],
    "overconfident": [Cell("avx2", "eagle", confidence=0.3), Cell("avx2", "eagle", True, confidence=0.3)],
}
_correct = cost_model._Place.correct


def _at_once(self: cost_model._Place, timed: int, parts: cost_model.Parts, seconds: float, predicted: float) -> None:
    self.errors[timed] = log(seconds / (predicted * self.drift))
    _correct(self, timed, parts, seconds, predicted)


PARTS: dict[str, list[tuple[object, str, object]]] = {
    "the whole policy": [],
    "without the rate of rounds: time is worth plain steps": [
        (Policy, "rate", property(lambda self: 1 / self.live.step(1)))
    ],
    "without corrections: costs are those of the start": [(cost_model.LiveCosts, "record", lambda *_: None)],
    "without repeats: every time counts at once": [(cost_model._Place, "correct", _at_once)],
    "without trials": [(draft_policy, "EXPLORED", 1e-9), (draft_policy, "PURSE", (0.0, 0.0))],
    "without doubts of what changed": [(cost_model, "BEYOND_DOUBT", inf)],
    "without plain steps that are timed": [(cost_model.LiveCosts, "plain_is_due", False)],
    "without calibrated confidence": [(draft_scorer.ProbabilityCalibration, "record", lambda *_: None)],
    "without what calls gain: rows' mean gain counts": [(Policy, "call_ratio", 1.0)],
    "without rests of tables": [(query_gate.QueryGate, "pays", lambda *_: True)],
}
"""What is left out -> replaced attributes."""


def record(folder: Path) -> None:
    """Record the tuning questions into a folder for each drafter, temperature and context."""
    for mode, temperature, context, num in RECORDED:
        new = 96 if context < 1000 else 64
        config = EngineConfig(max_context=max(context, 400) + new + 64, max_batch=1, mode=mode)
        runtime = Runtime(config, (mode,))
        questions = first_turns("benchmark/data/tuning_questions.jsonl").questions[:num]
        documents = Documents(runtime.tokenizer, filler_texts(None))
        prompts = [
            (q.category, documents.prompt(q, context) if context > 1000 else prompt_ids(runtime.tokenizer, q, []))
            for q in questions
        ]
        out = folder / f"{mode}-T{temperature}-{context}"
        out.mkdir(parents=True, exist_ok=True)
        params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=new)
        for number, found in enumerate(record_drafts(runtime, mode, prompts, params)):
            found.save(out / f"{number:02}.npz")
        runtime.close()


@cache
def _records(folder: Path, confidence: float) -> Sequence[DraftRecords]:
    found = map(DraftRecords.load, sorted(folder.glob("*.npz")))
    return [
        replace(each, chain_probs_PN=each.chain_probs_PN**confidence, tree_probs_PC=each.tree_probs_PC**confidence)
        for each in found
    ]


def costs_of(cell: Cell) -> Costs:
    """Return the costs of the cell's machine."""
    drafts: dict[DraftKind, DraftCost] = {}
    for model in cell.models:
        draft, begin, level, level_begin = (PLAIN * cost for cost in DRAFTS[cell.machine, model])
        slot = PLAIN * (1.1e-4 if model == "share" else 5e-6) * (cell.machine != "gpu")
        drafts[DraftKind(model, False)] = DraftCost(draft, begin, slot)
        drafts[DraftKind(model, True)] = DraftCost(level, level_begin, slot)
    costs = Costs(
        step={width: PLAIN * step for width, step in STEPS[cell.machine].items()},
        step_slot={width: PLAIN * (1e-4 + 1.7e-4 * (width - 1) / 8) for width in STEPS[cell.machine]},
        drafts=drafts,
    )
    if cell.rows == 1:
        return costs
    at_most = replace(
        costs,
        step={width: PLAIN * step for width, step in EIGHT_ROWS[cell.machine].items()},
        drafts={kind: cost.scaled(EIGHT_ROWS_DRAFTS[kind.drafter]) for kind, cost in drafts.items()},
    )
    return of_more_rows(costs, cell.rows, 8, at_most)


def _dearer(costs: Costs, factor: float) -> Costs:
    """Return costs of which drafts and wide steps take so many times as long."""
    step = {width: max(costs.step[1], factor * s) if width > 1 else s for width, s in costs.step.items()}
    drafts = {kind: replace(cost, step=factor * cost.step) for kind, cost in costs.drafts.items()}
    return replace(costs, step=step, drafts=drafts)


def play_cell(folder: Path, cell: Cell, seed: int) -> float:
    """Return the speedup over plain decoding, of policies that begin with disturbed costs."""
    of_models = {
        model: _records(folder / f"{model}-T{cell.temperature}-{cell.context}", cell.confidence)
        for model in cell.models or ("eagle",)
    }
    length = SHORT if cell.corpus or cell.texts else None
    records = [
        {model: replace(each, answer=each.answer[:length]) for model, each in zip(of_models, of_one, strict=True)}
        for of_one in zip(*of_models.values(), strict=True)
    ]
    dice, played, texts = random.Random(seed), Played(), cell.texts or len(records)
    for first in range(0, len(records), texts):
        _play_start(cell, records[first : first + texts], dice, played)
    return played.speedup


def _play_start(cell: Cell, records: Sequence[Mapping[str, DraftRecords]], dice: random.Random, played: Played) -> None:
    """Play texts with a new policy."""
    costs, stops = costs_of(cell), cell.machine != "gpu"

    def disturbed(seconds: float) -> float:
        return seconds * exp(dice.gauss(0, cell.start_error))

    step: dict[int, float] = {}
    for width, seconds in costs.step.items():
        step[width] = max([disturbed(seconds), *step.values()])
    drafts = {kind: replace(cost, step=disturbed(cost.step)) for kind, cost in costs.drafts.items()}
    start = _dearer(replace(costs, step=step, drafts=drafts), cell.start_factor)
    power, shapes = draft_policy.SAMPLED if cell.temperature else 1.0, shapes_of(3, 6, 8) if stops else chains(8)
    models = [
        RecordedModel(model, shapes, PRIORS[model] ** power, READ * PLAIN * (model == "eagle")) for model in cell.models
    ]
    drafter: Drafter
    if cell.table:
        corpus = open_datastore(EMBEDDED_CORPUS) if cell.corpus else None
        drafter = HybridDrafter("hybrid", [SuffixTable(corpus)], *models, num_nodes=8, trees=True)
    else:
        (drafter,) = models
    policy = Policy(
        [shape._replace(drafter=model.name) for model in models for shape in shapes] or chains(8),
        costs=start,
        measured={cell.rows: start},
        can_stop_early=stops,
        priors={model.name: model.prior for model in models},
    )
    machine = Machine(costs=costs, query=0.025 * PLAIN * cell.table, noise=cell.noise, stalls=cell.stalls)
    for first in range(0, len(records) - cell.rows + 1, cell.rows):
        if first >= len(records) / 3:
            machine = replace(machine, costs=_dearer(costs, cell.later_factor))
        play(policy, drafter, records[first : first + cell.rows], machine, dice=dice, played=played)


@contextmanager
def without(replaced: Sequence[tuple[object, str, object]]) -> Iterator[None]:
    """Replace attributes inside the context."""
    if not replaced:
        yield
        return
    (owner, name, value), *others = replaced
    with patch.object(owner, name, value, create=True), without(others):
        yield


def table(folder: Path, parts: Sequence[str], show: Callable[[str], None] = print) -> None:
    """Show a line for each part that is left out: geometric means of the groups, and of these."""
    show(",".join(("policy", *GROUPS, "mean")))
    for part in parts:
        with without(PARTS[part]):
            logs = [
                mean(log(play_cell(folder, cell, seed)) for cell in cells for seed in range(SEEDS))
                for cells in GROUPS.values()
            ]
        show(",".join((part.replace(",", ";"), *(f"{exp(each):.3f}" for each in (*logs, mean(logs))))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "play", "parts"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.what == "record":
        record(args.folder)
    else:
        table(args.folder, [*PARTS] if args.what == "parts" else [next(iter(PARTS))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
