// Attention over a static KV cache. Every query goes through the same operations in the same order over the slots it may
// see and nothing else: its result is the same bits whatever the width of the step, the number of slots, the batch or the
// number of threads. That is what makes a row of a wide verify step equal to a plain step.
//
// Layouts: q [B, T, H, d] and k, v [B, T, K, d] with a stride per row and token (they are slices of one projection);
// k cache [B, K, d, S], slots innermost so that a vector holds the scores of neighbouring slots; v cache [B, K, S, d];
// out [B, T, H, d] contiguous; lengths [B]. S is a multiple of 32.
//
// Rows of a tree: the row sees what lies below the length, and above it only its own path, whose last entry is where it is
// written itself. To give it the bits that it has in plain decoding, its path is copied to where it would lie then: behind
// the last full block of slots.
#pragma once
#include "types.h"

#include <type_traits>

namespace sharesd {

constexpr int64_t kMaxTile = 8;  // queries that share a key/value head and read it together
constexpr int64_t kMaxHead = 512;

template <typename T> struct Slots {  // keys [d, pitch] and values [slots, d], from slot `begin` on
  const T *k, *v;
  int64_t pitch, begin;
};

// Calls f with `count`, from 1 to N, as a constant.
template <int N, typename F> inline void as_constant(int64_t count, F&& f) {
  if (count == N) return f(std::integral_constant<int, N>{});
  if constexpr (N > 1) as_constant<N - 1>(count, f);
}

// Scores of N queries, q [d, q_pitch], with the slots of whole blocks: from `begin`, a block's first slot, until `end`.
template <typename T, int N, typename W>
void score(const W* q, int64_t q_pitch, const Slots<T>& from, int64_t begin, int64_t end, int64_t d, W* scores, int64_t pitch) {
  using V = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W);
  for (int64_t s = begin; s < end; s += 2 * L) {
    V dot[N][2] = {};
    const T* k = from.k + (s - from.begin);
    for (int64_t i = 0; i < d; ++i) {
      V a, b;
      load(k + i * from.pitch, &a);
      load(k + i * from.pitch + L, &b);
      __builtin_prefetch(k + i * from.pitch + 2 * L);  // rows lie too far apart for the processor to foresee them
      for (int n = 0; n < N; ++n) {
        dot[n][0] += q[i * q_pitch + n] * a;
        dot[n][1] += q[i * q_pitch + n] * b;
      }
    }
    for (int n = 0; n < N; ++n) std::memcpy(scores + n * pitch + s, dot[n], 2 * sizeof(V));
  }
}

// From scores to weights, of slots first..last; 0 from `begin` up to there and behind until `end`, both borders of blocks.
// Returns what they must be divided by.
template <typename W>
W weigh(W* row, int64_t begin, int64_t first, int64_t last, int64_t end, double softcap) {
  using V = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W);
  if (softcap > 0)
    for (int64_t s = first; s < last; ++s) row[s] = static_cast<W>(softcap) * std::tanh(row[s] / static_cast<W>(softcap));
  const int64_t aligned = first - first % L;
  for (int64_t s = aligned; s < first; ++s) row[s] = row[first];
  for (int64_t s = last; s < end; ++s) row[s] = row[first];
  V tops;
  std::memcpy(&tops, row + aligned, sizeof(V));
  for (int64_t s = aligned + L; s < last; s += L) {
    V x;
    std::memcpy(&x, row + s, sizeof(V));
    tops = x > tops ? x : tops;
  }
  W top = tops[0], total = 0;
  for (int64_t i = 1; i < L; ++i) top = tops[i] > top ? tops[i] : top;
  for (int64_t s = first; s < last; ++s) row[s] = exp_neg(row[s] - top);
  for (int64_t s = begin; s < first; ++s) row[s] = 0;
  for (int64_t s = last; s < end; ++s) row[s] = 0;
  V sum = {};
  for (int64_t s = aligned; s < last; s += L) {
    V x;
    std::memcpy(&x, row + s, sizeof(V));
    sum += x;
  }
  for (int64_t i = 0; i < L; ++i) total += sum[i];
  return total;
}

