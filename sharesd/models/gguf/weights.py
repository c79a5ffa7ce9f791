"""Tensors of a .gguf file: as they are stored, or converted to bfloat16.

Conversion works in cache-sized blocks, over all threads.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from compile.block_linear import BLOCK_TYPES, NUMBERS, BlockPart
from sharesd.models.architecture import GGUFLayout
from sharesd.models.architectures import architecture_of, config_from_hf
from sharesd.models.checkpoint import STORED, Progress, damage_named, read_json, write_tensors
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.gguf.config import ROPE_TENSORS, config_of, layout_of
from sharesd.models.gguf.merged import parts_apart
from sharesd.models.gguf.reader import GGUFFile, StoredTensor, read_model, unknown_tensor
from sharesd.models.mtp import BLOCK, MTPNames, gguf_names, mtp_config, mtp_shapes
from sharesd.models.mtp import layout_of as layout_of_mtp
from sharesd.models.weight_mapping import LAYERS, StoredTypes, tensor_shapes

_COMPUTED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that follow from config.json, in old files."""
_ONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)\.\d+\.weight")
"""Tensors of mixtures in files from before April 2024."""
_LOGARITHM = ".A_log"
"""Names of tensors of which files have -exp."""
_KEPT_WIDE = (".e_score_correction_bias", _LOGARITHM, ".dt_bias")
"""Names of tensors that stay in float32: bfloat16 is too coarse for a choice among experts, and for a decay."""
_BLOCK_WEIGHTS = 1 << 16


def names_of(file: GGUFFile, config: DecoderConfig, *, mtp: bool = False) -> dict[str, str]:
    """Return tensor names in the file -> names in a checkpoint; `*` in these stands for the numbers of all experts.

    Names, types and shapes are checked. `mtp`: of the layer for multi-token prediction alone, named as in
    `sharesd.models.mtp`.

    Raises UnknownKey for a tensor that is not known, ValueError for a missing or damaged one.
    """
    _, layout = layout_of(file)
    num_layers = config.num_hidden_layers
    unused = tuple(f"blk.{layer}." for layer in range(num_layers, num_layers + config.num_mtp_layers))
    tensors, possible, shapes = file.tensors, layout.tensor_names(num_layers), tensor_shapes(config)
    for block in unused:
        stored = next((name for name in tensors if name.startswith(block)), None)
        if stored is not None and not any(name.startswith(f"{block}nextn.") for name in tensors):
            raise ValueError(
                f"tensor {stored!r} is of a layer for multi-token prediction, as the header counts them "
                f"({config.num_mtp_layers}), and that has no '{block}nextn' tensors; download it again"
            )
    if mtp:
        (possible, copies), shapes = gguf_names(layout.tensor_names(1), num_layers), mtp_shapes(config)
        own = {stored: tensor for stored, tensor in tensors.items() if stored.startswith(unused)}
        tensors, unused = {stored: tensor for stored, tensor in own.items() if not stored.startswith(copies)}, ()
    if config.experts is not None:
        first, count = ".experts.0.", config.experts.num_experts
        together = {name.replace(first, ".experts.*."): shape for name, shape in shapes.items() if first in name}
        shapes |= {name: (count, *shape) for name, shape in together.items()}
    wanted = {stored: name for stored, name in possible.items() if name in shapes}
    names = {}
    for stored, tensor in tensors.items():
        if stored in ROPE_TENSORS or _COMPUTED.fullmatch(stored) or stored.startswith(unused):
            continue
        if _ONE_EXPERT.fullmatch(stored):
            raise ValueError(f"tensor {stored!r} holds one expert, as only old files have it; give a newer file")
        if stored not in wanted:
            raise unknown_tensor(stored)
        names[stored] = name = wanted[stored]
        if shapes[name] not in (tensor.shape, (1, *tensor.shape)):  # one row may be stored as a vector
            found, right = list(tensor.shape), list(shapes[name])
            raise ValueError(
                f"tensor {stored!r} has shape {found} where the header asks for {right}; download it again"
            )
        try:
            gguf.dequantize(tensor.codes(0, gguf.GGML_QUANT_SIZES[tensor.kind][1]), tensor.kind)
        except NotImplementedError:
            raise ValueError(
                f"tensor {stored!r} is stored as {tensor.kind.name}, which is not supported; give another quantization"
            ) from None
    missing = [stored for stored, name in wanted.items() if stored not in names and not _is_optional(stored, name)]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(f"it has no tensor {missing[0]!r}{others}; download it again")
    return names


