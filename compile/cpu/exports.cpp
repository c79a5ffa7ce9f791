// What Python calls: every kernel for every dtype.
#include "attention.h"
#include "linear.h"
#include "lowbit.h"
#include "noise.h"
#include "stack.h"
#include "topk.h"

using sharesd::bf16;
using sharesd::f16;

// attend: shape is B, T, H, K, S, d, threads; strides (elements) are q row, q token, k row, k token, v row, v token.
#define EXPORT(NAME, T)                                                                                                \
  extern "C" void attend_##NAME(const T* q, const T* k, const T* v, T* kc, T* vc, const int64_t* lengths, T* out,       \
                                const int64_t* depth, const int64_t* path, const int64_t* shape,                        \
                                const int64_t* strides, double scale, int64_t window, double softcap) {                 \
    sharesd::attend(q, k, v, kc, vc, lengths, out, depth, path, shape, strides, scale, window, softcap);               \
  }                                                                                                                    \
  extern "C" void keep_rows_##NAME(const int64_t* kv, int64_t layers, const int64_t* heads, const int64_t* sizes,       \
                                   int64_t B, int64_t S, const int64_t* lengths, const int64_t* path,                   \
                                   const int64_t* num, int64_t P) {                                                     \
    sharesd::keep_rows<T>(kv, layers, heads, sizes, B, S, lengths, path, num, P);                                      \
  }                                                                                                                    \
  extern "C" void linear_##NAME(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K,           \
                                int64_t threads) {                                                                     \
    sharesd::linear(x, w, bias, y, M, N, K, static_cast<int>(threads));                                                \
  }                                                                                                                    \
  extern "C" void low_linear_##NAME(const T* x, const uint8_t* codes, const bf16* scales, const bf16* offsets,          \
                                    const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t G, int64_t bits,      \
                                    int64_t threads) {                                                                 \
    sharesd::low_linear(x, codes, scales, offsets, bias, y, M, N, K, G, bits, static_cast<int>(threads));              \
  }                                                                                                                    \
  extern "C" void arg_max_##NAME(const T* x, int64_t* out, int64_t R, int64_t V, int64_t threads) {                     \
    sharesd::arg_max(x, out, R, V, static_cast<int>(threads));                                                         \
  }                                                                                                                    \
  extern "C" void top_k_##NAME(const T* x, int64_t* out, int64_t R, int64_t V, int64_t k, int64_t threads) {            \
    sharesd::top_k(x, out, R, V, k, static_cast<int>(threads));                                                        \
  }                                                                                                                    \
  extern "C" void run_stack_##NAME(const sharesd::Step* step, double eps, double scale, double softcap) {               \
    sharesd::run_stack<T>(*step, eps, scale, softcap);                                                                 \
  }
EXPORT(bfloat16, bf16)
EXPORT(float16, f16)
EXPORT(float32, float)
EXPORT(float64, double)

extern "C" void gumbel_float32(const int64_t* keys, const int64_t* multipliers, float* out, int64_t R, int64_t J, int64_t V,
                               int64_t threads) {
  sharesd::gumbel(keys, multipliers, out, R, J, V, static_cast<int>(threads));
}
