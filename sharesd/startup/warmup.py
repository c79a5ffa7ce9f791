"""Warm-up: compilation of all forms of a round, and policy timings."""

from __future__ import annotations

import copy
from collections import deque
from contextlib import suppress
from dataclasses import replace
from itertools import product

import torch

from compile.cuda_graphs import WARM_CALLS
from compile.start_times import START
from sharesd.data.request_errors import NonFiniteLogits
from sharesd.devices.transfer import reserve_pinned
from sharesd.drafters.base import Drafter
from sharesd.drafters.draft_checks import checked_draft
from sharesd.drafters.tables.proposal import Proposal, pack
from sharesd.engine.call_queue import decode
from sharesd.engine.decode_round import Round
from sharesd.engine.engine import Engine
from sharesd.field_types import DefaultLimit
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import NO_DRAFT, DraftKind, DraftShape, DraftTree
from sharesd.startup.cost_profiler import first_blocks, is_native, models_of, profile_costs
from sharesd_files import JsonCache


def warm_up(engine: Engine, mode: str, params: SamplingParams, costs: JsonCache | None = None) -> None:
    """Compile the rounds of a mode for one kind of sampling; time them if needed."""
    policy, drafter = engine.variant(params, mode).policy, engine.modes[mode].drafter
    short = replace(params, ignore_eos=True, stop=(), stop_token_ids=(), grammar=None, min_new_tokens=0)
    shapes = _shapes(engine, mode, params)
    prompt = [i % engine.target.vocab_size for i in range(min(8, engine.max_context // 2))]
    before = policy.pinned
    if engine.offloaded or is_native(engine.target):  # nothing compiles: a round of each model builds their kernels
        of_models = {shape.drafter: shape for shape in shapes if shape.nodes}
        shapes, num_tokens = [NO_DRAFT] if engine.offloaded else [shapes[0], *of_models.values()], 2
    else:
        num_tokens = 3 * (1 + max(shape.depth for shape in shapes))
    for shape in dict.fromkeys(shapes):
        policy.pinned = shape
        _run(engine, mode, [prompt] * engine.cache.batch, replace(short, max_new_tokens=DefaultLimit(num_tokens)))
    policy.pinned = before
    if engine.graphs is not None:
        reserve_pinned(engine.max_context, engine.cache.lengths.device)
        _capture(engine, mode, params)
        _verify_widest_offloaded(engine, mode, params)
    if drafter is not None and params.acceptance == "match":
        if engine.graphs is None and engine.cache.lengths.device.type == "cuda" and not engine.offloaded:
            verify_all_sizes(engine, mode, params)
        elif drafter.runs_on_host:
            _verify_tree(engine, mode, params, engine.modes[mode].num_draft)
    if policy.pinned is None or (drafter is not None and drafter.runs_on_host):
        with START.phase("costs of rounds"):
            measured = profile_costs(engine, mode, params, costs)
        policy.reset(measured[engine.cache.batch], measured)
    engine.forget()


def warm_up_all_variants(engine: Engine, mode: str) -> None:
    """Run rounds of variants that requests may need together, except grammars."""
    if engine.graphs is None:
        _run_all_samplers(engine, mode)
        return
    for temperature, bias, logprobs in product((0.0, 1.0), ({}, {0: 0.0}), (False, True)):
        params = SamplingParams(max_new_tokens=1, temperature=temperature, logit_bias=bias, logprobs=logprobs)
        _run(engine, mode, [[0]], params)  # a first token, which no round makes
        _capture(engine, mode, params)
    engine.forget()


def _run(engine: Engine, mode: str, prompts: list[list[int]], params: SamplingParams) -> None:
    """Decode prompts of any tokens, by one block of large models.

    Logits that are not numbers are ignored here: those of real requests may be.
    """
    with suppress(NonFiniteLogits), first_blocks(engine, mode):
        deque(decode(engine, prompts, params, mode=mode), maxlen=0)


def _run_all_samplers(engine: Engine, mode: str) -> None:
    """Sample in all ways to build or compile kernels, without captures."""
    if engine.offloaded:
        return
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            max_new_tokens=3, temperature=temperature, top_k=4, top_p=0.9, min_p=0.01, logprobs=True, top_logprobs=1
        )
        policy = engine.variant(params, mode).policy
        known = copy.deepcopy((policy.live.table, policy.live.measured))
        _run(engine, mode, [[0]], params)
        policy.reset(*known)  # a round of one block says nothing about whole rounds
    engine.forget()


@torch.inference_mode()
def _capture(engine: Engine, mode: str, params: SamplingParams) -> None:
    """Replay every form with idle rows; largest first, for memory reuse."""
    engine.deactivate_rows()
    models, variant = {model.name: model for model in models_of(engine, mode)}, engine.variant(params, mode)
    shapes = variant.policy.shapes if models else ()
    kinds = {(shape.kind, shape.window): shape for shape in shapes}

    def verify(round_: Round, tree: DraftTree) -> None:
        if not engine.offloaded:
            round_.copy_to_host(round_.run(tree))

    for rows, _ in product(reversed(engine.batch_sizes), range(1 + WARM_CALLS)):
        round_ = variant.round(0, rows)
        verify(round_, DraftTree(torch.zeros(rows, 0, dtype=torch.int64)))
        for shape in kinds.values():  # the largest of each kind
            verify(round_, checked_draft(models[shape.drafter], round_.context, shape))
        if engine.modes[mode].num_draft:
            verify(round_, DraftTree(torch.zeros(rows, 1, dtype=torch.int64)))
    for model in models.values():
        if model.needs_catch_up:
            _capture_catch_up(model)


def _capture_catch_up(model: Drafter) -> None:
    """Run a drafter's prefill of missed tokens until replayed."""
    for _, cache in model.prompt_readers():
        cached_ids, lengths_B = list(cache.cached_ids), cache.lengths.clone()
        for row, _ in product(range(cache.batch), range(1 + WARM_CALLS)):
            cache.cached_ids[row] = list(cached_ids[row])
            model.catch_up({row: [*cached_ids[row], 0, 0]}, idle=True)
        cache.cached_ids[:] = cached_ids
        cache.lengths.copy_(lengths_B)


@torch.inference_mode()
def _verify_widest_offloaded(engine: Engine, mode: str, params: SamplingParams) -> None:
    """Verify the longest draft once: no graph does, and kept costs are compared by plain rounds alone."""
    if engine.offloaded and (num_draft := engine.modes[mode].num_draft):
        engine.deactivate_rows()
        draft = torch.zeros(engine.cache.batch, num_draft, dtype=torch.int64)
        engine.variant(params, mode).round().run(DraftTree(draft))


@torch.inference_mode()
def _verify_tree(engine: Engine, mode: str, params: SamplingParams, num_nodes: int, *, chain: bool = False) -> None:
    """Verify a tree, as tables may not have drafted one so far, or a chain."""
    if num_nodes < (1 if chain else 2) or not (chain or engine.target.takes_trees):
        return
    engine.deactivate_rows()
    parents = range(-1, num_nodes - 1) if chain else [-1] * num_nodes
    draft = Proposal(list(range(num_nodes)), list(parents), [0.0] * num_nodes)
    round_ = engine.variant(params, mode).round()
    result = round_.run(pack([draft] * engine.cache.batch, num_nodes, ""))
    if engine.cache.lengths.device.type == "cuda":
        round_.copy_to_host(result)


def verify_all_sizes(engine: Engine, mode: str, params: SamplingParams) -> None:
    """Verify chains and trees of all sizes: without graphs, kernels and pinned memory depend on them."""
    for num_nodes, chain in product(range(1, engine.modes[mode].num_draft + 1), (True, False)):
        _verify_tree(engine, mode, params, num_nodes, chain=chain)


def _shapes(engine: Engine, mode: str, params: SamplingParams) -> list[DraftShape]:
    """Return shapes with compiled forms, including NO_DRAFT if the policy may choose."""
    if engine.modes[mode].drafter is None:
        return [NO_DRAFT]
    policy = engine.variant(params, mode).policy
    if policy.pinned is not None:
        return [shape for shape in policy.shapes if shape[:2] == policy.shapes[-1][:2]]
    # A tree may have more nodes than any has tokens; where drafts end early, trees replace chains.
    longest: dict[tuple[DraftKind, int], DraftShape] = {}
    for shape in sorted(policy.shapes, key=lambda shape: (shape.is_tree, shape.depth)):
        longest[shape.kind, shape.window] = shape
    return [NO_DRAFT, *longest.values()]
