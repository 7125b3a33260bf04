#include <algorithm>
#include <cmath>
#include <thread>

#include "core/control_groups.h"
#include "core/processors.h"

namespace slimrt {

int default_threads() {
    int n = count_cores(fast_ones(processors()));
    if (n == 0) n = static_cast<int>(std::thread::hardware_concurrency());
    if (const double granted = cpus_granted_by_groups(); granted > 0)
        n = std::min(n, static_cast<int>(std::ceil(std::min(granted, 1e6))));
    return std::max(n, 1);
}

}  // namespace slimrt
