"""Compiled steps in bfloat16: modes emit the same tokens, rows the same bits at any width, and nothing compiles twice.

Legend: B rows, T tokens, V vocabulary, S slots, F features, P states, D hidden size.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from compile.attention import TreeAttentionMask
from compile.inductor import CompiledMethods, CompiledModel, compile_step, structure
from compile.linear import pack_linears
from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch
from sharesd.config import CompileMode, EngineConfig, Mode
from sharesd.drafters.heads.head import Head
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.after_warmup import no_recompiles
from tests.helpers.compiled import NUM_DRAFT, check_looking_back, compiled, wide_decoder
from tests.helpers.in_mode import in_mode
from tests.helpers.oracle import classic_engine, layer_of, new_engine, share_engine, switched, tiny_decoder
from tests.helpers.tiny_heads import random_head

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
MODES: tuple[Mode, ...] = ("naive", "classic", "share")
BUFFER = r"= empty_strided\w*\(\(([\d, ]+)\)"
CAT = "the cat sat on the mat, and the sky was"
PROMPTS: list[str | list[int]] = ["why is the sky blue", [7], CAT, [5, 6, 7, 8], [9] * 33]
GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.95, seed=3)
SHORT = SamplingParams(max_new_tokens=9)
B, S, D, LEAD = 2, 64, 32, 3
TREE = TreeAttentionMask(*(torch.tensor([values] * B) for values in ([0, 0, 1], [[0, 0], [1, 0], [0, 2]])))


def new_runtime(checkpoint: Any, mode: CompileMode, modes: Sequence[Mode] = MODES, **options: Any) -> Runtime:
    where: dict[str, Any] = {"target": str(checkpoint()), "device": "cpu", "compile": mode, "max_context": 128}
    return Runtime(EngineConfig(**{**where, "num_draft": NUM_DRAFT, **options}), modes)


@pytest.fixture(scope="module", params=["regional", "full"])
def runtime(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Runtime:
    """`full` has two modes only: each form of it takes seconds to compile."""
    return new_runtime(checkpoint, request.param, ("naive", "share") if request.param == "full" else MODES)


def test_all_modes_emit_the_same_tokens_and_nothing_compiles_after_warm_up(runtime: Runtime) -> None:
    """Nor in a chat in changing modes."""
    engines = {mode: in_mode(runtime, mode, warm=SAMPLED) for mode in runtime.modes}
    assert engines["share"].drafter.model is engines["share"].target, "drafts are compiled, too"
    with no_recompiles():
        for params in (GREEDY, SAMPLED):
            naive, *others = (engines[mode].generate(PROMPTS, params) for mode in runtime.modes)
            for theirs in others:
                assert [c.token_ids for c in theirs] == [c.token_ids for c in naive]
            assert len({tuple(c.token_ids) for c in naive}) == len(PROMPTS)
            assert all(0 < engines[mode].stats.alpha < 1 for mode in runtime.modes[1:])
        for length in range(1, 12):  # every width that steps have, and others
            engines["share"].generate([list(range(length))], SHORT)
        text, params, in_turn = [3, 4, 5, 6, 7], SamplingParams(max_new_tokens=9), [*engines.values()]
        for turn in range(6):
            first, second = (in_turn[(turn + i) % len(in_turn)] for i in range(2))
            (done,) = first.generate([text], params, reuse=True)
            assert second.generate([text], params, reuse=True)[0].token_ids == done.token_ids
            text = [*text, *done.token_ids, turn]


def test_rows_of_a_step_have_the_same_bits_at_any_width(runtime: Runtime) -> None:
    model, tokens, following = runtime.step, torch.arange(11, 21)[None], torch.arange(21, 22 + NUM_DRAFT)[None]
    with torch.inference_mode():
        caches = [model.new_cache(1, runtime.cache.slots) for _ in range(2)]
        for cache in caches:
            model.forward(tokens, cache)
            cache.lengths += tokens.shape[1]
        wide = model.forward(following, caches[0])
        for t in range(1 + NUM_DRAFT):
            one = model.forward(following[:, t : t + 1], caches[1])
            assert torch.equal(one[:, 0], wide[:, t])
            caches[1].lengths += 1
        for ours, theirs in zip((*caches[0].k, *caches[0].v), (*caches[1].k, *caches[1].v), strict=True):
            assert torch.equal(ours[:, :, : 11 + NUM_DRAFT], theirs[:, :, : 11 + NUM_DRAFT])


def test_prompts_as_long_as_a_step_compile_nothing(checkpoint: Callable[..., Path]) -> None:
    """With one mode loaded, some forms of its widths do not exist: full weights at width 1."""
    engine = in_mode(new_runtime(checkpoint, "regional", ("share",)), "share")
    with no_recompiles():
        for length in range(1, 3 + NUM_DRAFT):
            engine.generate([list(range(length))], SHORT)


def test_layers_that_stay_full_do_not_share_a_form(checkpoint: Callable[..., Path]) -> None:
    """A skipped layer has other modules than the rest: the same compiled function would read the wrong weights."""
    quant = QuantConfig(bits=4, group_size=32, skip_layers=(0,), skip_projs=("down",), head_bits=8)
    for mode in ("native", "regional"):
        runtime = new_runtime(checkpoint, mode, ("naive", "share"), quant=quant)
        naive, share = (in_mode(runtime, m).generate(PROMPTS[:3], SAMPLED) for m in ("naive", "share"))
        assert [c.token_ids for c in share] == [c.token_ids for c in naive]
        assert in_mode(runtime, "share").stats.alpha > 0.3


@pytest.mark.parametrize("how", ["native", "regional"])
def test_drafts_by_the_targets_own_weights_are_all_accepted(how: str) -> None:
    """bfloat16, compiled, widths 1 and 4: a single bit that depends on the width would show up as a miss."""
    prompts = [[3, 17, 9], [21, 4, 4, 30, 8, 12, 1], [5] * 6]
    plain = new_engine(compiled(wide_decoder(), how))
    model, switch = switched(wide_decoder())
    share = share_engine(compiled(model, how, switch), switch, num_draft=NUM_DRAFT)
    classic = classic_engine(compiled(wide_decoder(), how), compiled(wide_decoder(), how), num_draft=NUM_DRAFT)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_new_tokens=1 + 8 * (1 + NUM_DRAFT), temperature=temperature)
        want = [c.token_ids for c in plain.generate(prompts, params)]
        for engine in (share, classic):
            assert [c.token_ids for c in engine.generate(prompts, params)] == want
            if engine is share or how == "native":
                assert engine.stats.acceptance_by_position == [1.0] * NUM_DRAFT and engine.stats.alpha == 1
            else:  # it reads the prompt's last token again, by the compiled form, where the target read it plainly
                assert engine.stats.alpha > 0.95


def test_draft_trees_of_any_shape_compile_nothing_after_warm_up(checkpoint: Callable[..., Path]) -> None:
    runtime = new_runtime(checkpoint, "regional", ("naive", "share", "suffix"), num_draft=None, tree=(2, 3, 6))
    naive, *drafting = (in_mode(runtime, mode) for mode in runtime.modes)
    prompts = [list(range(20)), [5, 6, 1, 5, 7, 2, 5, 8, 3, 5, 6, 4, 5]]  # what follows 5 is a matter of choice
    with no_recompiles():
        want = [naive.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
        for engine in drafting:
            policy = engine.variant(GREEDY).policy
            for policy.pinned in engine.drafter.shapes:  # type: ignore[union-attr]
                assert [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts] == want


def full(model: Decoder) -> CompiledModel:
    pack_linears(model)
    return CompiledModel(model, {2, 1 + NUM_DRAFT})


EACH_FORM = pytest.mark.parametrize("form", [partial(compiled, how="regional"), full], ids=["regional", "full"])


@EACH_FORM
def test_compiled_code_holds_no_copy_of_the_cache(form: Callable[[Decoder], CausalModel]) -> None:
    model = form(wide_decoder())
    cache = model.new_cache(1, 2048)  # larger than all else in the step
    with torch.inference_mode():
        _, codes = run_and_get_code(lambda: model.forward(torch.tensor([[3, 4]]), cache))
    buffers = [math.prod(map(int, re.findall(r"\d+", shape))) for shape in re.findall(BUFFER, "".join(codes))]
    assert buffers and max(buffers) < cache.k[0].numel() // 4
    assert "as_strided" not in "".join(codes), "a view of a storage which several tensors share"


@EACH_FORM
def test_compiled_steps_read_and_write_the_cache_they_are_given(form: Callable[[Decoder], CausalModel]) -> None:
    """Each layer its own keys and values, in whichever cache: nothing of the traced one is left in the code."""
    plain = tiny_decoder(3, num_hidden_layers=2)
    model = form(copy.deepcopy(plain))
    tokens = torch.randint(0, 40, (2, 5, 4), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        caches = [(model.new_cache(2, slots), plain.new_cache(2, slots)) for slots in (64, 64, 96)]
        for start, pair in enumerate(caches):
            for cache in pair:
                cache.lengths += torch.tensor([start, 7])
        for step in range(5):
            for ours, theirs in caches:
                width = 2 if step % 2 else 4
                mine, wanted = (m.forward(tokens[:, step, :width], c) for m, c in ((model, ours), (plain, theirs)))
                torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)
                for cache in (ours, theirs):
                    cache.lengths += width
        for ours, theirs in caches:
            for mine, wanted in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)


def test_structure_tells_blocks_apart() -> None:
    model = tiny_decoder(0)
    same = structure(model.blocks[0])
    assert structure(model.blocks[1]) == same
    quantize_linears(model, QuantConfig(group_size=32, skip_layers=(0,)), Switch(), head_name="head", layer_of=layer_of)
    assert structure(model.blocks[0]) == same != structure(model.blocks[1])
    changes: list[tuple[str, Any]] = [("window", 4), ("use_rope", False), ("softcap", 2.0), ("use_rope", 1)]
    changes += [("taps", [1, 2]), ("taps", (1, 2)), ("taps", [1, 3]), ("taps", {"a": (1, [2.0])}), ("taps", {"a": 1})]
    seen = {same}
    for attribute, value in changes:
        other = copy.deepcopy(model.blocks[0])
        setattr(other.attn, attribute, value)
        seen.add(structure(other))
    assert len(seen) == 1 + len(changes)


def test_no_recompiles_notices_a_compilation() -> None:
    double = compile_step(lambda x: x * 2 + 1)
    with pytest.raises(RuntimeError, match="1 graphs were compiled after warm-up"), no_recompiles():
        double(torch.ones(3))
    with no_recompiles():
        double(torch.zeros(3))
    with pytest.raises(ZeroDivisionError), no_recompiles():
        raise ZeroDivisionError


def test_compiled_functions_are_their_own() -> None:
    """Two forms of one function, of different shapes, never share or replace each other's code."""

    def add(module: nn.Module, x: Tensor) -> Tensor:
        return x + module.amount  # type: ignore[operator]

    modules = [nn.Module(), nn.Module()]
    for amount, module in enumerate(modules):
        module.amount = amount  # type: ignore[assignment]
    forms = [compile_step(add) for _ in modules]
    for _ in range(2):
        for amount, (form, module) in enumerate(zip(forms, modules, strict=True)):
            assert form(module, torch.zeros(2 + amount)).tolist() == [amount] * (2 + amount)


