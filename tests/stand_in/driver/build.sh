#!/bin/sh
# Builds the stand-in for a CUDA driver, where these sources have not been built yet: build.sh PYTHON FOLDER. PYTHON is
# that of the environment with the CUDA build of torch (scripts/cuda_env.sh), whose packages bring the headers.
# Prints the folder that has the library, a folder of FOLDER.
set -e
here=$(cd "$(dirname "$0")" && pwd)
site=$("${1:?give the python of the environment}" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cd "$here"
out=${2:?give the folder for the library}/$(cat ./*.[ch] build.sh | cksum | tr ' ' -)
if [ ! -e "$out" ]; then
  new=$(mktemp -d)
  ${CC:-cc} -O1 -g -Wall -Wextra -fPIC -shared -pthread -D__CUDA_API_VERSION_INTERNAL \
    -I "$site/nvidia/cu13/include" -I "$site/nvidia/nccl/include" -I "$site/triton/backends/nvidia/include" \
    -Wl,-soname,libcuda.so.1 -o "$new/libcuda.so.1" ./*.c -ldl
  ln -s libcuda.so.1 "$new/libcuda.so"
  mkdir -p "$(dirname "$out")"
  mv -T "$new" "$out" 2>/dev/null || rm -rf "$new" # others were first
fi
echo "$out"
