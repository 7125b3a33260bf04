// Architectures that are known and not supported, each with the reason: GGUF's names and Hugging Face's model
// types.
#include <vector>

#include "model/architecture.h"

namespace slimrt {
namespace {

struct Refused {
    const char* why;
    std::vector<const char*> names;
};

const std::vector<Refused>& all_refused() {
    static const std::vector<Refused> all = {
        {"most of its layers are long convolutions that keep no K or V (of Evo's 32 all but 3)",
         {"stripedhyena"}},
        {"its layers keep a recurrent state, no K or V",
         {"rwkv", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "mamba", "mamba2", "falcon_mamba"}},
        {"some of its layers keep a recurrent state or convolve, where attention would keep K and V",
         {"jamba",
          "bamba",
          "falcon-h1",
          "falcon_h1",
          "granitehybrid",
          "granitemoehybrid",
          "nemotron_h",
          "nemotron_h_moe",
          "lfm2",
          "lfm2moe",
          "lfm2_moe",
          "qwen3next",
          "qwen3_next",
          "qwen35",
          "qwen35moe",
          "qwen3_5",
          "qwen3_5_text",
          "qwen3_5_moe",
          "qwen3_5_moe_text",
          "kimi-linear",
          "kimi_linear",
          "plamo2",
          "recurrent_gemma"}},
        {"an indexer chooses what its attention reads (DSA)",
         {"deepseek32", "deepseek_v32", "glm-dsa", "glm_moe_dsa", "deepseek4", "deepseek_v4"}},
        {"its layers differ in window, heads or positions, which slimrt does not have yet",
         {"gemma3n", "gemma3n_text", "llama4", "llama4_text"}},
    };
    return all;
}

}  // namespace

std::string why_refused(const std::string& name) {
    for (const auto& [why, names] : all_refused())
        for (const char* one : names)
            if (name == one) return why;
    return "";
}

}  // namespace slimrt
