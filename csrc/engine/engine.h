// Tokens in, logits out, for many sequences: chooses what goes into each step, and knows what fits.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/planner.h"
#include "engine/sampler.h"
#include "engine/step.h"

namespace slimrt {

class Engine {
  public:
    struct Item {
        int sequence;
        std::span<const int32_t> tokens;
        int64_t outputs = 0;  // so many of the last tokens, at most all, have a row of output
    };
    /// Called after each step, and within a long one about five times a second; may throw to stop.
    using Progress = std::function<void(int64_t done, int64_t total)>;

    /// Throws Error{wont_fit} with the numbers before anything large is allocated.
    Engine(GgufFile file, const EngineOptions& options, const ExtraTensors& extra = {});

    /// Sequences, by handle; with an encoder each has encoder states, which forks share. See KvCache.
    int create();
    int fork(int sequence);
    /// See KvCache. Throws Error{unsupported} too in modes that turn keys when they read them, by where they
    /// stand in the fork.
    int thin(int sequence, int64_t first_blocks, int64_t last_blocks);
    void release(int sequence);
    void truncate(int sequence, int64_t length) { cache().truncate(sequence, length); }
    bool can_truncate(int sequence, int64_t length) { return cache().can_truncate(sequence, length); }
    void tile(int sequence, int64_t length) { cache().tile(sequence, length); }
    int64_t length(int sequence) { return cache().length(sequence); }
    /// Whether the sequences, each listed once, can grow by so many tokens each: in n_ctx and in blocks.
    bool has_room(KvCache::Growth growth);
    int64_t free_blocks() { return cache().scarcest().n_free(); }
    int64_t n_blocks() { return cache().scarcest().n_blocks(); }
    std::pair<int64_t, int64_t> blocks(int sequence) { return cache().blocks(sequence); }

    struct EncodeItem {
        int sequence;
        EncoderInput input;
    };
    /// Encodes inputs of sequences that have none yet. states: null, or the encoder's outputs, one after
    /// another. An exception leaves the sequences without.
    void encode(std::span<const EncodeItem> items, float* states, const Progress& progress);
    /// Rows of output that the encoder makes of an input. Throws Error{argument} when there is no encoder or
    /// the input is too short, Error{context_overflow} when it is longer than n_source allows.
    int64_t encoder_rows(const EncoderInput& input) const;

    /// Appends tokens in steps (Decoder::step_limits) and writes rows to `out` (Output, of width_of() floats)
    /// for the last Item::outputs tokens of each item. An exception leaves the sequences as they were; one
    /// whose rows are gone by then, behind a window, keeps the tokens of the steps that were done, and an
    /// Error says so.
    void append(std::span<const Item> items, Output output, float* out, const Progress& progress,
                const StepObserver& observer = {});

    int64_t width_of(Output output) const {
        return output == Output::tokens ? 1 : output == Output::states ? config().d_model : config().n_vocab;
    }

    struct Head {
        int layer, head;
    };
    /// Softmax weights of cross-attention heads, [heads, tokens, rows of encoder states] f32, when these
    /// tokens are appended to a sequence, which is then as it was before.
    std::vector<float> alignment(const Item& item, std::span<const Head> heads, const Progress& progress);
    int64_t encoder_length(int sequence) const;

    /// A token for each row, on all threads. See sample_rows().
    std::vector<Choice> sample(std::span<const RowToSample> rows);

    /// Each layer's normed attention input, [n_layers, n, d_model] f32.
    void attention_inputs(std::span<const int32_t> tokens, float* out, const Progress& progress);

    /// The rows of a sequence from a token on, a whole block of the cache, and what they depend on; and back
    /// to the end of a sequence of so many tokens, or from 0 on to a new one. Throws Error{format} for rows
    /// of another model or cache, or damaged ones, and as KvCache::save() and restore().
    std::vector<std::byte> save_rows(int sequence, int64_t begin);
    void load_rows(int sequence, std::span<const std::byte> bytes);
    int load_sequence(std::span<const std::byte> bytes);

    const ModelConfig& config() const { return decoder_->config(); }
    EngineInfo info();
    SparseCounts sparse_counts() const;

  private:
    /// A sequence, and how long it was.
    using Lengths = std::vector<std::pair<int, int64_t>>;
    struct Cursor {
        size_t item = 0, token = 0;
    };
    KvCache& cache() { return decoder_->cache(); }
    /// The one with the most threads on the host.
    Backend& host();
    void require_valid(std::span<const Item> items);
    void run_steps(std::span<const Item> items, Output output, float* out, const Progress& progress,
                   StepObserver observer);
    /// Drops what was appended since; says of which sequences it cannot.
    std::string undo(const Lengths& before);
    /// The next tokens of the items, in order, as many as a step may hold; their slots are reserved.
    Step next_step(std::span<const Item> items, Cursor& at);
    std::string cache_fingerprint();
    void require_positions(const EncoderInput& input) const;
    void require_not_encoded(const EncodeItem& item);
    void forget_encoder_states(int sequence);
    void encode_some(std::span<const EncodeItem> items, float* states, const Encoder::Progress& progress);

    GgufFile file_;
    int n_threads_ = 0;
    std::vector<DeviceLayers> devices_;  // of the decoder's parts, and their backends
    std::vector<std::unique_ptr<Backend>> backends_;
    std::unique_ptr<Decoder> decoder_;
    std::vector<Scratch> scratches_;               // one a part
    std::vector<SamplerScratch> sampler_scratch_;  // one a thread
    std::map<int, int>
        encoder_states_of_;  // handle in Decoder::encoder_states() of each sequence that has one
};

}  // namespace slimrt
