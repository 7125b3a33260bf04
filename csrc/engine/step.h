// One step of the decoder: which tokens of which sequences, and whose logits.
#pragma once

#include <vector>

#include "model/decoder.h"

namespace slimrt {

struct Step {
    std::vector<int32_t> tokens, positions, slots, outputs;
    std::vector<AttentionSequence> sequences;

    /// Adds n tokens after `cached` ones. `tokens` and `slots` are appended to by the caller.
    void add_sequence(int64_t n, int64_t cached, const int32_t* table);
};

/// Runs a step; logits rows of step.outputs go to `out` (host memory), one after another.
void run_step(const Decoder& decoder, Backend& backend, Scratch& scratch, const Step& step, float* out);

/// Bytes of scratch that no step exceeds: runs the largest on a dry backend, whose workspace afterwards is
/// what no step exceeds either.
size_t measure_scratch(Decoder& decoder, Backend& dry);

}  // namespace slimrt
