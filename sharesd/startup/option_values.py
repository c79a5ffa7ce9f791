"""Values of options from texts, for flags and for keywords of `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from quant.config import QuantConfig
from sharesd.config import DType, EngineConfig, Offload, OffloadConfig, PipelineConfig
from sharesd.drafters import selection
from sharesd.drafters.registry import Need
from sharesd.field_types import converted, typed
from sharesd.startup.conflicts import check_options

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Short names of dtypes."""


def whole(text: str) -> int:
    """Return a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def tree(text: str) -> str | tuple[int, ...]:
    """Return three whole numbers, K:DEPTH:BUDGET, or `auto` or `off`."""
    if text in ("auto", "off"):
        return text
    parts = text.split(":")
    if len(parts) != 3:
        raise ValueError(f"{text!r} is not K:DEPTH:BUDGET, auto or off; for example 2:4:8")
    return tuple(map(whole, parts))


def names(text: str) -> tuple[str, ...]:
    """Return names from a text that separates them by commas."""
    return tuple(name.strip() for name in text.split(","))


def dtype(text: str) -> str:
    """Return a dtype, by its long or its short name."""
    name = DTYPES.get(text, text)
    if name not in get_args(DType):
        raise ValueError(f"{text!r} is not one of {', '.join((*get_args(DType), *DTYPES))}")
    return name


def split(text: str) -> PipelineConfig:
    """Return pipeline stages from a text.

    The text has devices separated by commas, `auto`, or a file with a device map.
    """
    if text == "auto" or text.endswith(".json"):
        return PipelineConfig(device_map=text)
    return PipelineConfig(devices=names(text))


def engine_config(
    given: Mapping[str, Any],
    *,
    modes: Sequence[str],
    replicas: int | None = None,
    quant_skip: Sequence[str] = (),
) -> EngineConfig:
    """Return the config from options by name: keywords of `LLM`, or the values of flags.

    Nested options may be texts. The annotations of `EngineConfig` and of the drafters' options say what else is
    accepted.

    Args:
        modes: modes that are loaded; the first is the config's, or the first with a second model, if that is given.
        replicas: as in `conflicts.option_conflicts`, as is `quant_skip`.

    Raises:
        ValueError: unknown keywords, and values that cannot be honoured.
    """
    own = [field.name for field in fields(EngineConfig) if field.name not in ("mode", "drafter_options")]
    of_drafters = selection.option_fields()
    known = [*own, *of_drafters]
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        near = get_close_matches(unknown, known, n=1)
        hint = f"use {near[0]}" if near else f"use one of {', '.join(known)}"
        raise ValueError(f"{unknown} is not an option of LLM; {hint}")
    values = {name: _parsed(name, value) for name, value in given.items()}
    values["drafter_options"] = {
        name: converted(options, name, values.pop(name)) for name, options in of_drafters.items() if name in values
    }
    auto = isinstance(values.get("quant"), str)  # "auto", the only text that is left
    if auto:
        del values["quant"]
    when = values.get("offload", "auto")
    if isinstance(when, str):
        values["offload"] = _offload(when, values)
    users = selection.needing(Need.SECOND_MODEL) if values.get("draft") is not None else ()
    mode = next((mode for mode in modes if mode in users), modes[0])
    config = EngineConfig(mode=mode, **values)
    check_options(config, modes, replicas=replicas, quant_skip=quant_skip)
    if auto:
        from sharesd.startup.resolve import with_dequantize  # importing torch takes seconds
        from sharesd.weights.quant_tuning_cache import best_quant

        best = best_quant(with_dequantize(config))
        if best is not None:
            config = replace(config, quant=best, offload=replace(config.offload, choose_bits=False))
    return config


def _offload(when: str, given: Collection[str]) -> OffloadConfig:
    """Return an offload config whose plan chooses the options not given."""
    typed(Offload, "offload", when)
    return OffloadConfig(when=when, choose_bits="quant" not in given, choose_depth="max_draft" not in given)  # type: ignore[arg-type]


_TEXTS: dict[str, Callable[[str], Any]] = {
    "tree": tree,
    "hybrid_with": names,
    "auto_drafters": names,
    "dtype": dtype,
    "split": split,
    "quant": lambda text: text if text == "auto" else QuantConfig.parse(text),
    "head_quant": QuantConfig.parse,
    "num_draft": lambda text: None if text == "auto" else text,
    "threads": lambda text: None if text == "auto" else text,
}
"""Fields -> parsers of their texts."""


def _parsed(name: str, value: Any) -> Any:
    if name == "split" and isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or name not in _TEXTS:
        return value
    try:
        return _TEXTS[name](value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
