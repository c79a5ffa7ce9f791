// Low-bit codes by half-quadratic quantization (HQQ; Badri and Shaji 2023): w = (code - zero) / inverse, group by group of a
// row, with the zero that lowers the error in the norm of power 0.7. A block of rows stops once its error no longer falls.
#pragma once
#include "lowbit.h"

namespace sharesd {

constexpr int64_t kSolveBlock = 1 << 15;  // weights: they stay in a core's cache for all passes
constexpr int kSolvePasses = 20;
constexpr float kPower = 0.7f, kBeta = 10.0f;

struct Coding {  // scale and zero of a group of weights
  float inverse, zero;

  vfloat codes(const vfloat& w, float top) const {
    vfloat code = w * inverse + zero;
    code = select(code > top, vfloat{} + top, select(code < 0, vfloat{}, code));
    return (code + 12582912.0f) - 12582912.0f;  // to the nearest integer, ties to even
  }
};

// Remainder of an error after shrinkage by the norm of power 0.7: zero, as a rule.
inline const float kTaken = std::pow(1 / kBeta, 1 / (2 - kPower));
inline void shrink(vfloat& error) {
  float some[16];
  put(error, some);
  for (float& each : some) {
    const float size = std::abs(each);
    const float left = size > kTaken ? size - std::pow(size, kPower - 1) / kBeta : 0.0f;
    each = std::copysign(left, each);
  }
  error = get<vfloat>(some);
}

// Move the zero of G weights; returns the sum of their absolute errors before.
template <bool SHRINK>
float move_zero(const float* w, int64_t G, float top, Coding& group) {
  const float scale = 1 / group.inverse;
  vfloat errors = {}, zeros = {}, tops = {};
  for (int64_t i = 0; i < G; i += 16) {
    vfloat v;
    load(w + i, &v);
    const vfloat code = group.codes(v, top);
    vfloat error = v - (code - group.zero) * scale;
    const vfloat size = absolute(error);
    errors += size;
    tops = greater(size, tops);
    if (SHRINK) {
      shrink(error);
      v -= error;
    }
    zeros += code - v * group.inverse;
  }
  const float sum = sum_of(errors), zero = sum_of(zeros);
  if (!SHRINK && largest(tops) > kTaken) return move_zero<true>(w, G, top, group);
  group.zero = zero / static_cast<float>(G);
  return sum;
}

// Start: codes 0 and top are the least and the greatest weight of the group.
inline Coding spread(const float* w, int64_t G, float top) {
  const auto [low, high] = std::minmax_element(w, w + G);
  const float range = *high - *low;
  const float inverse = range <= 1e-4f ? 1.0f : std::min(top / range, 2e4f);
  return {inverse, -*low * inverse};
}

// weights [N, K] -> codes [N, K], scales and zeros [N, K / G]; G is a multiple of 16.
template <typename T>
void solve_hqq(const T* weights, uint8_t* codes, float* scales, float* zeros, int64_t N, int64_t K, int64_t G, int64_t bits,
           int threads) {
  const float top = static_cast<float>((1 << bits) - 1);
  const int64_t rows = std::max<int64_t>(1, kSolveBlock / K), blocks = (N + rows - 1) / rows;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> w(rows * K);
    std::vector<Coding> groups(rows * K / G);
#pragma omp for schedule(dynamic)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = b * rows * K, count = std::min(rows * K, N * K - begin);
      for (int64_t i = 0; i < count; i += 16) {
        vfloat v;
        load_floats(weights + begin + i, &v);
        put(v, w.data() + i);
      }
      for (int64_t g = 0; g < count / G; ++g) groups[g] = spread(w.data() + g * G, G, top);
      float best = std::numeric_limits<float>::infinity();
      for (int pass = 0; pass < kSolvePasses; ++pass) {
        float error = 0;
        for (int64_t g = 0; g < count / G; ++g) error += move_zero<false>(w.data() + g * G, G, top, groups[g]);
        if (!(error < best)) break;
        best = error;
      }
      for (int64_t g = 0; g < count / G; ++g) {
        for (int64_t i = g * G; i < (g + 1) * G; i += 16) {
          vfloat v;
          load(w.data() + i, &v);
          store_narrow(convert<vint>(groups[g].codes(v, top)), codes + begin + i);
        }
        scales[begin / G + g] = 1 / groups[g].inverse;
        zeros[begin / G + g] = groups[g].zero;
      }
    }
  }
}

}  // namespace sharesd
