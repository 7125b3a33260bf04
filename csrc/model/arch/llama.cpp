// Llama 1-3 and everything stored as "llama": Vicuna, CodeLlama, OpenLLaMA, SmolLM2, Mistral (with its
// window), Mixtral. Q and K rows are permuted in GGUF so that a RoPE pair is adjacent.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture llama = {
    .name = "llama",
    .qkv_bias = Presence::optional,
    .linear_bias = Presence::optional,
    .ffn = &expert_ffn,
    .router = {.renormalised = true},
    .sliding_window = true,
};

}  // namespace slimrt
