"""Calibration: weights of drafts rounded for the inputs that a model has while it answers.

One layer after the other is read, in the memory of the model, one layer, and the hidden states of the answers. Layers
that are kept already are not rounded again.

Legend: B answers, T tokens, D hidden size, R tokens of answers, K inputs of a linear, N its outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from compile.linear import PackedLinear, pack_linears
from compile.op_registry import runs_cpp
from quant.config import QuantConfig
from quant.formats.hqq.calibrated import round_calibrated
from quant.quantized_weight import QuantizedWeight
from quant.solved_linears import QuantTask
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.checkpoint import Progress, read_tensors, silent, write_tensors
from sharesd.models.decoder import Decoder
from sharesd.models.recurrent_layers import recurrent_sizes
from sharesd.weights.kept_calibration import CalibrationText, KeptCalibration
from sharesd.weights.quantize import solve_on_cpu
from sharesd.weights.sizes import quantizer_for

MIN_TOKENS = 1000
"""Fewest tokens of answers: with less, columns are rounded for the answers at hand alone."""
_ROWS = 16
"""Answers that are read together."""
_TILE = 384
"""Rows of a sum of x x^T that are added at a time, from the diagonal on: what lies below it is the same."""


def require_enough(answers: Sequence[CalibrationText]) -> None:
    """Raise ValueError if answers have too few tokens."""
    num_tokens = sum(len(each.answer) for each in answers)
    if num_tokens < MIN_TOKENS:
        raise ValueError(
            f"the model's answers have {num_tokens} tokens, and a calibration needs {MIN_TOKENS}; calibrate a model "
            "that answers instructions"
        )


def tasks_of(decoder: Decoder, quant: QuantConfig) -> list[QuantTask]:
    """Return the linears that a calibration rounds; ValueError as `LinearQuantizer`."""
    return [task for task in quantizer_for(decoder, quant).tasks if task.bits in quant.format.calibrated_bits]


@torch.inference_mode()
def calibrate(
    decoder: Decoder, answers: Sequence[CalibrationText], kept: KeptCalibration, *, progress: Progress = silent
) -> None:
    """Round the linears of a decoder, and keep those of each layer.

    `decoder`: as it is read, with torch's linears.

    Raises:
        ValueError: answers are too few, or inputs have NaN or infinite values.
        OSError: the disk does not take the weights of a layer; those before are kept.
    """
    require_enough(answers)
    tasks = tasks_of(decoder, kept.quant)
    batches = _batches(decoder, answers)
    total = len(decoder.blocks) + 1
    for layer, block in enumerate(decoder.blocks):
        todo = [] if kept.has(layer) else [task for task in tasks if task.layer == layer]
        packed = _packed(block, decoder.embed.weight.device)
        inputs_of = {task.path: packed.get_submodule(task.path.removeprefix(f"blocks.{layer}.")) for task in todo}
        grams = {path: _Gram(linear) for path, linear in inputs_of.items()}
        for batch in batches:
            for gram in grams.values():
                gram.counted_BT = batch.is_answer_BT
            batch.x_BTD = _run(decoder, layer, packed, batch.x_BTD)
        if todo:
            kept.write(layer, {task.path: _rounded(task, decoder, grams[task.path], kept) for task in todo})
        progress("calibrating layers", layer + 1, total)
    for task in [] if kept.has(None) else [task for task in tasks if task.layer is None]:
        gram = _Gram(decoder.head)
        for batch in batches:
            gram.add(decoder.norm(batch.x_BTD)[batch.is_answer_BT])
        kept.write(None, {task.path: _rounded(task, decoder, gram, kept)})
    progress("calibrating layers", total, total)


def move_to_file(folder: Path, decoder: Decoder, number: int) -> None:
    """Write a block to a file in `folder` and map it there, so that it takes memory only while it is read.

    OSError if the disk does not take it.
    """
    file, block = folder / f"block-{number}.safetensors", decoder.blocks[number]
    write_tensors({name: parameter.data.contiguous() for name, parameter in block.named_parameters()}, file)
    for name, tensor in read_tensors(file):
        path, _, last = name.rpartition(".")
        setattr(block.get_submodule(path), last, nn.Parameter(tensor, requires_grad=False))


class _Batch:
    """Answers of similar length, padded on the right, and their hidden states."""

    def __init__(self, decoder: Decoder, answers: Sequence[CalibrationText], device: torch.device) -> None:
        length = max(len(each.prompt) + len(each.answer) for each in answers)
        tokens_BT = torch.zeros(len(answers), length, dtype=torch.int64)
        self.is_answer_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        """Tokens after which a token of the answer follows: those that drafts begin at."""
        for row, (prompt, answer) in enumerate(answers):
            end = len(prompt) + len(answer)
            tokens_BT[row, :end] = torch.tensor([*prompt, *answer])
            self.is_answer_BT[row, len(prompt) - 1 : end - 1] = True
        self.is_answer_BT = self.is_answer_BT.to(device)
        self.x_BTD = decoder.embed(tokens_BT.to(device)) * decoder.embedding_multiplier


class _Gram:
    """Sum of x x^T over the inputs of a linear at tokens of answers, float32 [K, K]."""

    def __init__(self, linear: nn.Module) -> None:
        assert isinstance(linear, nn.Linear | PackedLinear)
        K = linear.in_features
        self._upper_KK = torch.zeros(K, K, device=linear.weight.device)
        self.counted_BT = torch.empty(0)
        self._hook = linear.register_forward_pre_hook(lambda _, inputs: self.add(inputs[0][self.counted_BT]))

    def add(self, x_RK: Tensor) -> None:
        wide_RK = x_RK.float()
        for first in range(0, len(self._upper_KK), _TILE):
            here = slice(first, first + _TILE)
            self._upper_KK[here, first:].addmm_(wide_RK[:, here].t(), wide_RK[:, first:])

    def close(self) -> Tensor:
        """Return the sum; the linear's inputs are no longer added."""
        self._hook.remove()
        return self._upper_KK.triu() + self._upper_KK.triu(1).t()


