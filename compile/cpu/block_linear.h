// Products of rounded rows with records of weights (see block_rows.h), for every type. A row's sums do not depend on how its
// weights were unpacked: in registers for a few rows, in memory for more, which share the work.
#pragma once
#include "block_format.h"
#include "block_rows.h"

namespace sharesd {

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
constexpr bool kSaturates = true;  // products of codes of 8 bits do not fit what adds pairs of them
#else
constexpr bool kSaturates = false;
#endif
// Rounded rows of a tile, from a unit of weights on.
struct RowTile {
  const int8_t *codes, *fine;
  const float *scale, *sum;
  const int32_t *less, *less16;
  template <int64_t HALVES> float sum_of(int64_t g, int64_t half) const {
    return HALVES == 2 ? scale[g] * static_cast<float>(-less16[half]) : sum[g];
  }
  RowTile(const BlockRows& x, int64_t tile, int64_t k) {
    const int64_t first = x.first(tile), R = x.first(tile + 1) - first, at = first * x.K + k * R;
    codes = x.codes.data() + at;
    fine = x.exact ? x.fine.data() + at : nullptr;
    scale = x.scale.data() + at / 32;
    sum = x.sum.data() + at / 32;
    less = x.less.data() + at / 32;
    less16 = x.less16.data() + at / 16;
  }
};

template <typename W> inline auto as_bytes(const W& w) {
  if constexpr (IsPair<W>::value)
    return pair_of(as_bytes(w.low), as_bytes(w.high));
  else
    return (typename VectorOf<uint8_t, sizeof(W)>::type)w;
}

// acc[lane] += sum over 4 inputs of w[lane][i] * x[i], for codes of up to 7 bits, or of 8 (`WIDE`).
template <bool WIDE, typename I, typename W> inline void dot_codes(I& acc, const W& w, const int8_t* x) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
  if constexpr (IsPair<I>::value) {
    dot_codes<WIDE>(acc.low, w.low, x);
    dot_codes<WIDE>(acc.high, w.high, x);
    return;
  } else if constexpr (WIDE) {
    const __m256i xs = _mm256_set1_epi32(static_cast<int>(word(x))), low = (__m256i)(w & 0x0f0f0f0fu);
    const __m256i high = (__m256i)(w >> 4 & 0x0f0f0f0fu);
    acc += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(high, xs), _mm256_set1_epi16(16));
    acc += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(low, xs), _mm256_set1_epi16(1));
    return;
  }
#endif
  dot4(acc, as_bytes(w), x);
}

// Sums of a group as floats, of rows whose codes have been multiplied: acc += scale * xs * (256 * dot + fine).
template <bool EXACT>
inline void add_group(vfloat& acc, const vfloat& scale, float xs, const vint& dot, const vint& fine) {
  if constexpr (EXACT)
    acc += (scale * xs) * convert<vfloat>((dot << 8) + fine);
  else
    acc += (scale * xs) * convert<vfloat>(dot);
}

