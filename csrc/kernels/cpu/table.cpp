// The table of an ISA, its only symbol that the rest of the program uses. Compiled once per ISA.
#include "kernels/cpu/isa.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/rows.h"

namespace slimrt::cpu::SLIMRT_ISA {

extern const Isa table;
const Isa table = {
    .name = SLIMRT_ISA_NAME,
    .linear = linear_kernels,
    .busy = busy,
    .read = read,
    .unpack = unpack,
    .narrow = narrow,
    .inverse_rms = inverse_rms,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .rope = rope,
    .activate = activate,
    .gate = gate,
    .add = add,
    .multiply = multiply,
    .store_head = store_head,
    .load_head = load_head,
    .store_channels = store_channels,
    .load_channels = load_channels,
    .pack_query = pack_query,
    .attend_block = attend_block,
    .score_block = score_block,
    .keep_rows = keep_rows,
    .add_kept_values = add_kept_values,
    .skip_weights = skip_weights,
    .add_listed_values = add_listed_values,
    .score_rotated = score_rotated,
    .extract_outliers = extract_outliers,
    .absorb_values = absorb_values,
    .scores = scores,
    .finish_scores = finish_scores,
    .softmax = softmax,
    .values = values,
};

}  // namespace slimrt::cpu::SLIMRT_ISA
