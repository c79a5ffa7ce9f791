// Attention over a static KV cache, batch invariant: every query goes through the same operations in the same order over the
// slots that it attends to, and nothing else. Its result has the same bits whatever the width of the step, the number of slots,
// the batch or the number of threads, so that a row of a wide verify step equals a plain step.
//
// Slots are taken in chunks at fixed positions. Of each chunk a query gets a part: its largest score, the sum of its weights
// and its weighted sum of values. Parts are joined from the first chunk to the last, so that any thread may make any part
// (flash decoding). Keys and values are in the order of packed weights: scores are a linear whose outputs are slots, sums one
// whose inputs are slots.
//
// Layouts: q [B, T, H, d] and k, v [B, T, K, d] with a stride per row and token (they are slices of one projection);
// k cache [B, K, S / L, d / P, L, P], v cache [B, K, S / P, d, P], with L and P of linear.h, and d padded to whole P and L;
// out [B, T, H, d] contiguous; lengths [B]. S is a multiple of 32.
//
// Rows of a tree: a row attends to slots below the length, and above it only to its own path, whose last entry is its own slot.
// To give it the bits that it has in plain decoding, its path is copied to where plain decoding has it: after the last full
// block of slots.
#pragma once
#include "kv_cache.h"

namespace sharesd {

constexpr int64_t kChunk = 128;  // slots of a part
constexpr int64_t kFewChunks = 8;  // of a head fit the second level of cache
constexpr int64_t kSinks = 32;   // first slots, which every window includes
constexpr int64_t kTile = SHARESD_TILES ? 16 : 12;  // queries that are scored together
constexpr int64_t kRows = 32;    // new rows of a batch row that read a chunk together
constexpr int64_t kMaxHead = 512;

struct TreeAttentionMask {  // of a draft tree; null pointers for a chain
  const int64_t* depth = nullptr;  // [B, T]: nodes above each row on its path
  const int64_t* path = nullptr;   // [B, T, P]: their slots after the length, the row's own last
  int64_t P = 0;
};

struct AttentionShape {
  int64_t B, T, H, K, S, d;
  bool q8;  // keys and values are in 8 bits
  TreeAttentionMask tree;
  int64_t depth(int64_t b, int64_t t) const { return tree.path ? tree.depth[b * T + t] : t; }
  const int64_t* path(int64_t b, int64_t t) const { return tree.path + (b * T + t) * tree.P; }
  // Slot of a new row, counted from the length.
  int64_t place(int64_t b, int64_t t) const { return tree.path ? path(b, t)[depth(b, t)] : t; }
};

template <typename T> struct Attention {  // one call
  using W = typename Wide<T>::type;
  AttentionShape z;
  const T* q;
  int64_t q_row, q_token;
  void *k_cache, *v_cache;
  const int64_t* lengths;
  T* out;
  double scale;
  int64_t window;  // last slots that a query attends to; 0 = all
  int64_t recent;  // the same for drafts: in whole chunks, and with the first slots
  double softcap;
  const T* sinks = nullptr;  // [H]: one more score of each head, which takes weight and has no value; null: none
};

// Slots that a row attends to: first..last, and low..sinks in chunk 0, if that is another chunk.
struct Seen {
  int64_t first, last, low, sinks;
  // Those of a chunk, counted from its begin; 0..0 if there are none.
  void of_chunk(int64_t chunk, int64_t* begin, int64_t* end) const {
    const int64_t base = chunk * kChunk;
    *begin = std::max<int64_t>(first - base, 0), *end = std::min(last - base, kChunk);
    if (chunk == 0 && *begin >= *end) *begin = low, *end = sinks;
    if (*begin >= *end) *begin = *end = 0;
  }
};

template <typename T>
Seen seen(const Attention<T>& a, int64_t b, int64_t t) {
  const int64_t last = std::min(a.z.S, a.lengths[b] + a.z.depth(b, t) + 1);
  const int64_t first = a.window > 0 ? std::max<int64_t>(0, last - a.window) : 0;
  const int64_t recent = a.recent > 0 ? std::max<int64_t>(0, last - a.recent) / kChunk * kChunk : 0;
  if (recent <= first) return {first, last, 0, 0};
  return {recent, last, first, first < kSinks ? kSinks : 0};
}

// Division of a call's work. Results do not depend on it.
struct Plan {
  int64_t strip;  // new rows that read a chunk together
  int64_t strips, groups;
  int64_t chunks;  // at most
  bool split;      // chunks of a group are work of their own, and joined afterwards
  Plan(const AttentionShape& z, const int64_t* lengths, int64_t threads) {
    const int64_t longest = z.B ? *std::max_element(lengths, lengths + z.B) : 0;
    chunks = round_up(std::min(z.S, longest + (z.tree.path ? z.tree.P : z.T)), kChunk) / kChunk;
    const int64_t enough = 4 * threads;  // so that shares differ by little
    strip = std::max<int64_t>(1, std::min(kRows, z.B * z.K * z.T * chunks / enough));
    strips = (z.T + strip - 1) / strip, groups = z.B * z.K * strips;
    split = threads > 1 && chunks > 1 && groups < enough;
  }
};

// New rows t.. of row b of the batch with the queries of key/value head h, and the chunks that they see.
template <typename T> struct Group {
  int64_t b, h, t, rows, first, last, end;
  bool sinks;  // chunk 0 too
  Group(const Attention<T>& a, const Plan& plan, int64_t index) {
    b = index / plan.strips / a.z.K, h = index / plan.strips % a.z.K, t = index % plan.strips * plan.strip;
    rows = std::min(plan.strip, a.z.T - t);
    int64_t begin = a.z.S, num_sinks = 0;
    end = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const Seen row = seen(a, b, t + r);
      begin = std::min(begin, row.first), end = std::max(end, row.last), num_sinks = std::max(num_sinks, row.sinks);
    }
    first = begin / kChunk, last = (end + kChunk - 1) / kChunk, sinks = num_sinks > 0 && first > 0;
  }
  int64_t chunks() const { return last - first + sinks; }
  int64_t chunk(int64_t i) const { return sinks ? (i ? first + i - 1 : 0) : first + i; }
  int64_t slots(int64_t i) const { return std::min(kChunk, end - chunk(i) * kChunk); }
};