def _batches(decoder: Decoder, answers: Sequence[CalibrationText]) -> list[_Batch]:
    by_length = sorted((each for each in answers if each.answer), key=lambda each: len(each.prompt) + len(each.answer))
    device = decoder.embed.weight.device
    return [_Batch(decoder, by_length[first : first + _ROWS], device) for first in range(0, len(by_length), _ROWS)]


def _packed(block: nn.Module, device: torch.device) -> nn.Module:
    """Return the block on a GPU, or a copy with linears of the C++ kernels: torch's products of 16 bits are slow."""
    if device.type != "cpu":
        return block if next(block.parameters()).device == device else copy.deepcopy(block).to(device)
    packed = copy.deepcopy(block)
    pack_linears(packed)
    return packed


def _run(decoder: Decoder, layer: int, block: nn.Module, x_BTD: Tensor) -> Tensor:
    """Return hidden states after a block; texts begin at position 0."""
    config, (batch, length, _) = decoder.config, x_BTD.shape
    kind = config.layer_types[layer]
    cache = StaticKVCache(
        shapes=[(0 if kind.conv_width else config.num_key_value_heads, config.head_dim)],
        batch=batch,
        slots=length,
        dtype=x_BTD.dtype,
        device=x_BTD.device,
        recurrent=recurrent_sizes(config) if kind.conv_width else None,
    )
    rotary = (table.to(x_BTD.dtype) for table in decoder.rope_tables[max(kind.rope, 0)])
    return block(x_BTD, *rotary, *cache.tensors(0), cache.lengths)


def _rounded(task: QuantTask, decoder: Decoder, gram: _Gram, kept: KeptCalibration) -> QuantizedWeight:
    linear = decoder.get_submodule(task.path)
    assert isinstance(linear, nn.Linear)
    weight_NK = linear.weight.detach().to(decoder.embed.weight.device)
    solve = solve_on_cpu if runs_cpp(weight_NK.device) else kept.quant.format.solve
    try:
        return round_calibrated(weight_NK, gram.close(), task.bits, kept.quant.group_size, solve)
    except ValueError as error:
        raise ValueError(f"{task.path}: {error}; --dtype fp32 has a larger range") from error
