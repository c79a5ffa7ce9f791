"""Answers that a grammar shapes: with drafts or without, alone or among others, they are what plain decoding gives
where each of its tokens is chosen among those that the grammar allows.

Legend: T places of a round, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sharesd.data.grammar_spec import from_json_schema, from_lark, from_regex
from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.drafters.recycle.table import RecycleTable
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.drafters.suffix.table import SuffixTable
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.warmup import warm_up
from sharesd.models.tokenizer import Tokenizer
from sharesd.sampling.constraints import Grammars, Matcher, apply_grammar_mask
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_buffers import num_words
from sharesd.speculation.draft_tree import chains, shapes_of
from tests.helpers.oracle import (
    MAX_CONTEXT,
    PIECES,
    VOCAB,
    classic_engine,
    new_engine,
    share_engine,
    switched,
    tiny_decoder,
)
from tests.helpers.tiny_tokenizer import make_backend

pytest.importorskip("llguidance")

END = PIECES.index("!")
"""Ends texts here, and is shown."""
MODEL = tiny_decoder(3)
MODEL.eos_ids = (END,)
PATTERNS = (r"[a-f]{3,9}( (th|ab)[a-p]{1,4}){1,3}", r"((ab|ba|abab){1,4}(\.\.|,) ){2,3}", r"[a-p .]*")
MODES = ("share", "share tree", "classic", "suffix", "hybrid", "hybrid tree")

pytestmark = pytest.mark.usefixtures("one_thread")


def new(mode: str, **options: Any) -> Engine:
    """An engine of this mode, whose drafts are often right and often wrong."""
    model, switch = switched(MODEL, 0.1)
    engine = _new(mode, model, switch, {"batch": 4} | options)
    engine._scheduler.grammars = new_grammars()
    return engine


def _new(mode: str, model: Any, switch: Any, options: dict[str, Any]) -> Engine:
    tree = (3, 3, 8) if mode.endswith("tree") else None
    if mode == "naive":
        return new_engine(model, **options)
    if mode.startswith("share"):
        return share_engine(model, switch, num_draft=8 if tree else 4, tree=tree, **options)
    if mode == "classic":
        return classic_engine(model, switched(MODEL, 0.1)[0], **options)
    cache = model.new_cache(options["batch"], MAX_CONTEXT + 60)
    inner = None
    if mode.startswith("hybrid"):
        shapes = shapes_of(*tree) if tree else chains(4)
        inner = ShareDrafter(model, cache, switch, shapes=shapes, quantized_bytes=0, branching=tree[0] if tree else 1)
    tables = [SuffixTable(), RecycleTable(VOCAB, 3)]
    return new_engine(model, HybridDrafter(mode, tables, inner, num_nodes=6, trees=True), cache=cache, **options)


def some_requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """With grammars and without, greedy and sampled, truncated, penalised, biased."""
    dice = random.Random(seed)
    return [
        (
            [dice.randrange(VOCAB - 1) for _ in range(dice.choice([1, 5, 12]))],
            SamplingParams(
                max_new_tokens=dice.choice([9, 40, 60]),
                temperature=dice.choice([0.0, 0.0, 1.0]),
                top_k=dice.choice([0, 0, 5]),
                min_p=dice.choice([0.0, 0.05]),
                repetition_penalty=dice.choice([1.0, 1.0, 1.3]),
                logit_bias=dice.choice([{}, {}, {7: 2.0}]),
                seed=dice.randrange(2**40),
                logprobs=dice.random() < 0.3,
                speculate=dice.random() < 0.9,
                grammar=dice.choice([None, *map(from_regex, PATTERNS)]),
            ),
        )
        for _ in range(count)
    ]


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    """Of all these, which come one after the other."""
    todo, done = list(requests), {}
    while todo or engine.num_running or engine.num_waiting:
        for prompt, params in todo[:1]:
            done[engine.add(prompt, params)] = Completion()
        todo = todo[1:]
        for chunk in engine.step():
            done[chunk.request].add(chunk)
    return list(done.values())


def written_out(prompt: list[int], params: SamplingParams) -> list[int]:
    """Decoding with a grammar, without rounds: a new matcher reads the answer so far for each token."""
    from sharesd import sampling
    from tests.helpers.oracle import logits_of, placed

    tokens, found = list(prompt), []
    plain = replace(params, grammar=None)
    for _ in range(params.max_new_tokens):
        kind, rows = placed([plain], VOCAB, [prompt])
        if params.uses_penalties:
            rows.counts.update(torch.tensor([[*found, 0]]), torch.tensor([len(found)]))
        logits_V = logits_of(MODEL, tokens)[-1].clone()
        matcher = new_grammars().matcher(params.grammar or "")
        assert matcher.advance(found) == len(found)
        legal_1W = torch.zeros(1, num_words(VOCAB), dtype=torch.int32)
        matcher.fill_mask(legal_1W)
        for token in range(VOCAB):
            if not int(legal_1W[0, token // 32]) >> token % 32 & 1:
                logits_V[token] = -torch.inf
        logits_11V = sampling.process(logits_V[None, None], kind, rows)
        noise = sampling.gumbel(rows.seeds_B, torch.tensor([[len(tokens)]]), VOCAB)
        token = int(sampling.choose(logits_11V, None if params.greedy else noise))
        tokens.append(token), found.append(token)
        if token == END:
            break
    return found


GRAMMARS: list[Grammars] = []


def new_grammars() -> Grammars:
    """Of a tokenizer that reads as the oracle's does, and writes spaces as such tokenizers do."""
    if not GRAMMARS:
        pieces = [piece.replace(" ", "Ġ") for piece in PIECES]
        backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        GRAMMARS.append(Grammars(Tokenizer(backend), vocab_size=VOCAB, eos_ids=[END]))
    return GRAMMARS[0]


