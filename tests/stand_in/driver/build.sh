#!/bin/sh
# Builds the stand-in for a CUDA driver: build.sh PYTHON FOLDER. PYTHON is that of the environment with the CUDA build
# of torch (scripts/cuda_env.sh), whose packages bring the headers. Prints the folder that has the library.
set -e
here=$(cd "$(dirname "$0")" && pwd)
site=$("${1:?give the python of the environment}" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
out=${2:?give the folder for the library}
mkdir -p "$out"
cd "$here"
${CC:-cc} -O1 -g -Wall -Wextra -Wno-unused-function -fPIC -shared -pthread -D__CUDA_API_VERSION_INTERNAL \
  -I "$site/nvidia/cu13/include" -I "$site/triton/backends/nvidia/include" \
  -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1" state.c runtime.c driver.c refused.c blas.c -ldl
ln -sf libcuda.so.1 "$out/libcuda.so"
echo "$out"
