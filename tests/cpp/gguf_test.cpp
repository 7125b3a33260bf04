// What GgufFile reads, and what it refuses with which words. Files are written here byte by byte.
#include "core/gguf.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"

using slimrt::DType;
using slimrt::Error;
using slimrt::ErrorCode;
using slimrt::GgufFile;

namespace {

enum : uint32_t { UINT32 = 4, INT32 = 5, FLOAT32 = 6, BOOL = 7, STRING = 8, ARRAY = 9, UINT64 = 10 };
enum : uint32_t { F32 = 0, Q8_0 = 8, IQ1_S = 19, I32 = 26 };

void check(bool ok, const std::string& what) {
    if (ok) return;
    std::fprintf(stderr, "gguf_test: %s\n", what.c_str());
    std::exit(1);
}

struct Bytes {
    std::string data;

    template <class T>
    Bytes& put(T value) {
        data.append(reinterpret_cast<const char*>(&value), sizeof value);
        return *this;
    }
    Bytes& text(const std::string& s) {
        put<uint64_t>(s.size());
        data += s;
        return *this;
    }
    Bytes& header(uint64_t n_tensors, uint64_t n_entries, uint32_t version = 3) {
        data += "GGUF";
        return put(version).put(n_tensors).put(n_entries);
    }
    template <class T>
    Bytes& entry(const std::string& key, uint32_t type, T value) {
        return text(key).put(type).put(value);
    }
    Bytes& tensor(const std::string& name, std::initializer_list<uint64_t> shape, uint32_t type,
                  uint64_t offset) {
        text(name).put(static_cast<uint32_t>(shape.size()));
        for (uint64_t n : shape) put(n);
        return put(type).put(offset);
    }
    /// Alignment and `n` bytes of data.
    Bytes& tail(size_t n, size_t alignment = 32) {
        data.resize((data.size() + alignment - 1) / alignment * alignment + n);
        return *this;
    }
    GgufFile parse() const {
        return GgufFile::parse(reinterpret_cast<const std::byte*>(data.data()), data.size(), "m");
    }
};

void check_refused(const std::function<void()>& run, ErrorCode code, const std::string& words) {
    try {
        run();
    } catch (const Error& error) {
        check(std::string(error.what()).find(words) != std::string::npos,
              "'" + words + "' is not in: " + error.what());
        check(error.code == code, std::string("wrong code for: ") + error.what());
        return;
    }
    check(false, "not refused: " + words);
}

void refuse(const Bytes& bytes, const std::string& words, ErrorCode code = ErrorCode::format) {
    check_refused([&] { bytes.parse(); }, code, words);
}

void test_header() {
    Bytes().header(0, 0).parse();
    Bytes().header(0, 0, 2).parse();
    refuse(Bytes(), "the header at byte 0 needs 4 bytes");
    refuse(Bytes().put(uint64_t{1}), "not a GGUF file");
    refuse(Bytes().header(0, 0, 1), "GGUF version 1", ErrorCode::unsupported);
    refuse(Bytes().header(0, 0, 4), "GGUF version 4", ErrorCode::unsupported);
    refuse(Bytes().header(0, 0, 0x03000000), "big-endian", ErrorCode::unsupported);
    refuse(Bytes().header(0, ~uint64_t{0}), "entries, but only 0 bytes follow");
    refuse(Bytes().header(~uint64_t{0}, 0), "tensors, but only 0 bytes follow");
}

void test_metadata() {
    const auto one = [] { return Bytes().header(0, 1); };
    refuse(one().entry("", UINT32, 1u).tail(32), "a name of 0 bytes");
    refuse(one().entry(std::string(70000, 'k'), UINT32, 1u), "a name of 70000 bytes");
    refuse(one().entry("a\n", UINT32, 1u), "not printable ASCII");
    refuse(one().entry("k", 13, 1u), "key 'k' at byte 24 has value type 13");
    refuse(one().entry("k", BOOL, uint8_t{2}), "neither 0 nor 1");
    refuse(one().entry("k", STRING, ~uint64_t{0}), "key 'k' at byte 24 needs 18446744073709551615 bytes");
    refuse(one().entry("k", ARRAY, UINT64).put(uint64_t{1} << 61), "2305843009213693952 array elements");
    refuse(one().entry("k", ARRAY, STRING).put(uint64_t{2}).text("a").put(uint64_t{99}), "needs 99 bytes");
    refuse(one().entry("k", ARRAY, ARRAY).put(uint64_t{1}), "array of arrays", ErrorCode::unsupported);
    refuse(Bytes().header(0, 2).entry("k", UINT32, 1u).entry("k", UINT32, 1u),
           "key 'k' at byte 41 appears twice");
    for (uint32_t alignment : {0u, 4u, 48u, 0x80000000u}) {
        refuse(one().entry("general.alignment", UINT32, alignment), "'general.alignment' is");
    }
    refuse(one().entry("general.alignment", FLOAT32, 32.0f),
           "'general.alignment' is a float, expected an integer");
}

void test_tensors() {
    const auto one = [] { return Bytes().header(1, 0); };
    const auto two = [] { return Bytes().header(2, 0); };
    refuse(one().tensor("t", {}, F32, 0).tail(64), "tensor 't' at byte 24 has 0 dimensions");
    refuse(one().tensor("t", {1, 1, 1, 1, 1}, F32, 0).tail(64), "has 5 dimensions");
    refuse(one().tensor("t", {4, 0}, F32, 0).tail(64), "dimension 1 of size 0");
    refuse(one().tensor("t", {uint64_t{1} << 32, uint64_t{1} << 32}, F32, 0).tail(64),
           "more than 2^60 elements");
    refuse(one().tensor("t", {~uint64_t{0}}, F32, 0).tail(64), "more than 2^60 elements");
    refuse(one().tensor("t", {33}, Q8_0, 0).tail(64), "not a multiple of the 32 in a block of q8_0");
    refuse(one().tensor("t", {256}, IQ1_S, 0).tail(999),
           "has type IQ1_S (19), which slimrt does not read; it reads F32", ErrorCode::unsupported);
    refuse(one().tensor("t", {4}, I32, 0).tail(64), "has type I32 (26)", ErrorCode::unsupported);
    refuse(one().tensor("t", {4}, 99, 0).tail(64), "has type 99");
    refuse(one().tensor("t", {4}, F32, 8).tail(64), "not aligned to 32");
    refuse(one().tensor("t", {4}, F32, 64).tail(64),
           "16 bytes of data at offset 64, but only 64 bytes follow");
    refuse(one().tensor("t", {4}, F32, ~uint64_t{31}).tail(64), "but only 64 bytes follow");
    refuse(one().tensor("t", {4}, F32, 0), "but only 0 bytes follow");
    refuse(two().tensor("t", {4}, F32, 0).tensor("t", {4}, F32, 32).tail(64),
           "tensor 't' at byte 57 appears twice");
    refuse(two().tensor("b", {4}, F32, 32).tensor("a", {9}, F32, 0).tail(64),
           "tensor 'a' at byte 57 shares bytes with");
}

void test_values() {
    Bytes bytes;
    bytes.header(2, 8).entry("u", UINT32, 7u).entry("i", INT32, -7).entry("f", FLOAT32, 0.5f);
    bytes.entry("inf", FLOAT32, std::numeric_limits<float>::infinity()).entry("yes", BOOL, true);
    bytes.entry("huge", UINT64, ~uint64_t{0}).text("s").put(uint32_t{STRING}).text("text");
    bytes.entry("a", ARRAY, INT32).put(uint64_t{2}).put(1).put(-2);
    bytes.tensor("w", {2, 3, 4}, F32, 64).tensor("q", {64}, Q8_0, 192).tail(260);
    const GgufFile file = bytes.parse();

    check(file.integer("u", 0, 10) == 7 && file.integer("i", -10, 10) == -7, "integers");
    check(file.number("f") == 0.5 && file.number("i") == -7, "numbers");
    check(file.string("s") == "text", "string");
    check(file.integer("none", 0, 1, 9) == 9 && file.string("none", "x") == "x", "defaults");
    check(file.has("u") && !file.has("none"), "has");

    const auto refuse_value = [&](const std::function<void()>& run, const std::string& words) {
        check_refused(run, ErrorCode::format, words);
    };
    refuse_value([&] { file.integer("none", 0, 1); }, "key 'none' is missing");
    refuse_value([&] { file.integer("u", 0, 6); }, "key 'u' is 7, expected 0 to 6");
    refuse_value([&] { file.integer("huge", 0, 6); }, "key 'huge' is 18446744073709551615, expected");
    refuse_value([&] { file.integer("f", 0, 6, 1); }, "key 'f' is a float, expected an integer");
    refuse_value([&] { file.number("inf"); }, "a finite number");
    refuse_value([&] { file.number("a"); }, "key 'a' is an array of int32, expected a number");
    refuse_value([&] { file.string("u"); }, "is an unsigned integer, expected a string");

    const slimrt::Tensor& w = file.tensors().at("w");
    check(w.dtype == DType::F32 && w.rows == 12 && w.cols == 2 && w.bytes() == 96, "shape of w");
    const slimrt::Tensor& q = file.tensors().at("q");
    check(q.dtype == DType::Q8_0 && q.rows == 1 && q.cols == 64 && q.bytes() == 68, "shape of q");
    check(q.data - w.data == 128, "offsets");

    check(file.keys().size() == 8 && file.keys()[0].name == "u" && file.keys()[0].type == UINT32, "keys");
    const slimrt::GgufTensorInfo& first = file.tensor_list().at(0);
    check(first.name == "w" && first.sizes == std::vector<int64_t>{2, 3, 4}, "tensors as listed");
    check(file.bytes().data() + first.position == w.data, "positions");
}

void test_metadata_alone() {
    Bytes bytes;
    bytes.header(1, 1).entry("k", UINT32, 7u).tensor("t", {256}, IQ1_S, 0);
    const auto* data = reinterpret_cast<const std::byte*>(bytes.data.data());
    const GgufFile file = GgufFile::parse(data, bytes.data.size(), "m", slimrt::GgufPart::metadata);
    check(file.integer("k", 0, 9) == 7 && file.tensors().empty(), "metadata alone");
}

void test_types_that_are_only_described() {
    Bytes bytes;
    bytes.header(2, 0).tensor("t", {256, 3}, IQ1_S, 0).tensor("f", {4}, F32, 160).tail(176);
    refuse(bytes, "tensor 't' at byte 24 has type IQ1_S", ErrorCode::unsupported);
    const auto* data = reinterpret_cast<const std::byte*>(bytes.data.data());
    const auto described = slimrt::GgufPart::described;
    const GgufFile file = GgufFile::parse(data, bytes.data.size(), "m", described);
    check(file.tensors().size() == 1 && file.tensor_list().size() == 2, "described");
    check(file.tensor_list()[0].type == DType(IQ1_S) && file.tensor_list()[0].sizes[1] == 3, "its type");
    check_refused([&] { GgufFile::parse(data, bytes.data.size() - 32, "m", described); }, ErrorCode::format,
                  "16 bytes of data at offset 160");
    bytes = Bytes().header(1, 0).tensor("t", {256}, 99, 0).tail(64);
    check_refused(
        [&] {
            GgufFile::parse(reinterpret_cast<const std::byte*>(bytes.data.data()), bytes.data.size(), "m",
                            described);
        },
        ErrorCode::format, "has type 99");
}

}  // namespace

int main() {
    test_header();
    test_metadata();
    test_tensors();
    test_values();
    test_metadata_alone();
    test_types_that_are_only_described();
    std::printf("ok\n");
}
