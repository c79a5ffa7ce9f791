#!/usr/bin/env bash
# Runs Python under the stand-in driver: tests/stand_in/run.sh SCRIPT [ARG]... (or -m MODULE), FAKE_* as README.md says.
# Caches of costs, tiles and kernels are kept apart from those of a real GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$root/.venv-cuda/bin/python
if [ ! -x "$python" ]; then
  echo "error: there is no $python; make it: bash scripts/cuda_env.sh" >&2
  exit 2
fi
cache=${SHARESD_STAND_IN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sharesd-stand-in}
library=$(sh "$root/tests/stand_in/driver/build.sh" "$python" "$cache/driver")
ulimit -v $((26 * 1000 * 1000))  # sizes that torch reads from this device are arbitrary
export SHARESD_CACHE_DIR=$cache/sharesd
unset TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR
export TRITON_LIBCUDA_PATH=$library PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export FAKE_DEVICES=${FAKE_DEVICES:-1} FAKE_CC=${FAKE_CC:-9.0} FAKE_TOTAL=${FAKE_TOTAL:-80e9}
LD_PRELOAD=$library/libcuda.so.1 exec "$python" "$@"
