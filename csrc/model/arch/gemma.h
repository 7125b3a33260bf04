// What the first three Gemmas have in common beyond the fields of Architecture.
#pragma once

#include <string>

namespace slimrt {

class GgufFile;
struct ModelConfig;

/// Scales of the embedding and of scores. Only the 27B model, known by its number of layers, scales scores by
/// d_model / n_heads in place of head_dim; files do not say it.
void scale_gemma(const GgufFile& file, const std::string& prefix, int layers_of_27b, ModelConfig& config);

}  // namespace slimrt
