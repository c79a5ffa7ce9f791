"""Trained heads as drafters: texts stay those of plain decoding, and what they read is the target's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.linear import pack_linears
from quant.config import QuantConfig
from sharesd.cli.main import main
from sharesd.config import EngineConfig
from sharesd.drafters.eagle.drafter import EagleDrafter
from sharesd.drafters.glide.drafter import GlideDrafter
from sharesd.drafters.glide.head import Glide
from sharesd.drafters.heads.checkpoint import load_head
from sharesd.drafters.heads.config import mode_of, taps_of
from sharesd.drafters.heads.head import FeatureHead, Head, native_head
from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.drafters.ngram.table import NgramTable
from sharesd.drafters.parallel.drafter import ParallelDrafter
from sharesd.engine.engine import Engine
from sharesd.kvcache.static import StaticKVCache
from sharesd.llm import LLM
from sharesd.models.decoder import Decoder
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.sampling.sampler import Sampler
from sharesd.sampling_params import SamplingParams
from tests.drafters.test_tree_draft import likeliest, rows_of
from tests.helpers.compiled import compiled
from tests.helpers.in_mode import in_mode
from tests.helpers.oracle import VOCAB, kv_of, new_engine, placed, shapes_for, tiny_decoder
from tests.helpers.shared_runtimes import Shared
from tests.helpers.tiny_heads import logits_of, make_head, random_head

PROMPTS = [[3, 17, 9], [21, 4, 4, 30, 8, 12, 1, 5, 6, 7, 2, 9, 9], [5]]
GREEDY, SAMPLED = SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30, temperature=1.0, seed=4)
IDS = sorted({7, 3, 31, 12, 0, 39, 22, 9, 14, 15, 16, 17, 28})
TREE = (2, 3, 6)
DRAFTERS: Any = {"eagle": EagleDrafter, "eagle3": EagleDrafter, "parallel": ParallelDrafter, "glide": GlideDrafter}
pytestmark = pytest.mark.usefixtures("one_thread")


def built(
    head: Head,
    target: Decoder,
    *,
    batch: int = 1,
    num_draft: int = 4,
    tree: Any = None,
    mixed: bool = False,
    **options: Any,
) -> Engine:
    cache = target.new_cache(batch, 160, head.config.taps)
    top, shapes = shapes_for(tree[2] if tree else num_draft, tree)
    drafter: Any = DRAFTERS[head.config.kind](head, cache, shapes=shapes, weight_bytes=0, branching=top)
    drafter.commits_plain_rounds = options.get("async_scheduling", False)  # as on a GPU
    if mixed:
        table = NgramTable(num_draft, 1, 4)
        drafter = HybridDrafter("hybrid", [table], drafter, num_nodes=num_draft, trees=True)
    return new_engine(target, drafter, cache=cache, **options)


def head_for(target: Decoder, folder: Path, kind: str, **options: Any) -> Head:
    dtype = next(target.parameters()).dtype
    return load_head(make_head(folder, target.config, kind, dtype=dtype, **options), target)


def texts(engine: Engine, prompts: Any, params: SamplingParams, **options: Any) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(prompts, params, **options)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_texts_are_those_of_plain_decoding(kind: str, tree: Any, batch: int, params: SamplingParams) -> None:
    target = tiny_decoder(3)
    want = texts(new_engine(target, batch=batch), PROMPTS, params)
    engine = built(random_head(target, kind, ids=IDS), target, batch=batch, tree=tree)
    assert texts(engine, PROMPTS, params) == want
    assert engine.stats.drafted_tokens > 60


@pytest.mark.parametrize("kind", DRAFTERS)
def test_compiled_steps_do_not_change_the_text(kind: str, tmp_path: Path) -> None:
    """All in kernels, in bfloat16; several rows, some of which end early."""
    target = tiny_decoder(3, dtype=torch.bfloat16, hidden_size=64)
    head = head_for(target, tmp_path, kind, ids=IDS)
    compiled(target, "native")
    pack_linears(head)
    if isinstance(head, FeatureHead):
        head.native = native_head(head)
    for params, tree in ((GREEDY, TREE), (SAMPLED, None)):
        want = texts(new_engine(target, batch=2), PROMPTS, params)
        assert texts(built(head, target, batch=2, tree=tree), PROMPTS, params) == want


def features_of(head: Head, cache: StaticKVCache, row: int, num: int) -> Tensor:
    """What a head reads of the target's first tokens in a row [1, num, F]."""
    if isinstance(head, Glide):
        pairs = [part[row] for layer in head.config.target_layers for part in cache.kv(layer, num)]
        return torch.cat([part.transpose(0, 1).flatten(1) for part in pairs], 1)[None]
    assert cache.features is not None
    return cache.features[row : row + 1, :num]


