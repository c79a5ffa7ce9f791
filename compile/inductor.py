"""Inductor's compiled forms of a block or of a whole step.

A step has few shapes: one row per sequence (plain and draft steps), two (catching up), and the verify width. Each is
compiled once, ahead of time; everything else runs eagerly. Each compiled form is a function of its own, whose key fixes
shapes, structure and constants: Dynamo's guards are left out, and a call costs no checks. On a GPU pieces of prompts
have few sizes, too. Those that are no steps share a form, in which the number of tokens is a variable.

Blocks of steps on a GPU are often our own operators alone, of which Inductor would make a list of calls. They are not
traced, since each trace takes a second or more of every start.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compile.attention import MAX_STEP
from compile.op_registry import NAMESPACE

Step = Callable[..., Tensor]

torch.compiler.config.cache_key_tag += "sharesd: a storage for each tensor"
# Inductor finds kept code by the shapes of its inputs, whether or not they shared a storage when it was made. These no
# longer do: older code reads beyond their ends, and must not be found.


OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "guard_filter_fn": lambda guards: [False] * len(guards),
    "deterministic": True,  # no sum's order depends on what was faster when a form was made
    "triton.autotune_pointwise": False,  # which would time several kernels for each that is kept
}
"""Options of Inductor, for all forms."""


class CompiledBlocks:
    """Blocks that run a compiled form for `widths` of a step, and for `pieces` of a prompt.

    Blocks with equal structure (module types, sizes and constants) share a form, and so do pieces that attend otherwise
    than steps. `variant` distinguishes forms beyond the structure, such as the position of a precision switch.
    """

    def __init__(
        self, widths: set[int], variant: Callable[[], object] = lambda: None, *, pieces: Collection[int] = ()
    ) -> None:
        self._widths, self._variant = {*widths, *pieces}, variant
        self._long = {size for size in pieces if size > MAX_STEP and size not in widths}
        self._kinds: dict[int, int] = {}  # id of a block -> its kind
        self._signatures: dict[object, int] = {}
        self._forms: dict[tuple[object, ...], Step] = {}

    def __call__(self, block: nn.Module, x_BTD: Tensor, *tensors: Tensor, **constants: int) -> Tensor:
        T = x_BTD.shape[1]
        if T not in self._widths:
            return block(x_BTD, *tensors, **constants)
        kind = self._kinds.get(id(block))
        if kind is None:
            kind = self._kinds[id(block)] = self._signatures.setdefault(structure(block), len(self._signatures))
        shapes = (x_BTD.shape[::2] if T in self._long else x_BTD.shape, *map(_kind, tensors))
        key = (kind, x_BTD.device, *shapes, self._variant(), *constants.items())
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._new_form(block, x_BTD, *tensors, **constants)
        return form(block, x_BTD, *tensors, **constants)

    def _new_form(self, block: nn.Module, x_BTD: Tensor, *tensors: Tensor, **constants: int) -> Step:
        """Return the compiled form for these arguments; on a GPU the block's own `forward` if that is as fast."""
        if x_BTD.device.type == "cuda":
            with _Operators() as operators:  # type: ignore[no-untyped-call]
                block(x_BTD, *tensors, **constants)  # writes what the form will write again
            if operators.are_own:
                return type(block).forward
        if x_BTD.shape[1] in self._long:
            torch._dynamo.mark_dynamic(x_BTD, 1)  # raises an error if a size would be taken for a constant
        return compile_step(type(block).forward)


class CompiledModel:
    """Causal model with its step as one graph for some widths."""

    def __init__(self, model: Any, widths: set[int], variant: Callable[[], object] = lambda: None) -> None:
        self._model, self._widths, self._variant = model, widths, variant
        self._forms: dict[tuple[object, ...], Step] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens_BT: Tensor, cache: Any, keep_BR: Tensor | None = None, tree_mask: Any = None) -> Tensor:
        """Run the model's forward."""
        if tokens_BT.shape[1] not in self._widths:
            return self._model.forward(tokens_BT, cache, keep_BR, tree_mask)
        shapes = (tokens_BT.shape, keep_BR is not None and keep_BR.shape, tree_mask is not None and tree_mask[1].shape)
        key = (cache.slots, cache.recent, cache.taps, *shapes, self._variant())
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = compile_step(type(self._model).forward)
        return form(self._model, tokens_BT, cache, keep_BR, tree_mask)


class CompiledForms:
    """Function with a compiled form for each shape and value.

    The key of a cache is its `kind`.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._forms: dict[tuple[object, ...], Step] = {}

    def __call__(self, *arguments: Any, **constants: Any) -> Tensor:
        values = (*arguments, *(value for _, value in sorted(constants.items())))
        key = (*sorted(constants), *map(_kind, values))
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = compile_step(self._function)
        return form(*arguments, **constants)


class CompiledMethods:
    """Methods of a module, each through `CompiledForms`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Step:
        method = partial(CompiledForms(getattr(type(self._module), name)), self._module)
        setattr(self, name, method)
        return method


class _Operators(TorchDispatchMode):
    """Finds whether all kernels that are launched inside the context are those of our own operators."""

    are_own = True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        self.are_own &= operator.namespace == NAMESPACE or _launches_nothing(operator, args, out)
        return out


def _launches_nothing(operator: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Return True if an operator of torch gave views of its arguments, memory that is not filled, or no tensors."""
    if operator._schema.is_mutable or not args:
        return False
    if operator._schema.name.startswith(("aten::empty", "aten::new_empty")):
        return True
    storages = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
    tensors = [each for each in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(each, Tensor)]
    return all(tensor.untyped_storage()._cdata in storages for tensor in tensors)


def _kind(value: object) -> object:
    """Return the part of an argument that selects the compiled form."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return getattr(value, "kind", value)


def compile_step(function: Callable[..., Tensor]) -> Step:
    """Compile a function for tensors of constant shapes, dtypes and layouts."""
    code = function.__code__.replace()  # Dynamo keeps compiled code by code object: each form has its own
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, fullgraph=True, dynamic=False, options=dict(OPTIONS))  # torch takes entries out


def structure(module: nn.Module) -> tuple[object, ...]:
    """Return a module's types, constants and tensor shapes.

    The module's graph depends on them and on the inputs.
    """
    parts: list[object] = []
    for name, child in module.named_modules():
        constants = {k: _frozen(v) for k, v in vars(child).items() if _is_constant(v)}
        tensors = [
            (k, t.shape, t.dtype, t.stride())
            for k, t in (*child._parameters.items(), *child._buffers.items())
            if t is not None
        ]
        parts.append((name, type(child).__qualname__, tuple(sorted(constants.items(), key=str)), tuple(tensors)))
    return tuple(parts)


def _is_constant(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_constant, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_constant, value))
    return isinstance(value, (int, float, bool, str, type(None), torch.dtype))


def _frozen(value: object) -> object:
    """Return a constant, with its type, as a hashable key."""
    if isinstance(value, dict):
        return (type(value), *((name, _frozen(part)) for name, part in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    return type(value), value
