"""Command `check-drafter`: test your own drafter on a tiny target."""

from __future__ import annotations

import argparse
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sharesd.cli.console import print_line
from sharesd.config import EngineConfig
from sharesd.data.grammar_spec import from_regex
from sharesd.drafters import registry
from sharesd.drafters.registry import DrafterSpec, Support
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharesd.llm import LLM

NUM_DRAFT, TREE = 4, (2, 3, 6)
PROMPTS = ("abcdefgabcdefgabc", "one two three", "x", "a longer text, a longer text, and a longer text")
GREEDY = SamplingParams(max_new_tokens=48)
SAMPLED = SamplingParams(max_new_tokens=48, temperature=0.8, seed=3)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check-drafter",
        help="test your own drafter",
        description="Test your own drafter on a tiny target: alone, in batches, with chains, trees, sampling, a "
        "grammar, a cancelled request and a resumed conversation. The exit status is 0 if all checks pass, else 1.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("drafter", metavar="MODULE[:CLASS]", help="module or file with a SPEC; class that this builds")


def run(args: argparse.Namespace) -> int:
    """Run all checks; return 1 if one fails."""
    module, _, name = args.drafter.partition(":")
    found = registry.import_drafter(module)
    registry.load_modules([module])
    spec: DrafterSpec = found.SPEC
    if spec.kind == "head":
        raise ValueError(
            f"{spec.name} is a head, which drafts only for its own target; test both with `sharesd verify`"
        )
    wanted = _class(found, module, name) if name else None
    num_wrong = num_drafted = num_accepted = 0
    with tempfile.TemporaryDirectory() as folder:
        for tree in (False, True) if Support.TREES in spec.supports else (False,):
            checks = DrafterChecks(spec, module, wanted, Path(folder), tree=tree)
            for check, fault in checks.run():
                num_wrong += bool(fault)
                line = f"wrong  {check}: {fault}" if fault else f"ok     {check}"
                print_line(line)
            num_drafted, num_accepted = num_drafted + checks.num_drafted, num_accepted + checks.num_accepted
    outcome = f"{num_wrong} checks failed" if num_wrong else "all checks passed"
    counts = f"{num_drafted} tokens drafted, {num_accepted} accepted"
    if not num_wrong and not num_drafted:
        counts = "but nothing was drafted, although these texts repeat themselves"
    print_line(f"{spec.name}: {outcome}; {counts}")
    return 1 if num_wrong else 0


def _class(found: ModuleType, module: str, name: str) -> type:
    wanted = getattr(found, name, None)
    if not isinstance(wanted, type):
        own = [each.__name__ for each in vars(found).values() if isinstance(each, type)]
        raise ValueError(f"{module} has no class {name}; its classes are {', '.join(own)}")
    return wanted


