// The sampler over NumPy arrays; it works without the GIL.
#include "bindings/sampler.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "core/error.h"
#include "kernels/cpu/row_scan.h"

namespace slimrt {
namespace {

using Masks = Array<const uint32_t>;
using Bias = std::vector<std::pair<int32_t, float>>;
using Breakers = std::vector<std::vector<int32_t>>;

/// Never converted implicitly: the copy would be gone before it is read.
Masks read_masks(const nb::object& from) {
    Masks masks;
    if (!nb::try_cast(from, masks, false))
        fail(ErrorCode::argument, "masks must be uint32 arrays, without gaps");
    return masks;
}

nb::tuple logprobs_tuple(const TokenLogprobs& from) {
    nb::list top;
    for (const auto& [token, logprob] : from.top) top.append(nb::make_tuple(token, logprob));
    return nb::make_tuple(from.logprob, top);
}

void create(Sampler* self, float temperature, int64_t top_k, double top_p, double min_p, double typical_p,
            float repeat_penalty, float frequency_penalty, float presence_penalty, int64_t repeat_last_n,
            uint64_t seed, const Bias& logit_bias, float dry_multiplier, float dry_base,
            int64_t dry_allowed_length, int64_t dry_penalty_last_n, const Breakers& dry_breakers,
            double top_n_sigma, double xtc_probability, double xtc_threshold, int64_t mirostat,
            double mirostat_tau, double mirostat_eta) {
    new (self) Sampler({temperature,
                        top_k,
                        top_p,
                        min_p,
                        typical_p,
                        repeat_penalty,
                        frequency_penalty,
                        presence_penalty,
                        repeat_last_n,
                        seed,
                        logit_bias,
                        {dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_breakers},
                        top_n_sigma,
                        xtc_probability,
                        xtc_threshold,
                        mirostat,
                        mirostat_tau,
                        mirostat_eta});
}

int32_t sample(Sampler& self, const Array<const float>& logits, const nb::object& mask) {
    Masks words;
    std::span<const uint32_t> allowed;
    if (!mask.is_none()) {
        words = read_masks(mask);
        allowed = {words.data(), words.size()};
    }
    const nb::gil_scoped_release release;
    SamplerScratch scratch;
    return self.sample({logits.data(), logits.size()}, allowed, scratch);
}

nb::tuple logprobs_of(const Array<const float>& logits, int32_t token, int64_t n) {
    TokenLogprobs found;
    {
        const nb::gil_scoped_release release;
        SamplerScratch scratch;
        found = token_logprobs({logits.data(), logits.size()}, token, n, scratch);
    }
    return logprobs_tuple(found);
}

/// The ids that the filters leave, in ascending order.
nb::object filter_logits(const Array<const float>& logits, int64_t top_k, double top_p, double min_p,
                         double typical_p, double top_n_sigma) {
    SamplerOptions options;
    options.top_n_sigma = top_n_sigma;
    options.top_k = top_k, options.top_p = top_p, options.min_p = min_p, options.typical_p = typical_p;
    Candidates candidates;
    candidates.reset({logits.data(), logits.size()});
    filter(candidates, options);
    std::vector<int32_t> ids = candidates.ids();
    const size_t n = ids.size();
    return nb::cast(numpy_array(std::move(ids), {n}));
}

/// e^((logit - largest) / temperature), and the sums of blocks.
nb::tuple row_exponentials(const Array<const float>& logits, float temperature) {
    const size_t n = logits.size(), blocks = size_t(cpu::scan_blocks(int64_t(n)));
    std::vector<float> maxima(blocks), p(n);
    std::vector<double> sums(blocks);
    cpu::scan_maxima(logits.data(), int64_t(n), maxima.data());
    const float top = *std::max_element(maxima.begin(), maxima.end());
    cpu::scan_exp(logits.data(), int64_t(n), top, temperature, p.data(), sums.data());
    return nb::make_tuple(numpy_array(std::move(p), {n}), numpy_array(std::move(sums), {blocks}));
}

/// A number for each of n rows; all `none` for None.
std::vector<int64_t> numbers(const nb::object& from, size_t n, int64_t none, const char* name) {
    if (from.is_none()) return std::vector<int64_t>(n, none);
    const auto found = nb::cast<std::vector<int64_t>>(from);
    if (found.size() != n) fail(ErrorCode::argument, name, " must be ", n, " numbers: one for each sampler");
    return found;
}

}  // namespace

std::vector<RowToSample> read_rows(const Array<const float>& logits, const nb::sequence& samplers,
                                   const nb::object& masks, const nb::object& logprobs,
                                   const nb::object& joint_from) {
    const size_t n = nb::len(samplers);
    if (logits.ndim() != 2 || logits.shape(0) != n)
        fail(ErrorCode::argument, "logits must be float32 [", n, ", vocabulary]: a row for each sampler");
    const size_t width = logits.shape(1);
    Masks words;
    if (!masks.is_none()) {
        words = read_masks(masks);
        if (words.ndim() != 2 || words.shape(0) != n)
            fail(ErrorCode::argument, "masks must be uint32 [", n, ", words]: a row for each sampler");
    }
    const auto counts = numbers(logprobs, n, 0, "logprobs"), joint = numbers(joint_from, n, -1, "joint_from");
    std::vector<RowToSample> rows;
    for (size_t i = 0; i < n; ++i) {
        rows.push_back({nb::cast<Sampler*>(samplers[i]),
                        {logits.data() + i * width, width},
                        {},
                        {},
                        counts[i],
                        joint[i]});
        if (!masks.is_none()) rows.back().mask = {words.data() + i * words.shape(1), words.shape(1)};
    }
    return rows;
}

std::vector<RowToSample> read_candidates(const Array<const int32_t>& candidates, const nb::sequence& samplers,
                                         int64_t n_vocab) {
    const size_t n_rows = nb::len(samplers);
    if (candidates.ndim() != 2 || candidates.shape(0) != n_rows || candidates.shape(1) % 2 != 0)
        fail(ErrorCode::argument, "candidates must be int32 [", n_rows,
             ", 2 n]: logits, then their ids, for each sampler");
    const size_t n = candidates.shape(1) / 2;
    std::vector<RowToSample> rows;
    for (size_t i = 0; i < n_rows; ++i) {
        auto* const sampler = nb::cast<Sampler*>(samplers[i]);
        const int64_t deciding = sampler->n_deciding(n_vocab);
        if (deciding == 0 || std::min(deciding, n_vocab) > int64_t(n))
            fail(ErrorCode::argument, n, " candidates do not decide a sampler's choice: sample from logits");
        const int32_t* const row = candidates.data() + i * 2 * n;
        rows.push_back(
            {.sampler = sampler, .logits = {reinterpret_cast<const float*>(row), n}, .ids = {row + n, n}});
    }
    return rows;
}

nb::list choice_list(const std::vector<Choice>& choices) {
    nb::list list;
    for (const Choice& choice : choices) {
        if (choice.error) {
            list.append(exception_of(choice.error));
            continue;
        }
        const nb::object logprobs =
            choice.logprobs ? nb::object(logprobs_tuple(*choice.logprobs)) : nb::none();
        list.append(nb::make_tuple(choice.token, logprobs));
    }
    return list;
}

void bind_sampler(nb::module_& m, nb::module_& ops) {
    nb::class_<Sampler>(m, "Sampler")
        .def("__init__", &create, nb::kw_only(), nb::arg("temperature") = 0.8f, nb::arg("top_k") = 40,
             nb::arg("top_p") = 0.95, nb::arg("min_p") = 0.05, nb::arg("typical_p") = 1.0,
             nb::arg("repeat_penalty") = 1.0f, nb::arg("frequency_penalty") = 0.0f,
             nb::arg("presence_penalty") = 0.0f, nb::arg("repeat_last_n") = 64, nb::arg("seed") = 0,
             nb::arg("logit_bias") = nb::make_tuple(), nb::arg("dry_multiplier") = 0.0f,
             nb::arg("dry_base") = 1.75f, nb::arg("dry_allowed_length") = 2,
             nb::arg("dry_penalty_last_n") = -1, nb::arg("dry_breakers") = nb::make_tuple(),
             nb::arg("top_n_sigma") = 0.0, nb::arg("xtc_probability") = 0.0, nb::arg("xtc_threshold") = 0.1,
             nb::arg("mirostat") = 0, nb::arg("mirostat_tau") = 5.0, nb::arg("mirostat_eta") = 0.1)
        .def(
            "accept", [](Sampler& self, const std::vector<int32_t>& tokens) { self.accept(tokens); },
            nb::arg("tokens"))
        .def("n_deciding", &Sampler::n_deciding, nb::arg("n_vocab"))
        .def("sample", &sample, nb::arg("logits"), nb::arg("mask") = nb::none());
    m.def("token_logprobs", &logprobs_of, nb::arg("logits"), nb::arg("token"), nb::arg("n") = 0);
    ops.def("row_exponentials", &row_exponentials, nb::arg("logits"), nb::arg("temperature"));
    ops.def("filter_logits", &filter_logits, nb::arg("logits"), nb::kw_only(), nb::arg("top_k") = 0,
            nb::arg("top_p") = 1.0, nb::arg("min_p") = 0.0, nb::arg("typical_p") = 1.0,
            nb::arg("top_n_sigma") = 0.0);
}

}  // namespace slimrt
