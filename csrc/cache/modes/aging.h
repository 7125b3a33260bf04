// What modes have in common whose rows age: the newest rows as they are written, older ones in levels of
// fewer and fewer bits. K has scales for each channel of kBlockTokens tokens, since its outliers are in few
// channels, V for each token (Liu et al., "KIVI", 2024, section 3); of V's columns older levels keep only the
// first ones. Decoding reads rows as they are stored; a prompt is computed over exact rows before any of them
// age.
#pragma once

#include "cache/attend.h"

namespace slimrt {

class AgingMode : public AbsorbingMode {
  public:
    bool has_levels() const final { return true; }
    std::string refusal(const AttnConfig& c) const override;
    Format format(const AttnConfig& c) const final;
    std::vector<Format> older_formats(const AttnConfig& c) const final;
    Regions regions(const AttnConfig& c) const final;
    void recode(Backend& backend, const AttnInput& in, const Recoding& r) const final;
    size_t recoding_scratch(const AttnConfig& c) const final;
    /// K, what is stored of V, and V itself where that is another plane.
    Format dense_format(const AttnConfig& c) const final;

  protected:
    /// Heads of what is stored of V; older rows keep the first columns of each.
    virtual int value_heads(const AttnConfig& c) const = 0;
    /// With latents: the latents of V, which are stored; and V of latents.
    virtual Tensor latents_of(Backend&, const AttnInput&, Tensor v) const { return v; }
    virtual void values_of(Backend&, const AttnInput&, Tensor, Tensor) const {}
    /// Memory for attention over latents; and out, the heads made of it, plus what `keys` predict of them:
    /// keys summed with the latents' weights, as wide as latents, or none.
    virtual Tensor before_heads(const AttnInput&, Tensor out) const { return out; }
    virtual void to_heads(Backend&, const AttnInput&, Tensor, Tensor, Tensor) const {}
    /// Levels::predicts: adds what stored keys predict of latents to these, times a factor.
    virtual void add_predicted(Backend&, const AttnInput&, Tensor, float, Tensor) const {}
    /// Whether K is stored before RoPE, and rotated on read.
    virtual bool raw_keys() const = 0;

    Written write_rows(Backend& backend, const WriteInput& in) const final;
    std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, const Written& own) const final;
    void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                         const std::vector<Tensor>& planes) const final;
    void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const final;
    void materialised(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const final;

  private:
    Levels levels(const AttnConfig& c) const;
    int columns(const AttnConfig& c, const Level& level) const;
    std::vector<Tensor> rows_of(Backend& backend, const AttnInput& in, std::vector<Tensor> kv) const;
    Tensor as_kept(Backend& backend, const AttnInput& in, Tensor x) const;
    ScoreTerm scored_keys(const ReadInput& in, Rows rows, Tensor fresh, int64_t origin) const;
};

}  // namespace slimrt
