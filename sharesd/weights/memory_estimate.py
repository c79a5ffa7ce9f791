"""Memory and times of a decoder, estimated before any weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compile.attention import supports_flash
from compile.cpp_extension import kernels_version
from offload.block_layout import RecordLayout
from offload.plan import DEPTHS, PlannedDrafter, Rates, Sizes, constant_acceptance
from quant.config import QuantConfig
from quant.quantize_model import LinearQuantizer
from sharesd.config import EngineConfig, Mode
from sharesd.devices.host_memory import own_memory
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need
from sharesd.kvcache.recurrent import COPY_BYTES, DELTA_RING, most_copies
from sharesd.models.checkpoint import identity, is_stored, weight_files
from sharesd.models.decoder import Decoder
from sharesd.models.hub import resolve
from sharesd.models.loader import embedding_dtype
from sharesd.models.prefill import CHUNK, LONG_CHUNK
from sharesd.models.recurrent_layers import recurrent_sizes
from sharesd.weights.backend import WeightBackend
from sharesd.weights.head_in_pieces import rows_of_piece
from sharesd.weights.offload_rates import StepTimer, load_acceptance
from sharesd.weights.sizes import (
    StoredLinears,
    expanded_bytes,
    kv_bytes,
    kv_slots,
    linear_paths,
    quantized_bytes,
    quantizer_for,
)

if TYPE_CHECKING:
    from offload.block_file import StoreContent

TREE_TOPS = (2, 4)
"""Branchings of draft trees: children of a node, and parents per level."""
PRIOR_TOKENS = 100
"""Weight of the prior acceptance, in draft tokens: one answer says little."""
PRIOR_ACCEPTANCE, PRIOR_LOOKUP_ACCEPTANCE = 0.6, 0.2
"""Prior acceptance of heads and other models, and of lookup tables.

