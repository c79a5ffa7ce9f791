"""Compiled steps in bfloat16: modes emit the same tokens, rows the same bits at any width, and nothing compiles twice.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from compile.attention import CHUNK, SINKS, attend
from compile.linear import PackedLinear, pack_linears
from compile.regions import CompiledBlocks, CompiledModel, compile_step, no_recompiles, structure
from compile.stack import NativeStack, Unsuited
from quant.attach import quantize_linears
from quant.config import QuantConfig
from quant.linear import Switch
from sharesd.config import CompileMode, EngineConfig, Mode, SamplingParams
from sharesd.decoding.selfcheck import check_rows
from sharesd.load import Runtime
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.widths import fixed_width, shallow
from tests.helpers.oracle import (
    classic_engine,
    kv_of,
    layer_of,
    new_engine,
    put_kv,
    share_engine,
    switched,
    tiny_decoder,
)
from tests.helpers.tiny import make_checkpoint

pytestmark = [pytest.mark.inductor, pytest.mark.usefixtures("one_thread", "own_cache")]
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
NUM_DRAFT = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def new_runtime(checkpoint: Path, mode: CompileMode, modes: tuple[Mode, ...] = MODES, **options: Any) -> Runtime:
    config = EngineConfig(
        target=str(checkpoint), device="cpu", compile=mode, num_draft=NUM_DRAFT, max_context=128, **options
    )
    return Runtime(config, modes)


@pytest.fixture(scope="module", params=["native", "regional", "full"])
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
    assert drafter.extra_bytes() == (quant.low_bytes, 0) and 0 < quant.low_bytes <= 0.35 * quant.full_bytes
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
    engine = new_runtime(checkpoint, "regional", ("share",)).engine()
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


def compiled(model: Decoder, how: str, switch: Switch | None = None) -> Decoder:
    """The model as `load.Runtime` would run it on a CPU."""
    low = (lambda: switch.low) if switch else (lambda: False)
    pack_linears(model)
    if how == "native":
        ropes = [kind.rope for kind in model.config.layers]
        model.run_stack = NativeStack(
            model.blocks,
            tables=model.rope_tables,
            norm=model.norm,
            ropes=ropes,
            activation=model.config.activation,
            low=low,
        )
    else:
        model.step_widths = frozenset({1, 2, 1 + NUM_DRAFT})
        model.run_block = CompiledBlocks({1, 2, 1 + NUM_DRAFT}, low)
    return model


def wide_decoder(seed: int = 3) -> Decoder:
    return tiny_decoder(seed, dtype=torch.bfloat16, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


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


@pytest.mark.parametrize("drafters", [("share", "classic"), ("suffix",)], ids="+".join)
def test_draft_trees_of_any_shape_compile_nothing_after_warm_up(checkpoint: Path, drafters: tuple[Mode, ...]) -> None:
    config = EngineConfig(target=str(checkpoint), compile="regional", max_context=128, tree=(2, 3, 6))
    runtime = Runtime(config, ("naive", *drafters))
    engines = {mode: runtime.engine(mode) for mode in runtime.modes}
    prompts = [list(range(20)), [5, 6, 1, 5, 7, 2, 5, 8, 3, 5, 6, 4, 5]]  # what follows 5 is a matter of choice
    with no_recompiles():
        want = [[c.token_ids for c in engines["naive"].generate([prompt], GREEDY)] for prompt in prompts]
        for mode in drafters:
            engine = engines[mode]
            policy = engine.way(GREEDY).policy
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


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "attention_bias": True},
    "phi3": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, "hidden_act": "gelu"},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 12},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2},
}


def family(name: str, dtype: torch.dtype) -> Decoder:
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1}
    return tiny_decoder(1, dtype=dtype, **{**sizes, **FAMILIES[name]})


@pytest.mark.kernels
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_stack_equals_the_blocks(name: str, dtype: torch.dtype) -> None:
    plain = family(name, dtype)
    stack = compiled(copy.deepcopy(plain), "native")
    tokens = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        caches = [m.new_cache(2, 64) for m in (plain, stack)]
        for cache in caches:
            cache.lengths += torch.tensor([0, 5])
        wanted, ours = (m.forward(tokens, cache) for m, cache in zip((plain, stack), caches, strict=True))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    for theirs, mine in zip((wanted, *caches[0].k, *caches[0].v), (ours, *caches[1].k, *caches[1].v), strict=True):
        assert (mine - theirs).double().norm() < tolerance * theirs.double().norm()


@pytest.mark.kernels
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_rows_bits_in_the_stack_depend_on_nothing_beside_it(name: str, dtype: torch.dtype) -> None:
    model = compiled(family(name, dtype), "native")
    tokens = torch.randint(0, 40, (3, 17), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 9, 30])

    def run(rows: slice, width: int, slots: int = 64) -> Tensor:
        cache = model.new_cache(len(starts[rows]), slots)
        values_S1 = torch.arange(cache.slots)[:, None] % 7 - 3
        put_kv(cache, [values_S1.to(dtype).expand_as(tensor) for tensor in kv_of(cache)])
        cache.lengths += starts[rows]
        parts = []
        for i in range(0, 17, width):
            parts.append(model.forward(tokens[rows, i : i + width], cache))
            cache.lengths += width
        return torch.cat(parts, 1)

    with torch.inference_mode():
        together = run(slice(0, 3), 17)
        for width in (1, 2, 4, 5, 16):
            assert torch.equal(run(slice(0, 3), width), together)
        for b in range(3):
            for width in (1, 17):
                assert torch.equal(run(slice(b, b + 1), width, 96), together[b : b + 1])
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(run(slice(0, 3), 5), together)
        torch.set_num_threads(1)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_low_kernel_comes_close_to_the_weights_it_stands_for(bits: int, checkpoint: Path) -> None:
    """The kernel rounds activations, the reference does not: that must cost less than rounding the weights."""
    quant, tokens = QuantConfig(bits=bits, group_size=32, head_bits=bits), torch.tensor([[3, 9, 27, 81, 5]])
    ours, reference = (new_runtime(checkpoint, mode, ("share",), quant=quant) for mode in ("native", "off"))

    def logits(runtime: Runtime) -> Tensor:
        return runtime.target.forward(tokens, runtime.target.new_cache(1, 32)).float()

    with torch.inference_mode():
        full = logits(ours)
        with ours._switch.use_low(), reference._switch.use_low():
            low, wanted = logits(ours), logits(reference)
    error = (low - wanted).norm() / full.norm()
    assert error < (0.1 if bits == 8 else 0.5 * (low - full).norm() / full.norm())


def test_the_stack_refuses_what_it_does_not_know() -> None:
    with pytest.raises(Unsuited, match="no linear of kind Linear"):
        model = wide_decoder()
        NativeStack(model.blocks, tables=model.rope_tables, ropes=[0, 0], activation="silu")


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


def rows_of(model: Decoder, widths: Sequence[int] = (1, 2, 5, 8)) -> tuple[bool, bool]:
    first = shallow(model)
    return check_rows(first, first.new_cache(2, 256), widths, trees=True)


def test_the_self_check_tells_whether_rows_depend_on_the_width(
    checkpoint: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = wide_decoder()
    pack_linears(model)
    assert rows_of(model) == (True, True), "packed linears and attention are row-invariant"
    plain = PackedLinear.forward

    def sloppy(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = plain(self, x)
        return y * (1 + 2**-6) if x.shape[1] == 5 else y

    monkeypatch.setattr(PackedLinear, "forward", sloppy)
    assert rows_of(model) == (False, False) and rows_of(model, (1, 8)) == (True, True)
    for num_draft, width in ((3, 9), (8, 9), (12, 16)):
        config = EngineConfig(target=str(checkpoint), device="cpu", compile="off", num_draft=num_draft, max_context=128)
        runtime = Runtime(config, ("naive", "share"))
        assert runtime.engine("naive").widths == runtime.engine("share").widths == [width]
    assert "texts" not in caplog.text
    assert Runtime(replace(config, exact=False), ("share",)).engine("share").widths is None


def test_fixed_widths_do_not_follow_the_length_of_drafts() -> None:
    assert {fixed_width("cuda", most) for most in range(16)} == {16} and fixed_width("cuda", 40) == 41
    assert {fixed_width("cpu", most) for most in range(9)} == {9}, "the default"


@pytest.mark.parametrize("place", ["compiled blocks", "far slots", "the last norm", "the head"])
def test_the_self_check_looks_at_what_runs(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that differ somewhere only."""
    model = wide_decoder()
    pack_linears(model)

    def wrong(x: torch.Tensor, *, here: bool = True) -> torch.Tensor:
        return x * (1 + 2**-6) if x.shape[1] == 8 and here else x

    if place == "compiled blocks":
        model.run_block = lambda block, *tensors, recent: wrong(block(*tensors, recent=recent))
    elif place == "far slots":

        def far(*tensors: Any, **options: Any) -> torch.Tensor:
            return wrong(attend(*tensors, **options), here=bool(tensors[5].min() > 200))

        monkeypatch.setattr("sharesd.models.decoder.attend", far)
    else:
        part: Any = model.norm if place == "the last norm" else model.head
        forward = part.forward
        monkeypatch.setattr(part, "forward", lambda x: wrong(forward(x)))
    assert rows_of(model) == (False, False)


