// Engine and plan over NumPy arrays. The GIL is released while computing; one lock an engine.
#include "engine/engine.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>

#include "bindings/encoder_array.h"
#include "bindings/engine_options.h"
#include "bindings/reused_memory.h"
#include "bindings/sampler.h"
#include "core/error.h"
#include "core/thread_pool.h"
#include "engine/ranking.h"
#include "model/architecture.h"

namespace slimrt {
namespace {

using Tokens = Array<const int32_t>;

/// Between steps, with the GIL: signals, then the caller's progress.
Engine::Progress checked_progress(const nb::object& callback) {
    return [callback = nb::handle(callback)](int64_t done, int64_t total) {
        const nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (!callback.is_none()) callback(done, total);
    };
}

std::span<const std::byte> bytes_of(const Array<const uint8_t>& data) {
    return std::as_bytes(std::span(data.data(), data.size()));
}

struct LogitRows {
    explicit LogitRows(const Array<const float>& from) : data(from.data()) {
        if (from.ndim() != 2) fail(ErrorCode::argument, "logits must be float32 [rows, vocabulary]");
        n = from.shape(0), width = from.shape(1);
    }
    std::span<const float> operator[](int64_t i) const { return {data + size_t(i) * width, width}; }

    const float* data;
    size_t n, width;
};

class PyEngine {
    /// The engine for one caller. A child of fork() never gets the lock of a call that another thread was in,
    /// and what that call was writing is incomplete.
    std::unique_lock<std::mutex> lock() {
        std::unique_lock lock(mutex_, std::defer_lock);
        if (forks_ == forks_seen())
            lock.lock();
        else if (!lock.try_lock())
            fail(ErrorCode::argument,
                 "the model was at work in another thread when this process was forked: load it again here");
        return lock;
    }
    /// Runs f alone on the engine and without the GIL.
    template <class F>
    void locked(F f) {
        const nb::gil_scoped_release release;
        const std::unique_lock held = lock();
        f();
    }
    template <class F>
    auto with(F f) {
        const nb::gil_scoped_release release;
        const std::unique_lock held = lock();
        return f(*engine_);
    }

  public:
    PyEngine(const FileOrPath& from, nb::kwargs args) {
        std::vector<std::any> keep;
        nb::object derived = nb::none();
        if (args.contains("derived")) {
            derived = args["derived"];
            nb::del(args["derived"]);
        }
        const ExtraTensors extra = read_extra(derived, keep);
        const EngineOptions options = read_options(args);
        const nb::gil_scoped_release release;
        engine_ = std::make_unique<Engine>(open_file(from), options, extra);
        results_.emplace(size_t(options.cache.n_seqs) * size_t(engine_->width_of(Output::logits)));
    }

    nb::object append(const nb::sequence& items, bool all_logits,
                      const std::optional<std::vector<int64_t>>& outputs, bool states, const nb::object& out,
                      const nb::object& on_progress, bool tokens, bool candidates) {
        std::vector<std::vector<int32_t>> keep;  // copies: tokens must not change after they are checked
        std::vector<Engine::Item> list;
        if (outputs && (outputs->size() != nb::len(items) || all_logits))
            fail(ErrorCode::argument, "outputs has a number for each of ", nb::len(items),
                 " items, and goes without all_logits");
        size_t rows = 0;
        for (const nb::handle& item : items) {
            const auto tokens = nb::cast<Tokens>(item[1]);
            keep.emplace_back(tokens.data(), tokens.data() + tokens.size());
            const int64_t n = int64_t(tokens.size());
            int64_t wanted = outputs ? (*outputs)[list.size()] : all_logits ? -1 : std::min<int64_t>(1, n);
            if (wanted == -1) wanted = n;
            if (wanted < 0 || wanted > n)
                fail(ErrorCode::argument, "outputs of an item of ", n,
                     " tokens: at most so many, or -1 for all, not ", wanted);
            list.push_back({nb::cast<int>(item[0]), keep.back(), wanted});
            rows += size_t(wanted);
        }
        const Output output = tokens       ? Output::tokens
                              : candidates ? Output::candidates
                              : states     ? Output::states
                                           : Output::logits;
        const size_t width = size_t(engine_->width_of(output));
        Array<float> given;
        std::vector<float> made;
        if (out.is_none())
            made = results_->take(rows * width);
        else if (!nb::try_cast(out, given, false) || given.ndim() != 2 || given.shape(0) < rows ||
                 given.shape(1) != width)
            fail(ErrorCode::argument, "out must be a float32 array [", rows, " or more, ", width,
                 "], without gaps, that may be written to");
        float* const to = out.is_none() ? made.data() : given.data();
        locked([&] { engine_->append(list, output, to, checked_progress(on_progress)); });
        if (out.is_none()) return nb::cast(results_->array(std::move(made), {rows, width}));
        return out[nb::slice(rows)];
    }

