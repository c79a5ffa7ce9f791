// y = x W^T for weights of GGUF files as they are (block_format.h). Activations are rounded with one scale for every 32 of them,
// so that sums of products within a group are integers; groups are added in float32, in order of the inputs. A row's sums are
// the same whatever rows are beside it, however its weights were unpacked and whichever thread did it.
//
// Rounded activations have 8 bits, or 16: q = 256 a + b, two rows of 8 bits that take the same products.
#pragma once
#include "block_format.h"
#include "lowbit.h"

namespace sharesd {

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
constexpr bool kSaturates = true;  // products of codes of 8 bits do not fit what adds pairs of them
#else
constexpr bool kSaturates = false;
#endif
constexpr int kBlockRows = kWideRegisters ? 8 : 4;  // rows that are multiplied at once; half of them with 16 bits
constexpr int kBlocks = kWideRegisters ? 2 : 1;     // records that are read at once

// Rounded rows in tiles, the rows of a tile interleaved: [K / 4][rows][4] codes, and so on. K is a multiple of 64 here.
struct BlockRows {
  int64_t M = 0, K = 0, tiles = 0;
  bool exact = false;
  std::vector<int8_t> codes, fine;  // of a and b
  std::vector<float> scale, sum;    // of every 32 inputs; the sum is of the decoded values
  std::vector<int32_t> less, less16;  // negative sums of 32 codes, and of 16
  int64_t first(int64_t tile) const { return M * tile / tiles; }
  void resize(int64_t rows, int64_t inputs, bool is_exact) {
    M = rows, K = (inputs + 63) / 64 * 64, exact = is_exact;
    const int64_t most = exact ? kBlockRows / 2 : kBlockRows;
    tiles = (M + most - 1) / most;
    const auto grow = [](auto& v, int64_t n) {
      if (static_cast<int64_t>(v.size()) < n) v.resize(n);
    };
    grow(codes, M * K);
    if (exact) grow(fine, M * K);
    grow(scale, M * K / 32);
    grow(sum, M * K / 32);
    grow(less, M * K / 32);
    grow(less16, M * K / 16);
  }
};

// Round the 32 inputs of a row from x on, of which there are `left`; r is the row's number in its tile of R rows.
template <bool EXACT, typename T>
void round_group(const T* x, int64_t left, BlockRows& to, int64_t tile_begin, int64_t R, int64_t r, int64_t g) {
  constexpr float most = EXACT ? 127 * 256 + 127 : 127;
  const int64_t K = to.K, at = tile_begin * K / 32 + g * R + r;
  vfloat v[2] = {};
  if (left > 0)
    for (int h = 0; h < 2; ++h) load_floats(x + h * 16, &v[h]);
  const float top = largest(greater(absolute(v[0]), absolute(v[1])));
  const float bad = sum_of(v[0] * 0.0f + v[1] * 0.0f);  // NaN if one of them is, or infinite
  const float inverse = top > 1e-30f ? most / top : 0;
  const float scale = top / most + bad;
  int32_t sums[2];
  int8_t* quads = to.codes.data() + tile_begin * K + (g * 8 * R + r) * 4;
  int8_t* fines = EXACT ? to.fine.data() + tile_begin * K + (g * 8 * R + r) * 4 : nullptr;
  for (int h = 0; h < 2; ++h) {
    int8_t some[16];
    const auto put_quads = [&](const vint& codes, int8_t* to) {
      store_narrow(codes, some);
      for (int j = 0; j < 4; ++j) std::memcpy(to + (h * 4 + j) * R * 4, some + j * 4, 4);
    };
    const vint q = convert<vint>((v[h] * inverse + 12582912.0f) - 12582912.0f);
    if constexpr (EXACT) {
      const vint a = (q + 128) >> 8;
      put_quads(a, quads);
      put_quads(q - (a << 8), fines);
    } else {
      put_quads(q, quads);
    }
    sums[h] = sum_of(q);
    to.less16[tile_begin * K / 16 + (g * 2 + h) * R + r] = -sums[h];
  }
  to.less[at] = -sums[0] - sums[1];
  to.scale[at] = scale;
  to.sum[at] = scale * static_cast<float>(sums[0] + sums[1]);
}

// Round rows `begin` to `end` of x [M, K], for which there is room.
template <typename T> void round_block_rows(const T* x, int64_t K, BlockRows& to, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < to.tiles; ++t) {
    const int64_t first = to.first(t), R = to.first(t + 1) - first;
    for (int64_t m = std::max(first, begin); m < std::min(first + R, end); ++m)
      for (int64_t g = 0; g < to.K / 32; ++g)
        if (to.exact)
          round_group<true>(x + m * K + g * 32, K - g * 32, to, first, R, m - first, g);
        else
          round_group<false>(x + m * K + g * 32, K - g * 32, to, first, R, m - first, g);
  }
}

