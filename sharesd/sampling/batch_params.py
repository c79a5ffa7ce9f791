"""Sampling parameters of each row in persistent tensors.

Legend: B rows of the batch, T logit rows, N draft tokens, V vocabulary, M new tokens at most, F numbers of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compile.topk import NUMBERS
from sharesd.data.request_errors import NoTokenAllowed
from sharesd.devices.transfer import to_device
from sharesd.sampling.noise import seeds_of_prompts
from sharesd.sampling_params import MAX_TOP_LOGPROBS, Acceptance, SamplingParams

MIN_HEAT = 0.01
"""Temperatures below this are those of near-greedy decoding."""

CostlyParam = Literal[
    "greedy", "heated", "cold", "top_k", "top_p", "top_p_alone", "min_p", "penalties", "repetition", "frequency",
    "presence", "grammar",
]  # fmt: skip
"""Parameter with a cost; eager rounds skip rows without it."""


class SamplingKind(NamedTuple):
    """Features of a round, which change no result of other requests."""

    sampled: bool = False
    """Noise and temperature; otherwise all rows are greedy."""
    truncated: bool = False
    """Top-k, top-p or min-p."""
    penalized: bool = False
    biased: bool = False
    constrained: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    acceptance: Acceptance = "match"

    @staticmethod
    def of(params: SamplingParams) -> SamplingKind:
        """Return the kind of a round for only this request."""
        truncated = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return SamplingKind(
            sampled=not params.greedy,
            truncated=truncated and not params.greedy,
            penalized=params.uses_penalties,
            biased=bool(params.logit_bias),
            constrained=params.constrained,
            logprobs=params.logprobs,
            top_logprobs=params.top_logprobs,
            acceptance=params.acceptance,
        )

    @property
    def excludes(self) -> bool:
        """True if tokens may be excluded, in the end all of them."""
        return self.biased or self.constrained

    def joined(self, other: SamplingKind) -> SamplingKind:
        """Return the features of both kinds, which have the same acceptance."""
        return SamplingKind._make(map(max, self, other))

    def rounded(self) -> SamplingKind:
        """Return one of few kinds with these features, captured in advance."""
        adjusted = self.penalized or self.biased
        num_top = MAX_TOP_LOGPROBS if self.logprobs else 0
        sampled, constrained = self.sampled or (adjusted and self.acceptance == "match"), self.constrained
        return SamplingKind(sampled, sampled, adjusted, adjusted, constrained, self.logprobs, num_top, self.acceptance)

    def of_drafts(self) -> SamplingKind:
        """Return the kind of such rounds' drafts, without target features."""
        return self._replace(constrained=False, logprobs=False, top_logprobs=0)


