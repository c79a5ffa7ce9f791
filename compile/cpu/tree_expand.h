// Expansion of draft trees by level, and selection of nodes: see compile/tree_expand.py. Tensor operations take some 25 calls a
// level.
//
// Legend: B rows, F nodes that were expanded, k children of each, C nodes that can be found, D levels, N nodes of a draft at
// most, T = N + 1.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace sharesd {

struct Nodes {  // [B, C] each, ancestors [B, C, D]
  int64_t* tokens;
  float* scores;
  int64_t *ancestors, *places;
};
struct Frontier {  // [B, k] each, paths and slots [B, k, D]
  int64_t* tokens;
  float* scores;
  int64_t *paths, *slots, *depth;
};
struct Draft {  // [B, N], [B, T], [B, T, T], [B, T]
  int64_t *tokens, *depth, *path, *places;
};

// Indices of the `most` largest scores, largest first, the first among equals first.
inline std::vector<int64_t> largest_first(const float* scores, int64_t num, int64_t most) {
  std::vector<int64_t> order(num);
  std::iota(order.begin(), order.end(), 0);
  most = std::min(most, num);
  const auto value = [&](int64_t i) { return scores[i] == scores[i] ? scores[i] : -std::numeric_limits<float>::infinity(); };
  std::partial_sort(order.begin(), order.begin() + most, order.end(), [&](int64_t a, int64_t b) {
    return value(a) > value(b) || (value(a) == value(b) && a < b);
  });
  order.resize(most);
  return order;
}

// Expand the frontier by children `tokens` [B, F, k] with log probabilities `logp`.
inline void expand_tree(int64_t* levels, const Nodes& nodes, const Frontier& frontier, const int64_t* tokens,
                        const float* logp, int64_t B, int64_t F, int64_t k, int64_t C, int64_t D) {
  std::vector<int64_t> paths(k * D), slots(k * D), ancestors(F * k * D);
  std::vector<float> scores(F * k);
  for (int64_t b = 0; b < B; ++b) {
    const int64_t level = levels[b], first = level ? k + (level - 1) * k * k : 0, num = F * k;
    if (level < 0 || level >= D || first + num > C) continue;  // deeper than any draft
    std::fill(paths.begin(), paths.end(), 0), std::fill(slots.begin(), slots.end(), 0);
    if (level) {
      std::memcpy(paths.data(), frontier.paths + b * k * D, F * D * 8);
      std::memcpy(slots.data(), frontier.slots + b * k * D, F * D * 8);
    }
    for (int64_t i = 0; i < num; ++i) {
      scores[i] = (level ? frontier.scores[b * k + i / k] : 0.0f) + logp[b * num + i];
      int64_t* path = ancestors.data() + i * D;
      std::memcpy(path, paths.data() + i / k * D, D * 8);
      path[level] = first + i;
    }
    std::memcpy(nodes.tokens + b * C + first, tokens + b * num, num * 8);
    std::memcpy(nodes.scores + b * C + first, scores.data(), num * 4);
    std::memcpy(nodes.ancestors + (b * C + first) * D, ancestors.data(), num * D * 8);
    const std::vector<int64_t> best = largest_first(scores.data(), num, k);
    for (int64_t j = 0; j < static_cast<int64_t>(best.size()); ++j) {
      const int64_t i = best[j], to = b * k + j, place = level * k + j;
      frontier.tokens[to] = tokens[b * num + i], frontier.scores[to] = scores[i], frontier.depth[to] = level;
      std::memcpy(frontier.paths + to * D, ancestors.data() + i * D, D * 8);
      std::memcpy(frontier.slots + to * D, slots.data() + i / k * D, D * 8);
      frontier.slots[to * D + level] = place;
      nodes.places[b * C + first + i] = place;
    }
    ++levels[b];
  }
}

// Select the best `wanted` of all nodes for the draft.
inline void select_nodes(int64_t wanted, int64_t k, const Nodes& nodes, const Draft& draft, int64_t B, int64_t C, int64_t D,
                   int64_t N) {
  const int64_t T = N + 1, M = std::min(N, C);
  std::vector<int64_t> rows(C);
  for (int64_t b = 0; b < B; ++b) {
    const std::vector<int64_t> kept = largest_first(nodes.scores + b * C, C, M);
    std::fill(rows.begin(), rows.end(), 0);
    for (int64_t m = 0; m < M; ++m) rows[kept[m]] = m + 1;
    int64_t *tokens = draft.tokens + b * N, *depth = draft.depth + b * T, *path = draft.path + b * T * T;
    std::fill(tokens, tokens + N, -1), std::fill(path, path + T * T, 0);
    for (int64_t row = 0; row < T; ++row) depth[row] = row > 0, path[row * T + (T > 1)] = row;
    for (int64_t m = 0; m < M; ++m) {
      const int64_t node = kept[m], row = m + 1;
      draft.places[b * T + row] = nodes.places[b * C + node] + 1;
      if (row > wanted) continue;
      tokens[m] = nodes.tokens[b * C + node];
      depth[row] = node < k ? 1 : (node - k) / (k * k) + 2;
      for (int64_t d = 0; d < D && d + 1 < T; ++d) path[row * T + 1 + d] = rows[nodes.ancestors[(b * C + node) * D + d]];
    }
  }
}

}  // namespace sharesd
