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

// M rows of x, in tiles of up to `most_rows` that are multiplied at once. In a tile what one product reads of all rows, 4 bytes
// of codes or numbers of one group, are neighbours: [groups][rows].
struct RoundedRows {
  std::vector<int8_t> codes8;    // with weights of 4 bits
  std::vector<int16_t> codes16;  // with weights of 8
  std::vector<float> scale;      // of every group
  std::vector<int32_t> less;     // the sum of its codes times -middle
  std::vector<float> sum;        // of its decoded values
  std::vector<float> wide_sum;   // of those of every G inputs
};

template <typename T> inline void load_floats(const T* p, vfloat* out) { load(p, out); }
inline void load_floats(const double* p, vfloat* out) {
  float some[16];
  for (int i = 0; i < 16; ++i) some[i] = static_cast<float>(p[i]);
  *out = get<vfloat>(some);
}

// 16 numbers with fewer significant bits than their type.
template <typename E, typename V> inline void store_narrow(const V& x, E* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<E, int8_t> && std::is_same_v<V, vint>) {  // which GCC narrows one after the other
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x.low, (__m256i)x.high), 0xd8);
    const __m128i some = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    return (void)std::memcpy(to, &some, sizeof some);
  }
#endif
  if constexpr (IsPair<V>::value) {
    store_narrow(x.low, to);
    store_narrow(x.high, to + V::kHalf);
  } else {
    using narrow = typename VectorOf<E, sizeof(V) / 4 * sizeof(E)>::type;
    const narrow some = __builtin_convertvector(x, narrow);
    std::memcpy(to, &some, sizeof some);
  }
}

// Codes of one group of a tile's row, whose words are `pitch` bytes apart.
template <typename T, typename E> void round_group(const T* x, E* to, int64_t pitch, float* scale, float* sum, int32_t* total) {
  constexpr float most = std::numeric_limits<E>::max();
  vfloat v[2];
  for (int h = 0; h < 2; ++h) load_floats(x + h * 16, &v[h]);
  const float top = largest(greater(absolute(v[0]), absolute(v[1])));
  const float inverse = top > 0 ? most / top : 0;
  vint sums = {};
  E memory[kXGroup], *codes = pitch == 4 ? to : memory;
  for (int h = 0; h < 2; ++h) {
    const vfloat whole = (v[h] * inverse + 12582912.0f) - 12582912.0f;  // to the nearest integer, ties to even
    const vint some = convert<vint>(whole);
    store_narrow(some, codes + h * 16);
    sums += some;
  }
  for (size_t i = 0; pitch > 4 && i < sizeof memory / 4; ++i)
    std::memcpy(reinterpret_cast<char*>(to) + i * pitch, reinterpret_cast<const char*>(memory) + i * 4, 4);
  *total = sum_of(sums);
  *scale = top / most;
  *sum = *scale * static_cast<float>(*total);
}

template <typename T, typename E>
void round_rows(const T* x, int64_t M, int64_t K, int64_t G, int64_t most_rows, int middle, std::vector<E>& to,
                RoundedRows& r) {
  const int64_t groups = K / kXGroup, per = G / kXGroup;
  to.resize(M * K);
  r.scale.resize(M * groups);
  r.less.resize(M * groups);
  r.sum.resize(M * groups);
  r.wide_sum.resize(M * groups / per);
  for (int64_t m = 0; m < M; ++m) {
    const int64_t first = m / most_rows * most_rows, rows = std::min(most_rows, M - first);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = first * groups + g * rows + m - first;
      E* codes = to.data() + first * K + g * rows * kXGroup + (m - first) * 4 / sizeof(E);
      int32_t total;
      round_group(x + m * K + g * kXGroup, codes, rows * 4, &r.scale[at], &r.sum[at], &total);
      r.less[at] = total * -middle;
    }
    for (int64_t g = 0; g < groups / per; ++g) {
      float sum = 0;
      for (int64_t i = 0; i < per; ++i) sum += r.sum[first * groups + (g * per + i) * rows + m - first];
      r.wide_sum[first * groups / per + g * rows + m - first] = sum;
    }
  }
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

