// Mode kivi (Liu et al., "KIVI", 2024): recent K (normed and rotated) and V as in kv; older rows in few bits.
#include "cache/modes/aging.h"
#include "cache/modes/modes.h"

namespace slimrt {
namespace {

class Kivi final : public AgingMode {
  public:
    const char* name() const override { return "kivi"; }
    bool keeps_v_bias() const override { return true; }
    Levels default_levels() const override { return {{Level{}}, 0, 128}; }  // the paper's residual length

    std::vector<Projection> projections(const Prepared& p) const override {
        return {{p.model.k, p.model.k_bias}, {p.model.v, p.model.v_bias}};
    }

  protected:
    int value_heads(const AttnConfig& c) const override { return c.n_kv_heads; }
    bool raw_keys() const override { return false; }
};

}  // namespace

const CacheMode* kivi_mode() {
    static const Kivi mode;
    return &mode;
}

}  // namespace slimrt
