// What each weight of a model is multiplied by, as sums of squares: for importance matrices.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/gguf.h"

namespace slimrt {

/// Of the inputs of a weight: the sum of squares of each column, and how many rows there were. A stack of
/// matrices, one for each expert or head, has a row of sums and a count for each.
struct InputSquares {
    std::vector<double> sums;     // [matrices, columns]
    std::vector<int64_t> counts;  // [matrices]
};

class InputSquaresOfWeights {
  public:
    /// held: Decoder::matrices() of that file.
    InputSquaresOfWeights(const GgufFile& file, const std::map<std::string, Tensor>& held);

    /// Adds rows x that a weight, or one matrix of a stack, is multiplied by. Other rows of a matrix than its
    /// first get the same x and are ignored, as are weights that are not of the file.
    void add(Tensor weight, Tensor x);

    /// Of the weights that were multiplied, by name.
    const std::map<std::string, InputSquares>& sums() const { return sums_; }

  private:
    struct Named {
        std::string name;
        Tensor all;
        int64_t matrices;
    };
    std::map<const std::byte*, Named> by_address_;
    std::map<std::string, InputSquares> sums_;
};

}  // namespace slimrt
