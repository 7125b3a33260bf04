#include "cache/kept_means.h"

#include <utility>

namespace slimrt {
namespace {

constexpr size_t kLine = 16;  // floats of a cache line

size_t stride_of(const Plane& plane) { return (plane.width + kLine - 1) / kLine * kLine; }

}  // namespace

KeptMeans::KeptMeans(const std::vector<Layer>& layers, int64_t n) : slots_(n) {
    for (const auto& [backend, format] : layers) {
        size_t floats = 0;
        for (const Plane& plane : format) floats += n * stride_of(plane);
        Planes kept;
        if (floats > 0) {
            kept.sums = backend->alloc(MemoryKind::cache, floats * sizeof(float), "means of rows");
            kept.known = backend->alloc(MemoryKind::cache, n * format.size(), "means of rows");
        }
        floats = 0;
        for (size_t p = 0; p < format.size(); ++p) {
            float* const base = reinterpret_cast<float*>(kept.sums.data.get()) + floats;
            auto* const known = reinterpret_cast<uint8_t*>(kept.known.data.get()) + p * n;
            kept.planes.push_back({base, known, stride_of(format[p])});
            floats += n * stride_of(format[p]);
        }
        layers_.push_back(std::move(kept));
    }
}

void KeptMeans::grow(std::vector<int32_t>& means, int64_t length) {
    if (slots_.size() == 0) return;
    while (int64_t(means.size()) < length / kStretchRows) {
        means.push_back(slots_.n_free() > 0 ? slots_.take() : -1);
        if (means.back() < 0) continue;
        for (const Planes& layer : layers_)
            for (const StretchMeans& plane : layer.planes) plane.known[means.back()] = false;
    }
}

void KeptMeans::cut(std::vector<int32_t>& means, int64_t length) {
    for (; int64_t(means.size()) > length / kStretchRows; means.pop_back())
        if (means.back() >= 0) slots_.drop(means.back());
}

void KeptMeans::share(std::span<const int32_t> means) {
    for (const int32_t mean : means)
        if (mean >= 0) slots_.share(mean);
}

StretchMeans KeptMeans::of(int layer, int plane) const {
    if (layers_.empty() || layers_[layer].planes.empty()) return {};
    return layers_[layer].planes[plane];
}

}  // namespace slimrt
