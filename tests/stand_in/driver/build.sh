#!/bin/sh
# Builds the stand-in for a CUDA driver, if it is not up to date: build.sh PYTHON FOLDER. PYTHON is that of the
# environment with the CUDA build of torch (scripts/cuda_env.sh), whose packages bring the headers.
# Prints the folder that has the library.
set -e
here=$(cd "$(dirname "$0")" && pwd)
site=$("${1:?give the python of the environment}" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
out=${2:?give the folder for the library}
mkdir -p "$out"
cd "$here"
made=$out/libcuda.so.1
if [ ! -e "$made" ] || [ -n "$(find . "$site/nvidia/cu13/include" -maxdepth 1 -newer "$made" -print -quit)" ]; then
  new=$(mktemp "$out/new.XXXXXX") # others may be about to load the old one
  ${CC:-cc} -O1 -g -Wall -Wextra -fPIC -shared -pthread -D__CUDA_API_VERSION_INTERNAL \
    -I "$site/nvidia/cu13/include" -I "$site/nvidia/nccl/include" -I "$site/triton/backends/nvidia/include" \
    -Wl,-soname,libcuda.so.1 -o "$new" state.c runtime.c driver.c refused.c blas.c nccl.c -ldl
  mv "$new" "$made"
  ln -sf libcuda.so.1 "$out/libcuda.so"
fi
echo "$out"
