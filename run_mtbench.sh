#!/usr/bin/env bash
# The demonstration: a real model answers MT-Bench style questions in all modes. Takes any flag of the benchmark.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/env.sh"
exec python -m benchmark mtbench "$@"
