// The attention kernels of csrc/kernels/cuda, run by tests/cuda_host, against loops in float64 over the rows
// as they read back; and so that the loops mean what AttentionArgs says, the CPU backend's attention too.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "attention_cases.h"
#include "kernels/cuda/absorbed.h"
#include "kernels/cuda/attention_view.h"

using namespace slimrt;

namespace slimrt::cuda {

void check(cudaError_t result, const char* what) {
    if (result == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorName(result));
    std::exit(1);
}

}  // namespace slimrt::cuda

namespace {

using namespace slimrt::test;

double worst(const Floats& a, const Floats& b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] == b[i]) continue;
        const double d = std::fabs(double(a[i]) - b[i]);
        if (!(d <= most)) most = d;
    }
    return most;
}

using Run = void (*)(const cuda::Device&, const AttentionArgs&, const cuda::AttentionView&, std::byte*);

bool compare(const char* what, const Case& c, const std::vector<Floats>& outs, const Floats& lse,
             const std::vector<Floats>& wanted, const Floats& wanted_lse, double bound) {
    double error = 0;
    for (size_t t = 0; t < outs.size(); ++t) {
        const double e = worst(outs[t], wanted[t]) / c.v_size;
        if (!(e <= error)) error = e;
    }
    const double lse_error = worst(lse, wanted_lse);
    const bool ok = error <= bound && lse_error <= 2 * bound;
    if (!ok || getenv("VERBOSE"))
        std::printf("%s %s: %s: out %.2g, lse %.2g, bound %.2g\n", ok ? "    " : "FAIL", c.name.c_str(), what,
                    error, lse_error, bound);
    return ok;
}

void call(const Case& c, const AttentionArgs& args, const std::vector<AttentionSequence>& sequences, Run run,
          SparseCounts* counts) {
    std::vector<cuda::PlacedSequence> placed;
    constexpr int kShift = 5;
    for (const AttentionSequence& s : sequences)
        placed.push_back(
            {s.table, s.position, s.begin, s.end, s.query + kShift, s.n_queries, s.fresh, s.causal});
    cuda::Device device;
    device.capability = 90, device.processors = c.processors, device.shared_bytes = 227 << 10;
    device.clusters.fill(8);
    size_t bytes = cuda::attention_workspace(device, args);
    if (run == cuda::attention_prefill) bytes = cuda::prefill_workspace(args);  // whatever is chosen
    std::vector<std::byte> workspace(bytes, std::byte{0xff});
    if (run)
        run(device, args, cuda::view_of(args, placed.data(), -kShift, counts), workspace.data());
    else
        cuda::attention(device, args, placed.data(), -kShift, counts, workspace.data());
    cuda::check(cudaDeviceSynchronize(), "waiting");
}

const char* type_name(DType type) { return dtype_info(type).name; }

int failures = 0, runs = 0;

void test(Backend& backend, Case c, const char* what, Run run, double bound) {
    c.name += std::string(" ") + type_name(c.k) + "/" + type_name(c.v);
    Problem p(backend, c);
    std::vector<Floats> wanted = p.outs;
    Floats wanted_lse = p.lse;
    reference(p, wanted, wanted_lse);
    if (!c.lse) wanted_lse = p.lse;
    if (c.sparse == 0) {
        std::vector<Floats> outs = p.outs;
        Floats lse = p.lse;
        const AttentionArgs args = p.with(outs, lse);
        backend.attention(args);
        // Weights of absorbed rows of q8 may have 8 bits.
        const bool absorbs = args.values[0].n_heads == 1 && args.values[0].stored.dtype == DType::Q8;
        const double bound = (absorbs ? 2e-3 : 2e-4) * (1 + c.loud) * c.fresh_size;
        failures += !compare("cpu", c, outs, lse, wanted, wanted_lse, bound);
    }
    std::vector<Floats> outs = p.outs;
    Floats lse = p.lse;
    const AttentionArgs args = p.with(outs, lse);
    const auto counts = std::make_unique<SparseCounts>();  // which kernels write
    call(c, args, p.sequences, run, counts.get());
    failures += !compare(what, c, outs, lse, wanted, wanted_lse, bound);
    if (c.sparse > 0) {
        uint64_t rows = 0;
        for (const int n : c.stored) rows += uint64_t(n) * c.kv;
        const bool ok = counts->rows == rows && counts->skipped > 0 && counts->skipped < rows;
        if (!ok)
            std::printf("FAIL %s: %d of %d rows skipped\n", c.name.c_str(), int(counts->skipped),
                        int(counts->rows));
        failures += !ok;
    }
    ++runs;
}