    nb::object encode(const nb::sequence& items, bool states, bool encoded, const nb::object& on_progress) {
        std::vector<EncoderArray> arrays;
        std::vector<Engine::EncodeItem> to_encode;
        std::vector<size_t> lengths;
        const size_t d = engine_->config().d_model;
        size_t rows = 0;
        for (const nb::handle& item : items) {
            arrays.push_back(read_encoder_input(item[1], engine_->config(), encoded));
            arrays.back().positions = read_positions(item);
            arrays.back().input.positions = arrays.back().positions;
            to_encode.push_back({nb::cast<int>(item[0]), arrays.back().input});
            lengths.push_back(size_t(engine_->encoder_rows(to_encode.back().input)));
            rows += lengths.back();
        }
        std::vector<float> out(states ? rows * d : 0);
        locked([&] {
            engine_->encode(to_encode, states ? out.data() : nullptr, checked_progress(on_progress));
        });
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
            rows = size_t(engine_->encoder_length(sequence));
            out = engine_->alignment({sequence, keep}, list, checked_progress(on_progress));
        });
        return nb::cast(numpy_array(std::move(out), {list.size(), keep.size(), rows}));
    }

    nb::list sample(const Array<const float>& logits, const nb::sequence& samplers, const nb::object& masks,
                    const nb::object& logprobs, const nb::object& joint_from) {
        const std::vector<RowToSample> rows = read_rows(logits, samplers, masks, logprobs, joint_from);
        std::vector<Choice> choices;
        locked([&] { choices = engine_->sample(rows); });
        return choice_list(choices);
    }

    nb::list sample_candidates(const Array<const int32_t>& candidates, const nb::sequence& samplers) {
        const std::vector<RowToSample> rows =
            read_candidates(candidates, samplers, engine_->config().n_vocab);
        std::vector<Choice> choices;
        locked([&] { choices = engine_->sample(rows); });
        return choice_list(choices);
    }

    /// float64 [rows].
    nb::object log_normalisers(const Array<const float>& logits) {
        const LogitRows rows(logits);
        std::vector<double> found(rows.n);
        locked([&] {
            engine_->each_row(int64_t(rows.n), [&](int64_t i) { found[i] = log_normaliser(rows[i]); });
        });
        return nb::cast(numpy_array(std::move(found), {rows.n}));
    }

    /// int32 [rows, count], -1 where there are fewer.
    nb::object likeliest(const Array<const float>& logits, size_t count) {
        const LogitRows rows(logits);
        count = std::min(count, rows.width);
        std::vector<int32_t> found(rows.n * count, -1);
        locked([&] {
            engine_->each_row(int64_t(rows.n), [&](int64_t i) {
                std::ranges::copy(largest(rows[i], count), found.begin() + i * int64_t(count));
            });
        });
        return nb::cast(numpy_array(std::move(found), {rows.n, count}));
    }

    nb::object attention_inputs(const Tokens& tokens, const nb::object& on_progress) {
        const ModelConfig& c = engine_->config();
        const std::vector<int32_t> keep(tokens.data(), tokens.data() + tokens.size());
        const size_t n = keep.size(), layers = c.n_layers, d = c.d_model;
        std::vector<float> out(layers * n * d);
        locked([&] { engine_->attention_inputs(keep, out.data(), checked_progress(on_progress)); });
        return nb::cast(numpy_array(std::move(out), {layers, n, d}));
    }

    nb::dict input_squares(const Tokens& tokens, const nb::object& on_progress) {
        const std::vector<int32_t> keep(tokens.data(), tokens.data() + tokens.size());
        std::map<std::string, InputSquares> squares;
        locked([&] { squares = engine_->input_squares(keep, checked_progress(on_progress)); });
        nb::dict out;
        for (auto& [name, of] : squares) {
            const size_t n = of.counts.size(), cols = of.sums.size() / n;
            out[name.c_str()] = nb::make_tuple(numpy_array(std::move(of.sums), {n, cols}),
                                               numpy_array(std::move(of.counts), {n}));
        }
        return out;
    }

    nb::object save_rows(int sequence, int64_t begin) {
        std::vector<std::byte> bytes;
        locked([&] { bytes = engine_->save_rows(sequence, begin); });
        const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
        return nb::cast(numpy_array(std::vector<uint8_t>(data, data + bytes.size()), {bytes.size()}));
    }

    nb::object save_sequence(int sequence) { return save_rows(sequence, 0); }

