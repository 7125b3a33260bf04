// Fuses neighbouring calls of a recorded step to one kernel. At decoding a kernel takes some two microseconds
// whatever it does, which is all that most calls of a layer take.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "kernels/cuda/kernels.h"

namespace slimrt::cuda {

/// Between begin() and end() calls are put off until it is known what follows them; else they are started at
/// once. Memory then holds what single calls would leave there, bit for bit. Before anything else is started,
/// start() must be called.
class Fusion {
  public:
    explicit Fusion(const Device& device) : device_(device) {}

    void begin() { active_ = true; }
    void end();
    /// Forgets the calls that were put off, after a failure.
    void drop();
    /// Starts the calls that were put off.
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
        std::optional<Normed> normed;  // the norm that gives x
        Tensor sum;                    // sum += the only product, if there is a sum

        Around around() const;
    };
    struct Sum {
        Tensor x, y;
    };
    using Rows = std::vector<StepRows>;

    /// Puts rows off beside others, if none of them reads or writes what another one does.
    void defer(StepRows rows);

    const Device& device_;
    bool active_ = false;
    std::variant<std::monostate, Normed, Products, Sum, Rows> pending_;
};

}  // namespace slimrt::cuda
