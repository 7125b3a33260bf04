// A cuBLASLt that multiplies nothing: each function fails where a test says so, else does nothing and says
// that all is well.
#include <cstddef>
#include <cstdint>

extern "C" {

int fails_at = 1;    // 1: its start, 2: the choice of an algorithm, 3: a product; 4: it has no algorithm
int n_products = 0;  // that it was asked for

int cublasLtCreate(void** handle) { return *handle = &fails_at, fails_at == 1; }
int cublasLtDestroy(void*) { return 0; }
int cublasLtMatmulDescCreate(void** made, int, int) { return *made = &fails_at, 0; }
int cublasLtMatmulDescDestroy(void*) { return 0; }
int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { return *made = &fails_at, 0; }
int cublasLtMatrixLayoutDestroy(void*) { return 0; }
int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulPreferenceCreate(void** made) { return *made = &fails_at, 0; }
int cublasLtMatmulPreferenceDestroy(void*) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
    return *found = fails_at != 4, fails_at == 2;
}
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                   const void*, void*, void*, void*, const void*, void*, size_t, void*) {
    return ++n_products, fails_at == 3;
}
}
