"""The fallback: any other causal language model of transformers, over our static KV cache. Slower than the native one.

transformers' own modelling code runs unchanged (eager attention). A cache of ours writes each row's keys and values at
its own length and returns all slots; a mask of ours applies the model's own rule (causal, sliding, chunked) to the
rows' own positions. At load, a few tokens are run both ways: a model whose logits differ is refused.

Legend: B rows, T new tokens, R kept rows, S slots, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import eager_mask

from compile.attention import Branches
from sharesd.kvcache.static import StaticKVCache
from sharesd.models import checkpoint as files
from sharesd.models.decoder_config import Unsupported
from sharesd.models.quiet import quiet_transformers

log = logging.getLogger(__name__)

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers whose only state is keys and values by position."""
GROWING_ROPES = ("dynamic", "longrope")
"""Rope rules whose angles depend on the longest text so far."""
PROBE_SLOTS = 1024
"""Of the cache in the check at load: many, so that code which counts from the last slot is noticed."""
UNLIMITED_CONTEXT = 1 << 20
"""For models without a table of positions (ALiBi)."""


class HFModel(nn.Module):
    """A model of transformers as a `CausalModel`; its linears are nn.Linear or transformers' Conv1D."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config
        self.model = model
        self.name = f"{config.model_type} (transformers)"
        self.vocab_size: int = config.vocab_size
        self.max_context: int = getattr(config, "max_position_embeddings", None) or UNLIMITED_CONTEXT
        self.eos_ids: tuple[int, ...] = ()
        self.takes_trees = False
        self.step_widths: frozenset[int] = frozenset()
        self._takes = inspect.signature(model.forward).parameters
        self._shapes = _kv_shapes(model)

    def new_cache(self, batch: int, slots: int, taps: Sequence[int] = ()) -> StaticKVCache:
        """See `sharesd.models.base.CausalModel.new_cache`."""
        if taps:
            raise ValueError(f"{self.name} hands out no hidden states; trained heads need a native decoder")
        model = self.model
        return StaticKVCache(
            shapes=self._shapes, batch=batch, slots=slots, dtype=model.dtype, device=model.device, plain=True
        )

    def forward(
        self,
        tokens_BT: Tensor,
        cache: StaticKVCache,
        keep_BR: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        """See `sharesd.models.base.CausalModel.forward`."""
        assert branches is None, "the fallback takes no trees"
        B, T = tokens_BT.shape
        inputs: dict[str, Any] = {
            "input_ids": tokens_BT,
            "past_key_values": _RowCache(cache),
            "attention_mask": torch.ones(B, cache.slots, dtype=torch.int64, device=tokens_BT.device),
            "use_cache": True,
        }
        if "position_ids" in self._takes:
            positions_BT = cache.lengths[:, None] + torch.arange(T, device=tokens_BT.device)
            inputs["position_ids"] = positions_BT.clamp(max=self.max_context - 1)  # padding rows may lie beyond
        if keep_BR is not None and B == 1 and "logits_to_keep" in self._takes:
            return self.model(**inputs, logits_to_keep=keep_BR[0]).logits
        logits_BTV = self.model(**inputs).logits
        if keep_BR is None:
            return logits_BTV
        return logits_BTV.gather(1, keep_BR[:, :, None].expand(-1, -1, logits_BTV.shape[-1]))


def load_hf(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> HFModel:
    """A checkpoint through transformers; ValueError, naming the architecture, if it cannot be served exactly."""
    files.weight_files(folder)
    AttentionMaskInterface.register("eager", _per_row_mask)
    with quiet_transformers():
        model = _load(folder, dtype, trust_remote_code)
        try:
            served = HFModel(model.to(device).eval().requires_grad_(False))
            _check_exact(served)
        except Unsupported:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError) as error:
            raise _refusal(model.config, f"code that does not run over a static cache ({error})") from error
    served.eos_ids = files.eos_ids(folder)
    log.warning("%s runs through transformers, slower than a native decoder", model.config.model_type)
    return served


def _load(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        _refuse_by_config(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Unsupported:
        raise
    except (OSError, KeyError, ImportError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"transformers {transformers.__version__} cannot load {folder}: {reason}") from error
    model, report = loaded
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise ValueError(f"{folder} lacks weights of {config.model_type!r}: {', '.join(absent[:3])}; download it again")
    if getattr(model, "_is_stateful", False):
        raise _refusal(config, "state besides keys and values")
    return model


def _refusal(config: Any, feature: str) -> Unsupported:
    return Unsupported(
        f"architecture {config.model_type!r} is not supported: it has {feature}; give a decoder-only attention model"
    )


def _refuse_by_config(config: Any) -> None:
    """What is known to be impossible before any weight is read."""
    if config.is_encoder_decoder:
        raise _refusal(config, "an encoder")
    known = AutoModelForCausalLM._model_mapping
    if type(config) in known:
        if getattr(known[type(config)], "_is_stateful", False):
            raise _refusal(config, "state besides keys and values")
    elif not hasattr(config, "auto_map"):
        raise _refusal(config, "no causal language model in transformers")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise _refusal(config, f"layers of type {kind!r}")
    rope = getattr(config, "rope_parameters", None) or {}
    for params in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if params.get("rope_type") in GROWING_ROPES:
            raise _refusal(config, f"rope type {params['rope_type']!r}, whose angles change as the text grows")


def _kv_shapes(model: Any) -> list[tuple[int, int]]:
    """Heads and head size of every layer's keys and values, found by running one token."""
    with torch.inference_mode():
        cache = model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True).past_key_values
    shapes = []
    for layer in getattr(cache, "layers", ()):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4 or keys.shape != values.shape:
            raise _refusal(model.config, f"a cache layer {type(layer).__name__} of another shape than keys and values")
        shapes.append((keys.shape[1], keys.shape[3]))
    if not shapes:
        raise _refusal(model.config, "no key/value cache")
    return shapes


