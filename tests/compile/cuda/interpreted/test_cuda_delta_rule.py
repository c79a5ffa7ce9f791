"""The gated delta rule on CUDA: values are those of transformers' functions, bits those of tokens read one by one.

Legend as in `compile.cuda.delta_rule`; W numbers of a token that the first linear makes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated, torch_recurrent_gated_delta_rule

from compile.delta_sizes import DeltaSizes
from sharesd import LLM, SamplingParams
from sharesd.engine import prefill_scheduler, row_allocator
from sharesd.engine.request import Request
from sharesd.execution.batch_invariance import RowBits
from sharesd.kvcache import recurrent
from sharesd.kvcache.recurrent import NO_END, RecurrentSizes, RecurrentState
from sharesd.models import prefill
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.loader import load_decoder
from sharesd.runtime import Runtime
from sharesd.weights.backend import CpuBackend
from sharesd.weights.cuda_backend import CudaBackend
from tests.helpers.gguf_files import write_delta_gguf
from tests.helpers.oracle import logits_of
from tests.helpers.tiny_models import make_conv_model, make_delta_model

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.delta_rule import gated_delta
from compile.cuda.linear import replace_with_row_linears
from compile.cuda.mixture import replace_with_row_mixtures
from tests.compile.cuda.interpreted.test_cuda_mixture import numbers, stored

SIZES = DeltaSizes(1, 2, 8, 8)
ODD = DeltaSizes(2, 4, 20, 5, tiled=True)
WIDTH = 4
RING = 48
MODULES = ("delta_rule", "short_conv", "fused_linear")


@dataclass
class Rows:
    """State of rows, and inputs [B, S, W] of their texts."""

    texts: Tensor
    sizes: DeltaSizes = SIZES
    width: int = WIDTH
    state: RecurrentState = field(init=False)

    def __post_init__(self) -> None:
        B, s = len(self.texts), self.sizes
        sizes = RecurrentSizes(self.width, s.inputs, s)
        on = {"dtype": self.texts.dtype, "device": self.texts.device}
        self.state = RecurrentState([0], sizes, batch=B, slots=RING, **on)
        self.lengths = torch.zeros(B, dtype=torch.int64)
        dice = torch.Generator().manual_seed(s.key_size)
        self.weight, self.A_log, self.dt_bias, self.norm = (
            torch.randn(shape, generator=dice)
            for shape in ((s.channels, self.width), s.value_heads, s.value_heads, s.value_size)
        )
        for name in ("weight", "norm"):
            setattr(self, name, getattr(self, name).to(self.texts.dtype))

    def step(
        self,
        x_BTW: Tensor,
        lengths_B: Tensor,
        certain_B: Tensor | None = None,
        ends_B: Tensor | None = None,
        tree: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    ) -> Tensor:
        matrices, held_NB = self.state.matrices, self.state.held_NB
        assert matrices is not None
        return gated_delta(
            *(x_BTW, self.state.inputs_NBRD[0], matrices[0], held_NB[0]),
            self.lengths if certain_B is None else certain_B,
            torch.full_like(lengths_B, NO_END) if ends_B is None else ends_B,
            *(lengths_B, *tree, self.weight, self.A_log, self.dt_bias, self.norm, 1e-6, self.sizes),
        )

    def wanted(self) -> Tensor:
        """Results of all tokens, of transformers' functions."""
        s, (B, S, _) = self.sizes, self.texts.shape
        qkv, z, b, a = self.texts.float().split((s.channels, s.outputs, s.value_heads, s.value_heads), -1)
        padded = F.pad(qkv.transpose(1, 2), (self.width - 1, 0))
        mixed = F.silu(F.conv1d(padded, self.weight.float()[:, None], groups=s.channels)).transpose(1, 2)
        q, k, v = mixed.split((s.key_heads * s.key_size,) * 2 + (s.outputs,), -1)
        q, k = (part.unflatten(-1, (s.key_heads, s.key_size)) for part in (q, k))
        if s.tiled:
            q, k = (part.repeat(1, 1, s.value_heads // s.key_heads, 1) for part in (q, k))
        v = v.unflatten(-1, (s.value_heads, s.value_size))
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        out, _ = torch_recurrent_gated_delta_rule(q, k, v, g, b.sigmoid(), use_qk_l2norm_in_kernel=True)
        norm = Qwen3_5RMSNormGated(s.value_size, 1e-6)
        norm.weight.data = self.norm
        with torch.inference_mode():
            out = norm(
                out.to(self.texts.dtype).flatten(0, 2), z.unflatten(-1, (s.value_heads, s.value_size)).flatten(0, 2)
            )
        return out.view(B, S, s.outputs)


def random_texts(sizes: DeltaSizes, num: int, tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(num, tokens, sizes.inputs + sizes.outputs, generator=dice).to(dtype)


@pytest.mark.parametrize(("sizes", "width"), [(SIZES, WIDTH), (ODD, 2)], ids=["one key head", "odd sizes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_those_of_transformers(sizes: DeltaSizes, width: int, dtype: torch.dtype) -> None:
    rows = Rows(random_texts(sizes, 1, 24, dtype), sizes, width)
    found = rows.step(rows.texts, rows.lengths)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, rows.wanted(), atol=tolerance, rtol=tolerance)


def test_gates_at_their_limits() -> None:
    """Steps that are large or tiny, and rates of 0 and 1."""
    texts, s = random_texts(SIZES, 1, 8), SIZES
    texts[0, :, -2 * s.value_heads :] = torch.tensor([-90.0, -20, -8, -1, 0, 5, 30, 90])[:, None]
    rows = Rows(texts)
    torch.testing.assert_close(rows.step(texts, rows.lengths), rows.wanted(), atol=1e-6, rtol=1e-5)


def read_at_once(texts: Tensor) -> Tensor:
    """Results of a prompt, whose bits are those of plain decoding."""
    rows = Rows(texts)
    return rows.step(texts, rows.lengths)


def test_a_prompt_has_the_bits_of_plain_decoding() -> None:
    texts = random_texts(SIZES, 1, 12)
    want, rows = read_at_once(texts), Rows(texts)
    for t in range(12):
        assert torch.equal(rows.step(texts[:, t : t + 1], rows.lengths)[0, 0], want[0, t])
        rows.lengths += 1
    assert rows.state.held_NB.item() == 11


@pytest.mark.parametrize("pieces", [[9, 8, 3], [1, 15, 4]], ids=str)
def test_pieces_of_a_prompt_have_the_bits_of_the_whole(pieces: list[int]) -> None:
    """However they are padded, and wherever matrices are stored; a row without a text has no result."""
    texts = random_texts(SIZES, 3, sum(pieces))
    want, rows, num = read_at_once(texts[:2]), Rows(texts), 0
    rows.lengths[2] = -1
    before = [rows.state.inputs_NBRD.clone(), rows.state.held_NB.clone()]
    for i, size in enumerate(pieces):
        padded = torch.cat([texts[:, num : num + size], torch.full_like(texts[:, :5], torch.nan)], 1)
        ends = torch.where(rows.lengths < 0, NO_END, num + size)
        certain = rows.lengths + torch.tensor([size - i % 2, 0, 7])
        found = rows.step(padded, rows.lengths, certain, ends)
        assert torch.equal(found[:2, :size], want[:, num : num + size])
        assert not found[:2, size:].any() and not found[2].any()
        num += size
        rows.lengths += size * (rows.lengths >= 0)
    assert rows.state.held_NB[0].tolist() == [num - (len(pieces) + 1) % 2, max(0, num - pieces[-1]), 0]
    for now, then in zip((rows.state.inputs_NBRD, rows.state.held_NB), before, strict=True):
        assert torch.equal(now[:, 2], then[:, 2])


def test_a_prompt_that_is_longer_than_the_ring() -> None:
    """What the ring cannot hold is stored."""
    texts, rest = random_texts(SIZES, 1, RING + 20), RING - WIDTH + 1
    want, rows = read_at_once(texts), Rows(texts)
    assert torch.equal(rows.step(texts[:, :-4], rows.lengths), want[:, :-4])
    assert rows.state.held_NB.item() == RING + 16 - rest
    rows.lengths[:] = RING + 16
    assert torch.equal(rows.step(texts[:, -4:], rows.lengths, torch.zeros(1).long()), want[:, -4:])
    assert rows.state.held_NB.item() == RING + 20 - rest


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_random_rounds_have_the_bits_of_plain_decoding(seed: int) -> None:
    """Chains and trees, right and wrong drafts before them, of rows of any lengths; any number is accepted."""
    S, B, dice = 30, 2, random.Random(seed)
    texts = random_texts(SIZES, B, S + 16, seed=seed)
    junk, want, rows = random_texts(SIZES, B, 64, seed=seed + 1), read_at_once(texts), Rows(texts)
    num_trees = num_checked = 0
    while (longest := int(rows.lengths.max())) < S:
        T, is_tree, lengths = dice.randint(1, 8), dice.random() < 0.6, rows.lengths
        for step in range(dice.randint(0, 2)):  # a draft's first tokens, of which some are right
            x_BTW = torch.stack(
                [texts[b, lengths[b] + step] if dice.random() < 0.5 else junk[b, step] for b in range(B)]
            )
            rows.step(x_BTW[:, None], lengths + step)
        paths = [[[0]] for _ in range(B)]
        for each in paths:
            for node in range(1, T):
                each.append([*(dice.choice(each) if is_tree else each[-1]), node])
        # Of a node's children one at most is right.
        right = [{(0,): True} for _ in range(B)]
        x_BTW = torch.empty(B, T, texts.shape[2])
        for b, each in enumerate(paths):
            for node, path in enumerate(each):
                if node:
                    taken = any(right[b].get(tuple(o)) and o[:-1] == path[:-1] for o in each[:node])
                    right[b][tuple(path)] = right[b][tuple(path[:-1])] and not taken and dice.random() < 0.8
                ok = right[b][tuple(path)]
                x_BTW[b, node] = texts[b, lengths[b] + len(path) - 1] if ok else junk[b, node]
        tree: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        if is_tree:
            depth_BT = torch.tensor([[len(path) - 1 for path in each] for each in paths])
            tree = depth_BT, torch.tensor([[path + [0] * (T - len(path)) for path in each] for each in paths])
            num_trees += 1
        found, accepted = rows.step(x_BTW, lengths, tree=tree), [[0] for _ in range(B)]
        for b, each in enumerate(paths):
            rights = [path for path in each if right[b][tuple(path)]]
            for path in rights:
                assert torch.equal(found[b, path[-1]], want[b, lengths[b] + len(path) - 1]), (longest, b, path)
                num_checked += 1
            accepted[b] = dice.choice(rights)
        num_B = torch.tensor([len(path) for path in accepted])
        path_BT = torch.tensor([path + [0] * (T - len(path)) for path in accepted])
        rows.state.compact(lengths, path_BT, num_B)
        rows.lengths = lengths + num_B
    assert num_trees > 2 and num_checked > 30


def test_nodes_of_earlier_steps_are_read_from_the_ring() -> None:
    """As levels of a draft are; bits are those of one step, of a chain too."""
    texts = random_texts(SIZES, 1, 16)
    want, rows = read_at_once(texts), Rows(texts)
    rows.step(texts[:, :10], rows.lengths)
    rows.lengths[:] = 10

    def level(nodes: list[int], *paths: list[int]) -> Tensor:
        tree = (
            torch.tensor([[len(path) - 1 for path in paths]]),
            torch.tensor([[path + [0] * (4 - len(path)) for path in paths]]),
        )
        return rows.step(texts[:, [10 + node for node in nodes]], rows.lengths, tree=tree)

    level([0], [0])
    level([4, 1], [0, 1], [0, 2])
    third = level([2, 5], [0, 2, 3], [0, 1, 4])
    last = level([3, 3], [0, 2, 3, 6], [0, 1, 4, 5])
    assert torch.equal(third[0, 0], want[0, 12]) and torch.equal(last[0, 0], want[0, 13])
    assert not torch.equal(last[0, 1], want[0, 13])


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setattr(f"compile.{name}.runs_triton", lambda _: True)


def run_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)
    for module in ("sharesd.models.prefill", "sharesd.engine.prefill_scheduler"):
        monkeypatch.setattr(f"{module}.reads_in_pieces", lambda _: True)


def pack(model: torch.nn.Module) -> None:
    """As `CudaBackend` does."""
    replace_with_row_mixtures(model)
    replace_with_row_linears(model, 16, 2)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_logits_are_those_of_plain_modules(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which `test_models.py` compares with transformers: of a prompt in padded pieces, and of steps after it."""
    folder = make_delta_model(tmp_path / "model", model_type=family)
    model = load_decoder(folder, dtype=torch.float32)
    tokens = torch.randint(3, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    want_TV, got = logits_of(model, tokens[0].tolist()), list[Tensor]()
    pack(model)
    use_triton(monkeypatch)
    cache = model.new_cache(2, 512)
    with torch.inference_mode():
        piece = prefill.next_padded_piece(model, cache, 0, 30)
        got.append(prefill.read_piece(model, cache, 1, tokens[0].tolist()[:30], piece, 30))
        cache.lengths[0] = -1
        for first, end in ((30, 31), (31, 35), (35, 40)):
            got.append(model.forward(tokens[:, first:end].repeat(2, 1), cache)[1])
            cache.lengths[1] = end
    errors_T = (torch.cat(got) - want_TV).norm(dim=-1) / want_TV.norm(dim=-1)
    assert errors_T.max() < 1e-4


@pytest.mark.parametrize(("family", "kind"), [("qwen3_5_text", "Q8_0"), ("qwen3_next", "Q4_0")])
@pytest.mark.usefixtures("own_cache")
def test_weights_of_a_file_give_the_logits_of_their_numbers(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to blocks a first linear may have rates and steps in numbers."""
    fields: dict[str, Any] = {"model_type": family, "linear_value_head_dim": 32, "mtp_num_hidden_layers": 0}
    file = write_delta_gguf(tmp_path / "model.gguf", make_delta_model(tmp_path / "model", **fields), kind)
    folder, device = converted_folder(file, dequantize=False), torch.device("cpu")
    load = partial(load_decoder, folder, dtype=torch.float32)
    tokens = torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(0))
    want_TV = logits_of(load(tensors=partial(numbers, folder)), tokens[0].tolist())
    make_linear = CudaBackend(device, torch.float32, 16, 2).make_linear
    model = load(tensors=partial(stored, folder), make_linear=make_linear)
    assert kind in model.blocks[0].delta.in_proj.types
    pack(model)
    use_triton(monkeypatch)
    with torch.inference_mode():
        got_TV = model(tokens, model.new_cache(1, 64))[0]
    assert ((got_TV - want_TV).norm(dim=-1) / want_TV.norm(dim=-1)).max() < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its engine runs on the CPU")
@pytest.mark.parametrize(
    ("family", "mode", "tree"),
    [
        ("qwen3_5_text", "share", (2, 2, 4)),
        pytest.param("qwen3_5_text", "share", None, marks=pytest.mark.long),
        pytest.param("qwen3_5_text", "mtp", None, marks=pytest.mark.long),
        pytest.param("qwen3_next", "mtp", None, marks=pytest.mark.long),
        pytest.param("a file", "share", None, marks=pytest.mark.long),
        ("lfm2", "share", (2, 2, 4)),
        pytest.param("lfm2", "suffix", None, marks=pytest.mark.long),
        pytest.param("lfm2_moe", "suffix", None, marks=pytest.mark.long),
    ],
)
def test_modes_have_one_text(
    family: str, mode: str, tree: tuple[int, int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the CPU's kernels, of two rows at once, with prompts in padded pieces."""
    fields: dict[str, Any] = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "mtp_num_hidden_layers": 1}
    fields["model_type"] = "qwen3_5_text" if family == "a file" else family
    if family.startswith("lfm2"):
        target = make_conv_model(tmp_path / "model", model_type=family)
    else:
        target = make_delta_model(tmp_path / "model", **fields)
    if family == "a file":
        target = write_delta_gguf(tmp_path / "model.gguf", target, "F32")
    prompts, params = [[5, 9, 14], [*range(10, 22)]], SamplingParams(max_new_tokens=3, temperature=1.0, seed=4)
    options: dict[str, Any] = {"device": "cpu", "max_batch": 2, "num_draft": 4, "dtype": "fp32", "max_context": 64}
    plain = LLM(str(target), modes=("naive",), **options)
    want = [each.token_ids for each in plain.generate(prompts, params)]
    monkeypatch.setattr(CpuBackend, "pack_model", lambda _, model: pack(model))
    monkeypatch.setattr("sharesd.startup.target.ModelLoader._make_linear", lambda *_, **__: None)
    run_as_on_gpus(monkeypatch)
    llm = LLM(str(target), mode=mode, compile="off", **options, **({"tree": tree} if tree else {}))
    assert [each.token_ids for each in llm.generate(prompts, params)] == want


SMALL = {"num_hidden_layers": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1}
WAYS = [SamplingParams(max_new_tokens=4, temperature=temperature, seed=4) for temperature in (0.0, 1.0)]


def run_recurrent_layers_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other parts run on the CPU, and a start does not compare the bits of rows."""
    run_as_on_gpus(monkeypatch)
    monkeypatch.setattr("sharesd.startup.loaded_model.check_rows", lambda *_, **__: RowBits(True, True, True))


def answers(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return [each.token_ids for way in WAYS for each in llm.generate(prompts, way, **options)]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its engine runs on the CPU")
@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("q8", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("lfm2", marks=pytest.mark.long)])
def test_tables_second_models_and_mixtures_of_drafters_have_one_text(
    family: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the CPU's kernels, of two rows at once, with and without noise."""
    make: Any = partial(make_delta_model, mtp_num_hidden_layers=1, **SMALL) if family != "lfm2" else make_conv_model
    target, prompts = str(make(tmp_path / "model")), [[5, 9, 14, 5, 9], [*range(10, 22)]]
    options: dict[str, Any] = {"device": "cpu", "max_batch": 2, "dtype": "fp32", "max_context": 64}
    options |= {"kv_dtype": kv_dtype, "num_draft": 3}
    want = answers(LLM(target, modes=("naive",), **options), prompts)
    run_recurrent_layers_as_on_gpus(monkeypatch)
    modes: Any = ("suffix", "recycle", "classic", "hybrid", "auto")
    llm = LLM(target, modes=modes, draft=target, compile="off", **options)
    for mode in modes:
        assert answers(llm, prompts, mode=mode) == want, mode


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its engine runs on the CPU")
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_texts_continue_from_kept_states(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row, and of a file after a restart; at the end of whole pieces alone."""
    smaller = {"CHUNK": 32, "PIECES": (16, 32), "BOUNDARY": 16, "TAIL": 4, "NEARBY": 4}
    for module in (prefill, recurrent, row_allocator, prefill_scheduler):
        for name in smaller.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, smaller[name])
    monkeypatch.setattr(Runtime, "_recompute_decoded_kv", True)
    target = str(
        make_conv_model(tmp_path / "model") if family == "lfm2" else make_delta_model(tmp_path / "model", **SMALL)
    )
    options: dict[str, Any] = {"device": "cpu", "max_batch": 2, "dtype": "fp32", "max_context": 160, "num_draft": 3}
    options["prefill_chunk"] = None
    first = list(range(10, 80))
    prompts, params = [first, [*first[:66], 5, 6], [*first[:40], 7]], WAYS[1]
    with LLM(target, modes=("naive",), **options) as plain:
        want = [plain.generate([prompt], params)[0].token_ids for prompt in prompts]
    run_recurrent_layers_as_on_gpus(monkeypatch)
    begun, allocate = list[Request](), row_allocator.RowAllocator.allocate
    monkeypatch.setattr(
        row_allocator.RowAllocator, "allocate", lambda rows, new: begun.append(new) or allocate(rows, new)
    )
    cached, found = list[int](), list[list[int]]()
    for part in (prompts, prompts[1:2]):
        with LLM(target, mode="suffix", compile="off", prompt_cache=str(tmp_path / "kept"), **options) as llm:
            for prompt in part:
                begun.clear()
                found.append(llm.generate([prompt], params)[0].token_ids)
                cached.append(begun[0].cached_tokens)
    assert found == [*want, want[1]] and cached == [0, 64, 32, 32]
