// y = x W^T for weights of 4 or 8 bits and a few rows: the drafter's linears. Activations are rounded with one scale for every
// 32 of them, so that products are integers (as llama.cpp does for its 4-bit formats); sums of a group are exact, groups are
// added in float32. With weights of 4 bits they are rounded to 8 bits, which would be most of the error with weights of 8 bits:
// there they have 16.
//
// w[n, k] = (code - middle) * scale[n, g] + offset[n, g], middle = 8 or 128.
// Weights [N / 16][K / G], each the codes of G inputs of 16 outputs, their scales [16] and offsets [16] in bfloat16: a thread
// reads one stream of memory, which processors predict far better than several short ones.
// 4 bits: codes [G / 8][16 outputs][4 bytes]; a byte holds input k (low half) and input k + 4 (high half).
// 8 bits: codes [G / 4][16 outputs][4 bytes], of inputs k, k + 2, k + 1, k + 3: even bytes, and odd ones, are neighbours.
#pragma once
#include "linear.h"

namespace sharesd {

constexpr int64_t kXGroup = 32;  // activations that share a scale; divides every group size of the weights

struct RoundedRows {  // M rows of x
  std::vector<int8_t> codes8;     // with weights of 4 bits
  std::vector<int16_t> codes16;   // with weights of 8
  std::vector<float> scale, sum;  // of every group; the sum is of the decoded values
  std::vector<int32_t> total;     // sum of the codes
};

template <typename T> inline void load_floats(const T* p, vfloat* out) { load(p, out); }
inline void load_floats(const double* p, vfloat* out) {
  float some[16];
  for (int i = 0; i < 16; ++i) some[i] = static_cast<float>(p[i]);
  *out = get<vfloat>(some);
}

// 16 numbers with fewer significant bits than their type.
template <typename E, typename V> inline void store_narrow(const V& x, E* to) {
  if constexpr (IsPair<V>::value) {
    store_narrow(x.low, to);
    store_narrow(x.high, to + V::kHalf);
  } else {
    using narrow = typename VectorOf<E, sizeof(V) / 4 * sizeof(E)>::type;
    const narrow some = __builtin_convertvector(x, narrow);
    std::memcpy(to, &some, sizeof some);
  }
}

template <typename T, typename E>
void round_rows(const T* x, int64_t M, int64_t K, std::vector<E>& to, RoundedRows& r) {
  constexpr float most = std::numeric_limits<E>::max();
  const int64_t groups = K / kXGroup;
  to.resize(M * K);
  r.scale.resize(M * groups);
  r.sum.resize(M * groups);
  r.total.resize(M * groups);
  for (int64_t g = 0; g < M * groups; ++g) {
    vfloat v[2];
    for (int h = 0; h < 2; ++h) load_floats(x + g * kXGroup + h * 16, &v[h]);
    const float top = largest(greater(absolute(v[0]), absolute(v[1])));
    const float scale = top / most, inverse = top > 0 ? most / top : 0;
    vint sums = {};
    for (int h = 0; h < 2; ++h) {
      const vfloat whole = (v[h] * inverse + 12582912.0f) - 12582912.0f;  // to the nearest integer, ties to even
      const vint codes = convert<vint>(whole);
      store_narrow(codes, to.data() + g * kXGroup + h * 16);
      sums += codes;
    }
    const int32_t total = sum_of(sums);
    r.scale[g] = scale;
    r.total[g] = total;
    r.sum[g] = scale * static_cast<float>(total);
  }
}

// Codes in the order that products with weights of this many bits read.
template <typename T>
void round_rows(int64_t bits, const T* x, int64_t M, int64_t K, RoundedRows& r) {
  if (bits == 4) round_rows(x, M, K, r.codes8, r);
  if (bits == 8) round_rows(x, M, K, r.codes16, r);
}

// acc[lane] += sum over 4 inputs of w[lane][i] * x[i], for codes of 4 bits.
template <typename I, typename B> inline void dot4(I& acc, const B& w, const int8_t* x) {
  if constexpr (IsPair<I>::value) {
    dot4(acc.low, w.low, x);
    dot4(acc.high, w.high, x);
    return;
  } else {
    [[maybe_unused]] int32_t quad;
    std::memcpy(&quad, x, 4);
#if defined(__AVX512VNNI__)
    acc = (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    acc = (I)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(quad));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(quad));
    acc += (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    using shorts = typename VectorOf<int16_t, sizeof(I)>::type;
    using pairs = typename VectorOf<uint16_t, sizeof(I)>::type;
    const auto add = [&](const pairs& codes, int first) {  // of inputs `first` and `first` + 2
      const I xs = I{} + (x[first] & 0xffff) + x[first + 2] * 0x10000, products = (I)((shorts)codes * (shorts)xs);
      acc += (products << 16 >> 16) + (products >> 16);
    };
    add((pairs)w & 0xff, 0);
    add((pairs)w >> 8, 1);
#endif
  }
}

// Products of 32 inputs with codes of 4 bits, added up. AVX2 alone has no product that adds four bytes to 32 bits: there sums
// have 16 bits, which hold eight pairs, at most 8 * 2 * 15 * 127 = 30,480, and are widened once.
template <typename I> struct GroupSums {
  I sums;
  void clear() { sums = I{}; }
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)
  template <typename B> void add(const B& w, const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, 4);
    sums = (I)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(quad)));
    asm("" : "+x"(sums));  // GCC would add in another order, keep all products until then, and run out of registers
  }
  I total() const { return (I)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
  static constexpr int kMostRows = 4;
#else
  template <typename B> void add(const B& w, const int8_t* x) { dot4(sums, w, x); }
  I total() const { return sums; }
  static constexpr int kMostRows = 8;
#endif
};
template <typename H> struct GroupSums<Pair<H>> {
  GroupSums<H> low, high;
  void clear() { low.clear(), high.clear(); }
  template <typename B> void add(const Pair<B>& w, const int8_t* x) { low.add(w.low, x), high.add(w.high, x); }
  Pair<H> total() const { return pair_of(low.total(), high.total()); }
  static constexpr int kMostRows = GroupSums<H>::kMostRows;
};

