"""Types of fields: each field of the public dataclasses with values of the right type and of wrong ones."""

from __future__ import annotations

import array
import enum
import math
import pickle
import subprocess
import sys
from collections import deque
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quant.config import QuantConfig
from sharesd.config import EngineConfig, OffloadConfig, PipelineConfig
from sharesd.drafters import registry
from sharesd.field_types import DefaultLimit
from sharesd.sampling_params import SamplingParams, cut_by_context
from sharesd.startup.option_values import engine_config


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


TWO = enum.IntEnum("Number", {"TWO": 2})(2)
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 10**30, 1.0, 0.5, math.nan, math.inf, 1j, TWO),
    *("", "mat", "1", "auto", "off", "caf\udcff", b"mat", bytearray(b"m"), memoryview(b"mat"), Path("mat")),
    *([], (), {}, set(), [1], (1, 2), [True], [1.0], ["a", "b"], ("a",), ["a", 1], [None], [b"a"], {"a"}, {1: 2}),
    *({"15": 1.0}, {15: 1.0}, {15: "a"}, {True: 1.0}, {None: None}, {1.5: 1.0}, range(3), deque(["a"]), iter("ab")),
    *(np.float32(0.5), np.float64(1), np.longdouble(1), np.int64(1), np.uint8(2), np.bool_(True), np.str_("mat")),
    *(np.array([1, 2]), np.array([1.0]), np.array([True]), np.array(2), np.array(["a"]), np.array([[1]]), np.array([])),
    *(np.datetime64("2020"), np.timedelta64(2, "ns"), torch.tensor(2), torch.tensor(0.5), torch.tensor(True)),
    *(torch.tensor([1, 2]), torch.tensor([0.5]), torch.ones(1, device="meta"), torch.float32, array.array("i", [1])),
    *(Decimal(1), Fraction(1, 2), object(), object, len, Ellipsis, NotImplemented, Broken(), SamplingParams()),
]
HELD: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(["max_new_tokens", "min_new_tokens", "top_k", "seed", "top_logprobs"], int),
    **dict.fromkeys(["temperature", "top_p", "min_p"], float),
    **dict.fromkeys(["repetition_penalty", "presence_penalty", "frequency_penalty"], float),
    **dict.fromkeys(["ignore_eos", "logprobs", "prompt_logprobs", "speculate"], bool),
}
HELD |= {"stop": tuple, "stop_token_ids": tuple, "logit_bias": dict, "grammar": (str, type(None)), "acceptance": str}
ITEMS = {"stop": str, "stop_token_ids": int}


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_a_field_holds_its_type_or_refuses_by_name(name: str) -> None:
    more: dict[str, Any] = {"logprobs": True} if name in ("top_logprobs", "prompt_logprobs") else {}
    for value in ODD:
        try:
            held = getattr(SamplingParams(**{**more, name: value}), name)
        except ValueError as error:
            assert name in str(error) and "\n" not in str(error), (name, error)
            continue
        assert isinstance(held, HELD[name]) and (HELD[name] is bool) == isinstance(held, bool), (name, held)
        assert type(held).__module__ in ("builtins", DefaultLimit.__module__), (name, held)
        if isinstance(held, tuple):
            assert all(type(item) is ITEMS[name] for item in held)
        if isinstance(held, dict):
            assert all(type(token) is int and type(amount) is float for token, amount in held.items())


@pytest.mark.parametrize("owner", [EngineConfig, OffloadConfig, PipelineConfig])
def test_options_refuse_wrong_types_by_name(owner: type) -> None:
    for place, name in enumerate(field.name for field in fields(owner)):
        for value in ODD[place % 5 :: 5]:  # some of them: a config has many fields
            try:
                owner(**{name: value})
            except ValueError as error:
                assert name in str(error), (name, value, error)


@pytest.mark.parametrize("name", [field.name for field in fields(QuantConfig)])
def test_quantizations_raise_value_errors_alone(name: str) -> None:
    odd = [each for each in ODD if not isinstance(each, Broken)]
    for value in (*odd, {"down": 8}, {"down": "8"}, [("down", True)], 4.0, "down"):
        try:
            hash(QuantConfig(**{name: value}))
        except ValueError as error:
            assert str(error)


def test_keywords_of_llm_raise_value_errors_alone() -> None:
    options = {field.name for spec in registry.specs() for field in fields(spec.options)}
    names = [field.name for field in fields(EngineConfig) if field.name not in ("mode", "drafter_options")]
    for place, name in enumerate((*names, *options, "max_contxt")):
        for value in ODD[place % 5 :: 5]:
            try:
                engine_config({name: value}, modes=("suffix",))
            except ValueError as error:
                assert str(error)


