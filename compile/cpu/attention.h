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

namespace sharesd {

constexpr int64_t kMaxTile = 4;
constexpr int64_t kMaxHead = 512;

template <typename T> struct Queries {  // up to kMaxTile queries which share a key/value head
  const T* q[kMaxTile];
  T* out[kMaxTile];
  int64_t first[kMaxTile], last[kMaxTile];  // slots which each may see
};

template <typename T> struct Slots {  // keys [d, pitch] and values [slots, d], from slot `begin` on
  const T *k, *v;
  int64_t pitch, begin;
};

// Slots from `tail.begin` on (a multiple of 32) are read from there. scores: N rows of `pitch` elements, 64-byte aligned.
template <typename T, int N>
void attend_tile(const Queries<T>& tile, const Slots<T>& cache, const Slots<T>& tail, int64_t d, double scale,
                 double softcap, typename Wide<T>::type* scores, int64_t pitch) {
  using W = typename Wide<T>::type;
  using V = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W);
  W q[N][kMaxHead];
  int64_t begin = tile.first[0], end = tile.last[0];
  for (int n = 0; n < N; ++n) {
    for (int64_t i = 0; i < d; ++i) q[n][i] = widen(tile.q[n][i]) * static_cast<W>(scale);
    begin = std::min(begin, tile.first[n]);
    end = std::max(end, tile.last[n]);
  }
  begin -= begin % (2 * L);  // blocks start at fixed slots, whoever shares the tile
  for (int64_t s = begin; s < end; s += 2 * L) {
    V dot[N][2] = {};
    const Slots<T>& from = s < tail.begin ? cache : tail;
    const T* k = from.k + (s - from.begin);
    for (int64_t i = 0; i < d; ++i) {
      V a, b;
      load(k + i * from.pitch, &a);
      load(k + i * from.pitch + L, &b);
      __builtin_prefetch(k + i * from.pitch + 2 * L);  // rows lie too far apart for the processor to foresee them
      for (int n = 0; n < N; ++n) {
        dot[n][0] += q[n][i] * a;
        dot[n][1] += q[n][i] * b;
      }
    }
    for (int n = 0; n < N; ++n) std::memcpy(scores + n * pitch + s, dot[n], 2 * sizeof(V));
  }
  W sums[N];
  for (int n = 0; n < N; ++n) {
    W* row = scores + n * pitch;
    const int64_t first = tile.first[n], last = tile.last[n];
    if (softcap > 0)
      for (int64_t s = first; s < last; ++s) row[s] = static_cast<W>(softcap) * std::tanh(row[s] / static_cast<W>(softcap));
    W top = row[first];
    for (int64_t s = first; s < last; ++s) top = row[s] > top ? row[s] : top;
    for (int64_t s = first; s < last; ++s) row[s] = exp_neg(row[s] - top);
    for (int64_t s = begin; s < first; ++s) row[s] = 0;
    const int64_t stop = (end + 2 * L - 1) / (2 * L) * (2 * L);
    for (int64_t s = last; s < stop; ++s) row[s] = 0;
    V sum = {};
    for (int64_t s = first - first % L; s < last; s += L) {
      V x;
      std::memcpy(&x, row + s, sizeof(V));
      sum += x;
    }
    sums[n] = 0;
    for (int64_t i = 0; i < L; ++i) sums[n] += sum[i];
  }
  for (int64_t i = 0; i < d; i += 4 * L) {  // four vectors of the output at a time
    V acc[N][4] = {};
    for (const Slots<T>* from : {&cache, &tail}) {
      const int64_t start = from == &cache ? begin : std::max(begin, tail.begin);
      const int64_t stop = from == &cache ? std::min(end, tail.begin) : end;
      const T* v = from->v - from->begin * d + i;
      if (d - i >= 4 * L) {
        for (int64_t s = start; s < stop; ++s) {
          V x[4];
          for (int j = 0; j < 4; ++j) load(v + s * d + j * L, &x[j]);
          for (int n = 0; n < N; ++n)
            for (int j = 0; j < 4; ++j) acc[n][j] += scores[n * pitch + s] * x[j];
        }
      } else {
        for (int64_t s = start; s < stop; ++s)
          for (int n = 0; n < N; ++n) {
            W* a = reinterpret_cast<W*>(acc[n]);
            for (int64_t j = 0; j < d - i; ++j) a[j] += scores[n * pitch + s] * widen(v[s * d + j]);
          }
      }
    }
    for (int n = 0; n < N; ++n)
      for (int64_t j = 0; j < std::min<int64_t>(4 * L, d - i); ++j)
        narrow(reinterpret_cast<W*>(acc[n])[j] / sums[n], tile.out[n] + i + j);
  }
}

struct Branches {  // of a draft tree; null pointers for a chain
  const int64_t* depth = nullptr;  // [B, T]: nodes above each row on its path
  const int64_t* path = nullptr;   // [B, T, P]: their slots behind the length, the row's own last
  int64_t P = 0;
};

