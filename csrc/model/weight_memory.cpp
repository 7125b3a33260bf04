#include "model/weight_memory.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cache/scratch.h"
#include "kernels/cpu/interleave.h"
#include "kernels/cpu/repack.h"

namespace slimrt {

DType held_type(const GgufFile& file, const std::string& name, int64_t together,
                const std::function<bool(DType)>& native) {
    const DType type = file.tensors().at(name).dtype;
    const DType interleaved = cpu::interleaved_type(type), same = cpu::repacked_type(type);
    const bool looked_up = name == "token_embd.weight" && file.tensors().count("output.weight") > 0;
    if (looked_up && native(type)) return type;
    if (together % cpu::kInterleavedRows == 0 && native(interleaved)) return interleaved;
    return native(type) ? type : native(same) ? same : DType::F16;
}

Tensor WeightMemory::hold(const std::string& name, const Tensor& t, DType dtype) {
    if (dtype == t.dtype) return in_place(t);
    if (dtype == cpu::interleaved_type(t.dtype)) return interleaved(name, t, dtype);
    if (dtype == cpu::repacked_type(t.dtype)) return repacked(name, t, dtype);
    return unpacked(name, t, dtype);
}

Tensor WeightMemory::in_place(const Tensor& t) {
    if (backend_->on_host()) {
        w_.mapped[backend_] += t.bytes();
        return t;
    }
    const Tensor out = own(t.dtype, t.rows, t.cols, MemoryKind::weights, "a weight");
    backend_->upload(out, t.data, t.bytes());
    return out;
}

Tensor WeightMemory::own(DType dtype, int64_t rows, int64_t cols, MemoryKind kind, const std::string& name) {
    const Buffer buffer = backend_->alloc(kind, rows * row_bytes(dtype, cols), name.c_str());
    w_.owned.push_back(buffer);
    return Tensor(buffer.data.get(), dtype, rows, cols);
}

Tensor WeightMemory::interleaved(const std::string& name, const Tensor& t, DType dtype) {
    const Tensor out = own(dtype, t.rows, t.cols, MemoryKind::weights, name);
    if (backend_->dry()) return out;
    backend_->run_on_host(t.rows / cpu::kInterleavedRows, [&](int64_t i, int) {
        const int64_t first = i * cpu::kInterleavedRows;
        cpu::interleave(t.dtype, t.row(first), t.stride, t.cols, out.row(first));
    });
    return out;
}

Tensor WeightMemory::repacked(const std::string& name, const Tensor& t, DType dtype) {
    const Tensor out = own(dtype, t.rows, t.cols, MemoryKind::weights, name);
    std::vector<std::byte> row(out.stride);
    for (int64_t i = 0; i < t.rows && !backend_->dry(); ++i) {
        cpu::repack(t.dtype, t.row(i), t.cols, row.data());
        backend_->upload(out.rows_of(i, 1), row.data(), row.size());
    }
    return out;
}

Tensor WeightMemory::unpacked(const std::string& name, const Tensor& t, DType dtype, MemoryKind kind) {
    const Tensor out = own(dtype, t.rows, t.cols, kind, name);
    if (backend_->dry()) return out;
    const int64_t step = std::clamp<int64_t>((1 << 20) / t.cols, 1, t.rows);
    std::vector<int32_t> ids(step);
    std::iota(ids.begin(), ids.end(), 0);
    const DType held = cpu::repacked_type(t.dtype);
    const size_t bytes = row_bytes(held, t.cols) + t.cols * sizeof(float) + sizeof(int32_t);
    Scratch scratch(*backend_, step * bytes + (1 << 10));
    const Tensor raw = scratch.take(held, step, t.cols), values = scratch.f32(step, t.cols);
    const Tensor index = scratch.i32(step);
    std::vector<std::byte> rows(held == t.dtype ? 0 : raw.bytes());
    backend_->upload(index, ids.data(), index.bytes());
    for (int64_t first = 0; first < t.rows; first += step) {
        const int64_t n = std::min(step, t.rows - first);
        const Tensor to = out.rows_of(first, n), some = index.cols_of(0, n);
        if (held != t.dtype) cpu::repack(t.dtype, t.row(first), n * t.cols, rows.data());
        backend_->upload(raw, held == t.dtype ? t.row(first) : rows.data(), n * raw.stride);
        backend_->gather(raw, some, values.rows_of(0, n));
        backend_->store(
            values.rows_of(0, n),
            {.base = to.data, .dtype = dtype, .width = int(t.cols), .row_bytes = to.stride, .slots = some});
    }
    return out;
}

Tensor WeightMemory::halved(const std::string& name, int64_t rows, int64_t cols, const Tensor* values,
                            Tensor* scale) {
    const Tensor out = own(DType::F16, rows, cols, MemoryKind::weights, name);
    *scale = own(DType::F32, 1, rows, MemoryKind::weights, name);
    if (backend_->dry()) return out;
    const int64_t step = std::clamp<int64_t>((1 << 20) / cols, 1, rows);
    std::vector<float> largest(rows), divided(step * cols);
    std::vector<int32_t> ids(step);
    std::iota(ids.begin(), ids.end(), 0);
    Scratch scratch(*backend_, step * (cols * sizeof(float) + sizeof(int32_t)) + (1 << 10));
    const Tensor some = scratch.f32(step, cols), index = scratch.i32(step);
    backend_->upload(index, ids.data(), index.bytes());
    for (int64_t first = 0; first < rows; first += step) {
        const int64_t n = std::min(step, rows - first);
        backend_->run_on_host(n, [&](int64_t i, int) {
            const float* const row = values->f32(first + i);
            float most = 0;
            for (int64_t j = 0; j < cols; ++j) most = std::max(most, std::fabs(row[j]));
            largest[first + i] = most > 0 ? most : 1;
            for (int64_t j = 0; j < cols; ++j) divided[i * cols + j] = row[j] / largest[first + i];
        });
        const Tensor to = out.rows_of(first, n);
        backend_->upload(some.rows_of(0, n), divided.data(), n * cols * sizeof(float));
        backend_->store(some.rows_of(0, n), {.base = to.data,
                                             .dtype = DType::F16,
                                             .width = int(cols),
                                             .row_bytes = to.stride,
                                             .slots = index.cols_of(0, n)});
    }
    backend_->upload(*scale, largest.data(), scale->bytes());
    return out;
}

}  // namespace slimrt
