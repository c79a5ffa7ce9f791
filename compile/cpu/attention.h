// Attention over a static KV cache. Every query goes through the same operations in the same order over the slots it may
// see and nothing else: its result is the same bits whatever the width of the step, the number of slots, the batch or the
// number of threads. That is what makes a row of a wide verify step equal to a plain step.
//
// Layouts: q [B, T, H, d] and k, v [B, T, K, d] with a stride per row and token (they are slices of one projection);
// k cache [B, K, d, S], slots innermost so that a vector holds the scores of neighbouring slots; v cache [B, K, S, d];
// out [B, T, H, d] contiguous; lengths [B]. S is a multiple of 32.
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

// scores: N rows of `pitch` elements, 64-byte aligned. k [d, S], v [S, d].
template <typename T, int N>
void attend_tile(const Queries<T>& tile, const T* k, const T* v, int64_t S, int64_t d, double scale, double softcap,
                 typename Wide<T>::type* scores, int64_t pitch) {
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
    for (int64_t i = 0; i < d; ++i) {
      V a, b;
      load(k + i * S + s, &a);
      load(k + i * S + s + L, &b);
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
    if (d - i >= 4 * L) {
      for (int64_t s = begin; s < end; ++s) {
        V x[4];
        for (int j = 0; j < 4; ++j) load(v + s * d + i + j * L, &x[j]);
        for (int n = 0; n < N; ++n)
          for (int j = 0; j < 4; ++j) acc[n][j] += scores[n * pitch + s] * x[j];
      }
    } else {
      for (int64_t s = begin; s < end; ++s)
        for (int n = 0; n < N; ++n) {
          W* a = reinterpret_cast<W*>(acc[n]);
          for (int64_t j = 0; j < d - i; ++j) a[j] += scores[n * pitch + s] * widen(v[s * d + i + j]);
        }
    }
    for (int n = 0; n < N; ++n)
      for (int64_t j = 0; j < std::min<int64_t>(4 * L, d - i); ++j)
        narrow(reinterpret_cast<W*>(acc[n])[j] / sums[n], tile.out[n] + i + j);
  }
}

struct AttentionShape {
  int64_t B, T, H, K, S, d;
  int64_t tiles() const { return (T * (H / K) + kMaxTile - 1) / kMaxTile; }  // of queries, for each key/value head
  int64_t pitch() const { return (S + 63) / 32 * 32; }
};

// Write one new token of one head into the caches.
template <typename T>
void store_kv(const AttentionShape& z, int64_t b, int64_t h, int64_t slot, const T* k, const T* v, T* k_cache, T* v_cache) {
  if (slot < 0 || slot >= z.S) return;  // padding rows of a finished sequence
  T* kc = k_cache + (b * z.K + h) * z.d * z.S + slot;
  for (int64_t i = 0; i < z.d; ++i) kc[i * z.S] = k[i];
  std::memcpy(v_cache + ((b * z.K + h) * z.S + slot) * z.d, v, z.d * sizeof(T));
}

// Tile number `tile` of key/value head h. `scores` holds kMaxTile * pitch() elements, 64-byte aligned.
template <typename T>
void attend_head(const AttentionShape& z, int64_t b, int64_t h, int64_t tile, const T* q, int64_t q_row, int64_t q_token,
                 const T* k_cache, const T* v_cache, const int64_t* lengths, T* out, double scale, int64_t window,
                 double softcap, typename Wide<T>::type* scores) {
  const int64_t G = z.H / z.K, count = std::min(kMaxTile, z.T * G - tile * kMaxTile);
  Queries<T> qs;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t t = (tile * kMaxTile + n) / G, head = h * G + (tile * kMaxTile + n) % G;
    qs.q[n] = q + b * q_row + t * q_token + head * z.d;
    qs.out[n] = out + ((b * z.T + t) * z.H + head) * z.d;
    qs.last[n] = std::min(z.S, lengths[b] + t + 1);
    qs.first[n] = window > 0 ? std::max<int64_t>(0, qs.last[n] - window) : 0;
  }
  const T* kc = k_cache + (b * z.K + h) * z.d * z.S;
  const T* vc = v_cache + (b * z.K + h) * z.d * z.S;
  switch (count) {
    case 4: attend_tile<T, 4>(qs, kc, vc, z.S, z.d, scale, softcap, scores, z.pitch()); break;
    case 3: attend_tile<T, 3>(qs, kc, vc, z.S, z.d, scale, softcap, scores, z.pitch()); break;
    case 2: attend_tile<T, 2>(qs, kc, vc, z.S, z.d, scale, softcap, scores, z.pitch()); break;
    default: attend_tile<T, 1>(qs, kc, vc, z.S, z.d, scale, softcap, scores, z.pitch());
  }
}

template <typename T>
void attend(const T* q, const T* k_new, const T* v_new, T* k_cache, T* v_cache, const int64_t* lengths, T* out,
            const int64_t* shape, const int64_t* strides, double scale, int64_t window, double softcap) {
  const AttentionShape z{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
#pragma omp parallel num_threads(static_cast<int>(shape[6]))
  {
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < z.B; ++b)
      for (int64_t h = 0; h < z.K; ++h)
        for (int64_t t = 0; t < z.T; ++t)
          store_kv(z, b, h, lengths[b] + t, k_new + b * strides[2] + t * strides[3] + h * z.d,
                   v_new + b * strides[4] + t * strides[5] + h * z.d, k_cache, v_cache);
    Aligned<typename Wide<T>::type> scores(kMaxTile * z.pitch());
#pragma omp for collapse(3) schedule(static)
    for (int64_t b = 0; b < z.B; ++b)
      for (int64_t h = 0; h < z.K; ++h)
        for (int64_t tile = 0; tile < z.tiles(); ++tile)
          attend_head(z, b, h, tile, q, strides[0], strides[1], k_cache, v_cache, lengths, out, scale, window, softcap,
                      scores.data());
  }
}

}  // namespace sharesd
