"""Tensors of a checkpoint to parameters of the decoder.

Names, merged rows, parts of tensor parallelism.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compile.block_linear import BLOCK_TYPES, LANES, NUMBERS, BlockPart, same_order
from compile.delta_sizes import DeltaSizes
from multigpu.tensor_parallel import TILE, Shard, require_divisible
from sharesd.models.architectures import architecture_of
from sharesd.models.checkpoint import STORED, Progress, damage_named, not_causal, read_config, silent, weight_files
from sharesd.models.decoder import Block, Decoder
from sharesd.models.decoder_config import DecoderConfig, LayerType

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYERS = "model.layers."
MISFIT = "give the config.json that the weights were saved with, or download the checkpoint again"
"""Remedy of weights that do not fit a config."""
_OF_MIXTURES = ("mlp.router", "mlp.experts.", "mlp.shared_expert.")
"""Beginnings of modules that only mixtures have; `mlp.gate_up` and `mlp.down` are those that others have."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights that need nothing else."""


def decoder_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield checkpoint name and parameter, or rows of a merged parameter."""
    yield EMBEDDING, decoder.embed.weight.data
    yield f"{architecture_of(decoder.config.model_type).final_norm}.weight", decoder.norm.weight.data
    if not decoder.config.tie_word_embeddings:
        yield HEAD, decoder.head.weight.data
    for i, block in enumerate(decoder.blocks):
        for name, tensor in block_tensors(block, decoder.config):
            yield f"{LAYERS}{i}.{name}", tensor


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor of a checkpoint."""
    decoder = Decoder(replace(config, max_context=1), device="meta")
    return {name: tuple(tensor.shape) for name, tensor in decoder_tensors(decoder)}


def module_names(config: DecoderConfig, kind: LayerType) -> dict[str, tuple[str, ...]]:
    """Return module of a block -> modules of a checkpoint's layer of this kind, experts one by one."""
    present = "attn." if not kind.conv_width else "conv." if config.delta is None else "delta."
    absent = tuple({"attn.", "conv.", "delta."} - {present})
    names = {
        path: modules
        for path, modules in architecture_of(config.model_type).block_names.items()
        if not path.startswith(absent)
    }
    if not kind.has_experts or config.experts is None:
        return {path: modules for path, modules in names.items() if not path.startswith(_OF_MIXTURES)}
    found: dict[str, tuple[str, ...]] = {}
    for path, modules in names.items():
        if "*" in path:
            for number in map(str, range(config.experts.num_experts)):
                found[path.replace("*", number)] = tuple(module.replace("*", number) for module in modules)
        elif path not in ("mlp.gate_up", "mlp.down"):
            found[path] = modules
    return found


def layer_experts_obstacle(
    config: DecoderConfig, kind: LayerType, root: str, types: Mapping[str, str | None], reordered: Container[str]
) -> str | None:
    """Return why kernels of GPUs do not run a layer's experts as stored, and the tensor; None if they do.

    They read all experts of a layer as one tensor, and their inputs as they come.

    Args:
        root: beginning of the names of the layer's tensors in `types` and `reordered`.
        types: of blocks, and of numbers in one linear with blocks; None: numbers.
        reordered: tensors whose inputs are stored in another order.
    """
    first: dict[tuple[str, int], str | None] = {}
    for path, modules in module_names(config, kind).items():
        if not path.startswith("mlp.experts."):
            continue
        for part, module in enumerate(modules):
            name = f"{root}{module}.weight"
            found = types[name]
            wanted = first.setdefault((path.rpartition(".")[2], part), found)
            if found in NUMBERS:
                return f"{name} runs as {found} in one linear with blocks"
            if found != wanted:
                return f"{name} is stored as {found or 'numbers'}, and other experts as {wanted or 'numbers'}"
            if name in reordered:
                return f"the inputs of {name} are stored in another order (act-order)"
    return None


def is_router(name: str, config: DecoderConfig) -> bool:
    """Return True for the weight that chooses a layer's experts, which stays in numbers."""
    return module_of(name) in architecture_of(config.model_type).block_names.get("mlp.router", ())


