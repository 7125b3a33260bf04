#!/usr/bin/env bash
# Fuzzes the GGUF parser under ASan and UBSan: tests/fuzz/run.sh [seconds, 60]
# Fails on any finding, which stays in $OUT (build/fuzz). $PYTHON needs the gguf package.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
out=${OUT:-$root/build/fuzz}
seconds=${1:-60}
cxx=clang++-14

if ! command -v $cxx >/dev/null || ! compgen -G "/usr/lib/llvm-14/lib/clang/*/lib/linux/libclang_rt.fuzzer-*" >/dev/null; then
    echo "fuzz: installing clang-14"
    { apt-get update && apt-get install -y clang-14 libclang-rt-14-dev; } >/tmp/fuzz-apt.log 2>&1 ||
        { tail -5 /tmp/fuzz-apt.log; exit 1; }
fi

mkdir -p "$out/corpus" "$out/findings"
rm -f "$out"/findings/*
"${PYTHON:-python3}" "$root/tests/fuzz/make_seeds.py" "$out/seeds" 2>"$out/seeds.log" ||
    { cat "$out/seeds.log"; exit 1; }
$cxx -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I"$root/csrc" \
    "$root"/tests/fuzz/gguf_fuzz.cpp "$root"/csrc/core/{dtype,gguf,gguf_metadata,gguf_tensors,mapped_file}.cpp \
    -o "$out/gguf_fuzz"

if ! "$out/gguf_fuzz" "$out/corpus" "$out/seeds" -max_total_time="$seconds" -max_len=4096 -timeout=10 \
    -rss_limit_mb=2048 -use_value_profile=1 -print_final_stats=1 -artifact_prefix="$out/findings/" \
    >"$out/log" 2>&1; then
    tail -60 "$out/log"
    echo "fuzz: FAILED, input in $out/findings"
    exit 1
fi
echo "fuzz: ok, $(grep -o 'Done.*' "$out/log"), $(ls "$out/corpus" | wc -l) inputs in the corpus"
