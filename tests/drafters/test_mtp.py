"""Layers for multi-token prediction inside checkpoints: their logits, and texts that stay those of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from compile.attention import TreeAttentionMask
from compile.block_linear import BlockLinear
from sharesd import LLM, SamplingParams
from sharesd.cli.main import main
from sharesd.config import EngineConfig, OffloadConfig
from sharesd.drafters import selection
from sharesd.drafters.mtp.checkpoint import find, load, stored_bytes
from sharesd.drafters.mtp.drafter import MTPDrafter
from sharesd.drafters.mtp.head import MTP
from sharesd.models import loader
from sharesd.models.gguf import weights
from sharesd.models.gguf.config import config_of
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.gguf.reader import GGUFFile, read_gguf
from sharesd.models.loader import decoder_config, load_decoder
from sharesd.sampling_params import SamplingParams as Params
from sharesd.startup.resolve import resolve_config
from sharesd.weights.draft_heads import find_inner_heads
from tests.helpers.gguf_files import write_delta_gguf, write_gguf
from tests.helpers.quantized_folders import FOLDERS, quantize_folder
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tiny_models import make_delta_model, make_mixture
from tests.models.folders import edit_tensors, publish_convolutions

TEXT = [7, 301, 45, 12, 45, 99, 310, 8, 200, 45, 12, 3]
LAYER = "model.layers.2."
MODES = ("naive", "mtp", "auto", "hybrid")
pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")


def make_model(folder: Path, **fields: Any) -> Path:
    """A tiny GLM with a layer for multi-token prediction."""
    fields = {"model_type": "glm4_moe", "num_nextn_predict_layers": 1, "use_qk_norm": True, **fields}
    return make_mixture(folder, **fields)


def make_qwen(folder: Path, **fields: Any) -> Path:
    """A tiny Qwen3.5 with such a layer, its convolutions stored as they are published."""
    folder = make_delta_model(folder, mtp_num_hidden_layers=1, num_hidden_layers=4, **fields)
    return edit_tensors(folder, publish_convolutions)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "glm4_moe": make_model,
    "qwen3_5": make_qwen,
    "qwen3_5_moe": partial(make_qwen, model_type="qwen3_5_moe_text"),
    "qwen3_next": partial(make_qwen, model_type="qwen3_next"),
}


def merged(own: dict[str, Tensor], count: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a block as transformers has them in memory: all experts in one."""
    for name, tensor in own.items():
        if ".experts." not in name:
            yield name, tensor
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        rows = [torch.cat([own[f"mlp.experts.{i}.{part}_proj.weight"] for part in parts]) for i in range(count)]
        yield f"mlp.experts.{name}", torch.stack(rows)


