// Tokens in, logits out, for many sequences: chooses the tokens of each step, and knows what fits.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/input_squares.h"
#include "engine/planner.h"
#include "engine/sampler.h"
#include "engine/step.h"

namespace slimrt {

class Engine {
  public:
    struct Item {
        int sequence;
        std::span<const int32_t> tokens;
        int64_t outputs = 0;  // how many of the last tokens, at most all, get a row of output
    };
    /// Called after each step, and within a long one about five times a second; may throw to stop.
    using Progress = std::function<void(int64_t done, int64_t total)>;

    /// Throws Error{wont_fit}, with the numbers, before it allocates anything large.
    Engine(GgufFile file, const EngineOptions& options, const ExtraTensors& extra = {});

    /// Handles of sequences, see KvCache; with an encoder each has encoder states, which forks share.
    int create();
    int fork(int sequence);
    /// See KvCache. Throws Error{unsupported}, too, in modes that rotate keys on read, by their place in the
    /// fork.
    int thin(int sequence, int64_t first_blocks, int64_t last_blocks);
    void release(int sequence);
    void truncate(int sequence, int64_t length) { cache().truncate(sequence, length); }
    bool can_truncate(int sequence, int64_t length) { return cache().can_truncate(sequence, length); }
    void tile(int sequence, int64_t length) { cache().tile(sequence, length); }
    int64_t length(int sequence) { return cache().length(sequence); }
    /// Whether the sequences, each listed once, can grow by these counts: in n_ctx and in blocks.
    bool has_room(KvCache::Growth growth);
    /// Blocks of the cache, 0 without a decoder.
    int64_t free_blocks() { return config().n_layers ? cache().scarcest().n_free() : 0; }
    int64_t n_blocks() { return config().n_layers ? cache().scarcest().n_blocks() : 0; }
    std::pair<int64_t, int64_t> blocks(int sequence) {
        return config().n_layers ? cache().blocks(sequence) : std::pair<int64_t, int64_t>();
    }

    struct EncodeItem {
        int sequence;
        EncoderInput input;
    };
    /// Encodes inputs for sequences that have none yet. states: null, or memory for the encoder's outputs,
    /// one after another; without a decoder nothing else is kept of them. After an exception the sequences
    /// have none.
    void encode(std::span<const EncodeItem> items, float* states, const Progress& progress);
    /// Rows of the encoder's output for an input. Throws Error{argument} where there is no encoder or the
    /// input is too short, Error{context_overflow} where it is longer than n_source allows.
    int64_t encoder_rows(const EncoderInput& input) const;

    /// Appends tokens in steps (Decoder::step_limits) and writes rows to `out` (Output, of width_of() floats)
    /// for the last Item::outputs tokens of each item. After an exception the sequences are as before; but
    /// one whose old rows were given back, behind a window, keeps the tokens of finished steps, and the Error
    /// says so.
    void append(std::span<const Item> items, Output output, float* out, const Progress& progress,
                const StepObserver& observer = {});

    int64_t width_of(Output output) const {
        return output == Output::tokens       ? 1
               : output == Output::states     ? config().d_model
               : output == Output::candidates ? 2 * n_candidates(config())
                                              : config().n_vocab;
    }

    struct Head {
        int layer, head;
    };
    /// Softmax weights of cross-attention heads, [heads, tokens, rows of encoder states] f32, for these
    /// tokens after a sequence, which is then truncated to its length before; where that throws, it keeps
    /// them.
    std::vector<float> alignment(const Item& item, std::span<const Head> heads, const Progress& progress);
    int64_t encoder_length(int sequence) const;

    /// A token for each row, on all threads. See sample_rows().
    std::vector<Choice> sample(std::span<const RowToSample> rows);
    /// fn(row) for each of n rows of logits, on all threads. fn must not throw.
    void each_row(int64_t n, const std::function<void(int64_t row)>& fn);

    /// The normed attention input of each layer for these tokens, [n_layers, n, d_model] f32.
    void attention_inputs(std::span<const int32_t> tokens, float* out, const Progress& progress);

    /// What these tokens, as a sequence of their own, multiply each weight by, but for the head's. Throws
    /// Error{unsupported} where a layer is not on the CPU.
    std::map<std::string, InputSquares> input_squares(std::span<const int32_t> tokens,
                                                      const Progress& progress);

    /// The rows of a sequence from token `begin`, the start of a block, with what they depend on. load_rows()
    /// appends them to a sequence of `begin` tokens; load_sequence() makes one of rows from 0. Throws
    /// Error{format} for rows of another model or cache, or damaged ones, and as KvCache::save() and
    /// restore().
    std::vector<std::byte> save_rows(int sequence, int64_t begin);
    void load_rows(int sequence, std::span<const std::byte> bytes);
    int load_sequence(std::span<const std::byte> bytes);

    const ModelConfig& config() const { return decoder_->config(); }
    EngineInfo info();
    SparseCounts sparse_counts() const;

  private:
    /// Sequences, and their lengths before an append.
    using Lengths = std::vector<std::pair<int, int64_t>>;
    struct Cursor {
        size_t item = 0, token = 0;
    };
    KvCache& cache() { return decoder_->cache(); }
    /// The backend with the most threads on the host.
    Backend& host();
    void require_valid(std::span<const Item> items);
    void run_steps(std::span<const Item> items, Output output, float* out, const Progress& progress,
                   StepObserver observer);
    /// Truncates sequences to their lengths before; returns sentences about those where it cannot.
    std::string undo(const Lengths& before);
    /// The next step: as many tokens of the items, in order, as it may hold. Reserves their rows.
    Step next_step(std::span<const Item> items, Cursor& at);
    std::string cache_fingerprint();
    void require_positions(const EncoderInput& input) const;
    void require_not_encoded(const EncodeItem& item);
    void forget_encoder_states(int sequence);
    void encode_some(std::span<const EncodeItem> items, float* states, const Encoder::Progress& progress);

    GgufFile file_;
    int n_threads_ = 0;
    std::vector<DeviceLayers> devices_;  // of the decoder's parts, as are the backends
    std::vector<std::unique_ptr<Backend>> backends_;
    std::unique_ptr<Decoder> decoder_;
    std::vector<Scratch> scratches_;               // for each part
    std::vector<SamplerScratch> sampler_scratch_;  // for each thread
    std::map<int, int> encoder_states_of_;         // by sequence: its handle in Decoder::encoder_states()
};

}  // namespace slimrt
