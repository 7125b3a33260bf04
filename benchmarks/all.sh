#!/usr/bin/env bash
# Every cell of the comparison with llama.cpp, added to one JSON file; then its table.
#   bash benchmarks/all.sh benchmarks/results/$(date +%F)-compare.json
# SLIMRT_CACHES: what slimrt is measured with at depth. Further arguments go to compare.py (--turns 3, --threads 4).
set -euo pipefail
json=$1
shift
here=$(dirname "$0")
both="smollm2-1.7b codellama-7b-4layers"
caches=${SLIMRT_CACHES:-kv:f16 kv:bf16 kv:q8}
compare() { python "$here/compare.py" --json "$json" "$@" > /dev/null; }

# shellcheck disable=SC2086  # lists of words
{
    compare --shapes smollm2-1.7b --tests tiling@4096 --rival f16 --turns 3 "$@"
    compare --shapes $both --weights q8_0 q4_k_m f16 bf16 --tests decode@0 prefill@0 "$@"
    compare --shapes $both --weights q8_0 q4_k_m f16 --tests prefill@4096 --rival f16 "$@"
    compare --shapes $both llama-3.2-1b --tests decode@4096 decode@16384 decode@32768 --slimrt $caches "$@"
    compare --shapes $both --tests batch8@1024 --slimrt $caches --rival f16 "$@"
}
python "$here/report.py" "$json"
