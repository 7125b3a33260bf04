// What an encoder reads, from NumPy arrays.
#pragma once

#include <vector>

#include "bindings/bindings.h"
#include "engine/engine.h"

namespace slimrt {

/// An encoder's source, and the arrays that it refers to; ids are copied, as in append().
struct EncoderArray {
    std::vector<int32_t> ids, positions;
    Array<const float> values;
    EncoderInput input;
};

/// encoded: the rows are an encoder's output.
EncoderArray read_encoder_input(const nb::handle& from, const ModelConfig& c, bool encoded);
/// The positions of an item of encode(), (sequence, source) or (sequence, source, positions).
std::vector<int32_t> read_positions(const nb::handle& item);

}  // namespace slimrt