Measured for tables: 1.1 tokens a round in the first hundred tokens, and 1.9 in eighty answers.
"""
TIMED_ROWS = (1, 9, 1 + DEPTHS[-1])
RUNTIME_BYTES = 64 * 10**6
"""Bytes that Python, torch and the tokenizer allocate after the estimate."""
DEVICE_BYTES = 512 * 10**6
"""Bytes of libraries on a GPU: workspaces, graph pools and gaps."""
SOLVING_BYTES = 8 * 4 * 2**24
"""Bytes of solving a part of a linear on a GPU."""


class MemoryEstimate:
    """Memory and times of a decoder on the meta device."""

    def __init__(
        self, decoder: Decoder, config: EngineConfig, modes: Sequence[Mode], folder: Path | None, backend: WeightBackend
    ) -> None:
        self.decoder, self.config, self._folder, self._backend = decoder, config, folder, backend
        self._on_gpu = backend.kind == "cuda"
        self._needs = {*selection.active_drafters(config, *modes)}
        self._heads = registry.names("head")
        self._shares = bool(registry.those(self._needs, Need.QUANTIZED_TARGET))
        self._has_second = bool(registry.those(self._needs, Need.SECOND_MODEL))
        self._copies = self._has_second and selection.second_model(config) is None
        self._dtype = decoder.embed.weight.dtype
        self._stored = StoredLinears(decoder, folder) if folder is not None and is_stored(folder) else None
        self._paths = [tuple(linear_paths(block)) for block in decoder.blocks]
        kind = None if self._stored is None else self._stored.type(f"blocks.0.{self._paths[0][-1]}")
        self._timer = StepTimer(backend, self._dtype, decoder.config.hidden_size, kind)
        self._layouts: dict[frozenset[str], tuple[RecordLayout, ...]] = {}
        self._quantizers: dict[QuantConfig, LinearQuantizer] = {}
        self.quants = self._choices()
        self.num_blocks = len(decoder.blocks)
        self._pieces, self._piece_rows = self._head_pieces()

    def _head_pieces(self) -> tuple[int, int]:
        """Return number and rows of the head's records.

        There are none on a GPU, or if weights run as they are stored.
        """
        layouts = self._block_layouts(None)
        if self._on_gpu or self._stored is not None:  # a head that is tied is the embedding, which is needed there
            return 0, 0
        drafts_read = bool(self._needs.intersection(self._heads)) or any(
            quant is not None and quant.head_bits is None and self._shares for quant in self.quants
        )
        if drafts_read or any(self._block_layouts(quant) != layouts for quant in self.quants):
            return 0, 0
        rows = rows_of_piece(self.decoder.config.hidden_size, self._dtype, layouts[0].record_bytes)
        return (self.decoder.config.vocab_size - 1) // rows if rows else 0, rows

    def _choices(self) -> list[QuantConfig | None]:
        quant = self.config.quant
        if not self._shares and not self._copies:
            return [None]
        planned = quant.format.planned_bits
        if not self.config.offload.choose_bits or quant.proj_bits or quant.calibrated or not planned:
            return [quant]
        return [replace(quant, bits=bits, head_bits=quant.head_bits and bits) for bits in planned]

    def layouts(self, quant: QuantConfig | None) -> tuple[RecordLayout, ...]:
        """Return each record's layout: weights that drafts do not read in full."""
        if not self._pieces:
            return self._block_layouts(quant)
        rows = nn.Linear(self.decoder.config.hidden_size, self._piece_rows, False, "meta", self._dtype)
        return self._block_layouts(quant) + (RecordLayout.of({"weight": self._packed(rows)}),) * self._pieces

    def _block_layouts(self, quant: QuantConfig | None) -> tuple[RecordLayout, ...]:
        shares = quant is not None and self._shares
        paths = self._all_paths - (self._skipped(quant) if quant is not None and shares else set())
        if paths not in self._layouts:
            self._layouts[paths] = tuple(
                RecordLayout.of(
                    self._backend.record_tensors(
                        {path: self._weight(f"blocks.{i}.{path}") for path in self._paths[i] if path in paths}
                    )
                )
                for i in range(self.num_blocks)
            )
        return self._layouts[paths]

    @property
    def _all_paths(self) -> frozenset[str]:
        return frozenset(path for paths in self._paths for path in paths)

    def _records(self, quant: QuantConfig | None) -> tuple[int, ...]:
        """Return the bytes of each record."""
        return tuple(layout.record_bytes for layout in self.layouts(quant))

    def content(self, quant: QuantConfig | None) -> StoreContent:
        from offload.block_file import StoreContent  # only plans have files

        what = {"dtype": str(self._dtype), "order": "as it is"}
        if not self._on_gpu:
            assert self._folder is not None
            kernels = kernels_version() if is_stored(self._folder) else "the CPU kernel"  # blocks change with these
            what |= {"checkpoint": identity(self._folder), "order": f"packed for {kernels}"}
        return StoreContent(what=what, layouts=self.layouts(quant))

    def sizes(self) -> Sizes:
        host = own_memory() + RUNTIME_BYTES
        fixed = self._small() + self._tail + max(self._decoding(), self._loading())
        return Sizes(
            blocks=self._records(None),
            fixed=fixed + (DEVICE_BYTES if self._on_gpu else host),
            host=host if self._on_gpu else 0,
        )

    def _small(self) -> int:
        """Return bytes besides linears and the head."""
        decoder = self.decoder
        linears = {id(self._linear(i, path).weight) for i, paths in enumerate(self._paths) for path in paths}
        linears |= {id(decoder.head.weight), id(decoder.embed.weight)}
        small = sum(p.nbytes for p in decoder.parameters() if id(p) not in linears)
        return small + self._embedding() + sum(buffer.nbytes for buffer in decoder.buffers())

    def _embedding(self) -> int:
        """Return the embedding's bytes, unless the head or a file has them."""
        tie_word_embeddings, full = self.decoder.config.tie_word_embeddings, self.decoder.embed.weight.nbytes
        if self._stored is not None and (num_bytes := self._stored.nbytes("embed", self._backend.device)) is not None:
            return 0 if tie_word_embeddings else num_bytes
        if self._on_gpu:
            return 0 if tie_word_embeddings else full
        assert self._folder is not None
        return 0 if self._stored is None and embedding_dtype(self._folder) == self._dtype else full

    def _decoding(self) -> int:
        c = self.decoder.config
        rows = self.config.max_batch * (1 + max(self.config.max_draft_tokens, DEPTHS[-1]))
        logits = rows * c.vocab_size * (2 * self._dtype.itemsize + 3 * 4)
        longest = CHUNK if self._on_gpu else LONG_CHUNK  # tokens of a prompt at a time, one row after the other
        read = min(longest, self.config.planned_context)
        inner = c.intermediate_size
        if c.experts is not None:  # whose results are kept for this many rows, next to a sum in float32
            inner = max(inner, c.experts.intermediate_size) + 2 * c.hidden_size
        if c.delta is not None:
            inner += c.delta.inputs + c.delta.outputs
        elif any(c.conv_widths):  # thirds of the first product
            inner += c.hidden_size
        activations = read * (4 * c.hidden_size + 3 * inner) * self._dtype.itemsize
        if c.delta is not None and self._on_gpu:  # what `compile.cuda.delta_rule` makes of tokens
            activations += max(DELTA_RING + read, 2 * DELTA_RING * self.config.max_batch) * 4 * c.delta.inputs
        numbers = expanded_bytes(self.decoder, self.config, self._slots, on_gpu=self._on_gpu)
        return self._kv() + self._copies_of_states() + numbers + logits + activations + self._masked(read)

    def _copies_of_states(self) -> int:
        """Return bytes of earlier states with matrices."""
        recurrent = recurrent_sizes(self.decoder.config)
        if recurrent is None or recurrent.delta is None:
            return 0
        num_layers = sum(width > 0 for width in self.decoder.config.conv_widths)
        of_row = most_copies(self.config.planned_context) * num_layers * recurrent.nbytes(recurrent.width, self._dtype)
        return min(COPY_BYTES, self.config.max_batch * of_row)

    def _masked(self, read: int) -> int:
        """Return bytes of two scores or masks; 0 with flash attention."""
        c = self.decoder.config
        if not self._on_gpu or supports_flash(self._backend.device, self._dtype, c.head_dim, c.attn_logit_softcapping):
            return 0
        rows, slots = c.num_attention_heads * read, self.config.planned_context
        if c.attn_logit_softcapping:
            return 2 * 4 * rows * slots
        return (1 + self._dtype.itemsize) * rows // c.num_key_value_heads * slots

    def _loading(self) -> int:
        """Return bytes of loading a block or the head, plus solving.

        Stored weights are solved as float32.
        """
        c, block = self.decoder.config, max(self._records(None))
        if self.quants == [None]:
            return block if self._on_gpu else 3 * block // 2
        codes, wide, wide_head = c.vocab_size * c.hidden_size, 0, 0
        if self._stored is not None:
            wide = 4 * max(
                self._linear(i, path).weight.numel() for i, paths in enumerate(self._paths) for path in paths
            )
            wide_head = 4 * codes
        if self._on_gpu:
            return max(block + wide, 3 * codes + wide_head) + SOLVING_BYTES
        return max(3 * block // 2 + wide, codes + wide_head)

    @property
    def _tail(self) -> int:
        weight = self._weight("head")
        if not self._pieces:
            return weight.nbytes
        return weight.nbytes - self._pieces * self._piece_rows * weight[0].nbytes // weight.shape[2]

    def _weight(self, path: str) -> Tensor:
        """Return a linear's weight in memory, on the meta device."""
        stored = None if self._stored is None else self._stored.nbytes(path, self._backend.device)
        if stored is None:
            linear = self.decoder.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            return self._packed(linear)
        dtype = torch.int32 if self._on_gpu else torch.uint8
        return torch.empty(stored // dtype.itemsize, dtype=dtype, device="meta")

    def _packed(self, linear: nn.Linear) -> Tensor:
        weight = self._backend.pack(linear).weight
        assert isinstance(weight, Tensor)
        return weight

    def resident(self, quant: QuantConfig | None) -> int:
        """Return the bytes of drafters, and of tensors that they keep resident."""
        num = 0
        if quant is not None:
            num += ((self._shares) + self._copies) * sum(self._quantized_bytes(quant).values())
            if self._shares:
                num += sum(self._records(None)) - sum(self._records(quant))
            if self._copies and self._stored is not None:
                num += self._stored.nbytes("embed", self._backend.device) or self.decoder.embed.weight.nbytes
        if self._has_second:
            num += self._kv()
            if quant is not None and quant.head_bits is None:
                num += self._weight("head").nbytes
        second = selection.second_model(self.config) if self._has_second else None
        heads = [selection.head_of(self.config, mode) for mode in self._heads if mode in self._needs]
        for path in (second, *heads):
            if path is not None:
                num += sum(
                    file.stat().st_size
                    for file in weight_files(
                        resolve(path, ignored=self.config.ignore_keys, trust_remote_code=self.config.trust_remote_code)
                    )
                )
        inside = [registry.spec_of(mode).inside for mode in self.config.inner_heads if mode in self._needs]
        assert self._folder is not None or not inside
        return num + sum(registry.imported(f"{module}:stored_bytes")(self._folder) for module in inside)

    @property
    def may_draft_trees(self) -> bool:
        """True if quantized weights or tables draft trees; False on a GPU.

        Trees that grow during verification would write more slots than recurrent layers keep.
        """
        quantized = (self._shares or self._copies) and not any(self.decoder.config.conv_widths)
        others = self._needs.intersection(self._heads) or (self._has_second and not self._copies)
        return quantized and not others and not self._on_gpu

    @property
    def tables_alone(self) -> bool:
        return {*selection.active_drafters(self.config, self.config.mode)} <= {*registry.names("table")}

    def drafter(self, quant: QuantConfig | None, top: int) -> PlannedDrafter:
        """Return a drafter of trees (`top` parents per level) or chains (0)."""
        trees, mode, bits = top > 0, self.config.mode, None if quant is None else quant.bits
        cumulative_acceptance, step, seen = (
            constant_acceptance(PRIOR_LOOKUP_ACCEPTANCE if self.tables_alone else PRIOR_ACCEPTANCE),
            0.0,
            0,
        )
        if mode == registry.NAIVE:
            cumulative_acceptance = ()
        elif quant is not None and mode not in self._heads and not self.tables_alone:
            alpha, seen = self._acceptance(mode, quant, top)
            cumulative_acceptance, step = constant_acceptance(alpha), self._draft_seconds(quant, rows=max(1, top))
        return PlannedDrafter(
            name=(mode if bits is None else f"{mode}, {bits} bits") + (f", trees of {top}" if trees else ""),
            nodes=(self.config.explicit_tree[2] if self.config.explicit_tree is not None else DEPTHS[-1])
            if trees
            else 0,
            bits=bits,
            resident=self.resident(quant),
            step=step,
            cumulative_acceptance=cumulative_acceptance,
            seen=seen,
            blocks=self._records(quant),
            resident_blocks=quant.skip_layers if quant is not None and self._shares else (),
        )

    def _acceptance(self, mode: str, quant: QuantConfig, top: int) -> tuple[float, int]:
        """Return the acceptance of a token or level, and its measurements' number."""
        misses, missed, count = quant.format.tree_misses[quant.bits], 1 - quant.format.acceptance[quant.bits], 0
        widest = misses[max(misses)]
        for shape in (top, *misses):
            tries, hits = (0, 0) if self._folder is None else load_acceptance(self._folder, mode, quant, shape)
            if tries:
                num_missed = (tries - hits) / misses.get(shape, widest)
                missed = (PRIOR_TOKENS * missed + num_missed) / (PRIOR_TOKENS + tries)
                count = round(tries) if shape == top else 0
                break
        return max(0.0, 1 - misses.get(top, widest) * missed), count

    def rates(self, disk: float, link: float) -> Rates:
        per_byte = dict(zip(TIMED_ROWS, self._timer.full(TIMED_ROWS), strict=True))
        records = self._records(None)
        block = sum(records) / len(records)
        return Rates(
            disk=disk,
            link=link,
            block={rows: seconds * block * self._share_of_blocks(rows) for rows, seconds in per_byte.items()},
            rest={rows: seconds * self._tail for rows, seconds in per_byte.items()},
        )

    def step_seconds(self, quant: QuantConfig, rows: int) -> tuple[float, float, float]:
        """Return measured seconds of plain, wider (`rows`) and draft steps."""
        blocks, head = sum(layout.record_bytes for layout in self._block_layouts(None)), self._weight("head").nbytes
        plain, several = (
            seconds * (self._share_of_blocks(num) * blocks + head)
            for num, seconds in zip((1, rows), self._timer.full((1, rows)), strict=True)
        )
        return plain, max(plain, several), self._draft_seconds(quant, rows=1)

    def _draft_seconds(self, quant: QuantConfig, rows: int) -> float:
        if quant.format.keeps_weights:
            blocks = sum(layout.record_bytes for layout in self._block_layouts(None))
            read = self._share_of_blocks(rows, quant.experts) * blocks + self._weight("head").nbytes
            return self._timer.full([rows])[0] * read
        total = 0.0
        sizes = self._quantized_bytes(quant, rows)
        for bits, num_bytes in sizes.items():
            total += self._timer.quantized(quant, bits, rows) * num_bytes
        if quant.head_bits is None:
            total += self._timer.full([rows])[0] * self._weight("head").nbytes
        return total

    def _quantized_bytes(self, quant: QuantConfig, rows: int = 0) -> dict[int, int]:
        """Return bytes by bits; with `rows` those that a step reads."""
        found: dict[int, int] = {}
        for task in self._quantizer(quant).tasks:
            share = self._share_read(task.path, rows, quant.experts) if rows else 1.0
            found[task.bits] = found.get(task.bits, 0) + round(share * quantized_bytes(self.decoder, task, quant))
        return found

    def _share_of_blocks(self, rows: int, chosen: int | None = None) -> float:
        """Return the share of the blocks' bytes that a step of this many rows reads, see `_share_read`."""
        places = [place for layout in self._block_layouts(None) for place in layout.places]
        read = sum(self._share_read(place.name, rows, chosen) * place.nbytes for place in places)
        return read / sum(place.nbytes for place in places)

    def _share_read(self, path: str, rows: int, chosen: int | None) -> float:
        """Return the share of a linear that rows read: of an expert's, the chance that one of them chose it.

        `chosen`: experts of a token; None: as many as the target has.
        """
        experts = self.decoder.config.experts
        if experts is None or ".experts." not in path:
            return 1.0
        return 1.0 - (1.0 - (chosen or experts.num_experts_per_tok) / experts.num_experts) ** rows

    def _skipped(self, quant: QuantConfig) -> set[str]:
        paths = [task.path.split(".", 2) for task in self._quantizer(quant).tasks if task.layer is not None]
        return set(self._all_paths) - {path for _, _, path in paths}

    def _quantizer(self, quant: QuantConfig) -> LinearQuantizer:
        if quant not in self._quantizers:
            self._quantizers[quant] = quantizer_for(self.decoder, quant)
        return self._quantizers[quant]

    @property
    def _slots(self) -> int:
        config = self.config
        width = 1 + max(DEPTHS[-1], config.max_draft_tokens)
        top, deepest, _ = config.explicit_tree or (max(TREE_TOPS), DEPTHS[-1] // max(TREE_TOPS), 0)
        context, on_gpu = min(config.planned_context, self.decoder.max_context), self._on_gpu
        return kv_slots(context, width, tree=(top, deepest), ahead=on_gpu, prefetches=not on_gpu, pads=on_gpu)

    def _kv(self) -> int:
        return sum(kv_bytes(self.decoder, self.config, self._slots))

    def _linear(self, block: int, path: str) -> nn.Linear:
        linear = self.decoder.blocks[block].get_submodule(path)
        assert isinstance(linear, nn.Linear)
        return linear
