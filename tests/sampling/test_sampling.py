"""Noise, logits processing and choice.

Legend: B rows of the batch, T logit rows, N draft tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from sharesd import sampling
from sharesd.sampling import SamplingKind, Stream, choose, fork, gumbel, native_gumbel, probs_of, process, uniform
from sharesd.sampling.logits_processors import _top_p, top_p_reference
from sharesd.sampling_params import SamplingParams
from tests.helpers.oracle import placed
from tests.sampling.test_acceptance import deviation
from tests.sampling.test_row_sampling import WAYS


def cells(u: Tensor, num: int) -> Tensor:
    return (u.flatten().double() * num).long()


def assert_uniform_and_independent(u: Tensor, v: Tensor) -> None:
    """u and v in (0, 1), element by element: each is uniform, and pairs fill a grid evenly."""
    n = u.numel()
    assert deviation(torch.bincount(cells(u, 256), minlength=256), torch.full((256,), n / 256)) < 4
    pairs = torch.bincount(cells(u, 32) * 32 + cells(v, 32), minlength=1024)
    assert abs(deviation(pairs, torch.full((1024,), n / 1024))) < 4


def test_noise_is_pinned_and_finite_at_the_ends_of_its_range() -> None:
    """The text of a seed must not change from release to release."""
    u = uniform(torch.tensor([0, 123456789012345]), torch.tensor([[0, 1], [0, 1]]), dtype=torch.float64)
    words = (u * 2**32).floor().long()
    assert words.tolist() == [[3431952692, 487937224], [2948165037, 1345714528]]
    noise = gumbel(torch.tensor([42]), torch.tensor([[7]]), 4)[0, 0]
    torch.testing.assert_close(noise, torch.tensor([-0.16999, -0.249079, 2.712409, 1.500654]), atol=1e-5, rtol=1e-5)
    for dtype in (torch.float32, torch.float64):
        u = sampling.noise._unit(torch.tensor([0, 1, 2**23, 2**24 - 1, 2**31, 2**32 - 2**7, 2**32 - 1]), dtype)
        assert (u > 0).all() and (u < 1).all() and (u.diff() >= 0).all()
        assert (-torch.log(-torch.log1p(-u))).isfinite().all()


def test_noise_is_gumbel_and_neighbours_are_independent() -> None:
    seeds_B, positions_BT, V = torch.tensor([0, 1, 2]), torch.arange(8).repeat(3, 1), 20_000
    noise = gumbel(seeds_B, positions_BT, V)
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.57722) < 0.01 and abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    u = torch.exp(-torch.exp(-noise.double()))  # back to the uniform variable which the noise was made of
    for step in (1, 2, 64, 256, 4096, 16384):
        assert_uniform_and_independent(u[..., :-step], u[..., step:])
    assert_uniform_and_independent(u[:, :-1], u[:, 1:])
    assert_uniform_and_independent(u[:-1], u[1:])
    assert_uniform_and_independent(u[:, :-1, :-1], u[:, 1:, 1:])


def test_uniform_streams_positions_and_seeds_are_independent() -> None:
    seeds_B, positions_BT = torch.arange(400), torch.arange(400).repeat(400, 1)
    streams = [uniform(seeds_B, positions_BT, stream=stream) for stream in Stream]
    assert all(float(u.min()) > 0 and float(u.max()) < 1 for u in streams)
    for i, u in enumerate(streams):
        assert_uniform_and_independent(u[:, :-1], u[:, 1:])
        assert_uniform_and_independent(u[:-1], u[1:])
        for v in streams[:i]:
            assert_uniform_and_independent(u, v)
    forked = uniform(fork(seeds_B, torch.full((400,), 3)), positions_BT)
    assert_uniform_and_independent(forked, uniform(seeds_B, positions_BT))
    assert_uniform_and_independent(forked, uniform(fork(seeds_B, torch.full((400,), 4)), positions_BT))


def test_forked_seeds_are_distinct_and_valid() -> None:
    seeds = fork(torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100))
    assert seeds.unique().numel() == 10_000 and int(seeds.min()) >= 0
    of_prompts = torch.cat([sampling.seeds_of_prompts(seed, torch.arange(1, 101)) for seed in range(100)])
    assert torch.cat([seeds, of_prompts]).unique().numel() == 20_000 and int(of_prompts.min()) >= 0
    assert sampling.seeds_of_prompts(2**63 - 1, torch.arange(2))[0] == 2**63 - 1
    every_bit = uniform(torch.tensor([1 << bit for bit in range(63)]), torch.zeros(63, 1, dtype=torch.int64))
    assert every_bit.unique().numel() == 63, "high bits of the seed matter, too"


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_noise_has_the_same_bits_whatever_the_number_of_rows() -> None:
    seeds_B, positions_BT, V = torch.tensor([3, 2**62]), torch.arange(5).repeat(2, 1), 1003
    torch.compiler.reset()
    compiled_uniform, compiled_gumbel = torch.compile(uniform, dynamic=False), torch.compile(gumbel, dynamic=False)
    assert torch.equal(compiled_uniform(seeds_B, positions_BT), uniform(seeds_B, positions_BT))
    noise = compiled_gumbel(seeds_B, positions_BT, V)
    torch.testing.assert_close(noise, gumbel(seeds_B, positions_BT, V), atol=1e-5, rtol=1e-5)
    one = [compiled_gumbel(seeds_B[:1], positions_BT[:1, t : t + 1], V) for t in range(5)]
    assert torch.equal(torch.cat(one, 1), noise[:1])


def alone(logits: Tensor, params: SamplingParams, **context: Any) -> Tensor:
    """Processed for one way of sampling, all rows alike."""
    return process(logits, *placed([params] * len(logits), logits.shape[-1]), **context)


def rows(num: int, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Logits [1, num, V], peaked enough for truncation to matter."""
    return torch.randn(1, num, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


WARPERS: dict[str, Any] = {"temperature": hf.TemperatureLogitsWarper, "top_k": hf.TopKLogitsWarper}
WARPERS |= {"top_p": hf.TopPLogitsWarper, "min_p": hf.MinPLogitsWarper}
SETTINGS: list[dict[str, Any]] = [
    *({"temperature": 0.7}, {"top_k": 1}, {"top_k": 20}, {"top_k": 10_000}, {"top_p": 0.1}, {"top_p": 0.5}),
    *({"top_p": 0.95}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8}),
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [61, 1003])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_processing_equals_transformers(settings: dict[str, Any], vocab_size: int, dtype: torch.dtype) -> None:
    logits = rows(40, vocab_size, dtype)
    expected: Any = logits[0]
    for name, value in settings.items():
        expected = WARPERS[name](value)(torch.zeros(40, 1, dtype=torch.int64), expected)
    result = alone(logits, SamplingParams(**{"temperature": 1.0, **settings}))
    assert result.dtype == dtype
    torch.testing.assert_close(result[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [9e-3, 1e-6, 1e-30, 1e-38, 1e-45, 1e-310, 5e-324])
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_temperatures_near_zero_choose_as_greedy_decoding_does(
    settings: dict, temperature: float, dtype: torch.dtype
) -> None:
    logits = (rows(40, 1003, dtype) * 100).round()  # gaps of 0, or so large that no noise bridges them
    logits[..., 500:] = -math.inf
    logits[0, :10] += 10**4
    logits[0, 10] = -math.inf
    logits[0, 10, 7] = 1.0  # all others are banned
    params = SamplingParams(temperature=temperature, **settings)
    result = alone(logits, params)
    best = logits.amax(-1, keepdim=True)
    assert not result.isnan().any() and (result.amax(-1) == 0).all()
    positions = torch.arange(40)[None]
    chosen = choose(result, gumbel(torch.tensor([3]), positions, 1003))
    assert (logits.gather(-1, chosen[..., None]) == best).all()
    ties = (logits == best).to(dtype)
    torch.testing.assert_close(probs_of(result, SamplingKind.of(params)), ties / ties.sum(-1, keepdim=True))


def test_usual_temperatures_divide_and_no_more_and_those_without_end_choose_evenly() -> None:
    logits = rows(40, 1003)
    for temperature in (0.01, 0.1, 0.7, 1.3, 100.0):  # the bits of texts rest on it
        assert torch.equal(alone(logits, SamplingParams(temperature=temperature)), logits / temperature)
    logits[..., 7] = -math.inf  # banned
    for temperature in (1e38, 1e300):
        probs = probs_of(alone(logits, SamplingParams(temperature=temperature)), SamplingKind(sampled=True))
        assert (probs[..., 7] == 0).all() and torch.allclose(probs[..., :7], torch.tensor(1 / 1002))


@pytest.mark.parametrize(
    ("probs", "settings", "kept"),
    [
        ([0.3, 0.1, 0.2, 0.2, 0.2, 0.05], {"top_k": 2}, [0, 2, 3, 4]),  # as transformers does
        *(([0.4, 0.2, 0.2, 0.2], {"top_p": 0.39, "top_k": k}, [0]) for k in (0, 2)),
        *(([0.4, 0.2, 0.2, 0.2], {"top_p": p, "top_k": k}, [0, 1, 2, 3]) for p in (0.41, 0.63, 0.99) for k in (0, 2)),
        *(([0.25, 0.5, 0.125, 0.125], {"top_p": 0.5, "top_k": k}, [1]) for k in (0, 3)),
    ],
)
def test_ties_are_treated_alike_and_top_p_stops_as_soon_as_the_mass_is_reached(
    probs: list[float], settings: dict, kept: list[int]
) -> None:
    result = alone(torch.tensor([[probs]]).log(), SamplingParams(temperature=1.0, **settings))
    assert result[0, 0].isfinite().nonzero()[:, 0].tolist() == kept


def test_greedy_rows_take_the_first_of_the_best_whatever_truncates_others() -> None:
    logits, truncated = rows(3, 61).bfloat16(), SamplingParams(top_k=1, top_p=0.5, min_p=0.5)
    assert alone(logits, truncated) is logits
    result = alone(logits, replace(truncated, logit_bias={7: 100.0}))
    assert result.isfinite().all() and choose(result).tolist() == [[7, 7, 7]]
    assert choose(torch.tensor([[[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]]])).tolist() == [[1, 0]]
    one_hot = probs_of(logits, SamplingKind())
    assert torch.equal(one_hot.argmax(-1), logits.argmax(-1)) and torch.equal(one_hot.sum(-1), torch.ones(1, 3))


def test_bias_bans_and_adds() -> None:
    params = SamplingParams(temperature=1.0, logit_bias={0: -math.inf, 60: 2.5})
    logits = rows(3, 61).bfloat16()
    change = alone(logits, params) - logits
    assert change.unique().tolist() == [-math.inf, 0.0, 2.5]
    assert (change[..., 0] == -math.inf).all() and (change[..., 60] == 2.5).all()


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        *(({token: 1.0}, f"token {token}; .* 0 to 60") for token in (-1, 61)),
        *(({3: amount}, "token 3 is") for amount in (math.nan, math.inf)),
    ],
)
def test_a_bias_outside_the_vocabulary_or_without_a_number_is_refused(bias: dict[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placed([SamplingParams(logit_bias=bias)], 61)


PENALTIES = SamplingParams(repetition_penalty=0.7, presence_penalty=1.1, frequency_penalty=0.4)


def process_naively(logits_V: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """One row with its explicit prefix, in plain Python."""
    x = logits_V.double().tolist()
    for token, amount in params.logit_bias.items():
        x[token] += amount
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.greedy:
        return torch.tensor(x, dtype=torch.float64)
    x = [value / params.temperature for value in x]
    limit = sorted(x, reverse=True)[params.top_k - 1]
    x = [value if value >= limit else -math.inf for value in x]
    need, best = params.top_p * sum(map(math.exp, x)), max(x)
    kept = [
        sum(math.exp(other) for other in x if other > value) < need and math.exp(value - best) >= params.min_p
        for value in x
    ]
    return torch.tensor([v if keep else -math.inf for v, keep in zip(x, kept, strict=True)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("params", [WAYS["everything"], PENALTIES], ids=["everything", "greedy with penalties"])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_verify_row_sees_its_own_prefix(batch: int, params: SamplingParams, dtype: torch.dtype) -> None:
    V, N = 61, 5
    g = torch.Generator().manual_seed(batch)
    prompts = [torch.randint(0, V, (length,), generator=g).tolist() for length in (9, 1, 4)[:batch]]
    emitted = torch.randint(0, V, (batch, 6), generator=g)
    num_new = torch.randint(1, 7, (batch,), generator=g)
    draft = torch.randint(0, 4, (batch, N), generator=g)  # few ids: repeats within the draft
    logits = (torch.randn(batch, N + 1, V, generator=g, dtype=torch.float64) * 3).to(dtype)
    kind, asked = placed([params] * batch, V, prompts)
    counts = asked.counts
    counts.update(emitted, num_new)
    before = counts.output_counts.clone()
    verify = process(logits, kind, asked, draft_BN=draft)
    assert torch.equal(counts.output_counts, before)
    for b in range(batch):
        prompt, output = prompts[b], emitted[b, : num_new[b]].tolist()
        for t in range(N + 1):
            expected = process_naively(logits[b, t], params, prompt, output + draft[b, :t].tolist())
            torch.testing.assert_close(verify[b, t].double(), expected, atol=1e-5, rtol=1e-5)
    for t in range(N + 1):  # a drafter's step t, and plain decoding after t more tokens, give the very same bits
        step = process(logits[:, t : t + 1], kind, asked, draft_BN=draft[:, :t])
        assert torch.equal(step[:, 0], verify[:, t])
    for t in range(N + 1):
        plain = process(logits[:, t : t + 1], kind, asked)
        assert torch.equal(plain[:, 0], verify[:, t])
        if t < N:
            counts.update(draft[:, t : t + 1], torch.ones(batch, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    """Of tokens that were chosen, and of the likeliest."""
    logits = rows(6, 203, dtype=torch.float64).view(3, 2, 203)
    logits[..., ::3] = logits[..., ::3].round()  # ties
    logits = logits.to(dtype)
    tokens = torch.tensor([[0, 3], [202, 202], [1, 2]])
    expected = logits.double().log_softmax(-1).gather(-1, tokens[..., None])[..., 0].float()
    result = sampling.logprobs_of(logits, tokens)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected)
    likeliest, logprobs = sampling.top_logprobs_of(logits, 20)
    assert torch.equal(likeliest, logits.sort(dim=-1, descending=True, stable=True).indices[..., :20])
    assert logprobs.shape == (3, 2, 20) and logprobs.dtype == torch.float32
    for place in (0, 7, 19):
        assert torch.equal(logprobs[..., place], sampling.logprobs_of(logits, likeliest[..., place]))


@pytest.mark.kernels
def test_the_native_noise_is_the_noise():
    seeds_B, positions_BT = torch.tensor([7, 2**40]), torch.tensor([[0, 1, 999], [5, 6, 2**28]])
    plain = gumbel(seeds_B, positions_BT, 1003)
    native = native_gumbel(seeds_B, positions_BT, 1003)
    assert torch.allclose(plain, native, rtol=1e-5, atol=2e-6)
    alone = native_gumbel(seeds_B[1:], positions_BT[1:, 1:2], 1003)
    assert torch.equal(alone[0, 0], native[1, 1])  # the same bits whatever the number of rows
    ids = torch.tensor([2, 40, 999])
    assert torch.equal(native_gumbel(seeds_B, positions_BT, 1003, ids_K=ids), native[..., ids])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [37, 1000, 8192])
def test_the_native_choice_is_that_among_sums_with_the_native_noise(size: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(size)
    heat_B, noise_B = torch.tensor([1.0, 0.3], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    for spread in (0.0, 0.1, 2.0, 5.0, 30.0, 3000.0):
        x = (torch.randn(2, 3, size, generator=dice, dtype=torch.float64) * spread).to(dtype)
        x[0] = x[0].round()
        x[1, 1:] = x[1, 1:].masked_fill(x[1, 1:] < x[1, 1:].amax(-1, keepdim=True) / 2, -torch.inf)
        seeds_B = torch.randint(0, 2**62, (2,), generator=dice)
        positions_BT = torch.randint(0, 3000, (2, 3), generator=dice)
        ids = torch.randperm(60_000, generator=dice)[:size].sort().values
        for some_ids, noisy_B in ((None, noise_B), (ids, noise_B), (None, torch.tensor([0.0, 1.0]).double())):
            noise = native_gumbel(seeds_B, positions_BT, size, ids_K=some_ids)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            sums = x.to(wide) / heat_B.to(wide)[:, None, None] + noise * noisy_B.float()[:, None, None]
            for threads in (1, 3):
                torch.set_num_threads(threads)
                chosen = sampling.native_choice(
                    x, seeds_B, positions_BT, temperature_B=heat_B, noise_B=noisy_B, ids_K=some_ids
                )
                assert torch.equal(chosen, choose(sums))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_native_top_p_keeps_what_tensor_operations_keep(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(0)
    for case, p in enumerate((0.0, 0.01, 0.3, 0.5, 0.9, 0.95, 0.9999, 1 - 1e-12)):
        for spread in (0.0, 0.5, 3.0, 40.0):
            x = torch.randn(2, 3, 1000 + case, generator=dice, dtype=dtype) * spread
            x[0] = x[0].round()
            x[1, 1, 5:] = -torch.inf
            p_B = torch.tensor([p, p / 2], dtype=torch.float64)[:, None, None]
            assert torch.equal(_top_p(x, p_B), top_p_reference(x, p_B))
