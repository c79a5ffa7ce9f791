"""From a config and a checkpoint's header to a plan of offloading: sizes, limits and measured rates for `offload.plan`.

No weights are read for it: a decoder on the meta device tells what each part will take.
"""

from __future__ import annotations

import copy
import logging
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from compile.attention import new_kv, round_slots
from compile.linear import LowPackedLinear, PackedLinear
from compile.native import cache_root, give_back_freed_memory
from offload.disk import read_rate
from offload.layout import Layout
from offload.link import LinkError
from offload.plan import DEPTHS, Drafter, Limits, Plan, Rates, Sizes, make_plan, steady
from offload.store import Content
from quant.attach import Job, LinearQuantizer
from quant.config import QuantConfig
from quant.solver import QuantizedWeight
from sharesd.acceptance import kept_acceptance
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
from sharesd.streamed import rows_of_piece

log = logging.getLogger(__name__)

LINEARS = ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")
"""The linears of a block, which are nearly all of it."""
ASSUMED = {8: 0.97, 4: 0.80, 3: 0.45, 2: 0.20}
"""Bits of a drafter that shares the target's KV -> how often its next token holds, until answers have told. (4 bits:
0.6 to 0.8 for a model of 135M parameters, 0.97 for published ones of 7B.)"""
TREE_TOP = 4
"""Nodes of a level of a draft tree that have children, and how many each has, where the plan decides that."""
TREE_MISSES = 0.6
"""How often a level of such a tree misses, of the times that a chain's token does (4 bits, 60 nodes: 0.53 to 0.6)."""
ASSUMED_OTHERS = 0.6
"""The same for heads, tables and other models."""
TIMED_ROWS = (1, 9, 1 + DEPTHS[-1])
"""Rows of steps whose products are timed."""
PROBE_BYTES, PROBED_BYTES = 2**25, 2**27
"""Bytes of the weights that are timed, and of all copies of them, which are timed in turns: more than caches hold."""
SOME_ROWS = 16
"""Rows of a quantized matrix whose bytes are counted: the kernel takes so many together."""
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

    Raises ValueError where the limits leave no way, something else that was asked for prevents it, or a folder is given
    that nothing would be written to.
    """
    found = _plan_for(config, modes, progress)
    if config.offload.folder is not None and (found is None or not found.plan.offloads):
        raise ValueError(
            "--offload-dir has no effect: all of the model stays in memory; drop it, or give --host-memory"
        )
    return found


def _plan_for(config: EngineConfig, modes: Sequence[Mode], progress: Progress) -> Offloading | None:
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
    if not always and model.fixed + smallest + model.num_records * model.layout(None).record_bytes <= limit:
        return None
    sizes = Sizes(num_blocks=model.num_records, block=model.layout(None).record_bytes, fixed=model.fixed)
    place = Path(wanted.folder) if wanted.folder is not None else cache_root() / "offload"
    contents = {quant: model.content(folder, quant) for quant in model.quants}
    rates = model.rates(_disk_rate(folder, place, list(contents.values()), wanted.rate))
    written = any(content.path(place).exists() for content in contents.values())
    limits = Limits(device=limit, disk=math.inf if written else _free_disk(place))
    free_length = wanted.choose_depth and config.num_draft is None and config.tree is None
    given = (config.tree is not None,)
    kinds = (False, True) if free_length and wanted.choose_trees and model.may_draft_trees else given
    drafters = [(quant, model.drafter(quant, trees=trees)) for quant in model.quants for trees in kinds]
    most = DEPTHS[-1] if free_length else config.tree[1] if config.tree is not None else config.most_draft
    give_back_freed_memory()  # of what was timed
    plan = make_plan(sizes, limits, rates, [drafter for _, drafter in drafters], most)
    quant = next(quant for quant, drafter in drafters if drafter.name == plan.drafter)
    if plan.offloads:
        config = replace(config, quant=quant or config.quant)
        if free_length and plan.nodes:
            full = TREE_TOP + (plan.depth - 1) * TREE_TOP**2
            config = replace(config, tree=(TREE_TOP, plan.depth, min(plan.nodes, full)))
        elif free_length:
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
        self.decoder, self.config, self._folder = decoder, config, folder
        self._embedding_stays_in_file = embedding_dtype(folder) == decoder.embed.weight.dtype
        self._needs = {*modes, *(config.hybrid_with if "hybrid" in modes else ())}
        self._dtype = decoder.embed.weight.dtype
        self._quantizers: dict[QuantConfig, LinearQuantizer] = {}
        self.quants = self._choices()
        self.num_blocks = len(decoder.blocks)
        self._pieces, self._piece_rows = self._head_pieces()
        self.num_records = self.num_blocks + self._pieces

    def _head_pieces(self) -> tuple[int, int]:
        """How many records rows of the head fill, and how many rows in each; none where drafts read all of it."""
        record = self.layout(None)
        drafts_read = bool(self._needs & {*HEADS}) or any(
            quant is not None and quant.head_bits is None and "share" in self._needs for quant in self.quants
        )
        if drafts_read or any(self.layout(quant) != record for quant in self.quants):
            return 0, 0
        rows = rows_of_piece(self.decoder.config.hidden_size, self._dtype, record.record_bytes)
        return (self.decoder.config.vocab_size - 1) // rows if rows else 0, rows

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
        return Content(what=what, layout=self.layout(quant), num_blocks=self.num_records)

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
        codes = 0 if self.quants == [None] else c.vocab_size * c.hidden_size  # of the head, before they are packed
        loading = max(3 * self.layout(None).record_bytes // 2, codes)  # is needed until then
        return small + self._tail + tables + max(later, loading) + own_memory() + RUNTIME_BYTES

    @property
    def _tail(self) -> int:
        """Bytes of what must stay of the packed head."""
        weight = _packed(self.decoder.head).weight
        return weight.nbytes - self._pieces * self._piece_rows * weight[0].nbytes // weight.shape[2]

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

    @property
    def may_draft_trees(self) -> bool:
        """Whether quantized weights are all that drafts, but for tables."""
        return bool(self._needs & {"share", "classic"}) and self.config.draft is None and not self._needs & {*HEADS}

    def drafter(self, quant: QuantConfig | None, *, trees: bool) -> Drafter:
        """What drafts, as the plan sees it."""
        mode, bits = self.config.mode, None if quant is None else quant.bits
        held, step, measured = steady(ASSUMED_OTHERS), 0.0, None
        if mode == "naive":
            held = ()
        elif quant is not None and mode not in (*TABLES, *HEADS):
            measured = kept_acceptance(self._folder, mode, quant, trees=trees)
            alpha = self._expected(mode, quant, trees) if measured is None else measured
            held, step = steady(alpha), self._draft_seconds(quant, rows=TREE_TOP if trees else 1)
        return Drafter(
            name=(mode if bits is None else f"{mode}, {bits} bits") + (", trees" if trees else ""),
            nodes=(self.config.tree[2] if self.config.tree is not None else DEPTHS[-1]) if trees else 0,
            bits=bits,
            resident=self.resident(quant),
            step=step,
            held=held,
            measured=measured is not None,
            block=self.layout(quant).record_bytes,
            stays=quant.skip_layers if quant is not None and "share" in self._needs else (),
        )

    def _expected(self, mode: str, quant: QuantConfig, trees: bool) -> float:
        """How often drafts may hold, from what is known of those of the other form, or else assumed."""
        other = kept_acceptance(self._folder, mode, quant, trees=not trees)
        if not trees:
            return ASSUMED[quant.bits] if other is None else max(0.0, 1 - (1 - other) / TREE_MISSES)
        return 1 - TREE_MISSES * (1 - (ASSUMED[quant.bits] if other is None else other))

    def rates(self, disk: float) -> Rates:
        """Rates of this machine."""
        linear = self._probe()
        per_byte = {rows: _seconds_per_byte(linear, self._ones(rows)) for rows in TIMED_ROWS}
        block = self.layout(None).record_bytes
        return Rates(
            disk=disk,
            block={rows: seconds * block for rows, seconds in per_byte.items()},
            rest={rows: seconds * self._tail for rows, seconds in per_byte.items()},
        )

    def _draft_seconds(self, quant: QuantConfig, rows: int) -> float:
        """Of a draft step of so many rows: its products."""
        total = 0.0
        sizes = self._low_bytes(quant)
        for bits, num_bytes in sizes.items():
            low = packed_for_cpu(_codes(self._probe_shape(), bits, quant), None)
            total += _seconds_per_byte(low, self._ones(rows)) * num_bytes
        if quant.head_bits is None:
            head = _packed(self.decoder.head).weight.nbytes
            total += _seconds_per_byte(self._probe(), self._ones(rows)) * head
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
        config = self.config
        longest = 1 + max(DEPTHS[-1], config.most_draft)
        top, deepest, _ = config.tree or (TREE_TOP, DEPTHS[-1] // 2, 0)
        return sum(kv_bytes(self.decoder, config, longest + max(longest, 2 + top * deepest)))

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


def kv_bytes(decoder: Decoder, config: EngineConfig, overhang: int) -> list[int]:
    """Bytes of each layer's keys and values, with so many slots behind the context."""
    c, dtype = decoder.config, decoder.embed.weight.dtype
    slots = round_slots(min(config.max_context, decoder.max_context) + overhang)
    few = new_kv(1, c.num_kv_heads, 1, c.head_dim, dtype, torch.device("cpu"))
    per_slot = sum(tensor.nbytes for tensor in few) // round_slots(1)
    return [config.max_batch * slots * per_slot] * len(c.layers)


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
    N, K = full.weight.shape
    return math.ceil(N / SOME_ROWS) * _bytes_of_some_rows(K, job.bits, quant)


