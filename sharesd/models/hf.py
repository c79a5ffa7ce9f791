"""Transformers fallback: other causal language models over the static KV cache.

Slower than the native decoder. Modelling code of transformers runs unchanged (eager attention). The cache writes each
row's keys and values at the row's length and returns all slots; the mask applies the model's rule (causal, sliding,
chunked) to the row's positions. At load, a few tokens run both ways: a model whose logits differ is refused.

Legend: B rows, T new tokens, R kept rows, S slots, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import eager_mask
from transformers.utils import logging as hf_logging

from compile.attention import TreeAttentionMask
from sharesd.kvcache.static import StaticKVCache
from sharesd.models import checkpoint
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.hf_config import check_fields, check_transformers_sizes
from sharesd.models.weight_mapping import MISFIT, check_finite, mtp_layers_of, report_unused, unused_part

log = logging.getLogger(__name__)

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types whose only state is keys and values by position."""
GROWING_ROPES = ("dynamic", "longrope")
"""Rope rules whose angles depend on the longest text so far."""
PROBE_SLOTS = 1024
"""KV slots of the check at load.

Many, to detect code that counts from the last slot.
"""
UNLIMITED_CONTEXT = 1 << 20
"""Context of models without a table of positions (ALiBi)."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide the progress bars and warnings of transformers.

    LOGLEVEL is hidden, too: torch modules that it imports raise an error for other spellings than their own.
    """
    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    log_level = os.environ.pop("LOGLEVEL", None)
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        if log_level is not None:
            os.environ["LOGLEVEL"] = log_level
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


class HFModel(nn.Module):
    """Model of transformers as a `CausalModel`; linears are nn.Linear or transformers' Conv1D."""

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
            raise ValueError(f"{self.name} does not expose hidden states, which trained heads need; drop --draft-head")
        model = self.model
        return StaticKVCache(
            shapes=self._shapes, batch=batch, slots=slots, dtype=model.dtype, device=model.device, plain=True
        )

    def forward(
        self,
        tokens_BT: Tensor,
        cache: StaticKVCache,
        keep_BR: Tensor | None = None,
        tree_mask: TreeAttentionMask | None = None,
    ) -> Tensor:
        """See `sharesd.models.base.CausalModel.forward`."""
        assert tree_mask is None, "the fallback does not support draft trees"
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
    """Load a checkpoint through transformers; ValueError if it cannot be served exactly."""
    checkpoint.weight_files(folder)
    AttentionMaskInterface.register("eager", _per_row_mask)
    with quiet_transformers():
        model = _load(folder, dtype, trust_remote_code)
        try:
            served = HFModel(model.to(device).eval().requires_grad_(False))
            _check_exact(served)
        except UnsupportedArchitecture:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise _refusal(model.config, f"code that does not run over a static cache ({reason})") from error
    served.eos_ids = checkpoint.eos_ids(folder)
    log.warning("%s runs through transformers, slower than a native decoder", model.config.model_type)
    return served


