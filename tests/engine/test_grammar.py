"""Answers that a grammar shapes: with drafts or without, alone or among others, they are what plain decoding gives
where each of its tokens is chosen among those that the grammar allows. Answers of a minimum length. Answers that end
with an error of their own, at the token where plain decoding does.

Legend: T places of a round, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sharesd import LLM, sampling
from sharesd.data.grammar_spec import from_json_schema, from_lark, from_regex
from sharesd.data.request_errors import GrammarTooComplex, NoTokenAllowed
from sharesd.drafters.recycle.table import RecycleTable
from sharesd.drafters.suffix.table import SuffixTable
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.stop_checker import StopChecker
from sharesd.models.tokenizer import Tokenizer
from sharesd.sampling import constraints
from sharesd.sampling.constraints import Grammars, Matcher, MinTokens, apply_grammar_mask
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_buffers import num_words
from sharesd.startup.warmup import warm_up
from tests.cases.inputs import llama
from tests.engine import test_rows
from tests.helpers.oracle import PIECES, VOCAB, logits_of, new_engine, placed, tiny_decoder
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda
from tests.helpers.tiny_tokenizer import make_backend

pytest.importorskip("llguidance")

IDS = {piece: i for i, piece in enumerate(PIECES)}
END = IDS["!"]
"""Ends texts here, and is shown."""
MODEL = tiny_decoder(3)
MODEL.eos_ids = (END,)
PATTERNS = (r"[a-f]{3,9}( (th|ab)[a-p]{1,4}){1,3}", r"((ab|ba|abab){1,4}(\.\.|,) ){2,3}", r"[a-p .]*")
MODES = ("share", "share tree", "classic", "suffix", "hybrid", "hybrid tree")

pytestmark = pytest.mark.usefixtures("one_thread")


def new(mode: str, **options: Any) -> Engine:
    """An engine of this mode, whose drafts are often right and often wrong."""
    shape = {"num_draft": 8, "tree": (3, 3, 8)} if mode.endswith("tree") else {}
    drafts: Any = {"noise": 0.1, "tables": [SuffixTable(), RecycleTable(VOCAB, 3)], "num_nodes": 6, **shape}
    engine = test_rows.new(mode.removesuffix(" tree"), target=MODEL, **drafts, **{"auto_length": False} | options)
    engine._scheduler.grammars = new_grammars()
    return engine


def some_requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """With grammars and without, greedy and sampled, truncated, penalised, biased."""
    dice, found = random.Random(seed), []
    ways: dict[str, Any] = {"max_new_tokens": (9, 40, 60), "temperature": (0.0, 0.0, 1.0), "top_k": (0, 0, 5)}
    ways |= {"min_p": (0.0, 0.05), "repetition_penalty": (1.0, 1.0, 1.3), "logit_bias": ({}, {}, {7: 2.0})}
    for _ in range(count):
        prompt = [dice.randrange(VOCAB - 1) for _ in range(dice.choice([1, 5, 12]))]
        chosen = {name: dice.choice(values) for name, values in ways.items()} | {"seed": dice.randrange(2**40)}
        chosen |= {"logprobs": dice.random() < 0.3, "speculate": dice.random() < 0.9}
        grammar = dice.choice([None, *map(from_regex, PATTERNS)])
        found.append((prompt, SamplingParams(**chosen, grammar=grammar)))
    return found


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
    tokens, found, plain = list(prompt), list[int](), replace(params, grammar=None)
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


@cache
def new_grammars() -> Grammars:
    """Of a tokenizer that reads as the oracle's does, and writes spaces as such tokenizers do."""
    pieces = [piece.replace(" ", "Ġ") for piece in PIECES]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Grammars(Tokenizer(backend), vocab_size=VOCAB, eos_ids=[END])


REQUESTS = some_requests(1, 40)


@pytest.fixture(scope="module")
def plain() -> list[Completion]:
    """What each gives by itself, in an engine of one row without a drafter."""
    return test_rows.alone(REQUESTS, new("naive", batch=1))