const DType kTypes[] = {DType::F16,      DType::BF16, DType::Q8, DType::FP8_E4M3,
                        DType::FP8_E5M2, DType::Q4,   DType::Q3, DType::Q2};

/// The kernel that a call goes to.
void test_choice(Backend& b) {
    const auto chosen = [&](Case c, int wider) {
        Problem p(b, c);
        for (ScoreTerm& term : p.scores) term.stored.width += wider;
        std::vector<Floats> outs = p.outs;
        Floats lse = p.lse;
        const AttentionArgs args = p.with(outs, lse);
        cuda::Device device{.capability = 90, .processors = 132, .shared_bytes = 227 << 10};
        device.clusters.fill(8);
        constexpr const char* kNames[] = {"absorbed", "decode", "prefill", "general"};
        return std::string(kNames[int(cuda::attention_kernel(device, args))]);
    };
    const auto expect = [&](Case c, const char* wanted, int wider = 0) {
        const std::string got = chosen(c, wider);
        if (got == wanted) return;
        std::printf("FAIL %s: %s, not %s\n", c.name.c_str(), got.c_str(), wanted);
        ++failures;
    };
    expect({.name = "one query", .stored = {9, 40}, .queries = {1, 1}}, "decode");
    expect({.name = "two queries", .stored = {9, 40}, .queries = {2, 1}}, "prefill");
    expect({.name = "one query, rotated rows", .stored = {9}, .queries = {1}, .n_rot = 64}, "prefill");
    expect({.name = "one query, f32", .stored = {9}, .queries = {1}, .k = DType::F32}, "prefill");
    for (const DType few : {DType::Q4, DType::Q3, DType::Q2}) {
        expect({.name = "few bits", .stored = {9}, .queries = {1}, .dk = 96, .k = few, .v = few}, "decode");
        expect({.name = "few bits of 80", .stored = {9}, .queries = {1}, .dk = 80, .k = few}, "prefill");
    }
    Case channels = {.name = "channels", .stored = {40}, .queries = {1}, .k = DType::Q2, .channels = true};
    expect(channels, "decode");
    channels.v_heads = 2;
    expect(channels, "decode");
    channels.n_rot = 64;
    expect(channels, "decode");
    channels.n_rot = 32;
    expect(channels, "prefill");
    channels.n_rot = 64, channels.interleaved = true;
    expect(channels, "prefill");
    channels.n_rot = 0, channels.k = DType::Q8;
    expect(channels, "prefill");
    channels.kv = 1;  // of K, too few
    expect(channels, "general");
    expect({.name = "odd", .stored = {9}, .queries = {1}, .dk = 12}, "general");
    // Rows wider than their heads begin anywhere.
    expect({.name = "wider by 8", .stored = {9}, .queries = {1}, .whole = true}, "decode", 8);
    expect({.name = "wider by 8, q8", .stored = {9}, .queries = {1}, .k = DType::Q8, .whole = true},
           "prefill", 8);
    expect({.name = "wider by 4", .stored = {9}, .queries = {1}, .whole = true}, "general", 4);
    expect({.name = "absorbed", .stored = {9}, .queries = {1}, .one_value = true}, "absorbed");
    expect({.name = "absorbed, several queries", .stored = {9}, .queries = {3}, .one_value = true},
           "absorbed");
    const std::vector<int> stored = {9, 40};
    test(b, {.name = "one query", .stored = stored, .queries = {1, 1}}, "attention", nullptr, 2e-5);
    test(b, {.name = "few queries", .stored = stored, .queries = {2, 1}}, "attention", nullptr, 6e-3);
    test(b, {.name = "odd", .stored = stored, .queries = {2, 1}, .dk = 12}, "attention", nullptr, 2e-5);
}

