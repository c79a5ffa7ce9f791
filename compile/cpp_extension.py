"""Build and load this package's CPU kernels with the system's C++ compiler.

There is a library of model kernels for each dtype, one of sampling kernels, one for blocks of GGUF files, and one that
quantizes to them. Each is built once per machine, at its first use.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch

from compile.start_times import START
from sharesd_files import atomic_path, cache_root, made_once, warn_unwritable

log = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent / "cpu"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

SAMPLING_OPS = (
    "arg_max",
    "top_k",
    "top_logp",
    "top_p",
    "gumbel",
    "sample",
    "accept_path",
    "count_finite",
    "append_tokens",
    "expand_tree",
    "select_nodes",
    "rescore_children",
    "best_nodes",
    "compact_slots",
    "find_suffixes",
)
"""Kernels of sampling_ops.cpp."""
BLOCK_OPS = ("block_sums", "repack_blocks", "decode_rows")
"""Kernels of block_ops.cpp; quantize_ops.cpp has one, and all others are in model_ops.cpp."""
_SHARED = {"sampling_ops": (), "block_ops": (), "quantize_ops": ("-ffp-contract=off",)}
"""Libraries that all dtypes share, and their flags."""
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-march=native")
"""Compiler flags; SHARESD_CXXFLAGS adds flags, e.g. -fsanitize=address."""
ARM_FLAGS = ("-D_Float16=__fp16",)
"""More flags on ARM, where g++ has no `_Float16` before version 13."""
FORMAT = 2
"""Version of the file's format: the library, then its SHA-256."""


def set_compiler_caches() -> None:
    """Set the cache folders of Inductor and Triton, unless the environment does.

    The default is the system's temporary folder, which is empty after a boot.
    """
    for name, part in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ[name] = os.path.expanduser(os.environ.get(name) or str(cache_root() / part))


_locks: defaultdict[str, Lock] = defaultdict(Lock)  # one for each part that is being built


@cache
def library(part: str) -> ctypes.CDLL:
    """Load a shared library, or a dtype's model kernels.

    Raises RuntimeError if no compiler can build it.
    """
    keep_freed_memory()
    with START.phase("kernels"), _locks[part]:
        command = _command()
        target, source = _target(part, command)
        with nullcontext() if target.exists() else made_once(target):  # a build takes half a minute of one core
            return _load(target) or _build(target, command, source)


def obstacle(*parts: str) -> str | None:
    """Return the reason why libraries cannot be built here, with a remedy.

    A line is compiled and loaded, unless they are all built.
    """
    try:
        command = _command()
        if not all(_target(part, command)[0].exists() for part in parts):
            _try(command)
    except (RuntimeError, OSError) as error:
        return " ".join(str(error).split())
    return None


def compiler() -> str:
    """Return the C++ compiler; RuntimeError if there is none."""
    found = (
        os.path.expanduser(os.environ.get("CXX", ""))
        or shutil.which("g++")
        or shutil.which("c++")
        or shutil.which("clang++")
    )
    if found is None:
        raise RuntimeError(
            "no C++ compiler found (g++, c++ or clang++); install one, e.g. `apt install g++`, or set CXX"
        )
    return found


def _command() -> tuple[str, ...]:
    """Return the C++ compiler and its flags."""
    on_arm = platform.machine().lower() in ("aarch64", "arm64")
    return compiler(), *FLAGS, *(ARM_FLAGS if on_arm else ()), *shlex.split(os.environ.get("SHARESD_CXXFLAGS", ""))


def _target(part: str, command: tuple[str, ...]) -> tuple[Path, tuple[str, ...]]:
    """Return a library's file in the cache, and its source."""
    source = (f"{part}.cpp", *_SHARED[part]) if part in _SHARED else ("model_ops.cpp", f"-DDTYPE={part}")
    key = hashlib.sha256()
    for file in sorted(SOURCE_FOLDER.iterdir()):
        key.update(file.read_bytes())
    name, *flags = command
    key.update(repr((FORMAT, source, name, tuple(flags), platform.machine(), _cpu_features())).encode())
    return cache_root() / "native" / f"kernels-{key.hexdigest()[:16]}.so", source


def prepare(*parts: str) -> None:
    """Start to build libraries in the background; `library` raises their errors.

    Raises ValueError for a name that is none of a library.
    """
    for part in parts:
        if part not in _SHARED and not isinstance(getattr(torch, part, None), torch.dtype):
            raise ValueError(f"there is no library {part!r}; give {', '.join(_SHARED)}, or the dtype of model kernels")

    def build(part: str) -> None:
        with suppress(RuntimeError, OSError):
            library(part)

    for part in parts:
        Thread(target=build, args=(part,), daemon=True).start()