struct AttentionShape {
  int64_t B, T, H, K, S, d;
  Branches tree;
  // Tiles of queries for each key/value head. In a tree, the queries of a tile belong to one row.
  int64_t tiles() const { return tree.path ? T * row_tiles() : (T * (H / K) + kMaxTile - 1) / kMaxTile; }
  int64_t row_tiles() const { return (H / K + kMaxTile - 1) / kMaxTile; }
  int64_t pitch() const { return (S + 63) / 32 * 32; }
  int64_t tail_slots() const { return tree.path ? (tree.P + 63) / 32 * 32 : 0; }
  // Where a new row is written, counted from the length.
  int64_t place(int64_t b, int64_t t) const {
    const int64_t row = b * T + t;
    return tree.path ? tree.path[row * tree.P + tree.depth[row]] : t;
  }
};

template <typename T> struct Scratch {  // of one thread
  Aligned<typename Wide<T>::type> scores;
  Aligned<T> k, v;
  explicit Scratch(const AttentionShape& z)
      : scores(kMaxTile * z.pitch()), k(z.tail_slots() * z.d), v(z.tail_slots() * z.d) {}
};

// Write one new token of one head into the caches.
template <typename T>
void store_kv(const AttentionShape& z, int64_t b, int64_t h, int64_t slot, const T* k, const T* v, T* k_cache, T* v_cache) {
  if (slot < 0 || slot >= z.S) return;  // padding rows of a finished sequence
  T* kc = k_cache + (b * z.K + h) * z.d * z.S + slot;
  for (int64_t i = 0; i < z.d; ++i) kc[i * z.S] = k[i];
  std::memcpy(v_cache + ((b * z.K + h) * z.S + slot) * z.d, v, z.d * sizeof(T));
}

// Copies the slots behind the last full block below `length`, then the path's rows: as they would lie without branches.
template <typename T>
Slots<T> copy_tail(const AttentionShape& z, const Slots<T>& cache, int64_t length, const int64_t* path, int64_t num,
                   Scratch<T>& scratch) {
  const int64_t begin = length / 32 * 32, rest = length - begin, pitch = z.tail_slots();
  T *k = scratch.k.data(), *v = scratch.v.data();
  for (int64_t i = 0; i < z.d; ++i) {
    std::memcpy(k + i * pitch, cache.k + i * cache.pitch + begin, rest * sizeof(T));
    for (int64_t j = 0; j < num; ++j) k[i * pitch + rest + j] = cache.k[i * cache.pitch + length + path[j]];
  }
  std::memcpy(v, cache.v + begin * z.d, rest * z.d * sizeof(T));
  for (int64_t j = 0; j < num; ++j) std::memcpy(v + (rest + j) * z.d, cache.v + (length + path[j]) * z.d, z.d * sizeof(T));
  return {k, v, pitch, begin};
}

// Tile number `tile` of key/value head h.
template <typename T>
void attend_head(const AttentionShape& z, int64_t b, int64_t h, int64_t tile, const T* q, int64_t q_row, int64_t q_token,
                 const T* k_cache, const T* v_cache, const int64_t* lengths, T* out, double scale, int64_t window,
                 double softcap, Scratch<T>& scratch) {
  const int64_t G = z.H / z.K, per = z.row_tiles();
  const Slots<T> cache{k_cache + (b * z.K + h) * z.d * z.S, v_cache + (b * z.K + h) * z.d * z.S, z.S, 0};
  Slots<T> tail{nullptr, nullptr, 0, z.S};
  int64_t first = tile * kMaxTile, count = std::min(kMaxTile, z.T * G - first), depth = -1;
  if (z.tree.path) {
    const int64_t row = b * z.T + tile / per;
    first = tile / per * G + tile % per * kMaxTile;
    count = std::min(kMaxTile, (tile / per + 1) * G - first);
    depth = z.tree.depth[row];
    const int64_t* path = z.tree.path + row * z.tree.P;
    if (path[depth] != depth) tail = copy_tail(z, cache, lengths[b], path, depth + 1, scratch);
  }
  Queries<T> qs;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t t = (first + n) / G, head = h * G + (first + n) % G;
    qs.q[n] = q + b * q_row + t * q_token + head * z.d;
    qs.out[n] = out + ((b * z.T + t) * z.H + head) * z.d;
    qs.last[n] = std::min(z.S, lengths[b] + (depth < 0 ? t : depth) + 1);
    qs.first[n] = window > 0 ? std::max<int64_t>(0, qs.last[n] - window) : 0;
  }
  auto* scores = scratch.scores.data();
  switch (count) {
    case 4: attend_tile<T, 4>(qs, cache, tail, z.d, scale, softcap, scores, z.pitch()); break;
    case 3: attend_tile<T, 3>(qs, cache, tail, z.d, scale, softcap, scores, z.pitch()); break;
    case 2: attend_tile<T, 2>(qs, cache, tail, z.d, scale, softcap, scores, z.pitch()); break;
    default: attend_tile<T, 1>(qs, cache, tail, z.d, scale, softcap, scores, z.pitch());
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
#pragma omp for collapse(3) schedule(static)
    for (int64_t b = 0; b < z.B; ++b)
      for (int64_t h = 0; h < z.K; ++h)
        for (int64_t tile = 0; tile < z.tiles(); ++tile)
          attend_head(z, b, h, tile, q, strides[0], strides[1], k_cache, v_cache, lengths, out, scale, window, softcap,
                      scratch);
  }
}

}  // namespace sharesd
