// y = x W^T for weights of 4 or 8 bits and a few rows: the drafter's linears. Activations are rounded to 8 bits with one scale
// for every 32 of them, so that products are integers (as llama.cpp does it for its 4-bit formats); sums of a group are
// exact, groups are added in float32.
//
// w[n, k] = (code - middle) * scale[n, g] + offset[n, g], middle = 8 or 128.
// Weights [N / 16][K / G], each the codes of G inputs of 16 outputs, their scales [16] and offsets [16] in bfloat16: a thread
// reads one stream of memory, which processors foresee far better than several short ones.
// 4 bits: codes [G / 8][16 outputs][4 bytes]; a byte holds input k (low half) and input k + 4 (high half).
// 8 bits: codes [G / 4][16 outputs][4 inputs].
#pragma once
#include "linear.h"

namespace sharesd {

constexpr int64_t kXGroup = 32;  // activations that share a scale; divides every group size of the weights

struct RoundedRows {  // M rows of x in 8 bits
  std::vector<int8_t> codes;
  std::vector<float> scale, sum;  // of every group; the sum is of what the codes stand for
  std::vector<int32_t> total;     // sum of the codes
};

template <typename T> inline void load_floats(const T* p, vfloat* out) { load(p, out); }
inline void load_floats(const double* p, vfloat* out) {
  float some[16];
  for (int i = 0; i < 16; ++i) some[i] = static_cast<float>(p[i]);
  *out = get<vfloat>(some);
}

// The lowest bytes of 16 numbers.
template <typename V> inline void store_bytes(const V& x, void* to) {
  if constexpr (IsPair<V>::value) {
    store_bytes(x.low, to);
    store_bytes(x.high, static_cast<char*>(to) + V::kHalf);
  } else {
    using bytes = typename VectorOf<int8_t, sizeof(V) / 4>::type;
    const bytes narrow = __builtin_convertvector(x, bytes);
    std::memcpy(to, &narrow, sizeof narrow);
  }
}

template <typename T>
void round_rows(const T* x, int64_t M, int64_t K, RoundedRows& r) {
  const int64_t groups = K / kXGroup;
  r.codes.resize(M * K);
  r.scale.resize(M * groups);
  r.sum.resize(M * groups);
  r.total.resize(M * groups);
  for (int64_t g = 0; g < M * groups; ++g) {
    vfloat v[2];
    for (int h = 0; h < 2; ++h) load_floats(x + g * kXGroup + h * 16, &v[h]);
    const float top = largest(greater(absolute(v[0]), absolute(v[1])));
    const float scale = top / 127, inverse = top > 0 ? 127 / top : 0;
    vint sums = {};
    for (int h = 0; h < 2; ++h) {
      const vfloat whole = (v[h] * inverse + 12582912.0f) - 12582912.0f;  // to the nearest integer, ties to even
      const vint codes = convert<vint>(whole);
      store_bytes(codes, r.codes.data() + g * kXGroup + h * 16);
      sums += codes;
    }
    const int32_t total = sum_of(sums);
    r.scale[g] = scale;
    r.total[g] = total;
    r.sum[g] = scale * static_cast<float>(total);
  }
}

// acc[lane] += sum over 4 inputs of w[lane][i] * x[i]; LOW: codes have 4 bits.
template <bool LOW, typename I, typename B> inline void dot4(I& acc, const B& w, const int8_t* x) {
  if constexpr (IsPair<I>::value) {
    dot4<LOW>(acc.low, w.low, x);
    dot4<LOW>(acc.high, w.high, x);
    return;
  } else {
    [[maybe_unused]] int32_t quad;
    std::memcpy(&quad, x, 4);
#if defined(__AVX512VNNI__)
    acc = (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    acc = (I)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(quad));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // Sums of two products are 16 bits wide, so the highest bit of a code goes by itself.
    const __m256i xs = _mm256_set1_epi32(quad), one = _mm256_set1_epi16(1), top = _mm256_set1_epi8(-128);
    const auto add = [&](__m256i codes) {
      acc += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(codes, xs), one);
    };
    if constexpr (LOW) {
      add((__m256i)w);
    } else {
      add(_mm256_andnot_si256(top, (__m256i)w));
      add(_mm256_and_si256(top, (__m256i)w));
    }
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

// Rows m..m+R against the 16 outputs whose weights begin at w.
template <int BITS, int R, typename T>
void low_tile(const RoundedRows& x, int64_t m, const uint8_t* w, const T* bias, T* y, int64_t N, int64_t left, int64_t K,
              int64_t G) {
  constexpr int64_t kBytes = 16 * kXGroup * BITS / 8;  // of the codes for a group of inputs
  const int64_t per = G / kXGroup, groups = K / kXGroup, first = m * groups;
  vfloat acc[R] = {};
  for (int64_t g = 0; g < groups; w += 64) {
    vfloat s, o;
    load(reinterpret_cast<const bf16*>(w + per * kBytes), &s);
    load(reinterpret_cast<const bf16*>(w + per * kBytes + 32), &o);
    float sum[R] = {};
    for (int64_t i = 0; i < per; ++i, ++g, w += kBytes) {
      const int8_t* xs = x.codes.data() + (first + g) * kXGroup;
      vint dot[R];
      for (int r = 0; r < R; ++r) dot[r] = vint{} - (BITS == 4 ? 8 : 128) * x.total[first + r * groups + g];
      for (int64_t j = 0; j < kBytes / 64; ++j) {
        const vbyte v = get<vbyte>(w + j * 64);
        __builtin_prefetch(w + j * 64 + 512, 0, 2);
        if (BITS == 4) {
          const vbyte low = v & 15, high = as<vbyte>(as<vuint>(v) >> 4) & 15;
          for (int r = 0; r < R; ++r) {
            dot4<true>(dot[r], low, xs + r * K + j * 8);
            dot4<true>(dot[r], high, xs + r * K + j * 8 + 4);
          }
        } else {
          for (int r = 0; r < R; ++r) dot4<false>(dot[r], v, xs + r * K + j * 4);
        }
      }
      for (int r = 0; r < R; ++r) {
        acc[r] += (s * x.scale[first + r * groups + g]) * convert<vfloat>(dot[r]);
        sum[r] += x.sum[first + r * groups + g];
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

// All rows from m on against 16 outputs: unpacking codes takes longer than multiplying them, so rows share it.
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
    if (bits == 4) low_rows<4, 8>(x, 0, M, w + n * bytes, b, out, N, N - n * 16, K, G);
    if (bits == 8) low_rows<8, 8>(x, 0, M, w + n * bytes, b, out, N, N - n * 16, K, G);
  }
}

template <typename T>
void low_linear(const T* x, const uint8_t* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t G, int64_t bits,
                int threads) {
  RoundedRows rounded;
  round_rows(x, M, K, rounded);
  const int64_t blocks = (N + 15) / 16;
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    low_blocks(static_cast<int>(bits), rounded, w, bias, y, M, N, K, G, share(blocks, me, all), share(blocks, me + 1, all));
  }
}

}  // namespace sharesd
