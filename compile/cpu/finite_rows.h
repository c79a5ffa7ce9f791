// Leading rows of each text whose logits are numbers: no NaN, no +infinity, and one that is finite.
#pragma once
#include "dtypes.h"

namespace sharesd {

template <typename T>
bool is_finite_row(const T* row, int64_t V) {
  using W = typename Wide<T>::type;
  using Vw = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W);
  constexpr W infinity = std::numeric_limits<W>::infinity();
  Vw wrong = {}, top = Vw{} - infinity;
  int64_t v = 0;
  for (Vw x; v + L <= V; v += L) {
    load(row + v, &x);
    wrong = select(x < infinity, wrong, x);  // NaN compares false
    top = greater(x, top);
  }
  bool is_right = true, has_number = false;
  for (int64_t i = 0; i < L; ++i) is_right &= wrong[i] < infinity, has_number |= top[i] > -infinity;
  for (; v < V; ++v) {
    const W x = widen(row[v]);
    is_right &= x < infinity, has_number |= x > -infinity;
  }
  return is_right && has_number;
}

// out[b]: how many of the first num_new[b] rows path[b] of x [B, T, V] are such, from the first on. Without paths, rows 0, 1, ...
template <typename T>
void count_finite(const T* x, const int64_t* path, const int64_t* num_new, int64_t* out, int64_t B, int64_t path_stride,
                  int64_t num_stride, int64_t x_b, int64_t x_t, int64_t V, int threads) {
#pragma omp parallel for schedule(static) num_threads(B > 1 ? threads : 1)
  for (int64_t b = 0; b < B; ++b) {
    int64_t t = 0;
    while (t < num_new[b * num_stride] && is_finite_row(x + b * x_b + (path ? path[b * path_stride + t] : t) * x_t, V)) ++t;
    out[b] = t;
  }
}

}  // namespace sharesd