// acc [N, kMaxHead], J vectors of it from i on: plus weights times values, slot after slot.
template <typename T, int N, int J, typename W>
void blend_columns(const W* weights, int64_t pitch, const Slots<T>& from, int64_t begin, int64_t end, int64_t d, int64_t i,
                   W* acc) {
  using V = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W);
  V sum[N][J];
  for (int n = 0; n < N; ++n) std::memcpy(sum[n], acc + n * kMaxHead + i, J * sizeof(V));
  const T* v = from.v - from.begin * d + i;
  for (int64_t s = begin; s < end; ++s) {
    V x[J];
    for (int j = 0; j < J; ++j) load(v + s * d + j * L, &x[j]);
    for (int n = 0; n < N; ++n)
      for (int j = 0; j < J; ++j) sum[n][j] += weights[n * pitch + s] * x[j];
  }
  for (int n = 0; n < N; ++n) std::memcpy(acc + n * kMaxHead + i, sum[n], J * sizeof(V));
}

template <typename T, int N, typename W>
void blend(const W* weights, int64_t pitch, const Slots<T>& from, int64_t begin, int64_t end, int64_t d, W* acc) {
  constexpr int64_t L = 64 / sizeof(W), J = N <= 4 ? 4 : 2;  // sums that fit the registers
  int64_t i = 0;
  for (; i + J * L <= d; i += J * L) blend_columns<T, N, J>(weights, pitch, from, begin, end, d, i, acc);
  for (; i + L <= d; i += L) blend_columns<T, N, 1>(weights, pitch, from, begin, end, d, i, acc);
  if (i == d) return;
  for (int64_t s = begin; s < end; ++s)
    for (int n = 0; n < N; ++n)
      for (int64_t j = i; j < d; ++j) acc[n * kMaxHead + j] += weights[n * pitch + s] * widen(from.v[(s - from.begin) * d + j]);
}

struct Branches {  // of a draft tree; null pointers for a chain
  const int64_t* depth = nullptr;  // [B, T]: nodes above each row on its path
  const int64_t* path = nullptr;   // [B, T, P]: their slots behind the length, the row's own last
  int64_t P = 0;
};

struct AttentionShape {
  int64_t B, T, H, K, S, d;
  Branches tree;
  int64_t pitch() const { return (S + 63) / 32 * 32; }
  int64_t tail_slots() const { return tree.path ? (tree.P + 63) / 32 * 32 : 0; }
  // Where a new row is written, counted from the length.
  int64_t place(int64_t b, int64_t t) const {
    const int64_t row = b * T + t;
    return tree.path ? tree.path[row * tree.P + tree.depth[row]] : t;
  }
};

template <typename T> struct Scratch {  // of one thread
  using W = typename Wide<T>::type;
  Aligned<W> scores, acc, q;
  Aligned<T> k, v;
  explicit Scratch(const AttentionShape& z)
      : scores(kMaxTile * z.pitch()), acc(kMaxTile * kMaxHead), q(kMaxTile * kMaxHead), k(z.tail_slots() * z.d),
        v(z.tail_slots() * z.d) {}
};

// Write one new token of one head into the caches.
template <typename T>
void store_kv(const AttentionShape& z, int64_t b, int64_t h, int64_t slot, const T* k, const T* v, T* k_cache, T* v_cache) {
  if (slot < 0 || slot >= z.S) return;  // padding rows of a finished sequence
  T* kc = k_cache + (b * z.K + h) * z.d * z.S + slot;
  for (int64_t i = 0; i < z.d; ++i) kc[i * z.S] = k[i];
  std::memcpy(v_cache + ((b * z.K + h) * z.S + slot) * z.d, v, z.d * sizeof(T));
}