def test_compiled_steps_that_look_back_see_the_first_slots_and_recent_chunks() -> None:
    check_looking_back("regional")


def begin(head: Head, seed: int) -> tuple[Tensor, Tensor, StaticKVCache]:
    dice = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(0, 40, (B, S), generator=dice)
    features_BSF = torch.randn(B, S, len(head.config.taps) * D, generator=dice, dtype=torch.float64)
    return tokens_BS, features_BSF, head.new_cache(B, S).draft_view()


def feature_steps(head: Head, steps: Any, seed: int, *, trees: bool) -> Iterator[Tensor]:
    """Logits of a first step, of a chain's next guesses, and of a tree's nodes; then what was kept."""
    tokens_BS, features_BSF, cache = begin(head, seed)
    states_BPD, ends_B = torch.zeros(B, 9, D, dtype=torch.float64), torch.tensor([5 + seed, 2])
    cache.lengths.copy_((ends_B - LEAD).clamp(min=0))
    yield steps.read(tokens_BS, features_BSF, LEAD, cache, ends_B, states_BPD)
    cache.lengths.copy_(ends_B)
    if trees:
        yield steps.step(tokens_BS[:, 9:12].contiguous(), states_BPD, cache, TREE)
    for place in (7, 8):
        yield steps.step(tokens_BS[:, place, None], states_BPD, cache, None)
        cache.lengths += 1
    yield from (states_BPD, *cache.k, *cache.v)


