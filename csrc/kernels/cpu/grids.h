// The grids of IQ2 and IQ3: codebooks of magnitudes, as ggml defines them.
#pragma once

#include <stdint.h>

namespace slimrt::cpu {

// IQ2: eight magnitudes in an entry, two bits each, the first lowest. IQ3: four, three bits each.
extern const uint16_t grid_iq2_xxs[256], grid_iq2_xs[512], grid_iq2_s[1024];
extern const uint16_t grid_iq3_xxs[256], grid_iq3_s[512];

}  // namespace slimrt::cpu
