#include "bindings/encoder_array.h"

#include "core/error.h"

namespace slimrt {

EncoderArray read_encoder_input(const nb::handle& from, const ModelConfig& c, bool encoded) {
    EncoderArray array;
    const bool tokens = c.n_inputs == 0 && !encoded;
    if (Array<const int32_t> ids; tokens && nb::try_cast(from, ids, false) && ids.ndim() == 1) {
        array.ids.assign(ids.data(), ids.data() + ids.size());
        array.input.ids = array.ids;
        array.input.rows = int64_t(ids.size());
        return array;
    }
    const size_t width = encoded || c.n_inputs == 0 ? c.d_model : c.n_inputs;
    if (!nb::try_cast(from, array.values, false) || array.values.ndim() != 2 ||
        array.values.shape(1) != width)
        fail(ErrorCode::argument, "a source must be a float32 array [rows, ", width, "]",
             tokens ? " of embeddings, or int32 ids [n]" : "", ", without gaps");
    array.input.values = array.values.data();
    array.input.rows = int64_t(array.values.shape(0));
    array.input.encoded = encoded;
    return array;
}

std::vector<int32_t> read_positions(const nb::handle& item) {
    if (nb::len(item) < 3) return {};
    Array<const int32_t> positions;
    if (!nb::try_cast(item[2], positions, false) || positions.ndim() != 1 || positions.size() == 0)
        fail(ErrorCode::argument, "positions must be an int32 array [n], one for each row of the source");
    return {positions.data(), positions.data() + positions.size()};
}

}  // namespace slimrt