// What a row of a tree sees from the last full block below the length on: `rest` slots of it, then `num` ones of its path.
// They are copied to where they would lie without branches, unless they lie there.
template <typename T> struct Tail {
  const Slots<T>& cache;
  int64_t begin, rest;
  const int64_t* path;
  int64_t num;
  bool in_place() const { return path[num - 1] == num - 1; }
  Slots<T> keys(int64_t d, int64_t pitch, T* k) const {
    if (in_place()) return cache;
    for (int64_t i = 0; i < d; ++i) {
      const T* from = cache.k + i * cache.pitch + begin;
      std::memcpy(k + i * pitch, from, rest * sizeof(T));
      for (int64_t j = 0; j < num; ++j) k[i * pitch + rest + j] = from[rest + path[j]];
    }
    return {k, nullptr, pitch, begin};
  }
  Slots<T> values(int64_t d, T* v) const {
    if (in_place()) return cache;
    const T* from = cache.v + begin * d;
    std::memcpy(v, from, rest * d * sizeof(T));
    for (int64_t j = 0; j < num; ++j) std::memcpy(v + (rest + j) * d, from + (rest + path[j]) * d, d * sizeof(T));
    return {nullptr, v, 0, begin};
  }
};

// The queries of `rows` new rows from t on, `heads` of each from `head` on, which share key/value head h.
template <typename T>
void attend_tile(const AttentionShape& z, int64_t b, int64_t h, int64_t t, int64_t rows, int64_t head, int64_t heads,
                 const T* q, int64_t q_token, const T* k_cache, const T* v_cache, int64_t length, T* out, double scale,
                 int64_t window, double softcap, Scratch<T>& scratch) {
  using W = typename Wide<T>::type;
  constexpr int64_t block = 2 * 64 / sizeof(W);
  const int64_t d = z.d, pitch = z.pitch(), num = rows * heads, first_row = b * z.T + t;
  W *wide = scratch.q.data(), *scores = scratch.scores.data(), *acc = scratch.acc.data();
  const Slots<T> cache{k_cache + (b * z.K + h) * d * z.S, v_cache + (b * z.K + h) * d * z.S, z.S, 0};
  int64_t first[kMaxTile], last[kMaxTile], begin = z.S, end = 0;  // slots that each row may see, and all of them
  for (int64_t r = 0; r < rows; ++r) {
    last[r] = std::min(z.S, length + (z.tree.path ? z.tree.depth[first_row + r] : t + r) + 1);
    first[r] = window > 0 ? std::max<int64_t>(0, last[r] - window) : 0;
    begin = std::min(begin, first[r]), end = std::max(end, last[r]);
  }
  begin -= begin % block;  // blocks lie at fixed slots, whoever shares the tile
  const int64_t shared = z.tree.path ? length / 32 * 32 : z.S;  // up to here all rows see the same
  const int64_t behind = std::max(begin, shared), stop = (end + block - 1) / block * block;
  auto tail = [&](int64_t r) {
    const int64_t row = first_row + r;
    return Tail<T>{cache, shared, length - shared, z.tree.path + row * z.tree.P, z.tree.depth[row] + 1};
  };
  for (int64_t n = 0; n < num; ++n) {
    const T* from = q + (t + n / heads) * q_token + (head + n % heads) * d;
    for (int64_t i = 0; i < d; ++i) wide[i * num + n] = widen(from[i]) * static_cast<W>(scale);
  }
  as_constant<kMaxTile>(num, [&](auto N) { score<T, N>(wide, num, cache, begin, std::min(shared, end), d, scores, pitch); });
  for (int64_t r = 0; r < rows && z.tree.path; ++r) {
    const Slots<T> own = tail(r).keys(d, z.tail_slots(), scratch.k.data());
    as_constant<kMaxTile>(heads, [&](auto N) {
      score<T, N>(wide + r * heads, num, own, behind, last[r], d, scores + r * heads * pitch, pitch);
    });
  }
  W totals[kMaxTile];
  for (int64_t n = 0; n < num; ++n) {
    totals[n] = weigh(scores + n * pitch, begin, first[n / heads], last[n / heads], stop, softcap);
    std::fill_n(acc + n * kMaxHead, d, W(0));
  }
  as_constant<kMaxTile>(num, [&](auto N) { blend<T, N>(scores, pitch, cache, begin, std::min(shared, end), d, acc); });
  for (int64_t r = 0; r < rows && z.tree.path; ++r) {
    const Slots<T> own = tail(r).values(d, scratch.v.data());
    as_constant<kMaxTile>(heads, [&](auto N) {
      blend<T, N>(scores + r * heads * pitch, pitch, own, behind, last[r], d, acc + r * heads * kMaxHead);
    });
  }
  for (int64_t n = 0; n < num; ++n) {
    T* to = out + ((first_row + n / heads) * z.H + head + n % heads) * d;
    for (int64_t i = 0; i < d; ++i) narrow(acc[n * kMaxHead + i] / totals[n], to + i);
  }
}

