#!/usr/bin/env bash
# The demonstration: a real model answers MT-Bench style questions in all modes. Takes any flag of the benchmark.
# Tables start empty, as they would with any model: what the embedded model brings for them is measured by
# `python -m benchmark mtbench --mode naive,suffix,recycle,hybrid`.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
exec python -m benchmark mtbench --corpus empty --recycle-table empty "$@"
