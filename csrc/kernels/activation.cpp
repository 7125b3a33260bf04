#include <iterator>

#include "core/error.h"
#include "kernels/backend.h"

namespace slimrt {

Activation require_activation(const std::string& name, const std::string& where) {
    constexpr const char* kNames[] = {"silu", "gelu_tanh",    "gelu_erf",     "relu",
                                      "tanh", "relu_squared", "clamped_swish"};
    std::string known;
    for (size_t i = 0; i < std::size(kNames); ++i) {
        if (name == kNames[i]) return Activation(i);
        known += concat(i ? ", " : "", kNames[i]);
    }
    fail(ErrorCode::unsupported, where, "activation '", name, "' is not supported; supported are: ", known);
}

}  // namespace slimrt
