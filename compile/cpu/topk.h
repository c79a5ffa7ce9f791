// Largest logits of each row. One pass: vectors of maxima exclude blocks without a large value, which most are.
#pragma once
#include "dtypes.h"

namespace sharesd {

// Call `visit(v, w)` for the values w at v of a row, except for blocks without any above `least()` once `full()`.
template <typename T, typename Full, typename Least, typename Visit>
void for_large(const T* row, int64_t V, Full full, Least least, Visit visit) {
  using W = typename Wide<T>::type;
  using Vw = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W), kBlock = 16 * L;
  for (int64_t begin = 0; begin < V; begin += kBlock) {
    const int64_t end = std::min(V, begin + kBlock);
    if (end - begin == kBlock && full()) {
      Vw most, next;
      load(row + begin, &most);
      for (int64_t v = begin + L; v < end; v += L) {
        load(row + v, &next);
        most = greater(next, most);
      }
      if (!any_of(most > least())) continue;
    }
    for (int64_t v = begin; v < end; ++v) visit(v, widen(row[v]));
  }
}

// The k largest of each row, largest first, the lower index first among equals.
template <typename T>
void top_k(const T* x, int64_t* out, int64_t R, int64_t V, int64_t k, int threads) {
  using W = typename Wide<T>::type;
#pragma omp parallel for schedule(static) num_threads(R > 1 ? threads : 1)
  for (int64_t r = 0; r < R; ++r) {
    int64_t* best = out + r * k;
    std::vector<W> values(k, -std::numeric_limits<W>::infinity());
    int64_t found = 0;
    const auto full = [&] { return found == k; };
    const auto least = [&] { return values[k - 1]; };
    for_large(x + r * V, V, full, least, [&](int64_t v, W w) {
      if (found == k && !(w > values[k - 1])) return;
      int64_t at = found < k ? found++ : k - 1;
      for (; at > 0 && w > values[at - 1]; --at) values[at] = values[at - 1], best[at] = best[at - 1];
      values[at] = w, best[at] = v;
    });
  }
}

// top_k, and log probabilities under the softmax of the row; k is at most V.
template <typename T>
void top_logp(const T* x, int64_t* out, typename Wide<T>::type* logp, int64_t R, int64_t V, int64_t k, int threads) {
  using W = typename Wide<T>::type;
  using Vw = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W);
  top_k(x, out, R, V, k, threads);
#pragma omp parallel for schedule(static) num_threads(R > 1 ? threads : 1)
  for (int64_t r = 0; r < R; ++r) {
    const T* row = x + r * V;
    const W top = widen(row[out[r * k]]);
    Vw sums = {};
    int64_t v = 0;
    for (; v + L <= V; v += L) {
      Vw values;
      load(row + v, &values);
      sums += exp_or_0<W>(values - top);
    }
    W sum = sum_of(sums);
    for (; v < V; ++v) sum += std::exp(widen(row[v]) - top);
    const W norm = top + std::log(sum);
    for (int64_t j = 0; j < k; ++j) logp[r * k + j] = widen(row[out[r * k + j]]) - norm;
  }
}

// The index of the largest of each row, the first among equals.
template <typename T>
void arg_max(const T* x, int64_t* out, int64_t R, int64_t V, int threads) {
  using W = typename Wide<T>::type;
#pragma omp parallel for schedule(static) num_threads(R > 1 ? threads : 1)
  for (int64_t r = 0; r < R; ++r) {
    W top = -std::numeric_limits<W>::infinity();
    out[r] = 0;
    const auto least = [&] { return top; };
    for_large(x + r * V, V, [] { return true; }, least, [&](int64_t v, W w) {
      if (w > top) top = w, out[r] = v;
    });
  }
}

}  // namespace sharesd