template <typename T> struct Scratch {  // of one thread
  using W = typename Wide<T>::type;
  Aligned<Operand<T>> q, weights;
  Aligned<T> keys, values;
  Aligned<T> expanded_keys, expanded_values;  // a chunk of a cache in 8 bits
  Aligned<W> scores, parts, joined;
  Scratch(const AttentionShape& z, const Plan& plan) : Scratch(z, plan.strip * (z.H / z.K), Layout<T>{z.d}) {}

 private:
  Scratch(const AttentionShape& z, int64_t queries, Layout<T> at)
      : q(queries * at.key_size()), weights(kTile * kChunk), keys(z.tree.path ? kChunk * at.key_size() : 0),
        values((z.tree.path ? kChunk : slot_step(at)) * at.value_size()), expanded_keys(z.q8 ? kChunk * at.key_size() : 0),
        expanded_values(z.q8 ? kChunk * at.value_size() : 0), scores(kTile * kChunk), parts(kTile * at.part()),
        joined(queries * at.part()) {}
};

// ---- parts

// y [M, y_pitch] += x times B vector blocks, R rows of x at once; see `multiply`.
template <typename T, int R, int B, int CACHE, typename W>
void add_rows(const Operand<T>* x, int64_t x_pitch, const T* w, int64_t block, int64_t step, int64_t steps, int64_t ahead, W* y,
              int64_t y_pitch, int64_t M) {
  constexpr int64_t L = lanes<T>();
  for (; M >= R; M -= R, x += R * x_pitch, y += R * y_pitch) {
    typename Kernel<T>::V acc[R][B];
    for (int i = 0; i < R; ++i)
      for (int b = 0; b < B; ++b) load(y + i * y_pitch + b * L, &acc[i][b]);
    multiply<T, R, B, CACHE>(x, x_pitch, w, block, step, steps, ahead, acc);
    for (int i = 0; i < R; ++i)
      for (int b = 0; b < B; ++b) put(acc[i][b], y + i * y_pitch + b * L);
  }
  if constexpr (R > 1)
    if (M > 0) add_rows<T, R - 1, B, CACHE>(x, x_pitch, w, block, step, steps, ahead, y, y_pitch, M);
}

