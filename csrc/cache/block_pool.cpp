#include "cache/block_pool.h"

#include <utility>

#include "core/error.h"

namespace slimrt {

BlockPool::BlockPool(std::vector<Stored> layers, int64_t n_blocks) : blocks_(n_blocks) {
    for (Stored& stored : layers) {
        Layer layer{std::move(stored), {}, 0, {}};
        for (const Plane& plane : layer.format) {
            layer.plane_offset.push_back(layer.block_bytes);
            layer.block_bytes += plane.block_bytes();
        }
        layer.pool = layer.backend->alloc(MemoryKind::cache, layer.block_bytes * n_blocks, "cache");
        layers_.push_back(std::move(layer));
    }
}

size_t BlockPool::block_bytes() const {
    size_t bytes = 0;
    for (const Layer& layer : layers_) bytes += layer.block_bytes;
    return bytes;
}

int32_t BlockPool::take() {
    if (n_free() == 0) fail(ErrorCode::context_overflow, "the cache has no free block");
    return blocks_.take();
}

void BlockPool::copy(int32_t from, int32_t to) {
    for (const Layer& layer : layers_) {
        const size_t bytes = layer.block_bytes;
        std::byte* pool = layer.pool.data.get();
        layer.backend->upload(Tensor(pool + to * bytes, DType::F32, 1, 0), pool + from * bytes, bytes);
    }
}

Rows BlockPool::rows(int layer, int plane) const {
    const Layer& l = layers_[layer];
    return {.base = l.plane(0, plane),
            .dtype = l.format[plane].type,
            .width = l.format[plane].width,
            .heads = l.format[plane].heads,
            .block_stride = l.block_bytes,
            .block_tokens = kBlockTokens,
            .scale_tokens = l.format[plane].scale_tokens};
}

Slots BlockPool::slots(int layer, int plane, Tensor slots) const {
    const Rows rows = this->rows(layer, plane);
    return {.base = layers_[layer].plane(0, plane),
            .dtype = rows.dtype,
            .width = rows.width,
            .heads = rows.heads,
            .block_stride = rows.block_stride,
            .block_tokens = rows.block_tokens,
            .slots = slots,
            .scale_tokens = rows.scale_tokens};
}

}  // namespace slimrt
