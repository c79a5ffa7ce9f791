"""Products of one row as streams: order of the weights, sizes by card, and the kernel itself, as fibers on a CPU.

The kernel's source runs against float64, with blocks, ring sizes and shared memory as on the cards, except that they
have two processors. Warps run in random orders, and copies arrive late (emulator/emulator.h).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile.cuda import nvrtc, stream
from compile.cuda.lowbit import QuantizedRowLinear, StreamLinear
from compile.cuda.stream import CHUNK_INPUTS, GROUPS, Card, LaunchSizes, Op, chunk_bytes, obstacle, plan, shared_bytes
from compile.fused_linear import compose
from quant.formats.hqq.solver import solve
from sharesd.weights.cuda_backend import pack_for_cuda
from tests.compile.cuda.emulator import emulator

KB = 1024
CARDS = {
    "A100": Card((8, 0), 108, 163 * KB, False),
    "RTX 3090": Card((8, 6), 82, 99 * KB, False),
    "RTX 4060": Card((8, 9), 24, 99 * KB, False),
    "H200": Card((9, 0), 132, 227 * KB, True),
    "H200, no dependent launch": Card((9, 0), 132, 227 * KB, False),
    "B200": Card((10, 0), 148, 227 * KB, True),
    "RTX 5090": Card((12, 0), 170, 99 * KB, True),
}
SHAPES = {
    "qkv": (12288, 4096),
    "o": (4096, 4096),
    "gate_up": (22016, 4096),
    "down": (4096, 11008),
    "head": (32000, 4096),
}
"""Of Llama-2-7B; and others below."""
WIDE = {"head of Qwen": (151936, 5120), "down of 70B": (8192, 28672)}


def codes(rows: int, inputs: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and offsets that are no symmetric ones."""
    dice = torch.Generator().manual_seed(seed)
    size = (rows, inputs // group)
    scale, offset = torch.rand(size, generator=dice) * 0.02 + 0.01, torch.randn(size, generator=dice) * 0.01
    return torch.randint(0, 16, (rows, inputs), dtype=torch.uint8, generator=dice), scale, offset


class Norm:
    def __init__(self, weight: Tensor) -> None:
        self.weight, self.eps = weight, 1e-5

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def few_processors(card: Card) -> Card:
    return Card(card.capability, 2, card.shared, card.early)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[emulator.Recorder]:
    """Products on a CPU run in the emulator, as on an H200 of two processors."""
    recorder = emulator.Recorder()
    monkeypatch.setattr(stream, "launch", recorder)
    monkeypatch.setattr(stream, "card_for", lambda device: few_processors(CARDS["H200"]))
    yield recorder


@pytest.mark.parametrize("group", GROUPS)
def test_weights_are_kept_in_no_more_bytes(group: int) -> None:
    inputs = 1024 if group == 32 else 2688
    given = codes(48, inputs, group)
    packed = stream.pack(*given)
    assert packed.shape == (3, 4 if group == 32 else 11, chunk_bytes(group)) and packed.dtype == torch.uint8
    want = (given[0], *(each.bfloat16() for each in given[1:]))
    assert all(
        torch.equal(got[:, : each.shape[1]], each) for got, each in zip(stream.unpack(packed, group), want, strict=True)
    )
    tiled = QuantizedRowLinear(*given, None, 4, torch.bfloat16, 16)
    linear = StreamLinear(*given, None, 16)
    assert linear.nbytes <= tiled.nbytes * (1 if group == 32 else 1.01), "only factors of what is filled up are added"
    assert torch.equal(linear.full_weight(torch.float32), tiled.full_weight(torch.float32))


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_rings_fit_the_card(card: Card) -> None:
    """Two blocks next to each other where successors begin early, unless that leaves less than two stages."""
    for (rows, inputs), group in itertools.product((SHAPES | WIDE).values(), GROUPS):
        assert obstacle(rows, inputs, group, card) is None
        sizes = plan(rows // 16, inputs, group, card)
        assert sizes is not None and sizes.shared <= card.shared
        assert sizes.blocks % card.processors == 0 or sizes.blocks == rows // 16
        assert 1 <= sizes.stages <= (stream.CP_STAGES if not card.bulk else 12)
        half = (card.shared + KB) // 2 - KB
        fits = half - shared_bytes(inputs, -(-rows // 16 // sizes.blocks), stream.MIN_STAGES, group)
        assert not card.early or (sizes.shared <= half) == (fits >= 0)
    bytes_in_flight = {name: ring(card, shape) for name, shape in SHAPES.items()}
    assert min(bytes_in_flight.values()) >= 32 * KB, bytes_in_flight  # latency x bandwidth is 10 to 30 KB a processor


def ring(card: Card, shape: tuple[int, int]) -> int:
    sizes = plan(shape[0] // 16, shape[1], 64, card)
    assert sizes is not None
    return stream.WARPS * sizes.stages * chunk_bytes(64)


def test_what_is_no_stream_says_why() -> None:
    card = CARDS["RTX 3090"]
    assert obstacle(1728, 576, 64, card) == "576 inputs are no multiple of 256, nor a little less"
    assert obstacle(4096, 4224, 64, card) is None
    assert obstacle(4096, 4224, 32, card) is not None, "tiles of groups of 32 take fewer bytes"
    assert obstacle(24, 256, 64, card) == "24 rows are no multiple of 16"
    assert obstacle(16, 256, 256, card) == "groups have 256 inputs, not 32, 64, 128"
    assert obstacle(16, 65536, 64, card) == "65536 inputs do not fit into 101376 bytes of shared memory"


def test_op_is_as_long_as_in_the_source() -> None:
    fields = re.search(r"struct Op \{.*?\n\}", stream.SOURCE.read_text(), re.S)
    assert fields is not None
    named = re.findall(r"\w+(?=[,;])", re.sub(r"//.*", "", fields[0]))
    assert named == [name for name, *_ in Op._fields_]
    assert stream.ctypes.sizeof(Op) == 6 * 8 + 8 * 4


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("card", ["H200", "RTX 3090"])
def test_products_are_right(card: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, gate, bias and residual; inputs of any scale; more chunks than stages."""
    on = few_processors(CARDS[card])
    monkeypatch.setattr(stream, "launch", emulator.Recorder(bulk=on.bulk))
    monkeypatch.setattr(stream, "card_for", lambda device: on)
    dice = torch.Generator().manual_seed(1)
    for rows, inputs, gated in (
        (80, 512, ""),
        (96, 2688 + 128 * (group == 32), "silu"),
        (32, 768, "gelu"),
        (32, 256, "gelu_pytorch_tanh"),
    ):
        given = codes(rows, inputs, group)
        bias = torch.randn(rows, generator=dice).bfloat16()
        linear = StreamLinear(*given, bias, 16)
        x = torch.randn(1, 1, inputs, generator=dice).bfloat16() * torch.logspace(-3, 1, inputs).bfloat16()
        norm = Norm(torch.rand(inputs, generator=dice).bfloat16() + 0.5)
        residual = torch.randn(1, 1, rows // 2 if gated else rows, generator=dice).bfloat16()
        y = linear(x, norm=norm, gated=gated, residual=residual)
        exact = torch.nn.Linear(inputs, rows).double()
        exact.weight.data, exact.bias.data = linear.full_weight(torch.float64), bias.double()
        want = compose(
            exact, x.double(), norm=Norm(norm.weight.double()), gated=gated, residual=residual.double()
        ).detach()
        error = (y.double() - want).abs() - 2**-8 * want.abs()  # y is rounded to bfloat16
        assert error.max() <= 2e-4 * want.abs().max(), (rows, inputs, gated)


def test_a_row_has_the_same_bits_in_steps_of_any_width(launched: emulator.Recorder) -> None:
    linear = StreamLinear(*codes(64, 512, 64), None, 16)
    x = torch.randn(2, 3, 512).bfloat16()
    together = linear(x)
    assert launched.launches[-1][2] == 6, "a launch for all"
    assert all(torch.equal(linear(x[i, j][None]), together[i, j][None]) for i in range(2) for j in range(3))
    beyond = linear(torch.randn(1, 17, 512).bfloat16())
    assert beyond.shape == (1, 17, 64) and len(launched.launches) == 7, "prompts are dequantized"


def test_inputs_that_do_not_fit_are_refused(launched: emulator.Recorder) -> None:
    weight = stream.pack(*codes(16, 256, 64))
    for x, group in (
        (torch.zeros(1, 256), 64),
        (torch.zeros(1, 512).bfloat16(), 64),
        (torch.zeros(1, 256).bfloat16(), 32),
    ):
        with pytest.raises(ValueError, match="a stream of 1 chunks and groups of"):
            torch.ops.sharesd.stream_linear(x, weight, None, None, 0.0, None, "", group)
    odd = torch.zeros(257).bfloat16()[1:][None]
    with pytest.raises(ValueError, match="begin at a multiple of 16 bytes"):
        torch.ops.sharesd.stream_linear(odd, weight, None, None, 0.0, None, "", 64)
    assert not launched.launches


def test_low_bits_are_packed_by_shape() -> None:
    """Codes of 4 bits and fewer as a stream where shapes divide, all else in tiles; what was solved in either."""
    kinds = {}
    for rows, inputs, bits in ((64, 512, 4), (64, 512, 3), (64, 512, 8), (24, 512, 4), (64, 576, 4)):
        solved = solve(torch.randn(rows, inputs) / 16, bits, 64)
        low = pack_for_cuda(solved, None, dtype=torch.bfloat16, max_rows=16, streams=True)
        assert isinstance(low, StreamLinear | QuantizedRowLinear)
        want = solved.dequantize()
        assert (low.full_weight(torch.float32) - want).norm() / want.norm() < 4e-3
        kinds[rows, inputs, bits] = type(low)
    assert list(kinds.values()) == [StreamLinear, StreamLinear, *[QuantizedRowLinear] * 3], kinds


def test_traced_as_one_operator() -> None:
    with FakeTensorMode():
        weight = torch.empty(6, 1, chunk_bytes(64), device="cuda", dtype=torch.uint8)
        x, residual = (torch.empty(2, 3, size, device="cuda", dtype=torch.bfloat16) for size in (256, 48))
        y = torch.ops.sharesd.stream_linear(x, weight, None, None, 0.0, residual, "silu", 64)
    assert y.shape == (2, 3, 48) and y.device.type == "cuda" and y.dtype == torch.bfloat16


def chain(bulk: bool, seed: int, replaced: tuple[str, str] = ("", "")) -> bool:
    """Three products that read and overwrite each other's rows, in order and as dependent launches: are both equal?"""
    card, size = few_processors(CARDS["H200" if bulk else "RTX 3090"]), 512
    weights = [stream.pack(c, s / 10, o / 10) for c, s, o in (codes(size, size, 64, seed=i) for i in range(3))]
    first = torch.randn(1, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    a, b = first.clone(), torch.zeros(1, size).bfloat16()
    whole = plan(size // 16, size, 64, card)
    assert whole is not None
    sizes = LaunchSizes(whole.blocks, 2, shared_bytes(size, 16, 2, 64))  # 8 chunks for each warp
    launches = [
        (Op(w.data_ptr(), x.data_ptr(), y.data_ptr(), 0, x.data_ptr(), 0, 32, 2, size, size, 0, 2, 0.0, 0), sizes, 1)
        for w, (x, y) in zip(weights, ((a, b), (b, a), (a, b)), strict=True)
    ]
    for each in launches:
        emulator.run([each], 64, bulk=bulk, seed=seed)
    want = b.clone()
    a.copy_(first), b.zero_()
    emulator.run(launches, 64, bulk=bulk, seed=seed, replaced=replaced)
    return torch.equal(b, want)


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk copies", "cp.async"])
def test_kernels_that_begin_early_do_not_race(bulk: bool) -> None:
    assert all(chain(bulk, seed) for seed in range(4))


FAULTS = {
    "reads rows before the wait": (
        True,
        "grid_wait();\n    load_row(op, l, tid);",
        "load_row(op, l, tid);\n    grid_wait();",
    ),
    "never waits": (False, "    grid_wait();\n", "\n"),
    "takes chunks that are on their way": (True, "while (!barrier_passed(r.bars + r.taken, r.parity)) {}", ";"),
    "waits for a chunk too few": (False, "copies_wait<1>", "copies_wait<2>"),
    "takes what other lanes copy": (False, "sync_warp();  // other lanes", "// other lanes"),
    "multiplies before rows are there": (True, "load_row(op, l, tid);\n    sync_block();", "load_row(op, l, tid);"),
    "adds sums that are on their way": (True, "sync_block();\n    store(", "store("),
}


@pytest.mark.slow
@pytest.mark.parametrize(("bulk", "old", "new"), FAULTS.values(), ids=FAULTS)
def test_the_emulator_finds_races(bulk: bool, old: str, new: str) -> None:
    def holds(seed: int) -> bool:
        try:
            return chain(bulk, seed, (old, new))
        except emulator.Broken:
            return False

    assert not all(holds(seed) for seed in range(4))


class TestNvrtc:
    @pytest.fixture(autouse=True)
    def has_nvrtc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
        try:
            nvrtc.library()
        except nvrtc.NvrtcError as error:
            pytest.skip(str(error))

    @pytest.mark.slow
    @pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
    def test_compiles_for_each_card(self, card: Card) -> None:
        """No registers are spilled, and the loop has few instructions: 4096 weights a chunk and warp."""
        absent_gpu = pytest.importorskip("tests.helpers.absent_gpu", reason="Triton is not installed here")
        (major, minor), most = card.capability, {32: 290, 64: 230, 128: 215}
        for group in GROUPS if card in (CARDS["H200"], CARDS["RTX 3090"]) else (64,):
            options = (f"--gpu-architecture=sm_{major}{minor}", *stream.options_of(group, card))
            cubin = nvrtc.compile_source(stream.SOURCE.read_bytes(), "stream.cu", options)
            sizes = plan(2000, 4096, group, card)
            assert sizes is not None
            binary = absent_gpu.Binary("stream_product", 10 * major + minor, (1,), 8, {"cubin": cubin}, sizes.shared)
            assert binary.spilled == 0
            if major < 10:  # the dump of later ones has longer instructions
                assert len(loop_of(binary)) <= most[group]
                assert not card.early or binary.resident() == 2

    def test_is_kept_and_made_again_if_damaged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source, made = tmp_path / "one.cu", list[str]()
        source.write_text('extern "C" __global__ void one(int* p) { *p = GROUP; }')
        compile_source = nvrtc.compile_source

        def counted(text: bytes, name: str, options: tuple[str, ...]) -> bytes:
            made.append(options[0])
            return compile_source(text, name, options)

        monkeypatch.setattr(nvrtc, "compile_source", counted)
        first = nvrtc.cubin_of(source, (8, 0), ("-DGROUP=64",))
        assert first.startswith(b"\x7fELF") and nvrtc.cubin_of(source, (8, 0), ("-DGROUP=64",)) == first
        assert made == ["--gpu-architecture=sm_80"]
        (file,) = (tmp_path / "nvrtc").iterdir()
        file.write_bytes(file.read_bytes()[:-40])
        assert nvrtc.cubin_of(source, (8, 0), ("-DGROUP=64",)) == first and len(made) == 2
        nvrtc.cubin_of(source, (9, 0), ("-DGROUP=64",))
        nvrtc.cubin_of(source, (8, 0), ("-DGROUP=32",))
        assert len(made) == 4 and len(list(file.parent.iterdir())) == 3

    def test_errors_are_one_line(self) -> None:
        with pytest.raises(nvrtc.NvrtcError, match=r'a\.cu\(1\): error: identifier "x" is undefined') as raised:
            nvrtc.compile_source(b"__device__ int f() { return x; }", "a.cu", ("--gpu-architecture=sm_80",))
        assert "\n" not in str(raised.value)
        with pytest.raises(nvrtc.NvrtcError, match="invalid value for --gpu-architecture"):
            nvrtc.compile_source(b"", "a.cu", ("--gpu-architecture=sm_999",))


def loop_of(binary) -> list[str]:
    """The innermost loop with all products of the matrix units."""
    jumps = ((at, re.search(r"\bBRA\S* .*?(0x[0-9a-f]+)", code)) for at, code in binary.sass)
    spans = [(int(jump[1], 16), at) for at, jump in jumps if jump is not None and int(jump[1], 16) < at]
    products = [at for at, code in binary.sass if "IMMA" in code]
    assert len(products) == 2 * CHUNK_INPUTS // 64
    first, last = min(((a, b) for a, b in spans if a <= products[0] and products[-1] <= b), key=lambda s: s[1] - s[0])
    return [code for at, code in binary.sass if first <= at <= last]