// R rows against B records, whose codes are unpacked in registers.
template <typename Form, int R, int B, bool EXACT>
void few_block_rows(const RowTile& x, const uint8_t* const (&w)[B], int64_t K, vfloat (&acc)[R][B]) {
  using Sizes = Record<Form>;
  // As measured; fetching too far ahead costs those that need little arithmetic.
  constexpr int64_t kAheadBytes = Form::kLowBytes ? 2048 : B == 1 ? 7000 : Form::kGroup == 32 || EXACT ? 4000 : 2048;
  constexpr int64_t kAhead = (kAheadBytes + Sizes::kUnitBytes - 1) / Sizes::kUnitBytes;  // units
  constexpr int64_t kLines = Form::kBytes / 64, kHalves = 32 / Form::kGroup, kPairs = 4 / kHalves;
  constexpr bool kWide = Form::kWide && kSaturates;
  const int64_t units = Sizes::units(K);
  const int64_t skip = B * Sizes::bytes(K) - Sizes::low(K), skip_low = B * Sizes::bytes(K) - units * Sizes::kLowUnitBytes;
  const uint8_t *unit[B], *low[B];
  for (int b = 0; b < B; ++b) unit[b] = w[b], low[b] = w[b] + Sizes::low(K);
  const int8_t *codes = x.codes, *fines = x.fine;
  for (int64_t u = 0; u < units; ++u) {
    const int64_t ahead = kAhead * Sizes::kUnitBytes + (u + kAhead < units ? 0 : skip);
    const int64_t ahead_low = kAhead * Sizes::kLowUnitBytes + (u + kAhead < units ? 0 : skip_low);
    for (int b = 0; b < B; ++b)
      for (int64_t i = 0; i < Form::kHeader; i += 64) __builtin_prefetch(unit[b] + i + ahead, 0, 2);
    for (int64_t g = 0; g < Form::kUnit / 32; ++g) {
      const int64_t at = (u * (Form::kUnit / 32) + g) * R;
      const uint8_t *from[B], *from_low[B];
      [[maybe_unused]] vuint excess[B];
      for (int b = 0; b < B; ++b) {
        from[b] = unit[b] + Form::kHeader + g * Form::kBytes, from_low[b] = low[b] + g * Form::kLowBytes;
        for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(from[b] + i * 64 + ahead, 0, 2);
        for (int64_t i = 0; i < Form::kLowBytes; i += 64) __builtin_prefetch(from_low[b] + i + ahead_low, 0, 2);
        if constexpr (kHasExcess<Form>) excess[b] = Form::excess(unit[b], g);
      }
      for (int64_t h = 0; h < kHalves; ++h) {
        vint dot[R][B] = {}, fine[R][B] = {};
        if constexpr (Form::kZero == kOwnZeros) {
          for (int b = 0; b < B; ++b) {
            const vint zero = Form::zero(unit[b], g);
            for (int r = 0; r < R; ++r) (EXACT ? fine : dot)[r][b] += zero * x.less[at + r];
          }
        } else if constexpr (!Form::kMin) {
          for (int r = 0; r < R; ++r)
            for (int b = 0; b < B; ++b)
              (EXACT ? fine : dot)[r][b] +=
                  (kHalves == 2 ? x.less16[(at * 2) + h * R + r] : x.less[at + r]) * (1 << Form::kZero);
        }
        for (int64_t j = h * kPairs; j < (h + 1) * kPairs; ++j, codes += 8 * R, fines += 8 * R)
          for (int b = 0; b < B; ++b) {
            vuint first, second;
            Form::pair(from[b], from_low[b], j, first, second);
            if constexpr (kHasExcess<Form>)
              first = less_bytes(first, excess[b]), second = less_bytes(second, excess[b]);
            for (int r = 0; r < R; ++r) {
              dot_codes<kWide>(dot[r][b], first, codes + r * 4);
              dot_codes<kWide>(dot[r][b], second, codes + (R + r) * 4);
              if constexpr (EXACT) {
                dot_codes<kWide>(fine[r][b], first, fines + r * 4);
                dot_codes<kWide>(fine[r][b], second, fines + (R + r) * 4);
              }
            }
          }
        for (int b = 0; b < B; ++b) {
          const vfloat scale = Form::scale(unit[b], g * kHalves + h);
          for (int r = 0; r < R; ++r) add_group<EXACT>(acc[r][b], scale, x.scale[at + r], dot[r][b], fine[r][b]);
          if constexpr (Form::kMin) {
            const vfloat minimum = Form::minimum(unit[b], g * kHalves + h);
            for (int r = 0; r < R; ++r) acc[r][b] -= minimum * x.sum_of<kHalves>(at + r, at * 2 + h * R + r);
          }
        }
      }
    }
    for (int b = 0; b < B; ++b) unit[b] += Sizes::kUnitBytes, low[b] += Sizes::kLowUnitBytes;
  }
}

template <typename Form, int R, int B, bool EXACT>
void few_tile(const BlockRows& x, int64_t tile, const uint8_t* const (&w)[B], int64_t K, float* sums) {
  if constexpr (R > 1)
    if (x.first(tile + 1) - x.first(tile) < R) return few_tile<Form, R - 1, B, EXACT>(x, tile, w, K, sums);
  // A lone row waits for memory, which gives one stream faster than two. Measured: not where units have few codes for their
  // scales, or codes are two streams already.
  constexpr int kTogether = R == 1 && Form::kGroup == 32 && !Form::kLowBytes ? 1 : B;
  for (int first = 0; first < B; first += kTogether) {
    const uint8_t* some[kTogether];
    std::copy_n(w + first, kTogether, some);
    vfloat acc[R][kTogether] = {};
    few_block_rows<Form, R, kTogether, EXACT>({x, tile, 0}, some, K, acc);
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < kTogether; ++b) put(acc[r][b], sums + (r * B + first + b) * 16);
  }
}

