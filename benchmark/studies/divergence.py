"""KL divergence of a target from a reference: `sharesd verify --against`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compile.block_linear import BlockPart
from sharesd.config import EngineConfig
from sharesd.models.checkpoint import Progress, is_stored
from sharesd.models.loader import load_model, resolve, stored_tensors
from sharesd.models.prefill import next_piece, read_piece, slots_for
from sharesd.models.tokenizer import load_tokenizer, require_same_vocabulary
from sharesd.reports.questions import Question
from sharesd.reports.tables import Section
from sharesd.runtime import Runtime

if TYPE_CHECKING:
    from torch import Tensor

    from sharesd.kvcache.static import StaticKVCache
    from sharesd.models.base import CausalModel
    from sharesd.models.tokenizer import Tokenizer

_PIECE = 128
"""Maximum positions whose logits are in memory."""
_WINDOW = 1024
"""Maximum tokens of a text that are read together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """KL(reference, target) in nats per token, over all positions of some texts."""

    num_positions: int
    mean: float
    percentile_99: float
    max: float
    same_argmax: float
    """Share of positions at which both prefer the same token."""

    def section(self, title: str) -> Section:
        head = ("positions", "mean KL", "99th percentile", "max", "same token")
        cells = (f"{self.mean:.3g}", f"{self.percentile_99:.3g}", f"{self.max:.3g}", f"{self.same_argmax:.2%}")
        return Section(title, head, [[f"{self.num_positions:,}", *cells]], left=0)


def texts_of(tokenizer: Tokenizer, file: str | None, asked: Sequence[Question], *, max_context: int) -> list[list[int]]:
    """Return ids of a file's text or of all questions, in windows.

    Raises:
        ValueError: the file cannot be read, or holds less than two tokens.
    """
    try:  # questions without a chat template, whose tokens would count in each of them
        text = (
            "\n\n".join(turn for each in asked for turn in each.turns)
            if file is None
            else Path(file).read_text("utf-8")
        )
        ids = tokenizer.encode(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--texts: {file} cannot be read ({error}); use a text in UTF-8") from error
    if len(ids) < 2:
        raise ValueError(f"--texts: {file} has {len(ids)} tokens; use a longer text")
    size = min(_WINDOW, max_context)
    return [ids[first : first + size] for first in range(0, len(ids), size)]


def measure(
    config: EngineConfig, reference: str, file: str | None, asked: Sequence[Question], progress: Progress
) -> Divergence:
    """Return the divergence of a target, as it runs, from a reference.

    Raises:
        ValueError: the reference has another vocabulary, or is not a model.
    """
    folder = resolve(
        reference,
        progress=progress,
        ignored=config.ignore_keys,
        dequantize=None,
        trust_remote_code=config.trust_remote_code,
    )
    runtime = Runtime(config, ("naive",), progress=progress)
    require_same_vocabulary(runtime.tokenizer, load_tokenizer(folder))
    texts = texts_of(runtime.tokenizer, file, asked, max_context=runtime.max_context)
    model = _load_reference(folder, progress)
    if model.vocab_size != runtime.target.vocab_size:
        raise ValueError(
            f"--against: {reference} has {model.vocab_size} logits, and the target {runtime.target.vocab_size}; use a "
            "model with the same vocabulary"
        )
    cache = model.new_cache(1, slots_for(_PIECE + max(map(len, texts))))
    divergences, agreements = [], []
    with torch.inference_mode():
        for number, text in enumerate(texts):
            pairs = zip(_log_probs(runtime.step, runtime.cache, text), _log_probs(model, cache, text), strict=True)
            for ours_PV, wanted_PV in pairs:
                divergences.append((wanted_PV.exp() * (wanted_PV - ours_PV)).sum(-1))
                agreements.append(ours_PV.argmax(-1) == wanted_PV.argmax(-1))
            progress("comparing logits", number + 1, len(texts))
    kl, same = torch.cat(divergences), torch.cat(agreements)
    return Divergence(
        num_positions=len(kl),
        mean=float(kl.mean()),
        percentile_99=float(kl.quantile(0.99)),
        max=float(kl.max()),
        same_argmax=float(same.double().mean()),
    )


def _load_reference(folder: Path, progress: Progress) -> CausalModel:
    """Load a model in float32, its blocks expanded."""

    def expanded() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stored_tensors(folder):
            yield name, tensor.numbers() if isinstance(tensor, BlockPart) else tensor

    tensors = expanded if is_stored(folder) else None
    return load_model(folder, dtype=torch.float32, device="cpu", progress=progress, tensors=tensors)


def _log_probs(model: CausalModel, cache: StaticKVCache, text: list[int]) -> Iterator[Tensor]:
    """Yield log-probabilities after each token, float64 [P, V] on the host."""
    for first in range(0, len(text), _PIECE):
        piece = next_piece(model, cache, first, len(text), _PIECE)
        yield read_piece(model, cache, 0, text, piece, piece.end - first).double().cpu().log_softmax(-1)
