"""Layouts of quantized checkpoints: which tensors hold a linear, and its values.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from compile.block_linear import BlockPart

Ranges = Iterable[tuple[int, int]]


class Workers:
    """Threads for ranges of outputs."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(torch.get_num_threads())

    def run(self, function: Callable[[int, int], None], ranges: Ranges) -> None:
        """Call a function for each range; its error is raised here."""
        mode, before = torch.is_inference_mode_enabled(), torch.get_num_threads()

        def call(each: tuple[int, int]) -> None:
            with torch.inference_mode(mode):
                function(*each)

        torch.set_num_threads(1)  # of threads that begin now
        try:
            for _ in self._pool.map(call, ranges):
                pass
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        self._pool.shutdown()


def run_here(function: Callable[[int, int], None], ranges: Ranges) -> None:
    """Call a function for each range, in this thread."""
    for begin, end in ranges:
        function(begin, end)


MISFIT = "give the config.json that the weights were saved with, or download the checkpoint again"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CHUNK_WEIGHTS = 1 << 19
_ROW_STEP = 32  # rows that every packing keeps in whole words


Run = Callable[[Callable[[int, int], None], Ranges], None]
"""Call of a function for ranges of outputs."""


class QuantSection:
    """Section of config.json that says how weights are quantized."""

    def __init__(self, values: object, name: str = "quantization_config") -> None:
        """Take a section; ValueError if it is not an object."""
        if not isinstance(values, Mapping):
            raise ValueError(f"config.json has {name} = {str(values)[:60]}, not an object; {MISFIT}")
        self._values, self._name = values, name

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; `default` if it is left out or null."""
        value = self._values.get(key)
        return default if value is None else value

    def one_of(self, key: str, choices: Sequence[Any], default: Any = None) -> Any:
        """Return a value that is one of `choices`; ValueError for another."""
        value = self.get(key, default)
        if not any(type(value) is type(each) and value == each for each in choices):
            raise self.error(key, f"one of {', '.join(map(str, choices))}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0, or -1."""
        value = self.get(key, default)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.error(key, "a whole number above 0, or -1")
        return value

    def block(self, key: str) -> tuple[int, int]:
        """Return outputs and inputs of a block; ValueError for others."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
            raise self.error(key, "two whole numbers above 0")
        return value[0], value[1]

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; empty if it is left out."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(key, "a list of texts")
        return tuple(value)

    def section(self, key: str) -> QuantSection:
        return QuantSection(self.get(key, {}), f"{self._name}.{key}")

    def sections(self) -> Iterator[QuantSection]:
        """Yield the sections within this one."""
        for key in self._values:
            yield self.section(key)

    def error(self, key: str, wanted: str) -> ValueError:
        value = self._values.get(key)
        found = f"no {self._name}.{key}" if value is None else f"{self._name}.{key} = {str(value)[:60]}"
        return ValueError(
            f"config.json has {found}, and {wanted} is supported; "
            "give a checkpoint quantized otherwise, or at full precision"
        )


class Planes:
    """Tensors of one linear, by the rest of their names."""

    def __init__(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        self.module, self._tensors, self._read = module, tensors, set[str]()

    def __contains__(self, plane: str) -> bool:
        return plane in self._tensors

    def __getitem__(self, plane: str) -> Tensor:
        """Return a tensor; ValueError if it is missing."""
        if plane not in self._tensors:
            raise ValueError(f"tensor {self.module}.{plane} is missing; download the checkpoint again")
        self._read.add(plane)
        return self._tensors[plane]

    def unread(self) -> set[str]:
        """Return the names of tensors that were not taken."""
        return set(self._tensors) - self._read

    def take(self, plane: str, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """Return a tensor of one of these types and shapes.

        -1 is any size. Raises ValueError for another, and for NaN or infinite values.
        """
        tensor = self[plane]
        if not any(
            len(shape) == tensor.dim() and all(b in (a, -1) for a, b in zip(tensor.shape, shape, strict=True))
            for shape in shapes
        ):
            wanted = " or ".join(str(list(shape)).replace("-1", "any") for shape in shapes)
            raise ValueError(f"tensor {self.module}.{plane} has shape {[*tensor.shape]}, and {wanted} fits; {MISFIT}")
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            found = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"tensor {self.module}.{plane} is {found}, and {wanted} fits; {MISFIT}")
        return tensor

    def scales(self, plane: str, *shapes: tuple[int, ...], dtypes: Collection[torch.dtype] = FLOATS) -> Tensor:
        """Return finite numbers in float32; ValueError as `take`."""
        values = self.take(plane, dtypes, *shapes).float()
        if not values.isfinite().all():
            raise ValueError(f"tensor {self.module}.{plane} has NaN or infinite values; download the checkpoint again")
        return values

    def error(self, plane: str, reason: str) -> ValueError:
        return ValueError(f"tensor {self.module}.{plane} {reason}; {MISFIT}")


class NotAsStored(ValueError):
    """A linear whose weights no type of blocks holds."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"linear {module} does not run as stored ({reason}); use --dequantize")
        self.reason = reason


