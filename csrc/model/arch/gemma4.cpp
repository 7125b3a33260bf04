// Gemma 4 (text): as Gemma 3, but with norms as they are stored, scores that are not scaled since q and k are
// normed, V normed too, and the output of each layer scaled. Layers that see all have wider heads, of which
// some pairs do not turn (rope_freqs), and in the larger models no W_V.
#include <cmath>

#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void settle(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.embedding_scale = std::sqrt(float(c.d_model));
    if (file.integer(prefix + "embedding_length_per_layer_input", 0, 1 << 20, 0) > 0)
        fail(ErrorCode::unsupported, file.path(), ": Gemma 4 with embeddings of its own in each layer (",
             prefix, "embedding_length_per_layer_input; E2B and E4B) is not supported yet");
    if (file.integer(prefix + "attention.shared_kv_layers", 0, c.n_layers, 0) > 0)
        fail(ErrorCode::unsupported, file.path(), ": Gemma 4 whose last layers read the K and V of others (",
             prefix, "attention.shared_kv_layers) is not supported yet");
}

}  // namespace

const Architecture gemma4 = {
    .name = "gemma4",
    .norms = Norms::both,
    .layer_scale = Presence::optional,
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::head,
    .v_norm = true,
    .k_for_v = true,
    .scaled_scores = false,
    .activation = Activation::gelu_tanh,
    .sliding_window = true,
    .layers = {.full_period = 6, .window_rope = WindowRope::own, .window_base = 10000},
    .settle = settle,
};

}  // namespace slimrt