    void load_rows(int sequence, const Array<const uint8_t>& data) {
        with([&](Engine& e) { e.load_rows(sequence, bytes_of(data)); });
    }
    int load_sequence(const Array<const uint8_t>& data) {
        return with([&](Engine& e) { return e.load_sequence(bytes_of(data)); });
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
    int thin(int s, int64_t first, int64_t last) {
        return with([&](Engine& e) { return e.thin(s, first, last); });
    }
    void truncate(int s, int64_t n) {
        with([&](Engine& e) { e.truncate(s, n); });
    }
    bool can_truncate(int s, int64_t n) {
        return with([&](Engine& e) { return e.can_truncate(s, n); });
    }
    void tile(int s, int64_t n) {
        with([&](Engine& e) { e.tile(s, n); });
    }
    int64_t length(int s) {
        return with([&](Engine& e) { return e.length(s); });
    }
    bool has_room(const std::vector<std::pair<int, int64_t>>& growth) {
        return with([&](Engine& e) { return e.has_room(growth); });
    }
    int64_t free_blocks() {
        return with([](Engine& e) { return e.free_blocks(); });
    }
    int64_t n_blocks() {
        return with([](Engine& e) { return e.n_blocks(); });
    }
    std::pair<int64_t, int64_t> blocks(int s) {
        return with([&](Engine& e) { return e.blocks(s); });
    }

  private:
    std::unique_ptr<Engine> engine_;
    std::optional<ReusedMemory> results_;  // a row for each sequence
    std::mutex mutex_;
    const unsigned forks_ = forks_seen();
};

nb::dict plan_dict(const FileOrPath& from, const nb::kwargs& args) {
    const EngineInfo info = plan(open_file(from), read_options(args));
    nb::dict d;
    put_memory(d, info.memory);
    put_info(d, info);
    return d;
}

nb::dict held(const FileOrPath& from, const std::string& cache) {
    CacheOptions options;
    options.mode.all = cache;
    options.n_ctx = 1;
    nb::dict out;
    for (const auto& [name, t] : plan_matrices(open_file(from), options))
        out[name.c_str()] = nb::make_tuple(dtype_info(t.dtype).name, t.bytes());
    return out;
}

}  // namespace

void bind_engine(nb::module_& m) {
    nb::class_<PyEngine>(m, "Engine")
        .def(nb::init<const FileOrPath&, nb::kwargs>(), nb::arg("file"), nb::arg("options"))
        .def("info", &PyEngine::info)
        .def("memory", &PyEngine::memory)
        .def("sparse_counts", &PyEngine::sparse_counts)
        .def("new_sequence", &PyEngine::create)
        .def("free_sequence", &PyEngine::release, nb::arg("sequence"))
        .def("fork", &PyEngine::fork, nb::arg("sequence"))
        .def("thin", &PyEngine::thin, nb::arg("sequence"), nb::arg("first_blocks"), nb::arg("last_blocks"))
        .def("truncate", &PyEngine::truncate, nb::arg("sequence"), nb::arg("length"))
        .def("can_truncate", &PyEngine::can_truncate, nb::arg("sequence"), nb::arg("length"))
        .def("length", &PyEngine::length, nb::arg("sequence"))
        .def("has_room", &PyEngine::has_room, nb::arg("growth"))
        .def("free_blocks", &PyEngine::free_blocks)
        .def("n_blocks", &PyEngine::n_blocks)
        .def("blocks", &PyEngine::blocks, nb::arg("sequence"))
        .def("tile", &PyEngine::tile, nb::arg("sequence"), nb::arg("length"))
        .def("append", &PyEngine::append, nb::arg("items"), nb::kw_only(), nb::arg("all_logits") = false,
             nb::arg("outputs") = nb::none(), nb::arg("states") = false, nb::arg("out") = nb::none(),
             nb::arg("on_progress") = nb::none(), nb::arg("tokens") = false, nb::arg("candidates") = false)
        .def("encode", &PyEngine::encode, nb::arg("items"), nb::kw_only(), nb::arg("states") = false,
             nb::arg("encoded") = false, nb::arg("on_progress") = nb::none())
        .def("sample", &PyEngine::sample, nb::arg("logits"), nb::arg("samplers"), nb::kw_only(),
             nb::arg("masks") = nb::none(), nb::arg("logprobs") = nb::none(),
             nb::arg("joint_from") = nb::none())
        .def("sample_candidates", &PyEngine::sample_candidates, nb::arg("candidates"), nb::arg("samplers"))
        .def("log_normalisers", &PyEngine::log_normalisers, nb::arg("logits"))
        .def("likeliest", &PyEngine::likeliest, nb::arg("logits"), nb::arg("count"))
        .def("alignment", &PyEngine::alignment, nb::arg("sequence"), nb::arg("tokens"), nb::arg("heads"),
             nb::kw_only(), nb::arg("on_progress") = nb::none())
        .def("attention_inputs", &PyEngine::attention_inputs, nb::arg("ids"), nb::kw_only(),
             nb::arg("on_progress") = nb::none())
        .def("input_squares", &PyEngine::input_squares, nb::arg("ids"), nb::kw_only(),
             nb::arg("on_progress") = nb::none())
        .def("save_sequence", &PyEngine::save_sequence, nb::arg("sequence"))
        .def("load_sequence", &PyEngine::load_sequence, nb::arg("data"))
        .def("save_rows", &PyEngine::save_rows, nb::arg("sequence"), nb::arg("begin"))
        .def("load_rows", &PyEngine::load_rows, nb::arg("sequence"), nb::arg("data"));
    m.def("plan", &plan_dict, nb::arg("file"), nb::arg("options"));
    m.def("held", &held, nb::arg("file"), nb::arg("cache"));
}

}  // namespace slimrt