// As above, for any number of blocks, `at_once` at a time: 4 where multiplying takes longest. Where reading does, 1 if a block
// lies together, and 8 if its steps lie next to those of others.
template <typename T, typename W>
void add_products(const Operand<T>* x, int64_t x_pitch, const T* w, int64_t block, int64_t step, int64_t blocks, int64_t steps,
                  int64_t ahead, W* y, int64_t y_pitch, int64_t M, int64_t at_once) {
  constexpr int64_t L = lanes<T>();
  if constexpr (kWideRegisters) {  // which hold as many sums
    for (; at_once == 8 && blocks >= 8; blocks -= 8, w += 8 * block, y += 8 * L)
      add_rows<T, 2, 8, 1>(x, x_pitch, w, block, step, steps, ahead, y, y_pitch, M);
    for (; at_once == 8 && blocks >= 4; blocks -= 4, w += 4 * block, y += 4 * L)
      add_rows<T, 4, 4, 1>(x, x_pitch, w, block, step, steps, ahead, y, y_pitch, M);
    for (; at_once == 4 && blocks >= 4; blocks -= 4, w += 4 * block, y += 4 * L)
      add_rows<T, 6, 4, 2>(x, x_pitch, w, block, step, steps, ahead, y, y_pitch, M);
  }
  for (; blocks; --blocks, w += block, y += L)
    add_rows<T, kWideRegisters ? 6 : 4, 1, 1>(x, x_pitch, w, block, step, steps, ahead, y, y_pitch, M);
}

// True if sums over heads of this size run in tiles (see linear.h), and then in whole steps of slots.
template <typename T> bool by_tiles(const Layout<T>& at) {
  return std::is_same_v<T, bf16> && has_tiles && at.key_size() % STEP == 0 && at.value_size() == at.key_size();
}

// Slots that sums over slots take together.
template <typename T> int64_t slot_step(const Layout<T>& at) { return by_tiles(at) ? STEP : Layout<T>::P; }

// Scores += queries [M, key_size] times the keys of `slots` slots, whole vectors of them. Prefetches keys `ahead` slots later.
// `few`: queries, so that reading takes longest.
template <typename T, typename W>
void score(const Layout<T>& at, const Operand<T>* q, const T* keys, int64_t slots, W* scores, int64_t M, int64_t ahead = 0,
           bool few = false) {
  constexpr int64_t P = Layout<T>::P, L = Layout<T>::L;
  const int64_t size = at.key_size();
  if constexpr (SHARESD_TILES && std::is_same_v<T, bf16>)
    if (by_tiles(at))
      return add_tile_products(q, size, keys, L * size, L * P, L * STEP, slots / L, size / STEP, ahead * size * sizeof(T),
                               scores, kChunk, M);
  add_products<T>(q, size, keys, L * size, L * P, slots / L, size / P, ahead * size * sizeof(T), scores, kChunk, M,
                  few ? 1 : 4);
}

// Sums += weights [M, kChunk] times the values of `slots` slots, a multiple of `slot_step`. Prefetches values `ahead` slots
// later. `few`: as above.
template <typename T, typename W>
void blend(const Layout<T>& at, const Operand<T>* weights, const T* values, int64_t slots, W* sums, int64_t pitch, int64_t M,
           int64_t ahead = 0, bool few = false) {
  constexpr int64_t P = Layout<T>::P, L = Layout<T>::L;
  const int64_t size = at.value_size();
  if constexpr (SHARESD_TILES && std::is_same_v<T, bf16>)
    if (by_tiles(at))
      return add_tile_products(weights, kChunk, values, L * P, size * P, size * STEP, size / L, slots / STEP,
                               ahead * size * sizeof(T), sums, pitch, M);
  add_products<T>(weights, kChunk, values, L * P, size * P, size / L, slots / P, ahead * size * sizeof(T), sums, pitch, M,
                  few ? 8 : 4);
}

// True if none of n numbers is NaN or infinite. n: whole vectors.
template <typename T> bool all_finite(const T* x, int64_t n) {
  typename Kernel<T>::V number = {};
  auto is_finite = number == number;
  for (int64_t i = 0; i < n; i += lanes<T>()) load(x + i, &number), is_finite = is_finite & (number * 0 == 0);
  return !any_of(is_finite == 0);
}

