// The gated delta rule (Yang et al. 2024, arXiv 2412.06464) of one layer: for each value head a state matrix S [value, key], by which
// a token with key k, value v, decay g and rate b moves it to S' = g S + b (v - g S k) k^T, and reads S' q.
//
// A row has one matrix per head, which holds its first `held` tokens, and the inputs of its last tokens in a ring (see
// sharesd/kvcache/recurrent.py). A step first goes through the tokens that the matrix lacks, and then through its own. So to undo
// a draft is to move a length. The matrix is stored where a text is certain. Each line of a matrix is computed by itself: it is
// read once, stays in registers over all tokens, and has one order of additions whatever the number of tokens. Nodes of a tree
// start from the line of their parent.
#pragma once
#include "attention.h"

namespace sharesd {

// native_structs.py has this struct, field by field.
struct Delta {
  int64_t key_heads, value_heads, key_size, value_size;
  int64_t tiled;  // value head h reads key head h % key_heads; otherwise neighbouring value heads share one
  int64_t width;  // inputs of the convolution before
  const void* kernel;  // [width, channels], the weights of a token's own input last
  const void* decay;   // of the wide type, as the next: -exp(A_log) [value_heads]
  const void* dt_bias;  // [value_heads]
  const void* norm;  // [value_size]: weights of the norm of each head's output
  int64_t channels() const { return 2 * key_heads * key_size + value_heads * value_size; }
  int64_t inputs() const { return channels() + 2 * value_heads; }  // of a token in the ring: channels, rates, decays
  int64_t outputs() const { return value_heads * value_size; }
  int64_t projected() const { return inputs() + outputs(); }  // of the first linear: channels, gates, rates, decays
  // Numbers of a line in memory, of which those after `key_size` are 0: 16 times a power of two.
  int64_t line() const {
    int64_t size = 16;
    while (size < key_size) size *= 2;
    return size;
  }
  int64_t mixed() const { return 2 * key_heads * line() + outputs(); }  // queries, keys and values of a token
  int64_t key_head(int64_t h) const { return tiled ? h % key_heads : h / (value_heads / key_heads); }
};

// A token that moves the state of a row.
struct DeltaToken {
  int64_t slot, parent;  // number of the token before, -1: the row's matrix
  int64_t t, depth;  // its path is that of the step's token t, up to this depth; t < 0: it is in the text
  int64_t out;  // the step's token that it is, -1: an earlier one
};

// Tokens of a row's step: those that its matrix lacks, then its own.
struct DeltaPlan {
  std::vector<DeltaToken> tokens;
  int64_t first_row = 0;  // of the first token in the buffers that all rows share
  int64_t stored = -1;  // the matrix is stored after this token; -1: not
  int64_t held = 0;  // tokens that it then holds

