#include "bench/layer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

#include "bench/attention.h"
#include "core/error.h"
#include "engine/step.h"

namespace slimrt::bench {
namespace {

constexpr int kHeads = 16, kHeadDim = 64, kRank = 128;

class Layer {
  public:
    Layer(Arrays& arrays, const CacheMode& mode, const AttnConfig& config, int64_t n)
        : arrays_(arrays),
          mode_(mode),
          c_(config),
          prepared_(prepare()),
          cache_({rows_of(arrays.backend(), mode, config)}, n + kBlockTokens, 1, 0,
                 {kBlockTokens, kBlockTokens},
                 [this](int, const Recoding& r) {
                     const AttnInput in{c_, *prepared_, rope_, {}, {}, false, scratch_};
                     mode_.recode(arrays_.backend(), in, r);
                 }),
          sequence_(cache_.create()),
          scratch_(arrays.backend(), size_t(kHeads) * (kHeads * kHeadDim) * sizeof(float) * 8) {
        append_rows(std::min<int64_t>(n, 16 * kBlockTokens));  // random numbers take long to make
        if (n > cache_.length(sequence_)) cache_.tile(sequence_, n);
        if (c_.rope) rope_ = usual_rope(arrays_, n + 1, c_.n_rot);
        for (const Plane& plane : cache_.format(0)) own_.planes.push_back(random(1, plane.width));
        q_ = random(1, c_.q_width());
        out_ = arrays_.zeros(1, c_.q_width());
    }

    /// Seconds of each.
    std::vector<double> read(int repetitions) {
        Step step(cache_);
        step.add_sequence(cache_, sequence_, 1);
        const Step::Group& group = step.groups[0];
        const Tensor positions = arrays_.put(step.positions.data(), DType::I32, 1, 1);
        const std::vector<Rows> rows = cache_.rows(0);
        std::vector<StoredRegion> older;
        for (const OlderRows& of : group.older)
            older.push_back({of.c > 0, of.origin, of.sequences, cache_.rows(0, of.c)});
        DenseRows none;
        const AttnInput in{c_, *prepared_, rope_, positions, group.sequences, false, scratch_};
        std::vector<double> seconds;
        for (int i = 0; i <= repetitions; ++i) {
            const auto start = std::chrono::steady_clock::now();
            mode_.read(arrays_.backend(), {in, {}, {}, rows, older, none, q_}, own_, out_);
            const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
            if (i > 0) seconds.push_back(passed.count());  // the first one fills caches
        }
        return seconds;
    }
    size_t bytes() const { return cache_.bytes_held(0, cache_.length(sequence_)); }

  private:
    static LayerRows rows_of(Backend& backend, const CacheMode& mode, const AttnConfig& c) {
        LayerRows rows{&backend, mode.older_formats(c), c.window, mode.regions(c)};
        rows.formats.insert(rows.formats.begin(), mode.format(c));
        return rows;
    }

    Tensor random(int64_t rows, int64_t cols) {
        std::uniform_real_distribution<float> uniform(-1, 1);
        std::vector<float> values(rows * cols);
        for (float& x : values) x = uniform(random_);
        return arrays_.put(values.data(), DType::F32, rows, cols);
    }

    /// Small numbers in f16; of one row, a scale, ones.
    Tensor weight(int64_t rows, int64_t cols) {
        if (rows == 1) {
            const std::vector<float> ones(cols, 1.0f);
            return arrays_.put(ones.data(), DType::F32, 1, cols);
        }
        std::vector<uint16_t> values(rows * cols);
        for (uint16_t& x : values) x = 0x2000 | (random_() >> 8 & 0x83ff);  // 1 / 128 to 1 / 64, either sign
        return arrays_.put(values.data(), DType::F16, rows, cols);
    }

    std::unique_ptr<Prepared> prepare() {
        const AttnWeights weights{.q = weight(c_.q_width(), c_.d_model),
                                  .k = weight(c_.kv_width(), c_.d_model),
                                  .v = weight(c_.kv_width(), c_.d_model),
                                  .o = weight(c_.d_model, c_.q_width())};
        std::map<std::string, Tensor> folded;
        for (const Fold& fold : mode_.folds(c_))
            folded[fold.suffix] = fold.planned ? weight(fold.rows, fold.cols) : Tensor{};
        return mode_.prepare(arrays_.backend(), {c_, weights, folded, {}});
    }

    void append_rows(int64_t n) {
        for (int64_t done = 0; done < n; done += kBlockTokens) {
            std::vector<int32_t> ids;
            cache_.reserve(sequence_, kBlockTokens);
            cache_.add_slots(sequence_, 0, kBlockTokens, ids);
            const Tensor slots = arrays_.put(ids.data(), DType::I32, 1, int64_t(ids.size()));
            const Format& planes = cache_.format(0);
            for (int p = 0; p < int(planes.size()); ++p)
                arrays_->store(random(kBlockTokens, planes[p].width), cache_.slots(0, p, slots));
            cache_.commit(sequence_, kBlockTokens);
            cache_.age_rows(sequence_);
        }
    }

    Arrays& arrays_;
    const CacheMode& mode_;
    const AttnConfig c_;
    std::minstd_rand random_;
    std::unique_ptr<Prepared> prepared_;
    KvCache cache_;
    int sequence_;
    Scratch scratch_;
    Rope rope_;
    Written own_;
    Tensor q_, out_;
};

}  // namespace

AttnConfig layer_for(const CacheMode& mode, const std::string& type) {
    AttnConfig c{.d_model = kHeads * kHeadDim,
                 .n_heads = kHeads,
                 .n_kv_heads = kHeads,
                 .head_dim = kHeadDim,
                 .latent_heads = default_latent_heads(kHeads),
                 .scale = 1 / std::sqrt(float(kHeadDim))};
    if (mode.has_levels())
        c.levels = parse_levels(type, mode.default_levels());
    else
        c.type_k = c.type_v = c.type_r = require_cache_type(type.c_str());
    if (mode.has_residual()) c.rank = kRank;
    for (const int n_rot : {kHeadDim, kHeadDim / 4, 0}) {
        c.n_rot = n_rot;
        c.rope = n_rot > 0;
        if (mode.refusal(c).empty()) return c;
    }
    fail(ErrorCode::cache_unsupported, "cache mode '", mode.name(), "': ", mode.refusal(c));
}

LayerTimes time_layer(Arrays& arrays, const CacheMode& mode, const AttnConfig& config, int64_t n,
                      int repetitions) {
    Layer layer(arrays, mode, config, n);
    return {layer.read(repetitions), layer.bytes()};
}

}  // namespace slimrt::bench
