""".gguf files to checkpoint folders: done once, kept in the user's cache.

Llama models with the SmolLM tokenizer (the embedded model) are converted here, in seconds; all others through
transformers. Weights are stored in bfloat16, whatever the file holds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compile.native import cache_root
from sharesd.models.folder import read_json
from sharesd.models.progress import Progress, silent

log = logging.getLogger(__name__)

FORMAT = 1
"""Of the converted folders; a new number makes old ones unused."""
MANIFEST = "converted.json"


def converted_folder(gguf_file: Path, *, progress: Progress = silent) -> Path:
    """The checkpoint folder of a .gguf file, converted now if that was not done before or if the copy is damaged."""
    home = cache_root() / "checkpoints"
    folder = home / f"{gguf_file.stem}-{_fingerprint(gguf_file)}"
    if _is_complete(folder):
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix="partial-") as scratch:
            fresh = Path(scratch) / "checkpoint"
            fresh.mkdir()
            _convert(gguf_file, fresh, progress)
            sizes = {file.name: file.stat().st_size for file in fresh.iterdir()}
            (fresh / MANIFEST).write_text(json.dumps({"format": FORMAT, "sizes": sizes}))
            if folder.exists() and not _is_complete(folder):
                log.warning("%s is damaged; converting %s again", folder, gguf_file.name)
                folder.rename(Path(scratch) / "damaged")
            if not folder.exists():  # another process may have been faster
                fresh.rename(folder)
    except OSError as error:
        raise ValueError(
            f"cannot convert {gguf_file} into {home} ({error}); "
            "free some space there or set SHARESD_CACHE_DIR to another folder"
        ) from error
    return folder


def _fingerprint(file: Path) -> str:
    """Tells files apart by size, beginning and end: enough for headers and cheap for large files."""
    size, edge = file.stat().st_size, 1 << 20
    digest = hashlib.sha256(f"{FORMAT} {size}".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(edge))
        stream.seek(max(0, size - edge))
        digest.update(stream.read(edge))
    return digest.hexdigest()[:16]


def _is_complete(folder: Path) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    try:
        sizes = read_json(folder / MANIFEST)["sizes"]
    except (ValueError, KeyError):
        return False
    return all((folder / name).exists() and (folder / name).stat().st_size == size for name, size in sizes.items())


def _convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    import gguf

    progress(f"reading {gguf_file.name}", 0, 1)
    try:
        reader = gguf.GGUFReader(gguf_file)
        keys = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
        kind = tuple(reader.fields[key].contents() if key in reader.fields else None for key in keys)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{gguf_file} is not a readable GGUF file ({error}); download it again") from error
    if kind == ("llama", "gpt2", "smollm"):
        _convert_smollm(reader, folder, progress)
    else:
        _convert_by_transformers(gguf_file, folder, progress)


def _convert_smollm(reader: Any, folder: Path, progress: Progress) -> None:
    from safetensors.torch import save_file

    def meta(key: str, default: Any = None) -> Any:
        field = reader.fields.get(key)
        return default if field is None else field.contents()

    heads = meta("llama.attention.head_count")
    kv_heads = meta("llama.attention.head_count_kv", heads)
    tensors: dict[str, Tensor] = {}
    for i, stored in enumerate(reader.tensors):
        name, tensor = _llama_name(stored.name), _dequantize(stored)
        if stored.name.endswith(("attn_q.weight", "attn_k.weight")):  # GGUF rotates pairs, we rotate halves
            rows = tensor.unflatten(0, (heads if "attn_q" in stored.name else kv_heads, -1, 2))
            tensor = rows.transpose(1, 2).reshape(tensor.shape)
        tensors[name] = tensor.to(torch.bfloat16).contiguous()
        progress("converting weights", i + 1, len(reader.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    special = {name: meta(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "unknown")}
    hidden = meta("llama.embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta("llama.feed_forward_length"),
        "num_hidden_layers": meta("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": meta("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": meta("llama.context_length"),
        "rms_norm_eps": meta("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta("llama.rope.freq_base", 10_000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": special["bos"],
        "eos_token_id": special["eos"],
        "pad_token_id": special["padding"],
    }
    tokens = meta("tokenizer.ggml.tokens")
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    tokenizer_config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer_config |= {names[key]: tokens[i] for key, i in special.items() if i is not None}
    if meta("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(meta("tokenizer.chat_template"), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1, ensure_ascii=False))
    tokenizer = _smollm_tokenizer(tokens, meta("tokenizer.ggml.token_type"), meta("tokenizer.ggml.merges"))
    tokenizer.save(str(folder / "tokenizer.json"))


def _dequantize(stored: Any) -> Tensor:
    import gguf
    import numpy as np

    return torch.from_numpy(np.array(gguf.dequantize(stored.data, stored.tensor_type)))  # a copy: the file is read-only


def _llama_name(name: str) -> str:
    """llama.cpp's name of a tensor in the checkpoint's naming."""
    if name in _OUTER:
        return _OUTER[name]
    blk, number, part, suffix = name.split(".")
    assert blk == "blk", name
    return f"model.layers.{number}.{_INNER[part]}.{suffix}"


_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _smollm_tokenizer(tokens: list[str], types: list[int], merges: list[str]) -> Any:
    """Byte-level BPE after splitting off single digits, as SmolLM was trained."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind != TokenType.NORMAL]
    for token, kind in added:
        mark = AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
        (tokenizer.add_special_tokens if mark.special else tokenizer.add_tokens)([mark])
    return tokenizer


def _convert_by_transformers(gguf_file: Path, folder: Path, progress: Progress) -> None:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from sharesd.models.quiet import quiet_transformers

    where, name = str(gguf_file.parent), gguf_file.name
    progress(f"converting {name} (takes a while)", 0, 2)
    with quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                where, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
            )
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ValueError(
                f"transformers {transformers.__version__} cannot convert {gguf_file} ({error}); "
                "give a safetensors checkpoint"
            ) from error
        progress(f"converting {name} (takes a while)", 1, 2)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    progress(f"converting {name} (takes a while)", 2, 2)