// This thread's share of all new rows, by row of the batch, key/value head and part of its group; as many at once as fit.
template <typename T>
void attend_share(const AttentionShape& z, int64_t me, int64_t all, const T* q, int64_t q_row, int64_t q_token,
                  const T* k_cache, const T* v_cache, const int64_t* lengths, T* out, double scale, int64_t window,
                  double softcap, Scratch<T>& scratch) {
  const int64_t G = z.H / z.K, parts = (G + kMaxTile - 1) / kMaxTile, most = std::max<int64_t>(1, kMaxTile / G);
  const int64_t total = z.B * z.K * parts * z.T, end = total * (me + 1) / all;
  for (int64_t item = total * me / all, rows; item < end; item += rows) {
    const int64_t t = item % z.T, part = item / z.T % parts, h = item / z.T / parts % z.K, b = item / z.T / parts / z.K;
    rows = std::min({most, z.T - t, end - item});
    attend_tile(z, b, h, t, rows, h * G + part * kMaxTile, std::min(kMaxTile, G - part * kMaxTile), q + b * q_row, q_token,
                k_cache, v_cache, lengths[b], out, scale, window, softcap, scratch);
  }
}

// Keeps the rows of a path: row path[j] of the new ones becomes row j, for all layers (kv: addresses of all k, then v).
template <typename T>
void keep_rows(const int64_t* kv, int64_t layers, const int64_t* heads, const int64_t* sizes, int64_t B, int64_t S,
               const int64_t* lengths, const int64_t* path, const int64_t* num, int64_t P) {
  for (int64_t layer = 0; layer < layers; ++layer)
    for (int64_t b = 0; b < B; ++b) {
      int64_t from = 0;  // rows before are in place
      while (from < num[b] && path[b * P + from] == from) ++from;
      if (from == num[b]) continue;
      const int64_t K = heads[layer], d = sizes[layer];
      for (int64_t h = 0; h < K; ++h) {
        T* k = reinterpret_cast<T*>(kv[layer]) + (b * K + h) * d * S + lengths[b];
        T* v = reinterpret_cast<T*>(kv[layers + layer]) + ((b * K + h) * S + lengths[b]) * d;
        for (int64_t i = 0; i < d; ++i)
          for (int64_t j = from; j < num[b]; ++j) k[i * S + j] = k[i * S + path[b * P + j]];  // paths ascend: path[j] >= j
        for (int64_t j = from; j < num[b]; ++j) std::memmove(v + j * d, v + path[b * P + j] * d, d * sizeof(T));
      }
    }
}

template <typename T>
void attend(const T* q, const T* k_new, const T* v_new, T* k_cache, T* v_cache, const int64_t* lengths, T* out,
            const int64_t* depth, const int64_t* path, const int64_t* shape, const int64_t* strides, double scale,
            int64_t window, double softcap) {
  const AttentionShape z{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], {depth, path, shape[7]}};
#pragma omp parallel num_threads(static_cast<int>(shape[6]))
  {
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < z.B; ++b)
      for (int64_t h = 0; h < z.K; ++h)
        for (int64_t t = 0; t < z.T; ++t)
          store_kv(z, b, h, lengths[b] + z.place(b, t), k_new + b * strides[2] + t * strides[3] + h * z.d,
                   v_new + b * strides[4] + t * strides[5] + h * z.d, k_cache, v_cache);
    Scratch<T> scratch(z);
    attend_share(z, omp_get_thread_num(), omp_get_num_threads(), q, strides[0], strides[1], k_cache, v_cache, lengths, out,
                 scale, window, softcap, scratch);
  }
}

}  // namespace sharesd
