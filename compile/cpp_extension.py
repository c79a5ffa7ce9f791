"""Builds the CPU kernels of this package with the system's C++ compiler, once per machine, and loads them.

There is a library of model kernels for each dtype, and one of those that choose tokens: each is built when it is first
needed, and a program needs two of them as a rule.
"""

from __future__ import annotations

import ctypes
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
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread

import platformdirs
import torch

log = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent / "cpu"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

CHOICE = (
    "arg_max",
    "top_k",
    "top_logp",
    "top_p",
    "gumbel",
    "sample",
    "walk",
    "grow",
    "choose",
    "weigh",
    "weighed",
    "keep_places",
    "find",
)
"""Kernels of sampling_ops.cpp; all others are in model_ops.cpp."""
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-march=native")
"""SHARESD_CXXFLAGS adds to them, e.g. -fsanitize=address."""
FORMAT = 2
"""Of the kept file: the library, then the SHA-256 of it, which loaders of libraries do not look at."""


def cache_root() -> Path:
    """Folder for everything that can be made again: SHARESD_CACHE_DIR, or the platform's cache folder."""
    return Path(os.environ.get("SHARESD_CACHE_DIR") or platformdirs.user_cache_dir("sharesd"))


def keep_compiled() -> None:
    """Have Inductor and Triton keep there what they compile, unless the environment names other folders.

    By default that lies in the system's temporary folder, and is compiled anew after each boot.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_root() / "triton"))


_locks: defaultdict[str, Lock] = defaultdict(Lock)  # one for each part that is being built


@cache
def library(part: str) -> ctypes.CDLL:
    """The shared library of a part: `choice`, or the model kernels of a dtype (`bfloat16` ...).

    Raises RuntimeError where no compiler can make it.
    """
    keep_freed_memory()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError(
            "no C++ compiler found (g++, c++ or clang++); install one, e.g. `apt install g++`, or set CXX"
        )
    source = ("sampling_ops.cpp",) if part == "choice" else ("model_ops.cpp", f"-DDTYPE={part}")
    flags = (*FLAGS, *shlex.split(os.environ.get("SHARESD_CXXFLAGS", "")))
    key = hashlib.sha256()
    for file in sorted(SOURCE_FOLDER.iterdir()):
        key.update(file.read_bytes())
    key.update(repr((FORMAT, source, compiler, flags, platform.machine(), _cpu_features())).encode())
    target = cache_root() / "native" / f"kernels-{key.hexdigest()[:16]}.so"
    with _locks[part]:
        return _loaded(target) or _built(target, (compiler, *flags), source)


def prepare(*parts: str) -> None:
    """Begin to build libraries in the background. Whoever needs one waits for it, and hears what went wrong."""

    def build(part: str) -> None:
        with suppress(RuntimeError):
            library(part)

    for part in parts:
        Thread(target=build, args=(part,), daemon=True).start()


def _loaded(target: Path) -> ctypes.CDLL | None:
    if target.exists():
        try:
            if _is_sealed(target):  # the system would load, or crash on, whatever begins like a library
                return ctypes.CDLL(str(target))
            log.warning("rebuilding %s, which does not hold what was built", target)
        except OSError as error:
            log.warning("rebuilding %s, which does not load: %s", target, error)
    return None


def _built(target: Path, compiler: tuple[str, ...], source: tuple[str, ...]) -> ctypes.CDLL:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [*compiler, str(SOURCE_FOLDER / source[0]), *source[1:], "-o", str(built)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(
                f"the C++ compiler {compiler[0]} does not run ({error}); set CXX to one that does"
            ) from error
        if done.returncode:
            raise RuntimeError(f"{compiler[0]} could not build the CPU kernels: {done.stderr.strip()[-600:]}")
        with built.open("ab") as stream:
            stream.write(hashlib.sha256(built.read_bytes()).digest())
        os.replace(built, target)
    return ctypes.CDLL(str(target))


def _is_sealed(library_file: Path) -> bool:
    content, size = library_file.read_bytes(), hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


_kept = 2**28  # bytes


def keep_freed_memory(most: int = 0) -> None:
    """Let glibc keep what is freed, up to 256 MiB or `most` bytes, for the next allocation.

    A step frees half a megabyte of logits. By default that goes back to the system and returns page by page, zeroed,
    which took a tenth of a verify step.
    """
    global _kept
    _kept = max(_kept, most)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.system() == "Linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, _kept)


def give_back_freed_memory() -> None:
    """What glibc keeps of freed memory (see above) goes back to the system: for loading below a limit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if platform.system() == "Linux" else None
    if trim is not None:
        trim(0)


@cache
def kernels_version() -> str:
    """Another one for other kernels: what was measured with the old ones no longer holds."""
    sources = (file.read_bytes() for file in sorted(SOURCE_FOLDER.iterdir()) if file.is_file())
    return hashlib.sha256(b"".join((*sources, repr(FLAGS).encode()))).hexdigest()[:16]


def _cpu_features() -> str:
    """What -march=native depends on, so that a cache folder shared between machines stays right."""
    return (
        repr(sorted(torch.cpu.get_capabilities().items()))
        if hasattr(torch.cpu, "get_capabilities")
        else platform.processor()
    )


@cache
def kernel(name: str, dtype: torch.dtype, *argtypes: type) -> Callable[..., None]:
    """The function `name`_`dtype` of its library, e.g. attend_bfloat16."""
    named = str(dtype).removeprefix("torch.")
    function = getattr(library("choice" if name in CHOICE else named), f"{name}_{named}")
    function.argtypes, function.restype = argtypes, None
    return function
