"""Calibrated weights of drafts in the cache folder: a folder for each checkpoint and quantization, a file per layer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor, device

from multigpu.tensor_parallel import UNSHARDED, Shard
from quant.config import QuantConfig
from quant.quantized_weight import QuantizedWeight
from quant.solved_linears import QuantTask
from quant.weight_cache import checked_store, pack_weight, save_store, unpack_weight
from sharesd.models.checkpoint import content_hash, system_error
from sharesd_files import JsonCache, atomic_write, cache_root, file_identity

_FORMAT = 2  # raise it when the rounding, the prompts or the files change
_ABOUT = "calibration.json"
REMEDY = "run `sharesd tune --calibrate`"


class CalibrationText(NamedTuple):
    """Text that a calibration reads: token ids of a prompt, and of the model's own answer."""

    prompt: list[int]
    answer: list[int]


class KeptCalibration:
    """The calibration of a checkpoint's weights in one quantization: there, in part there, or missing."""

    def __init__(self, weights: str, quant: QuantConfig) -> None:
        """`weights`: hash of the checkpoint's content."""
        self.quant = replace(quant, calibrated=True)
        self._about = {"weights": weights, "quant": str(self.quant), "format": _FORMAT}
        self.key = hashlib.sha256(repr(self._about).encode()).hexdigest()
        self.folder = cache_root() / "quant" / f"calibrated-{self.key[:16]}"
        self._read: tuple[int | None, dict[str, Tensor]] | None = None

    @classmethod
    def required(cls, folder: Path | None, quant: QuantConfig, part: Shard) -> KeptCalibration:
        """Return the whole calibration of a checkpoint folder.

        Raises:
            ValueError: there is none, or this rank has only a part of each linear.
        """
        what = f"draft_quant is {quant}"
        if folder is None or part != UNSHARDED:
            why = "weights are not read from a checkpoint" if folder is None else "ranks have parts of linears"
            raise ValueError(f"{what}, and {why}; leave out `calibrated`")
        kept = cls(content_hash(folder), quant)
        problem = kept.problem() if kept.folder.exists() else "these weights were not calibrated so"
        if problem is not None:
            remedy = f"run `sharesd tune --calibrate --draft-quant {replace(quant, calibrated=False)}`"
            raise ValueError(f"{what}, and {problem}; {remedy}, or leave out `calibrated`")
        return kept

    def begin(self, source: Path, layers: Sequence[int | None], answers: Sequence[CalibrationText]) -> None:
        """Write what is calibrated, and the answers; OSError if the disk does not take it.

        `source`: the checkpoint folder. `layers`: those with weights to calibrate; None: the head.
        """
        about = {**self._about, "source": str(source), "layers": list(layers), "answers": list(answers)}
        try:
            atomic_write(self.folder / _ABOUT, json.dumps(about | {"checksum": _checksum(about)}))
        except OSError:
            with suppress(OSError):
                self.folder.rmdir()
            raise
        self.__dict__.pop("_found", None)

    def answers(self) -> list[CalibrationText]:
        """Return the answers of a calibration that was begun; else none."""
        return [] if self._found is None else [CalibrationText(*pair) for pair in self._found["answers"]]

    def has(self, layer: int | None) -> bool:
        """Return True if a layer's weights are kept as they were written."""
        try:
            return bool(checked_store(self._file(layer), self.key))
        except ValueError:
            return False

    def write(self, layer: int | None, weights: Mapping[str, QuantizedWeight]) -> None:
        """Keep the weights of a layer by path; OSError if the disk does not take them."""
        tensors: dict[str, Tensor] = {}
        for path, weight in weights.items():
            tensors |= pack_weight(path, weight)
        try:
            save_store(self._file(layer), self.key, tensors)
        except SafetensorError as error:
            raise (system_error(error, self._file(layer)) or error) from error

    def problem(self) -> str | None:
        """Return why a calibration that was begun cannot be used; None if it can."""
        if self._found is None:
            return f"{self.folder / _ABOUT} is damaged, or of other weights or another quantization"
        files = [self._file(layer) for layer in self._found["layers"]]
        is_there = all(file.exists() for file in files)
        # Their content is read once, and again when a file has changed.
        read = JsonCache("settings", "calibrated", [*map(file_identity, files)]) if is_there else None
        if read is not None and read.load(bool):
            return None
        missing = [layer for layer in self._found["layers"] if not self.has(layer)]
        if not missing:
            if read is not None:
                read.keep(True)
            return None
        num = len(self._found["layers"])
        return f"the calibration was cut short or damaged: {num - len(missing)} of {num} layers are there"

    @property
    def identity(self) -> str:
        """Identity of the weights of a calibration that was begun, for what is made from them."""
        return f"{self.key} {hashlib.sha256((self.folder / _ABOUT).read_bytes()).hexdigest()}"

    def read(self, task: QuantTask) -> QuantizedWeight:
        """Return a linear's calibrated weight.

        Raises:
            ValueError: its file is damaged.
        """
        if self._read is None or self._read[0] != task.layer:
            try:
                self._read = task.layer, checked_store(self._file(task.layer), self.key)
            except ValueError as error:
                raise ValueError(f"{error}; {REMEDY}") from error
        tensors = self._read[1]
        size = {"bits": task.bits, "group_size": self.quant.group_size}
        return unpack_weight(task.path, tensors, **size, device=device("cpu"))

    @cached_property
    def _found(self) -> dict[str, Any] | None:
        found = _about(self.folder)
        return found if found is not None and {key: found.get(key) for key in self._about} == self._about else None

    def _file(self, layer: int | None) -> Path:
        return self.folder / f"{'head' if layer is None else f'layer-{layer}'}.safetensors"


def other_calibration(source: Path, weights: str) -> str | None:
    """Return what a calibration of this checkpoint is of, if it is not of these weights in this quantization."""
    for folder in sorted((cache_root() / "quant").glob("calibrated-*")):
        about = _about(folder)
        if about is not None and about.get("weights") == weights:
            return f"the calibration of these weights is of {about.get('quant')}"
        if about is not None and about.get("source") == str(source):
            return f"the calibration of {source} is of other weights"
    return None


def _about(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / _ABOUT).read_bytes())
        return found if found.pop("checksum") == _checksum(found) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _checksum(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()
