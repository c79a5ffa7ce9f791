// Number types of the CPU kernels: the stored type, and the wider type of sums.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>
#if !defined(_OPENMP)
#error "build with OpenMP (-fopenmp)"
#endif
#include <omp.h>

#include "simd.h"

namespace sharesd {

struct bf16 { uint16_t bits; };
typedef _Float16 f16;
namespace names {  // those of torch
using bfloat16 = bf16;
using float16 = f16;
using float32 = float;
using float64 = double;
}  // namespace names

// One 64-byte vector of the type of sums: float, or double for double.
template <typename T> struct Wide { using type = float; };
template <> struct Wide<double> { using type = double; };
template <typename W> struct Vec { using type = vfloat; };
template <> struct Vec<double> { using type = vdouble; };

// As many numbers from memory as a vector has, widened to its own.
template <typename T, typename V> inline void load(const T* p, V* out) {
  if constexpr (IsPair<V>::value) {
    load(p, &out->low);
    load(p + V::kHalf, &out->high);
  } else if constexpr (std::is_same_v<T, bf16>) {
#if defined(__AVX512F__)  // GCC widens the halves of a vector one after the other
    *out = (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(get<__m256i>(p)), 16);
#elif defined(__AVX2__)
    *out = (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(get<__m128i>(p)), 16);
#else
    using words = typename VectorOf<uint32_t, sizeof(V)>::type;
    using halves = typename VectorOf<uint16_t, sizeof(V) / 2>::type;
    *out = (V)(__builtin_convertvector(get<halves>(p), words) << 16);
#endif
  } else if constexpr (std::is_same_v<T, f16>) {
#if defined(__AVX512F__)
    *out = (V)_mm512_cvtph_ps(get<__m256i>(p));
#elif defined(__AVX2__) && defined(__F16C__)
    *out = (V)_mm256_cvtph_ps(get<__m128i>(p));
#else
    for (size_t i = 0; i < sizeof(V) / 4; ++i) (*out)[i] = static_cast<float>(p[i]);
#endif
  } else if constexpr (std::is_same_v<T, int8_t>) {
#if defined(__AVX512F__)
    *out = (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(get<__m128i>(p)));
#elif defined(__AVX2__)
    *out = (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    for (size_t i = 0; i < sizeof(V) / 4; ++i) (*out)[i] = p[i];
#endif
  } else {
    *out = get<V>(p);
  }
}

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

template <typename T> inline void widen_all(const T* x, int64_t n, float* to) {
  int64_t i = 0;
  for (vfloat v; i + 16 <= n; i += 16) load(x + i, &v), put(v, to + i);
  for (; i < n; ++i) to[i] = static_cast<float>(widen(x[i]));
}

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

// As above for a whole vector, and 0 if it is too small to matter, -infinity included. For weights that are rounded to 16 bits
// (T) a shorter polynomial is enough, with an error of 4e-5.
template <typename T> inline vfloat exp_or_0(vfloat x) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: a number added to it is rounded to a whole one, in its lowest bits
  const vfloat shifted = x * 1.44269504f + magic, n = shifted - magic;
  const vfloat r = x - n * 0.693145752f - n * 1.42860677e-6f;
  vfloat p = 0.5f + r * (0.166666657f + r * 0.0416665853f);
  if constexpr (sizeof(T) > 2)
    p = 0.5f + r * (0.166666657f + r * (0.0416665853f + r * (0.00833345205f + r * 0.00138888f)));
  p = 1.0f + r * (1.0f + r * p);
  p = as<vfloat>(as<vuint>(p) + (as<vuint>(shifted) << 23));  // wraps around where the result is not used
  return select(x < -87.0f, vfloat{}, p);
}
template <typename T> inline vdouble exp_or_0(vdouble x) {
  double some[8];
  put(x, some);
  for (double& each : some) each = std::exp(each);
  return get<vdouble>(some);
}

// Stores a vector as numbers of type T; `rounded` are their values.
template <typename T, typename V> inline void store_rounded(const V& x, T* to, V* rounded) {
  if constexpr (IsPair<V>::value) {
    store_rounded(x.low, to, &rounded->low);
    store_rounded(x.high, to + V::kHalf, &rounded->high);
  } else if constexpr (std::is_same_v<T, bf16>) {
    using words = typename VectorOf<uint32_t, sizeof(V)>::type;
    using halves = typename VectorOf<uint16_t, sizeof(V) / 2>::type;
#if defined(__AVX512BF16__)
    const halves bits = (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    const words u = (words)x;
    const halves bits = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, halves);  // NaN is not kept
#endif
    put(bits, to);
    *rounded = (V)(__builtin_convertvector(bits, words) << 16);
  } else if constexpr (std::is_same_v<T, f16>) {
#if defined(__AVX512F__)
    put(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT), to);
#elif defined(__AVX2__) && defined(__F16C__)
    put(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT), to);
#else
    for (size_t i = 0; i < sizeof(V) / 4; ++i) to[i] = static_cast<f16>(x[i]);
#endif
    load(to, rounded);
  } else {
    put(x, to);
    *rounded = x;
  }
}

// Process arrays of this size a vector at a time: f(get, put), where get(p) is the next vector of p, padded with 0 at the end,
// and put(x, p) stores one there, rounded, and returns the stored numbers.
template <typename T, typename F> inline void by_vectors(int64_t size, F&& f) {
  using V = typename Vec<typename Wide<T>::type>::type;
  constexpr int64_t L = sizeof(V) / sizeof(typename Wide<T>::type);
  int64_t i = 0;
  for (; i + L <= size; i += L)
    f([i](const auto* p) {
      V x;
      load(p + i, &x);
      return x;
    }, [i](V x, T* p) {
      store_rounded(x, p + i, &x);
      return x;
    });
  if (i == size) return;
  f([i, size](const auto* p) {
    std::decay_t<decltype(*p)> some[L] = {};
    std::copy(p + i, p + size, some);
    V x;
    load(some, &x);
    return x;
  }, [i, size](V x, T* p) {
    T some[L];
    store_rounded(x, some, &x);
    std::copy(some, some + size - i, p + i);
    return x;
  });
}

// Memory of n elements on a 64-byte border, not initialised.
template <typename T> class Aligned {
 public:
  explicit Aligned(int64_t n) : memory_(new T[n + 64 / sizeof(T)]) {}
  T* data() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64); }

 private:
  std::unique_ptr<T[]> memory_;
};

}  // namespace sharesd