def _is_optional(stored: str, name: str) -> bool:
    """Return True for a bias, which is 0 where a file leaves it out."""
    return stored.endswith(".bias") and not name.endswith(".dt_bias")


def write_weights(file: GGUFFile, config: DecoderConfig, path: Path, progress: Progress) -> None:
    """Write all tensors to a safetensors file.

    Biases that the file leaves out are zero.

    Raises ValueError for a tensor with NaN or infinite values, unless it is an embedding that is not also the head.
    """
    (_, layout), names = layout_of(file), names_of(file, config) | _mtp_names(file, config)
    unchecked = () if config.tie_word_embeddings else ("token_embd.weight",)
    tensors = {
        stored: torch.empty(
            file.tensors[stored].shape, dtype=torch.float32 if name.endswith(_KEPT_WIDE) else torch.bfloat16
        )
        for stored, name in names.items()
    }
    blocks = [(name, begin, end) for name in names for begin, end in _blocks(file.tensors[name])]

    def convert(block: tuple[str, int, int]) -> None:
        name, begin, end = block
        values = _as_in_checkpoints(_dequantize(file.tensors[name], begin, end), name, names[name], layout)
        if name not in unchecked and not _is_finite(values.numpy()):
            raise ValueError(f"tensor {name!r} has NaN or infinite values; download it again, or give another")
        first = begin * gguf.GGML_QUANT_SIZES[file.tensors[name].kind][0]
        tensors[name].view(-1)[first : first + len(values)] = values

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done, _ in enumerate(pool.map(convert, blocks), 1):
            progress("converting weights", done, len(blocks))
    if layout.pairs_rows:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for stored, tensor in tensors.items():
            part = stored.split(".")[-2]
            if part in heads:
                pairs = tensor.unflatten(0, (heads[part], -1, 2))
                tensors[stored] = pairs.transpose(1, 2).reshape(tensor.shape)
    progress("writing weights", 0, 1)
    named = {names[stored]: tensor for stored, tensor in tensors.items()}
    single = {name: part for given, tensor in named.items() for name, part in experts_of(given, tensor)}
    alternate = architecture_of(config.model_type).experts_alternate
    write_tensors((_merged(named, config) if alternate else single) | absent_biases(single, config), path)
    progress("writing weights", 1, 1)


def _mtp_names(file: GGUFFile, config: DecoderConfig) -> dict[str, str]:
    """Return `names_of` the layer for multi-token prediction, as a checkpoint has it; none if the file lacks parts."""
    if layout_of_mtp(config) is None:
        return {}
    try:
        return {stored: MTPNames(config).stored(name) for stored, name in names_of(file, config, mtp=True).items()}
    except ValueError:  # which a drafter that needs it will say
        return {}


def _merged(named: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return tensors with gate and up of all experts as one, see `Architecture.experts_alternate`."""
    written = dict(named)
    for layer, (merged, parts) in product(
        range(config.num_hidden_layers), architecture_of(config.model_type).merged_experts.items()
    ):
        pieces = [written.pop(f"{LAYERS}{layer}.{part}") for part in parts]
        together = torch.stack(pieces, 2).flatten(1, 2)
        written[f"{LAYERS}{layer}.{merged}"] = together.mT.contiguous() if together.ndim == 3 else together
    return written


def experts_of(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, or those of its experts, with names in a checkpoint; see `names_of`."""
    if "*" not in name:
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        yield name.replace("*", str(number)), expert


def absent_biases(written: Collection[str], config: DecoderConfig) -> dict[str, Tensor]:
    """Return zeros for the biases that a checkpoint has next to those written."""
    absent = {name: shape for name, shape in tensor_shapes(config).items() if name not in written}
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in absent.items()}