def check_tensors(folder: Path, shapes: Mapping[str, Sequence[int]], trust_remote_code: bool) -> None:
    """Raise ValueError if a checkpoint with tensors of these shapes cannot be loaded.

    Nothing is read or allocated: transformers loads tensors without values, since it maps the names and shapes of a
    checkpoint to a model's only while it loads one.
    """
    _check_raw(folder, trust_remote_code)
    with quiet_transformers(), _named(folder):
        config = _read_config(folder, trust_remote_code)
        for part in (config, config.get_text_config()):
            for name in ("quantization_config", "compression_config"):
                if hasattr(part, name):
                    delattr(part, name)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            tensors = {name: torch.empty(*shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        options: dict[str, Any] = {"config": config, "state_dict": tensors, "device_map": "meta"}
        loaded: Any = type(empty).from_pretrained(None, **options, **_REPORTED)
    _refuse_misfits(folder, config, loaded[1])


_REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Options under which transformers reports tensors that do not fit, which are refused here by name."""


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn errors of transformers, which are of its packages' own kinds, into a ValueError that names the folder."""
    try:
        yield
    except UnsupportedArchitecture:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"transformers {transformers.__version__} cannot load {folder}: {reason}") from error


def _read_config(folder: Path, trust_remote_code: bool) -> Any:
    """Return a config of transformers; UnsupportedArchitecture or ValueError if it cannot be served."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    _refuse_by_config(config)
    checkpoint.check_stored(folder, partial(check_transformers_sizes, config.get_text_config()))
    return config


def _check_raw(folder: Path, trust_remote_code: bool) -> None:
    """Raise ValueError for a config.json that transformers is not to read."""
    raw = checkpoint.read_config(folder)
    if raw.get("auto_map") and not trust_remote_code and raw.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"{folder} brings code of its own, for model_type {raw.get('model_type')!r}; read it, and add "
            "--trust-remote-code to run it"
        )
    for part in (raw, checkpoint.section(raw, "text_config")):  # of which some configs make lists
        check_fields(str(raw.get("model_type")), {"num_hidden_layers": part.get("num_hidden_layers")})
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING and not raw.get("auto_map"):
        named = f"architecture {kind!r} is not known to transformers {transformers.__version__}"
        raise ValueError(
            f"{folder}: {named if kind else 'config.json has no model_type'}; "
            + ("install a newer transformers that knows it" if kind else "download the checkpoint again")
        )


def _load(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    _check_raw(folder, trust_remote_code)
    with _named(folder):
        config = _read_config(folder, trust_remote_code)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=trust_remote_code,
            **_REPORTED,
        )
    model, report = loaded
    _refuse_misfits(folder, config, report)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        if embedding is None or parameter is not embedding.weight or (head is not None and head.weight is parameter):
            check_finite(folder, name, parameter)
    if getattr(model, "_is_stateful", False):
        raise _refusal(config, "state besides keys and values")
    return model


def _refuse_misfits(folder: Path, config: Any, report: Mapping[str, Any]) -> None:
    """Raise ValueError for tensors that are missing, of another shape or without a place."""
    for name, found, wanted in report["mismatched_keys"]:
        raise ValueError(f"{folder}: {name} has shape {[*found]} where config.json asks for {[*wanted]}; {MISFIT}")
    absent = sorted(report["missing_keys"])
    if absent:
        remedy = checkpoint.not_causal(config.to_dict()) or "download it again"
        raise ValueError(f"{folder} lacks weights of {config.model_type!r}: {', '.join(absent[:3])}; {remedy}")
    layers = config.get_text_config().num_hidden_layers, mtp_layers_of(config.get_text_config().to_dict())
    parts = {name: unused_part(name, *layers) for name in sorted(report["unexpected_keys"])}
    unknown = [name for name, part in parts.items() if part is None]
    if unknown:
        raise ValueError(
            f"{folder} has tensors for which {config.model_type!r} has no place: {', '.join(unknown[:3])}"
            f"{' and others' if len(unknown) > 3 else ''}; give a checkpoint of the architecture in its config.json"
        )
    report_unused(folder, filter(None, parts.values()))


def _refusal(config: Any, feature: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"architecture {config.model_type!r} is not supported: it has {feature}; give a decoder-only attention model"
    )


def _refuse_by_config(config: Any) -> None:
    """Raise UnsupportedArchitecture if the config alone rules the model out."""
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
    """Return KV heads and head size of each layer, from one token."""
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
    """Check that logits with the static cache equal those without.

    Runs a few tokens both ways, in rows of different lengths.
    """
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
    """Keys and values of one layer, written at each row's length."""

    def __init__(self, keys_BKSd: Tensor, values_BKSd: Tensor, lengths_B: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = self.k = keys_BKSd
        self.values = self.v = values_BKSd
        self.lengths = lengths_B
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("made with its tensors")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
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
    """Static cache in the form that transformers' models write to."""

    def __init__(self, cache: StaticKVCache) -> None:
        super().__init__(layers=[_RowLayer(k, v, cache.lengths) for k, v in zip(cache.k, cache.v, strict=True)])


def _per_row_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the additive mask [B, 1, T, S], one position per row.

    Calls without a position per row return transformers' mask.
    """
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
