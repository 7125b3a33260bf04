// Which tables this x86 CPU can run.
#include <algorithm>
#include <vector>

#include "core/cpu_features.h"
#include "kernels/cpu/isa_of.h"

namespace slimrt::cpu {

namespace amx {
extern const LinearKernel linear_kernels[];
int64_t busy(uint32_t type, int64_t rounds, float* out);
extern const TileKernels tile_kernels;
}  // namespace amx
namespace avx512 {
extern const Isa table;
}
namespace avx_vnni {
extern const LinearKernel linear_kernels[];
int64_t busy(uint32_t type, int64_t rounds, float* out);
}  // namespace avx_vnni
namespace avx2 {
extern const Isa table;
}
namespace portable {
extern const Isa table;
}
/// nullptr in builds without the emulator: amx_emulated.cpp, no_amx_emulated.cpp.
const Isa* emulated_amx(const Isa& avx512);

namespace {

bool is_16_bit_float(uint32_t type) {
    return type == static_cast<uint32_t>(DType::F16) || type == static_cast<uint32_t>(DType::BF16);
}

/// avx512, but products of one token with 16-bit floats are avx2's: where 512-bit instructions execute in two
/// halves, converting 16 floats takes longer than twice 8 (Zen 4: 1.9 cycles for 16 products instead of 1.1).
Isa avx512_in_halves() {
    std::vector<LinearKernel> own;
    for (const LinearKernel* kernel = avx512::table.linear; kernel->product; ++kernel) {
        if (!is_16_bit_float(kernel->weight_type)) continue;
        own.push_back(*kernel);
        own.back().min_tokens = std::max<int64_t>(2, kernel->min_tokens);
    }
    for (const LinearKernel* kernel = avx2::table.linear; kernel->product; ++kernel)
        if (is_16_bit_float(kernel->weight_type) && kernel->min_tokens == 0) own.push_back(*kernel);
    own.push_back({});
    return isa_of("avx512_halves", avx512::table, own.data(), avx512::table.busy);
}

}  // namespace

const Isa* const* supported_isas(int* n) {
    static const Isa with_amx =
        isa_of("amx", avx512::table, amx::linear_kernels, amx::busy, &amx::tile_kernels);
    static const Isa with_vnni = isa_of("avx_vnni", avx2::table, avx_vnni::linear_kernels, avx_vnni::busy);
    static const Isa in_halves = avx512_in_halves();
    static const Isa* isas[7];
    static const int count = [] {
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                              __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
        const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
        int found = 0;
        if (has_avx512 && may_use_amx()) isas[found++] = &with_amx;
        const bool halves = executes_512_bits_in_halves();
        if (has_avx512) isas[found++] = halves ? &in_halves : &avx512::table;
        if (has_avx512) isas[found++] = halves ? &avx512::table : &in_halves;
        if (has_avx2 && has_avx_vnni()) isas[found++] = &with_vnni;
        if (has_avx2) isas[found++] = &avx2::table;
        isas[found++] = &portable::table;
        const Isa* const emulated = emulated_amx(avx512::table);
        if (emulated && has_avx512 && has_avx512_bf16()) isas[found++] = emulated;
        return found;
    }();
    *n = count;
    return isas;
}

Access usual_access_of_codes() { return {Hint::t0, true, 16 << 10}; }

Access usual_access_of_rows() { return {__builtin_cpu_is("amd") ? Hint::nta : Hint::t0, false, 10 << 10}; }

}  // namespace slimrt::cpu
