// Every architecture, one line each.
#include "model/arch/arch.h"

namespace slimrt {

const std::vector<const Architecture*>& architectures() {
    static const std::vector<const Architecture*> all = {
        &llama,  &gpt2,     &gptneox,    &olmo2,    &phi2,     &phi3,      &qwen2,   &qwen3,      &stablelm,
        &gemma,  &olmo,     &command_r,  &bloom,    &mpt,      &granite,   &minicpm, &glm4,       &opt,
        &openlm, &bitnet,   &granitemoe, &gemma3,   &cohere2,  &exaone4,   &smollm3, &mistral3,   &deepseek,
        &olmoe,  &qwen2moe, &qwen3moe,   &gpt_oss,  &minicpm3, &deepseek2, &gemma2,  &minimax_m2, &gemma4,
        &t5,     &whisper,  &moonshine,  &mistral4, &phimoe,   &bart,      &mbart,   &chronos2,
    };
    return all;
}

}  // namespace slimrt
