"""Hidden states kept next to the KV: those of a plain forward pass, whoever wrote them, and they go where KV goes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.decoder_stack import NativeStack
from compile.inductor import CompiledModel
from sharesd.drafters.tables.proposal import pack
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import prefill
from sharesd.sampling_params import SamplingParams
from tests.helpers.compiled import compiled
from tests.helpers.oracle import VOCAB, new_engine, switched, tiny_decoder
from tests.speculation.test_trees import random_tree

TAPS = (2, 1, 3)  # the last one is behind the norm of a decoder of two blocks
pytestmark = pytest.mark.usefixtures("one_thread")


@torch.inference_mode()
def expected(model: Decoder, tokens: list[int]) -> Tensor:
    """[T, F] of a text, from one pass with hooks over modules that nothing was done to."""
    seen: list[Tensor] = []
    hooks = [m.register_forward_hook(lambda *a: seen.append(a[2][0])) for m in (*model.blocks, model.norm)]
    model.forward(torch.tensor([tokens]), model.new_cache(1, 128))
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[depth - 1] for depth in TAPS], 1)


def native_bits(model: Decoder, tokens: list[int]) -> Tensor:
    """[T, F] of a text, from a stack of the first blocks for each depth: what the kernel computes, to the bit."""
    x_BTD, parts = model.embed(torch.tensor([tokens])), []
    for depth in TAPS:
        how: dict[str, Any] = {"tables": model.rope_tables, "hidden_act": model.config.hidden_act}
        norm = model.norm if depth == model.normed_depth else None
        first = NativeStack(model.blocks[:depth], ropes=[0, 0][:depth], norm=norm, **how)
        cache = model.new_cache(1, 128)
        del cache.k[depth:], cache.v[depth:]
        parts.append(first(x_BTD, cache)[0])
    return torch.cat(parts, 1)


def twin(how: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """The same weights as they run: packed and native, or one by one."""
    model = tiny_decoder(3, dtype=dtype)
    return compiled(model, "native") if how == "native" else model


@pytest.mark.parametrize(
    ("how", "dtype"), [("native", torch.float64), ("native", torch.bfloat16), ("off", torch.float64)], ids=str
)
def test_features_are_the_hidden_states_of_a_plain_pass(how: str, dtype: torch.dtype) -> None:
    """Of a prompt read in two goes, plain rounds, in rows of different lengths; without taps nothing is kept."""
    plain, model, dice = tiny_decoder(3, dtype=dtype), twin(how, dtype), random.Random(1)
    prompts = [[dice.randrange(VOCAB) for _ in range(size)] for size in (9, 14)]
    cache = model.new_cache(2, 96, TAPS)
    engine = new_engine(model, cache=cache)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=12))
    again = engine.generate([[*prompts[0], *done[0].token_ids, 5, 7]], SamplingParams(max_new_tokens=4), reuse=True)
    texts = {tuple(prompts[1] + done[1].token_ids), tuple(prompts[0] + done[0].token_ids + [5, 7] + again[0].token_ids)}
    for row, cached_ids in enumerate(cache.cached_ids):
        assert any(tuple(cached_ids) == text[: len(cached_ids)] for text in texts) and len(cached_ids) > 20
        kept = cache.features[row, : len(cached_ids)]
        if how == "native":
            assert torch.equal(kept, native_bits(model, cached_ids))
        if dtype == torch.float64:
            torch.testing.assert_close(kept, expected(plain, cached_ids))
    assert model.new_cache(2, 96).features is None


@torch.inference_mode()
@pytest.mark.parametrize("how", ["native", "off"])
def test_features_of_accepted_nodes_move_with_their_kv(how: str) -> None:
    plain, model, dice = tiny_decoder(3), twin(how), random.Random(5)
    text = [dice.randrange(VOCAB) for _ in range(7)]
    cache = model.new_cache(2, 96, TAPS)
    prefill(model, cache, [text, text[:4]], [0, 0])
    tree = pack([random_tree(dice, 6), random_tree(dice, 6)], 6, "")
    rows = torch.cat([torch.tensor([[1], [2]]), tree.tokens], 1)
    model.forward(rows, cache, tree_mask=tree.tree_mask)
    depth, path = tree.tree_mask
    leaves = depth.argmax(1)
    paths = [path[b, leaf, : depth[b, leaf] + 1] for b, leaf in enumerate(leaves.tolist())]
    padded = torch.stack([torch.nn.functional.pad(p, (0, 7 - len(p)), value=6) for p in paths])
    cache.compact(padded, torch.tensor([len(p) for p in paths]))
    for b, before in enumerate((text, text[:4])):
        whole = before + rows[b, paths[b]].tolist()
        torch.testing.assert_close(cache.features[b, : len(whole)], expected(plain, whole))


@torch.inference_mode()
def test_features_go_where_rows_go_and_quantized_steps_leave_them_alone() -> None:
    model, (a, b) = tiny_decoder(3), ([3, 1, 4, 1, 5], [2, 7, 1])
    cache = model.new_cache(3, 96, TAPS)
    prefill(model, cache, [a, b, []], [0, 0, 0])
    cache.cached_ids[:2] = [a, b]
    cache.swap_rows(0, 2)
    cache.copy_row(1, 0, 2)
    for row, text in ((2, a), (1, b), (0, b[:2])):
        torch.testing.assert_close(cache.features[row, : len(text)], expected(model, text))
    view = cache.rows(1, 3)
    view.lengths.fill_(0)
    model.forward(torch.tensor([[9], [8]]), view)
    torch.testing.assert_close(cache.features[2, :1], expected(model, [8]))
    model, switch = switched(tiny_decoder(3), noise=0.1)
    cache = model.new_cache(1, 96, TAPS)
    prefill(model, cache, [[3, 1, 4]], [0])
    before, ahead = cache.features.clone(), cache.draft_view()
    ahead.lengths.copy_(cache.lengths)
    with switch.quantized_weights():
        model.forward(torch.tensor([[5, 9]]), ahead)
    assert torch.equal(cache.features, before)
    model.forward(torch.tensor([[5, 9]]), cache)
    assert not torch.equal(cache.features, before)


@torch.inference_mode()
@pytest.mark.inductor
@pytest.mark.parametrize("how", ["regional", "full"])
def test_compiled_steps_keep_features(how: str) -> None:
    plain, twin = tiny_decoder(3, dtype=torch.float32), tiny_decoder(3, dtype=torch.float32)
    text, step = [3, 1, 4, 1, 5], [9, 2, 6, 7]
    model = compiled(twin, how) if how == "regional" else CompiledModel(twin, {4})
    for taps in ((), TAPS):  # forms without taps are no forms with them
        cache = twin.new_cache(1, 96, taps)
        prefill(twin, cache, [text], [0])
        model.forward(torch.tensor([step]), cache)
    torch.testing.assert_close(cache.features[0, :9], expected(plain, text + step), rtol=1e-3, atol=1e-3)
