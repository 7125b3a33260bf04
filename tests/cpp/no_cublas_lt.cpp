// A cuBLASLt that fails where a test says so, and else multiplies by what the test gives it, or not at all
// and says that all is well.
#include <cstddef>
#include <cstdint>

namespace {

struct Layout {
    uint64_t rows, columns;
    int64_t stride;
    int32_t matrices = 1;
    int64_t step = 0;  // elements from one to the next
};
const Layout& at(void* layout) { return *static_cast<Layout*>(layout); }
const uint16_t* half_at(const void* first, void* layout, int i) {
    return static_cast<const uint16_t*>(first) + i * at(layout).step;
}

}  // namespace

extern "C" {

int fails_at = 1;    // 1: its start, 2: the choice of an algorithm, 3: a product; 4: it has no algorithm
int n_products = 0;  // that it was asked for
/// out [n, m] = x [n, k] weight [m, k]^T, with strides of elements.
void (*multiplies)(const void* weight, int64_t weight_stride, const void* x, int64_t x_stride, float* out,
                   int64_t out_stride, int m, int n, int k, void* stream) = nullptr;

int cublasLtCreate(void** handle) { return *handle = &fails_at, fails_at == 1; }
int cublasLtDestroy(void*) { return 0; }
int cublasLtMatmulDescCreate(void** made, int, int) { return *made = &fails_at, 0; }
int cublasLtMatmulDescDestroy(void*) { return 0; }
int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t rows, uint64_t columns, int64_t stride) {
    return *made = new Layout{rows, columns, stride}, 0;
}
int cublasLtMatrixLayoutDestroy(void* layout) { return delete static_cast<Layout*>(layout), 0; }
int cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* value, size_t) {
    Layout& of = *static_cast<Layout*>(layout);
    if (attribute == 5) of.matrices = *static_cast<const int32_t*>(value);
    if (attribute == 6) of.step = *static_cast<const int64_t*>(value);
    return 0;
}
int cublasLtMatmulPreferenceCreate(void** made) { return *made = &fails_at, 0; }
int cublasLtMatmulPreferenceDestroy(void*) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
    return *found = fails_at != 4, fails_at == 2;
}
int cublasLtMatmul(void*, void*, const void*, const void* weight, void* of_weight, const void* x, void* of_x,
                   const void*, const void*, void*, void* out, void* of_out, const void*, void*, size_t,
                   void* stream) {
    ++n_products;
    for (int i = 0; multiplies && fails_at != 3 && i < at(of_out).matrices; ++i)
        multiplies(half_at(weight, of_weight, i), at(of_weight).stride, half_at(x, of_x, i), at(of_x).stride,
                   static_cast<float*>(out) + i * at(of_out).step, at(of_out).stride,
                   int(at(of_weight).columns), int(at(of_x).columns), int(at(of_weight).rows), stream);
    return fails_at == 3;
}
}