@cache
def _bytes_of_some_rows(K: int, bits: int, quant: QuantConfig) -> int:
    """Packed for good: the meta device's kernels, in Python, take 80 MB."""
    return packed_for_cpu(_codes((SOME_ROWS, K), bits, quant), None).nbytes


def _packed(linear: nn.Linear) -> PackedLinear:
    return PackedLinear(linear.weight.detach(), None)


def _codes(shape: tuple[int, ...], bits: int, quant: QuantConfig) -> QuantizedWeight:
    """A solved matrix, without the solution."""
    N, K = shape
    group = K if bits == 8 else quant.group_size
    scale, q = torch.ones(N, K // group), torch.ones(N, K, dtype=torch.uint8)
    return QuantizedWeight(q=q, scale=scale, zero=scale, bits=bits, group_size=group)


def _seconds_per_byte(linear: PackedLinear | LowPackedLinear, x: Tensor) -> float:
    """Of a product, for each byte of weights that come from memory: the shortest of a few."""
    copies = [linear, *(copy.deepcopy(linear) for _ in range(PROBED_BYTES // linear.weight.nbytes - 1))]
    times = []
    for _ in range(4):
        started = time.perf_counter()
        for each in copies:
            each(x)
        times.append(time.perf_counter() - started)
    return min(times) / (len(copies) * linear.weight.nbytes)


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
