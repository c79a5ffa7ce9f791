"""Offload plans from a config and a checkpoint's header, without reading weights."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compile.attention import MAX_STEP
from offload.plan import DEPTHS, DoesNotFit, Limits, Plan, show_bytes
from offload.transfer import LinkError
from sharesd.config import EngineConfig, Mode, OffloadConfig
from sharesd.devices.host_memory import free_memory
from sharesd.devices.selection import device_of, dtype_of
from sharesd.drafters.registry import NAIVE
from sharesd.drafters.selection import active_drafters
from sharesd.field_types import DefaultLimit
from sharesd.models.checkpoint import Progress, silent, weight_files
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.hub import resolve_target
from sharesd.models.loader import native_config
from sharesd.weights.backend import WeightBackend, backend_for
from sharesd.weights.memory_estimate import TREE_TOPS, MemoryEstimate
from sharesd_files import cache_root

if TYPE_CHECKING:
    from offload.block_file import StoreContent

log = logging.getLogger(__name__)

SHORTER = (1024, 512, 256)
"""Shorter contexts, tried if weights do not fit next to the usual one."""
LEFT_FREE = 0.05
"""Share of free memory left to others if there is no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    plan: Plan
    config: EngineConfig
    """Config with the plan's bits and draft length; given options stay."""
    content: StoreContent
    folder: Path


def plan_for(
    config: EngineConfig,
    modes: Sequence[Mode],
    *,
    dtype: torch.dtype | None = None,
    progress: Progress = silent,
    in_memory: bool = False,
    obstacle: str | None = None,
    warn: Callable[[str], object] = log.warning,
) -> Offloading | None:
    """Plan offloading of a model that does not fit; None without need.

    `dtype`: as resolved; None: the config's. `in_memory`: the caller makes the weights. `obstacle`: reason against
    offloading. `warn` is called with each warning. ValueError for an obstacle despite limits, or limits that no plan
    stays within.
    """
    found = _plan_for(config, modes, dtype, progress, in_memory, obstacle, warn)
    if config.offload.folder is not None and (found is None or not found.plan.offloads):
        warn("--offload-dir: no effect, the whole model is resident")
    return found


def _plan_for(
    config: EngineConfig,
    modes: Sequence[Mode],
    dtype: torch.dtype | None,
    progress: Progress,
    in_memory: bool,
    obstacle: str | None,
    warn: Callable[[str], object],
) -> Offloading | None:
    wanted = config.offload
    always = wanted.limited or wanted.when == "plan-only"
    if wanted.when == "off" or (obstacle is not None and not always):
        return None
    if obstacle is not None:
        raise ValueError(f"no plan for offloading: {obstacle}")
    device = device_of(config.device)
    dtype = dtype or dtype_of(config.dtype, device)
    backend = backend_for(device, dtype, 1 + max(DEPTHS[-1], config.max_draft_tokens), config.max_batch)
    folder = resolve_target(config, progress=progress)
    try:
        shape = native_config(folder, device)
    except UnsupportedArchitecture as reason:
        if always:
            raise ValueError(f"no plan for offloading: {reason}; drop the limit of memory") from None
        return None
    limits = _limits(config, backend, warn)
    if not always and not in_memory and _plainly_fits(folder, shape, config, limits.device):
        return None
    decoder, weights = Decoder(shape, dtype=dtype, device="meta"), None if in_memory else folder

    def all_stays(config: EngineConfig, modes: Sequence[Mode]) -> bool:
        return _bytes_of_all(MemoryEstimate(decoder, config, modes, weights, backend)) <= limits.device

    model = MemoryEstimate(decoder, config, modes, weights, backend)
    sizes = model.sizes()
    if not always and _bytes_of_all(model) <= limits.device:
        return None
    chosen = not always and backend.kind == "cuda" and config.max_context == "auto"
    if chosen and any(all_stays(replace(config, max_context=tokens), modes) for tokens in SHORTER):
        return None  # the context becomes what there is room for
    place = Path(wanted.folder) if wanted.folder is not None else cache_root() / "offload"
    contents = {quant: model.content(quant) for quant in model.quants}
    if backend.kind == "cuda":
        rates = model.rates(math.inf, min(backend.link_rate(), wanted.rate or math.inf))
    else:
        rates = model.rates(_disk_rate(folder, place, list(contents.values()), wanted.rate), math.inf)
        if not any(content.path(place).exists() for content in contents.values()):
            limits = replace(limits, disk=_free_disk(place))
    free_length = wanted.choose_depth and config.num_draft is None and config.explicit_tree is None
    given_top, given_depth, _ = config.explicit_tree or (0, config.max_draft_tokens, 0)
    may_choose = free_length and config.tree == "auto" and wanted.choose_trees
    tops = (0, *TREE_TOPS) if may_choose and model.may_draft_trees else (given_top,)
    drafters = {(quant, top): model.drafter(quant, top) for quant in model.quants for top in tops}
    longest = MAX_STEP - 1 if backend.kind == "cuda" else DEPTHS[-1]
    max_draft = longest if free_length else given_depth
    backend.release_freed()  # what was timed
    from offload.planner import make_plan  # late: models that fit need no plan

    remedy = _would_stay(config, modes, all_stays) if backend.kind == "cuda" and not always else ""
    try:
        plan = make_plan(sizes, limits, rates, list(drafters.values()), max_draft)
    except DoesNotFit as error:
        others = backend.used_by_others() if backend.kind == "cuda" else ""
        raise DoesNotFit(f"{error}{others}{remedy and f'; all would fit with {remedy}'}") from None
    _prefer_the_cpu(shape, plan, config, backend, warn)
    if plan.offloads and remedy:
        warn(f"weights are offloaded to host memory, which is slow; all fit on {device} with {remedy}")
    _warn_of_idle_limit(plan, limits, wanted, warn)
    quant, top = next(choice for choice, drafter in drafters.items() if drafter.name == plan.drafter)
    if plan.offloads:
        config = replace(config, quant=quant or config.quant, max_context=config.planned_context)
        if free_length:
            config = replace(config, **_draft_options(plan, top, max_draft, model.tables_alone))
    return Offloading(plan=plan, config=config, content=contents[quant], folder=place)


