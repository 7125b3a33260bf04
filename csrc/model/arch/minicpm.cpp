// MiniCPM 1 and 2: Llama with an embedding, residuals and logits that are scaled; the first files leave
// MiniCPM-2B's scales out.
#include <cmath>

#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void settle(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.embedding_scale = 12;
    c.residual_scale = 1.4f / std::sqrt(float(c.n_layers));
    c.output_scale = 256.0f / float(c.d_model);
    read_scales(file, prefix, c);
}

}  // namespace

const Architecture minicpm = {
    .name = "minicpm",
    .settle = settle,
};

}  // namespace slimrt
