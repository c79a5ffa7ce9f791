"""Base classes of bodies, with the request fields that are accepted and have no effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, create_model


class Strict(BaseModel):
    """Base schema without unknown keys, conversions, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Loose(Strict):
    """Base schema that ignores unknown keys."""

    model_config = ConfigDict(extra="ignore")


IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "request_id", "rid", "priority", "cache_salt"),
    *("cache_prompt", "id_slot", "n_keep", "n_discard", "timings_per_token", "return_progress", "backend_sampling"),
    # parameters of samplers that are not supported and that are off by default
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold"),
    *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "repeat_last_n", "adaptive_decay"),
)
"""Fields without effect on the answer, whatever their value."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (1,),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM and SGLang
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "regex": ("",),
    "ebnf": ("",),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    # llama.cpp and its relatives
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "smoothing_factor": (0,),
    "adaptive_target": (-1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "min_keep": (0,),
    "penalize_nl": (False,),
    "penalty_prompt": (),
    "samplers": (),
    "n_indent": (0,),
    "n_probs": (0,),
    "t_max_predict_ms": (0, -1),
    "return_tokens": (False,),
    "post_sampling_probs": (False,),
    "response_fields": ([],),
    "lora": ([],),
    "grammar": ("",),
    "json_schema": ({},),
    "parse_tool_calls": (True,),
    "thinking_forced_open": (False,),
}
"""Field -> values without effect, in addition to null; others are refused."""


def unset(*values: Any) -> BeforeValidator:
    """Return a validator that treats `values` as null."""
    return BeforeValidator(lambda value: None if _is_one(value, values) else value)


def _only(values: tuple[Any, ...]) -> AfterValidator:
    shown = " or ".join(json.dumps(value) for value in (*values, None))

    def check(value: Any) -> None:
        if value is not None and not _is_one(value, values):
            raise ValueError(f"only {shown} is supported")

    return AfterValidator(check)


def _is_one(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def _without_empty(stops: Any) -> Any:
    return [stop for stop in stops if stop != ""] if isinstance(stops, list) else None if stops == "" else stops


WITHOUT_EMPTY = BeforeValidator(_without_empty)
"""Validator that drops empty texts."""


if TYPE_CHECKING:
    Accepted = Strict
else:
    _make: Callable[..., type[Strict]] = create_model
    Accepted = _make(
        "Accepted",
        __base__=Strict,
        **dict.fromkeys(IGNORED, (Any, None)),
        **{name: (Annotated[Any, _only(values)], None) for name, values in NEUTRAL.items()},
    )
    """Base schema with the fields of both tables."""
