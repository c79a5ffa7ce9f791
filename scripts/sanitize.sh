#!/usr/bin/env bash
# The kernels built with AddressSanitizer and UndefinedBehaviorSanitizer: their tests, then a generation in each mode.
# And the barrier of their threads with ThreadSanitizer. Ends with the first finding.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
source scripts/scratch.sh

step "barrier, with ThreadSanitizer"
"${CXX:-g++}" -std=c++17 -O2 -g -fsanitize=thread -fopenmp -pthread -march=native tests/helpers/barrier.cpp -o "$scratch/barrier"
TSAN_OPTIONS=halt_on_error=1 "$scratch/barrier"

export SHARESD_CXXFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
# Python is not built with it, so that the library comes first; Python's own memory is not its business, nor what is left
# at the end; but arrays that Python makes are to come from malloc, which it watches.
export LD_PRELOAD="$("${CXX:-g++}" -print-file-name=libasan.so) $("${CXX:-g++}" -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc

step "tests of kernels"
GUARD_PAGES=off python -m pytest -n 0 -m "kernels and not inductor" "$@"

step "a generation in each mode"
PYTHONPATH=. python -m tests.helpers.each_mode
echo "clean"