// From scores [slots] to weights, 0 outside of begin..end, relative to the largest, `top`. Returns their sum.
template <typename T, typename W>
W softmax_weights(W* row, int64_t begin, int64_t end, int64_t slots, double scale, double softcap, Operand<T>* weights,
                  W* top) {
  using V = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W);
  constexpr W nothing = -std::numeric_limits<W>::infinity();
  for (int64_t s = 0; s < begin; ++s) row[s] = nothing;
  for (int64_t s = end; s < slots; ++s) row[s] = nothing;
  W factor = static_cast<W>(scale);
  if (softcap > 0) {
    const W cap = static_cast<W>(softcap);
    for (int64_t s = begin; s < end; ++s) row[s] = cap * std::tanh(row[s] * factor / cap);
    factor = 1;
  }
  V tops = get<V>(row), sums = {};
  for (int64_t s = L; s < slots; s += L) tops = greater(get<V>(row + s), tops);
  const W most = largest(tops);
  for (int64_t s = 0; s < slots; s += L) {
    V x = exp_or_0<T>((get<V>(row + s) - most) * factor);
    if constexpr (std::is_same_v<T, Operand<T>>) {
      store_rounded(x, weights + s, &x);
    } else {
      T rounded[L];
      store_rounded(x, rounded, &x);
      put(x, weights + s);
    }
    sums += x;
  }
  *top = most * factor;
  return sum_of(sums);
}

// Add a part to those of the chunks before.
template <typename W> __attribute__((noinline)) void join(W* all, const W* part, int64_t pitch) {
  constexpr int64_t L = 64 / sizeof(W);
  if (part[1] == 0) return;  // no slot is in sight
  if (all[1] == 0) {
    std::memcpy(all, part, pitch * sizeof(W));
    return;
  }
  using V = typename Vec<W>::type;
  const W top = std::max(all[0], part[0]);
  const W a = exp_neg(all[0] - top), b = exp_neg(part[0] - top);
  all[0] = top, all[1] = all[1] * a + part[1] * b;
  for (int64_t i = L; i < pitch; i += L) put(get<V>(all + i) * a + get<V>(part + i) * b, all + i);
}

// Divide by the sum of weights. A sink's is added here, after all chunks: it counts once, however they are shared out.
template <typename T, typename W> void finish(const W* joined, const T* sink, int64_t d, T* out) {
  constexpr int64_t L = 64 / sizeof(W);
  W factor = 1, sum = joined[1];
  if (sink) {
    const W score = widen(*sink), top = std::max(joined[0], score);
    factor = exp_neg(joined[0] - top), sum = sum * factor + exp_neg(score - top);
  }
  for (int64_t i = 0; i < d; ++i) narrow(joined[L + i] * factor / sum, out + i);
}

// Copy keys or values of a tree's row at positions begin..end, `begin` a block's first, to where a chain has them: copy(slot,
// place). Slots below the length are not copied here.
template <typename Copy>
void gather(const AttentionShape& z, int64_t b, int64_t t, int64_t length, int64_t begin, int64_t end, Copy&& copy) {
  for (int64_t at = std::max(begin, length); at < end; ++at)
    copy(std::min(length + z.path(b, t)[at - length], z.S - 1), at - begin);
}

// The queries [rows * group, key_size] of a group of rows.
template <typename T>
void load_queries(const Attention<T>& a, const Group<T>& g, Scratch<T>& scratch) {
  const int64_t d = a.z.d, G = a.z.H / a.z.K, pitch = Layout<T>{d}.key_size();
  for (int64_t n = 0; n < g.rows * G; ++n) {
    const T* from = a.q + g.b * a.q_row + (g.t + n / G) * a.q_token + (g.h * G + n % G) * d;
    Operand<T>* to = scratch.q.data() + n * pitch;
    if constexpr (std::is_same_v<T, Operand<T>>)
      std::memcpy(to, from, d * sizeof(T));
    else
      widen_all(from, d, to);
    std::fill(to + d, to + pitch, Operand<T>{});
  }
}