class StoredLinear(ABC):
    """Weights of one linear, as they are stored."""

    order: Tensor | None = None
    """Inputs as blocks have them, see `compile.block_linear`."""

    def __init__(self, module: str, shape: tuple[int, ...]) -> None:
        self.module, self.shape = module, shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @abstractmethod
    def rows(self, begin: int, end: int) -> Tensor:
        """Return the weights of some outputs, float32 [n, K]."""

    def values(self, dtype: torch.dtype = torch.float32, run: Run = run_here) -> Tensor:
        """Return the weights [N, K], rounded once."""
        weight = torch.empty(self.shape, dtype=dtype)

        def fill(begin: int, end: int) -> None:
            weight[begin:end] = self.rows(begin, end)

        run(fill, self.chunks())
        return weight

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of outputs that fit the processor's cache."""
        N, K = self.shape
        step = max(1, _CHUNK_WEIGHTS // K // _ROW_STEP) * _ROW_STEP
        for begin in range(0, N, step):
            yield begin, min(begin + step, N)

    def block_type(self) -> str:
        """Return the type of blocks that hold the same weights.

        Raises NotAsStored if there is none.
        """
        raise self.not_as_stored("its layout has no kernel")

    def block_part(self, run: Run = run_here) -> BlockPart:
        """Return the weights as blocks, see `block_type`."""
        raise NotImplementedError

    def outline(self) -> BlockPart:
        """Return the blocks without their bytes."""
        outputs, inputs = self.shape
        return BlockPart.without_bytes(self.block_type(), outputs, inputs)._replace(order=self.order)

    def not_as_stored(self, reason: str) -> NotAsStored:
        return NotAsStored(self.module, reason)


class FolderLayout(ABC):
    """Layout of the linears of a checkpoint."""

    names: re.Pattern[str]
    """Names of its tensors: groups `module` and `plane`."""
    codes: frozenset[str]
    """Planes of which every linear has one, quantized or not."""
    left_out: frozenset[str] = frozenset()
    """Planes about activations, which are not quantized here."""
    dtypes: frozenset[torch.dtype] = frozenset({torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn})
    """Types of codes; a plane of another one holds plain numbers."""
    excluded: tuple[str, ...] = ()
    """Modules that are not quantized: names, or parts of them."""

    @abstractmethod
    def linear(self, planes: Planes) -> StoredLinear:
        """Return a linear; ValueError if its tensors are not of this layout."""

    def is_quantized(self, planes: Mapping[str, Tensor]) -> bool:
        """Return True if a module's tensors hold a quantized linear."""
        return any(plane in self.codes and tensor.dtype in self.dtypes for plane, tensor in planes.items())

    def weight_name(self, module: str) -> str:
        return f"{module}.weight"

    def excludes(self, module: str) -> bool:
        """Return True if the config says that a module is not quantized."""
        return any(_names_module(each, module) for each in self.excluded)

    def includes(self, module: str) -> bool:
        """Return True if the config says that a module is quantized."""
        return not any(each in module or _names_module(each, module) for each in self.excluded)


def _names_module(name: str, module: str) -> bool:
    """Return True if a name stands for a module or its parents."""
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return f".{name}." in f".{module}."


def pattern_of(planes: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of names `MODULE.PLANE`."""
    return re.compile(rf"(?P<module>.+?)\.(?P<plane>{'|'.join(map(re.escape, planes))})")
