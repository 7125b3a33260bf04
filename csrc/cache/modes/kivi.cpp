// Mode kivi (Liu et al., "KIVI", 2024): K (normed and rotated) and V as kv keeps them while they are recent;
// older rows in few bits.
#include "cache/modes/aging.h"
#include "cache/modes/modes.h"

namespace slimrt {
namespace {

class Kivi final : public AgingMode {
  public:
    const char* name() const override { return "kivi"; }
    bool keeps_v_bias() const override { return true; }
    Levels usual_levels() const override { return {{Level{}}, 0, 128}; }  // KIVI's residual length

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
