"""What Inductor makes of steps on CUDA, without a GPU: prints what test_inductor_cuda.py judges, as JSON.

A program of its own, since it makes torch believe in a GPU: a device guard that guards nothing, and the properties of a
H200. Tensors are fake ones; the code that Inductor writes is noted, and the graph that it is for runs in its place.
"""

from __future__ import annotations

import ast
import ctypes
import json
import math
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter
from torch.utils.cpp_extension import include_paths, library_paths

from compile.attention import TreeAttentionMask
from compile.cuda.linear import replace_with_row_linears
from compile.cuda.lowbit import QuantizedRowLinear
from compile.inductor import CompiledBlocks, CompiledForms, CompiledMethods, CompiledModel
from quant.switch_linear import Switch, SwitchLinear
from sharesd import sampling
from sharesd.drafters.eagle.head import Eagle3
from sharesd.drafters.heads.config import LAYER_IDS, HeadConfig
from sharesd.models import rope
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder
from tests.helpers.absent_gpu import use_driver

DEVICE = torch.device("cuda", 0)
WIDTH, PIECES, SLOTS, LAYERS, GROUP = 16, (128, 256), 4096, 3, 64
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SIZES |= {"max_position_embeddings": SLOTS, "eos_token_id": None}
FAMILIES = {"llama": {}, "qwen3": {}, "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 64}}
BY_BLOCKS = ("qwen3", "gemma2")
"""Families that run by blocks; llama runs whole."""
GUARD = """
#include <c10/core/impl/FakeGuardImpl.h>
using namespace c10::impl;
namespace { DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new FakeGuardImpl<c10::DeviceType::CUDA>()); }
"""
LAUNCH = re.compile(r"torch\.ops\.|extern_kernels\.|triton_\w+\.run|aten\.")
VIEWS = ("reinterpret_tensor", "as_strided", "alloc_from_pool")


def make_up_a_gpu(folder: Path) -> None:
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    includes = [f"-I{path}" for path in include_paths()]
    links = [*(f"-L{path}" for path in library_paths()), "-lc10"]
    command = ["c++", "-std=c++20", "-shared", "-fPIC", *includes, str(source), *links, "-o", str(library)]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library))
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32, gcnArchName="",
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20, total_memory=141 << 30,
    )  # fmt: skip

    def always(value: object) -> Any:
        return staticmethod(lambda *_, **__: value)

    class Worker:
        set_device, current_device = always(None), always(0)
        get_device_properties = always(properties)

    class Gpu(device_interface.CudaInterface):
        is_available, is_bf16_supported, is_triton_capable = always(True), always(True), always(True)
        raise_if_triton_unavailable, synchronize = always(None), always(None)
        device_count, current_device, get_compute_capability = always(1), always(0), always(90)
        get_device_properties = always(properties)

    Gpu.Worker = Worker  # type: ignore[assignment, misc]
    device_interface.device_interfaces["cuda"] = Gpu
    device_interface._device_initialized = True
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.backends.cuda.is_flash_attention_available = lambda: True
    use_driver(90, get_active_torch_device=lambda: DEVICE)


@contextmanager
def noted() -> Iterator[list[str]]:
    """The code that Inductor writes within."""
    codes: list[str] = []

    def note(graph: GraphLowering) -> Any:
        code, _ = graph.codegen()
        codes.append(code.value)  # type: ignore[union-attr]

        def call(args: list[Any]) -> tuple:
            return tuple(Interpreter(graph.module).run(*args))

        return SimpleNamespace(call=call, __file__="noted", __name__="noted")

    before, GraphLowering.compile_to_module = GraphLowering.compile_to_module, note  # type: ignore[method-assign]
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        yield codes
    GraphLowering.compile_to_module = before  # type: ignore[method-assign]


def digest(code: str) -> dict[str, Any]:
    """Launches of a compiled form; the caches that attention is given, who else is given them first, and what is made
    of inputs; the numbers of the largest buffer.
    """
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    named = [(ast.unparse(call.func), call) for call in sorted(calls, key=lambda call: call.lineno)]
    launches = [name.removeprefix("torch.ops.").removesuffix(".default") for name, _ in named if LAUNCH.match(name)]
    attends = {call: call.args[5:7] for name, call in named if "sharesd.attend_" in name}
    attends |= {call: call.args[1:3] for name, call in named if "sharesd.flash" in name}
    caches = [ast.unparse(given) for both in attends.values() for given in both]
    others = [(name, call) for name, call in named if call not in attends and not name.startswith("assert_")]
    given = [(name, ast.unparse(call.args[0])) for name, call in others if call.args]
    lengths = defaultdict[str, int](lambda: PIECES[0])  # the only names that shapes have
    shapes = [eval(shape, {}, lengths) for name, shape in given if name.startswith("empty_strided")]
    return {
        "launches": launches,
        "caches": caches,
        "caches elsewhere": [name for name, first in given if first in caches],
        "views": [name for name, first in given if name in VIEWS and first.startswith("arg")],
        "largest buffer": max(map(math.prod, shapes), default=0),
    }