// Codes and scales that are unpacked next, fetched group by group while others are multiplied.
struct Fetched {
  const uint8_t *unit = nullptr, *low = nullptr;
  int64_t unit_bytes = 0, low_bytes = 0;  // for each 32 inputs
  void fetch(int64_t g) const {
    for (int64_t i = 0; i < unit_bytes; i += 64) __builtin_prefetch(unit + g * unit_bytes + i, 0, 2);
    for (int64_t i = 0; i < low_bytes; i += 64) __builtin_prefetch(low + g * low_bytes + i, 0, 2);
  }
};

// R rows against B records, whose codes were unpacked, of `groups` of 32 inputs: adds to acc [R][B][16].
template <int R, int B, int GROUP, bool MIN, bool WIDE, bool EXACT>
void unpacked_block_rows(const RowTile& x, const UnpackedBlocks* w, const Fetched* next, int64_t groups, int zero,
                         float* acc_memory) {
  constexpr int64_t kHalves = 32 / GROUP, kQuads = 8 / kHalves;
  vfloat acc[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = get<vfloat>(acc_memory + (r * B + b) * 16);
  const int8_t *codes = x.codes, *fines = x.fine;
  for (int64_t g = 0; g < groups; ++g) {
    for (int b = 0; b < B; ++b) next[b].fetch(g);
    for (int64_t h = 0; h < kHalves; ++h) {
      vint dot[R][B] = {}, fine[R][B] = {};
      if (!MIN && GROUP == 32 && zero == kOwnZeros)
        for (int b = 0; b < B; ++b) {
          const vint own = get<vint>(w[b].zero[g]);
          for (int r = 0; r < R; ++r) (EXACT ? fine : dot)[r][b] += own * x.less[g * R + r];
        }
      else if (!MIN)
        for (int r = 0; r < R; ++r)
          for (int b = 0; b < B; ++b)
            (EXACT ? fine : dot)[r][b] += (kHalves == 2 ? x.less16[(g * 2 + h) * R + r] : x.less[g * R + r]) * (1 << zero);
#pragma GCC unroll 8
      for (int64_t j = 0; j < kQuads; ++j, codes += 4 * R, fines += 4 * R) {
        vuint code[B];
        for (int b = 0; b < B; ++b) code[b] = get<vuint>(w[b].codes + ((g * kHalves + h) * kQuads + j) * 64);
        for (int r = 0; r < R; ++r)
          for (int b = 0; b < B; ++b) {
            dot_codes<WIDE>(dot[r][b], code[b], codes + r * 4);
            if constexpr (EXACT) dot_codes<WIDE>(fine[r][b], code[b], fines + r * 4);
          }
      }
      for (int b = 0; b < B; ++b) {
        const vfloat scale = get<vfloat>(w[b].scale[g * kHalves + h]);
        for (int r = 0; r < R; ++r) add_group<EXACT>(acc[r][b], scale, x.scale[g * R + r], dot[r][b], fine[r][b]);
        if constexpr (MIN) {
          const vfloat minimum = get<vfloat>(w[b].minimum[g * kHalves + h]);
          for (int r = 0; r < R; ++r)
            acc[r][b] -= minimum * x.sum_of<kHalves>(g * R + r, (g * 2 + h) * R + r);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) put(acc[r][b], acc_memory + (r * B + b) * 16);
}

template <int R, int B, int GROUP, bool MIN, bool WIDE, bool EXACT>
void unpacked_tile(int64_t rows, const RowTile& x, const UnpackedBlocks* w, const Fetched* next, int64_t groups, int zero,
                   float* acc) {
  if constexpr (R > 1)
    if (rows < R) return unpacked_tile<R - 1, B, GROUP, MIN, WIDE, EXACT>(rows, x, w, next, groups, zero, acc);
  unpacked_block_rows<R, B, GROUP, MIN, WIDE, EXACT>(x, w, next, groups, zero, acc);
}

// All rows against B records: each 256 inputs are unpacked once.
template <typename Form, int B, bool EXACT>
void many_block_rows(const BlockRows& x, const uint8_t* const (&w)[B], int64_t K, float* acc) {
  constexpr int64_t per = UnpackedBlocks::kInputs / Form::kUnit;
  std::fill_n(acc, x.M * B * 16, 0.0f);
  UnpackedBlocks some[B];
  const int64_t units = Record<Form>::units(K);
  for (int64_t u = 0; u < units; u += per) {
    const int64_t num = std::min(per, units - u), groups = num * (Form::kUnit / 32);
    Fetched next[B];
    for (int b = 0; b < B; ++b) {
      unpack_blocks<Form>(w[b], K, u, num, some[b]);
      const bool last = u + per >= units;
      const uint8_t* from = last ? w[b] + B * Record<Form>::bytes(K) : w[b];
      const int64_t unit = last ? 0 : u + per;
      next[b] = {from + unit * Record<Form>::kUnitBytes, from + Record<Form>::low(K) + unit * Record<Form>::kLowUnitBytes,
                 Record<Form>::kUnitBytes / (Form::kUnit / 32), Form::kLowBytes};
    }
    const Fetched none[B];
    for (int64_t t = 0; t < x.tiles; ++t) {
      const int64_t first = x.first(t);
      unpacked_tile<kTileRows, B, Form::kGroup, Form::kMin, Form::kWide && kSaturates, EXACT>(
          x.first(t + 1) - first, {x, t, u * Form::kUnit}, some, t ? none : next, groups, Form::kZero,
          acc + first * B * 16);
    }
  }
}

// Values of rounded rows, [M][K].
inline const float* decoded_rows(const BlockRows& x, int64_t K) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < x.M * K + 32) memory.resize(x.M * K + 32);  // the last group may be short
  for (int64_t t = 0; t < x.tiles; ++t) {
    const RowTile tile(x, t, 0);
    const int64_t first = x.first(t), R = x.first(t + 1) - first;
    for (int64_t r = 0; r < R; ++r)
      for (int64_t g = 0; g * 32 < K; ++g) {
        uint8_t codes[32], fines[32] = {};
        for (int64_t j = 0; j < 8; ++j) {
          std::memcpy(codes + j * 4, tile.codes + ((g * 8 + j) * R + r) * 4, 4);
          if (x.exact) std::memcpy(fines + j * 4, tile.fine + ((g * 8 + j) * R + r) * 4, 4);
        }
        for (int64_t h = 0; h < 32; h += 16) {
          vint code = small<int8_t>(codes + h);
          if (x.exact) code = (code << 8) + small<int8_t>(fines + h);
          put(convert<vfloat>(code) * tile.scale[g * R + r], memory.data() + (first + r) * K + g * 32 + h);
        }
      }
  }
  return memory.data();
}

// Rows against `num` records of numbers. Sums are in the order of the inputs, those of a row do not depend on the other rows.
template <typename E>
void number_sums(const BlockRows& x, const uint8_t* w, int64_t K, int64_t num, float* sums) {
  const float* values = decoded_rows(x, K);
  const E* weights = reinterpret_cast<const E*>(w);
  constexpr int64_t N = kBlocks * 16;
  constexpr int R = kWideRegisters ? 8 : 4;
  if (num == kBlocks)
    rows<float, R, kBlocks>(values, K, weights, static_cast<const float*>(nullptr), sums, 0, x.M, N, K, 2048);
  else
    rows<float, R, 1>(values, K, weights, static_cast<const float*>(nullptr), sums, 0, x.M, N, K, 2048);
}

// See BlockKernel.
inline void block_sums(const BlockRows& x, const uint8_t* w, int64_t type, int64_t K, int64_t num, float* sums) {
  if (is_number(type))
    return with_number(type, [&](auto number) { number_sums<decltype(number)>(x, w, K, num, sums); });
  with_form(type, [&](auto form) {
    using Form = decltype(form);
    constexpr int B = kBlocks;
    const int64_t bytes = Record<Form>::bytes(K);
    const uint8_t* at[B];
    for (int b = 0; b < B; ++b) at[b] = w + std::min<int64_t>(b, num - 1) * bytes;
    if (x.is_few())
      for (int64_t t = 0; t < x.tiles; ++t)
        (x.exact ? few_tile<Form, few_tile_rows(true), B, true> : few_tile<Form, few_tile_rows(false), B, false>)(
            x, t, at, K, sums + x.first(t) * B * 16);
    else
      (x.exact ? many_block_rows<Form, B, true> : many_block_rows<Form, B, false>)(x, at, K, sums);
  });
}

}  // namespace sharesd
