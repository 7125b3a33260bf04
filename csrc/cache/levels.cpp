#include "cache/levels.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>

#include "core/error.h"

namespace slimrt {
namespace {

constexpr double kShare = 0.1;
constexpr int64_t kMostRows = 1 << 28;
constexpr size_t kMostLevels = 8;  // each has blocks of its own
constexpr const char* kForm =
    "levels are such as q2@0.5+q4*0.1+sinks=4 (TYPE_K/TYPE_V@PART*SHARE or *ROWS, oldest first)";
constexpr const char *kForgotten = "none", *kEager = "eager", *kPredicts = "predict";

std::vector<std::string> parts_of(const std::string& text, char between) {
    std::vector<std::string> parts(1);
    for (const char c : text) c == between ? void(parts.emplace_back()) : parts.back().push_back(c);
    return parts;
}

/// Whether a whole text is an integer.
template <class Integer>
bool parse(std::string_view text, Integer& number) {
    const char* const end = text.data() + text.size();
    return std::from_chars(text.data(), end, number) == std::from_chars_result{end, {}};
}

/// Whether a whole text is a decimal without a sign, such as .25 or 5e-05. Not by std::from_chars, whose part
/// for floats is 19 KB of a wheel, nor by std::strtod, which reads 0,25 where the locale has commas.
bool parse(std::string_view text, double& number) {
    const size_t end = std::min(text.find_first_of("eE"), text.size());
    const size_t point = std::min(text.find('.'), end);
    int exponent = 0, digits = 0;
    if (end < text.size() && !parse(text.substr(end + 1), exponent)) return false;
    number = 0;
    for (size_t i = 0; i < end; ++i) {
        if (i == point) continue;
        if (text[i] < '0' || text[i] > '9') return false;
        number = 10 * number + (text[i] - '0');
        ++digits;
    }
    const double power = exponent - (point < end ? static_cast<double>(end - point - 1) : 0.0);
    const double scale = std::pow(10.0, std::fabs(power));  // exact up to 10^22: 0.3 is rounded once
    const bool positive = number > 0;
    number = power < 0 ? number / scale : number * scale;
    return digits > 0 && positive == (number > 0);  // no underflow
}

template <class Number>
Number read_number(const std::string& text, const std::string& where, Number low, Number high) {
    Number number{};
    if (!parse(text, number) || !(number >= low && number <= high))
        fail(ErrorCode::argument, "'", where, "': '", text, "' is not a number from ", low, " to ", high,
             "; ", kForm);
    return number;
}

/// Removes what follows the last `mark` from a text and returns it: "" without a mark, "?" if it is empty.
std::string cut(std::string& text, char mark) {
    const size_t at = text.rfind(mark);
    if (at == std::string::npos) return "";
    std::string behind = text.substr(at + 1);
    text.resize(at);
    return behind.empty() ? "?" : behind;
}

/// One digit or a fraction: a share of the aged rows; two digits or more: how many rows.
void read_share(const std::string& share, const std::string& level_text, Level& level) {
    level.share = kShare;
    if (share.empty()) return;
    if (share.size() == 1 || share.find_first_not_of("0123456789") != std::string::npos) {
        level.share = read_number(share, level_text, 0.0, 1.0);
        return;
    }
    level.share = 0;
    level.rows = read_number<int64_t>(share, level_text, 0, kMostRows);
    if (level.rows % kBlockTokens)
        fail(ErrorCode::argument, "'", level_text, "': rows age in blocks of ", kBlockTokens, ", and ", share,
             " rows are no whole ones; ", kForm);
}

Level read_level(const std::string& text) {
    std::string types = text;
    const std::string share = cut(types, '*'), part = cut(types, '@'), type_v = cut(types, '/');
    Level level;
    if (text == kForgotten) {
        level.part = 0;
        return level;
    }
    level.type_k = require_cache_type(types.c_str());
    level.type_v = type_v.empty() ? level.type_k : require_cache_type(type_v.c_str());
    read_share(share, text, level);
    level.part = part.empty() ? 1 : read_number(part, text, 0.0, 1.0);
    if (level.part == 0) fail(ErrorCode::argument, "'", text, "': V keeps no column; ", kForm);
    return level;
}

size_t bits_of(DType type) { return 8 * head_bytes(type, kBlockTokens).elements / kBlockTokens; }

}  // namespace

Levels parse_levels(const std::string& text, const Levels& usual) {
    Levels levels{{}, usual.sinks, usual.recent, usual.eager, usual.predicts};
    double share = 0;
    for (const std::string& part : parts_of(text, '+')) {
        if (part.starts_with("sinks=")) {
            levels.sinks = read_number<int64_t>(part.substr(6), part, 0, kMostRows);
        } else if (part.starts_with("recent=")) {
            levels.recent = read_number<int64_t>(part.substr(7), part, 0, kMostRows);
        } else if (part == kEager) {
            levels.eager = true;
        } else if (part == kPredicts) {
            levels.predicts = true;
        } else {
            levels.of.push_back(read_level(part));
            if (levels.of.size() == 1) {
                if (part.find('*') != std::string::npos)
                    fail(ErrorCode::argument, "'", part,
                         "': the first level, the oldest, has the share that others ", "leave; ", kForm);
                levels.of[0].share = 0;
            } else if (levels.of.back().part == 0) {
                fail(ErrorCode::argument, "'", text, "': only the oldest rows can be forgotten, so '",
                     kForgotten, "' comes first; ", kForm);
            }
            share += levels.of.back().share;
        }
    }
    if (levels.of.empty()) levels.of = usual.of;
    if (levels.of.size() > kMostLevels)
        fail(ErrorCode::argument, "there are ", levels.of.size(), " levels, and at most ", kMostLevels,
             " are possible; ", kForm);
    if (levels.eager && levels.predicts)
        fail(ErrorCode::argument, "'", text,
             "': an eager prompt reads latents before there are stored keys that could predict them; ",
             kForm);
    if (share > 1) fail(ErrorCode::argument, "'", text, "': the shares add up to more than 1; ", kForm);
    for (size_t i = 1; i < levels.of.size(); ++i) {
        const Level &older = levels.of[i - 1], &newer = levels.of[i];
        if (newer.part < older.part)
            fail(ErrorCode::argument, "'", text, "': newer rows keep fewer columns of V than older ones; ",
                 kForm);
        const bool coarser =
            bits_of(newer.type_k) < bits_of(older.type_k) || bits_of(newer.type_v) < bits_of(older.type_v);
        if (older.part > 0 && coarser)
            fail(ErrorCode::argument, "'", text, "': newer rows have fewer bits than older ones; ", kForm);
    }
    return levels;
}

bool says_levels(const std::string& text) {
    return text == kForgotten || text == kEager || text == kPredicts ||
           text.find_first_of("+@*=/") != std::string::npos;
}

std::string to_text(const Levels& levels, const Levels& usual) {
    std::string text;
    for (size_t i = 0; i < levels.of.size(); ++i) {
        const Level& level = levels.of[i];
        text += concat(text.empty() ? "" : "+", level.part == 0 ? kForgotten : dtype_info(level.type_k).name);
        if (level.part == 0) continue;
        if (level.type_v != level.type_k) text += concat("/", dtype_info(level.type_v).name);
        if (level.part != 1) text += concat("@", level.part);
        if (i > 0) text += level.rows > 0 ? concat("*", level.rows) : concat("*", level.share);
    }
    if (levels.sinks != usual.sinks) text += concat("+sinks=", levels.sinks);
    if (levels.recent != usual.recent) text += concat("+recent=", levels.recent);
    if (levels.eager) text += concat("+", kEager);
    if (levels.predicts) text += concat("+", kPredicts);
    return text;
}

int default_latent_heads(int n_kv_heads) {
    int heads = std::min(4, n_kv_heads);
    while (n_kv_heads % heads) --heads;
    return heads;
}

}  // namespace slimrt
