// KvCache with three groups of layers, beside plain vectors: layers 0 and 2 keep the whole context, layer 1 a
// window, layer 3 all rows, in three classes by age. No model that slimrt reads has all kinds yet. Every row
// holds its token, so that what is read says whose it is.
#include "cache/kv_cache.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "core/error.h"

using namespace slimrt;

namespace {

constexpr int kLayers = 4, kWidth = 4, kContext = 300, kSequences = 4, kLongestStep = 100, kWindow = 13;
constexpr int kStoredStep = 16;
constexpr int kAging = 3;  // the layer whose rows age
const Regions kRegions{.n_classes = 3, .sinks = 4, .recent = 20, .shares = {{0.4}}};

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "kv_cache_test: %s\n", what);
    std::abort();
}

class RandomWalk {
  public:
    RandomWalk()
        : backend_(open_cpu_backend({.n_threads = 1})),
          format_{{"k", kWidth, 1, DType::F32}},
          cache_({{backend_.get(), {format_}, 0, {}},
                  {backend_.get(), {format_}, kWindow, {}},
                  {backend_.get(), {format_}, 0, {}},
                  {backend_.get(), {format_, format_, format_}, 0, kRegions}},
                 kContext, kSequences, 0, {kLongestStep, kStoredStep},
                 [this](int layer, const Recoding& rows) { recode(layer, rows); }),
          memory_(backend_->alloc(MemoryKind::scratch, 1 << 16, "rows of the test")) {
        require(cache_.n_groups() == 3, "full, window and aging layers are three groups");
        require(cache_.max_rows(0) == kContext && cache_.max_rows(1) < kContext, "a window keeps less");
    }

    void step() {
        const int choice = pick(10);
        const bool room = texts_.size() < kSequences;
        if (texts_.empty() || (choice == 0 && room)) {
            texts_[cache_.create()] = {};
            return;
        }
        const int id = std::next(texts_.begin(), pick(int(texts_.size())))->first;
        if (choice == 1 && room)
            fork(id);
        else if (choice == 2 && pick(3) == 0)
            release(id);
        else if (choice == 3)
            truncate(id);
        else if (choice == 4 && room)
            save_and_restore(id);
        else
            append(id);
    }

    void check_all() {
        for (const auto& [id, text] : texts_) check(id);
    }
    void report() const {
        std::printf("kv_cache_test: %ld rows read, %ld truncations refused, %ld appends without room: ok\n",
                    rows_read_, refused_, without_room_);
        std::printf("kv_cache_test: %ld recodings as rows aged, %ld as texts were cut, %ld of long appends\n",
                    aged_, returned_, placed_);
        require(
            rows_read_ > 0 && refused_ > 0 && without_room_ > 0 && aged_ > 0 && returned_ > 0 && placed_ > 0,
            "every kind of step was tried");
    }

  private:
    using Text = std::vector<float>;
    int pick(int n) { return int(random_() % unsigned(n)); }

    void check(int id) {
        const Text& text = texts_[id];
        const int64_t end = int64_t(text.size());
        require(cache_.length(id) == end, "the length is that of the text");
        for (int layer = 0; layer < kLayers; ++layer) {
            const int group = cache_.group_of(layer);
            int64_t next = cache_.begin(group, end);
            for (const auto& [c, origin, begin, last] : cache_.regions_of(id, group)) {
                if (begin == last) continue;
                require(begin == next, "regions follow one another");
                next = last;
                const Tensor rows(memory_.data.get(), DType::F32, last - begin, kWidth);
                backend_->load(cache_.rows(layer, c)[0], cache_.table(id, group, c), begin - origin,
                               last - origin, rows);
                for (int64_t p = begin; p < last; ++p, ++rows_read_)
                    require(rows.f32(p - begin)[kWidth - 1] == text[p] + float(layer),
                            "a row is its token's");
            }
            require(next == end, "every row is in a region");
        }
    }

    /// After an append no region begins before its time: rows have aged that were due.
    void check_regions(int id) {
        const int64_t end = int64_t(texts_[id].size());
        for (const auto& [c, origin, begin, last] : cache_.regions_of(id, cache_.group_of(kAging)))
            require(last <= kRegions.sinks || begin >= kRegions.begin(c, end), "rows age when they are due");
    }

    void recode(int layer, const Recoding& rows) {
        require(layer == kAging && rows.from.size() == 1, "rows of one layer age");
        ++(!rows.table ? placed_ : rows.to[0].base == cache_.slots(layer, 0, {}).base ? returned_ : aged_);
        backend_->recode(rows.from[0], rows.table, rows.begin, rows.end, rows.to[0]);
    }

    void fork(int id) {
        const Text copy = texts_[id];
        texts_[cache_.fork(id)] = copy;
    }

    void release(int id) {
        cache_.release(id);
        texts_.erase(id);
    }

    void truncate(int id) {
        Text& text = texts_[id];
        const int64_t length = int64_t(text.size()), back = pick(2) ? pick(kLongestStep + 1) : pick(kContext);
        const int64_t to = std::max<int64_t>(0, length - back);
        const bool can = cache_.can_truncate(id, to);
        try {
            cache_.truncate(id, to);
            require(can, "what cannot be truncated is refused");
            text.resize(to);
        } catch (const Error&) {
            require(!can, "what can be truncated is not refused");
            ++refused_;
        }
        check(id);
    }

