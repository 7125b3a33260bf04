// Which of n equal things are free, and how many use each of the others.
#pragma once

#include <cstdint>
#include <vector>

namespace slimrt {

class SharedSlots {
  public:
    SharedSlots() = default;
    explicit SharedSlots(int64_t n) : users_(n, 0) {
        for (int64_t i = n; i-- > 0;) free_.push_back(int32_t(i));
    }

    int64_t size() const { return int64_t(users_.size()); }
    int64_t n_free() const { return int64_t(free_.size()); }
    int users(int32_t i) const { return users_[i]; }
    /// There must be a free one.
    int32_t take() {
        const int32_t i = free_.back();
        free_.pop_back();
        users_[i] = 1;
        return i;
    }
    void share(int32_t i) { ++users_[i]; }
    void drop(int32_t i) {
        if (--users_[i] == 0) free_.push_back(i);
    }

  private:
    std::vector<int32_t> users_;
    std::vector<int32_t> free_;
};

}  // namespace slimrt
