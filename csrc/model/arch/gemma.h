// What the first three Gemmas have in common beyond traits.
#pragma once

#include <string>

namespace slimrt {

class GgufFile;
struct ModelConfig;

/// Of the embedding and of scores. The 27B model alone, known by its layers, scales scores by what a head is
/// of the model's width; files do not say it.
void scale_gemma(const GgufFile& file, const std::string& prefix, int layers_of_27b, ModelConfig& config);

}  // namespace slimrt