class TokenCounts:
    """Tokens that each row has seen, for penalties; persistent tensors."""

    def __init__(self, prompt_mask: Tensor, output_counts: Tensor) -> None:
        self.prompt_mask, self.output_counts = prompt_mask, output_counts

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """Set a row's prompt and clear its output."""
        self.output_counts[row].zero_()
        self.prompt_mask[row].zero_()
        tokens_L = to_device(list(prompt), self.prompt_mask.device, torch.int64)
        self.prompt_mask[row].index_fill_(0, tokens_L, True)

    def update(self, tokens_BM: Tensor, num_new_B: Tensor) -> None:
        """Add each row's first `num_new` tokens (0: idle row) to its output."""
        valid_BM = torch.arange(tokens_BM.shape[1], device=tokens_BM.device) < num_new_B[:, None]
        self.output_counts.scatter_add_(1, tokens_BM.where(valid_BM, 0), valid_BM.to(torch.int32))

    def after_drafts(self, draft_BN: Tensor, num_rows: int, seen_BTN: Tensor | None = None) -> Tensor:
        """Return output counts [B, T, V] of T = `num_rows` logit rows.

        In a verify step (T = N + 1) row t sees the t drafts before it; a draft step (T = 1) sees all N. `seen_BTN`:
        drafts that each row sees, for trees. Drafts of -1 are not tokens.
        """
        device, (B, N) = draft_BN.device, draft_BN.shape
        if seen_BTN is None:
            num_seen_T = torch.arange(num_rows, device=device) + (N - num_rows + 1)
            seen_BTN = (torch.arange(N, device=device) < num_seen_T[:, None]).expand(B, num_rows, N)
        seen_BTN = seen_BTN & (draft_BN >= 0)[:, None]
        counts_BTV = self.output_counts[:, None].repeat(1, num_rows, 1)
        index_BTN = draft_BN.clamp(min=0)[:, None].expand(B, num_rows, N)
        return counts_BTV.scatter_add_(2, index_BTN, seen_BTN.to(torch.int32))


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError if a field names a token outside the vocabulary, or `logit_bias` bans all tokens."""
    for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} names token {token}; this model's vocabulary has ids 0 to {vocab_size - 1}")
    if len(params.logit_bias) == vocab_size and all(amount == -math.inf for amount in params.logit_bias.values()):
        raise NoTokenAllowed(f"logit_bias bans all {vocab_size} tokens; leave some of them free")


class RowSampling:
    """Sampling parameters of each row; rows begin as greedy."""

    def __init__(self, *, batch: int, vocab_size: int, device: torch.device | str, replayed: bool = False) -> None:
        """`replayed`: host-side data must not shape rounds, which serve other requests."""
        self.batch, self.vocab_size, self.device, self.replayed = batch, vocab_size, torch.device(device), replayed
        self._host_BF = torch.zeros(batch, len(NUMBERS), dtype=torch.float64, device="cpu")
        if self.device.type == "cuda":
            self._host_BF = self._host_BF.pin_memory()
        self.numbers_BF = torch.zeros(batch, len(NUMBERS), dtype=torch.float64, device=self.device)
        """Columns as in `compile.topk.NUMBERS`; greedy rows have neutral temperature and truncation."""
        self._seed_column = NUMBERS.index("seed")
        self._params = [SamplingParams()] * batch
        self._kinds = [SamplingKind()] * batch
        self._costly_params: list[frozenset[CostlyParam]] = [frozenset()] * batch
        self._rows_using: dict[CostlyParam, list[int]] = {}
        self._biased: set[int] = set()  # rows with a bias, of this or an earlier request
        for row in range(batch):
            self._assign_numbers(row, SamplingParams(), 0)

    def assign(self, row: int, params: SamplingParams, index: int, prompt: Sequence[int]) -> None:
        """Assign a row to a request; raise ValueError as `check_tokens`."""
        check_tokens(params, self.vocab_size)
        self._params[row], self._kinds[row] = params, SamplingKind.of(params)
        self._assign_numbers(row, params, index)
        if params.uses_penalties:
            self.counts.begin(row, prompt)
        if row in self._biased:
            self.bias_BV[row].zero_()
            self._biased.discard(row)
        if params.logit_bias:
            tokens_L = to_device(list(params.logit_bias), self.device, torch.int64)
            amounts_L = to_device(list(params.logit_bias.values()), self.device, torch.float32)
            self.bias_BV[row].index_copy_(0, tokens_L, amounts_L)
            self._biased.add(row)
        self._set_costly_params(row, _costly_params(params, self.vocab_size))

    def release(self, row: int) -> None:
        """Skip the row's parameters from now on; device tensors stay."""
        self._set_costly_params(row, frozenset())

    def kind(self, rows: Sequence[int]) -> SamplingKind:
        """Return the rounds' kind, rounded up if replayed. Raises as `check_alike`."""
        kinds = [self._kinds[row] for row in rows]
        check_alike([self._params[row] for row in rows])
        kind = reduce(SamplingKind.joined, kinds, kinds[0] if kinds else SamplingKind())
        return kind.rounded() if self.replayed else kind

    def rows_using(self, costly_param: CostlyParam) -> list[int]:
        """Return rows that use a parameter; all rows if rounds are replayed."""
        if self.replayed:
            return [] if costly_param == "top_p_alone" else list(range(self.batch))
        rows = self._rows_using.get(costly_param)
        if rows is None:
            rows = self._rows_using[costly_param] = [
                row for row, costly_params in enumerate(self._costly_params) if costly_param in costly_params
            ]
        return rows

    @property
    def max_k(self) -> int:
        """Largest top-k among the rows that use it."""
        if self.replayed:
            return self.vocab_size
        return max((self._params[row].top_k for row in self.rows_using("top_k")), default=0)

    def span(self, first: int, end: int) -> RowSampling:
        """Return a view of rows `first` to before `end`."""
        return self if (first, end) == (0, self.batch) else _RowSpan(self, first, end)

    def column(self, name: str) -> Tensor:
        """Return the numbers [B] float64 of this name (`compile.topk.NUMBERS`): a view."""
        return self.numbers_BF[:, NUMBERS.index(name)]

    @property
    def seeds_B(self) -> Tensor:
        return self.numbers_BF.view(torch.int64)[:, self._seed_column]

    @cached_property
    def counts(self) -> TokenCounts:
        """Token counts of all rows; valid for rows whose request has penalties."""
        with torch.inference_mode(False):  # else requests could be placed in inference mode only
            return TokenCounts(
                torch.zeros(self.batch, self.vocab_size, dtype=torch.bool, device=self.device),
                torch.zeros(self.batch, self.vocab_size, dtype=torch.int32, device=self.device),
            )

    @cached_property
    def bias_BV(self) -> Tensor:
        """Addend of logits [B, V], float32."""
        with torch.inference_mode(False):
            return torch.zeros(self.batch, self.vocab_size, device=self.device)

    def _assign_numbers(self, row: int, params: SamplingParams, index: int) -> None:
        greedy = params.greedy
        off = self.vocab_size
        numbers = {
            "temperature": 1.0 if greedy else params.temperature,
            "top_k": off if greedy or not 0 < params.top_k < off else params.top_k,
            "top_p": 1.0 if greedy else params.top_p,
            "log_min_p": -math.inf if greedy or params.min_p == 0 else math.log(params.min_p),
            "repetition": params.repetition_penalty,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
            "noise": 0.0 if greedy else 1.0,
            "seed": 0.0,
        }
        self._host_BF[row] = torch.tensor([numbers[name] for name in NUMBERS], dtype=torch.float64)
        [seed] = seeds_of_prompts(params.seed, torch.tensor([index]))
        self._host_BF.view(torch.int64)[row, self._seed_column] = seed
        self.numbers_BF[row].copy_(self._host_BF[row], non_blocking=True)

    def _set_costly_params(self, row: int, costly_params: frozenset[CostlyParam]) -> None:
        self._costly_params[row] = costly_params
        self._rows_using.clear()


