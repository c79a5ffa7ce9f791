// The k largest of each row of logits, largest first, the lower index first among equals. One pass: a vector of maxima decides
// whether a block holds anything of interest, which it seldom does.
#pragma once
#include "types.h"

namespace sharesd {

template <typename T>
void top_k(const T* x, int64_t* out, int64_t R, int64_t V, int64_t k, int threads) {
  using W = typename Wide<T>::type;
  constexpr int64_t L = 256;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < R; ++r) {
    const T* row = x + r * V;
    int64_t* best = out + r * k;
    std::vector<W> values(k, -std::numeric_limits<W>::infinity());
    int64_t found = 0;
    for (int64_t begin = 0; begin < V; begin += L) {
      const int64_t end = std::min(V, begin + L);
      W top = -std::numeric_limits<W>::infinity();
      for (int64_t v = begin; v < end; ++v) {
        const W w = widen(row[v]);
        top = w > top ? w : top;
      }
      if (found == k && !(top > values[k - 1])) continue;
      for (int64_t v = begin; v < end; ++v) {
        const W w = widen(row[v]);
        if (found == k && !(w > values[k - 1])) continue;
        int64_t at = found < k ? found++ : k - 1;
        for (; at > 0 && w > values[at - 1]; --at) values[at] = values[at - 1], best[at] = best[at - 1];
        values[at] = w, best[at] = v;
      }
    }
  }
}

// The index of the largest of each row, the first among equals.
template <typename T>
void arg_max(const T* x, int64_t* out, int64_t R, int64_t V, int threads) {
  using W = typename Wide<T>::type;
  using Vw = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W), kBlock = 16 * L;
#pragma omp parallel for schedule(static) num_threads(R > 1 ? threads : 1)
  for (int64_t r = 0; r < R; ++r) {
    const T* row = x + r * V;
    W top = -std::numeric_limits<W>::infinity();
    out[r] = 0;
    for (int64_t begin = 0; begin < V; begin += kBlock) {
      const int64_t end = std::min(V, begin + kBlock);
      if (end - begin == kBlock) {
        Vw most;
        load(row + begin, &most);
        for (int64_t v = begin + L; v < end; v += L) {
          Vw next;
          load(row + v, &next);
          most = next > most ? next : most;
        }
        bool any = false;
        for (int64_t i = 0; i < L; ++i) any |= most[i] > top;
        if (!any) continue;
      }
      for (int64_t v = begin; v < end; ++v) {
        const W w = widen(row[v]);
        if (w > top) top = w, out[r] = v;
      }
    }
  }
}

}  // namespace sharesd
