// Draft trees on which a policy decides while they grow: what compile/tree_rescore.py describes.
//
// Legend as in tree_expand.h; R ranges of what a model says.
#pragma once
#include <algorithm>
#include <cmath>

#include "tree_expand.h"

namespace sharesd {

// What experience makes of what a model says: `chances` belong to 0 and to the middles of R equal ranges.
inline float chance_of(float said, const float* chances, int64_t R) {
  const float at = said * R - 0.5f;
  if (!(at >= 0)) return chances[0] + (chances[1] - chances[0]) * std::max(0.0f, 2 * said * R);
  const int64_t low = std::min(static_cast<int64_t>(at), R - 1);
  if (low == R - 1) return chances[R];
  return chances[1 + low] + (chances[2 + low] - chances[1 + low]) * (at - low);
}

// Children [B, F, k] of the coming level, best first: what the model says goes into `said` [B, C], the log of its worth into
// `logp`. It says probabilities; or, with a spread, how likely it is that errors of this spread leave a child before
// the best other one, or put it there.
inline void weigh(const int64_t* levels, const float* chances, float* said, float* logp, int64_t R, int64_t B, int64_t F,
                  int64_t k, int64_t C, float spread) {
  for (int64_t b = 0; b < B; ++b) {
    const int64_t first = levels[b] ? k + (levels[b] - 1) * k * k : 0;
    if (levels[b] < 0 || first + F * k > C) continue;  // deeper than any draft
    for (int64_t i = 0; i < F * k; i += k) {
      float* some = logp + (b * F * k + i);
      const float best = some[0], second = some[std::min<int64_t>(1, k - 1)];
      for (int64_t j = 0; j < k; ++j) {
        float& it = said[b * C + first + i + j] = std::exp(some[j]);
        if (spread > 0 && it > 0) it = 1 / (1 + std::exp(((j ? best : second) - some[j]) / spread));
        some[j] = std::log(chance_of(it, chances, R));
      }
    }
  }
}

// Of the N best of all nodes, best first: what was said, the odds that they are accepted, and their parents (-1: the root).
inline void weighed(const Nodes& nodes, const float* said, float* said_best, float* odds, int64_t* parents, int64_t k, int64_t B,
                    int64_t C, int64_t D, int64_t N) {
  std::vector<int64_t> ranks(C);
  for (int64_t b = 0; b < B; ++b) {
    const std::vector<int64_t> best = largest_first(nodes.scores + b * C, C, N);
    for (int64_t n = 0; n < N; ++n) {
      const int64_t to = b * N + n;
      said_best[to] = odds[to] = 0.0f, parents[to] = -1;
      if (n >= static_cast<int64_t>(best.size())) continue;
      const int64_t node = best[n], level = node < k ? 0 : (node - k) / (k * k) + 1;
      ranks[node] = n;
      said_best[to] = said[b * C + node], odds[to] = std::exp(nodes.scores[b * C + node]);
      if (level) parents[to] = ranks[nodes.ancestors[(b * C + node) * D + level - 1]];
    }
  }
}

}  // namespace sharesd