def _load(target: Path) -> ctypes.CDLL | None:
    try:
        if target.exists():
            if _is_intact(target):  # the system would load, or crash on, any file that begins like a library
                return ctypes.CDLL(str(target))
            log.warning("rebuilding %s, which does not hold what was built", target)
    except OSError as error:
        too_many = os.strerror(errno.EMFILE)
        if too_many in str(error):  # the loader's errors have no number; another build would not load either
            raise OSError(errno.EMFILE, too_many, str(target)) from error
        log.warning("rebuilding %s, which does not load: %s", target, error)
    return None


def _build(target: Path, compiler: tuple[str, ...], source: tuple[str, ...]) -> ctypes.CDLL:
    command = (*compiler, str(SOURCE_FOLDER / source[0]), *source[1:])
    try:
        with atomic_path(target) as built:
            _run(command, built)
            with built.open("ab") as stream:
                stream.write(hashlib.sha256(built.read_bytes()).digest())
        return ctypes.CDLL(str(target))
    except OSError as error:
        warn_unwritable(target, error, "CPU kernels are built again at each start")
    with tempfile.TemporaryDirectory(prefix="sharesd-") as scratch:  # what is loaded stays in memory
        _run(command, Path(scratch) / target.name)
        return ctypes.CDLL(str(Path(scratch) / target.name))


@cache  # a compiler that has worked works for the next model, too; errors are not kept
def _try(compiler: tuple[str, ...]) -> None:
    """Compile and load a line; RuntimeError or OSError if that fails."""
    with tempfile.TemporaryDirectory(prefix="sharesd-") as scratch:
        line, built = Path(scratch) / "line.cpp", Path(scratch) / "line.so"
        line.write_text(
            '#include <omp.h>\n#include <vector>\nextern "C" int threads() { return omp_get_max_threads(); }\n'
        )
        _run((*compiler, str(line)), built)
        ctypes.CDLL(str(built)).threads()


def _run(command: tuple[str, ...], built: Path) -> None:
    """Compile a library; OSError if the disk is full."""
    try:
        done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"the C++ compiler {command[0]} does not run ({error}); set CXX to one that does") from error
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(built.parent))
    if done.returncode:
        reason = " ".join(done.stderr.split())[-600:] or f"it ended with status {done.returncode}"
        raise RuntimeError(f"{command[0]} could not build the CPU kernels: {reason}")


def _is_intact(library_file: Path) -> bool:
    content, size = library_file.read_bytes(), hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


_trim_threshold = 2**28  # bytes


def keep_freed_memory(min_bytes: int = 0) -> None:
    """Let glibc keep at least 256 MiB of freed memory for reuse.

    A step frees half a megabyte of logits. By default glibc returns this memory to the system, and later pages are
    zeroed one by one, which took a tenth of a verify step.
    """
    global _trim_threshold
    _trim_threshold = max(_trim_threshold, min_bytes)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.system() == "Linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, _trim_threshold)


def release_freed_memory() -> None:
    """Release glibc's freed memory to the system, for low memory limits."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if platform.system() == "Linux" else None
    if trim is not None:
        trim(0)


@cache
def kernels_version() -> str:
    """Return the hash of the kernels, the key of measurements."""
    sources = (file.read_bytes() for file in sorted(SOURCE_FOLDER.iterdir()) if file.is_file())
    return hashlib.sha256(b"".join((*sources, repr(FLAGS).encode()))).hexdigest()[:16]


def _cpu_features() -> str:
    """Return the CPU features for -march=native.

    They are part of the key, since machines may share a cache folder.
    """
    return (
        repr(sorted(torch.cpu.get_capabilities().items()))
        if hasattr(torch.cpu, "get_capabilities")
        else platform.processor()
    )


@cache
def kernel(name: str, dtype: torch.dtype, *argtypes: type) -> Callable[..., None]:
    """Return the library function `name`_`dtype`, e.g. attend_bfloat16."""
    named = str(dtype).removeprefix("torch.")
    shared = {"quantize_blocks": "quantize_ops"} | dict.fromkeys(SAMPLING_OPS, "sampling_ops")
    part = (shared | dict.fromkeys(BLOCK_OPS, "block_ops")).get(name, named)
    function = library(part)[f"{name}_{named}"]  # an object of its own, since argument types may differ between calls
    function.argtypes, function.restype = argtypes, None
    return function


def call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Call the library function `name`_`dtype`: integers are int64, all else is passed by address.

    That is tensors, None, and arrays and references of ctypes; the first call tells which is which. For doubles use
    `kernel`.
    """
    function = _called.get((name, dtype))
    if function is None:
        types = [ctypes.c_int64 if isinstance(each, int) else ctypes.c_void_p for each in arguments]
        function = _called[name, dtype] = kernel(name, dtype, *types)
    function(*[each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments])


_called: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
