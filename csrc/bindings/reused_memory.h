// Memory of result arrays, which is used again once Python has freed them: fresh pages would cost a tenth of
// a step whose logits are megabytes.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace slimrt {

/// One piece of memory at a time; arrays may outlive it.
class ReusedMemory {
  public:
    /// most: floats; more are given back to the system.
    explicit ReusedMemory(size_t most) : spare_(std::make_shared<Spare>()) { spare_->most = most; }

    /// n floats, not initialised. Few get memory of their own: who keeps them would keep all of the spare.
    std::vector<float> take(size_t n) {
        std::vector<float> memory;
        {
            const std::lock_guard lock(spare_->mutex);
            if (spare_->memory.capacity() / 4 <= n) memory.swap(spare_->memory);
        }
        memory.resize(n);
        return memory;
    }

    nb::ndarray<nb::numpy, float> array(std::vector<float>&& data,
                                        std::initializer_list<size_t> shape) const {
        auto* owner = new Owner{std::move(data), spare_};
        nb::capsule free(owner, [](void* p) noexcept { delete static_cast<Owner*>(p); });
        return nb::ndarray<nb::numpy, float>(owner->data.data(), shape, free);
    }

  private:
    struct Spare {
        std::mutex mutex;
        std::vector<float> memory;
        size_t most = 0;
    };
    struct Owner {
        std::vector<float> data;
        std::shared_ptr<Spare> spare;
        ~Owner() {
            const std::lock_guard lock(spare->mutex);
            if (data.capacity() <= spare->most && data.capacity() > spare->memory.capacity())
                spare->memory.swap(data);
        }
    };

    std::shared_ptr<Spare> spare_;
};

}  // namespace slimrt