// Rounded rows of a tile, from a unit of weights on.
struct RowTile {
  const int8_t *codes, *fine;
  const float *scale, *sum;
  const int32_t *less, *less16;
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
void few_block_rows(const RowTile& x, const uint8_t* const (&w)[B], int64_t K, int64_t skip, vfloat (&acc)[R][B]) {
  using Sizes = Record<Form>;
  constexpr int64_t kAhead = (2048 + Sizes::kUnitBytes - 1) / Sizes::kUnitBytes;  // units
  constexpr int64_t kLines = Form::kBytes / 64, kHalves = 32 / Form::kGroup, kPairs = 4 / kHalves;
  constexpr bool kWide = Form::kWide && kSaturates;
  const int64_t units = Sizes::units(K);
  const uint8_t *unit[B], *low[B];
  for (int b = 0; b < B; ++b) unit[b] = w[b], low[b] = w[b] + Sizes::low(K);
  const int8_t *codes = x.codes, *fines = x.fine;
  for (int64_t u = 0; u < units; ++u) {
    const int64_t ahead = kAhead * Sizes::kUnitBytes + (u + kAhead < units ? 0 : skip);
    const int64_t ahead_low = kAhead * Sizes::kLowUnitBytes + (u + kAhead < units ? 0 : skip);
    for (int b = 0; b < B; ++b)
      for (int64_t i = 0; i < Form::kHeader; i += 64) __builtin_prefetch(unit[b] + i + ahead, 0, 2);
    for (int64_t g = 0; g < Form::kUnit / 32; ++g) {
      const int64_t at = (u * (Form::kUnit / 32) + g) * R;
      const uint8_t *from[B], *from_low[B];
      for (int b = 0; b < B; ++b) {
        from[b] = unit[b] + Form::kHeader + g * Form::kBytes, from_low[b] = low[b] + g * Form::kLowBytes;
        for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(from[b] + i * 64 + ahead, 0, 2);
        for (int64_t i = 0; i < Form::kLowBytes; i += 64) __builtin_prefetch(from_low[b] + i + ahead_low, 0, 2);
      }
      for (int64_t h = 0; h < kHalves; ++h) {
        vint dot[R][B] = {}, fine[R][B] = {};
        if (!Form::kMin)
          for (int r = 0; r < R; ++r)
            for (int b = 0; b < B; ++b)
              (EXACT ? fine : dot)[r][b] +=
                  (kHalves == 2 ? x.less16[(at * 2) + h * R + r] : x.less[at + r]) * (1 << Form::kZero);
        for (int64_t j = h * kPairs; j < (h + 1) * kPairs; ++j, codes += 8 * R, fines += 8 * R)
          for (int b = 0; b < B; ++b) {
            vuint first, second;
            Form::pair(from[b], from_low[b], j, first, second);
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
            for (int r = 0; r < R; ++r) acc[r][b] -= minimum * x.sum[at + r];
          }
        }
      }
    }
    for (int b = 0; b < B; ++b) unit[b] += Sizes::kUnitBytes, low[b] += Sizes::kLowUnitBytes;
  }
}

// R rows against B records, whose codes were unpacked, of `groups` of 32 inputs: adds to acc [R][B][16].
template <int R, int B, int GROUP, bool MIN, bool WIDE, bool EXACT>
void unpacked_block_rows(const RowTile& x, const UnpackedBlocks* w, int64_t groups, int zero, float* acc_memory) {
  constexpr int64_t kHalves = 32 / GROUP, kQuads = 8 / kHalves;
  vfloat acc[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = get<vfloat>(acc_memory + (r * B + b) * 16);
  const int8_t *codes = x.codes, *fines = x.fine;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t h = 0; h < kHalves; ++h) {
      vint dot[R][B] = {}, fine[R][B] = {};
      if (!MIN)
        for (int r = 0; r < R; ++r)
          for (int b = 0; b < B; ++b)
            (EXACT ? fine : dot)[r][b] += (kHalves == 2 ? x.less16[(g * 2 + h) * R + r] : x.less[g * R + r]) * (1 << zero);
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
          for (int r = 0; r < R; ++r) acc[r][b] -= minimum * x.sum[g * R + r];
        }
      }
    }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) put(acc[r][b], acc_memory + (r * B + b) * 16);
}