// Compute parts of all queries of a group from one chunk, tile after tile. Those of the tile which begins with query `first`
// are written to to(first), `stride` elements apart; then done(first, number) is called.
template <typename T, typename To, typename Done>
void attend_chunk(const Attention<T>& a, const Group<T>& g, int64_t chunk, Scratch<T>& scratch, int64_t stride, To&& to,
                  Done&& done) {
  using W = typename Wide<T>::type;
  constexpr int64_t P = Layout<T>::P, L = Layout<T>::L;
  const AttentionShape& z = a.z;
  const Layout<T> at{z.d};
  const int64_t unit = slot_step(at);
  const int64_t G = z.H / z.K, length = a.lengths[g.b], base = chunk * kChunk, num = g.rows * G;
  const int64_t ahead = g.chunks() <= kFewChunks ? z.S : kChunk;  // the same chunk of the next head, or the next chunk
  const Keys<T> keys_of(a.k_cache, g.b * z.K + g.h, z.S, z.d, z.q8);
  const Values<T> values_of(a.v_cache, g.b * z.K + g.h, z.S, z.d, z.q8);
  int64_t begin[kRows], end[kRows], stop = 0;  // slots of the chunk that each row attends to, and the last of all
  for (int64_t r = 0; r < g.rows; ++r) {
    seen(a, g.b, g.t + r).of_chunk(chunk, &begin[r], &end[r]);
    stop = std::max(stop, end[r]);
  }
  const int64_t below = z.tree.path ? std::min(z.S, length / kBlock * kBlock) : z.S;  // all rows attend to slots below
  const int64_t blocks = round_up(stop, kBlock);
  const int64_t shared = std::min(blocks, std::max<int64_t>(0, below - base)), own = base + shared;
  const int64_t held = z.tree.path ? std::clamp<int64_t>(round_up(length, kBlock) - base, 0, blocks) : blocks;
  const T* chunk_keys = keys_of.slots(base, held, ahead, scratch.expanded_keys.data());
  const T* chunk_values = values_of.slots(base, held, ahead, scratch.expanded_values.data());
  const int64_t later = z.q8 ? 0 : ahead;  // which products prefetch
  const bool few = later && num <= 4;
  // Values of slots that only some rows attend to. 0 times one that is not finite would spoil the other rows.
  const int64_t some = *std::min_element(end, end + g.rows) / P * P, until = std::min(shared, round_up(stop, P));
  const bool is_finite = all_finite(chunk_values + some * at.value_size(), (until - some) * at.value_size());
  for (int64_t first = 0; first < num; first += kTile) {
    const int64_t queries = std::min(kTile, num - first);
    const Operand<T>* q = scratch.q.data() + first * at.key_size();
    W *scores = scratch.scores.data(), *parts = to(first);
    Operand<T>* weights = scratch.weights.data();
    // Rows of a tree by themselves, from `own` on: f(first query of the tile, number, row, slots).
    auto each_row = [&](auto&& f) {
      for (int64_t n = first, r, until; z.tree.path && n < first + queries; n = until) {
        r = n / G, until = std::min(first + queries, (r + 1) * G);
        if (end[r] > shared) f(n - first, until - n, r, end[r] - shared);
      }
    };
    std::memset(scores, 0, queries * kChunk * sizeof(W));
    score<T>(at, q, chunk_keys, shared, scores, queries, later, few);
    each_row([&](int64_t n, int64_t count, int64_t r, int64_t slots) {
      T* keys = scratch.keys.data();
      const T* from = chunk_keys + shared * at.key_size();
      if (own < length) std::memcpy(keys, from, round_up(length - own, L) * at.key_size() * sizeof(T));
      gather(z, g.b, g.t + r, length, own, own + slots,
             [&](int64_t slot, int64_t place) { keys_of.copy(slot, keys, place); });
      score<T>(at, q + n * at.key_size(), keys, round_up(slots, kBlock), scores + n * kChunk + shared, count);
    });
    for (int64_t n = 0; n < queries; ++n) {
      const int64_t r = (first + n) / G;
      W* part = parts + n * stride;
      std::memset(part, 0, at.part() * sizeof(W));
      if (begin[r] < end[r])
        part[1] = softmax_weights<T>(scores + n * kChunk, begin[r], end[r], blocks, a.scale, a.softcap, weights + n * kChunk,
                                     part);
      else
        std::memset(weights + n * kChunk, 0, blocks * sizeof(Operand<T>));
    }
    const int64_t size = at.value_size();
    // After the last slot there may be any bits, and 0 times those may be NaN.
    auto clear = [&](int64_t slots) {
      const int64_t from = slots / P * P;
      std::memset(scratch.values.data() + from * size, 0, (round_up(slots, unit) - from) * size * sizeof(T));
    };
    for (int64_t n = 0, count = is_finite ? queries : 1; n < queries; n += count) {
      const int64_t known = std::min(shared, is_finite ? stop : end[(first + n) / G]), whole = known / unit * unit;
      const Operand<T>* from = weights + n * kChunk;
      W* sums = parts + n * stride + L;
      blend<T>(at, from, chunk_values, whole, sums, stride, count, later, few);
      if (whole == known) continue;
      T* values = scratch.values.data();
      std::memcpy(values, chunk_values + whole * size, (known - whole) / P * P * size * sizeof(T));
      clear(known - whole);
      if (known % P) values_of.copy(base + known - 1, values, known - 1 - whole);
      blend<T>(at, from + whole, values, unit, sums, stride, count);
    }
    each_row([&](int64_t n, int64_t count, int64_t r, int64_t slots) {
      T* values = scratch.values.data();
      if (slots % unit) clear(slots);
      if (own < length) std::memcpy(values, chunk_values + shared * size, round_up(length - own, P) * size * sizeof(T));
      gather(z, g.b, g.t + r, length, own, own + slots,
             [&](int64_t slot, int64_t place) { values_of.copy(slot, values, place); });
      blend<T>(at, weights + n * kChunk + shared, values, round_up(slots, unit), parts + n * stride + L, stride, count);
    });
    done(first, queries);
  }
}

