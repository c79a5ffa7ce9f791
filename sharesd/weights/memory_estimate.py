"""What the parts of a decoder take, in memory and in time, before any of its weights is read.

A decoder on the meta device tells how large they are; products of matrices as large as the caches are timed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compile.attention import flash_reads, new_kv, round_slots
from offload.block_file import Content
from offload.block_layout import Layout
from offload.planner import DEPTHS, Drafter, Rates, Sizes, steady
from quant.config import QuantConfig
from quant.hqq import QuantizedWeight
from quant.quantize_model import Job, LinearQuantizer, Solving
from sharesd.config import HEADS, TABLES, EngineConfig, Mode
from sharesd.devices.host_memory import own_memory
from sharesd.models.checkpoint import identity, weight_files
from sharesd.models.decoder import Decoder
from sharesd.models.hub import resolve
from sharesd.models.loader import embedding_dtype
from sharesd.models.prefill import CHUNK, LONG_CHUNK
from sharesd.speculation.draft_tree import slots_to_go_on
from sharesd.weights.backend import Home, OnGpu
from sharesd.weights.measured_acceptance import kept_acceptance
from sharesd.weights.offloaded_decoder import rows_of_piece
from sharesd.weights.packing import packed_for_cpu

LINEARS = ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")
"""The linears of a block, which are nearly all of it."""
ASSUMED = {8: 0.95, 4: 0.80, 3: 0.45, 2: 0.20}
"""Bits of a drafter that shares the target's KV -> how often its next token holds, until answers have told. (4 bits:
0.6 to 0.8 for a model of 135M parameters, 0.97 for published ones of 7B.)"""
TREE_TOPS = (2, 4)
"""Nodes of a level of a draft tree that have children, and how many each has, where the plan decides that."""
TREE_MISSES = {8: {0: 1.0, 2: 0.5, 4: 0.5}, 4: {0: 1.0, 2: 0.8, 4: 0.6}}
"""Bits of a drafter -> nodes of a level that have children -> how often a level of such a tree misses, of the times
that a chain's token does. (What 8 bits miss is nearly always their second guess. Fewer bits count as 4.)"""
ASSUMED_WEIGHT = 100
"""Drafted tokens of answers that count as much as what is assumed: one short answer tells little of the next."""
ASSUMED_OTHERS, ASSUMED_TABLES = 0.6, 0.2
"""How often the next token of heads and other models holds, and of tables. (These gave 1.1 tokens a round in the first
hundred tokens that they saw, and 1.9 in eighty answers.)"""
TIMED_ROWS = (1, 9, 1 + DEPTHS[-1])
"""Rows of steps whose products are timed."""
PROBE_BYTES, PROBED_BYTES = 2**25, 2**27
"""Bytes of the weights that are timed, and of all copies of them, which are timed in turns: more than caches hold."""
SOME_ROWS = 16
"""Rows of a quantized matrix whose bytes are counted: the kernel takes so many together."""
RUNTIME_BYTES = 64 * 10**6
"""What Python, torch and the tokenizer take beyond what they have when this is asked."""
DEVICE_BYTES = 512 * 10**6
"""What libraries take on a GPU, besides CUDA's own context: workspaces, pools of graphs, gaps between tensors."""
SOLVING_BYTES = 8 * 4 * 2**24
"""What it takes to solve a part of a linear there."""


