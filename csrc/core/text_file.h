// Small files, as /proc and /sys have them. Not read by streams: see core/error.cpp.
#pragma once

#include <cstdio>
#include <string>

namespace slimrt {

/// The contents of a file; "" if there is none.
inline std::string text_of(const std::string& path) {
    std::string text;
    std::FILE* const file = std::fopen(path.c_str(), "r");
    if (!file) return text;
    char part[4096];
    while (const size_t n = std::fread(part, 1, sizeof part, file)) text.append(part, n);
    std::fclose(file);
    return text;
}

inline std::string first_line(const std::string& path) {
    const std::string text = text_of(path);
    return text.substr(0, text.find('\n'));
}

}  // namespace slimrt
