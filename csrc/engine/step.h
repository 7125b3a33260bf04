// One step of the decoder: which tokens of which sequences, and whose logits.
#pragma once

#include <vector>

#include "model/decoder.h"

namespace slimrt {

struct Step {
    struct Group {
        std::vector<int32_t> slots;
        std::vector<AttentionSequence> sequences;
        std::vector<OlderRows> older;
    };
    std::vector<int32_t> tokens, positions, outputs;
    std::vector<Group> groups;  // of layers, see KvCache
    std::vector<AttentionSequence> encoder_states;
    int last = -1;  // the sequence added last

    explicit Step(const KvCache& cache) : groups(cache.n_groups()) {}
    int n_sequences() const { return int(groups[0].sequences.size()); }
    /// Adds n tokens of a sequence, whose rows it reserves. `tokens` is appended to by the caller.
    void add_sequence(KvCache& cache, int sequence, int64_t n);
    /// The rows of an encoder's output that the sequence added last sees.
    void add_encoder_states(int64_t length, const int32_t* table);
};

/// What a step tells of its outputs: logits [n_vocab], what the head would read [d_model], or the token that
/// a greedy Sampler takes [1], in the bits of an int32.
enum class Output { logits, states, tokens };

/// Runs a step, in each part of the decoder with a scratch of its own; rows of step.outputs go to `out` (host
/// memory), one after another. Throws Error{format} where a row has no likeliest token.
void run_step(const Decoder& decoder, std::span<Scratch> scratches, const Step& step, Output output,
              float* out, const StepObserver& observer = {});

/// What an encoder reads at once, in host memory: token ids, or rows of floats, of the width of mel
/// frames or samples, or of embeddings in the place of tokens. Or what it made of one before: `encoded` rows.
/// Tokens and embeddings may have positions that ascend with gaps: rows that are missing, which nobody sees.
struct EncoderInput {
    std::span<const int32_t> ids;
    const float* values = nullptr;
    int64_t rows = 0;
    bool encoded = false;
    std::span<const int32_t> positions;  // none: 0, 1, 2 ...
};

/// Inputs that are encoded together: their output rows together are no more than n_source.
struct Encoding {
    std::vector<EncoderInput> inputs;
    std::vector<int64_t> lengths;    // of output
    std::vector<int32_t> positions;  // of its rows, each input's own
    std::vector<int32_t> slots;      // where its rows are stored

    void add(const EncoderInput& input, int64_t length);
};

/// Encodes and stores; the encoder's output goes to `states` (host memory), unless null.
void run_encoding(const Decoder& decoder, Scratch& scratch, const Encoding& encoding, float* states,
                  const Encoder::Progress& progress = {});

}  // namespace slimrt