// AVX2 and AVX-512 without VNNI have no product that adds four bytes to 32 bits.
#if (defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || (defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__))
#define SHARESD_SUMS_OF_16_BITS
#endif

// Products of 32 inputs with codes of 4 bits, added to a number, which start and total are both given. Sums of 16 bits hold
// eight pairs, at most 8 * 2 * 15 * 127 = 30,480, and are widened once.
template <typename I> struct GroupSums {
  I sums;
#if defined(SHARESD_SUMS_OF_16_BITS)
  using shorts = typename VectorOf<int16_t, sizeof(I)>::type;
  void start(int32_t) { sums = I{}; }
  template <typename B> void add(const B& w, const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, 4);
#if defined(__AVX512BW__)
    sums = (I)((shorts)sums + (shorts)_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(quad)));
    asm("" : "+v"(sums));  // GCC would add in another order, keep all products until then, and run out of registers
  }
  I total(int32_t number) const { return (I)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)) + number; }
#else
    sums = (I)((shorts)sums + (shorts)_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(quad)));
    asm("" : "+x"(sums));
  }
  I total(int32_t number) const { return (I)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)) + number; }
#endif
#else
  void start(int32_t number) { sums = I{} + number; }
  template <typename B> void add(const B& w, const int8_t* x) { dot4(sums, w, x); }
  I total(int32_t) const { return sums; }
#endif
};
template <typename H> struct GroupSums<Pair<H>> {
  GroupSums<H> low, high;
  void start(int32_t number) { low.start(number), high.start(number); }
  template <typename B> void add(const Pair<B>& w, const int8_t* x) { low.add(w.low, x), high.add(w.high, x); }
  Pair<H> total(int32_t number) const { return pair_of(low.total(number), high.total(number)); }
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
  void start(int32_t number) { sums = vint{} + number; }
  void add(const vuint& w, const int16_t* x) { dot2(sums, w, x); }
  vint total(int32_t) const { return sums; }
};

template <int BITS> using SumsOf = std::conditional_t<BITS == 4, GroupSums<vint>, WideSums>;
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
template <int BITS> constexpr int kRowsAtOnce = BITS == 4 ? 4 : 8;
#else
template <int BITS> constexpr int kRowsAtOnce = 8;
#endif

// Rows in tiles for products with weights of 4 or 8 bits that have scales for every G inputs.
template <typename T> void round_rows(int64_t bits, const T* x, int64_t M, int64_t K, int64_t G, RoundedRows& r) {
  if (bits == 4) round_rows(x, M, K, G, kRowsAtOnce<4>, 8, r.codes8, r);
  if (bits == 8) round_rows(x, M, K, G, kRowsAtOnce<8>, 128, r.codes16, r);
}

constexpr int64_t kLowAhead = 8192;  // bytes of weights that are fetched before they are used, to the first level of cache

// A vector that GCC would else load from memory for each of its uses; two loads of 64 bytes start in a cycle.
template <typename V> inline void in_register([[maybe_unused]] V& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
}

// Sums of some rows and 16 outputs, of which `left` are in a row of y.
template <typename T>
void store_low_sums(const float* sums, int64_t rows, const T* bias, T* y, int64_t N, int64_t left) {
  for (int64_t r = 0; r < rows; ++r, sums += 16)
    for (int64_t l = 0; l < std::min<int64_t>(16, left); ++l)
      narrow(bias ? sums[l] + static_cast<float>(widen(bias[l])) : sums[l], y + r * N + l);
}

// Weights of a thread: what follows those that it reads now. They end at `end`, then it reads from `next` on.
struct LowStream {
  const uint8_t *end, *next;
  const uint8_t* ahead(const uint8_t* w) const {
    const uint8_t* at = w + kLowAhead;
    return at < end ? at : next + (at - end);
  }
};

// Bytes of the weights of 16 outputs.
inline int64_t low_bytes(int64_t bits, int64_t K, int64_t G) { return K / G * (16 * G * bits / 8 + 64); }

