"""Processor and free memory of the host, and memory of this process."""

from __future__ import annotations

import platform
import resource
from contextlib import suppress
from pathlib import Path

import psutil


def free_memory() -> int:
    """Return the bytes that are left for this process.

    By the machine, its control group and the limit of its addresses (`ulimit -v`).
    """
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdecimal():
        free = min(free, int(text) - int(used.read_text()))
    with suppress(ImportError):  # Windows has no such limit
        addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
        if addresses != resource.RLIM_INFINITY:
            free = min(free, max(0, addresses - psutil.Process().memory_info().vms))
    return free + own_memory()


def own_memory() -> int:
    """Return the bytes of this process that no file backs (RssAnon)."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
