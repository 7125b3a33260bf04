// Values as JSON text, built from the inside out.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace slimrt::bench {

class Json {
  public:
    using Member = std::pair<const char*, Json>;

    Json(bool x) : text_(x ? "true" : "false") {}
    Json(int x) : text_(std::to_string(x)) {}
    Json(int64_t x) : text_(std::to_string(x)) {}
    Json(uint64_t x) : text_(std::to_string(x)) {}
    Json(double x) : text_("null") {  // what is not finite
        char digits[32];
        std::snprintf(digits, sizeof digits, "%.6g", x);
        if (std::isfinite(x)) text_ = digits;
    }
    Json(const char* x) : Json(std::string(x)) {}
    Json(const std::string& x) : text_("\"") {
        for (const char c : x) {
            char code[8];
            std::snprintf(code, sizeof code, "\\u%04x", c);
            const bool plain = static_cast<unsigned char>(c) >= 0x20;
            text_ += c == '"' || c == '\\' ? std::string("\\") + c : plain ? std::string(1, c) : code;
        }
        text_ += '"';
    }
    template <class T>
    Json(const std::vector<T>& list) : text_("[") {
        for (const T& one : list) add("", Json(one));
        text_ += "]";
    }
    Json(std::initializer_list<Member> members) : text_("{") {
        for (const auto& [name, value] : members) add(Json(name).text_ + ": ", value);
        text_ += "}";
    }

    const std::string& text() const { return text_; }

  private:
    void add(const std::string& before, const Json& value) {
        if (text_.size() > 1) text_ += ", ";
        text_ += before + value.text_;
    }

    std::string text_;
};

}  // namespace slimrt::bench