@pytest.mark.thin
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
    heats: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.7, "repetition_penalty": 1.3}]
    for heat in heats:
        params = SamplingParams(max_new_tokens=14, grammar=from_regex(PATTERNS[0]), seed=5, **heat)
        assert answers(new("naive"), [([1, 2, 3], params)])[0].token_ids == written_out([1, 2, 3], params)


@pytest.mark.parametrize("mode", ["share", "suffix"])
def test_an_engine_warms_up_for_requests_with_a_grammar(mode: str) -> None:
    engine, params = new(mode), SamplingParams(max_new_tokens=12, grammar=from_regex(PATTERNS[0]))
    expected = answers(engine, [([3, 4], params)])
    warm_up(engine, engine.mode, params)
    assert [done.token_ids for done in answers(engine, [([3, 4], params)])] == [done.token_ids for done in expected]


def test_logprobs_are_those_of_the_model_before_the_grammar() -> None:
    params = SamplingParams(max_new_tokens=12, logprobs=True, grammar=from_regex(PATTERNS[0]))
    found = answers(new("share"), [([1, 2, 3], params)])[0]
    whole = logits_of(MODEL, [1, 2, 3, *found.token_ids]).float().log_softmax(-1)
    wanted = [float(whole[2 + at, token]) for at, token in enumerate(found.token_ids)]
    assert found.logprobs == pytest.approx(wanted, abs=1e-4)


def test_limits_and_stop_texts_end_before_the_grammar_does() -> None:
    limited = SamplingParams(max_new_tokens=4, grammar=from_regex("[a-d]{30}"))
    stopped = SamplingParams(max_new_tokens=30, stop=("d",), grammar=from_regex("[a-c]{2}d[a-c]{9}"))
    cut, ended = answers(new("share"), [([1], limited), ([1, 2], stopped)])
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 4) and re.fullmatch("[a-d]{4,}", cut.text)
    assert re.fullmatch("[a-c]{2}", ended.text) and ended.finish_reason == "stop"


def test_nodes_of_a_tree_have_masks_of_their_own() -> None:
    a, b, c = (IDS[x] for x in "abc")
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


@pytest.mark.parametrize("text", ["a", "ac", "abd"])
def test_a_matcher_goes_on_from_what_was_accepted(text: str) -> None:
    """Whether states of the draft are used or not."""
    matcher, fresh = (new_grammars().matcher(from_regex("a(b|c)d{1,3}e")) for _ in range(2))
    grammar_mask_TW = torch.full((4, num_words(VOCAB)), -1, dtype=torch.int32)
    matcher.fill_mask(grammar_mask_TW, [IDS[x] for x in "abd"], [-1, 0, 1])
    tokens = [IDS[x] for x in text]
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


def test_what_cannot_be_compiled_hurts_nobody_else() -> None:
    engine = new("share")
    for grammar, message in (
        (from_regex("("), "cannot be compiled: .*unclosed group"),
        (from_lark("start: foo"), "unknown name"),
        (from_json_schema({"type": "nonsense"}), "Invalid type"),
        (from_lark("start: A\nA: /a/ & /b/"), "it allows no text"),
    ):
        request = engine.add([1, 2], SamplingParams(max_new_tokens=5))
        engine.step()
        with pytest.raises(ValueError, match=message):
            engine.add([1], SamplingParams(grammar=grammar))
        test_rows.drain(engine)
        assert request.finish_reason == "length"
        with pytest.raises(ValueError, match=message):
            engine.generate([[1]], SamplingParams(grammar=grammar))


def test_parameters_that_do_not_go_together() -> None:
    grammar = {"grammar": from_regex("a")}
    wrong: list[tuple[dict[str, Any], str]] = [
        (grammar | {"acceptance": "block"}, "grammar needs acceptance match, and acceptance is block"),
        (grammar | {"ignore_eos": True}, "a grammar ends the text"),
        ({"grammar": " "}, "grammar is empty"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "max_new_tokens 8"),
        ({"min_new_tokens": 2, "acceptance": "block"}, "acceptance is block"),
    ]
    for params, message in wrong:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**params)
    with pytest.raises(ValueError, match="a grammar needs a token that ends the text"):
        new_engine(tiny_decoder(3)).add([1], SamplingParams(grammar=from_regex("a")))


