// llama.cpp on a GPU by its C API, beside gpu.py: prompts, then steps after 16 and after 16384 tokens;
// medians. Links libllama and ggml built with -DGGML_CUDA=ON; the argument is a GGUF.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void fail(const char* what) {
    std::fprintf(stderr, "gpu_llama: %s failed\n", what);
    std::exit(1);
}

struct Text {
    llama_context* context;
    std::vector<llama_token> tokens = std::vector<llama_token>(16384);

    /// Seconds.
    double prompt(int n) {
        llama_memory_clear(llama_get_memory(context), true);
        const double start = now();
        for (int i = 0; i < n; i += 2048)
            if (llama_decode(context, llama_batch_get_one(tokens.data() + i, std::min(2048, n - i))))
                fail("a prompt");
        llama_synchronize(context);
        return now() - start;
    }
    double step() {
        std::vector<double> seconds;
        for (int i = 0; i < 40; ++i) {
            const double start = now();
            llama_token token = 3 + i;
            if (llama_decode(context, llama_batch_get_one(&token, 1))) fail("a step");
            llama_synchronize(context);
            llama_get_logits_ith(context, -1);
            seconds.push_back(now() - start);
        }
        std::sort(seconds.begin(), seconds.end());
        return seconds[seconds.size() / 2];
    }
};

void measure(llama_model* model, ggml_type type) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 16384 + 256;
    params.n_batch = 2048;
    params.n_ubatch = 512;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = params.type_v = type;
    params.no_perf = true;
    Text text{llama_init_from_model(model, params)};
    if (!text.context) fail("the context");
    for (size_t i = 0; i < text.tokens.size(); ++i) text.tokens[i] = llama_token(3 + i % 1000);
    const char* const name = ggml_type_name(type);
    for (const int n : {512, 1024, 512, 1024})
        std::printf("%s prompt of %d: %.4f s\n", name, n, text.prompt(n));
    text.prompt(16);
    std::printf("%s step at 16: %.6f s\n", name, text.step());
    std::printf("%s prompt of 16384: %.3f s\n", name, text.prompt(16384));
    std::printf("%s step at 16384: %.6f s\n", name, text.step());
    llama_free(text.context);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) fail("reading the arguments: gpu_llama MODEL");
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 99;
    llama_model* const model = llama_model_load_from_file(argv[1], params);
    if (!model) fail("the model");
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) measure(model, type);
}
