"""Tiny random .gguf files of the architectures and tokenizers that are converted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

WORDS = ("the", "thing", "is", "in", "it", "on", "of", "and", "to", "that")
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EXPERTS = 5
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
WITH_EXPERTS = ("qwen3moe", "mixtral", "glm4moe", "gpt-oss", "lfm2moe")
KINDS = {"attn_output": "BF16", "shortconv.conv": "F32"}
HEAD_DIM = defaultdict(
    lambda: 16, qwen3=128, qwen3moe=32
)  # transformers overlooks that a Qwen3 file names another size than 128


FUSED = {
    "ffn_gate_up_exps": (1, ("ffn_gate_exps", "ffn_up_exps")),
    "attn_qkv": (0, ("attn_q", "attn_k", "attn_v")),
}
"""Part of a block as --fuse-gate-up-exps and --fuse-qkv of converters write it: axis, and the parts it is made of."""


class FusingWriter(gguf.GGUFWriter):
    """Writer of tensors as these options of converters make them."""

    def __init__(self, path: Path, arch: str) -> None:
        super().__init__(path, arch)
        self.held: dict[str, tuple[np.ndarray, Any]] = {}

    def add_tensor(self, name: str, tensor: Any, raw_shape: Any = None, raw_dtype: Any = None, *_: Any) -> None:
        self.held[name] = tensor, raw_dtype

    def write_header_to_file(self, path: Path | None = None) -> None:
        for name, (fused, (axis, (first, *others))) in product([*self.held], FUSED.items()):
            if f".{first}." in name:
                names = [name, *(name.replace(f".{first}.", f".{other}.") for other in others)]
                pieces = [self.held.pop(each) for each in names]
                data = np.concatenate([piece for piece, _ in pieces], axis)
                self.held[name.replace(f".{first}.", f".{fused}.")] = data, pieces[0][1]
        for name, (tensor, kind) in self.held.items():
            super().add_tensor(name, tensor, raw_dtype=kind)
        super().write_header_to_file(path)


class OllamaWriter(gguf.GGUFWriter):
    """Writer of files in the form of Ollama's converter (convert_qwen3next.go, convert_lfm2.go)."""

    def add_tensor(self, name: str, tensor: Any, raw_shape: Any = None, raw_dtype: Any = None, *_: Any) -> None:
        named = "output_norm.weight" if name == "token_embd_norm.weight" else name.replace("ssm_dt.bias", "ssm_dt")
        super().add_tensor(named, tensor, raw_dtype=raw_dtype)

    def write_header_to_file(self, path: Path | None = None) -> None:
        own, fields = f"{self.arch}.", self.kv_data[0]
        self.add_array("tokenizer.ggml.eos_token_ids", [2, 5])
        for role in ("padding", "unknown"):
            self.add_bool(f"tokenizer.ggml.add_{role}_token", False)
        if not self.arch.startswith("lfm2"):
            interval = fields.pop(own + "full_attention_interval").value
            layers, kv_heads = fields[own + "block_count"].value, fields.pop(own + "attention.head_count_kv").value
            self.add_head_count_kv([0 if (i + 1) % interval else kv_heads for i in range(layers)])
            self.add_bool(own + "ssm.v_head_reordered", self.arch != "qwen3next")
            self.add_bool(own + "rope.mrope_interleaved", True)
            self.add_array(own + "mrope_sections", [2, 1, 1])
            self.add_uint32(own + "vision.block_count", 1)
            self.add_uint32(own + "vision_start_token_id", 3)
            super().add_tensor("v.blk.0.attn_q.weight", np.zeros((4, 4), dtype=np.float32))
        if f"{own}expert_count" in fields and not self.arch.startswith("lfm2"):
            self.add_bool(own + "norm_top_k_prob", True)
            self.add_feed_forward_length(0)
        super().write_header_to_file(path)


