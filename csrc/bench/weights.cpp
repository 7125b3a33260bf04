#include "bench/weights.h"

#include <random>

namespace slimrt::bench {

std::vector<uint8_t> random_weights(size_t bytes) {
    std::vector<uint8_t> weights(bytes);
    std::minstd_rand random(1);
    for (uint8_t& byte : weights) byte = uint8_t((random() >> 8 & 0x87) | 0x38);
    return weights;
}

}  // namespace slimrt::bench
