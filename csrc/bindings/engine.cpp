// Engine, Sampler and plan over NumPy arrays. The GIL is released while computing; one lock an engine.
#include "engine/engine.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>

#include "bindings/bindings.h"
#include "core/error.h"
#include "engine/sampler.h"
#include "model/architecture.h"

namespace slimrt {
namespace {

using Tokens = Array<const int32_t>;

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
    else if (name == "memory_limit")
        o.memory_limit = nb::cast<uint64_t>(value);
    else
        throw nb::type_error(concat("unexpected argument '", name, "'").c_str());
}

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

const char* name_of(Source source) {
    constexpr const char* kNames[] = {"none", "tokens", "mel", "audio"};
    return kNames[int(source)];
}

void put_encoder(nb::dict& d, const EngineInfo& info) {
    const ModelConfig& c = info.config;
    d["encoder"] = nb::none();
    d["cross"] = nb::none();
    if (c.architecture->source == Source::none) return;
    nb::dict encoder, cross;
    encoder["n_layers"] = c.n_encoder_layers;
    encoder["n_source"] = info.cache.n_source;
    encoder["inputs"] = name_of(c.architecture->source);
    encoder["n_inputs"] = c.n_inputs;
    cross["mode"] = info.cross.mode;
    cross["type"] = info.cross.type;
    cross["bytes_per_row"] = info.cross.bytes_per_row;
    d["encoder"] = encoder;
    d["cross"] = cross;
    d["decoder_start_token_id"] = c.decoder_start;
}

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
    d["sparse_threshold"] = info.cache.sparse_threshold;
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
        layers.append(layer);
    }
    d["layers"] = layers;
    put_encoder(d, info);
}

ExtraTensors read_extra(const nb::handle& derived, std::vector<Array<const float>>& keep) {
    ExtraTensors extra;
    if (derived.is_none()) return extra;
    for (const auto& [key, value] : nb::cast<nb::dict>(derived)) {
        const auto array = nb::cast<Array<const float>>(value);
        const size_t n = array.ndim();
        if (n != 1 && n != 2) fail(ErrorCode::argument, "derived tensors must have one or two dimensions");
        keep.push_back(array);
        extra[nb::cast<std::string>(key)] =
            Tensor(const_cast<float*>(array.data()), DType::F32, n == 1 ? 1 : int64_t(array.shape(0)),
                   int64_t(array.shape(n - 1)));
    }
    return extra;
}

/// Between steps, with the GIL: signals, then the caller's progress.
Engine::Progress checked_progress(const nb::object& callback) {
    return [callback = nb::handle(callback)](int64_t done, int64_t total) {
        const nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (!callback.is_none()) callback(done, total);
    };
}

/// One source, and what keeps its numbers; ids are a copy, as append()'s.
struct SourceArray {
    std::vector<int32_t> ids, positions;
    Array<const float> values;
    SourceInput input;
};

SourceArray read_source(const nb::handle& from, const ModelConfig& c, bool encoded) {
    SourceArray source;
    const bool tokens = c.n_inputs == 0 && !encoded;
    if (Tokens ids; tokens && nb::try_cast(from, ids, false) && ids.ndim() == 1) {
        source.ids.assign(ids.data(), ids.data() + ids.size());
        source.input.ids = source.ids;
        source.input.rows = int64_t(ids.size());
        return source;
    }
    const size_t width = encoded || c.n_inputs == 0 ? c.d_model : c.n_inputs;
    if (!nb::try_cast(from, source.values, false) || source.values.ndim() != 2 ||
        source.values.shape(1) != width)
        fail(ErrorCode::argument, "a source must be a float32 array [rows, ", width, "]",
             tokens ? " of embeddings, or int32 ids [n]" : "", ", without gaps");
    source.input.values = source.values.data();
    source.input.rows = int64_t(source.values.shape(0));
    source.input.encoded = encoded;
    return source;
}

/// The positions of an item of encode(), (sequence, source) or (sequence, source, positions).
std::vector<int32_t> read_positions(const nb::handle& item) {
    if (nb::len(item) < 3) return {};
    Tokens positions;
    if (!nb::try_cast(item[2], positions, false) || positions.ndim() != 1 || positions.size() == 0)
        fail(ErrorCode::argument, "positions must be an int32 array [n], one for each row of the source");
    return {positions.data(), positions.data() + positions.size()};
}