def bigram() -> Decoder:
    """A target whose blocks add nothing: the hidden state behind the norm is the token's embedding, made of signs."""
    target = tiny_decoder(5)
    target.embed.weight.copy_(target.embed.weight.sign())
    target.norm.weight.fill_(1)
    for block in target.blocks:
        block.attn.o.weight.zero_(), block.mlp.down.weight.zero_()
    return target


def knowing(target: Decoder, folder: Path, **options: Any) -> Head:
    """Its head, which hands the embedding on."""
    head = head_for(target, folder, "eagle", bias=False, **options)
    D = target.config.hidden_size
    head.fc.weight.copy_(torch.cat([torch.eye(D), torch.zeros(D, D)], 1))
    head.block.attn.o.weight.zero_(), head.block.mlp.down.weight.zero_()
    return head


@pytest.mark.parametrize("tree", [None, (2, 4, 6)], ids=["chain", "tree"])
def test_the_guesses_of_a_head_that_knows_are_accepted(tree: Any, tmp_path: Path) -> None:
    target = bigram()
    engine = built(knowing(target, tmp_path), target, tree=tree, batch=3)
    for params in (GREEDY, SAMPLED):
        assert texts(engine, PROMPTS, params) == texts(new_engine(target, batch=3), PROMPTS, params)
        found = engine.stats.alpha == 1.0 if tree is None else engine.stats.tau > 3.0
        assert found, "the noise is that of the target's tokens"


def test_tokens_of_a_smaller_vocabulary_are_those_of_the_target(tmp_path: Path) -> None:
    target = bigram()
    head = knowing(target, tmp_path, ids=IDS)
    head.lm_head.weight.copy_(target.head.weight[IDS])  # type: ignore[union-attr]
    rest = [token for token in range(VOCAB) if token not in IDS]
    for params in (GREEDY, SAMPLED):
        known = replace(params, logit_bias=dict.fromkeys(rest, float("-inf")))
        engine = built(head, target)
        assert texts(engine, PROMPTS, known) == texts(new_engine(target), PROMPTS, known)
        assert engine.stats.alpha == 1.0


def unrolled(head: Head, text: list[int], features: Tensor, path: tuple[int, ...]) -> Tensor:
    """Log-probabilities [V] after a path, looked at from the beginning."""
    known = torch.nn.functional.pad(features, (0, 0, 0, len(path)))  # a chain needs none of its guesses
    states = head.unroll(torch.tensor([[*text[1:], *path]]), known, steps=1 + len(path))
    return logits_of(head, states[-1][:, -1:])[0, 0].log_softmax(0)


