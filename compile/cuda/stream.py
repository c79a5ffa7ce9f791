"""Products of one row with weights of 4 bits, read as streams: packing, sizes and launches of stream.cu.

For drafts of one row, where the weights' bytes are what takes time. A row of its own is launched for each row of x, so
a row has the same bits in steps of any width, and wide steps are slow: `gemm.py` serves drafts of several rows.

Legend: W rows of the weights, K inputs, N outputs (W, or W / 2 if gated), G groups of inputs.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from compile.activations import ACTIVATIONS
from compile.cuda import gemm_config
from compile.cuda.nvrtc import cubin_of
from compile.cuda.pdl import launch_options
from compile.op_registry import define_for_triton

SOURCE = Path(__file__).with_name("stream.cu")
GROUPS = (32, 64, 128)
"""Inputs that share a scale and an offset."""
TILE, CHUNK_INPUTS = 16, 256
"""Rows of a tile, which W is a multiple of, and inputs of its chunks."""
WARPS = 8
MAX_TILES = 32
"""Tiles of a block, each of which takes 512 bytes of shared memory."""
CP_STAGES = 4
"""Most stages of the form with cp.async."""
MIN_STAGES = 2
"""Fewest stages next to a successor's block; with fewer, a block has the processor for itself."""
SYSTEM_SHARED = 1024
"""Bytes of shared memory that the system keeps of each block."""
_PACKED_TILES = 256


class Op(Structure):
    """Argument of the kernel, `Op` of stream.cu."""

    _fields_ = [
        *((name, c_uint64) for name in ("w", "x", "y", "norm", "residual", "bias")),
        *((name, c_int) for name in ("tiles", "chunks", "K", "N", "gate", "stages")),
        ("eps", c_float),
        ("unused", c_int),
    ]


@dataclass(frozen=True, slots=True)
class Card:
    """What sizes depend on."""

    capability: tuple[int, int]
    processors: int
    shared: int
    """Maximum bytes of shared memory of a block; a processor has `SYSTEM_SHARED` more."""
    early: bool
    """True if kernels begin before their predecessor has ended."""

    @property
    def bulk(self) -> bool:
        """True for bulk copies; else weights are copied by cp.async."""
        return (9, 0) <= self.capability < (12, 0)


@dataclass(frozen=True, slots=True)
class LaunchSizes:
    """Sizes of a launch."""

    blocks: int
    stages: int
    shared: int
    """Bytes of shared memory of a block."""


@cache
def card_of(index: int) -> Card:
    """Return the properties of a CUDA device."""
    device, on = torch.device("cuda", index), gemm_config.device(index)
    capability = torch.cuda.get_device_capability(device)
    return Card(capability, on.processors, on.shared, launch_options(device)["PDL"])


def chunk_bytes(group: int) -> int:
    """Return the bytes of 16 rows of 256 inputs: codes, and factors of 4 bytes."""
    return TILE * CHUNK_INPUTS // 2 + CHUNK_INPUTS // group * TILE * 4


def shared_bytes(K: int, tiles: int, stages: int, group: int) -> int:
    """Return the shared memory of a block with up to `tiles` tiles, in the order of stream.cu."""
    rings, inputs = WARPS * stages * (chunk_bytes(group) + 8), num_chunks(K) * CHUNK_INPUTS
    return rings + 128 + 2 * inputs + inputs // min(group, 64) * 8 + tiles * WARPS * TILE * 4