// A group with all of its chunks.
template <typename T>
void attend_group(const Attention<T>& a, const Group<T>& g, Scratch<T>& scratch) {
  using W = typename Wide<T>::type;
  const int64_t d = a.z.d, G = a.z.H / a.z.K, pitch = Layout<T>{d}.part();
  W *joined = scratch.joined.data(), *parts = scratch.parts.data();
  load_queries(a, g, scratch);
  for (int64_t n = 0; n < g.rows * G; ++n) joined[n * pitch + 1] = 0;
  for (int64_t i = 0; i < g.chunks(); ++i)
    attend_chunk(
        a, g, g.chunk(i), scratch, pitch, [&](int64_t) { return parts; },
        [&](int64_t first, int64_t num) {
          for (int64_t n = 0; n < num; ++n) join(joined + (first + n) * pitch, parts + n * pitch, pitch);
        });
  for (int64_t n = 0; n < g.rows * G; ++n) {
    const int64_t head = g.h * G + n % G;
    finish(joined + n * pitch, a.sinks ? a.sinks + head : nullptr, d,
           a.out + ((g.b * a.z.T + g.t + n / G) * a.z.H + head) * d);
  }
}

// Elements of the parts that threads exchange, [B, K, T, H / K, chunks, pitch].
template <typename T> int64_t num_parts(const AttentionShape& z, const Plan& plan) {
  return plan.split ? z.B * z.T * z.H * plan.chunks * Layout<T>{z.d}.part() : 0;
}

// This thread's share of all new rows. wait() waits for all threads.
template <typename T, typename Wait>
void attend_share(const Attention<T>& a, const Plan& plan, int64_t me, int64_t all, typename Wide<T>::type* parts,
                  Scratch<T>& scratch, Wait&& wait) {
  using W = typename Wide<T>::type;
  const AttentionShape& z = a.z;
  if (!plan.split) {
    for (int64_t index = share(plan.groups, me, all); index < share(plan.groups, me + 1, all); ++index)
      attend_group(a, Group<T>(a, plan, index), scratch);
    return;
  }
  const int64_t G = z.H / z.K, pitch = Layout<T>{z.d}.part(), stride = plan.chunks * pitch;
  int64_t total = 0, before = 0;  // slots of all groups
  for (int64_t index = 0; index < plan.groups; ++index) {
    const Group<T> g(a, plan, index);
    for (int64_t i = 0; i < g.chunks(); ++i) total += g.slots(i);
  }
  for (int64_t index = 0; index < plan.groups; ++index) {
    const Group<T> g(a, plan, index);
    bool loaded = false;
    for (int64_t i = 0; i < g.chunks(); before += g.slots(i++)) {
      if ((2 * before + g.slots(i)) * all / (2 * total) != me) continue;  // its middle is in another share
      if (!loaded) load_queries(a, g, scratch);
      loaded = true;
      W* to = parts + ((g.b * z.K + g.h) * z.T + g.t) * G * stride + g.chunk(i) * pitch;
      attend_chunk(
          a, g, g.chunk(i), scratch, stride, [&](int64_t first) { return to + first * stride; }, [](int64_t, int64_t) {});
    }
  }
  wait();
  for (int64_t item = share(z.B * z.T * z.H, me, all); item < share(z.B * z.T * z.H, me + 1, all); ++item) {
    const int64_t g = item % G, t = item / G % z.T, h = item / G / z.T % z.K, b = item / G / z.T / z.K;
    const Seen row = seen(a, b, t);
    W* joined = scratch.joined.data();
    joined[1] = 0;
    if (row.sinks) join(joined, parts + item * stride, pitch);
    for (int64_t chunk = row.first / kChunk; chunk * kChunk < row.last; ++chunk)
      join(joined, parts + item * stride + chunk * pitch, pitch);
    finish(joined, a.sinks ? a.sinks + h * G + g : nullptr, z.d, a.out + ((b * z.T + t) * z.H + h * G + g) * z.d);
  }
}