# ---- the promise

REQUESTS = some_requests(1, 40)


@pytest.fixture(scope="module")
def plain() -> list[Completion]:
    """What each gives by itself, in an engine of one row without a drafter."""
    return [answers(new("naive", batch=1), [request])[0] for request in REQUESTS]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "policy"])
def test_texts_are_those_of_plain_decoding_with_the_same_grammar(
    mode: str, pinned: bool, plain: list[Completion]
) -> None:
    engine = new(mode, auto_length=not pinned)
    found = answers(engine, REQUESTS)
    for (_, params), one, other in zip(REQUESTS, found, plain, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert [round(x, 5) for x in one.logprobs or []] == [round(x, 5) for x in other.logprobs or []]
        if params.grammar and one.finish_reason == "stop":
            pattern = json.loads(params.grammar)["grammars"][0]["lark_grammar"].removeprefix("start: ")[1:-1]
            assert one.token_ids[-1] == END and re.fullmatch(pattern, one.text[:-1]), one.text
    constrained = [one for (_, params), one in zip(REQUESTS, found, strict=True) if params.grammar]
    assert sum(one.finish_reason == "stop" for one in constrained) > 15
    if pinned:
        assert sum(one.sources.count("accepted") for one in constrained) > 20, "drafts within grammars are accepted"


def test_plain_decoding_with_a_grammar_is_what_it_says() -> None:
    for temperature, penalty in ((0.0, 1.0), (1.0, 1.0), (0.7, 1.3)):
        params = SamplingParams(
            max_new_tokens=14,
            temperature=temperature,
            repetition_penalty=penalty,
            grammar=from_regex(PATTERNS[0]),
            seed=5,
        )
        assert answers(new("naive"), [([1, 2, 3], params)])[0].token_ids == written_out([1, 2, 3], params)


def test_rows_without_a_grammar_get_what_they_get_without_such_neighbours() -> None:
    bare = [(prompt, replace(params, grammar=None)) for prompt, params in REQUESTS[:8]]
    mixed = [both for pair in zip(bare, REQUESTS[8:16], strict=True) for both in pair]
    alone = answers(new("hybrid"), bare)
    among = answers(new("hybrid"), mixed)[::2]
    assert [one.token_ids for one in among] == [one.token_ids for one in alone]


@pytest.mark.parametrize("mode", ["share", "suffix"])
def test_an_engine_warms_up_for_requests_with_a_grammar(mode: str) -> None:
    engine, params = new(mode), SamplingParams(max_new_tokens=12, grammar=from_regex(PATTERNS[0]))
    expected = answers(engine, [([3, 4], params)])
    warm_up(engine, params)
    assert [done.token_ids for done in answers(engine, [([3, 4], params)])] == [done.token_ids for done in expected]


def test_logprobs_are_those_of_the_model_before_the_grammar() -> None:
    from tests.helpers.oracle import logits_of

    params = SamplingParams(max_new_tokens=12, logprobs=True, grammar=from_regex(PATTERNS[0]))
    found = answers(new("share"), [([1, 2, 3], params)])[0]
    whole = logits_of(MODEL, [1, 2, 3, *found.token_ids]).float().log_softmax(-1)
    wanted = [float(whole[2 + at, token]) for at, token in enumerate(found.token_ids)]
    assert found.logprobs == pytest.approx(wanted, abs=1e-4)


# ---- where grammars end


def test_what_a_limit_cuts_is_no_whole_text() -> None:
    params = SamplingParams(max_new_tokens=4, grammar=from_regex("[a-d]{30}"))
    found = answers(new("share"), [([1], params)])[0]
    assert (found.finish_reason, len(found.token_ids)) == ("length", 4)
    assert re.fullmatch("[a-d]{4,}", found.text)


def test_stop_texts_end_before_the_grammar_does() -> None:
    params = SamplingParams(max_new_tokens=30, stop=("d",), grammar=from_regex("[a-c]{2}d[a-c]{9}"))
    found = answers(new("share"), [([1, 2], params)])[0]
    assert re.fullmatch("[a-c]{2}", found.text) and found.finish_reason == "stop"


# ---- matchers


def test_nodes_of_a_tree_have_masks_of_their_own() -> None:
    ids = {piece: i for i, piece in enumerate(PIECES)}
    a, b, c = (ids[x] for x in "abc")
    matcher = new_grammars().matcher(from_regex("a(b|cc)d"))
    grammar_mask_TW = torch.full((6, num_words(VOCAB)), -1, dtype=torch.int32)
    lost = matcher.fill_mask(grammar_mask_TW, [a, b, c, b, -1], [-1, 0, 0, 2, 3])

    def legal(row: int) -> set[str]:
        kept = apply_grammar_mask(torch.zeros(1, 1, VOCAB), grammar_mask_TW[None, row : row + 1])[0, 0] == 0
        return {PIECES[i] for i in kept[: len(PIECES)].nonzero()[:, 0].tolist()}

    assert not lost
    assert legal(0) == {"a", "ab"} and legal(1) == {"b", "c"} and legal(2) == {"d"} and legal(3) == {"c"}
    assert len(legal(4)) > 30 and len(legal(5)) > 30, "what the grammar does not allow is left alone"
    assert matcher.advance([a, c, b]) == 2, "and not taken"


@pytest.mark.parametrize("path", [[], ["a"], ["a", "b"]])
def test_a_matcher_goes_on_from_what_was_accepted(path: list[str]) -> None:
    """Whether states of the draft are used or not."""
    ids = {piece: i for i, piece in enumerate(PIECES)}
    grammar, drafted = from_regex("a(b|c)d{1,3}e"), [ids["a"], ids["b"], ids["d"]]
    grammar_mask_TW = torch.full((4, num_words(VOCAB)), -1, dtype=torch.int32)
    matcher, fresh = new_grammars().matcher(grammar), new_grammars().matcher(grammar)
    matcher.fill_mask(grammar_mask_TW, drafted, [-1, 0, 1])
    rest = {0: ["a"], 1: ["c"], 2: ["d"]}[len(path)]
    tokens = [ids[x] for x in [*path, *rest]]
    assert matcher.advance(tokens) == fresh.advance(tokens) == len(tokens)
    one, other = (torch.zeros(1, num_words(VOCAB), dtype=torch.int32) for _ in range(2))
    matcher.fill_mask(one), fresh.fill_mask(other)
    assert torch.equal(one, other)


def test_a_vocabulary_may_be_larger_than_the_tokenizers() -> None:
    backend = make_backend()
    size = backend.get_vocab_size()
    grammars = Grammars(Tokenizer(backend), vocab_size=size + 200, eos_ids=[backend.token_to_id("<|im_end|>")])
    legal_1W = torch.zeros(1, num_words(size + 200), dtype=torch.int32)
    grammars.matcher(from_regex("(.|\n)*")).fill_mask(legal_1W)
    kept_V = apply_grammar_mask(torch.zeros(1, 1, size + 200), legal_1W[None])[0, 0] == 0
    assert kept_V[: size // 2].sum() > 50 and not kept_V[size:].any(), "ids without a token are never legal"


def test_json_is_what_the_schema_says_and_ends() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}
    backend = make_backend()
    grammars = Grammars(Tokenizer(backend), vocab_size=400, eos_ids=[2])

    def takes(text: str) -> bool:
        ids = backend.encode(text).ids
        return grammars.matcher(from_json_schema(schema)).advance([*ids, 2]) == len(ids) + 1

    assert takes('{"a":"x"}') and takes('{\n  "a": 1\n}')
    assert not takes('{"a": 2}') and not takes("{}") and not takes('{"a": 1'), "incomplete"
    assert not takes('{"a":' + "\n" * 3 + "1}"), "white space has a limit"


# ---- what is refused


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (from_regex("("), "cannot be compiled: .*unclosed group"),
        (from_lark("start: foo"), "unknown name"),
        (from_json_schema({"type": "nonsense"}), "Invalid type"),
        (from_lark("start: A\nA: /a/ & /b/"), "it allows no text"),
    ],
)
def test_what_cannot_be_compiled_hurts_nobody_else(grammar: str, message: str) -> None:
    engine = new("share")
    request = engine.add([1, 2], SamplingParams(max_new_tokens=5))
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add([1], SamplingParams(grammar=grammar))
    while engine.num_running:
        engine.step()
    assert request.finish_reason == "length"
    with pytest.raises(ValueError, match=message):
        engine.generate([[1]], SamplingParams(grammar=grammar))