def decoder(family: str, switch: Switch | None = None) -> Decoder:
    config = config_from_hf({"model_type": family, **SIZES, **FAMILIES[family]})
    model = Decoder(config, dtype=torch.bfloat16, device=DEVICE).eval().requires_grad_(False)
    replace_with_row_linears(model, WIDTH)
    for path, linear in [(path, part) for path, part in model.named_modules() if switch and hasattr(part, "counters")]:
        model.set_submodule(path, SwitchLinear(linear, low(linear), switch))  # type: ignore[arg-type]
    return model


def low(linear: Any) -> nn.Module:
    N, K = linear.out_features, linear.in_features
    factors = torch.empty(2, N, K // GROUP, device=DEVICE)
    codes_NK = torch.empty(N, K, dtype=torch.uint8, device=DEVICE)
    return QuantizedRowLinear(codes_NK, *factors, None, 4, torch.bfloat16, WIDTH)


def numbers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=DEVICE)


def steps(
    model: Decoder, step: Any, codes: list[str], low_bits: Callable[[], Any] | None = None, *, chains: bool = False
) -> dict[str, Any]:
    """The forms of each kind of step, and of two sizes of pieces: run twice each, and of layers that are alike.

    Chains differ from plain steps in their width alone.
    """
    left_out = [
        *([] if step is model and model.supports_flash else ["prompt"]),
        *([] if low_bits else ["draft"]),
        *([] if chains else ["chain"]),
    ]
    cache, tree = model.new_cache(1, SLOTS), TreeAttentionMask(numbers(1, WIDTH), numbers(1, WIDTH, WIDTH))
    widths, found = {"plain": 1, "chain": WIDTH, "tree": WIDTH, "prompt": PIECES[0], "draft": 1}, {}
    for name, width in widths.items():
        if name in left_out:
            continue
        before = len(codes)
        for size in PIECES if name == "prompt" else (width, width):
            with low_bits() if name == "draft" and low_bits is not None else nullcontext():
                out_BTV = step.forward(numbers(1, size), cache, tree_mask=tree if name == "tree" else None)
        assert out_BTV.shape == (1, size, model.vocab_size) and out_BTV.device.type == "cuda"
        found[name] = [digest(code) for code in codes[before:]]
    return found


def head_step(codes: list[str]) -> dict[str, Any]:
    """The form of a draft step of an EAGLE-3 head: run twice, with other caches."""
    target, D = decoder("llama"), SIZES["hidden_size"]
    head = Eagle3(HeadConfig.new("eagle3", {"model_type": "llama", **SIZES, LAYER_IDS: [1, 2, 3]}), target)
    steps, before = CompiledMethods(head), len(codes)
    for _ in range(2):
        states_11D = torch.zeros(1, 1, D, dtype=torch.bfloat16, device=DEVICE)
        steps.step(numbers(1, 1), states_11D, head.new_cache(1, SLOTS), None)
    return {"eagle3": [digest(code) for code in codes[before:]]}


def main(folder: Path) -> dict[str, Any]:
    make_up_a_gpu(folder)
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True
    # Angles come from the host: of no interest here.
    rope.tables = lambda freq_r, _, *, positions, **how: (torch.empty(positions, len(freq_r), **how),) * 2
    found: dict[str, Any] = {}
    with noted() as codes:
        for family in BY_BLOCKS:
            switch = Switch()
            model = decoder(family, switch)
            model.run_block = CompiledBlocks({1, WIDTH}, lambda switch=switch: switch.quantized, pieces=PIECES)
            found[family] = steps(model, model, codes, switch.quantized_weights, chains=family == "qwen3")
        model = decoder("llama")
        found["whole"] = steps(model, CompiledModel(model, {1, WIDTH}), codes)
        found["heads"] = head_step(codes)
        noise, before = CompiledForms(sampling.gumbel), len(codes)
        for _ in range(2):
            noise(numbers(2), numbers(2, 5), SIZES["vocab_size"], stream=sampling.Stream.TARGET)
        found["noise"] = {"noise": [digest(code) for code in codes[before:]]}
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
