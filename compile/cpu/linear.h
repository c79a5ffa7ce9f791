// y = x W^T + b for a few rows of x. Weights are packed so that the lanes of a vector are neighbouring outputs; every output
// is summed over k in order, one accumulator, whatever the number of rows, the tile or the thread. A row's result is
// therefore the same bits in a plain step and in a wide verify step, for every dtype and shape.
//
// Packed weights: [N / L][K / P][L][P], padded with zeros; L lanes (16, or 8 of float64), P = 2 for bfloat16, else 1.
#pragma once
#include "types.h"

namespace sharesd {

typedef uint32_t vuint __attribute__((vector_size(64)));

template <typename T> struct Kernel {  // one step: acc += x[k] * w[k], all lanes
  using W = float;
  using V = vfloat;
  static constexpr int64_t P = 1;
  static inline V weights(const T* w) {
    V v;
    load(w, &v);
    return v;
  }
  static inline void step(V& acc, const T* x, const V& w) { acc += static_cast<float>(*x) * w; }
};
template <> inline vfloat Kernel<float>::weights(const float* w) {
  vfloat v;
  std::memcpy(&v, w, 64);
  return v;
}
template <> struct Kernel<double> {
  using W = double;
  using V = vdouble;
  static constexpr int64_t P = 1;
  static inline V weights(const double* w) {
    V v;
    std::memcpy(&v, w, 64);
    return v;
  }
  static inline void step(V& acc, const double* x, const V& w) { acc += *x * w; }
};
template <> struct Kernel<bf16> {
  using W = float;
  using V = vfloat;
  static constexpr int64_t P = 2;
  static inline vuint weights(const bf16* w) {
    vuint v;
    std::memcpy(&v, w, 64);
    return v;
  }
  static inline void step(V& acc, const bf16* x, const vuint& w) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
#if defined(__AVX512BF16__)
    acc = (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)), (__m512bh)w);
#else
    const uint32_t low = pair << 16, high = pair & 0xffff0000u;
    float a, b;
    std::memcpy(&a, &low, 4);
    std::memcpy(&b, &high, 4);
    acc += a * (vfloat)(w << 16);
    acc += b * (vfloat)(w & 0xffff0000u);
#endif
  }
};

// acc += M rows of x, `x_pitch` apart, times B vector blocks of packed weights: `steps` steps of k, `step` elements apart in
// a block, blocks `block` apart. Meanwhile fetches what lies `ahead` bytes behind.
template <typename T, int M, int B>
inline void multiply(const T* x, int64_t x_pitch, const T* w, int64_t block, int64_t step, int64_t steps, int64_t ahead,
                     typename Kernel<T>::V (&acc)[M][B]) {
  using Kn = Kernel<T>;
  for (int64_t k = 0; k < steps; ++k) {
    decltype(Kn::weights(w)) wv[B];
    for (int b = 0; b < B; ++b) {
      const T* at = w + b * block + k * step;
      wv[b] = Kn::weights(at);
      __builtin_prefetch(reinterpret_cast<const char*>(at) + ahead, 0, 2);
    }
    for (int i = 0; i < M; ++i)
      for (int b = 0; b < B; ++b) Kn::step(acc[i][b], x + i * x_pitch + k * Kn::P, wv[b]);
  }
}

// Rows m..m+M of x against vector blocks n..n+B of the weights; fetches what lies `ahead` bytes behind these.
template <typename T, int M, int B>
void tile(const T* x, const T* w, const T* bias, T* y, int64_t m, int64_t n, int64_t N, int64_t K, int64_t ahead) {
  using W = typename Kernel<T>::W;
  constexpr int64_t P = Kernel<T>::P, L = 64 / sizeof(W);
  typename Kernel<T>::V acc[M][B] = {};
  multiply<T, M, B>(x + m * K, K, w + n * K * L, K * L, L * P, K / P, ahead, acc);
  for (int i = 0; i < M; ++i)
    for (int b = 0; b < B; ++b)
      for (int64_t l = 0; l < std::min(L, N - (n + b) * L); ++l) {
        const int64_t o = (n + b) * L + l;
        narrow(bias ? acc[i][b][l] + static_cast<W>(widen(bias[o])) : acc[i][b][l], y + (m + i) * N + o);
      }
}

// All rows against vector blocks n..n+B, at most R at once, since their sums fill the registers; those beyond read the weights
// again, from cache.
template <typename T, int R, int B>
void rows(const T* x, const T* w, const T* bias, T* y, int64_t n, int64_t M, int64_t N, int64_t K, int64_t ahead) {
  if constexpr (R > 1)
    if (M <= (M + R - 1) / R * (R - 1))  // fewer at once take as many passes, and a short last one wastes the most
      return rows<T, R - 1, B>(x, w, bias, y, n, M, N, K, ahead);
  int64_t m = 0;
  for (; m + R <= M; m += R) tile<T, R, B>(x, w, bias, y, m, n, N, K, ahead);
  if constexpr (R > 1)
    if (m < M) rows<T, R - 1, B>(x + m * K, w, bias, y + m * N, n, M - m, N, K, ahead);
}

template <typename T> constexpr int64_t lanes() { return 64 / sizeof(typename Kernel<T>::W); }

// Vector blocks begin..end of the outputs; several threads may share a product. Processors foresee a stream of memory to the
// end of a page only, so what comes is fetched by instruction. A row or two wait for memory, which gives most where six
// blocks are read at once. Up to nine rows reading hides behind arithmetic, best with one block after the other, each
// fetched while the one before is multiplied; with the last, `next`, where this thread will read then, if that is known.
// With more rows, which read weights again, two blocks at once spare loads of x and lie in cache still.
template <typename T>
void linear_blocks(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t begin, int64_t end,
                   const void* next = nullptr) {
  const int64_t block = K * lanes<T>() * sizeof(T);
  int64_t n = begin;
  if (M <= 2)
    for (; n + 6 <= end; n += 6) rows<T, 2, 6>(x, w, bias, y, n, M, N, K, 1024);
  if (M > 9)
    for (; n + 2 <= end; n += 2) rows<T, 9, 2>(x, w, bias, y, n, M, N, K, 2 * block);
  for (; n < end; ++n) {
    const int64_t here = reinterpret_cast<intptr_t>(w) + n * block;
    rows<T, 9, 1>(x, w, bias, y, n, M, N, K, n + 1 < end || !next ? block : reinterpret_cast<intptr_t>(next) - here);
  }
}

// The part of `total` blocks which a thread of `threads` takes.
inline int64_t share(int64_t total, int64_t thread, int64_t threads) { return total * thread / threads; }

template <typename T>
void linear(const T* x, const T* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int threads) {
  const int64_t blocks = (N + lanes<T>() - 1) / lanes<T>();
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    linear_blocks(x, w, bias, y, M, N, K, share(blocks, me, all), share(blocks, me + 1, all));
  }
}

}  // namespace sharesd
