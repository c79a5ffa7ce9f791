"""What the device is and how quickly it moves bytes."""

from __future__ import annotations

import shutil
import subprocess

import torch

from benchmark.environment import environment
from benchmark.gpu.timing import copy_bandwidth
from benchmark.gpu.worker import Job
from compile.cuda.bench import seconds_per_call

QUERY = "name,driver_version,clocks.max.sm,clocks.max.mem,clocks.sm,clocks.mem,power.limit,temperature.gpu,memory.used"


def measure(job: Job) -> None:
    """Versions and clocks first: they are there even if nothing runs."""
    job.put(**{name: value for name, value in environment(job.device).items() if value is not None})
    if job.on_gpu:
        device = torch.cuda.get_device_properties(torch.device(job.device))
        job.put(
            capability=f"{device.major}.{device.minor}",
            multiprocessors=device.multi_processor_count,
            level_2_cache_bytes=device.L2_cache_size,
            clocks=_clocks(),
        )
    job.put(copy_bytes_per_second=copy_bandwidth(job.device))
    source = torch.ones(2**22 if job.tiny else 2**30, dtype=torch.float32, device=job.device)
    job.put(read_bytes_per_second=source.nbytes / seconds_per_call([source.amax]))


def _clocks() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown: there is no nvidia-smi"
    try:
        command = [program, f"--query-gpu={QUERY}", "--format=csv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() or done.stderr.strip()
