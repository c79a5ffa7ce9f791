"""CUDA sources compiled by NVRTC, and cached.

The library comes with the CUDA build of torch. It needs no GPU, so kernels can be compiled for any card on any machine
that has the package nvidia-cuda-nvrtc.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import torch

from sharesd_files import atomic_write, cache_root, made_once, warn_unwritable


class NvrtcError(RuntimeError):
    """NVRTC is missing, or does not compile a source; one line."""


@cache
def library() -> ctypes.CDLL:
    """Load NVRTC: torch's own if there are several. NvrtcError if there is none."""
    wanted = (torch.version.cuda or "").partition(".")[0]
    spec = importlib.util.find_spec("nvidia")
    roots = [*(spec.submodule_search_locations or ())] if spec else []
    found = sorted(file for root in roots for file in Path(root).glob("*/lib/libnvrtc.so.*"))
    found = [file for file in found if file.name.removeprefix("libnvrtc.so.").isdigit()]  # not libnvrtc.so.13.0.88
    names = [str(file) for file in found if not wanted or file.suffix == f".{wanted}"]
    names.append(f"libnvrtc.so.{wanted}" if wanted else "libnvrtc.so")  # the system's
    reason = ""
    for name in names:
        try:
            for part in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
                ctypes.CDLL(str(part))  # which NVRTC opens by its name alone
            return ctypes.CDLL(name)
        except OSError as error:
            reason = str(error)
    raise NvrtcError(f"NVRTC is not installed ({reason}); pip install nvidia-cuda-nvrtc")


@cache
def version() -> str:
    """Return NVRTC's version, e.g. 13.0."""
    major, minor = c_int(), c_int()
    _check(library().nvrtcVersion(byref(major), byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def cubin_of(source: Path, capability: tuple[int, int], options: Sequence[str] = ()) -> bytes:
    """Return a source compiled for a compute capability, from the cache if it is there.

    The file's name is the hash of all that the result depends on; it holds the result and its SHA-256. Raises
    NvrtcError.
    """
    text = source.read_bytes()
    options = (f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *options)
    key = hashlib.sha256(repr((text, options, version())).encode()).hexdigest()[:16]
    target = cache_root() / "nvrtc" / f"{source.stem}-{key}.cubin"
    if (cubin := _kept(target)) is not None:
        return cubin
    with made_once(target):
        if (cubin := _kept(target)) is not None:
            return cubin
        cubin = compile_source(text, source.name, options)
        try:
            atomic_write(target, cubin + hashlib.sha256(cubin).digest())
        except OSError as error:
            warn_unwritable(target, error, "kernels of streams are compiled again at each start")
    return cubin


def compile_source(text: bytes, name: str, options: Sequence[str]) -> bytes:
    """Return a cubin; NvrtcError with the compiler's first error."""
    nvrtc, program = library(), c_void_p()
    create = nvrtc.nvrtcCreateProgram
    create.argtypes = (POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p)
    _check(create(byref(program), text, name.encode(), 0, None, None), "nvrtcCreateProgram")
    try:
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, c_int(len(options)), given):
            said = _text(nvrtc, "ProgramLog", program).decode(errors="replace").strip("\0").splitlines()
            raise NvrtcError(next((line for line in said if "error" in line), " ".join(said) or "no message"))
        return _text(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _text(nvrtc: ctypes.CDLL, what: str, program: c_void_p) -> bytes:
    size = c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size)), what)
    content = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, content), what)
    return content.raw


def _check(status: int, what: str) -> None:
    if status:
        raise NvrtcError(f"{what} failed with status {status}")


def _kept(target: Path) -> bytes | None:
    """Return the cubin of a file; None if it is missing or damaged."""
    size = hashlib.sha256().digest_size
    try:
        content = target.read_bytes()
    except OSError:
        return None
    return content[:-size] if hashlib.sha256(content[:-size]).digest() == content[-size:] else None