def test_parameters_that_go_with_no_grammar() -> None:
    for params, message in (
        ({"acceptance": "block"}, "grammar needs acceptance match, and acceptance is block"),
        ({"ignore_eos": True}, "a grammar ends the text"),
        ({"grammar": " "}, "grammar is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**{"grammar": from_regex("a"), **params})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a grammar needs a token that ends the text"):
        new_engine(tiny_decoder(3)).add([1], SamplingParams(grammar=from_regex("a")))


def test_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(new_grammars()._tokenizer, vocab_size=VOCAB, eos_ids=[END])
    compiled: list[str] = []
    compiling = Grammars._compile

    def counted(self: Grammars, grammar: str) -> Any:
        compiled.append(grammar)
        return compiling(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", counted)
    monkeypatch.setattr("sharesd.sampling.constraints.MAX_COMPILED", 2)
    for pattern in "aabacbba":
        assert isinstance(grammars.matcher(from_regex(pattern)), Matcher)
    assert len(compiled) == 5 and len(grammars._compiled) == 2


def test_drafts_that_come_to_a_limit_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher that cannot look at a node must not have it accepted: here it never can."""
    fill_mask = Matcher.fill_mask

    def lost(self: Matcher, grammar_mask_TW: torch.Tensor, tokens: Any = (), parents: Any = ()) -> list[int]:
        fill_mask(self, grammar_mask_TW)
        return list(range(len(tokens)))

    params = SamplingParams(max_new_tokens=20, grammar=from_regex(PATTERNS[2]))
    wanted = answers(new("naive"), [([1, 2], params)])[0]
    monkeypatch.setattr(Matcher, "fill_mask", lost)
    for mode in ("share", "share tree", "hybrid"):
        found = answers(new(mode), [([1, 2], params)])[0]
        assert found.token_ids == wanted.token_ids and "accepted" not in found.sources
