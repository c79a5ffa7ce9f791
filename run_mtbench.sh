#!/usr/bin/env bash
# The demonstration: a real model answers MT-Bench style questions in all modes. Accepts any flag of the benchmark.
# Tables start empty, as with any other model; the tables shipped with the embedded model are measured by
# `python -m benchmark mtbench --mode naive,suffix,recycle,hybrid`.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
# --num-questions 16 is the README's table.
exec python -m benchmark mtbench --corpus empty --recycle-table empty --num-questions 8 "$@"