  // `certain`: tokens that are known to be part of the text, those of this step included.
  void make(const AttentionShape& z, int64_t b, int64_t length, int64_t before, int64_t certain, int64_t ring, int64_t width) {
    tokens.clear();
    stored = -1, held = before;
    if (length < 0) return;  // a row without a text
    const bool known = before <= length && length - before <= ring - width + 1;
    const int64_t first = known ? before : length;
    const auto add = [&](int64_t slot, int64_t parent, int64_t t, int64_t depth, int64_t out) {
      tokens.push_back({slot, parent, t, depth, out});
      return static_cast<int64_t>(tokens.size()) - 1;
    };
    int64_t last = -1;
    for (int64_t slot = first; slot < length; ++slot) last = add(slot, last, -1, 0, -1);
    const int64_t of_text = last;
    for (int64_t t = 0; t < z.T; ++t) {
      if (!z.tree.path) {
        last = add(length + t, last, -1, 0, t);
        continue;
      }
      last = of_text;
      for (int64_t depth = 0; depth <= z.depth(b, t); ++depth) {  // nodes above it may be of an earlier step
        const int64_t slot = length + z.path(b, t)[depth];
        int64_t at = of_text + 1;
        while (at < static_cast<int64_t>(tokens.size()) && tokens[at].slot != slot) ++at;
        last = at < static_cast<int64_t>(tokens.size()) ? at : add(slot, last, t, depth, -1);
      }
      tokens[last].out = t;
    }
    // What the ring cannot hold until the next step is no draft.
    certain = z.tree.path ? std::min(certain, length) : std::min(std::max(certain, length + z.T - (ring - width + 1)), length + z.T);
    if (known && certain > before) stored = certain - first - 1, held = certain;
  }
};

// What threads exchange: queries, keys and values of all tokens, normed, and their decays and rates.
template <typename W> struct DeltaWork {
  std::vector<DeltaPlan> plans;
  std::vector<W> mixed, gates;
};

// Advance two lines of a matrix by all tokens of a row. Queries, keys and values are `pitch` apart, decays and rates
// `gate_pitch`. `states`: room for the lines after each token of a tree; null: a chain.
template <typename W, int N>
void advance_lines(const DeltaPlan& plan, W* first, W* second, const W* queries, const W* keys, const W* first_values,
                   const W* second_values, int64_t pitch, const W* gates, int64_t gate_pitch, W* states, W* first_out,
                   W* second_out, int64_t out_pitch) {
  using V = typename Vec<W>::type;
  constexpr int64_t L = sizeof(V) / sizeof(W);
  V a[N], b[N];
  const auto read = [&](const W* one, const W* other) {
    for (int64_t n = 0; n < N; ++n) load(one + n * L, &a[n]), load(other + n * L, &b[n]);
  };
  const auto write = [&](W* one, W* other) {
    for (int64_t n = 0; n < N; ++n) put(a[n], one + n * L), put(b[n], other + n * L);
  };
  const auto times = [&](const V* line, const W* vector) {
    V even = {}, odd = {};
    for (int64_t n = 0; n < N; ++n) {
      V x;
      load(vector + n * L, &x);
      (n % 2 ? odd : even) += line[n] * x;
    }
    return sum_of(even + odd);
  };
  read(first, second);
  for (int64_t i = 0; i < static_cast<int64_t>(plan.tokens.size()); ++i) {
    const DeltaToken& token = plan.tokens[i];
    if (token.parent != i - 1) {
      const W* from = states + token.parent * 2 * N * L;
      token.parent < 0 ? read(first, second) : read(from, from + N * L);
    }
    const W *key = keys + i * pitch, decay = gates[i * gate_pitch], rate = gates[i * gate_pitch + 1];
    for (int64_t n = 0; n < N; ++n) a[n] = a[n] * decay, b[n] = b[n] * decay;
    const W to_a = rate * (first_values[i * pitch] - times(a, key)), to_b = rate * (second_values[i * pitch] - times(b, key));
    for (int64_t n = 0; n < N; ++n) {
      V x;
      load(key + n * L, &x);
      a[n] += x * to_a, b[n] += x * to_b;
    }
    if (states) write(states + i * 2 * N * L, states + i * 2 * N * L + N * L);
    if (i == plan.stored) write(first, second);
    if (token.out < 0) continue;
    first_out[token.out * out_pitch] = times(a, queries + i * pitch);
    second_out[token.out * out_pitch] = times(b, queries + i * pitch);
  }
}

// Advance the matrix [value_size, line] of one value head by all tokens of a row; outputs are [T, value_size].
template <typename W>
void advance_head(const Delta& d, const DeltaPlan& plan, const DeltaWork<W>& work, int64_t head, W* matrix, W* states, W* out) {
  constexpr int64_t L = sizeof(typename Vec<W>::type) / sizeof(W);
  const int64_t line = d.line(), pitch = d.mixed(), gate_pitch = 2 * d.value_heads;
  const W* row = work.mixed.data() + plan.first_row * pitch;
  const W* queries = row + d.key_head(head) * line;
  const W* keys = queries + d.key_heads * line;
  const W* values = row + 2 * d.key_heads * line + head * d.value_size;
  const W* gates = work.gates.data() + plan.first_row * gate_pitch + 2 * head;
  const auto advance = [&](auto count) {
    for (int64_t i = 0; i < d.value_size; i += 2) {
      const int64_t j = std::min(i + 1, d.value_size - 1);
      W spare[decltype(count)::value * L];  // of an odd number of lines the last is advanced twice, and kept once
      W* other = matrix + j * line;
      if (j == i) std::copy(other, other + line, spare), other = spare;
      advance_lines<W, decltype(count)::value>(plan, matrix + i * line, other, queries, keys, values + i, values + j, pitch,
                                               gates, gate_pitch, states, out + i, out + j, d.value_size);
    }
  };
  switch (line / L) {
    case 1: return advance(std::integral_constant<int, 1>{});
    case 2: return advance(std::integral_constant<int, 2>{});
    case 4: return advance(std::integral_constant<int, 4>{});
    case 8: return advance(std::integral_constant<int, 8>{});
    case 16: return advance(std::integral_constant<int, 16>{});
    default: return advance(std::integral_constant<int, 32>{});  // the largest that sharesd/models allows
  }
}

// silu of vectors.
template <typename V> inline V silu(const V& x) {
  using W = std::decay_t<decltype(x[0])>;
  const V e = exp_or_0<W>(-absolute(x));
  return x * select(x < 0, e, e - e + 1) / (e + 1);
}

// Divide a vector by its length, and multiply it.
template <typename W> void normalise(W* x, int64_t size, W factor) {
  typename Vec<W>::type sums = {};
  by_vectors<W>(size, [&](auto get, auto) { sums += get(x) * get(x); });
  const W by = 1 / std::sqrt(sum_of(sums) + W(1e-6)) * factor;
  by_vectors<W>(size, [&](auto get, auto put) { put(get(x) * by, x); });
}

}  // namespace sharesd
