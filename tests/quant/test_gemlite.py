"""Low-bit products by gemlite, computed on the CPU by Triton's interpreter; and its configurations, kept on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from importlib.util import find_spec
from typing import Any

import pytest

from sharesd.cli.cache import PARTS
from tests.helpers.paths import HELPERS, ROOT

PROGRAM = HELPERS / "gemlite_interpreted.py"

pytestmark = [
    pytest.mark.subprocess,
    pytest.mark.skipif(find_spec("gemlite") is None or find_spec("triton") is None, reason="needs gemlite and triton"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("gemlite"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_products_are_those_of_the_dequantized_weights(found: dict[str, Any]) -> None:
    assert len(found["errors"]) == 12
    assert all(row["error"] < 1e-5 for row in found["errors"]), found["errors"]
    assert found["atomics"] == [True, False], "eight bits are summed up in float32"


def test_configurations_are_kept(found: dict[str, Any]) -> None:
    """Found again as they were; where the file is damaged there are none."""
    kept = found["kept"]
    assert kept["num_saved"] > 0 and kept["loaded"] and kept["same"] and not kept["before"] and not kept["damaged"]
    [file] = kept["files"]
    assert any(fnmatch(file, pattern) for pattern in PARTS["settings"].names)  # `cache info` counts it
