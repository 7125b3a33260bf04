// The machine at hand, as Linux tells of it.
#pragma once

#include "bench/json.h"

namespace slimrt::bench {

/// Board, CPU, cores with their capacity and clock, memory, instruction sets, threads.
Json machine();

}  // namespace slimrt::bench