// Rows m..m+R, a tile, against the 16 outputs whose weights begin at w.
template <int BITS, int R, typename T>
void low_tile(const RoundedRows& x, int64_t m, const LowStream& stream, const uint8_t* w, const T* bias, T* y, int64_t N,
              int64_t left, int64_t K, int64_t G) {
  constexpr int64_t kBytes = 16 * kXGroup * BITS / 8;  // of the codes for a group of inputs
  const int64_t per = G / kXGroup, groups = K / kXGroup, first = m * groups;
  const int8_t* codes8 = x.codes8.data() + m * K;
  const int16_t* codes16 = x.codes16.data() + m * K;
  const float *scales = x.scale.data() + first, *x_sums = x.wide_sum.data() + first / per;
  const int32_t* less = x.less.data() + first;
  vfloat acc[R] = {};
  for (int64_t g = 0; g < groups; g += per, w += 64, x_sums += R) {
    vfloat s, o;
    load(reinterpret_cast<const bf16*>(w + per * kBytes), &s);
    load(reinterpret_cast<const bf16*>(w + per * kBytes + 32), &o);
    for (int64_t i = 0; i < per; ++i, w += kBytes, scales += R, less += R) {
      SumsOf<BITS> dot[R];
      const uint8_t* ahead = stream.ahead(w);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) dot[r].start(less[r]);
#pragma GCC unroll 8
      for (int64_t j = 0; j < kBytes / 64; ++j) {
        vuint v = get<vuint>(w + j * 64);
        in_register(v);
        __builtin_prefetch(ahead + j * 64);
        if constexpr (BITS == 4) {
          const vbyte low = as<vbyte>(v) & 15, high = as<vbyte>(v >> 4) & 15;
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            dot[r].add(low, codes8 + r * 4);
            dot[r].add(high, codes8 + (R + r) * 4);
          }
          codes8 += R * 8;
        } else {
          const vuint even = v & 0xff00ff, odd = v >> 8 & 0xff00ff;
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            dot[r].add(even, codes16 + r * 2);
            dot[r].add(odd, codes16 + (R + r) * 2);
          }
          codes16 += R * 4;
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r] += (s * scales[r]) * convert<vfloat>(dot[r].total(less[r]));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] += o * x_sums[r];
  }
  float sums[R][16];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) put(acc[r], sums[r]);
  store_low_sums(sums[0], R, bias, y + m * N, N, left);
}

// Multiply all rows from m on by 16 outputs: unpacking codes takes longer than multiplying them, so rows share it.
template <int BITS, int R, typename T>
void low_rows(const RoundedRows& x, int64_t m, int64_t M, const LowStream& stream, const uint8_t* w, const T* bias, T* y,
              int64_t N, int64_t left, int64_t K, int64_t G) {
  for (; m + R <= M; m += R) low_tile<BITS, R>(x, m, stream, w, bias, y, N, left, K, G);
  if constexpr (R > 1)
    if (m < M) low_rows<BITS, R - 1>(x, m, M, stream, w, bias, y, N, left, K, G);
}

// Vector blocks begin..end of the outputs; then the thread reads from `next` on, if that is given.
template <typename T>
void low_blocks(int bits, const RoundedRows& x, const uint8_t* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K,
                int64_t G, int64_t begin, int64_t end, const void* next = nullptr) {
  const int64_t bytes = low_bytes(bits, K, G);
  const LowStream stream{w + end * bytes, next ? static_cast<const uint8_t*>(next) : w + end * bytes};
  for (int64_t n = begin; n < end; ++n) {
    const T* b = bias ? bias + n * 16 : nullptr;
    T* out = y + n * 16;
    if (bits == 4) low_rows<4, kRowsAtOnce<4>>(x, 0, M, stream, w + n * bytes, b, out, N, N - n * 16, K, G);
    if (bits == 8) low_rows<8, kRowsAtOnce<8>>(x, 0, M, stream, w + n * bytes, b, out, N, N - n * 16, K, G);
  }
}

template <typename T>
void quantized_linear(const T* x, const uint8_t* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t G,
                      int64_t bits, int threads) {
  RoundedRows rounded;
  round_rows(bits, x, M, K, G, rounded);
  const int64_t blocks = (N + 15) / 16;
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    low_blocks(static_cast<int>(bits), rounded, w, bias, y, M, N, K, G, share(blocks, me, all), share(blocks, me + 1, all));
  }
}

}  // namespace sharesd