class _RowSpan(RowSampling):
    def __init__(self, rows: RowSampling, first: int, end: int) -> None:
        self._rows, self._first, self._end = rows, first, end
        self.batch, self.vocab_size, self.device = end - first, rows.vocab_size, rows.device
        self.replayed = rows.replayed
        self.numbers_BF = rows.numbers_BF[first:end]
        self._seed_column = rows._seed_column

    def rows_using(self, costly_param: CostlyParam) -> list[int]:
        return [row - self._first for row in self._rows.rows_using(costly_param) if self._first <= row < self._end]

    @property
    def max_k(self) -> int:
        if self.replayed:
            return self.vocab_size
        return max((self._rows._params[self._first + row].top_k for row in self.rows_using("top_k")), default=0)

    @property
    def counts(self) -> TokenCounts:
        whole = self._rows.counts
        return TokenCounts(whole.prompt_mask[self._first : self._end], whole.output_counts[self._first : self._end])

    @property
    def bias_BV(self) -> Tensor:
        return self._rows.bias_BV[self._first : self._end]


def check_alike(requests: Sequence[SamplingParams]) -> None:
    """Raise ValueError if rows with acceptance other than `match` differ in sampling."""
    names = sorted({params.acceptance for params in requests} - {"match"})
    if names and len({_decision_params(params) for params in requests}) > 1:
        raise ValueError(
            f"acceptance {' and '.join(names)} requires the same sampling parameters in all rows; give requests that "
            "are decoded together the same parameters, or use match"
        )


def _costly_params(params: SamplingParams, vocab_size: int) -> frozenset[CostlyParam]:
    sampled, top_k = not params.greedy, 0 < params.top_k < vocab_size
    asks: dict[CostlyParam, bool] = {
        "greedy": params.greedy,
        "heated": sampled and params.temperature != 1,
        "cold": sampled and params.temperature < MIN_HEAT,
        "top_k": sampled and top_k,
        "top_p": sampled and top_k and params.top_p < 1,
        "top_p_alone": sampled and not top_k and params.top_p < 1,
        "min_p": sampled and params.min_p > 0,
        "penalties": params.uses_penalties,
        "repetition": params.repetition_penalty != 1,
        "frequency": params.frequency_penalty != 0,
        "presence": params.presence_penalty != 0,
        "grammar": params.constrained,
    }
    return frozenset(costly_param for costly_param, asked in asks.items() if asked)


def _decision_params(params: SamplingParams) -> tuple[object, ...]:
    return (
        *(params.temperature, params.top_k, params.top_p, params.min_p),
        *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
        *(tuple(sorted(params.logit_bias.items())), params.acceptance),
    )
