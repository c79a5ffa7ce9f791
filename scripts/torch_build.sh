# Sourced by env.sh: which build of torch this machine takes, and from where. Needs nothing but Python and constraints.txt.
torch_wait=5  # seconds in which the index must answer

# Prints the index of CPU builds, or nothing where torch comes from the index that pip is set up for. Says which on stderr.
torch_index() {
  local python=$1 index=${SHARESD_TORCH_INDEX:-https://download.pytorch.org/whl/cpu} version
  version=$(sed -n 's/^torch==//p' constraints.txt)
  if [ -n "${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}" ]; then
    echo "torch $version: from the index that PIP_INDEX_URL or PIP_EXTRA_INDEX_URL names." >&2
  elif has_nvidia; then
    echo "torch $version: the CUDA build for the NVIDIA device of this machine, several GB on disk." >&2
  elif [ "$(uname -s)" != Linux ]; then
    echo "torch $version: the CPU build, which the plain index has for $(uname -s), less than 1 GB on disk." >&2
  elif index_has "$python" "$index" "$version"; then
    echo "torch $version: the CPU build, 0.2 GB to download, 0.8 GB on disk, from $index (no NVIDIA device was found)." >&2
    echo "$index"
  else
    cat >&2 <<TEXT
torch $version: the plain build. $index, which has the smaller CPU build, did not answer within $torch_wait seconds
or does not have this version. On Linux the plain index gives the CUDA build, several GB on disk. It runs here, too.
TEXT
  fi
}

has_nvidia() {
  compgen -G '/dev/nvidia*' >/dev/null || command -v nvidia-smi >/dev/null
}

# True where the index has the CPU build of this version of torch, and says so in time.
index_has() {
  "$1" - "$2" "$3" "$torch_wait" 2>/dev/null <<'PYTHON'
import os
import re
import sys
import threading
from urllib.request import urlopen

index, version, wait = sys.argv[1:]
limit = threading.Timer(float(wait), os._exit, [1])  # ends what timeouts of sockets do not: names, pages that trickle
limit.daemon = True
limit.start()
with urlopen(f"{index.rstrip('/')}/torch/", timeout=float(wait)) as page:
    found = re.search(rf"torch-{re.escape(version)}(%2B|\+)cpu-", page.read().decode(), re.IGNORECASE)
sys.exit(found is None)
PYTHON
}
