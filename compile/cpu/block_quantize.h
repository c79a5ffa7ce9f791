// Rows of numbers to blocks of GGUF files, by ggml's formulas. To give the bits of the gguf package, it is built without FMA: a
// product is rounded before it is added to something.
#pragma once
#include "block_format.h"

namespace sharesd {

inline uint8_t* put_half(float x, uint8_t* to) {
  const f16 half = static_cast<f16>(x);
  std::memcpy(to, &half, 2);
  return to + 2;
}
inline float half_of(const uint8_t* p) {
  f16 half;
  std::memcpy(&half, p, 2);
  return static_cast<float>(half);
}
inline bool is_half(float x) { return std::fabs(x) < 65520.0f; }  // also false for NaN
inline float reciprocal(float x) {
  const float r = 1.0f / x;
  return std::isfinite(r) ? r : 0.0f;  // of 0, and of what float16 rounds to 0
}
inline float nearest(float x) { return x + 12582912.0f - 12582912.0f; }  // 1.5 * 2^23, which leaves no room for fractions
inline float clamped(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// Least and greatest of some numbers. As integers they are in the same order, with NaN beyond the infinite ones.
struct Extremes {
  float low, high;
  Extremes(const float* x, int num) {
    int32_t least = std::numeric_limits<int32_t>::max(), most = std::numeric_limits<int32_t>::min();
    for (int i = 0; i < num; ++i) {
      int32_t bits;
      std::memcpy(&bits, x + i, 4);
      bits ^= bits >> 31 & 0x7fffffff;
      least = std::min(least, bits), most = std::max(most, bits);
    }
    least ^= least >> 31 & 0x7fffffff, most ^= most >> 31 & 0x7fffffff;
    std::memcpy(&low, &least, 4), std::memcpy(&high, &most, 4);
  }
  bool finite() const { return std::isfinite(low) && std::isfinite(high); }
  bool fits() const { return finite() && largest() < 1e9f; }  // more than scales in float16 hold, and sums of cubes are finite
  float largest() const { return std::max(high, -low); }
  float first_largest(const float* x) const {
    while (std::fabs(*x) != largest()) ++x;
    return *x;
  }
};

// Codes of 32 inputs: their lower four bits, after their fifth bits if there are any.
template <int BITS> void put_codes(const uint8_t* code, uint8_t* to) {
  if constexpr (BITS == 5) {
    uint32_t high = 0;
    for (int i = 0; i < 32; ++i) high |= static_cast<uint32_t>(code[i] >> 4) << i;
    put_word(high, to);
    to += 4;
  }
  for (int i = 0; i < 16; ++i) to[i] = (code[i] & 15) | (code[i + 16] & 15) << 4;
}

// Each returns false if 32 (or 256) numbers are not finite, or float16 does not hold their scale.
inline bool quantize_8_0(const float* x, uint8_t* to) {
  const Extremes all(x, 32);
  if (!all.fits()) return false;
  const float d = all.largest() / 127, factor = reciprocal(d);
  to = put_half(d, to);
  for (int i = 0; i < 32; ++i) {
    const float scaled = x[i] * factor, size = std::fabs(scaled);
    const int whole = static_cast<int>(size), code = whole + (size - static_cast<float>(whole) >= 0.5f);
    to[i] = static_cast<uint8_t>(scaled < 0 ? -code : code);
  }
  return is_half(d);
}

template <int BITS> bool quantize_symmetric(const float* x, uint8_t* to) {
  constexpr int kZero = 1 << (BITS - 1);
  const Extremes all(x, 32);
  if (!all.fits()) return false;
  const float d = all.first_largest(x) / -kZero, factor = reciprocal(d);
  uint8_t code[32];
  for (int i = 0; i < 32; ++i)
    code[i] = static_cast<uint8_t>(std::min(2 * kZero - 1, static_cast<int>(x[i] * factor + (kZero + 0.5f))));
  put_codes<BITS>(code, put_half(d, to));
  return is_half(d);
}

template <int BITS> bool quantize_with_minimum(const float* x, uint8_t* to) {
  constexpr int kMax = (1 << BITS) - 1;
  const Extremes all(x, 32);
  if (!all.fits()) return false;
  const float d = (all.high - all.low) / kMax, factor = reciprocal(d);
  uint8_t code[32];
  for (int i = 0; i < 32; ++i)
    code[i] = static_cast<uint8_t>(std::min(kMax, static_cast<int>((x[i] - all.low) * factor + 0.5f)));
  put_codes<BITS>(code, put_half(all.low, put_half(d, to)));
  return is_half(d) && is_half(all.low);
}

inline bool quantize_mxfp4(const float* x, uint8_t* to) {
  const Extremes all(x, 32);
  if (!all.finite()) return false;
  const float most = all.largest();
  const int power = most > 0 ? std::max(0, static_cast<int>(std::floor(std::log2(most))) + 125) : 0;
  const float d = std::ldexp(1.0f, power - 128);
  uint8_t code[32];
  for (int i = 0; i < 32; ++i) {
    const float size = std::fabs(x[i]);
    int nearest_code = 0;  // of sizes 0, 1, 2, 3, 4, 6, 8, 12; halfway, the smaller one
    for (float border : {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f}) nearest_code += size > border * d;
    code[i] = static_cast<uint8_t>(nearest_code + (x[i] < 0 && nearest_code ? 8 : 0));
  }
  *to = static_cast<uint8_t>(power);
  put_codes<4>(code, to + 1);
  return true;
}

// Q6_K: sixteen groups of 16 inputs, a lane for each. Of 19 scales, the one whose codes lose least is taken.
inline bool quantize_6_k(const float* x, uint8_t* to) {
  constexpr int L = 16;
  if (!Extremes(x, 256).fits()) return false;
  float v[16][L], most[L] = {}, scale[L] = {}, best[L] = {};
  for (int g = 0; g < L; ++g)
    for (int i = 0; i < 16; ++i) v[i][g] = x[16 * g + i];
  for (int i = 0; i < 16; ++i)
    for (int g = 0; g < L; ++g) most[g] = std::fabs(v[i][g]) > std::fabs(most[g]) ? v[i][g] : most[g];
  for (int step = 0; step < 19; ++step) {
    const int offset = step == 0 ? 0 : step < 10 ? step - 10 : step - 9;
    float factor[L], products[L] = {}, squares[L] = {};
    for (int g = 0; g < L; ++g) factor[g] = -(32 + 0.1f * static_cast<float>(offset)) / most[g];
    for (int i = 0; i < 16; ++i)
      for (int g = 0; g < L; ++g) {
        const float code = clamped(nearest(factor[g] * v[i][g]), -32, 31), weight = v[i][g] * v[i][g];
        products[g] += weight * v[i][g] * code, squares[g] += weight * code * code;
      }
    for (int g = 0; g < L; ++g) {
      const bool better = squares[g] > 0 && (step == 0 || products[g] * products[g] > best[g] * squares[g]);
      scale[g] = better ? products[g] / squares[g] : scale[g];
      best[g] = better ? scale[g] * products[g] : best[g];
    }
  }
  float largest = 0;
  for (int g = 0; g < L; ++g) {
    if (!(std::fabs(most[g]) >= 1e-15f)) scale[g] = 0;
    if (std::fabs(scale[g]) > std::fabs(largest)) largest = scale[g];
  }
  std::memset(to, 0, 210);
  if (std::fabs(largest) < 1e-15f) return true;
  const float factor = -128 / largest;
  put_half(1 / factor, to + 208);
  const float d = half_of(to + 208);
  uint8_t code[256];
  for (int g = 0; g < L; ++g) {
    const float steps = std::min(127.0f, nearest(factor * scale[g])), size = d * steps;
    to[192 + g] = static_cast<uint8_t>(static_cast<int8_t>(steps));
    for (int i = 0; i < 16; ++i)
      code[16 * g + i] = size ? static_cast<uint8_t>(clamped(nearest(v[i][g] / size), -32, 31) + 32) : 32;
  }
  for (int h = 0; h < 2; ++h)
    for (int i = 0; i < 32; ++i) {
      const uint8_t* q = code + 128 * h + i;
      to[64 * h + i] = (q[0] & 15) | (q[64] & 15) << 4;
      to[64 * h + 32 + i] = (q[32] & 15) | (q[96] & 15) << 4;
      to[128 + 32 * h + i] = q[0] >> 4 | q[32] >> 4 << 2 | q[64] >> 4 << 4 | q[96] >> 4 << 6;
    }
  return is_half(1 / factor);
}

// Q4_K and Q5_K: eight groups of 32 inputs, a lane for each. Scale and minimum are fitted to the codes of several ranges, each of
// which begins at the best minimum so far, and those with the least error are taken. Large weights count more.
template <int BITS> bool quantize_4_or_5_k(const float* x, uint8_t* to) {
  typedef float lanes __attribute__((vector_size(32)));
  constexpr int L = 8, kSteps = BITS == 4 ? 21 : 16;
  constexpr float kMax = (1 << BITS) - 1, kFirst = BITS == 4 ? -1.0f : -0.5f;
  if (!Extremes(x, 256).fits()) return false;
  const lanes zero = {};
  lanes v[32], weight[32], steps[32], square = zero, weights = zero, sums = zero;
  for (int g = 0; g < L; ++g)
    for (int i = 0; i < 32; ++i) v[i][g] = x[32 * g + i];
  lanes low = v[0], high = v[0];
  for (int i = 0; i < 32; ++i) {
    low = v[i] < low ? v[i] : low, high = v[i] > high ? v[i] : high;
    square += v[i] * v[i];
  }
  low = low > zero ? zero : low;
  for (int g = 0; g < L; ++g) square[g] = std::sqrt(square[g] / 32);
  for (int i = 0; i < 32; ++i) {
    weight[i] = square + (v[i] < zero ? -v[i] : v[i]);
    weights += weight[i], sums += weight[i] * v[i];
  }
  const auto is_flat = high == low;
  const lanes flat = low;
  lanes scale, error;
  for (int step = -1; step < kSteps; ++step) {  // the first range is that of the weights
    const float levels = step < 0 ? kMax : kFirst + 0.1f * static_cast<float>(step) + kMax;
    const lanes factor = levels / (high - low);
    lanes codes = zero, squares = zero, products = zero, new_error = zero;
    for (int i = 0; i < 32; ++i) {
      lanes c = factor * (v[i] - low) + 12582912.0f - 12582912.0f;
      c = c < 0.0f ? zero : c > kMax ? zero + kMax : c;
      const lanes w = weight[i] * c;
      steps[i] = c, codes += w, squares += w * c, products += w * v[i];
    }
    const lanes D = weights * squares - codes * codes;
    lanes new_scale = (weights * products - sums * codes) / D, new_low = (squares * sums - codes * products) / D;
    new_scale = new_low > zero ? products / squares : new_scale, new_low = new_low > zero ? zero : new_low;
    if (step < 0) new_scale = 1.0f / factor, new_low = low;
    for (int i = 0; i < 32; ++i) {
      const lanes off = new_scale * steps[i] + new_low - v[i];
      new_error += weight[i] * (off * off);
    }
    if (step < 0) {
      scale = new_scale, error = new_error;
      continue;
    }
    const auto better = (D > zero) & (new_error < error);
    scale = better ? new_scale : scale, low = better ? new_low : low, error = better ? new_error : error;
  }
  scale = is_flat ? zero : scale;
  const lanes minimum = is_flat ? flat : low;
  float most_scale = 0, most_minimum = 0;
  for (int g = 0; g < L; ++g) {
    most_scale = std::max(most_scale, scale[g]), most_minimum = std::max(most_minimum, -minimum[g]);
  }
  put_half(most_minimum / 63, put_half(most_scale / 63, to));
  const float d = half_of(to), dmin = half_of(to + 2);
  const float scales = most_scale > 0 ? 63 / most_scale : 0, minima = most_minimum > 0 ? 63 / most_minimum : 0;
  uint8_t *packed = to + 4, code[256];
  std::memset(packed, 0, 12);
  for (int g = 0; g < L; ++g) {
    const int s = static_cast<int>(clamped(nearest(scales * scale[g]), 0, 63));
    const int m = static_cast<int>(clamped(nearest(minima * -minimum[g]), 0, 63));
    if (g < 4)
      packed[g] |= s, packed[g + 4] |= m;
    else
      packed[g + 4] = (s & 15) | (m & 15) << 4, packed[g - 4] |= s >> 4 << 6, packed[g] |= m >> 4 << 6;
    const float size = d * static_cast<float>(s), base = dmin * static_cast<float>(m);
    for (int i = 0; i < 32; ++i)
      code[32 * g + i] = size ? static_cast<uint8_t>(clamped(nearest((v[i][g] + base) / size), 0, kMax)) : 0;
  }
  uint8_t* rest = packed + 12;
  if constexpr (BITS == 5) {
    for (int i = 0; i < 32; ++i) {
      rest[i] = 0;
      for (int g = 0; g < L; ++g) rest[i] |= code[32 * g + i] >> 4 << g;
    }
    rest += 32;
  }
  for (int g = 0; g < L; g += 2)
    for (int i = 0; i < 32; ++i) rest[16 * g + i] = (code[32 * g + i] & 15) | (code[32 * g + 32 + i] & 15) << 4;
  return is_half(most_scale / 63) && is_half(most_minimum / 63);
}

inline bool cannot_quantize(const float*, uint8_t*) { return false; }

inline bool quantize_block(int64_t type, const float* x, uint8_t* to) {
  switch (type) {
#define BLOCK_TYPE(NAME, INPUTS, BYTES, UNIT, UNIT_BYTES, GPU, QUANTIZE, ...) case k##NAME: return QUANTIZE(x, to);
#include "block_types.def"
    default: return false;
  }
}

// Rows [rows, K] as blocks of `inputs` numbers and `bytes` bytes; returns how many blocks do not hold their numbers.
template <typename T>
int64_t quantize_rows(const T* x, int64_t pitch, int64_t rows, int64_t K, int64_t type, int64_t inputs, int64_t bytes,
                      uint8_t* to, int threads) {
  int64_t wrong = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : wrong)
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t b = 0; b < K / inputs; ++b) {
      alignas(64) float some[256];
      widen_all(x + n * pitch + b * inputs, inputs, some);
      wrong += !quantize_block(type, some, to + (n * (K / inputs) + b) * bytes);
    }
  return wrong;
}

}  // namespace sharesd
