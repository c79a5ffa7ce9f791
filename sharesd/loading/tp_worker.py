"""Tensor-parallel worker: its part of the target, and its step loop."""

from __future__ import annotations

from dataclasses import replace

from multigpu.process_group import Group
from sharesd.execution.step_compiler import StepCompiler
from sharesd.loading.resolve import resolve_config
from sharesd.loading.target import ModelLoader, prepare_cpu
from sharesd.models.decoder import Decoder
from sharesd.models.loader import Tensors
from sharesd.parallel.tp_driver import worker_loop
from sharesd.parallel.tp_setup import init_tp


def run_tp_worker(group: Group, tensors: Tensors | None = None) -> None:
    """Load this rank's part of the target, and run its steps.

    `tensors` replace weight files, as on rank 0.

    Raises:
        RankLost: rank 0 has ended.
    """
    config, modes = group.broadcast_object()
    resolved = resolve_config(config, modes, in_memory=tensors is not None, is_rank_zero=False)
    prepare_cpu(resolved)
    group, part, device = init_tp(
        config, modes, resolved.folder, device=resolved.device, compile=resolved.compile, group=group
    )
    loader = ModelLoader(replace(resolved, device=device), part=part, tensors=tensors)
    model = loader.load_target().model
    compiler = StepCompiler(resolved.compile, given=config.compile, switch=loader.switch, group=group)
    assert isinstance(model, Decoder)
    compiler.attach_tp(model)
    worker_loop(model, loader.switch, group)
