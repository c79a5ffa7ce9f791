// Number types of the CPU kernels: what is stored, and the wider type that sums are kept in.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if !defined(_OPENMP)
#error "build with OpenMP (-fopenmp)"
#endif
#include <omp.h>

namespace sharesd {

struct bf16 { uint16_t bits; };
typedef _Float16 f16;
namespace names {  // those of torch
using bfloat16 = bf16;
using float16 = f16;
using float32 = float;
using float64 = double;
}  // namespace names

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
#if defined(__AVX512F__)
  __m256i x;
  std::memcpy(&x, p, 32);
  *out = (vfloat)_mm512_cvtph_ps(x);
#else
  for (int i = 0; i < 16; ++i) (*out)[i] = static_cast<float>(p[i]);
#endif
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

// The same of a whole vector, and 0 where it is too small to matter, -infinity included. For weights that are rounded to 16
// bits (T) a shorter polynomial is enough, with an error of 4e-5.
template <typename T> inline vfloat exp_or_0(vfloat x) {
  typedef uint32_t vword __attribute__((vector_size(64)));  // wraps around where the result is not used
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: a number added to it is rounded to a whole one, in its lowest bits
  const vfloat shifted = x * 1.44269504f + magic, n = shifted - magic, zero = {};
  const vfloat r = x - n * 0.693145752f - n * 1.42860677e-6f;
  vfloat p = 0.5f + r * (0.166666657f + r * 0.0416665853f);
  if constexpr (sizeof(T) > 2)
    p = 0.5f + r * (0.166666657f + r * (0.0416665853f + r * (0.00833345205f + r * 0.00138888f)));
  p = 1.0f + r * (1.0f + r * p);
  vword exponent, bits;
  std::memcpy(&exponent, &shifted, 64);
  std::memcpy(&bits, &p, 64);
  bits += exponent << 23;
  std::memcpy(&p, &bits, 64);
  return x < -87.0f ? zero : p;
}
template <typename T> inline vdouble exp_or_0(vdouble x) {
  for (int i = 0; i < 8; ++i) x[i] = std::exp(x[i]);
  return x;
}

// The largest and the sum of a vector's numbers, always in the same order.
template <typename V> inline auto largest(const V& x) {
  auto most = x[0];
  for (size_t i = 1; i < sizeof(V) / sizeof(most); ++i) most = x[i] > most ? x[i] : most;
  return most;
}
template <typename V> inline auto sum_of(const V& x) {
  auto sum = x[0];
  for (size_t i = 1; i < sizeof(V) / sizeof(sum); ++i) sum += x[i];
  return sum;
}
#if defined(__AVX512F__)
template <> inline auto largest(const vfloat& x) { return _mm512_reduce_max_ps((__m512)x); }
template <> inline auto sum_of(const vfloat& x) { return _mm512_reduce_add_ps((__m512)x); }
#endif

// Stores a vector as numbers of type T; `rounded` are their values.
inline void store_rounded(vfloat x, bf16* to, vfloat* rounded) {
  typedef uint16_t v16 __attribute__((vector_size(32)));
  typedef uint32_t v32 __attribute__((vector_size(64)));
#if defined(__AVX512BF16__)
  const v16 bits = (v16)_mm512_cvtneps_pbh((__m512)x);
#else
  v32 u;
  std::memcpy(&u, &x, 64);
  const v16 bits = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, v16);  // NaN is left to chance
#endif
  std::memcpy(to, &bits, 32);
  const v32 wide = __builtin_convertvector(bits, v32) << 16;
  std::memcpy(rounded, &wide, 64);
}
inline void store_rounded(vfloat x, f16* to, vfloat* rounded) {
  for (int i = 0; i < 16; ++i) to[i] = static_cast<f16>(x[i]);
  load(to, rounded);
}
inline void store_rounded(vfloat x, float* to, vfloat* rounded) { std::memcpy(to, &x, 64), *rounded = x; }
inline void store_rounded(vdouble x, double* to, vdouble* rounded) { std::memcpy(to, &x, 64), *rounded = x; }

// Goes through arrays of this size a vector at a time: f(get, put), where get(p) is the next vector of p, filled up with 0 behind
// the end, and put(x, p) stores one there, rounded, and returns what was stored.
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

// Memory of n elements on a 64-byte border, whatever it held before.
template <typename T> class Aligned {
 public:
  explicit Aligned(int64_t n) : memory_(new T[n + 64 / sizeof(T)]) {}
  T* data() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64); }

 private:
  std::unique_ptr<T[]> memory_;
};

}  // namespace sharesd
