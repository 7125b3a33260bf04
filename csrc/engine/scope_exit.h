#pragma once

#include <utility>

namespace slimrt {

/// Calls f at the end of a block, however it is left.
template <class F>
struct ScopeExit {
    explicit ScopeExit(F f) : f(std::move(f)) {}
    ~ScopeExit() { f(); }
    F f;
};

}  // namespace slimrt
