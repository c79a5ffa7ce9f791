"""Quantization as users write it."""

from __future__ import annotations

import pytest

from quant.config import QuantConfig, parse_quant


@pytest.mark.parametrize(
    ("spec", "skips", "canonical"),
    [
        ("hqq", (), "hqq:4:64"),
        ("hqq:4:64", (), "hqq:4:64"),
        ("hqq:8", (), "hqq:8:64"),
        ("bnb:8", (), "bnb:8:64"),
        ("hqq:2:32,o=8,down=4,head=8", (), "hqq:2:32,down=4,o=8,head=8"),
        ("hqq:4", ("layers=29,0", "proj=o,down"), "hqq:4:64 skip layers=0,29 skip proj=down,o"),
        ("hqq:4", ("layers=1-3", "layers=3,7"), "hqq:4:64 skip layers=1,2,3,7"),
        ("hqq:4", ("proj=head",), "hqq:4:64"),
        ("stored,experts=2", (), "stored,experts=2"),
        ("hqq:4,experts=1,head=4", ("proj=gate_up,down",), "hqq:4:64,head=4,experts=1 skip proj=down,gate_up"),
    ],
)
def test_config_round_trip(spec: str, skips: tuple[str, ...], canonical: str) -> None:
    config = QuantConfig.parse(spec, skips)
    assert str(config) == canonical
    again = QuantConfig.parse(config.spec, config.skips)
    assert again == config and hash(again) == hash(config)


def test_config_defaults_and_dataclass_form() -> None:
    assert QuantConfig() == parse_quant("hqq:4:64")
    assert QuantConfig(proj_bits={"o": 8, "down": 2}) == parse_quant("hqq:4:64,down=2,o=8")
    assert QuantConfig(skip_layers=(3, 1, 3), skip_projs=("o",)).skips == ("layers=1,3", "proj=o")


@pytest.mark.parametrize(
    ("spec", "skips", "value", "remedy"),
    [
        ("gptq:4", (), "gptq", "hqq, bnb, nested, stored"),
        ("", (), "''", "hqq, bnb, nested, stored"),
        ("hqq:4:64:1", (), "hqq:4:64:1", "METHOD:BITS:GROUP"),
        ("hqq:four", (), "'four'", "hqq:4:64"),
        ("hqq:5", (), "5", "8, 4, 3, 2"),
        ("bnb:3", (), "3", "8, 4"),
        ("hqq:4:48", (), "48", "32, 64, 128, 256"),
        ("bnb:4:32", (), "32", "64, 128, 256"),
        ("hqq:4,down", (), "''", "down=8"),
        ("hqq:4,down=5", (), "down", "8, 4, 3, 2"),
        ("hqq:4,=8", (), "empty", "down=8"),
        ("hqq:4,o=8,o=4", (), "o twice", "keep one"),
        ("hqq:4,head=7", (), "head", "8, 4, 3, 2"),
        ("hqq:4", ("layer=3",), "layer=3", "layers=0,29"),
        ("hqq:4", ("layers=",), "layers=", "layers=0,29"),
        ("hqq:4", ("layers=-1",), "layers=-1", "layers=0,29"),
        ("hqq:4", ("layers=a",), "'a'", "layers=0,29"),
        ("hqq:4", ("proj=o,",), "empty", "proj=down"),
        ("hqq:4,o=8", ("proj=o",), "'o'", "drop one"),
        ("hqq:4,head=8", ("proj=head",), "head", "drop one"),
        ("stored", (), "stored", "stored,experts=1"),
        ("stored,experts=1,head=4", (), "quantizes no linear", "leave out"),
        ("stored,experts=1", ("layers=1",), "quantizes no linear", "leave out"),
        ("hqq:4,experts=0", (), "experts is 0", "from 1"),
    ],
)
def test_config_errors_name_value_and_remedy(spec: str, skips: tuple[str, ...], value: str, remedy: str) -> None:
    with pytest.raises(ValueError) as error:
        QuantConfig.parse(spec, skips)
    assert value in str(error.value) and remedy in str(error.value)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [({"skip_layers": (-1,)}, "from 0"), ({"proj_bits": {"head": 8}}, "head_bits=8"), ({"method": "awq"}, "hqq, bnb")],
)
def test_config_errors_of_the_dataclass(fields: dict, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        QuantConfig(**fields)
