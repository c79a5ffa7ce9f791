"""Compiled steps in bfloat16: modes emit the same tokens, rows the same bits at any width, and nothing compiles twice.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from compile.inductor import CompiledModel, compile_step, no_recompiles, structure
from compile.linear import pack_linears
from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch
from sharesd.config import CompileMode, EngineConfig, Mode
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.compiled import NUM_DRAFT, check_looking_back, compiled, wide_decoder
from tests.helpers.oracle import (
    classic_engine,
    layer_of,
    new_engine,
    share_engine,
    switched,
    tiny_decoder,
)
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
MODES: tuple[Mode, ...] = ("naive", "classic", "share")
PROMPTS: list[str | list[int]] = [
    "why is the sky blue",
    [7],
    "the cat sat on the mat, and the sky was",
    [5, 6, 7, 8],
    [9] * 33,
]
GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def new_runtime(checkpoint: Path, mode: CompileMode, modes: tuple[Mode, ...] = MODES, **options: Any) -> Runtime:
    config = EngineConfig(
        target=str(checkpoint), device="cpu", compile=mode, num_draft=NUM_DRAFT, max_context=128, **options
    )
    return Runtime(config, modes)


@pytest.fixture(scope="module", params=["regional", "full"])
def runtime(request: pytest.FixtureRequest, checkpoint: Path) -> Runtime:
    """`full` has two modes only: each form of it takes seconds to compile."""
    return new_runtime(checkpoint, request.param, ("naive", "share") if request.param == "full" else MODES)


# ---- what users get


def test_all_modes_emit_the_same_tokens_and_nothing_compiles_after_warm_up(runtime: Runtime) -> None:
    engines = {mode: runtime.engine(mode, warm=SAMPLED) for mode in runtime.modes}
    assert engines["share"].drafter.model is engines["share"].target, "drafts are compiled, too"
    with no_recompiles():
        for params in (GREEDY, SAMPLED):
            naive, *others = (engines[mode].generate(PROMPTS, params) for mode in runtime.modes)
            for theirs in others:
                assert [c.token_ids for c in theirs] == [c.token_ids for c in naive]
            assert len({tuple(c.token_ids) for c in naive}) == len(PROMPTS)
            assert all(0 < engines[mode].stats.alpha < 1 for mode in runtime.modes[1:])
        for length in range(1, 12):  # every width that steps have, and others
            engines["share"].generate([list(range(length))], GREEDY)


def test_a_chat_in_changing_modes_is_the_same_and_compiles_nothing(runtime: Runtime) -> None:
    engines = [runtime.engine(mode) for mode in runtime.modes]
    text, params = [3, 4, 5, 6, 7], SamplingParams(max_new_tokens=9)
    with no_recompiles():
        for turn in range(6):
            first, second = (engines[(turn + i) % len(engines)] for i in range(2))
            (done,) = first.generate([text], params, reuse=True)
            assert second.generate([text], params, reuse=True)[0].token_ids == done.token_ids
            text = [*text, *done.token_ids, turn]


def test_share_costs_no_kv_and_little_weight(runtime: Runtime) -> None:
    drafter, quant = runtime.engine("share").drafter, runtime.report("share").quant
    assert drafter is not None and quant is not None
    assert drafter.extra_bytes() == (quant.quantized_bytes, 0) and 0 < quant.quantized_bytes <= 0.35 * quant.full_bytes
    assert runtime.engine("naive").cache is runtime.engine("share").cache


def test_rows_of_a_step_have_the_same_bits_at_any_width(runtime: Runtime) -> None:
    model, width = runtime.step, 1 + NUM_DRAFT
    tokens = torch.tensor([[11, 12, 13, 14, 15, 16, 17, 18, 19, 20]])
    with torch.inference_mode():
        caches = [model.new_cache(1, runtime.cache.slots) for _ in range(2)]
        for cache in caches:
            model.forward(tokens, cache)
            cache.lengths += tokens.shape[1]
        following = torch.tensor([[21, 22, 23, 24]])
        wide = model.forward(following, caches[0])
        for t in range(width):
            one = model.forward(following[:, t : t + 1], caches[1])
            assert torch.equal(one[:, 0], wide[:, t])
            caches[1].lengths += 1
        live = tokens.shape[1] + width
        for ours, theirs in zip((*caches[0].k, *caches[0].v), (*caches[1].k, *caches[1].v), strict=True):
            assert torch.equal(ours[:, :, :live], theirs[:, :, :live])


def test_prompts_as_long_as_a_step_compile_nothing(checkpoint: Path) -> None:
    """With one mode loaded, some forms of its widths do not exist: full weights at width 1."""
    engine = new_runtime(checkpoint, "regional", ("share",)).engine("share")
    with no_recompiles():
        for length in range(1, 3 + NUM_DRAFT):
            engine.generate([list(range(length))], GREEDY)


def test_layers_that_stay_full_do_not_share_a_form(checkpoint: Path) -> None:
    """A skipped layer has other modules than the rest: the same compiled function would read the wrong weights."""
    quant = QuantConfig(bits=4, group_size=32, skip_layers=(0,), skip_projs=("down",), head_bits=8)
    for mode in ("native", "regional"):
        runtime = new_runtime(checkpoint, mode, ("naive", "share"), quant=quant)
        naive, share = (runtime.engine(m).generate(PROMPTS[:3], SAMPLED) for m in ("naive", "share"))
        assert [c.token_ids for c in share] == [c.token_ids for c in naive]
        assert runtime.engine("share").stats.alpha > 0.3


# ---- a drafter with the target's own weights


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


def test_draft_trees_of_any_shape_compile_nothing_after_warm_up(checkpoint: Path) -> None:
    drafters: tuple[Mode, ...] = ("share", "suffix")
    config = EngineConfig(target=str(checkpoint), compile="regional", max_context=128, tree=(2, 3, 6))
    runtime = Runtime(config, ("naive", *drafters))
    engines = {mode: runtime.engine(mode) for mode in runtime.modes}
    prompts = [list(range(20)), [5, 6, 1, 5, 7, 2, 5, 8, 3, 5, 6, 4, 5]]  # what follows 5 is a matter of choice
    with no_recompiles():
        want = [[c.token_ids for c in engines["naive"].generate([prompt], GREEDY)] for prompt in prompts]
        for mode in drafters:
            engine = engines[mode]
            policy = engine.variant(GREEDY).policy
            for policy.pinned in engine.drafter.shapes:  # type: ignore[union-attr]
                assert [[c.token_ids for c in engine.generate([prompt], GREEDY)] for prompt in prompts] == want


# ---- compiled steps and the cache


def regional(model: Decoder) -> Decoder:
    return compiled(model, "regional")


def full(model: Decoder) -> CompiledModel:
    pack_linears(model)
    return CompiledModel(model, {2, 1 + NUM_DRAFT})


EACH_FORM = pytest.mark.parametrize("form", [regional, full], ids=lambda form: form.__name__)


@EACH_FORM
def test_compiled_code_holds_no_copy_of_the_cache(form: Callable[[Decoder], CausalModel]) -> None:
    model = form(wide_decoder())
    cache = model.new_cache(1, 2048)  # larger than all else in the step
    with torch.inference_mode():
        _, codes = run_and_get_code(lambda: model.forward(torch.tensor([[3, 4]]), cache))
    buffers = [math.prod(map(int, re.findall(r"\d+", shape))) for shape in re.findall(BUFFER, "".join(codes))]
    limit = cache.k[0].numel() // 4
    assert buffers and max(buffers) < limit
    assert "as_strided" not in "".join(codes), "a view of a storage which several tensors share"


BUFFER = r"= empty_strided\w*\(\(([\d, ]+)\)"


@EACH_FORM
def test_compiled_steps_read_and_write_the_cache_they_are_given(form: Callable[[Decoder], CausalModel]) -> None:
    """Each layer its own keys and values, in whichever cache: nothing of the traced one is left in the code."""
    plain = tiny_decoder(3, num_hidden_layers=3)
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


# ---- the parts


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
