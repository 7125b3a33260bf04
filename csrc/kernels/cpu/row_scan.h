// Scans of a row of logits for the sampler. Compiled once, for the baseline ISA without fused multiply-add,
// and with one order of summation: the same row gives the same bits on every machine.
#pragma once

#include <cstdint>

namespace slimrt::cpu {

constexpr int64_t scan_block = 256;
constexpr int64_t scan_blocks(int64_t n) { return (n + scan_block - 1) / scan_block; }

/// The maximum of each block; NaN where a block has one.
void scan_maxima(const float* x, int64_t n, float* maxima);
/// p[i] = exp((x[i] - top) / temperature), 0 below e^-87, for x[i] <= top; sums: of each block. p may be
/// null.
void scan_exp(const float* x, int64_t n, float top, float temperature, float* p, double* sums);

}  // namespace slimrt::cpu
