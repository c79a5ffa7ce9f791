// Vectors of 64 bytes on every processor. With AVX-512 one fills a register. Elsewhere it is a pair of halves, down to a
// register, since compilers keep larger vectors in memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace sharesd {

#if defined(__AVX512F__)
constexpr size_t kRegister = 64;  // bytes
#elif defined(__AVX2__)
constexpr size_t kRegister = 32;
#else
constexpr size_t kRegister = 16;
#endif
constexpr bool kWideRegisters = kRegister == 64;  // and 32 of them

template <typename H> struct Pair {
  using E = std::decay_t<decltype(std::declval<const H&>()[0])>;
  static constexpr size_t kHalf = sizeof(H) / sizeof(E);
  H low, high;
  E operator[](size_t i) const { return i < kHalf ? low[i] : high[i - kHalf]; }
  Pair operator-() const { return {-low, -high}; }
};
template <typename H> inline Pair<H> pair_of(const H& low, const H& high) { return {low, high}; }
template <typename S> using Number = std::enable_if_t<std::is_arithmetic_v<S>>;

#define SHARESD_OPERATOR(op)                                                                              \
  template <typename H> inline auto operator op(const Pair<H>& a, const Pair<H>& b) {                     \
    return pair_of(a.low op b.low, a.high op b.high);                                                     \
  }                                                                                                       \
  template <typename H, typename S, typename = Number<S>> inline auto operator op(const Pair<H>& a, S b) { \
    const auto n = static_cast<typename Pair<H>::E>(b);                                                   \
    return pair_of(a.low op n, a.high op n);                                                              \
  }                                                                                                       \
  template <typename H, typename S, typename = Number<S>> inline auto operator op(S a, const Pair<H>& b) { \
    const auto n = static_cast<typename Pair<H>::E>(a);                                                   \
    return pair_of(n op b.low, n op b.high);                                                              \
  }
#define SHARESD_ARITHMETIC(op)                                                                       \
  SHARESD_OPERATOR(op)                                                                               \
  template <typename H, typename S> inline Pair<H>& operator op##=(Pair<H>& a, const S& b) { \
    return a = a op b;                                                                               \
  }
SHARESD_ARITHMETIC(+)
SHARESD_ARITHMETIC(-)
SHARESD_ARITHMETIC(*)
SHARESD_ARITHMETIC(/)
SHARESD_ARITHMETIC(&)
SHARESD_ARITHMETIC(|)
SHARESD_ARITHMETIC(^)
SHARESD_ARITHMETIC(<<)
SHARESD_ARITHMETIC(>>)
SHARESD_OPERATOR(<)
SHARESD_OPERATOR(>)
SHARESD_OPERATOR(<=)
SHARESD_OPERATOR(==)
#undef SHARESD_ARITHMETIC
#undef SHARESD_OPERATOR

// A vector of this many bytes.
template <typename E, size_t BYTES, bool FITS = (BYTES <= kRegister)> struct VectorOf {
  typedef E type __attribute__((vector_size(BYTES)));
};
template <typename E, size_t BYTES> struct VectorOf<E, BYTES, false> {
  using type = Pair<typename VectorOf<E, BYTES / 2>::type>;
};
typedef VectorOf<float, 64>::type vfloat;
typedef VectorOf<double, 64>::type vdouble;
typedef VectorOf<int32_t, 64>::type vint;
typedef VectorOf<uint32_t, 64>::type vuint;
typedef VectorOf<uint8_t, 64>::type vbyte;

template <typename V> struct IsPair : std::false_type {};
template <typename H> struct IsPair<Pair<H>> : std::true_type {};

// a if the mask is set, else b.
template <typename M, typename V> inline V select(const M& mask, const V& a, const V& b) {
  if constexpr (IsPair<V>::value)
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  else
    return mask ? a : b;
}
template <typename V> inline V greater(const V& a, const V& b) { return select(a > b, a, b); }
template <typename V> inline V absolute(const V& a) { return select(a < 0, -a, a); }

template <typename M> inline bool any_of(const M& mask) {
  if constexpr (IsPair<M>::value) {
    return any_of(mask.low | mask.high);
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(M) == 64) return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    if constexpr (sizeof(M) == 32) return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#endif
    bool any = false;
    for (size_t i = 0; i < sizeof(M) / sizeof(mask[0]); ++i) any |= mask[i] != 0;
    return any;
  }
}

// The same bits as another vector.
template <typename To, typename V> inline To as(const V& x) {
  if constexpr (IsPair<V>::value)
    return {as<decltype(To::low)>(x.low), as<decltype(To::high)>(x.high)};
  else
    return (To)x;
}

// The same numbers in another type.
template <typename To, typename V> inline To convert(const V& x) {
  if constexpr (IsPair<V>::value && IsPair<To>::value)
    return {convert<decltype(To::low)>(x.low), convert<decltype(To::high)>(x.high)};
  else
    return __builtin_convertvector(x, To);
}

// From and to memory, 64 bytes of the same type.
template <typename V> inline V get(const void* p) {
  if constexpr (IsPair<V>::value) {
    using H = decltype(V::low);
    return {get<H>(p), get<H>(static_cast<const char*>(p) + sizeof(H))};
  } else {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
}
template <typename V> inline void put(const V& v, void* p) {
  if constexpr (IsPair<V>::value) {
    put(v.low, p);
    put(v.high, static_cast<char*>(p) + sizeof v.low);
  } else {
    std::memcpy(p, &v, sizeof v);
  }
}

// The largest and the sum of a vector's numbers, the sum of halves of halves everywhere.
template <typename V> inline auto largest(const V& x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, vfloat>) return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<Pair<V>, vfloat>) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
  }
#endif
  if constexpr (IsPair<V>::value) {
    return largest(greater(x.low, x.high));
  } else {
    auto most = x[0];
    for (size_t i = 1; i < sizeof(V) / sizeof(most); ++i) most = x[i] > most ? x[i] : most;
    return most;
  }
}
template <typename V> inline auto sum_of(const V& x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, vfloat>) return _mm512_reduce_add_ps((__m512)x);
#endif
  if constexpr (IsPair<V>::value) {
    return sum_of(x.low + x.high);
  } else {
    constexpr size_t n = sizeof(V) / sizeof(x[0]);
    std::decay_t<decltype(x[0])> some[n];
    std::memcpy(some, &x, sizeof x);
    for (size_t half = n / 2; half; half /= 2)
      for (size_t i = 0; i < half; ++i) some[i] += some[i + half];
    return some[0];
  }
}

}  // namespace sharesd
