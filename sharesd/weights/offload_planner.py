"""Offload plans from a config and a checkpoint's header: sizes, limits and measured rates for `offload.planner`.

No weights are read for it: a decoder on the meta device tells what each part will take.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compile.attention import MAX_STEP
from compile.cpp_extension import cache_root
from offload.block_file import Content
from offload.disk_reader import read_rate
from offload.planner import DEPTHS, DoesNotFit, Limits, Plan, make_plan, show_bytes
from offload.transfer import LinkError
from sharesd.config import EngineConfig, Mode
from sharesd.devices.host_memory import free_memory
from sharesd.devices.selection import device_of, dtype_of
from sharesd.models.checkpoint import weight_files
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig, Unsupported
from sharesd.models.hub import resolve
from sharesd.models.loader import decoder_config
from sharesd.models.progress import Progress, silent
from sharesd.weights.backend import Home, OnGpu, home_of
from sharesd.weights.memory_estimate import TREE_TOPS, Parts

log = logging.getLogger(__name__)

SHORTER = (1024, 512, 256)
"""Contexts that are tried where the usual one leaves no room for all weights."""
LEFT_FREE = 0.05
"""Share of free memory that is left to others where no limit is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """A plan with all that it takes to carry it out."""

    plan: Plan
    config: EngineConfig
    """With the drafter's bits and the longest draft of the plan, where these were left to it."""
    content: Content
    """What each record holds, and on a CPU what the store does."""
    folder: Path
    """Of stores."""


def plan_for(
    config: EngineConfig, modes: Sequence[Mode], *, progress: Progress = silent, in_memory: bool = False
) -> Offloading | None:
    """How a model that does not fit in memory runs all the same; None where nobody set a limit and all of it stays.
    `in_memory`: its folder has no weights, which are made by the caller.

    Raises ValueError where the limits leave no way, or something else that was asked for prevents it. A folder or a
    limit without effect is a warning.
    """
    found = _plan_for(config, modes, progress, in_memory)
    if config.offload.folder is not None and (found is None or not found.plan.offloads):
        log.warning("--offload-dir: no effect, all of the model stays in memory")
    return found


def _plan_for(config: EngineConfig, modes: Sequence[Mode], progress: Progress, in_memory: bool) -> Offloading | None:
    wanted = config.offload
    always = wanted.limited or wanted.when == "plan-only"
    if wanted.when == "off":
        return None
    if config.split.wanted:
        if always:
            raise ValueError("no plan for offloading: the model is split among devices, which keep all of it")
        return None
    device = device_of(config.device)
    dtype = dtype_of(config.dtype, device)
    home = home_of(device, dtype, 1 + max(DEPTHS[-1], config.most_draft), config.max_batch)
    problem, folder = _unsuited(config, home, in_memory), resolve(config.target, progress=progress)
    try:
        shape = decoder_config(folder)
    except Unsupported as reason:
        problem = problem or str(reason)
    if problem is not None:
        if always:
            raise ValueError(f"no plan for offloading: {problem}")
        return None
    limits = _limits(config, home)
    if not always and not in_memory and _plainly_fits(folder, shape, config, limits.device):
        return None
    decoder, weights = Decoder(shape, dtype=dtype, device="meta"), None if in_memory else folder

    def all_stays(config: EngineConfig, modes: Sequence[Mode]) -> bool:
        return _bytes_of_all(Parts(decoder, config, modes, weights, home)) <= limits.device

    model = Parts(decoder, config, modes, weights, home)
    sizes = model.sizes()
    if not always and _bytes_of_all(model) <= limits.device:
        return None
    chosen = not always and isinstance(home, OnGpu) and config.max_context == "auto"
    if chosen and any(all_stays(replace(config, max_context=tokens), modes) for tokens in SHORTER):
        return None  # the context becomes what there is room for
    place = Path(wanted.folder) if wanted.folder is not None else cache_root() / "offload"
    contents = {quant: model.content(quant) for quant in model.quants}
    disk, link = math.inf, math.inf
    if isinstance(home, OnGpu):
        link = min(home.link_rate(), wanted.rate or math.inf)
    else:
        disk = _disk_rate(folder, place, list(contents.values()), wanted.rate)
        if not any(content.path(place).exists() for content in contents.values()):
            limits = replace(limits, disk=_free_disk(place))
    rates = model.rates(disk, link)
    free_length = wanted.choose_depth and config.num_draft is None and config.given_tree is None
    given = (0 if config.given_tree is None else config.given_tree[0],)
    may_choose = free_length and config.tree == "auto" and wanted.choose_trees
    tops = (0, *TREE_TOPS) if may_choose and model.may_draft_trees else given
    drafters = {(quant, top): model.drafter(quant, top) for quant in model.quants for top in tops}
    longest = MAX_STEP - 1 if isinstance(home, OnGpu) else DEPTHS[-1]
    most = longest if free_length else config.given_tree[1] if config.given_tree is not None else config.most_draft
    home.give_back()  # what was timed
    remedy = _would_stay(config, modes, all_stays) if isinstance(home, OnGpu) and not always else ""
    try:
        plan = make_plan(sizes, limits, rates, list(drafters.values()), most)
    except DoesNotFit as error:
        others = home.held_by_others() if isinstance(home, OnGpu) else ""
        raise DoesNotFit(f"{error}{others}{remedy and f'; all would fit with {remedy}'}") from None
    if plan.offloads and remedy:
        log.warning("weights come from the host's memory, which is slow; all would stay on %s with %s", device, remedy)
    if limits.host is not None and wanted.host_memory is not None and not plan.offloads:
        log.warning("--cpu-memory-limit: no effect, all of the model stays on %s", device)
    quant, top = next(choice for choice, drafter in drafters.items() if drafter.name == plan.drafter)
    if plan.offloads:
        config = replace(config, quant=quant or config.quant, max_context=config.planned_context)
        if free_length and plan.nodes:
            config = replace(config, tree=(top, plan.depth, min(plan.nodes, top + (plan.depth - 1) * top**2)))
        elif free_length and model.tables_alone:  # whose guesses cost nothing, and are trees
            config = replace(config, max_draft=most)
        elif free_length:
            config = replace(config, max_draft=max(plan.depth, 1))
    return Offloading(plan=plan, config=config, content=contents[quant], folder=place)