    void save_and_restore(int id) {
        const std::vector<std::byte> saved = cache_.save(id, 0);
        const Text copy = texts_[id];
        const int twin = cache_.create();
        cache_.restore(twin, saved, 0, int64_t(copy.size()));
        texts_[twin] = copy;
        check(twin);
        require(cache_.save(twin, 0) == saved, "restored rows are saved alike");
    }

    void append(int id) {
        Text& text = texts_[id];
        const int64_t before = int64_t(text.size()), n = 1 + pick(pick(4) ? kStoredStep : kLongestStep);
        const std::pair<int, int64_t> growth{id, n};
        try {
            cache_.require_room({&growth, 1});
        } catch (const Error&) {
            require(before + n > kContext, "there is room for every sequence's whole context");
            ++without_room_;
            cache_.truncate(id, 0);
            text.clear();
            return;
        }
        cache_.reserve(id, n);
        check(id);           // what the step reads is still there
        if (pick(4) == 0) {  // the step fails
            cache_.truncate(id, before);
            return check(id);
        }
        next_token_ += kLongestStep;
        for (int layer = 0; layer < kLayers; ++layer) store(id, layer, n);
        for (int64_t i = 0; i < n; ++i) text.push_back(float(next_token_ + i));
        cache_.commit(id, n);
        if (pick(8) == 0) {  // a later part of the append fails
            text.resize(before);
            cache_.truncate(id, before);
            return check(id);
        }
        cache_.age_rows(id);
        check(id);
        check_regions(id);
    }

    void store(int id, int layer, int64_t n) {
        std::vector<int32_t> slots;
        cache_.add_slots(id, cache_.group_of(layer), n, slots);
        if (slots.empty()) return place(id, layer, n);
        const Tensor index(memory_.data.get(), DType::I32, 1, n);
        const Tensor rows(memory_.data.get() + (1 << 12), DType::F32, n, kWidth);
        backend_->upload(index, slots.data(), slots.size() * sizeof(int32_t));
        for (int64_t i = 0; i < n; ++i)
            std::fill_n(rows.f32(i), kWidth, float(next_token_ + i) + float(layer));
        backend_->store(rows, cache_.slots(layer, 0, index));
    }

    /// From dense rows of all positions, as many as are longer than a step that is stored.
    void place(int id, int layer, int64_t n) {
        require(layer == kAging && n > kStoredStep, "rows without slots are many, and age");
        const Text& text = texts_[id];
        const int64_t before = int64_t(text.size());
        const Tensor rows(memory_.data.get(), DType::F32, before + n, kWidth);
        for (int64_t p = 0; p < rows.rows; ++p)
            std::fill_n(rows.f32(p), kWidth,
                        (p < before ? text[p] : float(next_token_ + p - before)) + float(layer));
        cache_.place(id, layer, {.planes = {rows}});
    }

    std::unique_ptr<Backend> backend_;
    Format format_;
    KvCache cache_;
    Buffer memory_;
    std::map<int, Text> texts_;
    std::mt19937 random_{1};
    int64_t next_token_ = 0;  // below 2^24, where floats count
    long rows_read_ = 0, refused_ = 0, without_room_ = 0, aged_ = 0, returned_ = 0, placed_ = 0;
};

/// Means that are kept belong to whole stretches of a sequence's own rows, and come back when nobody has
/// those.
void check_means() {
    constexpr int64_t kOne = kStretchRows, kLongest = 3 * kOne;
    const std::unique_ptr<Backend> backend = open_cpu_backend({.n_threads = 1});
    const Format format{{"k", kWidth, 1, DType::F32}};
    const KvCache window({{backend.get(), {format}, kWindow, {}, true}}, kLongest, 1, 0,
                         {kLongest, kLongest});
    KvCache cache({{backend.get(), {format}, 0, {}, true}, {backend.get(), {format}, 0, {}, false}}, kLongest,
                  2, 0, {kLongest, kLongest});
    require(cache.rows(0)[0].means.base && !cache.rows(1)[0].means.base && !window.rows(0)[0].means.base,
            "means are kept where attention spares rows that all stay");
    const auto grow = [&](int id, int64_t n) {
        cache.reserve(id, n);
        cache.commit(id, n);
        cache.age_rows(id);
        cache.reserve(id, 0);
    };
    const auto means = [&](int id) {
        return std::vector(cache.means(id, 0).begin(), cache.means(id, 0).end());
    };
    for (int turn = 0; turn < 20; ++turn) {
        const int whole = cache.create();
        grow(whole, 2 * kOne + 5);
        require(means(whole).size() == 2, "a whole stretch has a mean, a part of one none");
        const int twin = cache.fork(whole);
        require(means(twin) == means(whole), "forks share means");
        cache.truncate(twin, 2 * kOne - 1);
        require(means(twin).size() == 1, "a stretch that is cut has none");
        grow(twin, kOne);
        require(means(twin)[0] == means(whole)[0] && means(twin)[1] != means(whole)[1],
                "other rows, another mean");
        const int thin = cache.thin(whole, kStretchBlocks + 1, 1);
        require(means(thin).size() == 1, "behind a gap are other stretches");
        for (const int id : {whole, twin, thin}) {
            for (const int32_t mean : means(id)) require(mean >= 0, "there are as many means as stretches");
            cache.release(id);
        }
    }
    std::printf("kv_cache_test: means that are kept: ok\n");
}

}  // namespace

int main() {
    check_means();
    RandomWalk walk;
    for (int step = 0; step < 20000; ++step) {
        walk.step();
        if (step % 500 == 0) walk.check_all();
    }
    walk.report();
}
