# Sourced by the scripts that test: everything that can be made again goes to folders of its own, whatever the machine has,
# and away at the end.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/home" "$scratch/tmp" "$scratch/cache"
# But for CPU kernels, whose files are named after their sources, compiler and processor: they are built once for all runs.
mkdir -p .venv/native
ln -s "$PWD/.venv/native" "$scratch/cache/native"
# Without bytecode each of the processes compiles all sources and tests again, which takes a test worker half a minute.
unset PYTHONDONTWRITEBYTECODE
unset "${!SHARESD_@}" "${!TORCHINDUCTOR_@}" "${!OMP_@}" "${!HF_@}" "${!XDG_@}" LOGLEVEL
export HOME="$scratch/home" TMPDIR="$scratch/tmp" SHARESD_CACHE_DIR="$scratch/cache" TORCHINDUCTOR_CACHE_DIR="$scratch/inductor"
step() { printf '\n== %s\n' "$*"; }
