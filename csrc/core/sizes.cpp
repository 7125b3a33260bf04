#include "core/sizes.h"

#include <cstdio>

#include "core/error.h"

namespace slimrt {

std::string format_bytes(uint64_t bytes) {
    const double mebibytes = double(bytes) / (1 << 20);
    const bool shown_below_gib =
        mebibytes < 1023.95;  // as it is rounded: "1024.0 MiB" would look less than 1 GiB
    char text[32];
    std::snprintf(text, sizeof text, shown_below_gib ? "%.1f MiB" : "%.2f GiB",
                  shown_below_gib ? mebibytes : mebibytes / 1024);
    return text;
}

std::pair<std::string, std::string> format_both(uint64_t needed, uint64_t available) {
    const std::pair both(format_bytes(needed), format_bytes(available));
    if (needed == available || both.first != both.second) return both;
    return {concat(needed, " bytes"), concat(available, " bytes")};
}

}  // namespace slimrt