def masks(head: Head, steps: Any, seed: int) -> Iterator[Tensor]:
    """Logits of all guesses of one pass; then what was kept."""
    tokens_BS, features_BSF, cache = begin(head, seed)
    ends_B = torch.tensor([5 + seed, 3])
    cache.lengths.copy_(ends_B - LEAD)
    yield steps.propose(tokens_BS, features_BSF, LEAD, cache, ends_B, 4)
    yield from (*cache.k, *cache.v)


def looks(head: Head, steps: Any, seed: int) -> Iterator[Tensor]:
    """Logits of a first step and of a chain's next guesses, with a target's cache; then what was kept."""
    tokens_BS, _, cache = begin(head, seed)
    target = head._target[0].new_cache(B, S)
    head._target[0].forward(tokens_BS[:, :20].contiguous(), target)
    target.lengths.copy_(torch.tensor([5 + seed, 3]))
    cache.lengths.copy_(target.lengths - LEAD)
    yield steps.read(tokens_BS, LEAD, cache, target)
    cache.lengths.copy_(target.lengths)
    for place in (7, 8):
        yield steps.step(tokens_BS[:, place, None], cache, target, None)
        cache.lengths += 1
    yield from (*cache.k, *cache.v)


RUNS: dict[str, Any] = {"eagle": partial(feature_steps, trees=False), "parallel": masks, "glide": looks}
RUNS["eagle3"] = partial(feature_steps, trees=True)


@torch.inference_mode()
@pytest.mark.parametrize("kind", RUNS)
def test_compiled_steps_are_the_heads_own(kind: str) -> None:
    """One form for each kind of step: caches and texts of later calls are others."""
    head, run = random_head(tiny_decoder(3), kind), RUNS[kind]
    steps = CompiledMethods(head)
    for seed in range(3):
        wanted = [x.clone() for x in run(head, head, seed)]
        with no_recompiles() if seed else nullcontext():
            found = [x.clone() for x in run(head, steps, seed)]
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
