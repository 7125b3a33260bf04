// libFuzzer target: parses bytes as a GGUF file and touches everything a valid one hands out.
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/error.h"
#include "core/gguf.h"

namespace {

volatile unsigned char sink;

void touch(const std::byte* data, size_t bytes) {
    if (bytes == 0) return;
    sink = static_cast<unsigned char>(data[0]);
    sink = static_cast<unsigned char>(data[bytes - 1]);
}

/// Runs a look-up that may refuse the value, but only with Error.
template <class Lookup>
void attempt(const Lookup& lookup) {
    try {
        lookup();
    } catch (const slimrt::Error&) {
    }
}

void touch_everything(const slimrt::GgufFile& file) {
    for (const auto& [key, value] : file.metadata()) {
        const std::string& name = key;
        attempt([&] { file.integer(name, -1000, 1000); });
        attempt([&] { file.number(name); });
        attempt([&] { file.string(name); });
        const auto* array = std::get_if<slimrt::GgufArray>(&value);
        if (!array) continue;
        for (const slimrt::GgufValue& element : slimrt::elements(*array)) {
            const auto* text = std::get_if<std::string_view>(&element);
            if (text) touch(reinterpret_cast<const std::byte*>(text->data()), text->size());
        }
    }
    for (const auto& [name, tensor] : file.tensors()) {
        if (tensor.rows < 1 || tensor.cols < 1) __builtin_trap();
        touch(tensor.data, tensor.bytes());
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    attempt([&] {
        touch_everything(
            slimrt::GgufFile::parse(reinterpret_cast<const std::byte*>(data), size, "fuzz.gguf"));
    });
    return 0;
}
