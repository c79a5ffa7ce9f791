"""A checkpoint folder to a .gguf file, which llama.cpp and OpenVINO GenAI both read. Done once, kept in the cache."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from compile.cpp_extension import cache_root
from sharesd.models import checkpoint as files

WeightType = Literal["F32", "F16", "BF16", "Q4_0", "Q8_0"]

FORMAT = 1
"""Of the exported files; a new number makes old ones unused."""


def gguf_file(folder: Path, weights: WeightType) -> Path:
    """The .gguf file of a Llama checkpoint folder with its matrices stored as `weights`, written now if it is missing.

    Vectors stay float32. Raises ValueError for other architectures and for tokenizers other than byte-level BPE.
    """
    home = cache_root() / "gguf"
    file = home / f"{folder.name}-{_fingerprint(folder)}-{weights}.gguf"
    if not file.exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix="partial-") as scratch:
            fresh = Path(scratch) / file.name
            _write(folder, fresh, weights)
            os.replace(fresh, file)
    return file


def _fingerprint(folder: Path) -> str:
    """Of the folder's place and its files' sizes and times: enough to notice a changed checkpoint."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    return hashlib.sha256(repr((FORMAT, str(folder.resolve()), stats)).encode()).hexdigest()[:16]


def _write(folder: Path, file: Path, weights: WeightType) -> None:
    import gguf

    config = files.read_config(folder)
    _require_plain_llama(config)
    kind = gguf.GGMLQuantizationType[weights]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if weights == 'F32' else 'MOSTLY'}_{weights}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_config(writer, config)
    _add_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    paired = {"q_proj.weight": heads, "k_proj.weight": config.get("num_key_value_heads", heads)}
    tied = config.get("tie_word_embeddings", False)
    for path in files.weight_files(folder):
        for name, tensor in files.read_tensors(path):
            if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                continue
            new_name = names.get_name(name, (".weight", ".bias"))
            if new_name is None:
                raise ValueError(f"tensor {name} has no name in GGUF; give a plain Llama checkpoint")
            for suffix, num_heads in paired.items():
                if name.endswith(suffix):
                    tensor = _pair_rows(tensor, num_heads)
            rows = tensor.float().contiguous().numpy()
            if tensor.dim() == 1:
                writer.add_tensor(new_name, rows)
            else:
                writer.add_tensor(new_name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pair_rows(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF rotates neighbouring rows of a head, the checkpoint its halves."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _require_plain_llama(config: dict[str, Any]) -> None:
    if config.get("model_type") != "llama":
        raise ValueError(f"conversion to GGUF knows Llama checkpoints only; this one is {config.get('model_type')!r}")
    scaling = _rope(config).get("rope_type", _rope(config).get("type", "default"))
    if scaling != "default":
        raise ValueError(f"conversion to GGUF knows no rotary scaling; this checkpoint has {scaling!r}")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("conversion to GGUF knows no biases; this checkpoint has some")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters, under the name that old or new checkpoints give them."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _add_config(writer: Any, config: dict[str, Any]) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_rope_dimension_count(head_dim)
    if head_dim * heads != hidden:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config.get("rope_theta") or _rope(config).get("rope_theta", 10_000.0)))


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Vocabulary and merges. How text is split beforehand is left out: peers are given token ids."""
    import gguf

    stored = files.read_json(folder / "tokenizer.json")
    model = stored["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError("conversion to GGUF knows byte-level BPE tokenizers only")
    size = config["vocab_size"]
    tokens, types = [f"[PAD{i}]" for i in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for token, i in model["vocab"].items():
        tokens[i], types[i] = token, int(gguf.TokenType.NORMAL)
    for added in stored.get("added_tokens", []):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    eos = files.eos_ids(folder)
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    if eos:
        writer.add_eos_token_id(eos[0])
