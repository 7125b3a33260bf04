#include "kernels/cpu/access_policy.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/interleave.h"
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {
namespace {

constexpr const char* kHints[] = {"none", "t0", "t1", "nta"};
constexpr int32_t kMaxDistance = 1 << 20;
constexpr DType kTypes[] = {
    DType::F32,        DType::F16,       DType::BF16,     DType::Q8_0,     DType::Q4_0,     DType::Q4_K,
    DType::Q5_K,       DType::Q6_K,      DType::IQ4_NL,   DType::IQ4_XS,   DType::MXFP4,    DType::TQ2_0,
    DType::IQ2_N,      DType::IQ3_XXS_N, DType::IQ3_S_N,  DType::Q2_K_R16, DType::Q3_K_R16, DType::Q4_0_R16,
    DType::Q4_1_R16,   DType::Q4_K_R16,  DType::Q5_0_R16, DType::Q5_1_R16, DType::Q5_K_R16, DType::IQ4_NL_R16,
    DType::IQ4_XS_R16, DType::MXFP4_R16};

std::mutex mutex;
std::optional<AccessPolicy> policy_set;

[[noreturn]] void fail_access(std::string_view said) {
    std::string kinds;
    for (const std::string& kind : access_kinds()) kinds += kinds.empty() ? kind : ", " + kind;
    fail(ErrorCode::argument, "there is no access '", said,
         "': it is 'usual', or none, t0, t1 or nta as in t0:4096:several (4096 bytes ahead; rows side by "
         "side), for all or with commas as KIND=..., with the kinds ",
         kinds);
}

std::vector<std::string_view> split(std::string_view text, char at) {
    std::vector<std::string_view> parts;
    for (size_t end = 0; end != std::string_view::npos; text.remove_prefix(std::min(end + 1, text.size()))) {
        end = text.find(at);
        parts.push_back(text.substr(0, end));
    }
    return parts;
}

Access parse_one(std::string_view text) {
    const std::vector<std::string_view> parts = split(text, ':');
    const auto hint = std::ranges::find(kHints, parts[0]);
    if (hint == std::end(kHints)) fail_access(text);
    Access access{static_cast<Hint>(hint - kHints), false, 0};
    for (size_t i = 1; i < parts.size(); ++i) {
        const char *const first = parts[i].data(), *const end = first + parts[i].size();
        if (parts[i] == "several")
            access.several = true;
        else if (std::from_chars(first, end, access.ahead) != std::from_chars_result{end, {}} || i > 1 ||
                 access.ahead < 0 || access.ahead > kMaxDistance)
            fail_access(text);
    }
    return access;
}

}  // namespace

Access* AccessPolicy::find(const std::string& kind) {
    if (kind == "rows") return &rows;
    if (kind == "float_rows") return &float_rows;
    for (const DType type : kTypes)
        if (kind == dtype_info(type).name) return &weights[static_cast<size_t>(type)];
    return nullptr;
}

std::vector<std::string> access_kinds(const std::string& isa) {
    const Isa& chosen = choose_isa(isa);
    std::vector<std::string> names;
    for (const DType type : kTypes) {
        const DType interleaved = interleaved_type(type);
        if (multiplies(chosen, type) && (interleaved == type || !multiplies(chosen, interleaved)))
            names.emplace_back(dtype_info(type).name);
    }
    names.insert(names.end(), {"float_rows", "rows"});
    return names;
}

AccessPolicy usual_access() {
    AccessPolicy policy;
    policy.weights.fill(usual_access_of_codes());
    for (const DType type : {DType::Q8_0, DType::Q6_K})
        policy.weights[static_cast<size_t>(type)] = {Hint::t0, false, 8 << 10};
    for (const DType type : {DType::F32, DType::F16, DType::BF16})
        policy.weights[static_cast<size_t>(type)] = {Hint::t0, false, 4 << 10};
    for (const DType type : kTypes)  // 16 interleaved rows are one stream already
        if (rows_type(type) != type) policy.weights[static_cast<size_t>(type)].several = false;
    policy.float_rows = policy.rows = usual_access_of_rows();
    return policy;
}

AccessPolicy parse_access(const std::string& text, AccessPolicy policy) {
    if (text == "usual") return usual_access();
    for (const std::string_view part : split(text, ',')) {
        const size_t is = part.find('=');
        if (is == std::string_view::npos) {
            const Access access = parse_one(part);
            policy.weights.fill(access);
            policy.float_rows = policy.rows = access;
            continue;
        }
        Access* const one = policy.find(std::string(part.substr(0, is)));
        if (!one) fail_access(part);
        *one = parse_one(part.substr(is + 1));
    }
    return policy;
}

std::string to_text(const Access& access) {
    std::string text = kHints[static_cast<int>(access.hint)];
    if (access.hint != Hint::none) text += ':' + std::to_string(access.ahead);
    return access.several ? text + ":several" : text;
}

std::string to_text(const AccessPolicy& policy) {
    AccessPolicy copy = policy;
    std::string text;
    for (const std::string& kind : access_kinds())
        text += (text.empty() ? "" : ",") + kind + '=' + to_text(*copy.find(kind));
    return text;
}

void set_access(const AccessPolicy& policy) {
    const std::lock_guard lock(mutex);
    policy_set = policy;
}

AccessPolicy chosen_access() {
    if (const char* const said = std::getenv("SLIMRT_ACCESS"); said && *said) return parse_access(said);
    const std::lock_guard lock(mutex);
    return policy_set ? *policy_set : usual_access();
}

}  // namespace slimrt::cpu