// acc[lane] += sum over 2 inputs of w[lane][i] * x[i], of 16 bits each, w not negative.
template <typename I, typename U> inline void dot2(I& acc, const U& w, const int16_t* x) {
  if constexpr (IsPair<I>::value) {
    dot2(acc.low, w.low, x);
    dot2(acc.high, w.high, x);
  } else {
    [[maybe_unused]] int32_t pair;
    std::memcpy(&pair, x, 4);
#if defined(__AVX512VNNI__)
    acc = (I)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(pair));
#elif defined(__AVX512BW__)
    acc += (I)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(pair));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    acc = (I)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(pair));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    acc += (I)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(pair));
#elif defined(__SSE2__) && !defined(__AVX512F__)
    acc += (I)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(pair));
#else
    acc += (I)(w & 0xffff) * x[0] + (I)(w >> 16) * x[1];
#endif
  }
}

// Products of 32 inputs with codes of 8 bits.
struct WideSums {
  vint sums;
  void clear() { sums = vint{}; }
  void add(const vuint& w, const int16_t* x) { dot2(sums, w, x); }
  vint total() const { return sums; }
};

// Rows m..m+R against the 16 outputs whose weights begin at w.
template <int BITS, int R, typename T>
void low_tile(const RoundedRows& x, int64_t m, const uint8_t* w, const T* bias, T* y, int64_t N, int64_t left, int64_t K,
              int64_t G) {
  constexpr int64_t kBytes = 16 * kXGroup * BITS / 8;  // of the codes for a group of inputs
  const int64_t per = G / kXGroup, groups = K / kXGroup, first = m * groups;
  const int8_t* codes8 = x.codes8.data() + first * kXGroup;
  const int16_t* codes16 = x.codes16.data() + first * kXGroup;
  const float *scales = x.scale.data() + first, *x_sums = x.sum.data() + first;
  const int32_t* totals = x.total.data() + first;
  vfloat acc[R] = {};
  for (int64_t g = 0; g < groups; w += 64) {
    vfloat s, o;
    load(reinterpret_cast<const bf16*>(w + per * kBytes), &s);
    load(reinterpret_cast<const bf16*>(w + per * kBytes + 32), &o);
    float sum[R] = {};
    for (int64_t i = 0; i < per; ++i, ++g, w += kBytes) {
      std::conditional_t<BITS == 4, GroupSums<vint>, WideSums> dot[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) dot[r].clear();
#pragma GCC unroll 8
      for (int64_t j = 0; j < kBytes / 64; ++j) {
        const vuint v = get<vuint>(w + j * 64);
        __builtin_prefetch(w + j * 64 + 512);  // found by timing, to the first level of cache
        if constexpr (BITS == 4) {
          const vbyte low = as<vbyte>(v) & 15, high = as<vbyte>(v >> 4) & 15;
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const int8_t* xs = codes8 + g * kXGroup + r * K + j * 8;
            dot[r].add(low, xs);
            dot[r].add(high, xs + 4);
          }
        } else {
          const vuint even = v & 0xff00ff, odd = v >> 8 & 0xff00ff;
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const int16_t* xs = codes16 + g * kXGroup + r * K + j * 4;
            dot[r].add(even, xs);
            dot[r].add(odd, xs + 2);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vint codes = dot[r].total() - (BITS == 4 ? 8 : 128) * totals[r * groups + g];
        acc[r] += (s * scales[r * groups + g]) * convert<vfloat>(codes);
        sum[r] += x_sums[r * groups + g];
      }
    }
    for (int r = 0; r < R; ++r) acc[r] += o * sum[r];
  }
  for (int r = 0; r < R; ++r) {
    float sums[16];
    put(acc[r], sums);
    for (int64_t l = 0; l < std::min<int64_t>(16, left); ++l)
      narrow(bias ? sums[l] + static_cast<float>(widen(bias[l])) : sums[l], y + (m + r) * N + l);
  }
}

