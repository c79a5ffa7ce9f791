// Calibrated scores of draft trees while they are expanded: see compile/tree_expand.py.
//
// Legend as in tree_expand.h; R ranges of the model's probabilities.
#pragma once
#include <algorithm>
#include <cmath>

#include "tree_expand.h"

namespace sharesd {

// Calibrated probability: `calibrated_probs` are those of 0 and of the middles of R equal ranges.
inline float interpolate(float draft_prob, const float* calibrated_probs, int64_t R) {
  const float at = draft_prob * R - 0.5f;
  if (!(at >= 0)) {
    const float share = std::max(0.0f, 2 * draft_prob * R);
    return calibrated_probs[0] + (calibrated_probs[1] - calibrated_probs[0]) * share;
  }
  const int64_t low = std::min(static_cast<int64_t>(at), R - 1);
  if (low == R - 1) return calibrated_probs[R];
  return calibrated_probs[1 + low] + (calibrated_probs[2 + low] - calibrated_probs[1 + low]) * (at - low);
}

// Children [B, F, k] of the next level, best first: the model's probability goes into `draft_probs` [B, C], the log of the
// calibrated one into `logp`. With a spread, the former is the probability that errors of this spread leave a child before the
// best other one, or put it there.
inline void rescore_children(const int64_t* levels, const float* calibrated_probs, float* draft_probs, float* logp, int64_t R,
                             int64_t B, int64_t F, int64_t k, int64_t C, float spread) {
  for (int64_t b = 0; b < B; ++b) {
    const int64_t first = levels[b] ? k + (levels[b] - 1) * k * k : 0;
    if (levels[b] < 0 || first + F * k > C) continue;  // deeper than any draft
    for (int64_t i = 0; i < F * k; i += k) {
      float* some = logp + (b * F * k + i);
      const float best = some[0], second = some[std::min<int64_t>(1, k - 1)];
      for (int64_t j = 0; j < k; ++j) {
        float& it = draft_probs[b * C + first + i + j] = std::exp(some[j]);
        if (spread > 0 && it > 0) it = 1 / (1 + std::exp(((j ? best : second) - some[j]) / spread));
        some[j] = std::log(interpolate(it, calibrated_probs, R));
      }
    }
  }
}

// The N best of all nodes, best first: probabilities by the model and of being accepted, and parents (-1: the root).
inline void best_nodes(const Nodes& nodes, const float* draft_probs, float* best_draft_probs, float* accept_probs,
                       int64_t* parents, int64_t k, int64_t B, int64_t C, int64_t D, int64_t N) {
  std::vector<int64_t> ranks(C);
  for (int64_t b = 0; b < B; ++b) {
    const std::vector<int64_t> best = largest_first(nodes.scores + b * C, C, N);
    for (int64_t n = 0; n < N; ++n) {
      const int64_t to = b * N + n;
      best_draft_probs[to] = accept_probs[to] = 0.0f, parents[to] = -1;
      if (n >= static_cast<int64_t>(best.size())) continue;
      const int64_t node = best[n], level = node < k ? 0 : (node - k) / (k * k) + 1;
      ranks[node] = n;
      best_draft_probs[to] = draft_probs[b * C + node], accept_probs[to] = std::exp(nodes.scores[b * C + node]);
      if (level) parents[to] = ranks[nodes.ancestors[(b * C + node) * D + level - 1]];
    }
  }
}

}  // namespace sharesd