TABLE: list[tuple[str, Any, Any]] = [
    ("stop", "mat", ("mat",)),
    ("stop", ["a", np.str_("b")], ("a", "b")),
    ("stop", None, ()),
    ("stop_token_ids", np.array([3, 4], np.uint16), (3, 4)),
    ("stop_token_ids", torch.tensor([3, 4]), (3, 4)),
    ("stop_token_ids", None, ()),
    ("temperature", 1, 1.0),
    ("temperature", np.float16(0.5), 0.5),
    ("top_k", np.int32(4), 4),
    ("top_k", np.array(4), 4),
    ("seed", None, 0),
    ("logit_bias", {np.int64(5): np.float32(2)}, {5: 2.0}),
    ("logit_bias", None, {}),
    ("max_new_tokens", None, 128),
    ("logprobs", np.bool_(True), True),
    ("logprobs", None, False),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("stop", b"mat", "stop is b'mat'; give a text, or a list of texts"),
    ("stop", {"a", "b"}, "stop is {'a', 'b'}; give a text, or a list of texts"),
    ("stop", ["a", 5], "stop[1] is 5; give a text"),
    ("stop_token_ids", [True], "stop_token_ids[0] is True; give a whole number"),
    ("stop_token_ids", 5, "stop_token_ids is 5; give a list of whole numbers"),
    ("stop_token_ids", [-1], "stop_token_ids has -1; token ids are at least 0"),
    ("temperature", "0.5", "temperature is '0.5'; give a number"),
    ("temperature", None, "temperature is None; give a number"),
    ("temperature", True, "temperature is True; give a number"),
    ("top_k", 1.0, "top_k is 1.0; give a whole number"),
    ("logit_bias", {"15": 1.0}, "logit_bias has a key that is '15'; give whole numbers as keys"),
    ("logit_bias", {15: "a"}, "logit_bias[15] is 'a'; give a number"),
    ("logit_bias", [15], "logit_bias is [15]; give a dict of whole numbers and numbers"),
    ("ignore_eos", 1, "ignore_eos is 1; give True or False"),
    ("grammar", 5, "grammar is 5; give a text or None"),
    ("acceptance", "fast", "acceptance is 'fast'; choose one of match, rejection, block"),
]


def test_values_are_converted_or_refused() -> None:
    for name, given, held in TABLE:
        found = getattr(SamplingParams(**{name: given}), name)
        assert found == held and isinstance(found, type(held)), (name, given)
    for name, given, message in REFUSED:
        with pytest.raises(ValueError) as error:
            SamplingParams(**{name: given})
        assert sorted(str(error.value)) == sorted(message)  # sets have any order


def test_options_are_converted() -> None:
    made = EngineConfig(heads="head", ignore_keys="key", tree=[2, np.int64(4), 8], target=Path("m"), max_context=None)
    assert (made.heads, made.ignore_keys, made.tree) == (("head",), ("key",), (2, 4, 8))
    assert (made.target, made.max_context) == ("m", "auto")
    for given, message in [
        ({"tree": (2, 4)}, r"tree is \(2, 4\); give 3 whole numbers or one of auto, off"),
        ({"max_context": "long"}, "max_context is 'long'; give a whole number or auto"),
        ({"exact": 1}, "exact is 1; give True or False"),
        ({"num_draft": "4"}, "num_draft is '4'; give a whole number or None"),
        ({"split": ["cuda:0"]}, "split is .*; give a PipelineConfig"),
    ]:
        with pytest.raises(ValueError, match=message):
            EngineConfig(**given)


def test_no_torch_and_no_numpy_is_imported() -> None:
    code = "import sys, sharesd.sampling_params as it; it.SamplingParams(seed=None); print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "sharesd.field_types" in imported and not {"torch", "numpy"}.intersection(imported)


def test_a_default_length_is_known_from_a_given_one() -> None:
    """It is kept by copies and across processes."""
    default, given = SamplingParams(seed=1), SamplingParams(max_new_tokens=128, seed=1)
    assert default == given
    kept = [default, replace(default, seed=2), pickle.loads(pickle.dumps(default)), replace(given, max_new_tokens=None)]
    for made in kept:
        assert cut_by_context([(10, made)], 64) is None
    message = "max_new_tokens is 128 and the context of 64 tokens has room for 54 after a prompt"
    for made in (given, replace(given, seed=2), pickle.loads(pickle.dumps(given))):
        assert (cut_by_context([(4, made), (10, made), (99, made)], 64) or "").startswith(message)
    assert cut_by_context([(10, given)], 138) is None
    least = SamplingParams(min_new_tokens=100)
    assert (cut_by_context([(10, least)], 64) or "").startswith("min_new_tokens is 100")