template <int R, int B, int GROUP, bool MIN, bool WIDE, bool EXACT>
void unpacked_tile(int64_t rows, const RowTile& x, const UnpackedBlocks* w, int64_t groups, int zero, float* acc) {
  if constexpr (R > 1)
    if (rows < R) return unpacked_tile<R - 1, B, GROUP, MIN, WIDE, EXACT>(rows, x, w, groups, zero, acc);
  unpacked_block_rows<R, B, GROUP, MIN, WIDE, EXACT>(x, w, groups, zero, acc);
}

// All rows against B records: each 256 inputs are unpacked once.
template <typename Form, int B, bool EXACT>
void many_block_rows(const BlockRows& x, const uint8_t* const (&w)[B], int64_t K, std::vector<float>& acc) {
  constexpr int64_t per = UnpackedBlocks::kInputs / Form::kUnit;
  constexpr int most = EXACT ? kBlockRows / 2 : kBlockRows;
  acc.assign(x.M * B * 16, 0);
  UnpackedBlocks some[B];
  const int64_t units = Record<Form>::units(K);
  for (int64_t u = 0; u < units; u += per) {
    const int64_t num = std::min(per, units - u);
    for (int b = 0; b < B; ++b) unpack_blocks<Form>(w[b], K, u, num, some[b]);
    for (int64_t t = 0; t < x.tiles; ++t) {
      const int64_t first = x.first(t);
      unpacked_tile<most, B, Form::kGroup, Form::kMin, Form::kWide && kSaturates, EXACT>(
          x.first(t + 1) - first, {x, t, u * Form::kUnit}, some, num * (Form::kUnit / 32), Form::kZero,
          acc.data() + first * B * 16);
    }
  }
}

// All rows against records begin..end of a part, whose outputs begin at y; `left` are left in a row.
template <typename Form, bool EXACT, typename T>
void block_records(const BlockRows& x, const uint8_t* w, const T* bias, T* y, int64_t N, int64_t left, int64_t K,
                   int64_t begin, int64_t end) {
  constexpr int B = kBlocks;
  const int64_t bytes = Record<Form>::bytes(K);
  thread_local std::vector<float> memory;
  const auto store = [&](int64_t m, int64_t n, const float* sums) {
    for (int64_t l = 0; l < std::min<int64_t>(16, left - n * 16); ++l)
      narrow(bias ? sums[l] + static_cast<float>(widen(bias[n * 16 + l])) : sums[l], y + m * N + n * 16 + l);
  };
  for (int64_t n = begin; n < end; n += B) {
    const uint8_t* at[B];
    for (int b = 0; b < B; ++b) at[b] = w + std::min(n + b, end - 1) * bytes;
    many_block_rows<Form, B, EXACT>(x, at, K, memory);
    for (int64_t m = 0; m < x.M; ++m)
      for (int b = 0; b < B && n + b < end; ++b) store(m, n + b, memory.data() + (m * B + b) * 16);
  }
}

// Records of a linear before those of a thread: threads take as many bytes.
inline int64_t first_record(const BlockTable& table, int64_t me, int64_t all) {
  int64_t bytes = table.bytes * me / all, before = 0;
  const BlockPart* part = table.parts();
  for (int64_t p = 0; p < table.num_parts; before += part->records, bytes -= part->records * part->record, ++p, ++part)
    if (bytes < part->records * part->record) return before + (bytes + part->record - 1) / part->record;
  return before;
}

// This thread's share of y = x W^T of rounded rows.
template <typename T>
void block_share(const BlockRows& x, const uint8_t* w, const BlockTable& table, const T* bias, T* y, int64_t N, int64_t K,
                 int64_t me, int64_t all) {
  const int64_t begin = first_record(table, me, all), end = first_record(table, me + 1, all);
  int64_t before = 0;
  for (const BlockPart* part = table.parts(); part < table.parts() + table.num_parts; before += part->records, ++part) {
    const int64_t from = std::max(begin - before, int64_t{0}), to = std::min(end - before, part->records);
    if (from >= to) continue;
    const int64_t o = before * 16;
    with_form(part->type, [&](auto form) {
      const auto run = table.exact ? block_records<decltype(form), true, T> : block_records<decltype(form), false, T>;
      run(x, w + part->offset, bias ? bias + o : nullptr, y + o, N, N - o, K, from, to);
    });
  }
}

template <typename T>
void block_linear(const T* x, const uint8_t* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, const BlockTable& table,
                  int threads) {
  BlockRows rounded;
  rounded.resize(M, K, table.exact);
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    round_block_rows(x, K, rounded, share(M, me, all), share(M, me + 1, all));
#pragma omp barrier
    block_share(rounded, w, table, bias, y, N, K, me, all);
  }
}

}  // namespace sharesd
