// Neighbouring calls of a recorded step as one kernel. At decoding a kernel costs some two microseconds
// whatever it does, which for most of a layer's calls is all that they cost.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "kernels/cuda/kernels.h"

namespace slimrt::cuda {

/// Between begin() and end() calls are put off until it is known what follows them; else they are started at
/// once. Memory then holds what single calls would have left there, bit for bit. Whoever starts anything else
/// calls start() before.
class Fusion {
  public:
    explicit Fusion(const Device& device) : device_(device) {}

    void begin() { active_ = true; }
    void end();
    /// Forgets what was put off, after a failure.
    void drop();
    /// What was put off.
    void start();

    void linear(Tensor x, std::span<const Product> products, std::byte* workspace);
    void gate(Activation kind, Tensor gate, Tensor up);
    void add(Tensor x, Tensor y);
    void norm(Tensor x, const Norm& norm);
    void rope(Tensor x, int n_heads, const Rope& rope, Tensor positions);
    void store(Tensor x, const Slots& slots);

  private:
    struct Normed {
        Tensor x;
        Norm norm;
    };
    struct Products {
        Tensor x;
        std::vector<Product> all;
        std::byte* workspace;
        std::optional<Normed> normed;  // what becomes x first
        Tensor sum;                    // sum += what the only one gives, if there is a sum

        Around around() const;
    };
    struct Sum {
        Tensor x, y;
    };
    using Rows = std::vector<StepRows>;

    /// Puts it off beside others that neither read nor write what it does.
    void put_off(StepRows rows);

    const Device& device_;
    bool active_ = false;
    std::variant<std::monostate, Normed, Products, Sum, Rows> late_;
};

}  // namespace slimrt::cuda