def test_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(new_grammars()._tokenizer, vocab_size=VOCAB, eos_ids=[END])
    compiled, compiling = list[str](), Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda *given: (compiled.append(given[1]), compiling(*given))[1])
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


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "sampled"])
def test_texts_are_those_of_plain_decoding_whose_end_is_banned_at_first(more: dict[str, Any]) -> None:
    """Two plain answers, one after the other: the first cannot end."""
    prompts, num, most = [[3, 17, 9], [1], [5, 6, 7, 8, 2]], 12, 30

    def texts(mode: str, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        return [answer.token_ids for answer in answers(new(mode), [(prompt, params) for prompt in prompts])]

    params = SamplingParams(max_new_tokens=most, min_new_tokens=num, logit_bias={END: 4.0}, **more)
    free = replace(params, min_new_tokens=0)
    assert any(len(text) < num for text in texts("naive", prompts, free)), "some end too early by themselves"
    begun = texts("naive", prompts, replace(free, max_new_tokens=num, logit_bias={END: -torch.inf}))
    assert all(len(text) == num for text in begun)
    longer = [[*prompt, *text] for prompt, text in zip(prompts, begun, strict=True)]
    rest = texts("naive", longer, replace(free, max_new_tokens=most - num))
    wanted = [[*text, *end] for text, end in zip(begun, rest, strict=True)]
    for mode in ("naive", "share", "share tree", "suffix", "hybrid tree"):
        assert texts(mode, prompts, params) == wanted, mode


def test_end_tokens_are_masked_by_depth() -> None:
    masks = torch.full((4, 2), -1, dtype=torch.int32)
    constraint = MinTokens(3, [0, 33])
    assert constraint.advance([7]) == 1
    assert constraint.fill_mask(masks, [5, 6, 5], [-1, 0, -1]) == []
    assert masks.tolist() == [[-2, -3], [-2, -3], [-1, -1], [-2, -3]], "the second of a path comes behind three tokens"


def test_stop_strings_are_not_looked_for_before() -> None:
    tokenizer = Tokenizer(make_backend())
    begun, ids = (tokenizer.encode(text) for text in ("the cat sat on the cat", "the cat sat on the cat mat"))
    params = SamplingParams(min_new_tokens=len(tokenizer.encode("the cat sat")), stop=(" cat",))
    checker = StopChecker(tokenizer, params, eos_ids=(), room=100)
    assert checker.push(ids) == (len(begun), "the cat sat on the", "stop")


AB = {i: -torch.inf for i in range(VOCAB) if i not in (IDS["a"], IDS["b"])}
LONG = from_regex("[a-e]{1,300}f[a-e]{1,200}g")
OTHERS = [
    ([4, 5], SamplingParams(max_new_tokens=18, grammar=from_regex("[a-f]{30}"), seed=3)),
    ([6], SamplingParams(max_new_tokens=18, temperature=0.9, seed=4)),
]


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[tuple[Any, ...]]:
    """Decode requests together."""
    added = [engine.add(*request) for request in requests]
    done = test_rows.drain(engine)
    return [(one.token_ids, one.text, one.finish_reason, one.error) for one in map(done.__getitem__, added)]


@cache
def of_mode(mode: str) -> Engine:
    return new(mode)


def fresh(engine: Engine) -> Engine:
    engine._scheduler.grammars = Grammars(new_grammars()._tokenizer, vocab_size=VOCAB, eos_ids=[END])
    return engine


def shaped(pattern: str, **more: Any) -> dict[str, Any]:
    return {"grammar": from_regex(pattern), **more}


ENDLESS = {i: -torch.inf for i in range(VOCAB) if i != END}
NONE_LEFT: dict[str, tuple[dict[str, Any], str, str]] = {
    "no token writes it": (shaped("ab[a-c]{4}Z"), "ab[a-c]{4}", "by the grammar;"),
    "it is too short": (shaped("[a-c]{5}", min_new_tokens=9), "[a-c]{5}", "by the grammar and the minimum length;"),
    "what it needs is banned": (shaped("[ab]{3}c", logit_bias=AB), "[ab]{3}", "by the grammar and logit_bias;"),
    "at the first token": (shaped("[cd]{5}", logit_bias=AB), "", "at position 2 of the text by the grammar and logit"),
    "all but the end": ({"logit_bias": ENDLESS, "min_new_tokens": 3}, "", "by logit_bias and the minimum length;"),
}


@pytest.mark.parametrize("case", NONE_LEFT)
def test_no_token_left_is_an_error_in_every_mode(case: str) -> None:
    fields, text, message = NONE_LEFT[case]
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 6}]
    requests = [([1, 2], SamplingParams(**{"max_new_tokens": 20, **way, **fields})) for way in ways] + OTHERS
    wanted = run(of_mode("naive"), requests)
    assert wanted[2:] == [run(of_mode("naive"), [one])[0] for one in OTHERS]
    for _, found, reason, error in wanted[:2]:
        assert re.fullmatch(text, found) and reason == "error" and message in str(error)
    for mode in ("share", "share tree", "suffix", "hybrid tree"):
        assert run(of_mode(mode), requests) == wanted
        assert run(of_mode(mode), requests[:1]) == wanted[:1], "rows of failed requests serve later ones"


