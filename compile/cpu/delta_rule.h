// The gated delta rule (Yang et al. 2024, arXiv 2412.06464) of one layer: for each value head a state matrix S [value, key], by which
// a token with key k, value v, decay g and rate b moves it to S' = g S + b (v - g S k) k^T, and reads S' q.
//
// A row has one matrix per head, which holds its first `held` tokens, and the inputs of its last tokens in a ring (see
// sharesd/kvcache/recurrent.py). A step first goes through the tokens that the matrix lacks, and then through its own. So to undo
// a draft is to move a length. The matrix is stored where a text is certain.
//
// 16 values of a matrix lie together, [key, 16], and go through all tokens on their own, or a part of them that fills a
// register: they are read once, stay in the nearest cache, and have one order of additions whatever the number of tokens. Nodes of a tree start from the state of their
// parent.
#pragma once
#include "attention.h"

namespace sharesd {

constexpr int64_t kValues = 16;  // of a matrix that lie together, also in compile/delta_sizes.py

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
  int64_t padded() const { return (value_size + kValues - 1) / kValues * kValues; }  // values of a head in memory
  int64_t matrix() const { return padded() * key_size; }  // numbers of one, [padded / 16, key_size, 16]
  int64_t mixed() const { return 2 * key_heads * key_size + value_heads * padded(); }  // queries, keys and values of a token
  int64_t key_head(int64_t h) const { return tiled ? h % key_heads : h / (value_heads / key_heads); }
};

// A token that moves the state of a row.
struct DeltaToken {
  int64_t slot, parent;  // number of the token before, -1: the row's matrix
  int64_t t, depth;  // its path is that of the step's token t, up to this depth; t < 0: it is in the text
  int64_t out;  // the step's token that it is, -1: an earlier one
  bool has_child = false;
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
      if (parent >= 0) tokens[parent].has_child = true;
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

// What a token adds to a vector of numbers for each key.
template <typename W, typename V> struct DeltaChange {
  const W* key;
  W decay;
  V change;
};
// Sums over all keys of a vector's numbers, times a token's keys and queries.
template <typename W, typename V> struct DeltaSums {
  const W *key, *query;
  V by_key, by_query;
};

// Go through a vector's numbers for all keys once: their state after a token (MOVES), to the same place or another, and what the
// next token reads of it (READS; its QUERIES only if wanted). Whatever is done together, bits are the same.
template <bool MOVES, bool READS, bool QUERIES, typename W, typename V>
inline void pass_state(const W* state, int64_t size, const DeltaChange<W, V>& by, W* to, DeltaSums<W, V>& next) {
  constexpr int64_t kSums = 4;  // of every fourth number: each addition waits for the one before it
  V keys[kSums] = {}, queries[kSums] = {};
  const auto add = [&](int64_t i, int64_t j) {
    const int64_t at = (i + j) * kValues;
    if (READS && !MOVES) __builtin_prefetch(state + size * kValues + at);  // of the next vector
    V x = get<V>(state + at);
    if (MOVES) x = x * by.decay + by.change * by.key[i + j], put(x, to + at);
    if (READS) keys[j] += x * next.key[i + j];
    if (QUERIES) queries[j] += x * next.query[i + j];
  };
  int64_t i = 0;
  for (; i + kSums <= size; i += kSums)
    for (int64_t j = 0; j < kSums; ++j) add(i, j);
  for (int64_t j = 0; i + j < size; ++j) add(i, j);
  if (READS) next.by_key = (keys[0] + keys[1]) + (keys[2] + keys[3]);
  if (QUERIES) next.by_query = (queries[0] + queries[1]) + (queries[2] + queries[3]);
}

// Advance the matrix of one value head by all tokens of a row; outputs are [T, padded]. `states`: room for 16 values after
// each token, or in a chain after one.
template <typename W>
void advance_head(const Delta& d, const DeltaPlan& plan, const DeltaWork<W>& work, int64_t head, W* matrix, W* states, bool is_tree,
                  W* out) {
  using V = typename VectorOf<W, kRegister>::type;
  constexpr int64_t L = sizeof(V) / sizeof(W);
  const int64_t size = d.key_size, pitch = d.mixed(), gate_pitch = 2 * d.value_heads, num = plan.tokens.size();
  const W* row = work.mixed.data() + plan.first_row * pitch;
  const W* queries = row + d.key_head(head) * size;
  const W* keys = queries + d.key_heads * size;
  const W* values = row + 2 * d.key_heads * size + head * d.padded();
  const W* gates = work.gates.data() + plan.first_row * gate_pitch + 2 * head;
  thread_local std::vector<W> products;  // of each token's key and query
  products.resize(num);
  for (int64_t i = 0; i < num; ++i) {
    typename Vec<W>::type sums = {};
    by_vectors<W>(size, [&](auto get, auto) { sums += get(keys + i * pitch) * get(queries + i * pitch); });
    products[i] = sum_of(sums);
  }
  for (int64_t first = 0; first < d.padded(); first += L) {
    W* const stored = matrix + first / kValues * size * kValues + first % kValues;
    const auto state_after = [&](int64_t i) {
      if (i < 0 || i == plan.stored) return stored;
      return states + (is_tree ? i * size * kValues : 0);
    };
    DeltaSums<W, V> sums;
    DeltaChange<W, V> by;
    const auto read = [&](auto moves, int64_t i, const W* state, W* to) {
      sums.key = keys + i * pitch, sums.query = queries + i * pitch;
      if (plan.tokens[i].out < 0)
        pass_state<moves.value, true, false>(state, size, by, to, sums);
      else
        pass_state<moves.value, true, true>(state, size, by, to, sums);
    };
    bool is_read = false;  // together with the move of the token before
    for (int64_t i = 0; i < num; ++i) {
      const DeltaToken& token = plan.tokens[i];
      const W* state = state_after(token.parent);
      if (!is_read) read(std::false_type{}, i, state, nullptr);
      const W decay = gates[i * gate_pitch], rate = gates[i * gate_pitch + 1];
      by = {keys + i * pitch, decay, (get<V>(values + i * pitch + first) - sums.by_key * decay) * rate};
      if (token.out >= 0) put(sums.by_query * decay + by.change * products[i], out + token.out * d.padded() + first);
      is_read = i + 1 < num && plan.tokens[i + 1].parent == i;
      if (is_read)
        read(std::true_type{}, i + 1, state, state_after(i));
      else if (token.has_child || i == plan.stored)
        pass_state<true, false, false>(state, size, by, state_after(i), sums);
    }
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
