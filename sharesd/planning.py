"""From a config and a checkpoint's header to a plan of offloading: sizes, limits and measured rates for `offload.plan`.

No weights are read for it: a decoder on the meta device tells what each part will take.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from compile.linear import LowPackedLinear, PackedLinear
from compile.native import cache_root
from offload.disk import read_rate
from offload.layout import Layout
from offload.link import LinkError
from offload.plan import DEPTHS, Drafter, Limits, Plan, Rates, Sizes, make_plan, steady
from offload.store import Content
from quant.attach import Job, LinearQuantizer
from quant.config import QuantConfig
from quant.solver import QuantizedWeight
from sharesd.config import HEADS, TABLES, EngineConfig, Mode
from sharesd.decoding.prefill import LONG_CHUNK
from sharesd.device import device_of
from sharesd.low_builders import packed_for_cpu
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig, Unsupported
from sharesd.models.folder import identity, weight_files
from sharesd.models.progress import Progress, silent
from sharesd.models.resolve import resolve
from sharesd.models.weights import decoder_config, embedding_dtype

log = logging.getLogger(__name__)

LINEARS = ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")
"""The linears of a block, which are nearly all of it."""
ASSUMED = {8: 0.98, 4: 0.90, 3: 0.60, 2: 0.30}
"""Bits of a drafter that shares the target's KV -> how often its next token holds, as long as nothing was measured."""
ASSUMED_OTHERS = 0.6
"""The same for heads, tables and other models."""
TIMED_ROWS = (1, 9, 1 + DEPTHS[-1])
"""Rows of steps whose products are timed."""
PROBE_BYTES = 2**25
"""Bytes of the weights that are timed: more than a core's caches hold."""
LEFT_FREE = 0.05
"""Share of free memory that is left to others where no limit is given."""
RUNTIME_BYTES = 64 * 10**6
"""What Python, torch and the tokenizer take beyond what they have when this is asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """A plan with all that it takes to carry it out."""

    plan: Plan
    config: EngineConfig
    """With the drafter's bits and the longest draft of the plan, where these were left to it."""
    content: Content
    """Of the store."""
    folder: Path
    """Of stores."""


def plan_for(config: EngineConfig, modes: Sequence[Mode], *, progress: Progress = silent) -> Offloading | None:
    """How a model that does not fit in memory runs all the same; None where nobody set a limit and all of it stays.

    Raises ValueError where the limits leave no way, or something else that was asked for prevents it.
    """
    wanted = config.offload
    always = wanted.limited or wanted.when == "plan-only"
    if wanted.when == "off":
        return None
    if config.split.wanted:
        if always:
            raise ValueError("no plan for offloading: the model is split among devices, which keep all of it")
        return None
    device = device_of(config.device)
    problem, folder = _unsuited(config, device), resolve(config.target, progress=progress)
    try:
        shape = decoder_config(folder)
    except Unsupported as reason:
        problem = problem or str(reason)
    if problem is not None:
        if always:
            raise ValueError(f"no plan for offloading: {problem}")
        return None
    if wanted.device_memory is not None:
        raise ValueError("--device-memory has no effect on a CPU, which computes in the host's memory: --host-memory")
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    limit = float(wanted.host_memory if wanted.host_memory is not None else (1 - LEFT_FREE) * free_memory())
    if not always and _plainly_fits(folder, shape, config, limit):
        return None
    model = _Measured(Decoder(shape, dtype=dtype, device="meta"), config, modes, folder)
    smallest = min(model.resident(quant) for quant in model.quants)
    if not always and model.fixed + smallest + model.num_blocks * model.layout(None).record_bytes <= limit:
        return None
    place = Path(wanted.folder) if wanted.folder is not None else cache_root() / "offload"
    contents = {quant: model.content(folder, quant) for quant in model.quants}
    rates = model.rates(_disk_rate(folder, place, list(contents.values()), wanted.rate))
    written = any(content.path(place).exists() for content in contents.values())
    sizes = Sizes(num_blocks=model.num_blocks, block=model.layout(None).record_bytes, fixed=model.fixed)
    limits = Limits(device=limit, disk=math.inf if written else _free_disk(place))
    drafters = {quant: model.drafter(quant) for quant in model.quants}
    free_length = wanted.choose_depth and config.num_draft is None and config.tree is None
    most = DEPTHS[-1] if free_length else config.most_draft
    plan = make_plan(sizes, limits, rates, list(drafters.values()), most)
    quant = next(quant for quant, drafter in drafters.items() if drafter.bits == plan.bits)
    if plan.offloads:
        config = replace(config, quant=quant or config.quant)
        if free_length:
            config = replace(config, max_draft=max(plan.depth, 1))
    return Offloading(plan=plan, config=config, content=contents[quant], folder=place)