@torch.inference_mode()
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("top", "depth", "budget"), [(1, 4, 4), (2, 3, 6), (3, 4, 16)])
def test_drafts_are_what_the_unrolled_head_finds_likeliest(kind: str, top: int, depth: int, budget: int) -> None:
    """Chains and trees, behind a few rounds of which the features are the target's."""
    target = tiny_decoder(3)
    engine = built(random_head(target, kind, ids=IDS), target, tree=(top, depth, budget) if top > 1 else None)
    drafter, request = engine.drafter, engine.add(PROMPTS[1], GREEDY)
    assert isinstance(drafter, EagleDrafter)
    for _ in range(3):
        engine.step()
        drafter.catch_up({0: request.tokens}, False)
        draft = drafter.draft(engine.variant(GREEDY).round(0, 1).context, drafter.shapes[-1])
        tokens = draft.tokens[0].tolist()
        ours = {tuple(tokens[row - 1] for row in path[1:]) for path in rows_of(draft)[1:]}
        features = features_of(drafter.head, engine.cache, 0, len(request.tokens) - 1)
        after = partial(unrolled, drafter.head, request.tokens, features)
        assert ours == likeliest(after, top, depth, budget)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_rounds_of_others_are_caught_up_with(kind: str, tmp_path: Path) -> None:
    """Plain rounds in between, few and many: what the head holds is what it would have read at once."""
    target = tiny_decoder(3)
    engine = built(head_for(target, tmp_path, kind), target, batch=2)
    want = texts(new_engine(target, batch=2), PROMPTS[:2], SamplingParams(max_new_tokens=60))
    policy = engine.variant(GREEDY).policy
    pinned = policy.pinned
    requests = [engine.add(prompt, SamplingParams(max_new_tokens=60)) for prompt in PROMPTS[:2]]
    for step in range(200):
        policy.pinned = pinned if step % 17 in (0, 1, 5, 6, 9) else pinned._replace(depth=0, nodes=0)
        if not engine.step():
            break
        if step == 30:
            check(engine, 0), check(engine, 1)
    assert [request.tokens[len(request.prompt_ids) :] for request in requests] == want


def check(engine: Engine, row: int) -> None:
    drafter = engine.drafter
    assert isinstance(drafter, EagleDrafter)
    cached_ids = drafter.cache.cached_ids[row]
    assert len(cached_ids) > 15
    fresh = drafter.head.new_cache(1, 160)
    with torch.inference_mode():
        drafter._read(torch.tensor([cached_ids]), engine.cache.rows(row, row + 1), len(cached_ids) - 1, fresh)
    for ours, read in zip(kv_of(drafter.cache), kv_of(fresh), strict=True):
        torch.testing.assert_close(ours[row, :, : len(cached_ids) - 1], read[0, :, : len(cached_ids) - 1])


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "glide"])
def test_chats_reuse_what_the_head_has_read(kind: str, tmp_path: Path) -> None:
    target = tiny_decoder(3)
    engine, plain = built(head_for(target, tmp_path, kind), target, batch=2), new_engine(target, batch=2)
    chat = list(PROMPTS[1])
    for turn in range(3):
        answer = texts(engine, [chat], SAMPLED, reuse=True)[0]
        assert answer == texts(plain, [chat], SAMPLED, reuse=True)[0]
        check(engine, [ids[: len(chat)] for ids in engine.cache.cached_ids].index(chat))
        chat += [*answer, 4, turn]


@pytest.mark.parametrize("kind", ["eagle", "parallel", "glide"])
def test_requests_join_and_leave(kind: str, tmp_path: Path) -> None:
    target = tiny_decoder(3)
    engine = built(head_for(target, tmp_path, kind), target, batch=2, prefill_chunk=3)
    alone = [texts(new_engine(target), [prompt], params)[0] for prompt in PROMPTS for params in (GREEDY, SAMPLED)]
    jobs = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED)]
    requests = []
    while len(requests) < len(jobs) or engine.num_running or engine.num_waiting:
        if len(requests) < len(jobs):
            requests.append(engine.add(*jobs[len(requests)]))
        engine.step()
        engine.step()
    assert [request.tokens[len(request.prompt_ids) :] for request in requests] == alone


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "glide"])
def test_hybrid_mixes_a_head_with_tables(kind: str, tmp_path: Path) -> None:
    target = tiny_decoder(3)
    engine = built(head_for(target, tmp_path, kind), target, batch=2, mixed=True)
    prompts = [PROMPTS[1] * 3, PROMPTS[0] * 5]
    for params in (GREEDY, SAMPLED):
        assert texts(engine, prompts, params) == texts(new_engine(target, batch=2), prompts, params)