def _bytes_of_all(model: Parts) -> int:
    """Bytes of a model all of which stays, with the smallest drafter."""
    sizes = model.sizes()
    return sizes.fixed + min(model.resident(quant) for quant in model.quants) + sizes.num_blocks * sizes.block


def _would_stay(
    config: EngineConfig, modes: Sequence[Mode], all_stays: Callable[[EngineConfig, Sequence[Mode]], bool]
) -> str:
    """Options with which all of the model would stay, each by itself; "" for none."""
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
    if {*config.drafters_of(*modes)} - {"naive"} and all_stays(replace(config, mode="naive", draft=None), ("naive",)):
        found.append("--mode naive")
    return " or ".join(found)


def _limits(config: EngineConfig, home: Home) -> Limits:
    """As given, else what is free. ValueError for those that the device cannot have."""
    wanted = config.offload
    host = float(wanted.host_memory if wanted.host_memory is not None else (1 - LEFT_FREE) * free_memory())
    if not isinstance(home, OnGpu):
        if wanted.device_memory is not None:
            log.warning("--gpu-memory-limit: no effect on a CPU; --cpu-memory-limit is for its memory")
        return Limits(device=host)
    if wanted.folder is not None:
        log.warning("--offload-dir: no effect, blocks travel from the host's memory to a GPU")
    free = home.free_memory()
    given = wanted.device_memory
    if given is not None and given > free:
        raise ValueError(
            f"--gpu-memory-limit is {show_bytes(given)} and {home.device} has {show_bytes(free)} free; give less, or "
            "end what else runs there"
        )
    return Limits(device=float(given if given is not None else (1 - LEFT_FREE) * free), host=host, disk=None)


def _plainly_fits(folder: Path, shape: DecoderConfig, config: EngineConfig, limit: float) -> bool:
    """Whether there is so much memory that nobody has to count: starts are to be short."""
    weights = sum(file.stat().st_size for file in weight_files(folder))
    kv = len(shape.layers) * 2 * shape.num_kv_heads * shape.head_dim * config.planned_context * config.max_batch * 8
    return 6 * weights + 3 * kv + 10**9 < limit


def _unsuited(config: EngineConfig, home: Home, in_memory: bool) -> str | None:
    if isinstance(home, OnGpu):
        if config.compile == "full":
            return "compile is 'full', and blocks that travel run one by one; take regional, or auto"
    elif in_memory:
        return "the weights are made in memory, and on a CPU they travel from files; write them, and give the folder"
    elif config.compile not in ("auto", "native"):
        return f"compile is {config.compile!r}; offloaded blocks run in the CPU kernel (--compile native)"
    if config.tensor_parallel > 1:
        return f"tensor_parallel is {config.tensor_parallel}, and ranks keep all of their weights; drop one of the two"
    return None


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
