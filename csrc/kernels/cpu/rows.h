// Declarations of elementwise.cpp, cache_rows.cpp and attention*.cpp for table.cpp; isa.h says what each
// does.
#pragma once

#include "kernels/cpu/isa.h"

namespace slimrt::cpu::SLIMRT_ISA {

// elementwise.cpp
float read(const float* from, int64_t n, Access access);
float inverse_rms(const float* x, float eps, int64_t n);
void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out);
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out);
void rope(float* x, const float* cs, int64_t n_rot, bool interleaved);
void activate(uint32_t kind, float* x, int64_t n);
void gate(uint32_t kind, float* gate, const float* up, int64_t n);
void add(float* x, const float* y, int64_t n);
void multiply(float* x, const float* y, float factor, int64_t n);

// cache_rows.cpp
void store_head(uint32_t type, const float* from, int64_t dim, void* to, void* scales);
void load_head(uint32_t type, const void* from, size_t from_stride, const void* scales, int64_t n_rows,
               int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride);

void store_channels(uint32_t type, const float* from, size_t from_stride, int64_t n_rows, int64_t dim,
                    void* to, void* scales);
void load_channels(uint32_t type, const void* from, size_t from_stride, const void* scales, int64_t n_rows,
                   int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride);

// attention_block.cpp
void pack_query(const float* q, int64_t dim, void* to);
void attend_block(const BlockAttention& block);
void score_block(const BlockAttention& block, float* s, size_t ld);

// attention_skip.cpp
void keep_rows(const float* p, int64_t n, float share, uint8_t* keep);
void add_kept_values(const KeptRows& kept);

// attention_listed.cpp
SkippedWeights skip_weights(float* p, int64_t n, float budget, bool squared);
void add_listed_values(const ListedValues& values);

// attention_absorbed.cpp
void score_rotated(const RotatedScores& scores);
int64_t extract_outliers(float* p, int64_t n, bool codes, int32_t pair, float factor, WeightStats* stats,
                         Outlier* to);
void absorb_values(const AbsorbedValues& values);

// attention.cpp
void scores(const float* q, size_t q_stride, int64_t n_q, uint32_t type, const void* rows, size_t stride,
            int64_t n, int64_t dim, float scale, bool accumulate, float* out, size_t ld);
void finish_scores(float* s, int64_t n, float cap, const float* bias);
float softmax(float* s, int64_t n, float* max, float* sum);
void values(const float* p, size_t ld, int64_t n_q, const float* factor, uint32_t type, const void* rows,
            size_t stride, int64_t n, int64_t dim, float* out, size_t out_stride);

}  // namespace slimrt::cpu::SLIMRT_ISA
