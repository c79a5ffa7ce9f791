"""Tiers, markers by folder, and the fixtures that all tests share.

`pytest` alone runs what is quick; pyproject.toml says which markers wait for later tiers (scripts/run_tests.py runs
those). One test of a later tier: `pytest -m "" PATH::NAME`.
"""

from __future__ import annotations

import gc
import os
import re
from tempfile import gettempdir

if os.environ.get("TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: a GPU changes what "auto" means
# Runtimes with cache folders of their own would compile anew what the tests before have compiled.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(gettempdir(), f"sharesd-tests-inductor-{os.getuid()}"))
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores; tests of threads set their number

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.expression import Expression

from compile import cpp_extension
from tests.helpers import guard
from tests.helpers.covering import thin
from tests.helpers.shared_runtimes import Shared, link_kernels

guard.install()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's kernels run on a CPU."""
if INTERPRETED and find_spec("triton"):
    from tests.helpers import triton_cpu  # noqa: F401

HERE = Path(__file__).parent
MARKS: dict[str, tuple[str, ...]] = {
    "compile/cpu": ("kernels",),
    "compile/cpu/test_guard.py": ("slow",),
    "compile/inductor": ("inductor",),
    "compile/cuda/interpreted": ("interpreted",),
    "serve/test_page.py": ("browser",),
    "stand_in": ("stand_in",),
}
"""Markers of all tests under a path; tests that differ from their neighbours have theirs by hand."""
LONGEST = (
    "compile/cuda/test_cuda_blocks.py",
    "startup/test_damaged_files.py",
    "parallel/test_tensor_parallel.py",
    "cases/test_surroundings.py",
    "cli/test_batch.py",
    "compile/cpu/test_guard.py",
    "engine/test_lossless.py",
    "weights/test_offload_loading.py",
    "compile/cpu/test_avx_vnni.py",
    "train/test_generate.py",
    "execution/test_graphs.py",
    "cli/test_cli.py",
)
"""Files that take longest begin first: a file runs on one worker, and no worker should end long after the others."""


@cache
def _named(path: Path) -> set[str]:
    """The markers that a file's tests may have: its folder's, those that its text names, and those given below."""
    where = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else ""
    by_folder = {name for at, names in MARKS.items() if where == at or where.startswith(f"{at}/") for name in names}
    return by_folder | {"long", "cuda"} | set(re.findall(r"\bmark\.(\w+)", path.read_text()))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files none of whose tests can be wanted, since importing all takes each worker 10 seconds."""
    given = (config.invocation_params.dir / arg.partition("::")[0] for arg in config.args)
    if not config.option.markexpr or not collection_path.match("test_*.py") or collection_path in given:
        return None
    may, wanted = _named(collection_path), Expression.compile(config.option.markexpr)
    unsure = sorted(may & set(re.findall(r"\w+", config.option.markexpr)))
    ways = (dict(zip(unsure, way, strict=True)) for way in product((False, True), repeat=len(unsure)))
    return None if any(wanted.evaluate(lambda name, way=way, **_: way.get(name, False)) for way in ways) else True


@pytest.hookimpl(tryfirst=True)  # markers that are put here count for `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark by folder. Mark what a covering set leaves out of a product `long`. Skip what this machine cannot run.

    What Triton's interpreter would run is marked `cuda`, and runs on the GPU, where there is one and no interpreter.
    """
    has_gpu = torch.cuda.is_available()
    first = {(HERE / path): place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))
    selecting = {line.partition(":")[0] for line in config.getini("markers")}
    for item in items:
        where = item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else ""
        for path, names in MARKS.items():
            if where == path or where.startswith(f"{path}/"):
                for name in names:
                    item.add_marker(name)
        if item.get_closest_marker("interpreted") is not None and not INTERPRETED:
            if has_gpu:
                item.add_marker(pytest.mark.cuda)
            else:
                why = "needs a CUDA GPU, or TRITON_INTERPRET=1, which Triton reads when it is imported"
                item.add_marker(pytest.mark.skip(reason=why))
        if item.get_closest_marker("cuda") is not None and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and TEST_GPU=1"))
    for item in thin(items):
        item.add_marker("long")
    for item in items:
        for name in selecting & {mark.name for mark in item.iter_markers()} - _named(item.path):
            raise pytest.UsageError(f"{item.nodeid} is marked {name}, which its file has to name: `mark.{name}`")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let collections of garbage skip modules and collected tests: 870,000 objects, a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Put guard pages around what tests of kernels make, their fixtures included."""
    kernels = item.get_closest_marker("kernels") is not None
    guard.put(os.environ.get("GUARD_PAGES", "behind") if kernels else "off")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    guard.put("off")


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Load the CPU kernels before any test takes a cache folder of its own, where they would be built anew."""
    if all(item.get_closest_marker("cuda") for item in request.session.items):
        return  # nothing of them is wanted on a GPU
    with ThreadPoolExecutor() as pool:
        parts = ("bfloat16", "float16", "float32", "float64", "sampling_ops", "block_ops")
        list(pool.map(cpp_extension.library, parts))


@pytest.fixture(autouse=True)
def costs_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines time their rounds once, and with short texts, not for half a second; plans time small products."""
    for name, value in (("SECONDS", 0.0), ("SWEEPS", (1, 1)), ("FAR", 0)):
        monkeypatch.setattr(f"sharesd.startup.cost_profiler.{name}", value)
    for name in ("PROBE_BYTES", "PROBED_BYTES"):
        monkeypatch.setattr(f"sharesd.weights.offload_rates.{name}", 2**18)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Folders and texts that all workers of this run share."""
    folder = tmp_path_factory.getbasetemp()
    return Shared(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture(scope="session")
def checkpoint(shared: Shared) -> Callable[..., Path]:
    """Folders of tiny random models by what `make_checkpoint` takes. Tests must not write there."""
    return shared.checkpoint


@pytest.fixture(scope="session")
def tiny(checkpoint: Callable[..., Path]) -> Path:
    """The folder of a tiny random model. Tests must not write there."""
    return checkpoint()


@pytest.fixture(autouse=True)
def on_the_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests of Triton's kernels make their tensors, and dice, where the kernels run; tensor operations, with which they
    are compared, do not become kernels there."""
    if request.node.get_closest_marker("interpreted") is None or INTERPRETED:
        yield
        return
    import torch._inductor.config  # annotations in it have torch.Generator, which must still be a type

    dice = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cuda": dice(device))
    monkeypatch.setattr("sharesd.sampling.logits_processors.runs_triton", lambda device: False)
    with torch.device("cuda", torch.cuda.current_device()):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of small operations: more threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def close_after() -> Iterator[list[Any]]:
    """What is put there is closed, which lets go of files and memory."""
    runtimes: list[Any] = []
    yield runtimes
    for runtime in runtimes:
        runtime.close()


@pytest.fixture
def only_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count the model alone: what Python takes is much more than a tiny one. A disk reads 1 MB a second."""
    from sharesd.weights import memory_estimate, offload_planner

    monkeypatch.setattr(memory_estimate, "own_memory", lambda: 0)
    monkeypatch.setattr(memory_estimate, "RUNTIME_BYTES", 0)
    monkeypatch.setattr(offload_planner, "_disk_rate", lambda *_: 1e6)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of this file's tests, which has the kernels: processes would build them again."""
    folder = tmp_path_factory.mktemp("cache")
    link_kernels(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARESD_CACHE_DIR", str(folder))
        yield
