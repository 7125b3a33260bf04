// What Engine.sample takes and returns, as Python has it.
#pragma once

#include <vector>

#include "bindings/bindings.h"
#include "engine/sampler.h"

namespace slimrt {

/// Rows over these arrays, which must outlive them. masks: None, or an array [rows, words]; logprobs,
/// joint_from: None, or a number for each row.
std::vector<RowToSample> read_rows(const Array<const float>& logits, const nb::sequence& samplers,
                                   const nb::object& masks, const nb::object& logprobs,
                                   const nb::object& joint_from);
/// Rows over Output::candidates, [rows, 2 n]. Throws Error{argument} where a choice needs more than these.
std::vector<RowToSample> read_candidates(const Array<const int32_t>& candidates, const nb::sequence& samplers,
                                         int64_t n_vocab);
/// For each row (token, (logprob, [(token, logprob), ...]) or None), or the exception of its error.
nb::list choice_list(const std::vector<Choice>& choices);

}  // namespace slimrt
