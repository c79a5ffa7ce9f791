// Top-p: the tokens with most of the mass of each row of logits.
#pragma once
#include "dtypes.h"

namespace sharesd {

// Copy rows [R, V], with -infinity at tokens less likely than those with a share p [R] of the mass. Masses are integers, in
// units of 2^-40 of the likeliest token's, so that sums depend on no order; equal tokens stay or go together.
template <typename T>
void top_p(const T* x, const double* p, T* out, int64_t R, int64_t V, int threads) {
  using Vw = typename Vec<T>::type;
  constexpr int64_t L = 64 / sizeof(T), kBuckets = 1 << 11;
#pragma omp parallel num_threads(R > 1 ? threads : 1)
  {
    std::vector<uint32_t> order(V + L);  // of a token: the bits of its depth below the likeliest, as a float
    std::vector<int64_t> mass(V + L), buckets(kBuckets);
    std::vector<std::pair<uint32_t, int64_t>> last;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < R; ++r) {
      const T* row = x + r * V;
      const auto each = [&](auto&& f) {
        T some[L];
        for (int64_t v = 0; v < V; v += L) {
          const T* from = row + v;
          if (V - v < L) {
            std::fill(some, some + L, -std::numeric_limits<T>::infinity());
            from = std::copy(row + v, row + V, some) - (V - v);
          }
          f(v, get<Vw>(from));
        }
      };
      Vw tops = Vw{} - std::numeric_limits<T>::infinity();
      each([&](int64_t, const Vw& values) { tops = greater(values, tops); });
      const T top = largest(tops);
      int64_t total = 0;
      std::fill(buckets.begin(), buckets.end(), 0);
      each([&](int64_t v, const Vw& values) {
        // + 0, since the bits of -0 are not those of 0.
        const Vw depth = top - values + 0, weight = exp_or_0<T>(-depth);
        T depths[L], weights[L];
        put(depth, depths), put(weight, weights);
        for (int64_t i = 0; i < L; ++i) {
          const float far = static_cast<float>(depths[i]);
          std::memcpy(&order[v + i], &far, 4);
          mass[v + i] = weights[i] > 0 ? static_cast<int64_t>(weights[i] * static_cast<T>(1LL << 40)) : 0;
          total += mass[v + i];
        }
        for (int64_t i = 0; i < L; ++i) buckets[order[v + i] >> 20 & (kBuckets - 1)] += mass[v + i];
      });
      const double need = static_cast<double>(total) * p[r];
      int64_t bucket = 0, held = 0;
      while (bucket < kBuckets && static_cast<double>(held + buckets[bucket]) < need) held += buckets[bucket++];
      uint32_t border = std::numeric_limits<int32_t>::max();
      if (bucket < kBuckets) {
        last.clear();
        for (int64_t v = 0; v < V; ++v)
          if (order[v] >> 20 == static_cast<uint32_t>(bucket)) last.emplace_back(order[v], mass[v]);
        std::sort(last.begin(), last.end());
        for (size_t i = 0; i < last.size(); ++i) {
          border = last[i].first, held += last[i].second;
          if (static_cast<double>(held) >= need) break;
        }
        if (last.empty()) border = 0;
      }
      for (int64_t v = 0; v < V; ++v) out[r * V + v] = order[v] > border ? -std::numeric_limits<T>::infinity() : row[v];
    }
  }
}

}  // namespace sharesd