def is_conv_kernel(name: str, config: DecoderConfig) -> bool:
    """Return True for the weight [D, L] of a short convolution, which stays in numbers; it is no linear's."""
    names = architecture_of(config.model_type).block_names
    return any(module_of(name) in names.get(path, ()) for path in ("conv.kernel", "delta.kernel"))


def block_tensors(block: nn.Module, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield name and parameter of one block, as `decoder_tensors` does.

    Names are without the layer's number; modules without parameters are left out.
    """
    kind = block.kind if isinstance(block, Block) else LayerType(0, 0)  # a head's
    for path, names in module_names(config, kind).items():
        module = attrgetter(path)(block)
        if module is None:
            continue
        for kind, parameter in module.named_parameters():
            for name, view in zip(names, parameter.data.split(_rows(block, path, names, parameter)), strict=True):
                yield f"{name}.{kind}", view


def _rows(block: nn.Module, path: str, names: tuple[str, ...], parameter: Tensor) -> list[int]:
    """Return how many rows of a merged module belong to each name."""
    if path == "attn.qkv" and len(names) == 3:
        (q, gates, *keys_and_values), d = attrgetter("attn.num_heads", "attn.head_dim")(block)
        return [(q + gates) * d, *(heads * d for heads in keys_and_values)]
    if path == "delta.in_proj":
        return [*delta_rows(attrgetter("delta.sizes")(block), names)]
    if path == "mlp.router" and len(names) == 2:
        return [len(parameter) - 1, 1]
    return [len(parameter) // len(names)] * len(names)


def delta_rows(sizes: DeltaSizes | None, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the rows of each linear that the first one of a delta rule is made of.

    They have q, k and v, then gates, rates and steps; or the last two together; or the first two, too.
    """
    assert sizes is not None
    if len(names) == 3:
        return sizes.channels, sizes.outputs, 2 * sizes.value_heads
    if len(names) == 2:
        return sizes.channels + sizes.outputs, 2 * sizes.value_heads
    return sizes.channels, sizes.outputs, sizes.value_heads, sizes.value_heads


def rename_tensors(
    stored: Iterable[tuple[str, Tensor]], config: DecoderConfig, folder: Path, unused: list[str] | None = None
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors that the decoder needs, renamed.

    Each is (name in the file, name as in `decoder_tensors`, values). `unused` gets the part of each tensor left out.
    Raises ValueError that names the folder, and a tensor of all experts of another shape than the config asks for.
    """
    for stored_name, tensor in single_experts(stored, config, folder):
        name, part = text_name(stored_name), left_out(stored_name, config)
        if part is not None:
            if unused is not None and not is_mtp(part, config):
                unused.append(part)
            continue
        if config.tie_word_embeddings and name == HEAD:
            continue
        if tensor.ndim == 3 and is_conv_kernel(name, config):
            tensor = tensor.squeeze(1)  # stored [D, 1, L]
        if tensor.ndim == 1 and name.endswith(".weight") and is_router(name, config):
            tensor = tensor[None]  # the gate of a shared expert, in .gguf files
        if config.gemma_norm and name.endswith("norm.weight") and not is_of_delta(name, config):
            tensor = tensor.double() + 1.0  # stored minus one
        if config.attention_gates and module_of(name) == "self_attn.q_proj":
            tensor = cut_part(tensor, partial(_gates_last, config=config))
        if config.delta is not None and (parts := _rows_of_key_head(module_of(name), config.delta)):
            tensor = cut_part(tensor, partial(_parts_together, parts=parts, heads=config.delta.key_heads))
        yield stored_name, name, tensor


def is_of_delta(name: str, config: DecoderConfig) -> bool:
    """Return True for a norm of a delta rule's output, which is stored as it is."""
    return module_of(name) in architecture_of(config.model_type).block_names.get("delta.norm", ())


def _gates_last(tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Return rows of queries, then of gates, of which each head has one after the other."""
    heads = config.num_attention_heads
    if len(tensor) != 2 * heads * config.head_dim:  # which is an error elsewhere
        return tensor
    return tensor.unflatten(0, (heads, 2, config.head_dim)).transpose(0, 1).flatten(0, 2)


def _rows_of_key_head(module: str, sizes: DeltaSizes) -> tuple[int, ...]:
    """Return the rows of each part of a linear that has the parts of a delta rule by key heads; empty for others."""
    shared = sizes.value_heads // sizes.key_heads
    if module == "linear_attn.in_proj_qkvz":
        return sizes.key_size, sizes.key_size, shared * sizes.value_size, shared * sizes.value_size
    return (shared, shared) if module == "linear_attn.in_proj_ba" else ()


def _parts_together(tensor: Tensor, parts: tuple[int, ...], heads: int) -> Tensor:
    """Return rows of the first part of all heads, then of the next, of which each head has one after the other."""
    if len(tensor) != heads * sum(parts):  # which is an error elsewhere
        return tensor
    return torch.cat([part.flatten(0, 1) for part in tensor.unflatten(0, (heads, -1)).split(parts, 1)])


def single_experts(
    stored: Iterable[tuple[str, Tensor]], config: DecoderConfig, folder: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield stored tensors, those of all experts as one for each.

    Raises ValueError that names the folder, and a tensor of another shape than the config asks for.
    """
    alternate = architecture_of(config.model_type).experts_alternate
    for stored_name, tensor in stored:
        parts = parts_of_experts(stored_name, config)
        if not parts:
            yield stored_name, tensor
            continue
        if "*" not in parts[0]:
            yield parts[0], tensor
            continue
        assert config.experts is not None
        count, size = config.experts.num_experts, config.experts.intermediate_size
        inputs = size if len(parts) == 1 else config.hidden_size
        outputs = config.hidden_size if len(parts) == 1 else 2 * size
        matrix = (inputs, outputs) if alternate else (outputs, inputs)
        wanted = (count, outputs) if parts[0].endswith(".bias") else (count, *matrix)
        if tuple(tensor.shape) != wanted:
            found = list(tensor.shape)
            raise ValueError(
                f"{folder}: {stored_name} has shape {found} where config.json asks for {list(wanted)}; {MISFIT}"
            )
        for number, expert in enumerate(tensor):
            rows = expert.t() if alternate else expert
            pieces = [rows[i :: len(parts)] for i in range(len(parts))] if alternate else rows.chunk(len(parts))
            for part, piece in zip(parts, pieces, strict=True):
                yield part.replace("*", str(number)), piece


def parts_of_experts(stored_name: str, config: DecoderConfig) -> tuple[str, ...]:
    """Return the names of what a tensor of all experts holds, `*` for their numbers; empty for another tensor."""
    merged = architecture_of(config.model_type).merged_experts
    name = next((name for name in merged if stored_name.endswith(f".{name}")), None)
    if name is None or config.experts is None:
        return ()
    return tuple(stored_name.removesuffix(name) + part for part in merged[name])


def left_out(stored_name: str, config: DecoderConfig) -> str | None:
    """Return the part of a checkpoint to which a tensor belongs that the decoder does not need, or None."""
    part = unused_part(stored_name, config.num_hidden_layers, config.num_mtp_layers)
    name = stored_name.removeprefix("model.")
    if part is None and name.startswith(architecture_of(config.model_type).ignored_prefixes):
        part = name.partition(".")[0]
    return part


def is_mtp(part: str, config: DecoderConfig) -> bool:
    """Return True if a part that the decoder does not need is the layer with which mode `mtp` drafts."""
    layout = architecture_of(config.model_type).mtp
    return layout is not None and f".{part}." in f".{layout.root}".format(config.num_hidden_layers)


def text_name(name: str) -> str:
    """Return a tensor's name without the prefix of multimodal checkpoints."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


class Cuts(NamedTuple):
    """Modules whose weights are cut among ranks, without the layer's number."""

    first: Mapping[str, tuple[int, ...]]
    """Rows of each linear in a module that is cut by outputs."""
    second: frozenset[str]
    """Modules of `o` and `down`, see `Shard.cut_second`."""

    @classmethod
    def of(cls, config: DecoderConfig) -> Cuts:
        q, k = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        q += q * config.attention_gates
        first: dict[str, tuple[int, ...]] = {HEAD.removesuffix(".weight"): (config.vocab_size,)}
        second: set[str] = set()
        of_expert = 0 if config.experts is None else config.experts.intermediate_size
        layers = [module_names(config, kind) for kind in dict.fromkeys(config.layer_types)]
        for path, names in (item for layer in layers for item in layer.items()):
            if path in ("attn.o", "mlp.down"):
                second |= set(names)
            if path == "delta.in_proj":
                first |= {name: (size,) for name, size in zip(names, delta_rows(config.delta, names), strict=True)}
            if path == "attn.qkv" or path.endswith(".gate_up"):
                mlp = config.intermediate_size if path == "mlp.gate_up" else of_expert
                sizes = (q, k, k) if path == "attn.qkv" else (mlp,) * 2
                if len(names) == 1:
                    first[names[0]] = sizes
                else:
                    first |= {name: (size,) for name, size in zip(names, sizes, strict=True)}
        return cls(first, frozenset(second))


def module_of(name: str) -> str:
    """Return the module of a tensor, without the layer's number."""
    module = name.rpartition(".")[0]
    return module.removeprefix(LAYERS).partition(".")[2] if module.startswith(LAYERS) else module


def split_tensors(
    named: Iterable[tuple[str, str, Tensor]], config: DecoderConfig, part: Shard
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield named tensors cut to the rows that one rank holds.

    Of `o` and `down` the rank holds columns.
    """
    cuts = Cuts.of(config)
    for stored_name, name, tensor in named:
        module = module_of(name)
        if module in cuts.second:
            tensor = cut_part(tensor, part.cut_second)
        elif module in cuts.first:
            tensor = cut_part(tensor, partial(part.cut, merged=cuts.first[module]))
        yield stored_name, name, tensor


def cut_part(tensor: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
    """Cut numbers, or the bytes of blocks, with the same function."""
    return tensor._replace(raw=cut(tensor.raw)) if isinstance(tensor, BlockPart) else cut(tensor)


def check_tensor_parallel(config: DecoderConfig, num_parts: int, gate_tile: int = TILE) -> None:
    """Raise ValueError if the decoder does not divide evenly.

    `gate_tile` outputs of gate and up stay together.
    """
    if num_parts == 1:
        return
    sizes = {
        "key/value heads": (config.num_key_value_heads, 1),
        "outputs of o and down": (config.hidden_size, TILE),
        "outputs of gate and up": (config.intermediate_size, gate_tile),
        "outputs of the head": (config.vocab_size, TILE),
    }
    require_divisible(num_parts, sizes)


def _copy(name: str, parameter: Tensor, tensor: Tensor) -> None:
    parameter.copy_(tensor)


def check_finite(folder: Path, name: str, tensor: Tensor | BlockPart) -> None:
    """Raise ValueError if a tensor has NaN or infinite values.

    A finite sum excludes them at the speed of memory; finite values may also have an infinite one. Tensors of a GPU
    are not checked: they come from no file, and each check would wait for it.
    """
    if isinstance(tensor, BlockPart) and tensor.type in NUMBERS:
        tensor = tensor.raw
    if isinstance(tensor, BlockPart) or tensor.device.type != "cpu" or not tensor.is_floating_point():
        return
    if tensor.sum().isfinite() or tensor.isfinite().all():
        return
    raise not_finite(folder, name)


def not_finite(folder: Path, name: str) -> ValueError:
    """Return the error for a tensor with NaN or infinite values."""
    source = weight_files(folder)[0] if (folder / STORED).exists() else folder
    return ValueError(f"{source}: {name} has NaN or infinite values; download the checkpoint again, or give another")


def copy_tensors(
    parameters: dict[str, Tensor],
    stored: Iterable[tuple[str, str, Tensor]],
    folder: Path,
    what: str,
    progress: Progress = silent,
    put: Callable[[str, Tensor, Tensor], None] = _copy,
    is_checked_elsewhere: Callable[[str, Tensor], bool] = lambda name, tensor: False,
) -> None:
    """Copy each tensor of a checkpoint into the parameter of its name.

    `stored` as `rename_tensors` yields it; `put` gets name, parameter and values. `is_checked_elsewhere` returns True
    for those that may hold other values than numbers here. Raises ValueError that names missing, unexpected or wrongly
    shaped tensors, or one with NaN or infinite values.
    """
    total, unexpected = sum(parameter.nbytes for parameter in parameters.values()), []
    done = 0
    for stored_name, name, tensor in stored:
        parameter = parameters.pop(name, None)
        if parameter is None:
            unexpected.append(stored_name)
            continue
        if tuple(parameter.shape) != tuple(tensor.shape):
            found, wanted = list(tensor.shape), list(parameter.shape)
            raise ValueError(f"{folder}: {stored_name} has shape {found} where config.json asks for {wanted}; {MISFIT}")
        if not isinstance(tensor, BlockPart) and tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{folder}: {stored_name} is {kind}, and config.json does not say what it means; {MISFIT}")
        if not is_checked_elsewhere(name, tensor):
            check_finite(folder, stored_name, tensor)
        put(name, parameter, tensor)
        done += parameter.nbytes
        progress("loading weights", done, total)
    if parameters or unexpected:
        problems = [
            f"{kind} {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
            for kind, names in (("missing", list(parameters)), ("unexpected", unexpected))
            if names
        ]
        has_config = (folder / "config.json").is_file()
        remedy = (not_causal(read_config(folder)) if has_config else None) or MISFIT
        raise ValueError(f"{folder} does not fit {what}: {', '.join(problems)}; {remedy}")


def check_tensors(folder: Path, found: Mapping[str, Tensor], config: DecoderConfig) -> None:
    """Raise ValueError as `copy_tensors`, before it is called: by names, shapes and types alone.

    `found`: stored name -> tensor, which may be on the meta device.
    """
    with damage_named(folder / "config.json"):
        decoder = Decoder(replace(config, max_context=1), device="meta")
    copy_tensors(
        dict(decoder_tensors(decoder)),
        rename_tensors(((name, tensor.to("meta")) for name, tensor in found.items()), config, folder),
        folder,
        f"architecture {config.model_type!r}",
        put=lambda name, parameter, tensor: None,
        is_checked_elsewhere=lambda name, tensor: True,
    )


log = logging.getLogger(__name__)

_TOWERS = (
    "vision_tower|vision_model|vision_encoder|visual|image_encoder|image_newline|vision_embed_tokens|embed_vision|"
    "audio_tower|audio_encoder|embed_audio|multi_modal_projector|mm_projector|multimodal_projector|patch_merger|"
    "vision_language_adapter|connector"
)
_BUFFERS = (
    r"rotary_emb\.(?:original_)?inv_freq|rotary_emb\.cos_cached|rotary_emb\.sin_cached|rotary_emb\.\w+_inv_freq|"
    r"\w*attn\.masked_bias|attention\.masked_bias|self_attn\.bias|embeddings\.position_ids"
)
_UNUSED = re.compile(
    rf"(?:model\.)?(?:model\.)?(?:language_model\.)?(?P<tower>{_TOWERS})(?:\.|$)"
    rf"|(?:model\.)?(?:language_model\.)?(?P<mtp>mtp|mtp_layers)\."
    rf"|(?:.*\.)?(?P<buffer>{_BUFFERS})$"
)
_KV_SCALE = re.compile(
    r".*\.(?:(?:q|k|v|kv|prob)_(?:scale|zero_point)|prob_output_scale|(?:q|k|v|qkv)_proj\.output_scale"
    r"|[kv]_cache_(?:scale|zero_point)|kv_cache_scaling_factor)"
)
"""Names under which AutoFP8, llm-compressor, Model Optimizer and Quark store scales of a quantized KV cache."""
KV_SCALES = "scales of a KV cache"
_LAYER = re.compile(r"(?:model\.|language_model\.|transformer\.)*layers\.(\d+)\.")


def unused_part(name: str, num_layers: int, num_mtp_layers: int) -> str | None:
    """Return the unused part to which a stored tensor belongs, or None.

    `num_mtp_layers`: layers for multi-token prediction, numbered on from `num_layers`.
    """
    if is_kv_scale(name):
        return KV_SCALES
    found, layer = _UNUSED.match(name), _LAYER.match(name)
    if found is not None:
        return next(group for group in found.groups() if group)
    if layer is not None and num_layers <= int(layer[1]) < num_layers + num_mtp_layers:
        return f"layers.{layer[1]}"
    return None


def is_kv_scale(name: str) -> bool:
    """Return True for a scale of a quantized KV cache, which is kept otherwise here."""
    return _KV_SCALE.fullmatch(name) is not None


def mtp_layers_of(raw: Mapping[str, Any]) -> int:
    """Return the number of a config's layers for multi-token prediction."""
    return raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0


def report_unused(folder: Path, parts: Iterable[str]) -> None:
    """Warn once of parts that are left out, one for each tensor."""
    counts = Counter(parts)
    if counts.pop(KV_SCALES, 0):
        _warn(f"{folder}: KV-cache scales are not used: the cache keeps KV as --kv-dtype says")
    if counts:
        listed = ", ".join(f"{name} ({num} tensors)" for name, num in sorted(counts.items()))
        _warn(f"{folder}: left out {listed}, which texts do not need")


@cache
def _warn(text: str) -> None:
    log.warning("%s", text)


_EXPANDED = "F16"


class StoredTypes(NamedTuple):
    """What runs as it is stored, by the decoder's names."""

    types: Mapping[str, str]
    """Types of matrices in blocks, and of numbers in one linear with blocks."""
    expanded: Mapping[str, str]
    """Matrices among these that are expanded -> reason."""
    reordered: Sequence[str] = ()
    """Those whose inputs are stored in another order."""

    @classmethod
    def of(
        cls,
        stored: Mapping[str, str],
        config: DecoderConfig,
        *,
        orders: Mapping[str, Tensor | None] | None = None,
        reasons: Mapping[str, str] | None = None,
    ) -> StoredTypes:
        """Choose a type for each matrix.

        A linear runs in the kernels of blocks if one of its parts is stored in blocks. Its other parts run as the
        numbers that they are, or are expanded. `orders`: of inputs. `reasons`: why a matrix has no kernel.
        """
        types, orders = {name: kind for name, kind in stored.items() if kind in BLOCK_TYPES}, orders or {}
        expanded: dict[str, str] = {}
        rows = Cuts.of(config).first
        for names in _merged(config):
            blocks = [name for name in names if name in types]
            if not blocks:
                continue
            first = max(blocks, key=lambda name: sum(same_order(orders.get(name), orders.get(each)) for each in blocks))
            for name in names:
                if name not in types and stored[name] in NUMBERS:
                    types[name] = stored[name]
                elif name not in types:
                    expanded[name] = (reasons or {}).get(name, f"stored as {stored[name]}, which has no kernel")
                elif not same_order(orders.get(name), orders.get(first)):
                    expanded[name] = f"its inputs are in another order than those of {first}"
            types |= {name: _EXPANDED for name in names if name in expanded}
            end = 0
            for name, following in itertools.pairwise(names):
                end += sum(rows[module_of(name)])
                if end % LANES and types[name] != types[following]:
                    reason = f"types of a linear change at output {end}, which is not a multiple of {LANES}"
                    expanded |= dict.fromkeys(names, reason)
                    types |= dict.fromkeys(names, _EXPANDED)
                    break
        return cls(types, expanded, [name for name, order in orders.items() if order is not None])

    def say(self, source: object, names: Mapping[str, str] | None = None) -> None:
        """Log a line if something of a file is expanded; `names` has those in the file."""
        if self.expanded:
            name, reason = next(iter(self.expanded.items()))
            more = f", and {len(self.expanded) - 1} more" if len(self.expanded) > 1 else ""
            _warn_of_expansion(f"{source}: {(names or {}).get(name, name)} is expanded to float16 ({reason}){more}")


@cache
def _warn_of_expansion(line: str) -> None:
    """Log a line once, however often the weights are read."""
    log.warning("%s", line)


def _merged(config: DecoderConfig) -> Iterator[list[str]]:
    """Yield the names of matrices that run as one."""
    for layer, kind in enumerate(config.layer_types):
        for names in module_names(config, kind).values():
            if len(names) > 1:
                yield [f"{LAYERS}{layer}.{name}.weight" for name in names]