def test_trees_whose_rows_differ_are_not_drafted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scattered(*tensors: Any, branches: Any = None, **options: Any) -> torch.Tensor:
        out = attend(*tensors, branches=branches, **options)
        return out if branches is None else out * (1 + 2**-6)

    monkeypatch.setattr("sharesd.models.decoder.attend", scattered)
    assert rows_of(wide_decoder()) == (True, False)
    config = EngineConfig(target=str(checkpoint), device="cpu", compile="off", num_draft=4, max_context=128)
    engine = Runtime(config, ("hybrid",)).engine("hybrid")
    assert engine.widths is None and engine.drafter is not None and not engine.drafter.trees
    grown = replace(config, tree=(2, 2, 4))
    with pytest.raises(ValueError, match="do not have the bits of chains here; drop --tree, or add --no-exact"):
        Runtime(grown, ("share",))
    loose = Runtime(replace(grown, exact=False), ("share",)).engine("share")
    assert loose.drafter is not None and loose.drafter.trees


# ---- drafts that look back only so far


@torch.inference_mode()
@pytest.mark.parametrize("how", ["eager", "native", "regional"])
def test_steps_that_look_back_see_the_first_slots_and_recent_chunks(how: str) -> None:
    model = tiny_decoder(3, num_hidden_layers=1, max_position_embeddings=512)
    model = model if how == "eager" else compiled(model, how)
    text = torch.randint(0, 40, (1, 3 * CHUNK), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(1, 4 * CHUNK)
    model.forward(text, cache)
    cache.lengths += text.shape[1]
    row = torch.tensor([[7]])
    whole = model.forward(row, cache)
    recent = cache.ahead(5)
    recent.lengths.copy_(cache.lengths)
    near = model.forward(row, recent)
    assert not torch.equal(near, whole)
    held = kv_of(cache)
    for tensor in held:
        tensor[:, :, SINKS : 2 * CHUNK] += 1.0
    put_kv(cache, held)
    assert torch.equal(near, model.forward(row, recent))
    for tensor in held:
        tensor[:, :, :SINKS] += 1.0
    put_kv(cache, held)
    assert not torch.allclose(near, model.forward(row, recent))
    assert cache.recent == 0 and not torch.allclose(whole, model.forward(row, cache))


@pytest.mark.parametrize("how", ["eager", "native"])
def test_texts_are_the_same_however_far_drafts_look_back(how: str) -> None:
    model = tiny_decoder(3, max_position_embeddings=512)
    prompt = [i * i % 37 for i in range(2 * CHUNK)]
    params = SamplingParams(max_new_tokens=24)
    context: Any = {"max_context": 3 * CHUNK}
    [wanted] = new_engine(model, **context).generate([prompt], params)
    taus = []
    for window in (0, 4):
        twin, switch = switched(model)
        twin = compiled(twin, how, switch) if how == "native" else twin
        engine = share_engine(twin, switch, window=window, **context)
        [done] = engine.generate([prompt], params)
        assert done.token_ids == wanted.token_ids
        taus.append(engine.stats.tau)
    assert taus[0] > taus[1], "drafts by the same weights that see less are worse"