def test_a_limit_is_reached_at_the_same_token_whatever_was_decoded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar engine counts states of all requests and drafts together."""
    monkeypatch.setattr(constraints, "MAX_LEXER_STATES", 40)
    params = SamplingParams(max_new_tokens=90, logit_bias={IDS["f"]: -5.0}, grammar=LONG)
    requests = [([1, 2], params), ([3, 4], replace(params, temperature=1.0, seed=8)), OTHERS[1]]
    alone = [run(fresh(of_mode("naive")), [one])[0] for one in requests]
    assert [one[2] for one in alone] == ["error", "error", "length"]
    assert all("too many states" in str(one[3]) and len(one[0]) > 5 for one in alone[:2])
    for mode in ("naive", "share", "share tree", "hybrid tree"):
        engine = fresh(of_mode(mode))
        for _ in range(2):
            assert run(engine, requests) == alone, mode


def test_a_limit_at_the_first_token_is_found_before() -> None:
    engine = fresh(of_mode("naive"))
    with pytest.raises(GrammarTooComplex, match="too complex at its first token: .*Too many items"):
        engine.add([1, 2], SamplingParams(grammar=from_lark('start: "a"{50000}')))
    with pytest.raises(ValueError, match="unclosed group") as raised:
        engine.add([1, 2], SamplingParams(grammar=from_regex("(")))
    assert not isinstance(raised.value, GrammarTooComplex)
    with pytest.raises(NoTokenAllowed, match=f"bans all {VOCAB} tokens"):
        engine.add([1], SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -torch.inf)))
    with pytest.raises(ValueError, match=f"stop_token_ids names token {VOCAB}"):
        engine.add([1], SamplingParams(stop_token_ids=(VOCAB,)))


def test_it_is_found_in_replayed_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of CUDA."""
    fields, _, message = NONE_LEFT["what it needs is banned"]
    requests = [([1, 2], SamplingParams(max_new_tokens=20, **fields)), *OTHERS]
    wanted = run(of_mode("naive"), requests)
    take_the_way_of_cuda(monkeypatch)
    engine = new("share", graphs=RecordedGraphs(), widths=[5], auto_length=False, async_scheduling=True)
    warm_up(engine, engine.mode, requests[0][1])
    assert run(engine, requests) == wanted and message in str(wanted[0][3])


def test_python_has_the_text_so_far_and_the_message(tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=20, min_new_tokens=9, grammar=from_regex("[ab]{5}"))
    with LLM(str(llama(tmp_path / "x", seed=90)), mode="suffix", device="cpu", max_context=64) as llm:
        failed, other = llm.generate(["the tree", "the river"], [params, replace(params, min_new_tokens=0)])
        *_, last = llm.stream("the tree", params)
    assert re.fullmatch("[ab]{5}", failed.text) and failed.finish_reason == "error"
    assert "minimum length" in str(failed.error) and other.finish_reason == "stop" and other.error is None
    assert last.finish_reason == "error" and isinstance(last.error, NoTokenAllowed)