class PyEngine {
    /// Runs f with the engine to itself and without the GIL.
    template <class F>
    void locked(F f) {
        const nb::gil_scoped_release release;
        const std::lock_guard lock(mutex_);
        f();
    }
    template <class F>
    auto with(F f) {
        const nb::gil_scoped_release release;
        const std::lock_guard lock(mutex_);
        return f(*engine_);
    }

  public:
    PyEngine(const std::string& path, nb::kwargs args) {
        std::vector<Array<const float>> keep;
        nb::object derived = nb::none();
        if (args.contains("derived")) {
            derived = args["derived"];
            nb::del(args["derived"]);
        }
        const ExtraTensors extra = read_extra(derived, keep);
        const EngineOptions options = read_options(args);
        const nb::gil_scoped_release release;
        engine_ = std::make_unique<Engine>(path, options, extra);
    }

    nb::object append(const nb::sequence& items, bool all_logits, bool states,
                      const nb::object& on_progress) {
        std::vector<std::vector<int32_t>> keep;  // copies: nobody may change a token once it is checked
        std::vector<Engine::Item> list;
        size_t rows = 0;
        for (const nb::handle& item : items) {
            const auto tokens = nb::cast<Tokens>(item[1]);
            keep.emplace_back(tokens.data(), tokens.data() + tokens.size());
            list.push_back({nb::cast<int>(item[0]), keep.back()});
            rows += all_logits ? tokens.size() : 1;
        }
        const Output output = states ? Output::states : Output::logits;
        const size_t width = states ? engine_->config().d_model : engine_->config().n_vocab;
        std::vector<float> out(rows * width);
        locked([&] { engine_->append(list, all_logits, output, out.data(), checked_progress(on_progress)); });
        return nb::cast(numpy_array(std::move(out), {rows, width}));
    }

    nb::object encode(const nb::sequence& items, bool states, bool encoded, const nb::object& on_progress) {
        std::vector<SourceArray> arrays;
        std::vector<Engine::Source> sources;
        std::vector<size_t> lengths;
        const size_t d = engine_->config().d_model;
        size_t rows = 0;
        for (const nb::handle& item : items) {
            arrays.push_back(read_source(item[1], engine_->config(), encoded));
            arrays.back().positions = read_positions(item);
            arrays.back().input.positions = arrays.back().positions;
            sources.push_back({nb::cast<int>(item[0]), arrays.back().input});
            lengths.push_back(size_t(engine_->source_rows(sources.back().input)));
            rows += lengths.back();
        }
        std::vector<float> out(states ? rows * d : 0);
        locked(
            [&] { engine_->encode(sources, states ? out.data() : nullptr, checked_progress(on_progress)); });
        if (!states) return nb::none();
        nb::list list;
        const float* at = out.data();
        for (const size_t n : lengths) {
            list.append(nb::cast(numpy_array(std::vector<float>(at, at + n * d), {n, d})));
            at += n * d;
        }
        return list;
    }

    nb::object alignment(int sequence, const Tokens& tokens, const std::vector<std::pair<int, int>>& heads,
                         const nb::object& on_progress) {
        const std::vector<int32_t> keep(tokens.data(), tokens.data() + tokens.size());
        std::vector<Engine::Head> list;
        for (const auto& [layer, head] : heads) list.push_back({layer, head});
        std::vector<float> out;
        size_t rows = 0;
        locked([&] {
            rows = size_t(engine_->source_length(sequence));
            out = engine_->alignment({sequence, keep}, list, checked_progress(on_progress));
        });
        return nb::cast(numpy_array(std::move(out), {list.size(), keep.size(), rows}));
    }

    nb::object attention_inputs(const Tokens& tokens, const nb::object& on_progress) {
        const ModelConfig& c = engine_->config();
        const std::vector<int32_t> keep(tokens.data(), tokens.data() + tokens.size());
        const size_t n = keep.size(), layers = c.n_layers, d = c.d_model;
        std::vector<float> out(layers * n * d);
        locked([&] { engine_->attention_inputs(keep, out.data(), checked_progress(on_progress)); });
        return nb::cast(numpy_array(std::move(out), {layers, n, d}));
    }

    nb::object save_sequence(int sequence) {
        std::vector<std::byte> bytes;
        locked([&] { bytes = engine_->save_sequence(sequence); });
        const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
        return nb::cast(numpy_array(std::vector<uint8_t>(data, data + bytes.size()), {bytes.size()}));
    }