def _plainly_fits(folder: Path, shape: DecoderConfig, config: EngineConfig, limit: float) -> bool:
    """Whether there is so much memory that nobody has to count: starts are to be short."""
    weights = sum(file.stat().st_size for file in weight_files(folder))
    kv = len(shape.layers) * 2 * shape.num_kv_heads * shape.head_dim * config.max_context * config.max_batch * 8
    return 6 * weights + 3 * kv + 10**9 < limit


def free_memory() -> int:
    """Bytes that this process may still take, of the machine's or of its control group's."""
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdecimal():
        free = min(free, int(text) - int(used.read_text()))
    return free + own_memory()


def own_memory() -> int:
    """Bytes of this process that no file backs (RssAnon)."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


def _unsuited(config: EngineConfig, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"device is {device}, and weights travel on a CPU so far; use --device cpu, or a smaller model"
    if config.compile not in ("auto", "native"):
        return f"compile is {config.compile!r}; offloaded blocks run in the CPU kernel (--compile native)"
    if config.tensor_parallel > 1:
        return f"tensor_parallel is {config.tensor_parallel}, and ranks keep all of their weights; drop one of the two"
    return None


class _Measured:
    """What the parts of a decoder take, in memory and in time. Its tensors are on the meta device."""

    def __init__(self, decoder: Decoder, config: EngineConfig, modes: Sequence[Mode], folder: Path) -> None:
        self.decoder, self.config = decoder, config
        self._embedding_stays_in_file = embedding_dtype(folder) == decoder.embed.weight.dtype
        self.num_blocks = len(decoder.blocks)
        self._needs = {*modes, *(config.hybrid_with if "hybrid" in modes else ())}
        self._dtype = decoder.embed.weight.dtype
        self._quantizers: dict[QuantConfig, LinearQuantizer] = {}
        self.quants = self._choices()

    def _choices(self) -> list[QuantConfig | None]:
        """Quantizations that the plan may choose from; None where nothing is quantized."""
        quant = self.config.quant
        if "share" not in self._needs and not ("classic" in self._needs and self.config.draft is None):
            return [None]
        if not self.config.offload.choose_bits or quant.proj_bits or quant.method != "hqq":
            return [quant]
        return [replace(quant, bits=bits, head_bits=quant.head_bits and bits) for bits in (4, 8)]

    def layout(self, quant: QuantConfig | None) -> Layout:
        """Of a block's record: what drafts do not read at full precision."""
        shares = quant is not None and "share" in self._needs
        skipped = () if quant is None or not shares else self._skipped(quant)
        tensors = {f"{path}.weight": _packed(self._linear(0, path)).weight for path in LINEARS if path not in skipped}
        return Layout.of(tensors)

    def content(self, folder: Path, quant: QuantConfig | None) -> Content:
        """Of the store."""
        what = {"checkpoint": identity(folder), "dtype": str(self._dtype), "order": "packed for the CPU kernel"}
        return Content(what=what, layout=self.layout(quant), num_blocks=self.num_blocks)

    @property
    def fixed(self) -> int:
        """Bytes that are there whatever drafts."""
        c, decoder = self.decoder.config, self.decoder
        linears = {id(self._linear(i, path).weight) for i in range(self.num_blocks) for path in LINEARS}
        small = sum(p.nbytes for p in decoder.parameters() if id(p) not in {*linears, id(decoder.head.weight)})
        if self._embedding_stays_in_file:
            small -= 0 if c.tied else decoder.embed.weight.nbytes
        elif c.tied:
            small += decoder.embed.weight.nbytes
        rows = self.config.max_batch * (1 + max(self.config.most_draft, DEPTHS[-1]))
        logits = rows * c.vocab_size * (2 * self._dtype.itemsize + 3 * 4)
        read = min(LONG_CHUNK, self.config.max_context)  # tokens of a prompt at a time, one row after the other
        prompt = read * (4 * c.hidden_size + 3 * c.mlp_size) * self._dtype.itemsize
        tables = sum(buffer.nbytes for buffer in decoder.buffers())
        later = self._kv() + logits + prompt  # comes when everything has been loaded
        loading = 3 * self.layout(None).record_bytes // 2  # is needed until then
        return small + _packed(decoder.head).weight.nbytes + tables + max(later, loading) + own_memory() + RUNTIME_BYTES

    def resident(self, quant: QuantConfig | None) -> int:
        """Bytes of all that drafts, and of what must stay for it."""
        num = 0
        if quant is not None:
            copies = int("share" in self._needs) + int("classic" in self._needs and self.config.draft is None)
            num += copies * sum(self._low_bytes(quant).values())
            if "share" in self._needs:
                num += self.num_blocks * (self.layout(None).record_bytes - self.layout(quant).record_bytes)
        if "classic" in self._needs:
            num += self._kv()
            if quant is not None and quant.head_bits is None:
                num += _packed(self.decoder.head).weight.nbytes
        for path in (self.config.draft, self.config.head):
            if path is not None:
                num += sum(file.stat().st_size for file in weight_files(resolve(path)))
        return num

    def drafter(self, quant: QuantConfig | None) -> Drafter:
        """What drafts, as the plan sees it."""
        mode, bits = self.config.mode, None if quant is None else quant.bits
        held, step = steady(ASSUMED_OTHERS), 0.0
        if mode == "naive":
            held = ()
        elif quant is not None and mode not in (*TABLES, *HEADS):
            held, step = steady(ASSUMED[quant.bits]), self._draft_seconds(quant)
        return Drafter(
            name=mode if bits is None else f"{mode}, {bits} bits",
            bits=bits,
            resident=self.resident(quant),
            step=step,
            held=held,
            block=self.layout(quant).record_bytes,
            stays=quant.skip_layers if quant is not None and "share" in self._needs else (),
        )

    def rates(self, disk: float) -> Rates:
        """Rates of this machine."""
        linear = self._probe()
        per_byte = {rows: _seconds(linear, self._ones(rows)) / linear.weight.nbytes for rows in TIMED_ROWS}
        head = _packed(self.decoder.head).weight.nbytes
        block = self.layout(None).record_bytes
        return Rates(
            disk=disk,
            block={rows: seconds * block for rows, seconds in per_byte.items()},
            rest={rows: seconds * head for rows, seconds in per_byte.items()},
        )

    def _draft_seconds(self, quant: QuantConfig) -> float:
        """Of a draft step of one row: its products."""
        total = 0.0
        sizes = self._low_bytes(quant)
        for bits, num_bytes in sizes.items():
            low = packed_for_cpu(_codes(self._probe_shape(), bits, quant, "cpu"), None)
            total += _seconds(low, self._ones(1)) * num_bytes / low.nbytes
        if quant.head_bits is None:
            linear = self._probe()
            head = _packed(self.decoder.head).weight.nbytes
            total += _seconds(linear, self._ones(1)) * head / linear.weight.nbytes
        return total

    def _low_bytes(self, quant: QuantConfig) -> dict[int, int]:
        """Bits -> bytes of all quantized linears with so many."""
        found: dict[int, int] = {}
        for job in self._quantizer(quant).jobs:
            found[job.bits] = found.get(job.bits, 0) + low_bytes(self.decoder, job, quant)
        return found

    def _skipped(self, quant: QuantConfig) -> set[str]:
        """Linears that drafts read at full precision in every block."""
        layers = [job.path.split(".", 2) for job in self._quantizer(quant).jobs if job.layer is not None]
        return set(LINEARS) - {path for _, _, path in layers}

    def _quantizer(self, quant: QuantConfig) -> LinearQuantizer:
        if quant not in self._quantizers:
            self._quantizers[quant] = quantizer_of(self.decoder, quant)
        return self._quantizers[quant]

    def _kv(self) -> int:
        return sum(kv_bytes(self.decoder, self.config, max(DEPTHS[-1], self.config.most_draft)))

    def _linear(self, block: int, path: str) -> nn.Linear:
        linear = self.decoder.blocks[block].get_submodule(path)
        assert isinstance(linear, nn.Linear)
        return linear

    def _probe_shape(self) -> tuple[int, int]:
        K = self.decoder.config.hidden_size
        return max(64, PROBE_BYTES // (K * self._dtype.itemsize) // 64 * 64), K

    def _probe(self) -> PackedLinear:
        return PackedLinear(torch.ones(self._probe_shape(), dtype=self._dtype), None)

    def _ones(self, rows: int) -> Tensor:
        return torch.ones(rows, self.decoder.config.hidden_size, dtype=self._dtype)


def kv_bytes(decoder: Decoder, config: EngineConfig, most_draft: int) -> list[int]:
    """Bytes of each layer's keys and values."""
    slots = min(config.max_context, decoder.max_context) + 4 * (1 + most_draft)
    cache = decoder.new_cache(config.max_batch, slots)
    return [k.nbytes + v.nbytes for k, v in zip(cache.k, cache.v, strict=True)]


def quantizer_of(decoder: Decoder, quant: QuantConfig) -> LinearQuantizer:
    """What would quantize a decoder on the meta device."""
    return LinearQuantizer(
        decoder,
        quant,
        head_name="head",
        layer_of=lambda path: int(path.split(".")[1]) if path.startswith("blocks.") else None,
        build=packed_for_cpu,
        device=torch.device("cpu"),
    )


def low_bytes(decoder: Decoder, job: Job, quant: QuantConfig) -> int:
    """Bytes of a quantized linear, as the CPU kernel has it."""
    full = decoder.get_submodule(job.path)
    assert isinstance(full, nn.Linear)
    return packed_for_cpu(_codes(tuple(full.weight.shape), job.bits, quant, "meta"), None).nbytes


def _packed(linear: nn.Linear) -> PackedLinear:
    return PackedLinear(linear.weight.detach(), None)


def _codes(shape: tuple[int, ...], bits: int, quant: QuantConfig, device: str) -> QuantizedWeight:
    """A solved matrix, without the solution."""
    N, K = shape
    group = K if bits == 8 else quant.group_size
    scale = torch.ones(N, K // group, device=device)
    q = torch.ones(N, K, dtype=torch.uint8, device=device)
    return QuantizedWeight(q=q, scale=scale, zero=scale, bits=bits, group_size=group)


def _seconds(linear: PackedLinear | LowPackedLinear, x: Tensor) -> float:
    """Of a product: the shortest of a few."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        linear(x)
        times.append(time.perf_counter() - started)
    return min(times)


def _disk_rate(folder: Path, place: Path, contents: Sequence[Content], limit: float | None) -> float:
    """Bytes a second from the store, where there is one, else from the checkpoint."""
    stores = [content.path(place) for content in contents if content.path(place).exists()]
    file = stores[0] if stores else max(weight_files(folder), key=lambda path: path.stat().st_size)
    found: list[float] = []
    for direct in (True, False):
        try:
            found.append(read_rate(file, direct=direct))
        except LinkError as reason:
            log.debug("%s", reason)
    if not found:
        raise ValueError(f"{file} cannot be read, so nothing can be planned")
    return min(max(found), limit or math.inf)


def _free_disk(folder: Path) -> float:
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return float(shutil.disk_usage(nearest).free)