def _prefer_the_cpu(
    shape: DecoderConfig, plan: Plan, config: EngineConfig, backend: WeightBackend, warn: Callable[[str], object]
) -> None:
    """Warn that a GPU reads more of an offloaded mixture than a CPU; DoesNotFit if neither it nor a limit was given."""
    if shape.experts is None or not plan.offloads or backend.kind == "cpu":
        return
    read = f"a pass reads all experts of {len(plan.offloaded)} blocks from host memory"
    if config.device == "auto" and config.offload.device_memory is None:
        raise DoesNotFit(f"{read}, and a CPU those that tokens choose; give --device {backend.device} to use it anyway")
    warn(f"{read}; --device cpu reads those that tokens choose")


def _warn_of_idle_limit(plan: Plan, limits: Limits, wanted: OffloadConfig, warn: Callable[[str], object]) -> None:
    if limits.host is not None and wanted.host_memory is not None and not plan.offloads:
        warn("--cpu-memory-limit: no effect, the whole model is resident on the GPU")


def _draft_options(plan: Plan, top: int, max_draft: int, tables_alone: bool) -> dict[str, Any]:
    """Return the options of the drafts that a plan chose."""
    if plan.nodes:
        return {"tree": (top, plan.depth, min(plan.nodes, top + (plan.depth - 1) * top**2))}
    if tables_alone:  # whose drafts cost nothing, and are trees
        return {"max_draft": DefaultLimit(max_draft)}
    return {"max_draft": DefaultLimit(max(plan.depth, 1))}


def _bytes_of_all(model: MemoryEstimate) -> int:
    sizes = model.sizes()
    return sizes.fixed + min(model.resident(quant) for quant in model.quants) + sum(sizes.blocks)


def _would_stay(
    config: EngineConfig, modes: Sequence[Mode], all_stays: Callable[[EngineConfig, Sequence[Mode]], bool]
) -> str:
    """Return options with which the model would be resident; "" for none."""
    found = []
    batches = [config.max_batch >> shift for shift in range(1, config.max_batch.bit_length())]
    for batch in batches:
        if all_stays(replace(config, max_batch=batch), modes):
            found.append(f"--max-batch {batch}")
            break
    for tokens in SHORTER:
        if tokens < config.planned_context and all_stays(replace(config, max_context=tokens), modes):
            found.append(f"--max-context {tokens}")
            break
    plain = replace(config, mode=NAIVE, draft=None)
    if {*active_drafters(config, *modes)} - {NAIVE} and all_stays(plain, (NAIVE,)):
        found.append(f"--mode {NAIVE}")
    return " or ".join(found)


def _limits(config: EngineConfig, backend: WeightBackend, warn: Callable[[str], object]) -> Limits:
    """Return limits as given or from free memory; ValueError above free memory."""
    wanted = config.offload
    host = float(wanted.host_memory if wanted.host_memory is not None else (1 - LEFT_FREE) * free_memory())
    if backend.kind == "cpu":
        if wanted.device_memory is not None:
            warn("--gpu-memory-limit: no effect on a CPU; --cpu-memory-limit is for its memory")
        return Limits(device=host)
    if wanted.folder is not None:
        warn("--offload-dir: no effect, blocks of a GPU are offloaded to host memory")
    free = backend.free_memory()
    given = wanted.device_memory
    if given is not None and given > free:
        raise ValueError(
            f"--gpu-memory-limit is {show_bytes(given)} and {backend.device} has {show_bytes(free)} free; give less, "
            "or end what else runs there"
        )
    return Limits(device=float(given if given is not None else (1 - LEFT_FREE) * free), host=host, disk=None)


def _plainly_fits(folder: Path, shape: DecoderConfig, config: EngineConfig, limit: float) -> bool:
    """True if memory is certainly sufficient, without a slow estimate."""
    weights = sum(file.stat().st_size for file in weight_files(folder))
    kv = (
        shape.num_hidden_layers
        * 2
        * shape.num_key_value_heads
        * shape.head_dim
        * config.planned_context
        * config.max_batch
        * 8
    )
    return 6 * weights + 3 * kv + 10**9 < limit


def _disk_rate(folder: Path, place: Path, contents: Sequence[StoreContent], limit: float | None) -> float:
    """Return bytes per second of the offload file, else of the checkpoint."""
    from offload.disk_reader import read_rate  # only plans read weights again

    stores = [content.path(place) for content in contents if content.path(place).exists()]
    file = stores[0] if stores else max(weight_files(folder), key=lambda path: path.stat().st_size)
    found: list[float] = []
    for direct in (True, False):
        try:
            found.append(read_rate(file, direct=direct))
        except LinkError as reason:
            log.debug("%s", reason)
    if not found:
        raise ValueError(
            f"{file} cannot be read, so that nothing can be planned; make it readable, or use --offload off"
        )
    return min(max(found), limit or math.inf)


def _free_disk(folder: Path) -> float:
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return float(shutil.disk_usage(nearest).free)