def test_other_rules_of_acceptance_take_its_probabilities(tmp_path: Path) -> None:
    target = tiny_decoder(3)
    engine = built(head_for(target, tmp_path, "eagle", ids=IDS), target)
    params = SamplingParams(max_new_tokens=20, temperature=1.0, acceptance="rejection")
    assert [len(text) for text in texts(engine, PROMPTS, params)] == [20] * 3
    assert engine.stats.alpha > 0.02


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, top_k=5), replace(SAMPLED, logit_bias={3: 9.0})])
def test_logits_over_fewer_tokens_choose_what_those_over_all_do(params: SamplingParams) -> None:
    dice = torch.Generator().manual_seed(2)
    logits, ids = torch.randn(2, 4, len(IDS), generator=dice), torch.tensor(IDS)
    wide = torch.full((2, 4, VOCAB), -torch.inf).index_copy(2, ids, logits)
    none, at = torch.full((2, 3), -1), torch.tensor([7, 40])

    def chosen(logits: Tensor, *ids: Tensor) -> list[Tensor]:
        sampler = Sampler(*placed([params] * 2, VOCAB))
        one = sampler.draft(logits[:, 0], none, at, at - 1, *ids).tokens
        return [one, *sampler.top_tokens(logits, 3, at, none, None, *ids)]

    for ours, theirs in zip(chosen(logits, ids), chosen(wide), strict=True):
        torch.testing.assert_close(ours, theirs)


def config_of(target: Path, head: Path, quant: str | None = None, **options: Any) -> EngineConfig:
    given = {"target": str(target), "heads": (str(head),), "device": "cpu", "max_context": 128, "num_draft": 3}
    quantized: Any = quant and QuantConfig.parse(quant)
    return EngineConfig(head_quant=quantized, **(given | options))  # type: ignore[arg-type]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kind", "compile", "quant"),
    [
        *((kind, "native", None) for kind in DRAFTERS),
        ("eagle3", "off", None),
        ("eagle", "native", "hqq:4:32,head=8"),
        ("eagle3", "native", "hqq:8:64,fc=4"),
        ("parallel", "native", "hqq:4:32"),
    ],
)
def test_a_folder_in_the_public_layout_drafts(kind: str, compile: Any, quant: str | None, shared: Shared) -> None:
    """Loaded as users do; with naive and hybrid on the same target and cache."""
    mode: Any = mode_of(kind)  # type: ignore[arg-type]
    head = shared.head(shared.checkpoint(), kind, ids=range(0, 384, 3), dtype=torch.bfloat16, mlp=64)
    options = {"mode": mode, "hybrid_with": (mode, "suffix"), "compile": compile, "max_batch": 2}
    runtime = Runtime(config_of(shared.checkpoint(), head, quant, **options), ("naive", mode, "hybrid"))
    prompts = ["the cat sat on the mat and the cat", "a dog ran"]
    for params in (GREEDY, SAMPLED):
        want = texts(in_mode(runtime, "naive"), prompts, params)
        for one in (mode, "hybrid"):
            engine = in_mode(runtime, one, warm=params)
            assert texts(engine, prompts, params) == want
    engine = in_mode(runtime, mode)
    assert engine.drafter is not None
    weights, kv = engine.drafter.extra_bytes()
    assert weights > 384 // 3 * 64
    assert (engine.cache.features is None) == (kind == "glide") and kv > getattr(engine.cache.features, "nbytes", 0)
    assert engine.stats.drafted_tokens > 0
    assert (runtime.model.heads[mode].native is not None) == (compile == "native")
    report = runtime.report(mode).quant
    assert (report is None) == (quant is None)
    if report is not None:
        assert report.num_linears == 5 + ("head" in report.spec)
        assert weights < report.full_bytes


