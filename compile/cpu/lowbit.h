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

typedef int32_t vint __attribute__((vector_size(64)));
typedef uint8_t vbyte __attribute__((vector_size(64)));

struct RoundedRows {  // M rows of x in 8 bits
  std::vector<int8_t> codes;
  std::vector<float> scale, sum;  // of every group; the sum is of what the codes stand for
  std::vector<int32_t> total;     // sum of the codes
};

template <typename T> inline void load_floats(const T* p, vfloat* out) { load(p, out); }
inline void load_floats(const double* p, vfloat* out) {
  for (int i = 0; i < 16; ++i) (*out)[i] = static_cast<float>(p[i]);
}

template <typename T>
void round_rows(const T* x, int64_t M, int64_t K, RoundedRows& r) {
  const int64_t groups = K / kXGroup;
  r.codes.resize(M * K);
  r.scale.resize(M * groups);
  r.sum.resize(M * groups);
  r.total.resize(M * groups);
  typedef int8_t quarter __attribute__((vector_size(16)));
  for (int64_t g = 0; g < M * groups; ++g) {
    vfloat v[2];
    for (int h = 0; h < 2; ++h) load_floats(x + g * kXGroup + h * 16, &v[h]);
    const vfloat a = v[0] < 0 ? -v[0] : v[0], b = v[1] < 0 ? -v[1] : v[1], most = a > b ? a : b;
    float top = 0;
    for (int i = 0; i < 16; ++i) top = most[i] > top ? most[i] : top;
    const float scale = top / 127, inverse = top > 0 ? 127 / top : 0;
    vint sums = {};
    for (int h = 0; h < 2; ++h) {
      const vfloat whole = (v[h] * inverse + 12582912.0f) - 12582912.0f;  // to the nearest integer, ties to even
      const vint codes = __builtin_convertvector(whole, vint);
      const quarter narrow_codes = __builtin_convertvector(codes, quarter);
      std::memcpy(r.codes.data() + g * kXGroup + h * 16, &narrow_codes, 16);
      sums += codes;
    }
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) total += sums[i];
    r.scale[g] = scale;
    r.total[g] = total;
    r.sum[g] = scale * static_cast<float>(total);
  }
}

// acc[lane] += sum over 4 inputs of w[lane][i] * x[i]
inline void dot4(vint& acc, const vbyte& w, const int8_t* x) {
#if defined(__AVX512VNNI__)
  int32_t quad;
  std::memcpy(&quad, x, 4);
  acc = (vint)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#else
  for (int lane = 0; lane < 16; ++lane)
    for (int i = 0; i < 4; ++i) acc[lane] += static_cast<int32_t>(w[lane * 4 + i]) * x[i];
#endif
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
        vbyte v;
        std::memcpy(&v, w + j * 64, 64);
        __builtin_prefetch(w + j * 64 + 512, 0, 2);
        if (BITS == 4) {
          const vbyte low = v & 15, high = (vbyte)((vuint)v >> 4) & 15;
          for (int r = 0; r < R; ++r) {
            dot4(dot[r], low, xs + r * K + j * 8);
            dot4(dot[r], high, xs + r * K + j * 8 + 4);
          }
        } else {
          for (int r = 0; r < R; ++r) dot4(dot[r], v, xs + r * K + j * 4);
        }
      }
      for (int r = 0; r < R; ++r) {
        acc[r] += (s * x.scale[first + r * groups + g]) * __builtin_convertvector(dot[r], vfloat);
        sum[r] += x.sum[first + r * groups + g];
      }
    }
    for (int r = 0; r < R; ++r) acc[r] += o * sum[r];
  }
  for (int r = 0; r < R; ++r)
    for (int64_t l = 0; l < std::min<int64_t>(16, left); ++l)
      narrow(bias ? acc[r][l] + static_cast<float>(widen(bias[l])) : acc[r][l], y + (m + r) * N + l);
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