def write_gguf(
    file: Path,
    architecture: str = "llama",
    pre: str = "smollm",
    extra: Mapping[str, Any] | None = None,
    kind: str = "Q8_0",
    *,
    mlp: int = 96,
    pads_to: int = 1,
    layers: int = 2,
    types: Mapping[str, str] | None = None,
    repeats: Mapping[int, int] | None = None,
    writes: type[gguf.GGUFWriter] = gguf.GGUFWriter,
) -> Path:
    """A tiny model, in which every third block is larger than the others.

    `architecture` as the file names it, or "mixtral" for a llama with experts. `pre` names the byte-level
    pre-tokenizer; "spm" asks for sentencepiece. `extra` holds more fields of the architecture, numbers or texts.
    `kind`: type of most matrices; `types`: of single ones, as `blk.0.attn_v`. The table has a multiple of `pads_to`
    rows. `repeats`: token -> another one, whose string and type it gets. `writes`: the form of the file.
    """
    named = "llama" if architecture == "mixtral" else architecture
    writer, head = writes(file, named), HEAD_DIM[architecture]
    sizes: dict[str, Any] = {
        "block_count": layers,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": mlp,
    }
    sizes |= {"head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10_000.0}
    if architecture.startswith("gemma"):
        sizes["sliding_window"] = 16
    if architecture.startswith("gemma") or architecture in ("qwen3", "qwen3moe"):
        sizes |= {"key_length": head, "value_length": head}
    else:
        sizes["rope_dimension_count"] = 16
    if architecture.startswith("lfm2"):  # of whose blocks every third has attention, from the second on
        sizes |= {"head_count_kv": [2 * (i % 3 == 1) for i in range(layers)], "shortconv_l_cache": 4}
    if architecture in WITH_EXPERTS:
        sizes |= {"expert_count": EXPERTS, "expert_used_count": 2}
    if architecture == "glm4moe":  # whose last block predicts further tokens
        sizes |= {"key_length": head, "value_length": head, "rope_dimension_count": head // 2}
        sizes |= {"block_count": layers + 1, "nextn_predict_layers": 1, "leading_dense_block_count": 1}
        sizes |= {"expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.5}
        sizes["expert_gating_func"] = gguf.ExpertGatingFuncType.SIGMOID
    if architecture == "lfm2moe":
        sizes |= {"leading_dense_block_count": 1, "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}
    if architecture in ("qwen3moe", "glm4moe", "gpt-oss", "lfm2moe"):
        sizes["expert_feed_forward_length"] = mlp
    if architecture == "gpt-oss":
        sizes |= {"key_length": head, "value_length": head, "sliding_window": 16, "rope_scaling_factor": 4.0}
        sizes |= {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_orig_ctx_len": 16}
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(f"{named}.{key}", value)
    num_tokens = _add_sentencepiece(writer) if pre == "spm" else add_byte_level(writer, pre, pads_to)
    for key in ("tokens", "token_type"):
        values = writer.kv_data[0][f"tokenizer.ggml.{key}"].value
        for token, other in (repeats or {}).items():
            values[token] = values[other]
    writer.add_vocab_size(num_tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(pre == "spm")
    writer.add_chat_template(TEMPLATE)
    _add_tensors(writer, architecture, num_tokens, mlp, kind, layers, types or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_byte_level(writer: gguf.GGUFWriter, pre: str, pads_to: int) -> int:
    pairs = [[*(f"{word[:i]} {word[i]}" for i in range(1, len(word))), f"Ġ {word}"] for word in WORDS]
    merges = list(dict.fromkeys(chain(*pairs)))
    made = [merge.replace(" ", "") for merge in merges]
    tokens = list(dict.fromkeys([*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *made]))
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % pads_to)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    return len(tokens)


def _add_sentencepiece(writer: gguf.GGUFWriter) -> int:
    """Tokens of bytes, runs of lines and of spaces (written as Gemma's files do), words and their beginnings."""
    kinds = dict.fromkeys(CONTROL, gguf.TokenType.CONTROL) | {"<unk>": gguf.TokenType.UNKNOWN}
    kinds |= dict.fromkeys(("\n\n", "  ", "    ", "<b>"), gguf.TokenType.USER_DEFINED)
    kinds |= {f"<0x{byte:02X}>": gguf.TokenType.BYTE for byte in range(256)}
    marked = [f"▁{word}" for word in WORDS]
    pieces = [word[:i] for word in (*WORDS, *marked) for i in range(2, len(word) + 1)]
    letters = sorted({letter for piece in pieces for letter in piece})
    for token in (*dict.fromkeys(sorted(pieces, key=len)), *letters):
        kinds.setdefault(token, gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(kinds))
    writer.add_token_scores([-float(i // 2) for i in range(len(kinds))])  # some scores are equal
    writer.add_token_types(list(kinds.values()))
    writer.add_unk_token_id(3)
    return len(kinds)


def _dense_rows(arch: str, mlp: int) -> dict[str, tuple[int, ...]]:
    """Parts of a block without experts that have weights -> their shapes."""
    head = HEAD_DIM[arch]
    heads = {"attn_q": 4 * head, "attn_k": 2 * head, "attn_v": 2 * head}
    rows: dict[str, tuple[int, ...]] = {"attn_output": (64, 4 * head), "attn_norm": (64,), "ffn_norm": (64,)}
    if arch == "phi3":
        rows |= {"attn_qkv": (128, 64), "ffn_up": (2 * mlp, 64)}
    else:
        rows |= {name: (size, 64) for name, size in heads.items()}
        rows |= {"ffn_gate": (mlp, 64), "ffn_up": (mlp, 64)}
    if arch.startswith("gemma"):
        rows |= {"post_attention_norm": (64,), "post_ffw_norm": (64,)}
    if arch in ("gemma3", "qwen3", "qwen3moe", "glm4moe") or arch.startswith("lfm2"):
        rows |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    if arch in ("glm4moe", "gpt-oss"):
        rows["post_attention_norm"] = rows.pop("ffn_norm")
    return rows


def _parts_of_mixtures(arch: str, mlp: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a block next to the experts' weights -> their shapes."""
    if arch == "glm4moe":
        return {
            "exp_probs_b.bias": (EXPERTS,),
            "ffn_gate_shexp.weight": (mlp, 64),
            "ffn_up_shexp.weight": (mlp, 64),
            "ffn_down_shexp.weight": (64, mlp),
        }
    if arch == "lfm2moe":
        return {"exp_probs_b.bias": (EXPERTS,)}
    biases = {
        "gate_inp": (EXPERTS,),
        "gate_exps": (EXPERTS, mlp),
        "up_exps": (EXPERTS, mlp),
        "down_exps": (EXPERTS, 64),
    }
    own = {"attn_output.bias": (64,), "attn_sinks.weight": (4,)}
    return {} if arch != "gpt-oss" else own | {f"ffn_{name}.bias": shape for name, shape in biases.items()}


def _of_block(arch: str, number: int, rows: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Of LFM2's blocks those without attention have a convolution."""
    if not arch.startswith("lfm2") or number % 3 == 1:
        return rows
    kept = {name: shape for name, shape in rows.items() if not name.startswith("attn_") or name == "attn_norm"}
    return kept | {"shortconv.in_proj": (192, 64), "shortconv.out_proj": (64, 64), "shortconv.conv": (64, 4)}


def _add_tensors(
    writer: gguf.GGUFWriter, arch: str, num_tokens: int, mlp: int, matrices: str, layers: int, types: Mapping[str, str]
) -> None:
    random, head = np.random.default_rng(0), HEAD_DIM[arch]
    heads = {"attn_q": 4 * head, "attn_k": 2 * head, "attn_v": 2 * head}

    def add(name: str, *shape: int, kind: str = "") -> None:
        data = random.standard_normal(shape, dtype=np.float32) * 0.1 + (len(shape) == 1)
        usual = kind or (matrices if len(shape) > 1 else "F32")
        wanted = gguf.GGMLQuantizationType[types.get(name.removesuffix(".weight"), usual)]
        writer.add_tensor(name, gguf.quantize(data, wanted), raw_dtype=wanted)

    add("token_embd.weight", num_tokens, 64)
    add("token_embd_norm.weight" if arch.startswith("lfm2") else "output_norm.weight", 64)
    if arch in ("qwen3", "phi3", *WITH_EXPERTS) and arch != "lfm2moe":
        add("output.weight", num_tokens, 64, kind="F16")
    rows = _dense_rows(arch, mlp)
    if arch == "glm4moe":
        add(f"blk.{layers}.nextn.eh_proj.weight", 64, 128)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            add(f"blk.{layers}.nextn.{name}.weight", 64)
        add(f"blk.{layers}.nextn.embed_tokens.weight", num_tokens, 64)
    for i in range(layers + (arch == "glm4moe")):
        is_mixture = arch in WITH_EXPERTS and (arch, i) not in (("glm4moe", 0), ("lfm2moe", 0))
        if is_mixture:
            rows = {name: shape for name, shape in rows.items() if name not in ("ffn_gate", "ffn_up")}
        for name, shape in _of_block(arch, i, rows).items():
            add(f"blk.{i}.{name}.weight", *shape, kind=KINDS.get(name, ""))
        down = "Q8_0" if i % 3 == 2 else "Q4_0"
        if arch in ("qwen2", "glm4moe", "gpt-oss"):
            for name, size in heads.items():
                add(f"blk.{i}.{name}.bias", size)
        for name, shape in _parts_of_mixtures(arch, mlp).items() if is_mixture else ():
            add(f"blk.{i}.{name}", *shape, kind="F32" if name.endswith(".bias") else "")
        if is_mixture:
            add(f"blk.{i}.ffn_gate_inp.weight", EXPERTS, 64, kind="F32")
            for part in ("gate", "up"):
                add(f"blk.{i}.ffn_{part}_exps.weight", EXPERTS, mlp, 64)
            add(f"blk.{i}.ffn_down_exps.weight", EXPERTS, 64, mlp, kind="" if matrices == "F16" else down)
            continue
        add(f"blk.{i}.ffn_down.weight", 64, mlp, kind="" if matrices == "F16" else down)


def write_delta_gguf(
    file: Path,
    folder: Path,
    kind: str = "F32",
    *,
    writes: type[gguf.GGUFWriter] = gguf.GGUFWriter,
    is_old: bool = False,
) -> Path:
    """The .gguf file of a model of `make_delta_model`, as converters write it; with another tokenizer.

    `kind`: type of matrices. `writes`: the form of the file. `is_old`: as the first files of Qwen3-Next, which have
    queries, keys, values and gates in one tensor. Names are those of the package gguf, which lacks those of the layer
    for multi-token prediction.
    """
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, mtp = config["linear_value_head_dim"], config.get("mtp_num_hidden_layers", 0)
    experts, is_next = config.get("num_experts", 0), config["model_type"] == "qwen3_next"
    architecture = "qwen3next" if is_next else "qwen35moe" if experts else "qwen35"
    writer = writes(file, architecture)
    sizes = {"block_count": layers + mtp, "context_length": config["max_position_embeddings"], "head_count": heads}
    sizes |= {"embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"]}
    sizes |= {"head_count_kv": config["num_key_value_heads"], "layer_norm_rms_eps": config["rms_norm_eps"]}
    sizes |= {"key_length": config["head_dim"], "value_length": config["head_dim"], "rope_freq_base": 10_000.0}
    sizes |= {"rope_dimension_count": config["head_dim"] // 4, "rope_dimension_sections": [2, 1, 1, 0]}
    sizes |= {"ssm_conv_kernel": 4, "ssm_state_size": config["linear_key_head_dim"], "ssm_group_count": key_heads}
    sizes |= {"ssm_time_step_rank": value_heads, "ssm_inner_size": value_heads * size}
    if experts:
        del sizes["feed_forward_length"]  # of dense layers, which there are none
        sizes |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
        sizes |= dict.fromkeys(("expert_feed_forward_length", "expert_shared_feed_forward_length"), 64)
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_nextn_predict_layers(mtp)
    writer.add_vocab_size(add_byte_level(writer, "qwen35", config["vocab_size"]))
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers + mtp)
    own = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
    tiled = np.arange(value_heads)
    if not is_next:
        tiled = tiled.reshape(key_heads, -1).T.reshape(-1)  # place r * key heads + j has head (j, r)
    rows = (tiled[:, None] * size + np.arange(size)).reshape(-1)
    for name in [name for name in tensors if ".experts.0." in name]:
        each = [tensors.pop(name.replace(".experts.0.", f".experts.{i}.")) for i in range(experts)]
        tensors[name.replace(".experts.0.", ".experts.")] = torch.stack(each)
    before = 2 * key_heads * config["linear_key_head_dim"]
    for name in [
        name for name in tensors if "in_proj_qkvz" in name and not is_old
    ]:  # has the parts of each key head together
        of_values = value_heads // key_heads * size
        parts = (
            tensors.pop(name).unflatten(0, (key_heads, -1)).split([before // key_heads // 2] * 2 + [of_values] * 2, 1)
        )
        *qkv, z = (part.flatten(0, 1) for part in parts)
        tensors |= {name.replace("qkvz", "qkv"): torch.cat(qkv), name.replace("qkvz", "z"): z}
    for name, tensor in tensors.items():
        data, (module, _, last) = tensor.float().numpy(), name.rpartition(".")
        part = module.rpartition(".")[2]
        if "norm" in part and not module.endswith("linear_attn.norm"):
            data = data + 1
        data = data.reshape(len(data), -1) if part == "conv1d" else data[0] if part == "shared_expert_gate" else data
        if part in ("in_proj_qkv", "conv1d"):
            data = np.concatenate([data[:before], data[before:][rows]])
        data = data[rows] if part == "in_proj_z" else data[:, rows] if part == "out_proj" else data
        data = data[tiled] if part in ("in_proj_a", "in_proj_b") or last in ("A_log", "dt_bias") else data
        data = -np.exp(data) if last == "A_log" else data
        inner = module.replace("mtp.layers.0", f"model.layers.{layers}")
        if inner.startswith("mtp."):
            stored = f"blk.{layers}.nextn.{own[part]}.{last}"
        elif last in ("A_log", "dt_bias"):
            stored = names.get_name(f"{inner}.{last}") or f"{names.get_name(f'{inner}.dt_proj')}.bias"
        else:
            stored = f"{names.get_name(inner)}.{last}"
        is_matrix = data.ndim > 1 and part not in ("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba", "gate")
        wanted = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(data), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
