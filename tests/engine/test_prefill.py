"""Prompts on a GPU, where a row's bits depend on how many rows a pass has: no text depends on how its prompt was cut.

The model here is a toy on the CPU, which writes down how it was called: a token's key is a hash of the token, its
position and the number of rows of its pass, and logits are a hash of all keys so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sharesd.engine import prefill_scheduler
from sharesd.engine.engine import Engine
from sharesd.engine.options import EngineOptions
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import CHUNK, PIECES, prefill, prefill_in_pieces, slots_for
from sharesd.sampling_params import SamplingParams
from tests.helpers.in_mode import InMode
from tests.helpers.oracle import tiny_tokenizer

VOCAB, CONTEXT = 97, 1300


class Toy:
    """See above. `passes` holds (first position, rows, slots of the cache) of every pass."""

    name, vocab_size, max_context, eos_ids, takes_trees = "toy", VOCAB, CONTEXT, (), False
    step_widths: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.passes: list[tuple[int, int, int]] = []

    def new_cache(self, batch: int, slots: int) -> StaticKVCache:
        return StaticKVCache(shapes=[(1, 1)], batch=batch, slots=slots, dtype=torch.float64, device="cpu", plain=True)

    def forward(
        self, tokens_BT: Tensor, cache: StaticKVCache, keep_BR: Tensor | None = None, tree_mask: None = None
    ) -> Tensor:
        B, T = tokens_BT.shape
        at_BT = cache.lengths[:, None] + torch.arange(T)
        assert int(at_BT.max()) < cache.slots
        self.passes.append((int(at_BT[0, 0]), T, cache.slots))
        keys_BT = (tokens_BT * 31 + at_BT * 17 + T * 7) % 101
        for b in range(B):
            cache.k[0][b, 0, at_BT[b], 0] = keys_BT[b].double()
        sums_BT = torch.stack([cache.k[0][b, 0, : cache.slots, 0].cumsum(0)[at_BT[b]] for b in range(B)])
        logits_BTV = torch.cos(sums_BT[..., None] * torch.arange(1, VOCAB + 1))
        return logits_BTV if keep_BR is None else logits_BTV.gather(1, keep_BR[..., None].expand(-1, -1, VOCAB))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def toy_engine(*, recompute_decoded_kv: bool = True) -> Any:
    """An engine that reads prompts as on a GPU."""
    toy: Any = Toy()
    options = EngineOptions(max_context=CONTEXT, recompute_decoded_kv=recompute_decoded_kv)
    cache = toy.new_cache(1, slots_for(CONTEXT))
    engine = Engine(target=toy, tokenizer=tiny_tokenizer(), cache=cache, drafters={"naive": None}, options=options)
    return InMode(engine, "naive")


def test_pieces_have_few_sizes_and_begin_at_multiples_of_a_chunk() -> None:
    toy = Toy()
    for length in (1, 63, 64, 65, 128, 129, 256, 257, 511, 512, 513, 1000, 1024, 1025, 1299):
        cache = toy.new_cache(1, slots_for(CONTEXT))
        toy.passes.clear()
        prefill_in_pieces(toy, cache, [tokens(length)], [0])  # type: ignore[arg-type]
        assert cache.lengths.tolist() == [length]
        assert [first for first, _, _ in toy.passes] == list(range(0, length, CHUNK))
        sizes = [size for _, size, _ in toy.passes]
        assert set(sizes[:-1]) <= {CHUNK} and sizes[-1] in PIECES
        assert sizes[-1] == PIECES[0] or sizes[-1] < 2 * (length % CHUNK or CHUNK)
        # What lies far behind the prompt is not read; kernels for steps look at lengths themselves.
        assert all(slots == first + CHUNK for first, size, slots in toy.passes if size != PIECES[0])


def test_a_row_is_read_alone() -> None:
    """Its logits are those that it has without the others, whatever their lengths; rows without a prompt stay idle."""
    prompts = [tokens(length, length) for length in (700, 30, 513)]
    toy = Toy()
    together = toy.new_cache(4, slots_for(CONTEXT))
    logits_BV = prefill_in_pieces(toy, together, [*prompts, []], [0] * 4)  # type: ignore[arg-type]
    assert together.lengths.tolist() == [700, 30, 513, 0]
    for b, prompt in enumerate(prompts):
        alone = toy.new_cache(1, slots_for(CONTEXT))
        assert torch.equal(prefill_in_pieces(toy, alone, [prompt], [0]), logits_BV[b : b + 1])  # type: ignore[arg-type]
        assert torch.equal(alone.k[0][0, 0, : len(prompt)], together.k[0][b, 0, : len(prompt)])


def test_prompts_on_a_gpu_are_read_in_pieces() -> None:
    """By tensors without values, on a device that is no CPU: all stay there, and none is read."""
    config: dict[str, Any] = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config["max_position_embeddings"] = CONTEXT
    with torch.inference_mode():
        model = Decoder(config_from_hf(config), dtype=torch.bfloat16, device="meta")
        cache, rows = model.new_cache(2, slots_for(CONTEXT)), []
        run_stack = model._run_stack
        model.run_stack = lambda x, *rest: (rows.append(x.shape[:2]), run_stack(x, *rest))[1]  # type: ignore[func-returns-value]
        logits_BV = prefill(model, cache, [tokens(600), tokens(100)], [0, 0])
    assert (logits_BV.device.type, logits_BV.shape) == ("meta", (2, VOCAB))
    assert rows == [(1, 512), (1, 128), (1, 128)]


def conversation(engine: Any, first: Sequence[int], *, reuse: bool) -> list[list[int]]:
    """Three turns, each with all that was said before in its prompt, the last of which takes back half of it."""
    params, said, answers = SamplingParams(max_new_tokens=40, ignore_eos=True), list(first), []
    for turn in range(3):
        if turn == 2:
            said = said[: len(said) // 2]
        said += tokens(25, turn + 1)
        answers.append(engine.generate([said], params, reuse=reuse)[0].token_ids)
        said += answers[-1]
    return answers


@pytest.mark.parametrize("length", [10, 480, 500, 512, 1000])
def test_reuse_changes_no_text(length: int) -> None:
    """What steps wrote has other bits than what a prompt would have written, so it is read again; chunks are not."""
    engine, fresh = toy_engine(), toy_engine()
    assert conversation(engine, tokens(length), reuse=True) == conversation(fresh, tokens(length), reuse=False)
    reused, again = ([rows for _, rows, _ in e.target.passes if rows > 1] for e in (engine, fresh))  # type: ignore[attr-defined]
    assert (sum(reused) < sum(again)) == (length + 25 >= CHUNK)  # the first turn's prompt had a whole chunk


def test_without_reading_again_texts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they may with --no-exact: the test above could fail."""
    monkeypatch.setattr(prefill_scheduler, "reads_in_pieces", lambda cache: True)
    engine, fresh = toy_engine(recompute_decoded_kv=False), toy_engine(recompute_decoded_kv=False)
    assert conversation(engine, tokens(500), reuse=True) != conversation(fresh, tokens(500), reuse=False)
