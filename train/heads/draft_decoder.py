"""Small decoder distilled from the target, for mode `classic`.

Its initial weights are those of some of the target's layers. A narrower decoder has weights projected onto the main
directions of the target's embedding: with P, the leading eigenvectors of E'E, the embedding is E P, and weights W
become W diag(norm) P and P' W.

Legend: N tokens of a text, T positions read, D hidden size, d hidden size of the draft, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharesd.drafters.heads.head import Head, qkv
from sharesd.models.architectures import config_from_hf
from sharesd.models.checkpoint import copy_texts, read_config, write_tensors
from sharesd.models.decoder import Block, Decoder
from sharesd.models.weight_mapping import decoder_tensors
from train.heads.teacher import Lesson


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Config fields used by the trainer."""

    draft_vocab_size: int
    kind: str = "draft"
    taps: tuple[int, ...] = ()
    target_layers: tuple[int, ...] = ()


class DraftDecoder(nn.Module):
    """Draft decoder in plain operations, with the trainer's interface of heads."""

    ids = None

    def __init__(self, decoder: Decoder, raw: dict[str, Any], target: Path) -> None:
        """Wrap a decoder.

        `raw`: contents of its config.json. `target`: folder with the tokenizer.
        """
        super().__init__()
        self.decoder, self.raw, self.target = decoder, raw, target
        self.config = DraftConfig(decoder.vocab_size)
        self.register_buffer("cos", decoder.get_buffer("cos_0"), persistent=False)
        self.register_buffer("sin", decoder.get_buffer("sin_0"), persistent=False)

    @property
    def lm_head(self) -> nn.Linear:
        """LM head, whose weight is that of the embedding."""
        return self.decoder.head

    def before_logits(self, states_BTD: Tensor) -> Tensor:
        """Return the input of the LM head."""
        return self.decoder.norm(states_BTD)

    def unroll(self, lesson: Lesson, steps: int = 1) -> list[Tensor]:
        """Return states [1, T, d] as `Head.unroll` does.

        The states are equal in all steps, since a decoder reads its drafts like text.
        """
        x_1TD = self.decoder.embed(lesson.text_N[None, :-1])
        place_T = torch.arange(x_1TD.shape[1], device=x_1TD.device)
        tables = self.get_buffer("cos")[None, place_T], self.get_buffer("sin")[None, place_T]
        for block in self.decoder.blocks:
            assert isinstance(block, Block)
            q, k, v = qkv(block.attn, block.attn_norm(x_1TD), *tables)
            if block.attn.query_factors is not None:
                q = q * block.attn.query_factors[place_T, None]
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=block.attn.scale, enable_gqa=True)
            x_1TD = x_1TD + block.attn.o(attended.transpose(1, 2).flatten(2))
            x_1TD = block.mlp(x_1TD, block.mlp_norm, x_1TD)
        return [x_1TD[:, 1:]] * steps


Learner = Head | DraftDecoder
"""Head or draft decoder."""


def unroll(learner: Learner, lesson: Lesson, steps: int) -> list[Tensor]:
    """Return states [1, T, D] of a text and its chains."""
    if isinstance(learner, DraftDecoder):
        return learner.unroll(lesson, steps)
    return learner.unroll(lesson.tokens_1T, lesson.features_1TF, steps)


@torch.no_grad()
def initial_draft(folder: Path, target: Decoder, *, layers: int, hidden_size: int | None) -> DraftDecoder:
    """Return a draft decoder of evenly spread target layers, projected if narrower.

    The target must have its plain linears. Raises ValueError for unknown architectures.
    """
    c = target.config
    d, num = hidden_size or max(64, c.hidden_size // 128 * 64), len(target.blocks)
    if (
        c.gemma_norm
        or c.sandwich_norms
        or c.embedding_multiplier != 1
        or c.experts is not None
        or any(kind != c.layer_types[0] for kind in c.layer_types)
    ):
        raise ValueError(f"drafts for architecture {c.model_type!r} are not supported; give a target like Llama")
    if not (1 <= layers <= num and 1 <= d <= c.hidden_size):
        raise ValueError(
            f"--layers is {layers} and --hidden-size {d}; the target has {num} and {c.hidden_size}; give at most that"
        )
    raw = {name: value for name, value in read_config(folder).items() if name not in ("layer_types", "auto_map")}
    raw |= {"num_hidden_layers": layers, "hidden_size": d, "head_dim": c.head_dim, "tie_word_embeddings": True}
    raw |= {"torch_dtype": str(target.embed.weight.dtype).removeprefix("torch.")}
    place: dict[str, Any] = {"dtype": target.embed.weight.dtype, "device": target.embed.weight.device}
    draft = DraftDecoder(Decoder(config_from_hf(raw), **place).requires_grad_(False), raw, folder)
    _copy(draft.decoder, target, [target.blocks[i * (num - 1) // max(1, layers - 1)] for i in range(layers)])
    return draft.eval()


def _copy(decoder: Decoder, target: Decoder, blocks: Iterable[nn.Module]) -> None:
    """Copy the target's embedding, these layers and the last norm."""
    table_VD, d = target.embed.weight.double(), decoder.config.hidden_size
    D = table_VD.shape[1]
    if d == D:
        decoder.embed.load_state_dict(target.embed.state_dict())
        decoder.norm.load_state_dict(target.norm.state_dict())
        for to, block in zip(decoder.blocks, blocks, strict=True):
            to.load_state_dict(block.state_dict())
        return
    part_Dd = torch.linalg.eigh(table_VD.T @ table_VD).eigenvectors[:, -d:].flip(1)
    scale = (D / d) ** 0.5  # norms make vectors as long as the root of their size
    decoder.embed.weight.copy_(table_VD @ part_Dd)
    decoder.norm.weight.fill_(target.norm.weight.double().mean() * scale)
    for to, block in zip(decoder.blocks, blocks, strict=True):
        for name, value in block.state_dict().items():
            slot, wide = to.get_parameter(name), value.double()
            if name in ("attn_norm.weight", "mlp_norm.weight"):
                slot.fill_(scale)
            elif name in ("attn.qkv.weight", "mlp.gate_up.weight"):
                norm_D = block.get_parameter(f"{'attn' if 'attn' in name else 'mlp'}_norm.weight").double()
                slot.copy_(wide * norm_D @ part_Dd)
            elif name in ("attn.o.weight", "mlp.down.weight", "attn.o.bias", "mlp.down.bias"):
                slot.copy_(part_Dd.T @ wide)
            else:
                slot.copy_(wide)


def save_draft(draft: DraftDecoder, folder: Path) -> None:
    """Write a checkpoint: weights, config and the target's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft.raw, indent=2) + "\n")
    tensors = {name: slot.detach().cpu().contiguous() for name, slot in decoder_tensors(draft.decoder)}
    write_tensors(tensors, folder / "model.safetensors")
    copy_texts(draft.target, folder)
