""".gguf files to checkpoint folders: done once, kept in the user's cache.

Llama models with the SmolLM tokenizer (the embedded model) are converted here, in seconds; all others through
transformers. Weights are stored in bfloat16, whatever the file holds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compile.native import cache_root
from sharesd.models.folder import read_json
from sharesd.models.progress import Progress, silent

log = logging.getLogger(__name__)

FORMAT = 2
"""Of the converted folders; a new number makes old ones unused."""
MANIFEST = "converted.json"


def converted_folder(gguf_file: Path, *, progress: Progress = silent) -> Path:
    """The checkpoint folder of a .gguf file, converted now if that was not done before or if the copy is damaged."""
    home = cache_root() / "checkpoints"
    folder = home / f"{gguf_file.stem}-{_fingerprint(gguf_file)}"
    if _holds(folder, gguf_file):
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix="partial-") as scratch:
            fresh = Path(scratch) / "checkpoint"
            fresh.mkdir()
            _convert(gguf_file, fresh, progress)
            source = {"mtime_ns": gguf_file.stat().st_mtime_ns, "sha256": _sha256(gguf_file)}
            files = {file.name: _sha256(file) for file in fresh.iterdir()}
            (fresh / MANIFEST).write_text(json.dumps({"format": FORMAT, "source": source, "sha256": files}))
            if folder.exists() and not _holds(folder, gguf_file):
                log.warning("%s is damaged or outdated; converted %s again", folder, gguf_file.name)
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


def _holds(folder: Path, gguf_file: Path) -> bool:
    """True if the folder holds what was written into it, and that was made from this file."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        manifest = read_json(folder / MANIFEST)
        files, source = dict(manifest["sha256"]), dict(manifest["source"])
    except (ValueError, KeyError, TypeError):
        return False
    if source.get("mtime_ns") != gguf_file.stat().st_mtime_ns and source.get("sha256") != _sha256(gguf_file):
        return False
    return all((folder / name).is_file() and _sha256(folder / name) == digest for name, digest in files.items())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    import gguf

    progress(f"reading {gguf_file.name}", 0, 1)
    try:
        reader = gguf.GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{gguf_file} is not a readable GGUF file ({error}); download it again") from error
    if _is_plain_smollm(reader):
        _write_llama_weights(reader, folder, progress)
        _write_llama_config(reader, folder)
        _write_smollm_tokenizer(reader, folder)
    else:
        _convert_by_transformers(gguf_file, folder, progress)
    config_file = folder / "tokenizer_config.json"  # the file's own words: transformers 5.17 mistakes bos for eos
    config = (read_json(config_file) if config_file.exists() else {}) | _special_tokens(reader)
    config_file.write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")


def _meta(reader: Any, key: str, default: Any = None) -> Any:
    """A metadata field of the file."""
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def _is_plain_smollm(reader: Any) -> bool:
    """True for what is converted here: Llama weights without extras and the SmolLM tokenizer."""
    keys = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "llama.rope.scaling.type")
    known = [_meta(reader, key) for key in keys] == ["llama", "gpt2", "smollm", None]
    return known and all(_llama_name(tensor.name) for tensor in reader.tensors)


def _special_tokens(reader: Any) -> dict[str, str]:
    """Roles and tokens, as tokenizer_config.json names them."""
    tokens = _meta(reader, "tokenizer.ggml.tokens")
    roles = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    ids = {role: _meta(reader, f"tokenizer.ggml.{key}_token_id") for key, role in roles.items()}
    return {role: tokens[i] for role, i in ids.items() if i is not None}


def _write_llama_weights(reader: Any, folder: Path, progress: Progress) -> None:
    import gguf
    import numpy as np
    from safetensors.torch import save_file

    heads = _meta(reader, "llama.attention.head_count")
    paired = {"attn_q.weight": heads, "attn_k.weight": _meta(reader, "llama.attention.head_count_kv", heads)}
    tensors: dict[str, Tensor] = {}
    for i, stored in enumerate(reader.tensors):
        rows = np.array(gguf.dequantize(stored.data, stored.tensor_type))  # a copy: the file is read-only
        tensor = torch.from_numpy(rows)
        for suffix, num_heads in paired.items():
            if stored.name.endswith(suffix):  # GGUF rotates neighbouring rows of a head, we rotate its halves
                tensor = tensor.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        tensors[_llama_name(stored.name)] = tensor.to(torch.bfloat16).contiguous()
        progress("converting weights", i + 1, len(reader.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_llama_config(reader: Any, folder: Path) -> None:
    hidden, heads = _meta(reader, "llama.embedding_length"), _meta(reader, "llama.attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(_meta(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": _meta(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _meta(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _meta(reader, "llama.attention.head_count_kv", heads),
        "head_dim": _meta(reader, "llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": _meta(reader, "llama.context_length"),
        "rms_norm_eps": _meta(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _meta(reader, "llama.rope.freq_base", 10_000.0),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _meta(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _meta(reader, "tokenizer.ggml.eos_token_id"),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _write_smollm_tokenizer(reader: Any, folder: Path) -> None:
    """Byte-level BPE after splitting off single digits, as SmolLM was trained (transformers forgets the digits)."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = _meta(reader, "tokenizer.ggml.tokens"), _meta(reader, "tokenizer.ggml.token_type")
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _meta(reader, "tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind != TokenType.NORMAL:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if template := _meta(reader, "tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _llama_name(name: str) -> str:
    """llama.cpp's name of a tensor in the checkpoint's naming; empty for what a plain Llama does not have."""
    match name.split("."):
        case ["blk", number, part, "weight"] if part in _INNER:
            return f"model.layers.{number}.{_INNER[part]}.weight"
    return _OUTER.get(name, "")


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


def _convert_by_transformers(gguf_file: Path, folder: Path, progress: Progress) -> None:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from sharesd.models.quiet import quiet_transformers

    where, name = str(gguf_file.parent), gguf_file.name
    what = f"converting {name} by transformers"
    progress(what, 0, 2)
    try:
        with quiet_transformers(), redirect_stderr(StringIO()):  # one of its progress bars knows no switch
            model = AutoModelForCausalLM.from_pretrained(
                where, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
            )
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"transformers {transformers.__version__} cannot convert {gguf_file} ({error}); "
            "give a safetensors checkpoint"
        ) from error
    progress(what, 1, 2)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    progress(what, 2, 2)
