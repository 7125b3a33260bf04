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
    c.d_layer_embd = int(file.integer(prefix + "embedding_length_per_layer_input", 0, 1 << 16, 0));
    const int own =
        c.n_layers - int(file.integer(prefix + "attention.shared_kv_layers", 0, c.n_layers - 1, 0));
    for (int i = own; i < c.n_layers; ++i) {
        int& owner = c.layers[i].owner = own - 1;
        while (owner >= 0 && !c.layers[owner].window != !c.layers[i].window) --owner;
        if (owner < 0)
            fail(ErrorCode::format, file.path(), ": ", prefix, "attention.shared_kv_layers leaves layer ", i,
                 " no layer of its kind to read K and V of");
    }
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