@cache
def plan(tiles: int, K: int, group: int, card: Card) -> LaunchSizes | None:
    """Return the sizes for weights [16 tiles, K]; None if a processor has too little shared memory.

    Where a successor's block may begin early, two have to fit on a processor: its ring fills in the meantime.
    """
    blocks = min(tiles, card.processors * -(-tiles // (card.processors * MAX_TILES)))
    most = -(-tiles // blocks)
    half = (card.shared + SYSTEM_SHARED) // 2 - SYSTEM_SHARED
    rooms = [(half, MIN_STAGES)] if card.early else []
    for room, fewest in (*rooms, (card.shared, 1)):
        left = room - shared_bytes(K, most, 0, group)
        stages = left // (WARPS * (chunk_bytes(group) + 8))
        if stages >= fewest:
            stages = stages if card.bulk else min(stages, CP_STAGES)
            return LaunchSizes(blocks, stages, shared_bytes(K, most, stages, group))
    return None


def num_chunks(inputs: int) -> int:
    """Return the chunks of a tile; the last one may be filled up with zeros."""
    return -(-inputs // CHUNK_INPUTS)


def obstacle(rows: int, inputs: int, group: int, card: Card) -> str | None:
    """Return the reason why weights [rows, inputs] are no stream on a card."""
    if group not in GROUPS:
        return f"groups have {group} inputs, not {', '.join(map(str, GROUPS))}"
    if rows % TILE:
        return f"{rows} rows are no multiple of {TILE}"
    filled, block = num_chunks(inputs) * CHUNK_INPUTS, 4 * group  # tiles are filled up to whole blocks
    if filled > -(-inputs // block) * block or 16 * (filled - inputs) > inputs:
        return f"{inputs} inputs are no multiple of {CHUNK_INPUTS}, nor a little less"
    if plan(rows // TILE, inputs, group, card) is None:
        return f"{inputs} inputs do not fit into {card.shared} bytes of shared memory"
    return None


def pack(codes_WK: Tensor, scale_WG: Tensor, offset_WG: Tensor) -> Tensor:
    """Return uint8 [tiles, chunks, bytes] in the order of stream.cu.

    `codes_WK` is uint8 below 16; w = (code - 8) * scale + offset, with factors rounded to bfloat16.
    """
    W, K = codes_WK.shape
    C, tiles, missing = num_chunks(K), W // TILE, -K % CHUNK_INPUTS
    group = K // scale_WG.shape[1]
    codes_WK = F.pad(codes_WK, (0, missing))
    scale_WG, offset_WG = (F.pad(each, (0, missing // group)) for each in (scale_WG, offset_WG))
    G = C * CHUNK_INPUTS // group
    factors = torch.stack([scale_WG, offset_WG], 2).to(torch.bfloat16).contiguous().view(torch.uint8)  # [W, G, 4]
    # [half of W, tile, r, chunk, group, byte] -> [tile, chunk, r, group, half, byte]
    factors_TCB = factors.view(2, tiles, 8, C, G // C, 4).permute(1, 3, 2, 4, 0, 5).reshape(tiles, C, -1)
    # Inputs are chunk, unit u, half of the unit i, eight q, word w, byte b.
    codes = codes_WK.view(2, tiles, 8, C, 4, 2, 4, 2, 4)
    packed = []
    for first in range(0, tiles, _PACKED_TILES):  # temporaries are as large as the codes
        part = codes[:, first : first + _PACKED_TILES]
        bytes_of_two = part[:, :, :, :, :, 0] | part[:, :, :, :, :, 1] << 4  # [h, t, r, C, u, q, w, b]
        packed.append(bytes_of_two.permute(1, 3, 4, 2, 5, 6, 0, 7).reshape(part.shape[1], C, -1))
    return torch.cat([torch.cat(packed), factors_TCB], 2).contiguous()


def unpack(packed: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [W, K], scales and offsets [W, G] of `pack`, filled up to whole chunks."""
    tiles, C, _ = packed.shape
    size = TILE * CHUNK_INPUTS // 2
    two = (
        packed[:, :, :size].reshape(tiles, C, 4, 8, 4, 2, 2, 4).permute(6, 0, 3, 1, 2, 4, 5, 7)
    )  # [h, t, r, C, u, q, w, b]
    codes_WK = torch.stack([two & 15, two >> 4], 5).reshape(tiles * TILE, C * CHUNK_INPUTS)
    factors = packed[:, :, size:].reshape(tiles, C, 8, CHUNK_INPUTS // group, 2, 4).permute(4, 0, 2, 1, 3, 5)
    values = factors.reshape(tiles * TILE, -1, 4).contiguous().view(torch.bfloat16)
    return codes_WK, values[..., 0], values[..., 1]


def prepare(device: torch.device, group: int) -> None:
    """Compile and load a GPU's kernel, which must not happen in a capture; raises NvrtcError, or the driver's error."""
    if device.type == "cuda":
        _kernel(_index(device), group)


def try_product(device: torch.device, group: int) -> None:
    """Run the smallest product; raises errors of the compiler and the device."""
    weight = torch.zeros(1, 1, chunk_bytes(group), dtype=torch.uint8, device=device)
    x = torch.zeros(1, CHUNK_INPUTS, dtype=torch.bfloat16, device=device)
    torch.ops.sharesd.stream_linear(x, weight, None, None, 0.0, None, "", group)
    torch.cuda.synchronize(device)


def options_of(group: int, card: Card) -> tuple[str, ...]:
    """Return the options of NVRTC besides the architecture."""
    return "-std=c++17", f"-DGROUP={group}", f"-DBULK={int(card.bulk)}"


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(c_int(status), byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


_DYNAMIC_SHARED, _CARVEOUT = 8, 9  # CU_FUNC_ATTRIBUTE_*
_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@cache
def _kernel(index: int, group: int) -> c_void_p:
    card = card_of(index)
    image = cubin_of(SOURCE, card.capability, options_of(group, card))
    module, function = c_void_p(), c_void_p()
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()  # makes the context
        _check(_driver().cuModuleLoadData(byref(module), image), "cuModuleLoadData")
        _check(_driver().cuModuleGetFunction(byref(function), module, b"stream_product"), "cuModuleGetFunction")
        for attribute, value in ((_DYNAMIC_SHARED, card.shared), (_CARVEOUT, 100)):
            _check(_driver().cuFuncSetAttribute(function, c_int(attribute), c_int(value)), "cuFuncSetAttribute")
    return function


class _Attribute(Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int * 16)]


class _Config(Structure):
    _fields_ = [
        *((name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("count", c_uint),
    ]


def launch(op: Op, sizes: LaunchSizes, rows: int, group: int, device: torch.device) -> None:
    """Launch a product on the current stream of a device."""
    index = _index(device)
    function, stream = _kernel(index, group), torch.cuda.current_stream(device).cuda_stream
    early = _Attribute(_EARLY, 0)
    early.value[0] = 1
    config = _Config(
        *(sizes.blocks, rows, 1, 32 * WARPS, 1, 1, sizes.shared),
        *(stream, ctypes.pointer(early), int(card_of(index).early)),
    )
    arguments = (c_void_p * 1)(ctypes.addressof(op))
    with torch.cuda.device(index):  # whose context the driver launches in
        _check(_driver().cuLaunchKernelEx(byref(config), function, arguments, None), "cuLaunchKernelEx")


def card_for(device: torch.device) -> Card:
    """Return the card of a device; on a CPU one of the interpreter's sizes, for tests."""
    if device.type == "cuda":
        return card_of(_index(device))
    on = gemm_config.INTERPRETER
    return Card((9, 0), on.processors, on.shared, True)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _stream_linear(x, weight, bias, norm, eps, residual, gated, group):
    tiles, chunks, num_bytes = weight.shape
    K, W = x.shape[-1], tiles * TILE
    N = W // 2 if gated else W
    if x.dtype != torch.bfloat16 or num_chunks(K) != chunks or K % group or num_bytes != chunk_bytes(group):
        raise ValueError(f"a stream of {chunks} chunks and groups of {group} takes no {x.dtype} of {K} inputs")
    x_MK = x.reshape(-1, K).contiguous()
    y_MN = x.new_empty(len(x_MK), N)
    added = None if residual is None else residual.contiguous()
    sizes = plan(tiles, K, group, card_for(x.device))
    assert sizes is not None, "see `obstacle`"
    op = Op(
        *(0 if each is None else each.data_ptr() for each in (weight, x_MK, y_MN, norm, added, bias)),
        *(tiles, chunks, K, N, (ACTIVATIONS.index(gated) + 1 if gated else 0), sizes.stages, eps, 0),
    )
    if any(address % 16 for address in (op.w, op.x, op.norm)):
        raise ValueError("weights, inputs and norms of a stream begin at a multiple of 16 bytes")
    launch(op, sizes, len(x_MK), group, x.device)
    return y_MN.view(*x.shape[:-1], N)


def _stream_linear_meta(x, weight, bias, norm, eps, residual, gated, group):
    return x.new_empty((*x.shape[:-1], weight.shape[0] * TILE // (2 if gated else 1)))


define_for_triton(
    "stream_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, Tensor? residual, str gated, "
    "int group) -> Tensor",
    _stream_linear,
    _stream_linear_meta,
)