/// Several queries of rows that every head reads whole, beside sequences with one.
void test_absorbed_queries(Backend& b) {
    Case c{.name = "absorbed queries",
           .stored = {40, 0, 100, 33},
           .queries = {1, 4, 5, 1},
           .v = DType::F16,
           .one_value = true};
    const auto run = [&](Case c, const char* name) {
        c.name = name;
        test(b, c, "attention", nullptr, 6e-3);
    };
    run(c, "absorbed queries");
    for (const DType type : {DType::BF16, DType::Q8, DType::FP8_E4M3}) {
        c.k = type;
        run(c, "absorbed queries");
    }
    c.k = DType::F16, c.n_rot = 64;
    run(c, "absorbed queries, rotated");
    c.lse = false;
    run(c, "absorbed queries, no lse");
    c.lse = true, c.sinks = true, c.cap = 1.5, c.window = 37, c.relative = true, c.hidden = 3;
    run(c, "absorbed queries, window, cap, sinks");
    c.merge = true;
    run(c, "absorbed queries, merge");
    c = {.name = "",
         .stored = {70, 9},
         .queries = {70, 3},
         .fresh = false,
         .causal = false,
         .one_value = true};
    run(c, "absorbed queries, encoder");
}

/// A sequence with one query costs the same beside one with more: it is read as exactly.
void test_mixed_queries(Backend& b) {
    Case c{.name = "one query beside several", .stored = {100, 90}, .queries = {5, 1}};
    Problem p(b, c);
    std::vector<Floats> wanted = p.outs;
    Floats lse = p.lse;
    reference(p, wanted, lse);
    const size_t last = wanted[0].size() / p.n * (p.n - 1);
    std::vector<Floats> outs = p.outs;
    call(c, p.with(outs, lse), p.sequences, nullptr, nullptr);
    const auto end = [&](const Floats& all) { return Floats(all.begin() + last, all.end()); };
    const double error = worst(end(outs[0]), end(wanted[0]));
    if (error <= 2e-5) return;
    std::printf("FAIL %s: %.2g\n", c.name.c_str(), error);
    ++failures;
}

void test_general(Backend& b) {
    for (const DType type : {DType::F32, DType::Q8, DType::Q4, DType::Q3}) {
        for (Case c : kGeneralCases) {
            for (const int processors : {0, 132}) {  // 0: the rows are in one part
                c.processors = processors;
                c.k = c.v = type;
                test(b, c, "general", cuda::attention_general, 2e-5 * c.loud);
            }
        }
    }
}

double bound_of(const Case& c) {
    const bool rounds = has_groups(c.k) || has_groups(c.v);
    const double loud = std::max(c.loud, 1.0f);
    const double unread = 2 * c.sparse * 6;  // of values up to about 6, whose weights and the others' change
    return unread + loud * (rounds ? 4e-3 : c.k == DType::BF16 || c.v == DType::BF16 ? 1e-4 : 2e-5);
}

void test_decode(Backend& b) {
    const auto run = [&](Case c) {
        c.queries.assign(c.stored.size(), 1);
        test(b, c, "decode", cuda::attention_decode, bound_of(c));
    };
    for (const DType type : kTypes) {
        for (Case c : kDecodeCases) {
            c.k = c.v = type;
            run(c);
        }
    }
    for (const Case& c : kMixedDecodeCases) run(c);
}

/// Of f16 products: queries, weights and what is not stored in 16 bits are rounded to 2^-11 .
double bound_of_many(const Case& c) {
    if (c.k == DType::F32 || c.v == DType::F32) return 2e-5 * std::max(c.loud, 1.0f) * c.fresh_size;
    return 6e-3 * std::max(c.loud, 1.0f) * c.fresh_size;
}

void test_prefill(Backend& b) {
    std::vector<DType> types(std::begin(kTypes), std::end(kTypes));
    types.push_back(DType::F32);
    for (const DType type : types) {
        for (Case c : kPrefillCases) {
            c.k = c.v = type;
            test(b, c, "prefill", cuda::attention_prefill, bound_of_many(c));
        }
    }
    for (const Case& c : kMixedPrefillCases) test(b, c, "prefill", cuda::attention_prefill, bound_of_many(c));
}

}  // namespace

int main() {
    const auto backend = open_cpu_backend({.n_threads = 1});
    test_choice(*backend);
    test_absorbed_queries(*backend);
    test_mixed_queries(*backend);
    test_general(*backend);
    test_decode(*backend);
    test_prefill(*backend);
    std::printf("%d of %d runs failed\n", failures, runs);
    return failures != 0;
}