def _blocks(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of quantized blocks."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    total, step = tensor.data.size // num_bytes, _BLOCK_WEIGHTS // size
    for begin in range(0, total, step):
        yield begin, min(begin + step, total)


def _is_finite(values: np.ndarray) -> bool:
    """Return True if all values are finite.

    NumPy sums in this thread; torch would start threads in each.
    """
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def _dequantize(tensor: StoredTensor, begin: int, end: int) -> Tensor:
    """Return the float32 values of quantized blocks."""
    num_bytes = gguf.GGML_QUANT_SIZES[tensor.kind][1]
    codes = tensor.codes(begin * num_bytes, end * num_bytes)
    return torch.from_numpy(gguf.dequantize(codes.reshape(1, -1), tensor.kind).reshape(-1).copy())


def stored_types(folder: Path) -> dict[str, str]:
    """Return the types of matrices that are blocks, or in one linear with blocks, by name."""
    file, config = _model(folder)
    return {**_types(file, names_of(file, config), config).types}


def stored_blocks(
    folder: Path, *, outlines: bool = False, mtp: bool = False
) -> Iterator[tuple[str, Tensor | BlockPart]]:
    """Yield names and tensors of the files that a folder names.

    Matrices are blocks or, in one linear with blocks, numbers, both mapped from the file; or outlines of them. Others
    are float32. `mtp`: of the layer for multi-token prediction, see `names_of`.

    Raises ValueError for a matrix of a type without a kernel.
    """
    file, config = _model(folder)
    _, layout = layout_of(file)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    path = read_json(folder / STORED)["files"][0]
    with damage_named(Path(path)):
        names = names_of(file, config, mtp=mtp)
    config = mtp_config(config) if mtp else config
    types = _types(file, names, config)
    single = {name: stored for stored, given in names.items() for name in _names_of_experts(given, config)}
    types.say(path, {name: f"tensor {stored!r}" for name, stored in single.items()})
    biases = absent_biases(single, config)
    yield from ((name, bias) for name, bias in biases.items() if not mtp or name.startswith(BLOCK))
    for name, stored in single.items():
        tensor, part, kind = file.tensors[stored], stored.split(".")[-2], types.types.get(name)
        shape, number, count = tensor.shape, 0, 1
        if "*" in names[stored]:
            (count, *inner), number = shape, int(name.partition(".experts.")[2].partition(".")[0])
            shape = tuple(inner)
        if outlines and kind is not None:
            yield name, BlockPart.without_bytes(kind, *shape)
            continue
        rows = _rows(tensor, number, count)
        if layout.pairs_rows and part in heads:
            rows = rows.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        if kind in BLOCK_TYPES:
            yield name, BlockPart(kind, rows)
            continue
        if kind is None and tensor.kind.name not in NUMBERS:
            raise ValueError(
                f"{path}: tensor {stored!r} is stored as {tensor.kind.name}, which does not run as stored; "
                "use --dequantize"
            )
        if tensor.kind.name in NUMBERS:
            values = rows.contiguous().view(NUMBERS[tensor.kind.name]).view(shape)
        else:
            values = torch.from_numpy(gguf.dequantize(rows.numpy(), tensor.kind))
        if kind is not None:
            yield name, BlockPart(kind, values.to(NUMBERS[kind]))
        else:
            yield name, _as_in_checkpoints(values.float(), stored, name, layout)


def _as_in_checkpoints(values: Tensor, stored: str, name: str, layout: GGUFLayout) -> Tensor:
    """Return values of a tensor, `stored` in the file, as a checkpoint has them."""
    if name.endswith(_LOGARITHM):
        return (-values).log()
    part = stored.split(".")[-2]
    if layout.norms_plus_one and part.endswith("norm") and part not in layout.own_norms:
        return values - 1.0
    return values


def _types(file: GGUFFile, names: Mapping[str, str], config: DecoderConfig) -> StoredTypes:
    matrices = {stored: name for stored, name in names.items() if len(file.tensors[stored].shape) > 1}
    kinds = {
        name: file.tensors[stored].kind.name
        for stored, given in matrices.items()
        for name in _names_of_experts(given, config)
    }
    return StoredTypes.of(kinds, config)


def _names_of_experts(name: str, config: DecoderConfig) -> list[str]:
    """Return a name, or those of all experts that it stands for."""
    if "*" not in name or config.experts is None:
        return [name]
    return [name.replace("*", str(number)) for number in range(config.experts.num_experts)]


def _model(folder: Path) -> tuple[GGUFFile, DecoderConfig]:
    """Return headers of the files that a folder names, and their config."""
    source = read_json(folder / STORED)
    file = parts_apart(read_model([Path(name) for name in source["files"]], source["ignored"]))
    return file, config_from_hf(config_of(file))


def q8_share(folder: Path) -> float:
    """Return the share of the tensors' bytes that are Q8_0."""
    file, _ = _model(folder)
    sizes = [(tensor.kind.name == "Q8_0", tensor.data.nbytes) for tensor in file.tensors.values()]
    return sum(size for is_q8, size in sizes if is_q8) / sum(size for _, size in sizes)


def _rows(tensor: StoredTensor, number: int, count: int) -> Tensor:
    """Return the bytes of each row, [rows, bytes], of one of `count` experts."""
    (size, num_bytes), part = gguf.GGML_QUANT_SIZES[tensor.kind], tensor.data.size // count
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the file is not to be written
        codes = torch.from_numpy(tensor.codes(number * part, (number + 1) * part))
    return codes.view(-1, tensor.shape[-1] // size * num_bytes)
