"""The native decoder and the fallback against transformers, on tiny random models in float32."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.elastic.utils.logging import get_logger

from sharesd.models.architectures import config_from_hf
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder, call_block
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.hf import HFModel, quiet_transformers
from sharesd.models.loader import load_decoder, load_model

VOCAB, CONTEXT = 199, 64
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
THETA: dict[str, Any] = {"rope_theta": 10_000.0}
FACTOR = THETA | {"factor": 4.0}
LLAMA3 = THETA | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = THETA | {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
MINISTRAL_ROPE = YARN | {"factor": 8.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}
MINISTRAL_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0}
LONGROPE = THETA | {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], "long_factor": [4.0] * 6}
LONGROPE |= {"partial_rotary_factor": 0.75}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 5}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": THETA | {"rope_type": "default"},
}
DENSE_BETWEEN: dict[str, Any] = {"mlp_only_layers": [1], "norm_topk_prob": True}
GLM: dict[str, Any] = {"n_routed_experts": 7, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
GLM |= {"routed_scaling_factor": 2.5, "attention_bias": True, "use_qk_norm": True}
EXPERTS: dict[str, Any] = {"head_dim": 32, "moe_intermediate_size": 40}
OSS: dict[str, Any] = {"head_dim": 32, "num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 5}
OSS_YARN = YARN | {"factor": 8.0, "original_max_position_embeddings": 8, "truncate": False}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
LFM2: dict[str, Any] = {"full_attn_idxs": [1], "block_multiple_of": 32}
LFM2_MOE: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "moe_intermediate_size": 40}
BIASED: dict[str, Any] = {"conv_bias": True, "conv_L_cache": 4, "full_attn_idxs": [0]}

DELTA: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
DELTA |= {"rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}}
DELTA["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
ODD_DELTA: dict[str, Any] = {"linear_conv_kernel_dim": 3, "attention_bias": True, "tie_word_embeddings": True}
ODD_DELTA |= {"linear_num_key_heads": 1, "linear_key_head_dim": 24, "linear_value_head_dim": 11}
SHARED: dict[str, Any] = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
SHARED |= {"shared_expert_intermediate_size": 40}
DENSE = "intermediate_size"

NATIVE = {
    "llama": hf.LlamaConfig(**SMALL),
    "llama_biased_tied": hf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama_head_dim": hf.LlamaConfig(**SMALL, head_dim=32, hidden_act="gelu"),
    "llama_llama3_rope": hf.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama_linear_rope": hf.LlamaConfig(**SMALL, rope_parameters=FACTOR | {"rope_type": "linear"}),
    "llama_dynamic_rope": hf.LlamaConfig(**SMALL, rope_parameters=FACTOR | {"rope_type": "dynamic"}),
    "mistral_sliding": hf.MistralConfig(**SMALL, sliding_window=5),
    "mixtral": hf.MixtralConfig(**SMALL, num_local_experts=7, num_experts_per_tok=3),
    "mixtral_sliding_top1": hf.MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=1, sliding_window=5),
    "ministral3": hf.Ministral3Config(**SMALL, head_dim=16, rope_parameters=MINISTRAL_ROPE),
    "ministral3_sliding": hf.Ministral3Config(**SMALL, head_dim=32, sliding_window=5, rope_parameters=MINISTRAL_ROPE),
    "qwen2": hf.Qwen2Config(**SMALL),
    "qwen2_sliding_yarn": hf.Qwen2Config(**SMALL, **SLIDING, rope_parameters=YARN),
    "qwen3": hf.Qwen3Config(**SMALL, head_dim=32),
    "qwen3_moe": hf.Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=7, num_experts_per_tok=3, **DENSE_BETWEEN),
    "qwen3_moe_top1": hf.Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=5, num_experts_per_tok=1, **SLIDING),
    "glm4_moe": hf.Glm4MoeConfig(**SMALL, **EXPERTS, **GLM, num_mtp_layers=0),
    "glm4_moe_top1": hf.Glm4MoeConfig(**SMALL, **EXPERTS, n_routed_experts=5, num_experts_per_tok=1, num_mtp_layers=0),
    "gpt_oss": hf.GptOssConfig(**SMALL, **OSS, rope_parameters=OSS_YARN),
    "gpt_oss_top1": hf.GptOssConfig(**SMALL, **OSS | {"num_experts_per_tok": 1}, rope_parameters=YARN),
    "smollm3": hf.SmolLM3Config(**SMALL, no_rope_layer_interval=2),
    "phi3": hf.Phi3Config(**SMALL),
    "phi3_longrope": hf.Phi3Config(**SMALL, original_max_position_embeddings=32, rope_parameters=LONGROPE),
    "lfm2": hf.Lfm2Config(**SMALL, **LFM2),
    "lfm2_biased": hf.Lfm2Config(**SMALL, **BIASED, tie_word_embeddings=False),
    "lfm2_moe": hf.Lfm2MoeConfig(**SMALL, **LFM2_MOE, num_experts=7, num_experts_per_tok=3, num_dense_layers=1),
    "lfm2_moe_top1": hf.Lfm2MoeConfig(**SMALL, **LFM2_MOE, num_experts=5, num_experts_per_tok=1, num_dense_layers=0),
    "qwen3_5": hf.Qwen3_5TextConfig(**SMALL | DELTA),
    "qwen3_5_one_key_head": hf.Qwen3_5TextConfig(**SMALL | DELTA | ODD_DELTA),
    "qwen3_next": hf.Qwen3NextConfig(**SMALL | DELTA | SHARED, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen3_next_one_key_head": hf.Qwen3NextConfig(**SMALL | DELTA | ODD_DELTA | SHARED, norm_topk_prob=False),
    "qwen3_5_moe": hf.Qwen3_5MoeTextConfig(**{k: v for k, v in (SMALL | DELTA | SHARED).items() if k != DENSE}),
    "gemma2": hf.Gemma2Config(**SMALL, **GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    "gemma3_text": hf.Gemma3TextConfig(**SMALL, **GEMMA, sliding_window_pattern=3, rope_parameters=GEMMA3_ROPE),
}
_OLD_NAMES: dict[str, Any] = {"vocab_size": VOCAB, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_LOCAL: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "num_layers": 1, "attention_types": [[["local"], 1]]}
FALLBACK = {
    "bloom": hf.BloomConfig(**_OLD_NAMES, hidden_size=64, pad_token_id=0),
    "opt": hf.OPTConfig(**{**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt2": hf.GPT2Config(**_OLD_NAMES, n_embd=64, n_positions=CONTEXT),
    "gpt_neox": hf.GPTNeoXConfig(**SMALL),
    "starcoder2_sliding": hf.Starcoder2Config(**SMALL, sliding_window=5),
}
REFUSED = {
    "mamba": (hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1), "mamba.*state besides"),
    "mpt": (hf.MptConfig(vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=1), "mpt.*static cache"),
    "gpt_neo": (hf.GPTNeoConfig(vocab_size=VOCAB, **_LOCAL), "gpt_neo.*does not reproduce"),
}


def save_random(config: hf.PretrainedConfig, folder: Path, **kwargs: Any) -> hf.PreTrainedModel:
    """A random model whose norms and biases matter, saved as a checkpoint."""
    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for tensor in model.parameters():
        tensor.normal_(std=0.15) if tensor.ndim > 1 else tensor.add_(torch.randn_like(tensor) * 0.2)
    for name, tensor in model.named_parameters():
        if name.endswith("A_log"):  # so that a delta rule forgets slowly
            tensor.normal_(-2)
    for name, tensor in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.normal_(std=0.3)
    model.save_pretrained(folder, **kwargs)
    return model


def text(num_rows: int = 2, num_tokens: int = 24) -> Tensor:
    return torch.randint(3, VOCAB, (num_rows, num_tokens), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def check_against(model: CausalModel, reference: hf.PreTrainedModel) -> None:
    """One-shot, then a padded prefill, single tokens and four at a time, with rows of different lengths."""
    tokens = text()
    wanted = reference(tokens).logits
    scale = wanted.abs().max()
    assert scale > 0.1
    one_shot = model.forward(tokens, model.new_cache(2, 32))
    torch.testing.assert_close(one_shot, wanted, atol=1e-4, rtol=0)
    cache, lengths = model.new_cache(2, 32), torch.tensor([12, 9])
    cache.k[0].fill_(1e3), cache.v[0].fill_(1e3)  # whatever lies in unused slots must not matter
    if cache.recurrent is not None:
        cache.recurrent.inputs_NBRD.fill_(1e3)
    chunk = tokens[:, :16].masked_fill(torch.arange(16) >= lengths[:, None], 5)
    logits = model.forward(chunk, cache)
    for row in range(2):
        torch.testing.assert_close(logits[row, : lengths[row]], wanted[row, : lengths[row]], atol=1e-4, rtol=0)
    cache.lengths += lengths
    for step in (1, 4, 1, 4):
        at = cache.lengths[:, None] + torch.arange(step)
        logits = model.forward(tokens.gather(1, at), cache)
        torch.testing.assert_close(logits, wanted.gather(1, at[..., None].expand_as(logits)), atol=1e-4, rtol=0)
        cache.lengths += step
    assert cache.lengths.tolist() == [22, 19]
    keep = torch.tensor([[3, 0], [1, 2]])
    kept = model.forward(tokens[:, :5], model.new_cache(2, 32), keep)
    torch.testing.assert_close(kept, wanted.gather(1, keep[..., None].expand_as(kept)), atol=1e-4, rtol=0)
    kept = model.forward(tokens[:1, :5], model.new_cache(1, 32), keep[:1])
    torch.testing.assert_close(kept, wanted[:1, keep[0]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", NATIVE)
def test_native_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = save_random(NATIVE[family], tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder) and "native" in model.name
    assert model.vocab_size == VOCAB and model.eos_ids == (2,)
    check_against(model, reference)


@pytest.mark.parametrize("family", FALLBACK)
def test_fallback_logits_equal_those_of_transformers(family: str, tmp_path: Path, caplog) -> None:
    reference = save_random(FALLBACK[family], tmp_path)
    before = reference(text()).logits
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert isinstance(model, HFModel)
    assert "slower" in caplog.text
    torch.testing.assert_close(reference(text()).logits, before)  # masks of transformers stay its own
    check_against(model, reference)


@pytest.mark.parametrize("family", REFUSED)
def test_what_nobody_serves_is_refused_by_name(family: str, tmp_path: Path) -> None:
    config, message = REFUSED[family]
    save_random(config, tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, dtype=torch.float32, device="cpu")


def test_bfloat16_is_as_close_as_transformers_is(tmp_path: Path) -> None:
    reference = save_random(NATIVE["gemma2"], tmp_path)
    with torch.inference_mode():
        exact = reference(text()).logits
        theirs = reference.bfloat16()(text()).logits.float()
        model = load_decoder(tmp_path, dtype=torch.bfloat16)
        ours = model(text(), model.new_cache(2, 32)).float()
    assert (ours - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean()


def test_float64_stays_in_float64(tmp_path: Path) -> None:
    save_random(NATIVE["qwen3"], tmp_path)
    model = load_decoder(tmp_path, dtype=torch.float64)
    with torch.inference_mode():
        whole, cache = model(text(1), model.new_cache(1, 32)), model.new_cache(1, 32)
        first = model(text(1)[:, :9], cache)
        cache.lengths += 9
        rest = model(text(1)[:, 9:], cache)
    assert whole.dtype == torch.float64
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, atol=1e-12, rtol=0)


def test_positions_beyond_the_context_are_only_padding(tmp_path: Path) -> None:
    reference = save_random(NATIVE["llama"], tmp_path)
    model = load_decoder(tmp_path, dtype=torch.float32)
    tokens = text(1, CONTEXT)
    padded = torch.cat([tokens, tokens[:, :16]], 1)
    with torch.inference_mode():
        logits = model(padded, model.new_cache(1, CONTEXT + 16))
        torch.testing.assert_close(logits[:, :CONTEXT], reference(tokens).logits, atol=1e-4, rtol=0)


def test_one_compiled_block_serves_all_layers_of_its_kind(tmp_path: Path) -> None:
    """Each is reached through `run_block`, in order."""
    from torch._dynamo.testing import CompileCounter

    save_random(NATIVE["llama"], tmp_path)
    model, counter, seen = load_decoder(tmp_path, dtype=torch.float32), CompileCounter(), []
    compiled = torch.compile(call_block, fullgraph=True, dynamic=False, backend=counter)

    def run_block(block: torch.nn.Module, *tensors: Tensor, recent: int) -> Tensor:
        seen.append(block)
        return compiled(block, *tensors, recent=recent)

    with torch.inference_mode():
        plain = model(text(), model.new_cache(2, 32))
        model.run_block = run_block
        torch.testing.assert_close(model(text(), model.new_cache(2, 32)), plain, atol=1e-5, rtol=0)
    assert counter.frame_count == 1 and seen == list(model.blocks)


def old_style(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 wrote it."""
    config = {k: v for k, v in config.items() if k != "layer_types" or config["model_type"] == "lfm2_moe"}
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        config["sliding_window_pattern"] = 3
    config["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "partial_rotary_factor")}
    config["rope_scaling"] = {"type": rope["rope_type"], **scaling} if rope["rope_type"] != "default" else None
    return config


@pytest.mark.parametrize("family", NATIVE)
def test_config_files_of_transformers_4_mean_the_same(family: str) -> None:
    config = json.loads(NATIVE[family].to_json_string(use_diff=False))
    new, old = config_from_hf(config), config_from_hf(old_style(config))
    rope_parameters = [{k: v for k, v in rope.items() if k != "type"} for rope in old.rope_parameters]
    assert rope_parameters == [dict(rope) for rope in new.rope_parameters]
    assert (old.layer_types, old.max_context, old.head_dim) == (new.layer_types, new.max_context, new.head_dim)


def test_context_is_what_the_positions_allow() -> None:
    contexts = {family: config_from_hf(config.to_dict()).max_context for family, config in NATIVE.items()}
    assert contexts.pop("phi3_longrope") == 32  # beyond, other factors would apply to what is cached already
    assert contexts.pop("llama_linear_rope") == 4 * CONTEXT
    assert set(contexts.values()) == {CONTEXT}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_gemma3_is_served_as_text(prefix: str, tmp_path: Path) -> None:
    reference = save_random(NATIVE["gemma3_text"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    wrapped = {prefix + name.removeprefix("model."): tensor for name, tensor in stored.items()}
    save_file(wrapped | {"vision_tower.patch.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    inner = json.loads((tmp_path / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": inner, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink()
    model = load_decoder(tmp_path, dtype=torch.float32)
    assert model.eos_ids == (1, 106)
    check_against(model, reference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "granite"}, "granite"),
        ({"hidden_act": "relu"}, "llama.*relu"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "llama.*mrope"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
    ],
)
def test_unsupported_features_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        config_from_hf(NATIVE["llama"].to_dict() | change)


def test_missing_fields_are_named() -> None:
    config = NATIVE["llama"].to_dict()
    with pytest.raises(ValueError, match="'llama3' without 'factor'"):
        config_from_hf(config | {"rope_parameters": {"rope_type": "llama3"}})
    del config["hidden_size"]
    with pytest.raises(ValueError, match="hidden_size"):
        config_from_hf(config)


def test_torch_does_not_read_a_level_in_lower_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "warning")
    with pytest.raises(ValueError, match="Unknown level"):
        get_logger("a module of torch")
    with quiet_transformers():
        get_logger("another module of torch")
    assert os.environ["LOGLEVEL"] == "warning"
