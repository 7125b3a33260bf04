// Which of n equal slots are free, and the reference counts of the others.
#pragma once

#include <cstdint>
#include <vector>

namespace slimrt {

/// Needs memory only for slots that were ever taken, since a plan may ask for any number.
class SharedSlots {
  public:
    SharedSlots() = default;
    explicit SharedSlots(int64_t n) : size_(n) {}

    int64_t size() const { return size_; }
    int64_t n_free() const { return size_ - int64_t(users_.size() - given_back_.size()); }
    int users(int32_t i) const { return users_[i]; }
    /// A free slot; there must be one.
    int32_t take() {
        if (given_back_.empty()) {
            users_.push_back(1);
            given_back_.reserve(users_.capacity());  // so that drop() allocates nothing
            return int32_t(users_.size()) - 1;
        }
        const int32_t i = given_back_.back();
        given_back_.pop_back();
        users_[i] = 1;
        return i;
    }
    void share(int32_t i) { ++users_[i]; }
    void drop(int32_t i) {
        if (--users_[i] == 0) given_back_.push_back(i);
    }

  private:
    int64_t size_ = 0;
    std::vector<int32_t> users_;  // reference counts of the slots taken so far
    std::vector<int32_t> given_back_;
};

}  // namespace slimrt