class DrafterChecks:
    """Checks of one drafter, with chains or with trees."""

    def __init__(self, spec: DrafterSpec, module: str, wanted: type | None, folder: Path, *, tree: bool) -> None:
        self._spec, self._module, self._wanted = spec, module, wanted
        self._folder, self._tree = folder, tree
        self.num_drafted = self.num_accepted = 0
        self._llm: LLM | None = None

    def run(self) -> Iterator[tuple[str, str]]:
        """Yield each check's name and fault; "": none."""
        kind = "trees" if self._tree else "chains"
        checks = {
            "build": self._build,
            "proposals": self._propose,
            "one text": lambda: self._compare(PROMPTS[:1], GREEDY),
            "batch": lambda: self._compare(PROMPTS, GREEDY),
            "sampling": lambda: self._compare(PROMPTS, SAMPLED),
            "grammar": lambda: self._compare(PROMPTS, SamplingParams(max_new_tokens=24, grammar=from_regex("[a-h ]+"))),
            "cancelled request": self._cancel,
            "resumed conversation": self._resume,
        }
        for name, check in checks.items():
            yield f"{kind}, {name}", _fault_of(check)
            if self._llm is None:
                return

    def _build(self) -> str:
        from benchmark.studies.oracle_checkpoint import write_oracle
        from sharesd.llm import LLM  # torch takes seconds, mistakes should not

        name = self._spec.name
        config = EngineConfig(
            target=str(write_oracle(self._folder)),
            mode=name,
            drafter_modules=(self._module,),
            num_draft=TREE[2] if self._tree else NUM_DRAFT,
            tree=TREE if self._tree else "off",
            max_context=256,
            max_batch=len(PROMPTS),
            dtype="float32",
            device="cpu",
            compile="off",
            threads=1,
        )
        self._llm = llm = LLM.from_config(config, ("naive", name))
        for mode in llm.modes:
            llm.runtime.warm_up(mode)
        drafter: Any = llm.runtime.engine.modes[name].drafter
        built = [*getattr(drafter, "tables", ()), drafter]
        if self._wanted is not None and not any(isinstance(each, self._wanted) for each in built):
            return f"SPEC builds a {type(built[0]).__name__}, not a {self._wanted.__name__}"
        return ""

    def _propose(self) -> str:
        """Ask tables directly, with more conditions than rounds check."""
        from sharesd.drafters.draft_checks import check_proposal

        engine, name = self._loaded.runtime.engine, self._spec.name
        tokens = engine.check(PROMPTS[0], GREEDY)
        for table in getattr(engine.modes[name].drafter, "tables", ()):
            table.begin(0, tokens)
            for budget in (1, 2, 4, 16):
                found = check_proposal(table.name, table.propose(0, budget), budget, engine.target.vocab_size)
                if any(not 0 <= score <= 1 for score in found.scores):
                    return f"scores {found.scores}; each is a probability, from 0 to 1"
                if any(after > before for before, after in pairwise(found.scores)):
                    return f"scores {found.scores} rise; the best node comes first"
        return ""

    @property
    def _loaded(self) -> LLM:
        assert self._llm is not None
        return self._llm

    def _answers(
        self, mode: str, prompts: Sequence[Any], params: SamplingParams, reuse: bool = False
    ) -> list[list[int]]:
        from sharesd.engine.call_queue import decode

        engine, answers = self._loaded.runtime.engine, [list[int]() for _ in prompts]
        for chunk in decode(engine, prompts, params, mode=mode, reuse=reuse):
            answers[chunk.row] += chunk.token_ids
        self.num_drafted += engine.stats.drafted_tokens
        self.num_accepted += engine.stats.sources["accepted"]
        return answers

    def _compare(self, prompts: Sequence[Any], params: SamplingParams) -> str:
        naive, own = (self._answers(mode, prompts, params) for mode in ("naive", self._spec.name))
        return _difference(naive, own)

    def _cancel(self) -> str:
        """Cancel a request between rounds; another one gets its row."""
        naive = self._answers("naive", PROMPTS, GREEDY)
        llm, mode = self._loaded, self._spec.name
        streams = [llm.stream(prompt, GREEDY, mode=mode) for prompt in PROMPTS]
        answers = [[*next(stream).token_ids, *next(stream).token_ids] for stream in streams]
        streams[1].close()
        streams[1], answers[1] = llm.stream(PROMPTS[1], GREEDY, mode=mode), []
        for answer, stream in zip(answers, streams, strict=True):
            answer += [token for chunk in stream for token in chunk.token_ids]
        return _difference(naive, answers)

    def _resume(self) -> str:
        """Continue texts, once after more tokens and once from the middle."""
        first = self._loaded.tokenizer.encode(PROMPTS[0])
        (answer,) = self._answers(self._spec.name, [first], GREEDY)
        longer = [first + answer + first[:3], first + answer[:5]]
        naive = [self._answers("naive", [text], GREEDY)[0] for text in longer]
        self._answers(self._spec.name, [first], GREEDY)
        own = [self._answers(self._spec.name, [text], GREEDY, reuse=True)[0] for text in longer]
        return _difference(naive, own)


def _difference(naive: Sequence[list[int]], own: Sequence[list[int]]) -> str:
    wrong = [number for number, (a, b) in enumerate(zip(naive, own, strict=True), 1) if a != b]
    return f"text {wrong[0]} of {len(naive)} differs from that of naive" if wrong else ""


def _fault_of(check: Any) -> str:
    """Return a check's fault, or its error in one line."""
    try:
        return check()
    except Exception as error:
        message = " ".join(str(error).split())
        if isinstance(error, ValueError):
            return message
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}: {message}"
