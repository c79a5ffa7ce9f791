"""gpt-oss in the layout of its release: experts in MXFP4, gate and up in turns.

Logits of the other layouts are compared in `test_models.py` and `test_gguf.py`, sinks in the tests of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from compile.block_linear import BlockLinear
from sharesd import LLM
from sharesd.models.loader import load_decoder
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tiny_models import make_checkpoint
from tests.models.folders import edit_config, edit_tensors
from tests.models.test_models import OSS, OSS_YARN, SMALL, save_random, text

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
MXFP4 = gguf.GGMLQuantizationType.MXFP4
CONFIG = hf.GptOssConfig(**SMALL | {"vocab_size": 284, "intermediate_size": 64}, **OSS, rope_parameters=OSS_YARN)
DOWN, GATE_UP = (f"model.layers.1.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj"))


def released(folder: Path) -> tuple[Path, hf.PreTrainedModel]:
    """A folder with blocks and scales of experts, and transformers' model with the same values."""
    make_checkpoint(folder)  # for its tokenizer
    reference = save_random(CONFIG, folder)
    tensors, dice = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=dice, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=dice, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        reference.get_parameter(name).data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return edit_config(folder, quantization_config=section), reference


def test_a_released_folder_runs_as_stored_with_the_logits_of_transformers(tmp_path: Path) -> None:
    folder, reference = released(tmp_path / "model")
    tree: dict[str, Any] = {"num_draft": 6, "tree": (2, 3, 6), "max_batch": 2, "device": "cpu", "max_context": 64}
    runtime: Any = require_same_texts(
        str(folder), ("naive", "share", "suffix"), quant="stored,experts=2", **tree
    )._runtime
    experts = runtime.target.blocks[1].mlp.experts
    for number, expert in enumerate(experts):
        assert isinstance(expert.gate_up, BlockLinear) and isinstance(expert.down, BlockLinear)
        gate_up, down = (reference.get_parameter(name)[number].t() for name in (GATE_UP, DOWN))
        assert torch.equal(expert.gate_up.unpacked(), torch.cat([gate_up[::2], gate_up[1::2]]))
        assert torch.equal(expert.down.unpacked(), down)
    with torch.inference_mode():
        wanted = reference(text()).logits
        for target in (runtime.target, _expanded(folder)):
            found = target(text(), target.new_cache(2, 32))
            assert (found - wanted).norm() < 1e-4 * wanted.norm()


def _expanded(folder: Path) -> Any:
    llm: Any = LLM(str(folder), mode="naive", device="cpu", dequantize=True, dtype="float32", max_context=64)
    return llm._runtime.target


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_without("model.layers.0.self_attn.sinks"), "missing model.layers.0.self_attn.sinks"),
        (_without("model.layers.2.mlp.router.bias"), "missing model.layers.2.mlp.router.bias"),
        (_without(f"{DOWN}_bias"), "missing model.layers.1.mlp.experts.0.down_proj.bias"),
        (_without(f"{DOWN}_scales"), "down_proj.scales is missing"),
        (
            lambda tensors: tensors.update({f"{DOWN}_bias": tensors[f"{DOWN}_bias"][:5].clone()}),
            r"down_proj_bias has shape \[5, 64\] where config.json asks for \[7, 64\]",
        ),
        (
            lambda tensors: tensors.update(
                {f"{GATE_UP}_{kind}": tensors[f"{GATE_UP}_{kind}"][:6].clone() for kind in ("blocks", "scales")}
            ),
            r"gate_up_proj has shape \[6, 64, 128\] where config.json asks for \[7, 64, 128\]",
        ),
        (lambda tensors: tensors[f"{GATE_UP}_scales"].fill_(255), "gate_up_proj.scales has NaN values"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    edit: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    folder, _ = released(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        LLM(str(edit_tensors(folder, edit)), mode="naive", device="cpu", max_context=64)


@pytest.mark.parametrize("fields", [{"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0}, {"hidden_act": "gelu"}])
def test_other_gates_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    save_random(CONFIG, tmp_path)
    [(name, value)] = fields.items()
    with pytest.raises(ValueError, match=f"architecture 'gpt_oss' with {name} {value!r} is not supported"):
        load_decoder(edit_config(tmp_path, **fields), dtype=torch.float32)


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"target_quant": "mxfp4"}], ids=str)
def test_experts_in_numbers_are_packed_and_quantized_row_by_row(options: dict[str, Any], tmp_path: Path) -> None:
    """In the file they are transposed, gate and up in turns."""
    make_checkpoint(tmp_path)
    reference = save_random(CONFIG, tmp_path)
    llm: Any = LLM(str(tmp_path), mode="naive", device="cpu", max_context=64, **options)
    experts = llm._runtime.target.blocks[1].mlp.experts
    for number, expert in enumerate(experts):
        gate_up, down = (reference.get_parameter(name)[number].t() for name in (GATE_UP, DOWN))
        for linear, weight in ((expert.gate_up, torch.cat([gate_up[::2], gate_up[1::2]])), (expert.down, down)):
            wanted = weight.contiguous()
            if "target_quant" in options:
                wanted = torch.from_numpy(gguf.dequantize(gguf.quantize(wanted.numpy(), MXFP4), MXFP4))
            assert torch.equal(linear.unpacked(), wanted)
