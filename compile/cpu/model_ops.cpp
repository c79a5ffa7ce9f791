// Functions of a model that Python calls, for one dtype: build with -DDTYPE=bfloat16, float16, float32 or float64.
#include "attention.h"
#include "block_rows.h"
#include "head_step.h"
#include "linear.h"
#include "lowbit.h"
#include "pack.h"
#include "hqq_solver.h"
#include "decoder_stack.h"

// attend: shape is B, T, H, K, S, d, threads, P, q8; strides (elements) are q row, q token, k row, k token, v row, v token.
#define EXPORT(NAME, T)                                                                                                \
  extern "C" void attend_##NAME(const T* q, const T* k, const T* v, void* kc, void* vc, const int64_t* lengths, T* out, \
                                const int64_t* depth, const int64_t* path, const int64_t* shape,                        \
                                const int64_t* strides, double scale, int64_t window, int64_t recent, double softcap,   \
                                const T* sinks) {                                                                      \
    sharesd::attend(q, k, v, kc, vc, lengths, out, depth, path, shape, strides, scale, window, recent, softcap, sinks); \
  }                                                                                                                    \
  extern "C" void compact_kv_##NAME(const int64_t* kv, int64_t layers, const int64_t* heads, const int64_t* sizes,       \
                                   int64_t B, int64_t S, int64_t q8, const int64_t* lengths, const int64_t* path,       \
                                   const int64_t* num, int64_t P) {                                                     \
    sharesd::compact_kv<T>(kv, layers, heads, sizes, B, S, q8 != 0, lengths, path, num, P);                             \
  }                                                                                                                    \
  extern "C" void linear_##NAME(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K,           \
                                int64_t threads) {                                                                     \
    sharesd::linear(x, w, bias, y, M, N, K, static_cast<int>(threads));                                                \
  }                                                                                                                    \
  extern "C" void pack_rows_##NAME(const T* w, int64_t pitch, T* to, int64_t N, int64_t K, int64_t* finite,             \
                                   int64_t threads) {                                                                  \
    *finite = sharesd::pack_rows(w, pitch, to, N, K, static_cast<int>(threads));                                       \
  }                                                                                                                    \
  extern "C" void widened_linear_##NAME(const T* x, const sharesd::bf16* w, T* y, int64_t M, int64_t N, int64_t K,      \
                                        int64_t threads) {                                                             \
    if constexpr (std::is_same_v<T, float>)                                                                            \
      sharesd::linear(x, w, static_cast<const T*>(nullptr), y, M, N, K, static_cast<int>(threads));                    \
  }                                                                                                                    \
  extern "C" void pack_to_widen_##NAME(const sharesd::bf16* w, int64_t pitch, sharesd::bf16* to, int64_t N, int64_t K,   \
                                       int64_t* finite, int64_t threads) {                                             \
    *finite = sharesd::pack_rows<sharesd::bf16, 1, 16>(w, pitch, to, N, K, static_cast<int>(threads));                  \
  }                                                                                                                    \
  extern "C" void quantized_linear_##NAME(const T* x, const uint8_t* w, const T* bias, T* y, int64_t M, int64_t N,           \
                                    int64_t K, int64_t G, int64_t bits, int64_t threads) {                             \
    sharesd::quantized_linear(x, w, bias, y, M, N, K, G, bits, static_cast<int>(threads));                                   \
  }                                                                                                                    \
  extern "C" void block_linear_##NAME(const T* x, const uint8_t* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, \
                                      const sharesd::BlockTable* table, sharesd::BlockKernel kernel,                   \
                                      int64_t threads) {                                                               \
    sharesd::block_linear(x, w, bias, y, M, N, K, *table, kernel, static_cast<int>(threads));                          \
  }                                                                                                                    \
  extern "C" void solve_hqq_##NAME(const T* weights, uint8_t* codes, float* scales, float* zeros, int64_t N, int64_t K,     \
                               int64_t G, int64_t bits, int64_t threads) {                                             \
    sharesd::solve_hqq(weights, codes, scales, zeros, N, K, G, bits, static_cast<int>(threads));                           \
  }                                                                                                                    \
  extern "C" void run_stack_##NAME(const sharesd::Step* step, double eps, double scale, double softcap) {               \
    sharesd::run_stack<T>(*step, {eps, scale, softcap});                                                               \
  }                                                                                                                    \
  extern "C" void run_head_##NAME(const sharesd::HeadStep* step, double eps, double scale, double softcap) {            \
    sharesd::run_head<T>(*step, {eps, scale, softcap});                                                                \
  }
#define EXPORT_NAMED(NAME) EXPORT(NAME, sharesd::names::NAME)
EXPORT_NAMED(DTYPE)
