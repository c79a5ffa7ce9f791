"""Options of one start, and the facts found so far.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import Need, Support


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Options, and facts about device and model that were found so far."""

    config: EngineConfig
    modes: tuple[str, ...]
    drafters: frozenset[str]
    """Active drafters of `modes`.

    Those of mode auto are included once they are chosen.
    """
    replicas: int | None = None
    launched: int = 1
    """Processes that a launcher started to share prompts."""
    quant_skip: tuple[str, ...] = ()
    """`--quant-skip` beside `--draft-quant auto`."""
    unsupported: str | None = None  # reason why the target is no native decoder
    device: str = "cpu"
    compile: str = "auto"
    """Compile mode, `auto` resolved."""
    has_triton: bool = True
    draft_device: str | None = None
    num_stages: int = 1
    has_device_memory: bool = False
    """True if the device has memory of its own.

    Offloaded blocks are then in host memory.
    """
    in_memory: bool = False
    """True if tensors replace the checkpoint's files."""
    has_block_source: bool = False
    """True if the caller offloads blocks itself."""

    @classmethod
    def of(cls, config: EngineConfig, modes: Sequence[str] = (), **facts: object) -> Combination:
        """Return the combination of a config and its active drafters."""
        chosen = tuple(modes or (config.mode,))
        drafters = frozenset(selection.active_drafters(config, *chosen))
        return cls(config=config, modes=chosen, drafters=drafters, **facts)  # type: ignore[arg-type]

    @property
    def on_gpu(self) -> bool:
        """True on a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def blocks_obstacle(self) -> str | None:
        """Option that stored weights do not go with."""
        config = self.config
        options = {
            "--lora": config.lora is not None,
            "--compile": config.compile not in ("auto", "native")
            and not (self.on_gpu or config.device.startswith("cuda")),
        }
        return next((name for name, is_given in options.items() if is_given), None)

    @property
    def runs_blocks(self) -> bool:
        """True if the options ask for stored or quantized weights."""
        return self.config.dequantize is False or self.config.target_quant is not None

    @property
    def blocks_flag(self) -> str:
        """The option that asks for such weights."""
        return "--no-dequantize" if self.config.target_quant is None else "--target-quant"

    @property
    def without_blocks(self) -> str:
        """The remedy that runs numbers instead."""
        return "take --dequantize" if self.config.target_quant is None else "drop --target-quant"

    @property
    def nested_obstacle(self) -> str | None:
        """Reason against drafts by upper halves, if they were asked for."""
        config = self.config
        if config.head_quant is not None and config.head_quant.format.is_nested:
            return "trained heads are not stored as Q8_0; leave out --head-quant"
        if not config.quant.format.is_nested:
            return None
        if self.needs(Need.SECOND_MODEL) and selection.second_model(config) is None:
            return "drafts would be a second model of as many bytes; take mode share"
        if not self.needs(Need.QUANTIZED_TARGET):
            return None
        if config.dequantize is not False:
            return "the weights do not run as they are stored; take hqq:4:64,head=4"
        if config.split.enabled or config.tensor_parallel > 1:
            return "the weights are shared out; take hqq:4:64,head=4"
        return f"{self.device} has no kernel for it yet; take --device cpu" if self.on_gpu else None

    @property
    def q8_obstacle(self) -> str | None:
        """Reason against KV in 8 bits, if that was asked for."""
        if self.config.kv_dtype == "auto":
            return None
        if self.config.kernels == "torch" or (self.on_gpu and not self.has_triton):
            return "KV in 8 bits takes this project's kernels, and torch's run here"
        return self.unsupported and f"only native decoders keep KV in 8 bits: {self.unsupported}"

    @property
    def heads(self) -> list[str]:
        """Active drafters that are trained heads."""
        return [name for name in registry.names("head") if name in self.drafters]

    @property
    def not_sharded(self) -> tuple[str, ...]:
        """Active drafters that need the whole target on one device."""
        return registry.lacking(self.drafters - {registry.NAIVE}, Support.TENSOR_PARALLEL)

    def needs(self, need: Need) -> bool:
        """True if an active drafter has this need."""
        return bool(registry.those(self.drafters, need))

    @property
    def has_quantized_linears(self) -> bool:
        """True if linears are quantized for this project's kernels."""
        config = self.config
        second = self.needs(Need.SECOND_MODEL) and selection.second_model(config) is None
        copies = second or self.needs(Need.QUANTIZED_TARGET)
        head_quant = config.head_quant if self.heads else None
        quants = (config.quant if copies else None, head_quant)
        return any(quant is not None and quant.format.solver is not None for quant in quants)