class Reference:
    """The layer by its formula, around the block of transformers; whole texts are read anew for each token."""

    PARTS: ClassVar[dict[str, dict[str, str]]] = {
        "glm4_moe": {"fc": "eh_proj", "embed": "enorm", "state": "hnorm", "out": "shared_head.norm"},
        "qwen3_5_text": {"fc": "fc", "embed": "pre_fc_norm_embedding", "state": "pre_fc_norm_hidden", "out": "norm"},
    }
    PARTS["qwen3_5_moe_text"] = PARTS["qwen3_next"] = PARTS["qwen3_5_text"]
    QWEN: ClassVar[dict[str, Any]] = {
        "qwen3_5_text": modeling_qwen3_5.Qwen3_5DecoderLayer,
        "qwen3_5_moe_text": modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer,
        "qwen3_next": modeling_qwen3_next.Qwen3NextDecoderLayer,
    }

    def __init__(self, folder: Path, is_before: bool) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.is_before, config = is_before, self.model.config
        self.parts, self.eps = self.PARTS[config.model_type], config.rms_norm_eps
        is_qwen = config.model_type in self.QWEN
        self.one, root = (1.0, "mtp.") if is_qwen else (0.0, LAYER)  # added to weights of norms
        stored = load_file(folder / "model.safetensors")
        self.tensors = {n.removeprefix(root): tensor.float() for n, tensor in stored.items() if n.startswith(root)}
        own = {n.removeprefix("layers.0."): t for n, t in self.tensors.items() if "layers.0." in n or not is_qwen}
        if is_qwen:
            self.block: Any = self.QWEN[config.model_type](config, config.layer_types.index("full_attention"))
            own = dict(merged(own, config.num_experts)) if config.model_type != "qwen3_5_text" else own
        else:
            self.block = modeling_glm4_moe.Glm4MoeDecoderLayer(config, 1)
            own = {n: t for n, t in own.items() if not n.startswith((*self.parts.values(), "shared_head", "embed"))}
            own = dict(merged(own, config.n_routed_experts))
        self.block.eval().load_state_dict(own)

    def unit(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def weight(self, part: str) -> Tensor:
        return self.tensors[f"{self.parts[part]}.weight"] + self.one

    @torch.no_grad()
    def logits(self, text: list[int], chain: list[int], target_TD: Tensor) -> list[Tensor]:
        """Logits [V] after the text, and after each token of a chain, from the target's states behind its norm.

        The target's own logits are compared elsewhere: a mixture of random weights differs from itself in float64 by
        3e-5, and the layer makes that 4e-4.
        """
        model = self.model.model
        before_TD = target_TD / (model.norm.weight + self.one)
        state_TD = (before_TD if self.is_before else self.unit(target_TD))[:-1]  # of the last token none is known
        found, tokens = [], [*text[1:], *chain]
        for _ in range(1 + len(chain)):
            embeds_TD = self.unit(model.embed_tokens(torch.tensor(tokens[: len(state_TD)])))
            mixed = torch.cat([embeds_TD * self.weight("embed"), state_TD * self.weight("state")], 1)
            x_1TD = (mixed @ self.tensors[f"{self.parts['fc']}.weight"].T)[None]
            T = x_1TD.shape[1]
            places_1T = torch.arange(T)[None]
            mask = torch.full((1, 1, T, T), -torch.inf).triu(1)
            angles = model.rotary_emb(x_1TD, places_1T)
            out_1TD = self.block(x_1TD, attention_mask=mask, position_ids=places_1T, position_embeddings=angles)
            out_1TD = out_1TD[0] if isinstance(out_1TD, tuple) else out_1TD
            unit_TD = self.unit(out_1TD[0])
            out_TD = unit_TD * self.weight("out")
            found.append(self.model.lm_head(out_TD[-1]))
            state_TD = torch.cat([state_TD, (unit_TD if self.is_before else self.unit(out_TD))[-1:]])
        return found


def drafted(folder: Path, is_before: bool) -> tuple[Any, Callable[..., list[Tensor]], Tensor]:
    target = load_decoder(folder, dtype=torch.float32)
    head = load(folder, target, None)
    head.use_states_before_norm(is_before)
    cache, own = target.new_cache(1, 64, head.config.taps), head.new_cache(1, 64)
    states_1PD = torch.zeros(1, 1, head.config.block.hidden_size)

    @torch.inference_mode()
    def logits(text: list[int], chain: list[int], first: int = 0) -> list[Tensor]:
        """Logits as `Reference.logits`; places below `first` have been read."""
        cache.lengths.fill_(0)
        target.forward(torch.tensor([text]), cache)
        own.lengths.fill_(first)
        tokens_1S = torch.tensor([text + [0] * (own.slots - len(text))])
        assert cache.features is not None
        num = len(text) - 1 - first
        found = [head.read(tokens_1S, cache.features, num, own, torch.tensor([len(text) - 1]), states_1PD)]
        own.lengths.fill_(len(text) - 1)
        for token in chain:
            found.append(head.step(torch.tensor([[token]]), states_1PD, own))
            own.lengths += 1
        return [each[0, 0] for each in found if each is not None]

    assert cache.features is not None
    return head, logits, cache.features[0]


@pytest.mark.parametrize("is_before", [False, True], ids=["behind", "before"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_formula(family: str, is_before: bool, tmp_path: Path) -> None:
    """Of a prompt, of chains, and after a round that accepted a part of one, and none."""
    folder = FAMILIES[family](tmp_path / "model")
    reference, (_, logits, states_SD) = Reference(folder, is_before), drafted(folder, is_before)
    for text, chain, first in ((TEXT[:7], TEXT[7:10], 0), (TEXT[:9], [5, 6], 6), (TEXT[:10], [4], 8)):
        found = logits(text, chain, first)
        for ours, theirs in zip(found, reference.logits(text, chain, states_SD[: len(text)]), strict=True):
            assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@torch.inference_mode()
def test_nodes_of_a_tree_have_the_logits_of_their_paths(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    head, logits, _ = drafted(folder, False)
    paths = ([5, 6], [5, 9], [8, 6], [8, 2])
    chains = [logits(TEXT, path)[1:] for path in paths]
    target = load_decoder(folder, dtype=torch.float32)
    cache, own = target.new_cache(1, 64, head.config.taps), head.new_cache(1, 64)
    target.forward(torch.tensor([TEXT]), cache)
    states_1PD, end = torch.zeros(1, 7, head.config.block.hidden_size), torch.tensor([len(TEXT) - 1])
    assert cache.features is not None
    head.read(torch.tensor([TEXT]), cache.features, len(TEXT) - 1, own, end, states_1PD)
    own.lengths.fill_(len(TEXT) - 1)
    level = TreeAttentionMask(torch.tensor([[0, 0]]), torch.tensor([[[0, 0], [1, 0]]]))
    first = head.step(torch.tensor([[5, 8]]), states_1PD, own, level)[0]
    below = torch.tensor([[[0, 2], [0, 3], [1, 4], [1, 5]]])
    second = head.step(torch.tensor([[6, 9, 6, 2]]), states_1PD, own, TreeAttentionMask(torch.tensor([[1] * 4]), below))
    for number, chain in enumerate(chains):
        assert torch.allclose(first[number // 2], chain[0], atol=1e-5)
        assert torch.allclose(second[0, number], chain[1], atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *product(FAMILIES, ({"num_draft": 4}, {"num_draft": 6, "tree": (2, 3, 6)})),
        ("glm4_moe", {"num_draft": 3, "kv_dtype": "q8"}),
    ],
)
def test_all_modes_have_one_text(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    llm = require_same_texts(
        str(FAMILIES[family](tmp_path / "model")), MODES, device="cpu", max_batch=2, hybrid_with=(), **options
    )
    runtime = llm._runtime
    assert runtime is not None and runtime.auto is not None
    assert runtime.auto.drafters[0] == "mtp" and selection.active_drafters(runtime.config, "hybrid")[0] == "mtp"
    drafter = runtime._drafters["mtp"]
    assert isinstance(drafter, MTPDrafter) and drafter.head.layer.run_stack is not None
    llm.generate([TEXT], SamplingParams(max_new_tokens=16), mode="mtp")
    assert runtime.engine.stats.drafted_tokens > 20
    weights, kv = drafter.extra_bytes()
    assert weights > 50_000 and kv > 0


# ---- a layer that knows

CYCLE = [40, 305, 77, 12, 230, 9, 118, 66, 150, 81, 33, 201, 59, 270, 19, 99]


def knowing(folder: Path, reads: str, is_before: bool) -> Path:
    """A target that goes round a cycle of tokens, and a layer that is right about the token after the next.

    `reads`: "embedding" of the next token, or "state" of this one; the other half of what it mixes has no effect. The
    norms flip signs, so that only one kind of states is the right one.
    """
    make_model(folder, use_qk_norm=False)
    D, dice = 64, torch.Generator().manual_seed(1)
    signs_DD = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(D)] for i in range(D)])  # orthogonal rows
    flips_D = torch.randint(0, 2, (D,), generator=dice) * 2.0 - 1
    own_D = torch.randint(0, 2, (D,), generator=dice) * 2.0 - 1
    rows = signs_DD[1 : 1 + len(CYCLE)]
    after = torch.roll(rows, -1, 0)

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            if name.endswith("norm.weight"):
                tensor.fill_(1)
        tensors["model.embed_tokens.weight"].zero_()
        tensors["model.embed_tokens.weight"][CYCLE] = rows.bfloat16()
        tensors["lm_head.weight"].zero_()
        tensors["lm_head.weight"][CYCLE] = (torch.roll(rows, 1, 0) * flips_D).bfloat16()
        tensors["model.norm.weight"].copy_(flips_D)
        tensors[f"{LAYER}shared_head.norm.weight"].copy_(flips_D)
        tensors[f"{LAYER}hnorm.weight"].copy_(own_D)
        undone_D = own_D if is_before else own_D * flips_D
        move_DD = (after.T @ rows / D * undone_D).bfloat16()
        empty_DD = torch.zeros(D, D, dtype=torch.bfloat16)
        both = [empty_DD, move_DD] if reads == "state" else [torch.eye(D, dtype=torch.bfloat16), empty_DD]
        tensors[f"{LAYER}eh_proj.weight"].copy_(torch.cat(both, 1))

    return edit_tensors(folder, change)


def text_from(start: int, num: int) -> list[int]:
    return [CYCLE[(start + i) % len(CYCLE)] for i in range(num)]


@pytest.mark.parametrize("tree", [None, (2, 3, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize("reads", ["embedding", "state"])
def test_the_drafts_of_a_layer_that_knows_are_accepted(reads: str, tree: Any, tmp_path: Path) -> None:
    """Rows of several lengths; a prompt that goes on from a text, and one that another row has read."""
    folder = knowing(tmp_path / "model", reads, is_before=False)
    shape: dict[str, Any] = {"num_draft": 3} if tree is None else {"num_draft": 6, "tree": tree}
    llm = LLM(str(folder), modes=("mtp",), device="cpu", max_batch=2, max_context=128, dtype="fp32", **shape)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    for prompts in ([text_from(0, 5), text_from(3, 9)], [text_from(0, 30)], [text_from(3, 20), text_from(3, 21)]):
        found = [each.token_ids for each in llm.generate(prompts, params, mode="mtp")]
        ends = [(CYCLE.index(prompt[-1]) + 1) % len(CYCLE) for prompt in prompts]
        assert found == [text_from(end, 20) for end in ends]
        assert llm._runtime is not None
        stats = llm._runtime.engine.stats
        assert stats.alpha == 1.0 if tree is None else stats.tau > 3.0


def test_a_restart_drafts_from_kept_hidden_states(tmp_path: Path) -> None:
    folder = knowing(tmp_path / "model", "state", is_before=False)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    for prompt in (text_from(0, 40), text_from(0, 45)):
        llm = LLM(str(folder), modes=("mtp",), device="cpu", num_draft=3, prompt_cache=str(tmp_path / "kept"))
        [found] = llm.generate([prompt], params, mode="mtp")
        assert found.token_ids == text_from(CYCLE.index(prompt[-1]) + 1, 12)
        assert llm._runtime is not None and llm._runtime.engine.stats.alpha == 1.0
        llm.close()
    assert any((tmp_path / "kept").iterdir())


def test_states_before_the_norm_are_found_out_and_kept(tmp_path: Path) -> None:
    folder = knowing(tmp_path / "model", "state", is_before=True)
    options: dict[str, Any] = {"modes": ("naive", "mtp"), "device": "cpu", "num_draft": 3, "max_batch": 2}
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    prompts = [text_from(0, 5), text_from(7, 30)]
    llm = LLM(str(folder), max_context=256, **options)
    plain = [each.token_ids for each in llm.generate(prompts, params, mode="naive")]
    alphas = []
    for _ in range(2):
        assert [each.token_ids for each in llm.generate(prompts, params, mode="mtp")] == plain
        assert llm._runtime is not None
        alphas.append(llm._runtime.engine.stats.alpha)
    assert alphas[0] < 0.8 and alphas[1] == 1.0
    again = LLM(str(folder), max_context=256, **options)
    assert [each.token_ids for each in again.generate(prompts, params, mode="mtp")] == plain
    assert again._runtime is not None and again._runtime.engine.stats.alpha == 1.0


# ---- where it is stored


def logits_of(head: MTP) -> Tensor:
    """Logits of a text, from states made up."""
    states_1TD = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(2)).to(head.place["dtype"])
    with torch.inference_mode():
        return head.draft_logits(
            head(torch.tensor([[7, 30, 45, 12, 45, 99]]), head.fuse(states_1TD), head.new_cache(1, 32))
        )


def test_files_of_gguf_run_as_stored_or_expanded(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "glm4moe", "glm4", kind="F16", layers=2)
    stored, expanded = converted_folder(file, dequantize=False), converted_folder(file)
    assert find(stored, decoder_config(stored)) and find(expanded, decoder_config(expanded))
    assert stored_bytes(stored) > 0 and stored_bytes(expanded) > 0
    target = load_decoder(expanded, dtype=torch.float32)
    ours, theirs = (logits_of(load(each, target, None)) for each in (stored, expanded))
    assert torch.allclose(ours, theirs, atol=0.05), (ours - theirs).abs().max()  # bfloat16
    quantized = write_gguf(tmp_path / "q8.gguf", "glm4moe", "glm4", layers=2)
    for options in ({}, {"dequantize": True}):
        llm = require_same_texts(
            str(quantized), MODES, device="cpu", max_batch=2, num_draft=3, hybrid_with=(), **options
        )
        assert llm._runtime is not None
        head = llm._runtime.model.heads["mtp"]
        assert isinstance(head, MTP) and isinstance(head.block.attn.qkv, BlockLinear) == (not options)
        llm.close()


def test_experts_that_gpus_do_not_run_as_stored_are_named_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader, "runs_triton", lambda device: device.type == "cuda")
    file = write_gguf(tmp_path / "tiny.gguf", "glm4moe", "glm4", layers=2, types={"blk.2.ffn_up_exps": "F16"})
    folder = converted_folder(file, dequantize=False)
    find_heads = partial(find_inner_heads, folder, EngineConfig(target=str(folder), dequantize=False), in_memory=False)
    gpu, reason = torch.device("cuda", 0), "model.layers.2.mlp.experts.0.up_proj.weight runs as F16 in one linear"
    assert find_heads(["mtp"], torch.device("cpu")) == ("mtp",) and not caplog.records
    with pytest.raises(ValueError, match=f"{reason} with blocks, and kernels of GPUs .*; use another mode, --deq"):
        find_heads(["mtp"], gpu)
    assert find_heads(["auto"], gpu) == ()
    assert f"mode mtp is not used: {reason}" in caplog.text


def test_a_file_without_a_part_of_the_layer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "glm4moe", "glm4", layers=2)
    stored, read = converted_folder(file, dequantize=False), weights.read_model

    def without(*given: Any) -> GGUFFile:
        found = read(*given)
        kept = {name: tensor for name, tensor in found.tensors.items() if not name.endswith("eh_proj.weight")}
        return GGUFFile(found.metadata, kept)

    monkeypatch.setattr(weights, "read_model", without)
    with pytest.raises(ValueError, match=r"tiny\.gguf: it has no tensor 'blk\.2\.nextn\.eh_proj\.weight'"):
        find(stored, decoder_config(stored))


def test_a_file_of_the_layer_alone_is_refused(tmp_path: Path) -> None:
    """Which converters write with --mtp, for programs that load it next to its model."""
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", "glm4moe", "glm4", layers=40))
    own = {name: tensor for name, tensor in file.tensors.items() if not name.startswith("blk.") or ".40." in name}
    with pytest.raises(ValueError, match="it holds a layer for multi-token prediction alone; give a file with all lay"):
        config_of(GGUFFile(file.metadata, own))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_file_of_qwen_has_the_layer_of_its_folder(family: str, tmp_path: Path) -> None:
    """One is added to all of its norms, too, as programs that read such files expect."""
    folder = FAMILIES[family](tmp_path / "model")
    file = write_delta_gguf(tmp_path / "model.gguf", folder)
    target = load_decoder(folder, dtype=torch.float32)
    wanted = logits_of(load(folder, target, None))
    for dequantize in (False, True):
        found = converted_folder(file, dequantize=dequantize)
        assert find(found, decoder_config(found))
        torch.testing.assert_close(logits_of(load(found, target, None)), wanted, atol=1e-5, rtol=0)


def test_the_layer_is_quantized_with_its_target(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    llm = require_same_texts(str(folder), ("naive", "mtp"), device="cpu", max_batch=2, num_draft=3, target_quant="q8_0")
    assert llm._runtime is not None
    head = llm._runtime.model.heads["mtp"]
    assert isinstance(head, MTP)
    expert: Any = head.block.mlp
    assert isinstance(expert.experts[0].gate_up, BlockLinear)


@pytest.mark.parametrize("dequantize", [False, True])
def test_quantized_folders_have_it_too(dequantize: bool, tmp_path: Path) -> None:
    section, planes = FOLDERS["gptq"]
    folder = str(quantize_folder(make_model(tmp_path / "model"), section, planes))
    llm = require_same_texts(folder, ("naive", "mtp"), device="cpu", max_batch=2, num_draft=3, dequantize=dequantize)
    assert llm._runtime is not None
    head = llm._runtime.model.heads["mtp"]
    assert isinstance(head, MTP) and isinstance(head.fc, BlockLinear) != dequantize


def test_the_layer_stays_in_memory_next_to_offloaded_blocks(tmp_path: Path, only_the_model: None) -> None:
    folder = make_model(tmp_path / "model", num_hidden_layers=4)
    options: dict[str, Any] = {"device": "cpu", "max_context": 64, "num_draft": 3, "dtype": "bfloat16", "max_batch": 1}
    config = EngineConfig(target=str(folder), mode="mtp", offload=OffloadConfig(host_memory=10**9), **options)
    plan = resolve_config(config).plan
    naive = resolve_config(replace(config, mode="naive")).plan
    assert plan is not None and naive is not None
    assert plan.device_bytes - naive.device_bytes >= stored_bytes(folder) > 0
    texts = []
    for limit in (None, plan.device_bytes - plan.slot):
        llm = LLM(str(folder), modes=("naive", "mtp"), offload=OffloadConfig(host_memory=limit), **options)
        params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
        texts += [llm.generate([TEXT], params, mode=mode)[0].token_ids for mode in ("naive", "mtp")]
    runtime = llm._runtime
    assert runtime is not None and runtime.streamed is not None and len(runtime.streamed.stream.blocks) > 2
    assert all(text == texts[0] for text in texts) and runtime.engine.stats.drafted_tokens > 0


# ---- bad input


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}mlp.experts.3.up_proj.weight"][2, 5] = float("nan")


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}eh_proj.weight"] = tensors[f"{LAYER}eh_proj.weight"][:, 1:].contiguous()


def drop_all(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(LAYER)]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(f"{LAYER}enorm.weight"), f"missing {LAYER}enorm.weight"),
        (drop(f"{LAYER}mlp.experts.3.up_proj.weight"), f"missing {LAYER}mlp.experts.3.up_proj.weight"),
        (narrow, f"{LAYER}eh_proj.weight has shape \\[64, 127\\]"),
    ],
)
def test_a_layer_that_is_not_whole_is_refused_by_name(
    change: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(edit_tensors(make_model(tmp_path / "model"), change))
    with pytest.raises(ValueError, match=said):
        LLM(folder, mode="mtp", device="cpu").generate(["a"], Params(max_new_tokens=2))
    LLM(folder, mode="auto", device="cpu").generate(["a"], Params(max_new_tokens=2))
    assert "mode mtp is not used" in caplog.text


@pytest.mark.parametrize("how", ["no tensors", "no field", "other family"])
def test_a_checkpoint_without_the_layer(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    family = {"model_type": "qwen3_moe"} if how == "other family" else {}
    folder = edit_tensors(make_model(tmp_path / "model", **family), drop_all)
    if how == "no field":
        raw = json.loads((folder / "config.json").read_text())
        del raw["num_nextn_predict_layers"]
        (folder / "config.json").write_text(json.dumps(raw))
    assert main(["generate", "a", "--model", str(folder), "--mode", "mtp", "--device", "cpu"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "mode mtp needs a layer for multi-token prediction" in last and "has none; use another mode" in last
    LLM(str(folder), mode="auto", device="cpu").generate(["a"], Params(max_new_tokens=2))
    assert "mode mtp" not in caplog.text


def test_a_layer_with_values_that_are_no_numbers_is_refused_by_name(tmp_path: Path) -> None:
    folder = str(edit_tensors(make_model(tmp_path / "model"), spoil))
    with pytest.raises(ValueError, match=f"{LAYER}mlp.experts.3.up_proj.weight has NaN or infinite values"):
        LLM(folder, mode="mtp", device="cpu").generate(["a"], Params(max_new_tokens=2))


def test_several_layers_are_refused(tmp_path: Path) -> None:
    config = replace(decoder_config(make_model(tmp_path / "model")), num_mtp_layers=2)
    with pytest.raises(ValueError, match="has 2 layers for multi-token prediction, and drafts of one are supported"):
        find(tmp_path / "model", config)
