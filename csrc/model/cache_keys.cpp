#include "model/cache_keys.h"

#include "core/error.h"
#include "model/architecture.h"

namespace slimrt {
namespace {

/// Numbers by layer that a conversion wrote into the file; empty without the key.
std::vector<int64_t> stored_numbers(const GgufFile& file, const char* key, int n_layers, const char* of) {
    const auto it = file.metadata().find(key);
    if (it == file.metadata().end()) return {};
    const auto* array = std::get_if<GgufArray>(&it->second);
    if (!array || array->count != size_t(n_layers))
        fail(ErrorCode::format, file.path(), ": key '", key, "' is not an array of ", n_layers, " ", of);
    std::vector<int64_t> numbers;
    for (const GgufValue& value : elements(*array)) {
        const auto* with_sign = std::get_if<int64_t>(&value);
        const auto* without = std::get_if<uint64_t>(&value);
        numbers.push_back(with_sign ? *with_sign : without ? int64_t(*without) : -1);
    }
    return numbers;
}

/// A tensor of the file or of the caller; or nullptr.
const Tensor* find_tensor(const GgufFile& file, const ExtraTensors& extra, const std::string& name) {
    if (const auto it = file.tensors().find(name); it != file.tensors().end()) return &it->second;
    const auto it = extra.find(name);
    return it == extra.end() ? nullptr : &it->second;
}

bool same_shape(const AttnConfig& a, const AttnConfig& b) {
    return a.n_heads == b.n_heads && a.n_kv_heads == b.n_kv_heads && a.head_dim == b.head_dim &&
           a.n_rot == b.n_rot && a.window == b.window;
}

}  // namespace

Names stored_names(const GgufFile& file, const char* key, int n_layers, const char* missing) {
    const auto it = file.metadata().find(key);
    if (it == file.metadata().end()) return Names(n_layers, missing);
    Names names;
    if (const auto* array = std::get_if<GgufArray>(&it->second))
        for (const GgufValue& value : elements(*array))
            if (const auto* name = std::get_if<std::string_view>(&value)) names.emplace_back(*name);
    if (names.size() != size_t(n_layers))
        fail(ErrorCode::format, file.path(), ": key '", key, "' is not an array of ", n_layers, " names");
    return names;
}

std::vector<int> read_owners(const GgufFile& file, const ModelConfig& model) {
    constexpr const char* kKey = "slimrt.cache.owners";
    std::vector<int> owners(model.n_layers);
    for (int i = 0; i < model.n_layers; ++i) owners[i] = model.layers[i].owner;
    const std::vector<int64_t> stored = stored_numbers(file, kKey, model.n_layers, "layers");
    for (int i = 0; i < int(stored.size()); ++i) {
        const int64_t owner = stored[i];
        const auto where = [&] {
            return concat(file.path(), ": key '", kKey, "' says that layer ", i, " reads the rows of layer ",
                          owner, ", ");
        };
        if (owner < 0 || owner > i)
            fail(ErrorCode::format, where(), "but an owner is the layer itself or one before it");
        if (owners[owner] != owner)
            fail(ErrorCode::format, where(), "which reads those of layer ", owners[owner],
                 ": an owner reads its own");
        if (!same_shape(attention_config(model, i), attention_config(model, int(owner))) ||
            model.layers[i].rope != model.layers[owner].rope)
            fail(ErrorCode::format, where(), "whose attention has another shape");
        owners[i] = int(owner);
    }
    return owners;
}

std::vector<int> read_v_heads(const GgufFile& file, const ModelConfig& model) {
    constexpr const char* kKey = "slimrt.cache.v_heads";
    std::vector<int> heads(model.n_layers, 0);
    const std::vector<int64_t> stored = stored_numbers(file, kKey, model.n_layers, "numbers of heads");
    for (int i = 0; i < int(stored.size()); ++i) {
        if (stored[i] < 0 || stored[i] >= model.layers[i].n_kv_heads)
            fail(ErrorCode::format, file.path(), ": key '", kKey, "' says that layer ", i, " keeps V of ",
                 stored[i], " heads, and some but not all of its ", model.layers[i].n_kv_heads,
                 " KV heads may");
        heads[i] = int(stored[i]);
    }
    return heads;
}

float stored_delta(const GgufFile& file) {
    constexpr const char* kKey = "slimrt.cache.sparse_delta";
    if (!file.metadata().contains(kKey))
        fail(ErrorCode::argument, file.path(),
             " does not say which sparse_delta changes little: give a number, "
             "or let `slimrt convert --sparse` find one");
    const double delta = file.number(kKey);
    if (!(delta >= 0 && delta < 1))
        fail(ErrorCode::format, file.path(), ": key 'slimrt.cache.sparse_delta' is ", delta,
             ", not at least 0 and below 1");
    return static_cast<float>(delta);
}

bool shares_unrotated_keys(const GgufFile& file, const ModelConfig& model) {
    constexpr const char* kKey = "slimrt.cache.shared_keys";
    const std::string stage = file.string(kKey, "rotated");
    if (stage == "raw" && model.architecture->qk_norm != QkNorm::none)
        fail(
            ErrorCode::unsupported, file.path(), ": key '", kKey,
            "' is 'raw', and each layer norms keys by itself (QK-norm), which layers that share them cannot");
    if (stage != "rotated" && stage != "raw" && stage != "unrotated")
        fail(ErrorCode::format, file.path(), ": key '", kKey, "' is '", stage,
             "'; it may be: rotated, raw, unrotated");
    return stage == "unrotated";
}

int64_t folded_rank(const GgufFile& file, const ModelConfig& model, const ExtraTensors& extra, int layer) {
    const std::string prefix = block_prefix(model, layer);
    if (const Tensor* out = find_tensor(file, extra, prefix + "attn_kr_out.weight")) return out->cols;
    return find_tensor(file, extra, prefix + "attn_kr_v.weight") ? 0 : -1;
}

int latent_heads_of(const GgufFile& file, const ModelConfig& model, const ExtraTensors& extra, int layer) {
    const AttnConfig c = attention_config(model, layer);
    const Tensor* folded = find_tensor(file, extra, block_prefix(model, layer) + "attn_v_latent.weight");
    if (!folded) return c.latent_heads;
    if (folded->cols % c.head_dim || folded->cols == 0 || c.kv_width() % folded->cols)
        fail(ErrorCode::format, file.path(), ": a latent of ", folded->cols, " columns in layer ", layer,
             " is not of whole groups of its ", c.n_kv_heads, " KV heads of ", c.head_dim);
    return int(folded->cols / c.head_dim);
}

}  // namespace slimrt