class Parts:
    """What the parts of a decoder take, in memory and in time. Its tensors are on the meta device."""

    def __init__(
        self, decoder: Decoder, config: EngineConfig, modes: Sequence[Mode], folder: Path | None, home: Home
    ) -> None:
        """`folder`: None where no files have the weights. `home`: where the decoder is to be."""
        self.decoder, self.config, self._folder, self._home = decoder, config, folder, home
        self._on_gpu = isinstance(home, OnGpu)
        self._needs = {*config.drafters_of(*modes)}
        self._copies = "classic" in self._needs and config.draft_model is None
        self._dtype = decoder.embed.weight.dtype
        self._quantizers: dict[QuantConfig, LinearQuantizer] = {}
        self.quants = self._choices()
        self.num_blocks = len(decoder.blocks)
        self._pieces, self._piece_rows = self._head_pieces()
        self.num_records = self.num_blocks + self._pieces

    def _head_pieces(self) -> tuple[int, int]:
        """How many records rows of the head fill, and how many rows in each; none where drafts read all of it."""
        record = self.layout(None)
        if self._on_gpu:  # a head that is tied is the embedding, which is needed there
            return 0, 0
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
        if "share" not in self._needs and not self._copies:
            return [None]
        if not self.config.offload.choose_bits or quant.proj_bits or quant.method != "hqq":
            return [quant]
        return [replace(quant, bits=bits, head_bits=quant.head_bits and bits) for bits in (4, 8)]

    def layout(self, quant: QuantConfig | None) -> Layout:
        """Of a block's record: what drafts do not read at full precision."""
        shares = quant is not None and "share" in self._needs
        skipped = () if quant is None or not shares else self._skipped(quant)
        tensors = {f"{path}.weight": self._laid(self._linear(0, path)) for path in LINEARS if path not in skipped}
        return Layout.of(tensors)

    def content(self, quant: QuantConfig | None) -> Content:
        """What records hold."""
        what = {"dtype": str(self._dtype), "order": "as it is"}
        if not self._on_gpu:
            assert self._folder is not None
            what |= {"checkpoint": identity(self._folder), "order": "packed for the CPU kernel"}
        return Content(what=what, layout=self.layout(quant), num_blocks=self.num_records)

    def sizes(self) -> Sizes:
        """What is there whatever drafts."""
        host = own_memory() + RUNTIME_BYTES
        fixed = self._small() + self._tail + max(self._decoding(), self._loading())
        return Sizes(
            num_blocks=self.num_records,
            block=self.layout(None).record_bytes,
            fixed=fixed + (DEVICE_BYTES if self._on_gpu else host),
            host=host if self._on_gpu else 0,
        )

    def _small(self) -> int:
        """Bytes of all weights but the linears', and of tables. On a CPU the embedding may stay in its file; packed, a
        tied head is not the embedding.
        """
        decoder, tied = self.decoder, self.decoder.config.tied
        linears = {id(self._linear(i, path).weight) for i in range(self.num_blocks) for path in LINEARS}
        small = sum(p.nbytes for p in decoder.parameters() if id(p) not in {*linears, id(decoder.head.weight)})
        if not self._on_gpu:
            assert self._folder is not None
            stays_in_file = embedding_dtype(self._folder) == self._dtype
            small += decoder.embed.weight.nbytes * (int(tied) - int(stays_in_file))
        return small + sum(buffer.nbytes for buffer in decoder.buffers())

    def _decoding(self) -> int:
        """Bytes that come when everything has been loaded: KV, logits, what a prompt takes."""
        c = self.decoder.config
        rows = self.config.max_batch * (1 + max(self.config.most_draft, DEPTHS[-1]))
        logits = rows * c.vocab_size * (2 * self._dtype.itemsize + 3 * 4)
        longest = CHUNK if self._on_gpu else LONG_CHUNK  # tokens of a prompt at a time, one row after the other
        read = min(longest, self.config.planned_context)
        activations = read * (4 * c.hidden_size + 3 * c.mlp_size) * self._dtype.itemsize
        return self._kv() + logits + activations + self._masked(read)

    def _masked(self, read: int) -> int:
        """Bytes of a prompt's attention on a GPU where flash attention does not do it: scores, or a mask, twice."""
        c = self.decoder.config
        if not self._on_gpu or flash_reads(self._home.device, self._dtype, c.head_dim, c.attn_softcap):
            return 0
        rows, slots = c.num_heads * read, self.config.planned_context
        if c.attn_softcap:
            return 2 * 4 * rows * slots
        return (1 + self._dtype.itemsize) * rows // c.num_kv_heads * slots

    def _loading(self) -> int:
        """Bytes that are needed until then: a block in both forms, or codes of the head before they are packed."""
        c, block = self.decoder.config, self.layout(None).record_bytes
        codes = 0 if self.quants == [None] else c.vocab_size * c.hidden_size
        if self._on_gpu:
            return max(block, 3 * codes) + (SOLVING_BYTES if codes else 0)
        return max(3 * block // 2, codes)

    @property
    def _tail(self) -> int:
        """Bytes of what must stay of the head."""
        weight = self._laid(self.decoder.head)
        if not self._pieces:
            return weight.nbytes
        return weight.nbytes - self._pieces * self._piece_rows * weight[0].nbytes // weight.shape[2]

    def _laid(self, linear: nn.Linear) -> Tensor:
        """The weight of a linear in the layout of the device."""
        weight = self._home.laid(linear).weight
        assert isinstance(weight, Tensor)
        return weight

    def resident(self, quant: QuantConfig | None) -> int:
        """Bytes of all that drafts, and of what must stay for it."""
        num = 0
        if quant is not None:
            num += (("share" in self._needs) + self._copies) * sum(self._low_bytes(quant).values())
            if "share" in self._needs:
                num += self.num_blocks * (self.layout(None).record_bytes - self.layout(quant).record_bytes)
        if "classic" in self._needs:
            num += self._kv()
            if quant is not None and quant.head_bits is None:
                num += self._laid(self.decoder.head).nbytes
        second = self.config.draft_model if "classic" in self._needs else None
        for path in (second, *map(self.config.head_of, sorted(self._needs & {*HEADS}))):
            if path is not None:
                num += sum(file.stat().st_size for file in weight_files(resolve(path)))
        return num

    @property
    def may_draft_trees(self) -> bool:
        """Whether quantized weights are all that drafts, but for tables. On a GPU nobody gets trees who does not ask:
        it shows when all has been loaded whether their rows have the bits of chains.
        """
        others = {*HEADS} if self._copies else {"classic", *HEADS}
        return bool(self._needs & {"share", "classic"} and not self._needs & others) and not self._on_gpu

    @property
    def tables_alone(self) -> bool:
        """Whether tables are all that drafts."""
        return {*self.config.drafters_of(self.config.mode)} <= {*TABLES}

    def drafter(self, quant: QuantConfig | None, top: int) -> Drafter:
        """What drafts, as the plan sees it: trees in which so many nodes of a level have children; chains, if 0."""
        trees, mode, bits = top > 0, self.config.mode, None if quant is None else quant.bits
        held, step, seen = steady(ASSUMED_TABLES if self.tables_alone else ASSUMED_OTHERS), 0.0, 0
        if mode == "naive":
            held = ()
        elif quant is not None and mode not in HEADS and not self.tables_alone:
            alpha, seen = self._acceptance(mode, quant, top)
            held, step = steady(alpha), self._draft_seconds(quant, rows=max(1, top))
        return Drafter(
            name=(mode if bits is None else f"{mode}, {bits} bits") + (f", trees of {top}" if trees else ""),
            nodes=(self.config.given_tree[2] if self.config.given_tree is not None else DEPTHS[-1]) if trees else 0,
            bits=bits,
            resident=self.resident(quant),
            step=step,
            held=held,
            seen=seen,
            block=self.layout(quant).record_bytes,
            stays=quant.skip_layers if quant is not None and "share" in self._needs else (),
        )

    def _acceptance(self, mode: str, quant: QuantConfig, top: int) -> tuple[float, int]:
        """How often the next token or level holds, as assumed and as answers have told of this shape, or else of
        another; and how many tokens of this shape told.
        """
        misses, missed, count = TREE_MISSES[max(quant.bits, 4)], 1 - ASSUMED[quant.bits], 0
        least = misses[max(misses)]
        for shape in (top, *misses):
            tries, held = (0, 0) if self._folder is None else kept_acceptance(self._folder, mode, quant, shape)
            if tries:
                told = (tries - held) / misses.get(shape, least)
                missed = (ASSUMED_WEIGHT * missed + told) / (ASSUMED_WEIGHT + tries)
                count = round(tries) if shape == top else 0
                break
        return max(0.0, 1 - misses.get(top, least) * missed), count

    def rates(self, disk: float, link: float) -> Rates:
        """Rates of this machine."""
        linear = self._probe()
        per_byte = {rows: self._seconds_per_byte(linear, rows) for rows in TIMED_ROWS}
        block = self.layout(None).record_bytes
        return Rates(
            disk=disk,
            link=link,
            block={rows: seconds * block for rows, seconds in per_byte.items()},
            rest={rows: seconds * self._tail for rows, seconds in per_byte.items()},
        )

    def step_seconds(self, quant: QuantConfig, rows: int) -> tuple[float, float, float]:
        """Time the products of a plain step, of one of `rows` rows, and of a draft step."""
        linear = self._probe()
        num_bytes = self.num_blocks * self.layout(None).record_bytes + self._laid(self.decoder.head).nbytes
        plain, several = (self._seconds_per_byte(linear, num) * num_bytes for num in (1, rows))
        return plain, max(plain, several), self._draft_seconds(quant, rows=1)

    def _draft_seconds(self, quant: QuantConfig, rows: int) -> float:
        """Of a draft step of so many rows: its products."""
        total = 0.0
        sizes = self._low_bytes(quant)
        for bits, num_bytes in sizes.items():
            low = self._home.low(_codes(self._probe_shape(), bits, quant, self._home.device))
            total += self._seconds_per_byte(low, rows) * num_bytes
        if quant.head_bits is None:
            total += self._seconds_per_byte(self._probe(), rows) * self._laid(self.decoder.head).nbytes
        return total

    def _seconds_per_byte(self, linear: nn.Module, rows: int) -> float:
        """Of a product, for each byte of weights that come from memory."""
        num_bytes = sum(tensor.nbytes for tensor in (*linear.parameters(), *linear.buffers()))
        copies = [linear, *(copy.deepcopy(linear) for _ in range(PROBED_BYTES // num_bytes - 1))]
        x_MK = torch.ones(rows, self.decoder.config.hidden_size, dtype=self._dtype, device=self._home.device)
        with torch.inference_mode():
            return self._home.seconds([partial(each, x_MK) for each in copies]) / num_bytes

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
        top, deepest, _ = config.given_tree or (max(TREE_TOPS), DEPTHS[-1] // max(TREE_TOPS), 0)
        overhang = longest + max(longest, 2 + top * deepest)
        if self._on_gpu:  # where prompts are read in padded pieces, and drafts are replayed
            overhang = max(overhang + longest, CHUNK)
        else:
            overhang += slots_to_go_on(top, deepest)
        return sum(kv_bytes(self.decoder, config, overhang))

    def _linear(self, block: int, path: str) -> nn.Linear:
        linear = self.decoder.blocks[block].get_submodule(path)
        assert isinstance(linear, nn.Linear)
        return linear

    def _probe_shape(self) -> tuple[int, int]:
        K = self.decoder.config.hidden_size
        return max(64, PROBE_BYTES // (K * self._dtype.itemsize) // 64 * 64), K

    def _probe(self) -> nn.Module:
        N, K = self._probe_shape()
        linear = nn.Linear(K, N, bias=False, device="meta")
        linear.weight = nn.Parameter(torch.ones(N, K, dtype=self._dtype, device=self._home.device), requires_grad=False)
        return self._home.laid(linear)


def kv_bytes(decoder: Decoder, config: EngineConfig, overhang: int) -> list[int]:
    """Bytes of each layer's keys and values, with so many slots behind the context."""
    c, dtype = decoder.config, decoder.embed.weight.dtype
    slots = round_slots(min(config.planned_context, decoder.max_context) + overhang)
    few = new_kv(1, c.num_kv_heads, 1, c.head_dim, dtype, torch.device("cpu"))
    per_slot = sum(tensor.nbytes for tensor in few) // round_slots(1)
    return [config.max_batch * slots * per_slot] * len(c.layers)


def quantizer_of(decoder: Decoder, quant: QuantConfig, solving: Solving | None = None) -> LinearQuantizer:
    """What would quantize a decoder on the meta device."""
    return LinearQuantizer(
        decoder,
        quant,
        head_name="head",
        layer_of=lambda path: int(path.split(".")[1]) if path.startswith("blocks.") else None,
        build=packed_for_cpu,
        device=torch.device("cpu"),
        solving=solving,
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
    return packed_for_cpu(_codes((SOME_ROWS, K), bits, quant, torch.device("cpu")), None).nbytes


def _codes(shape: tuple[int, ...], bits: int, quant: QuantConfig, device: torch.device) -> QuantizedWeight:
    """A solved matrix, without the solution."""
    N, K = shape
    group = K if bits == 8 else quant.group_size
    scale, q = torch.ones(N, K // group, device=device), torch.ones(N, K, dtype=torch.uint8, device=device)
    return QuantizedWeight(q=q, scale=scale, zero=scale, bits=bits, group_size=group)