    int load_sequence(const Array<const uint8_t>& data) {
        int id = 0;
        locked([&] {
            id = engine_->load_sequence({reinterpret_cast<const std::byte*>(data.data()), data.size()});
        });
        return id;
    }

    nb::dict info() {
        nb::dict d;
        put_info(d, engine_->info());
        return d;
    }
    nb::dict memory() {
        nb::dict d;
        put_memory(d, engine_->info().memory);
        return d;
    }

    nb::dict sparse_counts() {
        SparseCounts counts;
        locked([&] { counts = engine_->sparse_counts(); });
        nb::dict d;
        d["rows"] = counts.rows;
        d["skipped"] = counts.skipped;
        return d;
    }

    int create() {
        return with([](Engine& e) { return e.create(); });
    }
    void release(int s) {
        with([&](Engine& e) { e.release(s); });
    }
    int fork(int s) {
        return with([&](Engine& e) { return e.fork(s); });
    }
    void truncate(int s, int64_t n) {
        with([&](Engine& e) { e.cache().truncate(s, n); });
    }
    void tile(int s, int64_t n) {
        with([&](Engine& e) { e.cache().tile(s, n); });
    }
    int64_t length(int s) {
        return with([&](Engine& e) { return e.cache().length(s); });
    }

  private:
    std::unique_ptr<Engine> engine_;
    std::mutex mutex_;
};

nb::dict plan_dict(const std::string& path, const nb::kwargs& args) {
    const EngineInfo info = plan(GgufFile::open(path), read_options(args));
    nb::dict d;
    put_memory(d, info.memory);
    put_info(d, info);
    return d;
}

void bind_sampler(nb::module_& m) {
    nb::class_<Sampler>(m, "Sampler")
        .def(
            "__init__",
            [](Sampler* self, float temperature, int top_k, float top_p, float min_p, float repeat_penalty,
               int repeat_last_n, uint64_t seed) {
                new (self) Sampler({temperature, top_k, top_p, min_p, repeat_penalty, repeat_last_n, seed});
            },
            nb::kw_only(), nb::arg("temperature") = 0.8f, nb::arg("top_k") = 40, nb::arg("top_p") = 0.95f,
            nb::arg("min_p") = 0.05f, nb::arg("repeat_penalty") = 1.0f, nb::arg("repeat_last_n") = 64,
            nb::arg("seed") = 0)
        .def(
            "sample",
            [](Sampler& self, const Array<const float>& logits, const std::vector<int32_t>& history) {
                return self.sample({logits.data(), logits.size()}, history);
            },
            nb::arg("logits"), nb::arg("history"));
}

}  // namespace

void bind_engine(nb::module_& m) {
    nb::class_<PyEngine>(m, "Engine")
        .def(nb::init<const std::string&, nb::kwargs>(), nb::arg("path"), nb::arg("options"))
        .def("info", &PyEngine::info)
        .def("memory", &PyEngine::memory)
        .def("sparse_counts", &PyEngine::sparse_counts)
        .def("new_sequence", &PyEngine::create)
        .def("free_sequence", &PyEngine::release, nb::arg("sequence"))
        .def("fork", &PyEngine::fork, nb::arg("sequence"))
        .def("truncate", &PyEngine::truncate, nb::arg("sequence"), nb::arg("length"))
        .def("length", &PyEngine::length, nb::arg("sequence"))
        .def("tile", &PyEngine::tile, nb::arg("sequence"), nb::arg("length"))
        .def("append", &PyEngine::append, nb::arg("items"), nb::kw_only(), nb::arg("all_logits") = false,
             nb::arg("states") = false, nb::arg("on_progress") = nb::none())
        .def("encode", &PyEngine::encode, nb::arg("items"), nb::kw_only(), nb::arg("states") = false,
             nb::arg("encoded") = false, nb::arg("on_progress") = nb::none())
        .def("alignment", &PyEngine::alignment, nb::arg("sequence"), nb::arg("tokens"), nb::arg("heads"),
             nb::kw_only(), nb::arg("on_progress") = nb::none())
        .def("attention_inputs", &PyEngine::attention_inputs, nb::arg("ids"), nb::kw_only(),
             nb::arg("on_progress") = nb::none())
        .def("save_sequence", &PyEngine::save_sequence, nb::arg("sequence"))
        .def("load_sequence", &PyEngine::load_sequence, nb::arg("data"));
    bind_sampler(m);
    m.def("plan", &plan_dict, nb::arg("path"), nb::arg("options"));
}

}  // namespace slimrt
