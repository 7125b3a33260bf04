#!/usr/bin/env bash
# Everything that docs/results.md shows, into one folder: what caches of few bytes keep, what sharing costs, speed by depth.
#   bash benchmarks/results.sh benchmarks/results
# PARTS="quality front mlkv speed": some of them. Further arguments go to quality.py (--tokens 300 --prompts 2: a quick look).
set -euo pipefail
out=$1/$(date +%F)
shift
here=$(dirname "$0")
models=$(realpath "$here/../models")
caches="kv:f16 kv:q8 kv:q4 kivi:q2+recent=0 kivi:q4+recent=0 kivi:q2+q4*0.1+sinks=4+recent=0
    kivi:none+recent=160+sinks=4 lowrank:q2@0.5+sinks=0+eager lowrank:q3@0.5+sinks=0+eager lowrank:q4@0.5+sinks=0+eager
    lowrank lowrank:q2@0.5+q8*64 lowrank:q2/q3@0.375+q4*0.1 lowrank:q3@0.375+q4*0.1 lowrank:q3/q4@0.375+q8*0.1
    lowrank:q3/q4@0.375+q8*64 lowrank:q4@0.5+q8*0.1 lowrank:q4@0.5+q8*64 lowrank:q2+q4*0.1 k+r:q8
    lowrank:q2@0.5+q4*0.1+predict lowrank:q3@0.25+q8*64+predict lowrank:q3/q4@0.375+q8*64+predict
    lowrank:q4@0.125+q8*64+predict lowrank:q4@0.25+q8*64+predict lowrank:q4@0.5+q8*64+predict"
front="kv:q4 lowrank:q4/q2@0.25+q8*64+predict lowrank:q4/q3@0.25+q8*64+predict lowrank:q4@0.25+q8*64+predict"

# shellcheck disable=SC2086  # lists of words
quality() {
    python "$here/quality.py" --models "$models"/tale-{llama,hard}.gguf --window 1024 --tokens 2000 --prompts 22 \
        --caches $caches --out "$out-lowrank" "$@"
}
# shellcheck disable=SC2086
front() { # all of the text: rare tokens carry a mean
    python "$here/quality.py" --models "$models"/tale-{llama,hard}.gguf --window 1024 --tasks --caches $front \
        --out "$out-front" "$@"
}
mlkv() { python "$here/mlkv.py" --out "$out-mlkv"; }
speed() {
    python "$here/compare.py" --shapes llama-2-7b-2layers --weights q8_0 --threads 2 --json "$out-lowrank-depths.json" \
        --tests decode@0 decode@4096 decode@16384 decode@32768 decode@65536 \
        --slimrt kv:f16 kv:q8 kivi:q2 "lowrank:q2@0.5+q4*0.1"
    python "$here/depths.py" "$out-lowrank-depths.json" --out "$out-lowrank-depths.png"
}
for part in ${PARTS:-quality front mlkv speed}; do "$part" "$@"; done
