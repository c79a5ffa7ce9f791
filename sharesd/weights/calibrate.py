"""Calibration: weights of drafts rounded for the inputs that a model has while it answers.

One layer after the other is read in float32: in the memory of the model, a layer, and the hidden states of the answers.
Layers that are kept already are not rounded again.

Legend: B answers, T tokens, D hidden size, R tokens of answers, K inputs of a linear, N its outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from compile.op_registry import runs_cpp
from quant.config import QuantConfig
from quant.formats.hqq.calibrated import round_calibrated
from quant.quantized_weight import QuantizedWeight
from quant.solved_linears import QuantTask
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.checkpoint import Progress, silent
from sharesd.models.decoder import Decoder
from sharesd.weights.kept_calibration import Answer, KeptCalibration
from sharesd.weights.quantize import solve_on_cpu
from sharesd.weights.sizes import quantizer_for

MIN_TOKENS = 1000
"""Fewest tokens of answers: with less, columns are rounded for the answers at hand alone."""
_ROWS = 16
"""Answers that are read together."""


def require_enough(answers: Sequence[Answer]) -> None:
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
    decoder: Decoder, answers: Sequence[Answer], kept: KeptCalibration, *, progress: Progress = silent
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
        wide = _widened(block)
        linears = {task.path: wide.get_submodule(task.path.removeprefix(f"blocks.{layer}.")) for task in todo}
        grams = {path: _Gram(linear) for path, linear in linears.items()}
        for batch in batches:
            for gram in grams.values():
                gram.counted_BT = batch.is_answer_BT
            batch.x_BTD = _run(decoder, layer, wide, batch.x_BTD)
        for gram in grams.values():
            gram.close()
        if todo:
            kept.write(layer, {task.path: _rounded(task, linears[task.path], grams[task.path], kept) for task in todo})
        progress("calibrating layers", layer + 1, total)
    for task in [] if kept.has(None) else [task for task in tasks if task.layer is None]:
        norm, gram = _widened(decoder.norm), _Gram(decoder.head)
        for batch in batches:
            gram.add(norm(batch.x_BTD)[batch.is_answer_BT])
        gram.close()
        kept.write(None, {task.path: _rounded(task, decoder.head, gram, kept)})
    progress("calibrating layers", total, total)


class _Batch:
    """Answers of similar length, padded on the right, and their hidden states."""

    def __init__(self, decoder: Decoder, answers: Sequence[Answer], device: torch.device) -> None:
        length = max(len(each.prompt) + len(each.answer) for each in answers)
        tokens_BT = torch.zeros(len(answers), length, dtype=torch.int64)
        self.is_answer_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        """Tokens after which a token of the answer follows: those that drafts begin at."""
        for row, (prompt, answer) in enumerate(answers):
            end = len(prompt) + len(answer)
            tokens_BT[row, :end] = torch.tensor([*prompt, *answer])
            self.is_answer_BT[row, len(prompt) - 1 : end - 1] = True
        self.is_answer_BT = self.is_answer_BT.to(device)
        x_BTD = decoder.embed(tokens_BT.to(device)) * decoder.embedding_multiplier
        self.x_BTD = x_BTD.float() if device.type == "cpu" and x_BTD.dtype != torch.float64 else x_BTD


class _Gram:
    """Sum of x x^T over the inputs of a linear at tokens of answers, float32 [K, K]."""

    def __init__(self, linear: nn.Module) -> None:
        assert isinstance(linear, nn.Linear)
        K = linear.in_features
        self.sum_KK = torch.zeros(K, K, device=linear.weight.device)
        self.counted_BT = torch.empty(0)
        self.close: Callable[[], None] = linear.register_forward_pre_hook(
            lambda _, inputs: self.add(inputs[0][self.counted_BT])
        ).remove

    def add(self, x_RK: Tensor) -> None:
        wide_RK = x_RK.float()
        self.sum_KK.addmm_(wide_RK.t(), wide_RK)


def _batches(decoder: Decoder, answers: Sequence[Answer]) -> list[_Batch]:
    by_length = sorted((each for each in answers if each.answer), key=lambda each: len(each.prompt) + len(each.answer))
    device = decoder.embed.weight.device
    return [_Batch(decoder, by_length[first : first + _ROWS], device) for first in range(0, len(by_length), _ROWS)]


def _widened(module: nn.Module) -> nn.Module:
    """Return a copy in float32 on a CPU, where products of 16 bits are slow."""
    wide = copy.deepcopy(module)
    first = next(module.parameters())
    return wide.float() if first.device.type == "cpu" and first.dtype != torch.float64 else wide


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
        hidden_size=config.hidden_size,
        conv_widths=[kind.conv_width],
    )
    rotary = (table.to(x_BTD.dtype) for table in decoder.rope_tables[max(kind.rope, 0)])
    return block(x_BTD, *rotary, *cache.tensors(0), cache.lengths)


def _rounded(task: QuantTask, linear: nn.Module, gram: _Gram, kept: KeptCalibration) -> QuantizedWeight:
    assert isinstance(linear, nn.Linear)
    weight_NK = linear.weight.detach()
    solve = solve_on_cpu if runs_cpp(weight_NK.device) else kept.quant.format.solve
    try:
        return round_calibrated(weight_NK, gram.sum_KK, task.bits, kept.quant.group_size, solve)
    except ValueError as error:
        raise ValueError(f"{task.path}: {error}; --dtype fp32 has a larger range") from error
