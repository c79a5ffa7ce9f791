"""Quantization config and its command-line syntax; no heavy imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from quant.formats import DEFAULT, FORMATS, QuantFormat

HEAD = "head"
CALIBRATED = "calibrated"
EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantConfig:
    """Quantization of the drafter's linears.

    Hashable; `parse(config.spec, config.skips)` returns an equal config.
    """

    method: str = DEFAULT
    """Name of a format in `quant.formats`."""
    bits: int = 4
    """Bits per weight, except for the projections in `proj_bits`."""
    group_size: int = 64
    """Weights along a row with one scale.

    Ignored if the format has one scale per row for these bits, as `hqq` has at 8.
    """
    head_bits: int | None = None
    """Bits of the LM head; None: full precision."""
    proj_bits: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    """Projection name -> bits, instead of `bits`.

    Stored as a sorted tuple of pairs.
    """
    skip_layers: tuple[int, ...] = ()
    """Indices of layers left at full precision."""
    skip_projs: tuple[str, ...] = ()
    """Projections left at full precision in every layer, e.g. `down`."""
    calibrated: bool = False
    """True if weights of fewer than 8 bits are rounded for the model's own answers, by an earlier calibration."""
    experts: int | None = None
    """Experts of a token in drafts of a mixture; None: as many as the target has."""

    def __post_init__(self) -> None:
        self._check_types()
        proj_bits = dict(self.proj_bits)
        skip_projs = set(self.skip_projs)
        if not isinstance(self.method, str) or self.method not in FORMATS:
            raise ValueError(f"quantization method is {self.method!r}; choose one of {', '.join(FORMATS)}")
        named_bits = {"bits": self.bits, **{f"bits of {name}": bits for name, bits in proj_bits.items()}}
        if self.head_bits is not None:
            named_bits["bits of head"] = self.head_bits
        for name, bits in named_bits.items():
            _check_choice(f"{name} ({self.method})", bits, self.format.bits)
        _check_choice(f"group size ({self.method})", self.group_size, self.format.group_sizes)
        if self.calibrated and not can_be_calibrated(self):
            raise ValueError(
                f"{self.spec} cannot be calibrated; use hqq with 4, 3 or 2 bits, for example hqq:4:64,head=4"
            )
        if self.experts is not None and not (_is_whole(self.experts) and self.experts > 0):
            raise ValueError(f"experts is {self.experts!r:.80}; give a whole number from 1, or leave it out")
        if self.format.keeps_weights:
            self._check_kept()
        if HEAD in proj_bits:
            raise ValueError(f"proj_bits names the LM head; use head_bits={proj_bits[HEAD]} instead")
        for layer in self.skip_layers:
            if layer < 0:
                raise ValueError(f"skipped layer is {layer}; layers are counted from 0")
        if HEAD in skip_projs and self.head_bits is not None:
            raise ValueError(f"the LM head has {self.head_bits} bits and is skipped too; drop one of the two")
        skip_projs.discard(HEAD)  # the head is full by default
        both = sorted(skip_projs & proj_bits.keys())
        if both:
            raise ValueError(
                f"projection {both[0]!r} has {proj_bits[both[0]]} bits and is skipped too; drop one of the two"
            )
        if "" in skip_projs | proj_bits.keys():
            raise ValueError("a projection name is empty; write for example down=8 or proj=down")
        object.__setattr__(self, "proj_bits", tuple(sorted(proj_bits.items())))
        object.__setattr__(self, "skip_layers", tuple(sorted(set(self.skip_layers))))
        object.__setattr__(self, "skip_projs", tuple(sorted(skip_projs)))

    def _check_kept(self) -> None:
        if self.experts is None:
            raise ValueError(
                f"{self.method} without a number of experts would draft with the target itself; use "
                f"{self.method},experts=1, or hqq:4:64,head=4"
            )
        if self.head_bits or self.proj_bits or self.skips:
            raise ValueError(f"{self.method} quantizes no linear; leave out bits of projections, and skips")

    def _check_types(self) -> None:
        """Raise ValueError for a collection of the wrong type; a single projection is a list of one."""
        if isinstance(self.skip_projs, str):
            object.__setattr__(self, "skip_projs", (self.skip_projs,))
        if not isinstance(self.calibrated, bool):
            raise ValueError(f"calibrated is {self.calibrated!r:.80}; give True or False")
        names, layers = self.skip_projs, self.skip_layers
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"skip_projs is {names!r:.80}; give a list of names of projections")
        if not isinstance(layers, (list, tuple)) or not all(map(_is_whole, layers)):
            raise ValueError(f"skip_layers is {layers!r:.80}; give a list of whole numbers")
        pairs = tuple(self.proj_bits.items()) if isinstance(self.proj_bits, Mapping) else self.proj_bits
        if not isinstance(pairs, (list, tuple)) or not all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
        ):
            raise ValueError(f"proj_bits is {self.proj_bits!r:.80}; give a dict of names of projections and bits")

    @classmethod
    def parse(cls, spec: str, skips: Sequence[str] = ()) -> QuantConfig:
        """Parse `METHOD[:BITS[:GROUP]][,PROJECTION=BITS...][,experts=N][,calibrated]` and skips.

        A skip is e.g. `layers=0,29`, `layers=10-14` or `proj=down,o`. `head=BITS` quantizes the LM head. Raises
        ValueError for anything else.
        """
        first, *overrides = spec.split(",")
        method, *numbers = first.split(":")
        if method not in FORMATS or len(numbers) > 2:
            raise ValueError(
                f"quantization is {spec!r}; write METHOD:BITS:GROUP with a METHOD of {', '.join(FORMATS)}, "
                "for example hqq:4:64"
            )
        fields: dict[str, Any] = dict(
            zip(("bits", "group_size"), (_int(n, spec, "hqq:4:64") for n in numbers), strict=False)
        )
        proj_bits: dict[str, int] = {}
        calibrated = CALIBRATED in overrides
        for override in (each for each in overrides if each != CALIBRATED):
            name, _, bits = override.partition("=")
            if name in proj_bits:
                raise ValueError(f"quantization is {spec!r}, which gives {name} twice; keep one")
            proj_bits[name] = _int(bits, spec, "hqq:4:64,down=8")
        head_bits, experts = proj_bits.pop(HEAD, None), proj_bits.pop(EXPERTS, None)
        layers, projs = _parse_skips(skips)
        return cls(
            method=method,
            head_bits=head_bits,
            proj_bits=proj_bits,
            skip_layers=layers,
            skip_projs=projs,
            calibrated=calibrated,
            experts=experts,
            **fields,
        )

    @property
    def format(self) -> QuantFormat:
        """Format of the quantized linears."""
        return FORMATS[self.method]

    @property
    def spec(self) -> str:
        """First argument of `parse` in canonical form, e.g. `hqq:4:64,down=8,head=4`."""
        pairs = [*dict(self.proj_bits).items(), (HEAD, self.head_bits), (EXPERTS, self.experts)]
        method = self.method if self.format.keeps_weights else f"{self.method}:{self.bits}:{self.group_size}"
        parts = [method, *(f"{name}={number}" for name, number in pairs if number)]
        return ",".join([*parts, *([CALIBRATED] if self.calibrated else [])])

    @property
    def skips(self) -> tuple[str, ...]:
        """Skips in canonical form, e.g. `("layers=0,29", "proj=down")`."""
        parts = {"layers": map(str, self.skip_layers), "proj": self.skip_projs}
        return tuple(f"{key}={text}" for key, names in parts.items() if (text := ",".join(names)))

    def __str__(self) -> str:
        return " ".join((self.spec, *(f"skip {skip}" for skip in self.skips)))


parse_quant = QuantConfig.parse


def can_be_calibrated(quant: QuantConfig) -> bool:
    """True if a calibration rounds some weights of a quantization."""
    bits = {quant.bits, quant.head_bits, *dict(quant.proj_bits).values()}
    return bool(bits & {*quant.format.calibrated_bits})


def _parse_skips(skips: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    layers: list[int] = []
    projs: list[str] = []
    for skip in skips:
        key, _, values = skip.partition("=")
        if key not in ("layers", "proj") or not values:
            raise ValueError(f"quantization skip is {skip!r}; write layers=0,29 or proj=down,o")
        if key == "proj":
            projs += values.split(",")
            continue
        for value in values.split(","):
            first, dash, last = value.partition("-")
            low = _int(first, skip, "layers=0,29 or layers=10-14")
            layers += range(low, 1 + (_int(last, skip, "layers=10-14") if dash else low))
    return tuple(layers), tuple(projs)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not _is_whole(value) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(str, allowed))}")


def _int(text: str, whole: str, example: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{whole!r} has {text!r} where a number belongs; write for example {example}")
    return int(text)