def _check_exact(served: HFModel) -> None:
    """Run a few tokens plainly and through the static cache, in rows of different lengths: logits must agree."""
    config, device = served.model.config, served.model.device
    tokens_BT = (torch.arange(14, device=device).view(2, 7) * 37 + 11) % config.vocab_size
    cache = served.new_cache(2, min(PROBE_SLOTS, served.max_context))
    with torch.inference_mode():
        plain = served.model(tokens_BT, use_cache=False).logits
        rows = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 2]], device=device)  # the second row has 3 tokens and padding
        served(tokens_BT.gather(1, rows), cache)
        cache.lengths += torch.tensor([4, 3], device=device)
        rows = torch.tensor([[4, 5, 6], [3, 4, 5]], device=device)
        ours = served(tokens_BT.gather(1, rows), cache)
    wanted = plain.gather(1, rows[:, :, None].expand_as(ours))
    error = (ours - wanted).float().norm() / wanted.float().norm()
    limit = 1e-4 if served.model.dtype in (torch.float32, torch.float64) else 1e-1
    if not error < limit:
        raise _refusal(config, f"logits which a static cache does not reproduce (relative error {error:.1e})")


class _RowLayer(CacheLayerMixin):
    """One layer's tensors, written at each row's own length."""

    def __init__(self, keys_BKSd: Tensor, values_BKSd: Tensor, lengths_B: Tensor) -> None:
        super().__init__()
        self.keys = self.k = keys_BKSd
        self.values = self.v = values_BKSd
        self.lengths = lengths_B
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("made with its tensors")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        B, T = key_states.shape[0], key_states.shape[2]
        rows_B1 = torch.arange(B, device=key_states.device)[:, None]
        slots_BT = self.lengths[:, None] + torch.arange(T, device=key_states.device)
        self.k[rows_B1, :, slots_BT] = key_states.transpose(1, 2)
        self.v[rows_B1, :, slots_BT] = value_states.transpose(1, 2)
        return self.k, self.v

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.k.shape[2], 0

    def get_seq_length(self) -> Tensor:  # type: ignore[override]  # per row; `_per_row_mask` expects it
        return self.lengths

    def get_max_length(self) -> int:
        return self.k.shape[2]


class _RowCache(Cache):
    """A static cache in the form that transformers' models write to."""

    def __init__(self, cache: StaticKVCache) -> None:
        super().__init__(layers=[_RowLayer(k, v, cache.lengths) for k, v in zip(cache.k, cache.v, strict=True)])


def _per_row_mask(*args, **kwargs) -> Tensor | None:
    """Additive mask [B, 1, T, S] for rows at different positions; transformers' own mask for all other callers."""
    lengths_B = kwargs.get("q_offset")
    if not (isinstance(lengths_B, Tensor) and lengths_B.ndim == 1):
        return eager_mask(*args, **kwargs)
    B, T, S = kwargs["batch_size"], kwargs["q_length"], kwargs["kv_length"]
    device = lengths_B.device
    batch = torch.arange(B, device=device).view(B, 1, 1, 1)
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    query = (lengths_B[:, None] + torch.arange(T, device=device)).view(B, 1, T, 1)
    key = torch.arange(S, device=device).view(1, 1, 1, S)
    seen = kwargs["mask_function"](batch, head, query, key).expand(B, 1, T, S)
    dtype = kwargs["dtype"]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