// ---- the cache

// Write one new token of one head into the caches.
template <typename T>
void store_kv(const AttentionShape& z, int64_t b, int64_t h, int64_t slot, const T* k, const T* v, void* k_cache,
              void* v_cache) {
  if (slot < 0 || slot >= z.S) return;  // padding rows of a finished sequence
  Keys<T>(k_cache, b * z.K + h, z.S, z.d, z.q8).write(slot, k);
  Values<T>(v_cache, b * z.K + h, z.S, z.d, z.q8).write(slot, v);
}

// Compact the rows of a path: row path[j] of the new ones becomes row j, for all layers (kv: addresses of all k, then v).
template <typename T>
void compact_kv(const int64_t* kv, int64_t layers, const int64_t* heads, const int64_t* sizes, int64_t B, int64_t S, bool q8,
                const int64_t* lengths, const int64_t* path, const int64_t* num, int64_t P) {
  for (int64_t layer = 0; layer < layers; ++layer)
    for (int64_t b = 0; b < B; ++b) {
      int64_t from = 0;  // rows before are in place
      while (from < num[b] && path[b * P + from] == from) ++from;
      for (int64_t h = 0; h < heads[layer]; ++h) {
        const int64_t head = b * heads[layer] + h;
        const Keys<T> keys(reinterpret_cast<void*>(kv[layer]), head, S, sizes[layer], q8);
        const Values<T> values(reinterpret_cast<void*>(kv[layers + layer]), head, S, sizes[layer], q8);
        for (int64_t j = from; j < num[b]; ++j) {  // paths ascend: path[j] >= j
          keys.move(lengths[b] + path[b * P + j], lengths[b] + j);
          values.move(lengths[b] + path[b * P + j], lengths[b] + j);
        }
      }
    }
}

template <typename T>
void attend(const T* q, const T* k_new, const T* v_new, void* k_cache, void* v_cache, const int64_t* lengths, T* out,
            const int64_t* depth, const int64_t* path, const int64_t* shape, const int64_t* strides, double scale,
            int64_t window, int64_t recent, double softcap, const T* sinks) {
  using W = typename Wide<T>::type;
  const AttentionShape z{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[8] != 0, {depth, path, shape[7]}};
  const Attention<T> a{z, q, strides[0], strides[1], k_cache, v_cache, lengths, out, scale, window, recent, softcap, sinks};
  const Plan plan(z, lengths, shape[6]);
  Aligned<W> parts(num_parts<T>(z, plan));
#pragma omp parallel num_threads(static_cast<int>(shape[6]))
  {
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < z.B; ++b)
      for (int64_t h = 0; h < z.K; ++h)
        for (int64_t t = 0; t < z.T; ++t)
          store_kv(z, b, h, lengths[b] + z.place(b, t), k_new + b * strides[2] + t * strides[3] + h * z.d,
                   v_new + b * strides[4] + t * strides[5] + h * z.d, k_cache, v_cache);
    Scratch<T> scratch(z, plan);
    attend_share(a, plan, omp_get_thread_num(), omp_get_num_threads(), parts.data(), scratch, [] {
#pragma omp barrier
    });
  }
}

}  // namespace sharesd
