#!/usr/bin/env bash
# Fuzzes the GGUF parser and the planner under ASan and UBSan: tests/fuzz/run.sh [seconds, 60]
# Starts from tests/fuzz/corpus and make_seeds.py. Fails on any finding, which stays in $OUT (build/fuzz). $PYTHON needs
# the gguf package.
set -euo pipefail

cd "$(dirname "$0")/../.."
out=${OUT:-$PWD/build/fuzz}
seconds=${1:-60}
cxx=clang++-14

if ! command -v $cxx >/dev/null || ! compgen -G "/usr/lib/llvm-14/lib/clang/*/lib/linux/libclang_rt.fuzzer-*" >/dev/null; then
    echo "fuzz: installing clang-14"
    { apt-get update && apt-get install -y clang-14 libclang-rt-14-dev; } >/tmp/fuzz-apt.log 2>&1 ||
        { tail -5 /tmp/fuzz-apt.log; exit 1; }
fi

mkdir -p "$out/objects" "$out/corpus" "$out/findings"
rm -f "$out"/findings/* "$out"/objects/*
"${PYTHON:-python3}" tests/fuzz/make_seeds.py "$out/seeds" 2>"$out/seeds.log" || { cat "$out/seeds.log"; exit 1; }

# All that a plan runs, but for the kernels. Headers are parsed once: half of the time otherwise.
sources=(tests/fuzz/*.cpp csrc/core/{control_groups,default_threads,dtype,error,gguf,gguf_metadata,gguf_shards,gguf_tensors,mapped_file,processors,sizes,thread_pool}.cpp
    csrc/kernels/activation.cpp csrc/kernels/cpu/{access_policy,attention_{absorbing,decode,plan,run,sparing},backend,choose_isa,experts,interleave,memory}.cpp
    csrc/cache/*.cpp csrc/cache/modes/*.cpp csrc/model/*.cpp csrc/model/arch/*.cpp csrc/engine/{devices,planner,step}.cpp)
flags=(-std=c++20 -O1 -gline-tables-only -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Icsrc)
printf '#include "%s"\n' engine/step.h engine/planner.h kernels/cpu/cpu_backend.h core/error.h >"$out/all.h"
$cxx "${flags[@]}" -x c++-header -fpch-instantiate-templates "$out/all.h" -o "$out/all.pch"
for source in "${sources[@]}"; do
    $cxx "${flags[@]}" -include-pch "$out/all.pch" -c "$source" -o "$out/objects/${source//\//_}.o"
done
$cxx "${flags[@]}" "$out"/objects/*.o -o "$out/model_fuzz"

if ! "$out/model_fuzz" "$out/corpus" tests/fuzz/corpus "$out/seeds" -max_total_time="$seconds" -max_len=8192 -timeout=10 \
    -rss_limit_mb=2048 -use_value_profile=1 -print_final_stats=1 -artifact_prefix="$out/findings/" \
    >"$out/log" 2>&1; then
    tail -60 "$out/log"
    echo "fuzz: FAILED, input in $out/findings"
    exit 1
fi
echo "fuzz: ok, $(grep -o 'Done.*' "$out/log"), $(ls "$out/corpus" | wc -l) inputs in the corpus"
