#include "bindings/engine_options.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/error.h"
#include "model/architecture.h"

namespace slimrt {
namespace {

template <class T>
void read_by_layer(const std::string& name, nb::handle value, ByLayer<T>& option) {
    if (nb::isinstance<nb::str>(value) || nb::isinstance<nb::int_>(value)) {
        option.all = nb::cast<T>(value);
        return;
    }
    option.each = nb::cast<std::vector<T>>(value);
    if (option.each.empty()) fail(ErrorCode::argument, name, ": the list is empty");
}

void read_option(const std::string& name, nb::handle value, EngineOptions& o) {
    if (name == "n_ctx")
        o.cache.n_ctx = nb::cast<int64_t>(value);
    else if (name == "n_source")
        o.cache.n_source = nb::cast<int64_t>(value);
    else if (name == "cross")
        o.cache.cross = nb::cast<std::string>(value);
    else if (name == "cross_type")
        o.cache.cross_type = nb::cast<std::string>(value);
    else if (name == "n_seqs")
        o.cache.n_seqs = nb::cast<int>(value);
    else if (name == "cache_tokens")
        o.cache.cache_tokens = nb::cast<int64_t>(value);
    else if (name == "n_batch")
        o.cache.n_batch = nb::cast<int>(value);
    else if (name == "device")
        o.device = nb::cast<std::string>(value);
    else if (name == "n_threads")
        o.n_threads = nb::cast<int>(value);
    else if (name == "cache")
        read_by_layer(name, value, o.cache.mode);
    else if (name == "cache_type_k")
        read_by_layer(name, value, o.cache.type_k);
    else if (name == "cache_type_v")
        read_by_layer(name, value, o.cache.type_v);
    else if (name == "residual_type")
        read_by_layer(name, value, o.cache.residual_type);
    else if (name == "rank")
        read_by_layer(name, value, o.cache.rank);
    else if (name == "sparse_threshold")
        o.cache.sparse_threshold = nb::cast<float>(value);
    else if (name == "sparse_delta")
        o.cache.sparse_delta = nb::cast<float>(value);
    else if (name == "memory_limit")
        o.memory_limit = nb::cast<uint64_t>(value);
    else
        throw nb::type_error(concat("unexpected argument '", name, "'").c_str());
}

const char* name_of(EncoderKind kind) {
    constexpr const char* kNames[] = {"none", "tokens", "mel", "audio", "series"};
    return kNames[int(kind)];
}

void put_encoder(nb::dict& d, const EngineInfo& info) {
    const ModelConfig& c = info.config;
    d["encoder"] = nb::none();
    d["cross"] = nb::none();
    if (c.architecture->encoder == EncoderKind::none) return;
    nb::dict encoder, cross;
    encoder["n_layers"] = c.n_encoder_layers;
    encoder["n_source"] = info.cache.n_source;
    encoder["inputs"] = name_of(c.architecture->encoder);
    encoder["n_inputs"] = c.n_inputs;
    d["encoder"] = encoder;
    if (c.n_layers == 0) return;
    cross["mode"] = info.cross.mode;
    cross["type"] = info.cross.type;
    cross["bytes_per_row"] = info.cross.bytes_per_row;
    d["cross"] = cross;
    d["decoder_start_token_id"] = c.decoder_start;
}

}  // namespace

EngineOptions read_options(const nb::kwargs& args) {
    EngineOptions o;
    for (const auto& [key, value] : args) {
        const std::string name = nb::cast<std::string>(key);
        try {
            read_option(name, value, o);
        } catch (const std::bad_cast&) {
            throw nb::type_error(
                concat("argument '", name, "' is of the wrong type or out of range").c_str());
        }
    }
    return o;
}

void put_memory(nb::dict& d, const MemoryReport& m) {
    d["weights"] = m.use.weights;
    d["derived"] = m.use.derived;
    d["cache"] = m.use.cache;
    d["scratch"] = m.use.scratch;
    d["total"] = m.allocated();
    d["mapped"] = m.mapped;
    d["cache_bytes_per_token"] = m.cache_bytes_per_token;
}

namespace {

nb::list parts_of(const EngineInfo& info) {
    nb::list parts;
    for (const PartInfo& part : info.parts) {
        nb::dict d;
        d["device"] = part.device;
        d["begin"] = part.begin;
        d["end"] = part.end;
        d["bytes"] = part.memory.total();
        parts.append(d);
    }
    return parts;
}

}  // namespace

void put_info(nb::dict& d, const EngineInfo& info) {
    const ModelConfig& c = info.config;
    d["name"] = to_text(c.name);
    d["architecture"] = c.architecture->name;
    d["d_model"] = c.d_model;
    d["d_ff"] = c.d_ff;
    d["n_layers"] = c.n_layers;
    d["n_heads"] = c.n_heads;
    d["n_kv_heads"] = c.n_kv_heads;
    d["head_dim"] = c.head_dim;
    d["n_vocab"] = c.n_vocab;
    d["n_ctx_train"] = c.n_ctx_train;
    d["n_ctx"] = info.cache.n_ctx;
    d["n_batch"] = info.cache.n_batch;
    d["n_seqs"] = info.cache.n_seqs;
    d["cache_tokens"] = info.cache.cache_tokens;
    d["sparse_threshold"] = info.cache.sparse_threshold;
    d["sparse_delta"] = info.cache.sparse_delta;
    d["n_threads"] = info.n_threads;
    d["device"] = info.device;
    nb::list layers;
    for (size_t i = 0; i < info.layers.size(); ++i) {
        nb::dict layer;
        layer["layer"] = i;
        layer["mode"] = info.layers[i].mode;
        layer["type"] = info.layers[i].type;
        layer["rank"] = info.layers[i].rank;
        layer["residual_type"] = info.layers[i].residual_type;
        layer["bytes_per_token"] = info.layers[i].bytes_per_token;
        layer["max_rows"] = info.layers[i].max_rows;
        layer["bytes_held"] = info.layers[i].bytes_held;
        layer["v_heads"] = info.layers[i].v_heads;
        layers.append(layer);
    }
    d["layers"] = layers;
    d["parts"] = parts_of(info);
    put_encoder(d, info);
}

ExtraTensors read_extra(const nb::handle& derived, std::vector<std::any>& keep) {
    using AnyType = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
    ExtraTensors extra;
    if (derived.is_none()) return extra;
    const auto tensor_of = [&](const auto& array, DType type) {
        const size_t n = array.ndim();
        if (n != 1 && n != 2) fail(ErrorCode::argument, "derived tensors must have one or two dimensions");
        keep.emplace_back(array);
        return Tensor(const_cast<void*>(static_cast<const void*>(array.data())), type,
                      n == 1 ? 1 : int64_t(array.shape(0)), int64_t(array.shape(n - 1)));
    };
    constexpr nb::dlpack::dtype half{uint8_t(nb::dlpack::dtype_code::Float), 16, 1};
    for (const auto& [key, value] : nb::cast<nb::dict>(derived)) {
        AnyType stored;
        const bool halved = nb::try_cast(value, stored) && stored.dtype() == half && stored.ndim() == 2;
        extra[nb::cast<std::string>(key)] = halved
                                                ? tensor_of(stored, DType::F16)
                                                : tensor_of(nb::cast<Array<const float>>(value), DType::F32);
    }
    return extra;
}

}  // namespace slimrt
