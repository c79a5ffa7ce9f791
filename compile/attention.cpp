// Attention over a static KV cache for the CPU. Every query goes through the same operations in the same order over the
// slots it may see and nothing else: its result is the same bits whatever the width of the step, the number of slots,
// the batch or the number of threads. That is what makes a row of a wide verify step equal to a plain step.
//
// Layouts: q [B, T, H, d] and k, v [B, T, K, d] with a stride per row and token (they are slices of one projection);
// k cache [B, K, d, S], slots innermost so that a vector holds the scores of neighbouring slots; v cache [B, K, S, d];
// out [B, T, H, d] contiguous; lengths [B].
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bf16 { uint16_t bits; };
typedef _Float16 f16;

// One 64-byte vector of the type that sums are kept in: float, or double for double.
template <typename T> struct Wide { using type = float; };
template <> struct Wide<double> { using type = double; };
typedef float vfloat __attribute__((vector_size(64)));
typedef double vdouble __attribute__((vector_size(64)));
template <typename W> struct Vec { using type = vfloat; };
template <> struct Vec<double> { using type = vdouble; };

inline void load(const bf16* p, vfloat* out) {
  typedef uint16_t v16 __attribute__((vector_size(32)));
  typedef uint32_t v32 __attribute__((vector_size(64)));
  v16 x;
  std::memcpy(&x, p, 32);
  v32 y = __builtin_convertvector(x, v32) << 16;
  std::memcpy(out, &y, 64);
}
inline void load(const f16* p, vfloat* out) {
  for (int i = 0; i < 16; ++i) (*out)[i] = static_cast<float>(p[i]);
}
inline void load(const float* p, vfloat* out) { std::memcpy(out, p, 64); }
inline void load(const double* p, vdouble* out) { std::memcpy(out, p, 64); }

inline float widen(bf16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
template <typename T> inline T widen(T x) { return x; }
inline void narrow(float x, bf16* y) {  // round to nearest even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &x, 4);
  y->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
template <typename W, typename T> inline void narrow(W x, T* y) { *y = static_cast<T>(x); }

// exp of x <= 0 as 2^n times a polynomial of the remainder, so that it vectorises (error below 2 ulp).
inline float exp_neg(float x) {
  x = x < -87.0f ? -87.0f : x;
  float n = std::nearbyintf(x * 1.44269504f);
  float r = x - n * 0.693145752f - n * 1.42860677e-6f;
  float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666657f + r * (0.0416665853f + r * (0.00833345205f + r * 0.00138888f)))));
  int32_t e = (static_cast<int32_t>(n) + 127) << 23;
  float s;
  std::memcpy(&s, &e, 4);
  return p * s;
}
inline double exp_neg(double x) { return std::exp(x); }

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
  for (int64_t i = 0; i < d; i += 4 * L) {  // four vectors of the output at a time; the caches are padded to match
    V acc[N][4] = {};
    const int64_t width = std::min<int64_t>(4, (d - i + L - 1) / L);
    if (width == 4) {
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

template <typename T>
void attend(const T* q, const T* k_new, const T* v_new, T* k_cache, T* v_cache, const int64_t* lengths, T* out,
            const int64_t* shape, const int64_t* strides, double scale, int64_t window, double softcap) {
  using W = typename Wide<T>::type;
  const int64_t B = shape[0], Tn = shape[1], H = shape[2], K = shape[3], S = shape[4], d = shape[5];
  const int threads = static_cast<int>(shape[6]);
  const int64_t G = H / K, queries = Tn * G, tiles = (queries + kMaxTile - 1) / kMaxTile;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < B; ++b)
      for (int64_t h = 0; h < K; ++h)
        for (int64_t t = 0; t < Tn; ++t) {
          const int64_t slot = lengths[b] + t;
          if (slot >= S) continue;  // padding rows of a finished sequence
          const T* kn = k_new + b * strides[2] + t * strides[3] + h * d;
          T* kc = k_cache + (b * K + h) * d * S + slot;
          for (int64_t i = 0; i < d; ++i) kc[i * S] = kn[i];
          std::memcpy(v_cache + ((b * K + h) * S + slot) * d, v_new + b * strides[4] + t * strides[5] + h * d, d * sizeof(T));
        }
    const int64_t pitch = (S + 63) / 32 * 32;
    std::vector<W> memory(kMaxTile * pitch + 16);
    W* scores = reinterpret_cast<W*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
#pragma omp for collapse(3) schedule(static)
    for (int64_t b = 0; b < B; ++b)
      for (int64_t h = 0; h < K; ++h)
        for (int64_t tile = 0; tile < tiles; ++tile) {
          Queries<T> qs;
          const int64_t count = std::min(kMaxTile, queries - tile * kMaxTile);
          for (int64_t n = 0; n < count; ++n) {
            const int64_t t = (tile * kMaxTile + n) / G, head = h * G + (tile * kMaxTile + n) % G;
            qs.q[n] = q + b * strides[0] + t * strides[1] + head * d;
            qs.out[n] = out + ((b * Tn + t) * H + head) * d;
            qs.last[n] = std::min(S, lengths[b] + t + 1);
            qs.first[n] = window > 0 ? std::max<int64_t>(0, qs.last[n] - window) : 0;
          }
          const T* kc = k_cache + (b * K + h) * d * S;
          const T* vc = v_cache + (b * K + h) * d * S;
          switch (count) {
            case 4: attend_tile<T, 4>(qs, kc, vc, S, d, scale, softcap, scores, pitch); break;
            case 3: attend_tile<T, 3>(qs, kc, vc, S, d, scale, softcap, scores, pitch); break;
            case 2: attend_tile<T, 2>(qs, kc, vc, S, d, scale, softcap, scores, pitch); break;
            default: attend_tile<T, 1>(qs, kc, vc, S, d, scale, softcap, scores, pitch);
          }
        }
  }
}

}  // namespace

// shape: B, T, H, K, S, d, threads; S is a multiple of 32. strides (elements): q row, q token, k row, k token, v row, v token.
#define EXPORT(NAME, TYPE)                                                                                           \
  extern "C" void NAME(const void* q, const void* k, const void* v, void* kc, void* vc, const int64_t* lengths,      \
                       void* out, const int64_t* shape, const int64_t* strides, double scale, int64_t window,        \
                       double softcap) {                                                                             \
    attend<TYPE>(static_cast<const TYPE*>(q), static_cast<const TYPE*>(k), static_cast<const TYPE*>(v),              \
                 static_cast<TYPE*>(kc), static_cast<TYPE*>(vc), lengths, static_cast<TYPE*>(out), shape, strides,   \
                 scale, window, softcap);                                                                            \
  }
EXPORT(attend_bfloat16, bf16)
EXPORT(attend_float16, f16)
EXPORT(attend_float32, float)
EXPORT(attend_float64, double)
