// slimrt-bench: what this machine can do, and what slimrt does on it, without Python; one JSON on stdout.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "bench/decode.h"
#include "bench/kernels.h"
#include "bench/machine.h"
#include "core/error.h"
#include "core/gguf.h"
#include "core/processors.h"
#include "kernels/cpu/cpu_backend.h"

namespace slimrt::bench {
namespace {

constexpr const char* kHelp =
    R"(slimrt-bench: a machine's features, bandwidth and kernels, and decoding of a GGUF, as JSON

usage: slimrt-bench [options] [MODEL.gguf]

  MODEL.gguf        also decode with this model, in every cache mode that it can have
  --cache M[,M]     only these caches: kv, k:q8 ...
  --tokens ID[,ID]  the prompt, as token ids (default: 1,...,8)
  --decode N        tokens made after it (default: 32)
  --depth N         tokens cached before decoding is timed (default: the prompt's)
  --threads N[,N]   to measure with (default: 1 and the machine's fast cores; decoding: the last)
  --isa NAME        an instruction set instead of the best one
  --quick           small sizes: shows that all works; its figures mean nothing
  --no-kernels      decode only
)";

template <class Number>
std::vector<Number> numbers(const std::string& text, const char* option, Number least) {
    std::vector<Number> found;
    for (const char *at = text.data(), *end = at + text.size(); at <= end; ++at) {
        Number number{};
        const auto [stop, error] = std::from_chars(at, end, number);
        if (error != std::errc() || number < least || (stop != end && *stop != ','))
            fail(ErrorCode::argument, option, " takes numbers from ", least, " on with commas between, not '",
                 text, "'");
        found.push_back(number);
        at = stop;
    }
    return found;
}

std::vector<std::string> names(const std::string& text) {
    std::vector<std::string> found(1);
    for (const char c : text) c == ',' ? void(found.emplace_back()) : found.back().push_back(c);
    return found;
}

struct Options {
    Effort effort;
    Run run;
    bool kernels = true, help = false;
};

Options read_options(const std::vector<std::string>& arguments) {
    Options o;
    const int fast = default_threads();
    o.effort.threads = fast > 1 ? std::vector{1, fast} : std::vector{1};
    for (size_t i = 0; i < arguments.size(); ++i) {
        const std::string& name = arguments[i];
        const auto value = [&] {
            if (++i == arguments.size()) fail(ErrorCode::argument, name, " needs a value");
            return arguments[i];
        };
        if (name == "--cache")
            o.run.caches = names(value());
        else if (name == "--tokens")
            o.run.prompt = numbers<int32_t>(value(), "--tokens", 0);
        else if (name == "--decode")
            o.run.n = numbers<int64_t>(value(), "--decode", 1)[0];
        else if (name == "--depth")
            o.run.depth = numbers<int64_t>(value(), "--depth", 1)[0];
        else if (name == "--threads")
            o.effort.threads = numbers<int>(value(), "--threads", 1);
        else if (name == "--isa")
            o.effort.isa = o.run.isa = value();
        else if (name == "--quick")
            o.effort.megabytes = 2, o.effort.rows = 64, o.effort.cached = 256, o.effort.turns = 1,
            o.effort.seconds = 0;
        else if (name == "--no-kernels")
            o.kernels = false;
        else if (name == "--help" || name == "-h")
            o.help = true;
        else if (name.starts_with("-") || !o.run.model.empty())
            fail(ErrorCode::argument, "unknown argument '", name, "'; --help lists them");
        else
            o.run.model = name;
    }
    o.run.threads = o.effort.threads.back();
    return o;
}

/// Prints a part as soon as it is there, so that what was measured is not lost when a later one fails.
void print(const char* name, const Json& value, bool first = false) {
    std::printf("%s\"%s\": %s", first ? "{" : ",\n ", name, value.text().c_str());
    std::fflush(stdout);
}

void measure(const Options& o) {
    const auto said = [](const char* what) { std::fprintf(stderr, "slimrt-bench: %s\n", what); };
    if (o.kernels) {
        said("memory");
        print("bandwidth", bandwidth(o.effort));
        said("access to memory");
        print("access", access(o.effort));
        said("weights");
        print("products", products(o.effort));
        said("attention");
        print("attention", attention(o.effort));
    }
    if (!o.run.model.empty()) {
        said("decoding");
        print("model", o.run.model.substr(o.run.model.rfind('/') + 1));
        print("decode", decode(o.run));
    }
}

/// The whole JSON: what failed is said in it too.
int run(const Options& o) {
    cpu::choose_isa(o.effort.isa);  // before anything takes long
    if (!o.run.model.empty()) GgufFile::open(o.run.model);
    print("machine", machine(), true);
    std::string failed;
    try {
        measure(o);
    } catch (const std::exception& error) {
        failed = error.what();
        print("error", failed);
        std::fprintf(stderr, "slimrt-bench: %s\n", failed.c_str());
    }
    std::printf("}\n");
    return failed.empty() ? 0 : 1;
}

}  // namespace
}  // namespace slimrt::bench

int main(int n, char** arguments) {
    using namespace slimrt;
    try {
        const bench::Options options = bench::read_options({arguments + 1, arguments + n});
        if (!options.help) return bench::run(options);
        std::fputs(bench::kHelp, stdout);
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "slimrt-bench: %s\n", error.what());
        return 1;
    }
}
