// One step of the decoder: tokens of some sequences, and which of them have outputs.
#pragma once

#include <algorithm>
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
    std::vector<Group> groups;  // by group of layers, see KvCache
    std::vector<AttentionSequence> encoder_states;
    int last = -1;  // the sequence added last

    explicit Step(const KvCache& cache) : groups(cache.n_groups()) {}
    int n_sequences() const { return int(groups[0].sequences.size()); }
    /// Adds n tokens of a sequence and reserves their rows. The caller appends to `tokens`.
    void add_sequence(KvCache& cache, int sequence, int64_t n);
    /// The rows of an encoder's output that the sequence added last reads.
    void add_encoder_states(int64_t length, const int32_t* table);
};

/// What a step gives for a token: logits [n_vocab], the head's input [d_model], the token that a greedy
/// Sampler takes [1], as the bits of an int32, or the Backend::largest() logits [2 n_candidates()].
enum class Output { logits, states, tokens, candidates };

inline int64_t n_candidates(const ModelConfig& config) {
    return std::min<int64_t>(Backend::kMaxLargest, config.n_vocab);
}

/// Runs a step, each part of the decoder in its own scratch; rows of step.outputs go to `out` (host memory),
/// one after another. Throws Error{format} where Output::tokens has no likeliest token, Error{unsupported}
/// for Output::candidates where the head is on the host.
void run_step(const Decoder& decoder, std::span<Scratch> scratches, const Step& step, Output output,
              float* out, const StepObserver& observer = {});

/// An input of an encoder, in host memory: token ids; or rows of floats, which are mel frames, samples, or
/// embeddings in place of tokens; or rows that were `encoded` before. Positions of tokens and embeddings may
/// ascend with gaps, for missing rows that no other row attends to. Of a group of series each begins where
/// they do not ascend.
struct EncoderInput {
    std::span<const int32_t> ids;
    const float* values = nullptr;
    int64_t rows = 0;
    bool encoded = false;
    std::span<const int32_t> positions;  // empty: 0, 1, 2 ...
};

/// Inputs that are encoded together; their outputs have at most n_source rows together.
struct Encoding {
    std::vector<EncoderInput> inputs;
    std::vector<int64_t> lengths;    // rows of output of each input
    std::vector<int32_t> positions;  // of the output's rows, from 0 in each input
    std::vector<int32_t> slots;      // of the output's rows in the cache; none without a decoder

    void add(const EncoderInput& input, int64_t length);
};

/// Encodes inputs and stores the output's rows; copies the output to `states` (host memory) unless null.
void run_encoding(const Decoder& decoder, Scratch& scratch, const Encoding& encoding, float* states,
                  const Encoder::Progress& progress = {});

}  // namespace slimrt
