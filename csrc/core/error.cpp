#include "core/error.h"

#include <cstdio>

namespace slimrt {

void append(std::string& to, long long number) { to += std::to_string(number); }
void append(std::string& to, unsigned long long number) { to += std::to_string(number); }

void append(std::string& to, double number) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", number);
    to += digits;
}

}  // namespace slimrt