// Multiply all rows from m on by 16 outputs: unpacking codes takes longer than multiplying them, so rows share it.
template <int BITS, int R, typename T>
void low_rows(const RoundedRows& x, int64_t m, int64_t M, const uint8_t* w, const T* bias, T* y, int64_t N, int64_t left,
              int64_t K, int64_t G) {
  for (; m + R <= M; m += R) low_tile<BITS, R>(x, m, w, bias, y, N, left, K, G);
  if constexpr (R > 1)
    if (m < M) low_rows<BITS, R - 1>(x, m, M, w, bias, y, N, left, K, G);
}

template <typename T>
void low_blocks(int bits, const RoundedRows& x, const uint8_t* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K,
                int64_t G, int64_t begin, int64_t end) {
  const int64_t bytes = K / G * (16 * G * bits / 8 + 64);
  for (int64_t n = begin; n < end; ++n) {
    const T* b = bias ? bias + n * 16 : nullptr;
    T* out = y + n * 16;
    if (bits == 4) low_rows<4, GroupSums<vint>::kMostRows>(x, 0, M, w + n * bytes, b, out, N, N - n * 16, K, G);
    if (bits == 8) low_rows<8, 8>(x, 0, M, w + n * bytes, b, out, N, N - n * 16, K, G);
  }
}

template <typename T>
void quantized_linear(const T* x, const uint8_t* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t G,
                      int64_t bits, int threads) {
  RoundedRows rounded;
  round_rows(bits, x, M, K, rounded);
  const int64_t blocks = (N + 15) / 16;
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    low_blocks(static_cast<int>(bits), rounded, w, bias, y, M, N, K, G, share(blocks, me, all), share(blocks, me + 1, all));
  }
}

}  // namespace sharesd
