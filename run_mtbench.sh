#!/usr/bin/env bash
# The demonstration: a real model answers MT-Bench style questions in all modes. Takes any flag of the benchmark.
# Tables start empty, as they would with any model: what the embedded model brings for them is measured by
# `python -m benchmark mtbench --mode naive,suffix,recycle,hybrid`.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
# Eight questions end within 8 minutes on two cores without AVX-512; --num-questions 16 is the README's table.
exec python -m benchmark mtbench --corpus empty --recycle-table empty --num-questions 8 "$@"
