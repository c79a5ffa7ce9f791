// Accepted path through a draft tree: from the root to each child that equals the target's token.
#pragma once
#include "dtypes.h"

namespace sharesd {

// T rows (the root, then nodes, parents first), row t at the end of path[t][0..depth[t]]; tokens [B, T - 1] of the nodes,
// target [B, T] the target's token after each row. out [B, 1 + 2T]: number of accepted rows, the target's token after each, and
// the rows, of which the last is repeated.
inline void accept_path(const int64_t* tokens, const int64_t* depth, const int64_t* path, const int64_t* target, int64_t* out,
                 int64_t B, int64_t T, int64_t P) {
  for (int64_t b = 0; b < B; ++b, tokens += T - 1, depth += T, path += T * P, target += T, out += 1 + 2 * T) {
    int64_t kept = 0;
    for (int64_t row = 0, next = 0; next < T; ++next) {
      const bool child = next > 0 && depth[next] == depth[row] + 1 && path[next * P + depth[row]] == row;
      if (next == 0 || (child && tokens[next - 1] == target[row])) {
        row = next;
        out[1 + T + kept++] = next;
      }
    }
    out[0] = kept;
    for (int64_t t = 0; t < T; ++t) {
      if (t >= kept) out[1 + T + t] = T - 1;
      out[1 + t] = target[out[1 + T + t]];
    }
  }
}

}  // namespace sharesd