@pytest.mark.usefixtures("own_cache")
def test_an_lm_head_that_is_the_targets_is_quantized_for_the_head_alone(shared: Shared) -> None:
    head = shared.head(shared.checkpoint(), "eagle", dtype=torch.bfloat16, mlp=64)
    kinds: dict[str | None, int] = {}
    for quant in (None, "hqq:4:32", "hqq:4:32,head=4"):
        runtime = Runtime(config_of(shared.checkpoint(), head, quant, mode="eagle"), ("naive", "eagle"))
        assert texts(in_mode(runtime, "eagle"), PROMPTS, GREEDY) == texts(in_mode(runtime, "naive"), PROMPTS, GREEDY)
        kinds[quant] = in_mode(runtime, "eagle").drafter.extra_bytes()[0]  # type: ignore[union-attr]
    assert kinds["hqq:4:32"] < kinds["hqq:4:32,head=4"] < kinds[None]


@pytest.mark.parametrize(
    ("layers", "taps"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (6, (1, 3, 6)), (7, (2, 3, 4)), (30, (2, 15, 27))]
)
def test_taps_of_targets_of_any_depth(layers: int, taps: tuple[int, ...]) -> None:
    assert taps_of({}, layers) == taps


@pytest.mark.parametrize(
    "said",
    [
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},  # blocks before: vLLM, speculators
        {"aux_hidden_state_layer_ids": [2, 4, 5]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},  # the block itself: SGLang, SpecForge
        {"target_layer_ids": [1, 3, 4]},  # DeepSpec
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "target_layer_ids": [1, 3, 4], "eagle_config": None},
    ],
    ids=str,
)
def test_taps_are_counted_as_the_place_says_where_they_are_written(said: dict[str, Any]) -> None:
    assert taps_of(said, 8) == (2, 4, 5)


SPECULATORS = {"norm_before_fc": True, "norm_output": True, "layer_types": ["sliding_attention"], "sliding_window": 5}
TWO_LAYERS = {"fc_norm": True, "norm_output": True, "layers": 2}
LAST_STATE = {"eagle_config": {"use_aux_hidden_state": False}}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("switches", "options"),
    [(SPECULATORS, {}), (TWO_LAYERS, {"head_quant": "hqq:8:64,fc=4"}), (LAST_STATE, {"compile": "off"})],
    ids=["speculators", "two layers", "last state"],
)
def test_texts_do_not_depend_on_the_switches_of_a_head(switches: dict[str, Any], options: Any, shared: Shared) -> None:
    target = shared.checkpoint()
    head = shared.head(target, "eagle3", ids=range(0, 384, 3), dtype=torch.bfloat16, mlp=64, **switches)
    given = {"heads": (str(head),), "device": "cpu", "max_context": 128, "num_draft": 3, "compile": "native"}
    with LLM(target, modes=["naive", "eagle"], **given | options) as llm:
        for params in (GREEDY, SAMPLED):
            want, found = (llm.generate(PROMPTS, params, mode=mode) for mode in ("naive", "eagle"))
            assert [done.token_ids for done in found] == [done.token_ids for done in want]
            assert any(done.stats is not None and done.stats.drafted_tokens for done in found)


@pytest.mark.parametrize("switches", [SPECULATORS, TWO_LAYERS], ids=["speculators", "two layers"])
def test_trees_do_not_depend_on_the_switches_of_a_head(switches: dict[str, Any]) -> None:
    target = tiny_decoder(3)
    engine = built(random_head(target, "eagle3", ids=IDS, **switches), target, batch=3, tree=TREE)
    assert texts(engine, PROMPTS, SAMPLED) == texts(new_engine(target, batch=3), PROMPTS, SAMPLED)
    assert engine.stats.drafted_tokens > 60


def test_a_switch_that_is_not_supported_ends_the_command(
    shared: Shared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shared.checkpoint()
    head = make_head(tmp_path, decoder_config(target), "eagle3", parallel_drafting=True)
    options = ["--target", str(target), "--mode", "eagle", "--draft-head", str(head), "--device", "cpu"]
    assert main(["generate", "the", *options]) == 2
    said = capsys.readouterr().err.strip()
    assert "parallel_drafting is True in its config.json (P-EAGLE), not supported; give a head" in said
    assert len(said.splitlines()) == 1
