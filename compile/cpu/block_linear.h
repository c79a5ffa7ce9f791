// Products of rounded rows with records of weights (see block_rows.h), for every type. A row's sums do not depend on how its
// weights were unpacked: in registers for a few rows, in memory for more, which share the work.
#pragma once
#include "block_format.h"
#include "block_rows.h"

namespace sharesd {

// Rounded rows of a tile from number `row` on, from a unit of weights on.
struct RowTile {
  int64_t rows;  // of the tile
  const int8_t *codes, *fine;
  const int16_t* whole;
  const float *scale, *sum;
  const int32_t *less, *less16;
  template <int64_t HALVES> float sum_of(int64_t g, int64_t half) const {
    return HALVES == 2 ? scale[g] * static_cast<float>(-less16[half]) : sum[g];
  }
  template <bool WHOLE> auto inputs() const {
    if constexpr (WHOLE)
      return whole;
    else
      return codes;
  }
  RowTile(const BlockRows& x, int64_t tile, int64_t k, int64_t row) {
    const int64_t first = x.first(tile);
    rows = x.first(tile + 1) - first;
    const int64_t at = first * x.K + k * rows;
    const auto from = [&](const auto& all) { return all.empty() ? nullptr : all.data() + at + row * 4; };
    codes = from(x.codes), fine = from(x.fine), whole = from(x.whole);
    scale = x.scale.data() + at / 32 + row;
    sum = x.sum.data() + at / 32 + row;
    less = x.less.data() + at / 32 + row;
    less16 = x.less16.data() + at / 16 + row;
  }
};

template <typename W> inline auto as_bytes(const W& w) {
  if constexpr (IsPair<W>::value)
    return pair_of(as_bytes(w.low), as_bytes(w.high));
  else
    return (typename VectorOf<uint8_t, sizeof(W)>::type)w;
}

// Sums of products of codes up to MOST with rounded inputs, four at a time.
#if defined(SHARESD_ADDS_PAIRS)
template <typename Form>
constexpr int kMostCode = Form::kMost <= 15 ? 15 : Form::kMost <= 31 ? 31 : Form::kMost <= 127 ? 127 : 255;
template <typename I, int MOST> struct CodeSums {
  // So many times 2 * 128 * MOST are below 2^15. Adding two in 16 bits takes longer than widening each.
  static constexpr int kFit = MOST <= 15 ? 8 : MOST <= 31 ? 4 : 1;
  __m256i sums, pairs;
  void start(const I& from) { sums = (__m256i)from, pairs = __m256i{}; }
  template <typename W> void add(const W& w, const int8_t* x) {
    const __m256i xs = _mm256_set1_epi32(static_cast<int>(word(x)));
    if constexpr (MOST > 127) {  // products do not fit: the codes' halves are multiplied
      widen(_mm256_maddubs_epi16((__m256i)(w >> 4 & 0x0f0f0f0fu), xs), 16);
      widen(_mm256_maddubs_epi16((__m256i)(w & 0x0f0f0f0fu), xs), 1);
    } else if constexpr (kFit == 1) {
      widen(_mm256_maddubs_epi16((__m256i)w, xs), 1);
    } else {
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)w, xs));
      asm("" : "+x"(pairs));  // see GroupSums
    }
  }
  void widen() {
    if constexpr (kFit > 1) widen(pairs, 1), pairs = __m256i{};
  }
  I total() const { return (I)sums; }

 private:
  void widen(const __m256i& products, int16_t factor) {
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(products, _mm256_set1_epi16(factor)));
  }
};
#else
template <typename Form> constexpr int kMostCode = 255;
template <typename I, int MOST> struct CodeSums {
  static constexpr int kFit = 1;
  I sums;
  void start(const I& from) { sums = from; }
  template <typename W> void add(const W& w, const int8_t* x) { dot4(sums, as_bytes(w), x); }
  void widen() {}
  I total() const { return sums; }
};
#endif
template <typename H, int MOST> struct CodeSums<Pair<H>, MOST> {
  CodeSums<H, MOST> low, high;
  static constexpr int kFit = CodeSums<H, MOST>::kFit;
  void start(const Pair<H>& from) { low.start(from.low), high.start(from.high); }
  template <typename W> void add(const Pair<W>& w, const int8_t* x) { low.add(w.low, x), high.add(w.high, x); }
  void widen() { low.widen(), high.widen(); }
  Pair<H> total() const { return pair_of(low.total(), high.total()); }
};

// Have GCC add in the order of the source: it would keep all products until then, and run out of registers.
template <typename I> inline void in_order(I& sums) {
#if defined(__SSE2__)
  asm("" : "+x"(sums));
#endif
}

// Likewise with whole inputs.
template <typename I> struct WholeSums {
  static constexpr int kFit = 1;
  I sums;
  void start(const I& from) { sums = from; }
  template <typename W> void add(const W& w, const int16_t* x) {
    dot2(sums, w & 0x00ff00ffu, x);
    in_order(sums);
    dot2(sums, (W)((typename VectorOf<uint16_t, sizeof(W)>::type)w >> 8), x + 2);
    in_order(sums);
  }
  void widen() {}
  I total() const { return sums; }
};
template <typename H> struct WholeSums<Pair<H>> {
  WholeSums<H> low, high;
  static constexpr int kFit = 1;
  void start(const Pair<H>& from) { low.start(from.low), high.start(from.high); }
  template <typename W> void add(const Pair<W>& w, const int16_t* x) { low.add(w.low, x), high.add(w.high, x); }
  void widen() {}
  Pair<H> total() const { return pair_of(low.total(), high.total()); }
};
template <bool WHOLE, int MOST> using RowSums = std::conditional_t<WHOLE, WholeSums<vint>, CodeSums<vint, MOST>>;

// A lone row takes products of bytes where these are added in 16 bits.
template <int MOST, int R, bool EXACT>
constexpr bool kWhole = EXACT && !kHasVnni && (R > 1 || CodeSums<vint, MOST>::kFit == 1);

// Rows of a tile that are multiplied at once so that sums stay in 16 registers; 0: all of the tile.
template <int MOST, bool EXACT> constexpr int kAtOnce = kAddsPairs && (EXACT || CodeSums<vint, MOST>::kFit > 1) ? 4 : 0;

// Sums of a group as floats, of rows whose codes have been multiplied: acc += scale * xs * (256 * dot + fine).
template <bool FINE>
inline void add_group(vfloat& acc, const vfloat& scale, float xs, const vint& dot, const vint& fine) {
  if constexpr (FINE)
    acc += (scale * xs) * convert<vfloat>((dot << 8) + fine);
  else
    acc += (scale * xs) * convert<vfloat>(dot);
}

// R rows against a record, whose codes are unpacked in registers. One stream of memory is read, however many rows there are.
template <typename Form, int R, bool EXACT>
void few_block_rows(const RowTile& x, const uint8_t* unit, int64_t K, vfloat (&total)[R]) {
  using Sizes = Record<Form>;
  constexpr int64_t kAheadBytes = kLowAhead / (Form::kLowBytes ? 2 : 1);  // of each stream, to the first level, as measured
  constexpr int64_t kAhead = (kAheadBytes + Sizes::kUnitBytes - 1) / Sizes::kUnitBytes;  // units
  constexpr int64_t kLines = Form::kBytes / 64, kHalves = 32 / Form::kGroup, kPairs = 4 / kHalves;
  constexpr bool kWholeRows = kWhole<kMostCode<Form>, R, EXACT>, kFine = EXACT && !kWholeRows;
  using Sums = RowSums<kWholeRows, kMostCode<Form>>;
  constexpr int64_t kFit = std::min<int64_t>(Sums::kFit, 2 * kPairs);  // products that are widened together
  const int64_t units = Sizes::units(K);
  const int64_t skip = Sizes::bytes(K) - Sizes::low(K), skip_low = Sizes::bytes(K) - units * Sizes::kLowUnitBytes;
  const uint8_t* low = unit + Sizes::low(K);
  const auto* codes = x.inputs<kWholeRows>();
  const int8_t* fines = x.fine;
  const int64_t pitch = kAtOnce<kMostCode<Form>, EXACT> ? x.rows : R;
  vfloat mine[R] = {};
  // A lone row's with units of 64 inputs is faster without, as measured.
  constexpr bool kInRegisters = kWideRegisters ? R > 1 || Form::kUnit == 256 : R == 1;
  auto& acc = kInRegisters ? mine : total;
  for (int64_t u = 0; u < units; ++u) {
    const int64_t ahead = kAhead * Sizes::kUnitBytes + (u + kAhead < units ? 0 : skip);
    const int64_t ahead_low = kAhead * Sizes::kLowUnitBytes + (u + kAhead < units ? 0 : skip_low);
    for (int64_t i = 0; i < Form::kHeader; i += 64) __builtin_prefetch(unit + i + ahead);
    for (int64_t g = 0; g < Form::kUnit / 32; ++g) {
      const int64_t at = (u * (Form::kUnit / 32) + g) * pitch;
      const uint8_t *from = unit + Form::kHeader + g * Form::kBytes, *from_low = low + g * Form::kLowBytes;
      for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(from + i * 64 + ahead);
      for (int64_t i = 0; i < Form::kLowBytes; i += 64) __builtin_prefetch(from_low + i + ahead_low);
      [[maybe_unused]] vuint excess;
      if constexpr (kHasExcess<Form>) excess = Form::excess(unit, g);
      for (int64_t h = 0; h < kHalves; ++h) {
        Sums dot[R], fine[R];
        [[maybe_unused]] vint zero;
        if constexpr (Form::kZero == kOwnZeros) zero = Form::zero(unit, g);
        for (int r = 0; r < R; ++r) {
          vint start{};
          if constexpr (Form::kZero == kOwnZeros)
            start += zero * x.less[at + r];
          else if constexpr (!Form::kMin)
            start += (kHalves == 2 ? x.less16[(at * 2) + h * pitch + r] : x.less[at + r]) * (1 << Form::kZero);
          dot[r].start(kFine ? vint{} : start);
          fine[r].start(start);
        }
        const auto add_pair = [&](int64_t j) __attribute__((always_inline)) {
          vuint first, second;
          Form::pair(from, from_low, j, first, second);
          if constexpr (kHasExcess<Form>) first = less_bytes(first, excess), second = less_bytes(second, excess);
          for (int r = 0; r < R; ++r) {
            dot[r].add(first, codes + r * 4);
            if constexpr (kFine) fine[r].add(first, fines + r * 4);
            dot[r].add(second, codes + (pitch + r) * 4);
            if constexpr (kFine) fine[r].add(second, fines + (pitch + r) * 4);
            if ((j + 1) * 2 % kFit == 0) dot[r].widen(), fine[r].widen();
          }
          codes += 8 * pitch, fines += 8 * pitch;
        };
        if constexpr (kAtOnce<kMostCode<Form>, EXACT>) {  // when to widen is then known
#pragma GCC unroll 4
          for (int64_t j = h * kPairs; j < (h + 1) * kPairs; ++j) add_pair(j);
        } else {
          for (int64_t j = h * kPairs; j < (h + 1) * kPairs; ++j) add_pair(j);
        }
        const vfloat scale = Form::scale(unit, g * kHalves + h);
        for (int r = 0; r < R; ++r) add_group<kFine>(acc[r], scale, x.scale[at + r], dot[r].total(), fine[r].total());
        if constexpr (Form::kMin) {
          const vfloat minimum = Form::minimum(unit, g * kHalves + h);
          for (int r = 0; r < R; ++r) acc[r] -= minimum * x.sum_of<kHalves>(at + r, at * 2 + h * pitch + r);
        }
      }
    }
    unit += Sizes::kUnitBytes, low += Sizes::kLowUnitBytes;
  }
  if constexpr (kInRegisters) std::memcpy(total, mine, sizeof mine);
}

// Rows from `row` on; most at once: R.
template <typename Form, int R, bool EXACT>
void few_rows(const BlockRows& x, int64_t row, const uint8_t* w, int64_t K, float* sums, int64_t pitch) {
  if constexpr (R > 1)
    if (x.M - row < R) return few_rows<Form, R - 1, EXACT>(x, row, w, K, sums, pitch);
  vfloat acc[R] = {};
  few_block_rows<Form, R, EXACT>({x, 0, 0, row}, w, K, acc);
  for (int r = 0; r < R; ++r) put(acc[r], sums + (row + r) * pitch);
}

template <typename Form, int B, bool EXACT>
void few_rows_sums(const BlockRows& x, const uint8_t* const (&w)[B], int64_t K, float* sums) {
  constexpr int kSome = kAtOnce<kMostCode<Form>, EXACT>, kRows = kSome ? kSome : kFewRows;
  for (int b = 0; b < B; ++b)
    for (int64_t row = 0; row < x.M; row += kRows) few_rows<Form, kRows, EXACT>(x, row, w[b], K, sums + b * 16, B * 16);
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
template <int R, int B, int GROUP, bool MIN, int MOST, bool EXACT>
void unpacked_block_rows(const RowTile& x, const UnpackedBlocks* w, const Fetched* next, int64_t groups, int zero,
                         float* acc_memory) {
  constexpr int64_t kHalves = 32 / GROUP, kQuads = 8 / kHalves;
  constexpr bool kWholeRows = EXACT && !kHasVnni, kFine = EXACT && kHasVnni;
  using Sums = RowSums<kWholeRows, MOST>;
  constexpr int64_t kFit = std::min<int64_t>(Sums::kFit, kQuads);
  vfloat acc[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = get<vfloat>(acc_memory + (r * B + b) * 16);
  const auto* codes = x.inputs<kWholeRows>();
  const int8_t* fines = x.fine;
  const int64_t pitch = kAtOnce<MOST, EXACT> ? x.rows : R;
  for (int64_t g = 0; g < groups; ++g) {
    for (int b = 0; b < B; ++b) next[b].fetch(g);
    for (int64_t h = 0; h < kHalves; ++h) {
      Sums dot[R][B], fine[R][B];
      for (int b = 0; b < B; ++b)
        for (int r = 0; r < R; ++r) {
          vint start{};
          if (!MIN && GROUP == 32 && zero == kOwnZeros)
            start += get<vint>(w[b].zero[g]) * x.less[g * pitch + r];
          else if (!MIN)
            start += (kHalves == 2 ? x.less16[(g * 2 + h) * pitch + r] : x.less[g * pitch + r]) * (1 << zero);
          dot[r][b].start(kFine ? vint{} : start);
          fine[r][b].start(start);
        }
#pragma GCC unroll 8
      for (int64_t j = 0; j < kQuads; ++j, codes += 4 * pitch, fines += 4 * pitch) {
        vuint code[B];
        for (int b = 0; b < B; ++b) code[b] = get<vuint>(w[b].codes + ((g * kHalves + h) * kQuads + j) * 64);
        for (int r = 0; r < R; ++r)
          for (int b = 0; b < B; ++b) {
            dot[r][b].add(code[b], codes + r * 4);
            if constexpr (kFine) fine[r][b].add(code[b], fines + r * 4);
            if ((j + 1) % kFit == 0) dot[r][b].widen(), fine[r][b].widen();
          }
      }
      for (int b = 0; b < B; ++b) {
        const vfloat scale = get<vfloat>(w[b].scale[g * kHalves + h]);
        for (int r = 0; r < R; ++r)
          add_group<kFine>(acc[r][b], scale, x.scale[g * pitch + r], dot[r][b].total(), fine[r][b].total());
        if constexpr (MIN) {
          const vfloat minimum = get<vfloat>(w[b].minimum[g * kHalves + h]);
          for (int r = 0; r < R; ++r)
            acc[r][b] -= minimum * x.sum_of<kHalves>(g * pitch + r, (g * 2 + h) * pitch + r);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) put(acc[r][b], acc_memory + (r * B + b) * 16);
}

template <int R, int B, int GROUP, bool MIN, int MOST, bool EXACT>
void unpacked_tile(int64_t rows, const RowTile& x, const UnpackedBlocks* w, const Fetched* next, int64_t groups, int zero,
                   float* acc) {
  if constexpr (R > 1)
    if (rows < R) return unpacked_tile<R - 1, B, GROUP, MIN, MOST, EXACT>(rows, x, w, next, groups, zero, acc);
  unpacked_block_rows<R, B, GROUP, MIN, MOST, EXACT>(x, w, next, groups, zero, acc);
}

// All rows against B records: each 256 inputs are unpacked once.
template <typename Form, int B, bool EXACT>
void many_block_rows(const BlockRows& x, const uint8_t* const (&w)[B], int64_t K, float* acc) {
  constexpr int64_t per = UnpackedBlocks::kInputs / Form::kUnit;
  constexpr int kSome = kAtOnce<kMostCode<Form>, EXACT>, kRows = kSome ? kSome : kTileRows;
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
      const int64_t rows = x.first(t + 1) - first;
      for (int64_t row = 0; row < rows; row += kRows)
        unpacked_tile<kRows, B, Form::kGroup, Form::kMin, kMostCode<Form>, EXACT>(
            rows - row, {x, t, u * Form::kUnit, row}, some, t || row ? none : next, groups, Form::kZero,
            acc + (first + row) * B * 16);
    }
  }
}

// Values of rounded rows, [M][K].
inline const float* decoded_rows(const BlockRows& x, int64_t K) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < x.M * K + 32) memory.resize(x.M * K + 32);  // the last group may be short
  for (int64_t t = 0; t < x.tiles; ++t) {
    const RowTile tile(x, t, 0, 0);
    const int64_t first = x.first(t), R = x.first(t + 1) - first;
    for (int64_t r = 0; r < R; ++r)
      for (int64_t g = 0; g * 32 < K; ++g) {
        float codes[32];
        for (int64_t k = 0; k < 32; ++k) {
          const int64_t quad = ((g * 8 + k / 4) * R + r) * 4, at = quad + k % 4;
          if (x.has_whole())
            codes[k] = tile.whole[quad + k % 2 * 2 + k % 4 / 2];
          else
            codes[k] = x.exact ? tile.codes[at] * 256 + tile.fine[at] : tile.codes[at];
        }
        for (int64_t h = 0; h < 32; h += 16)
          put(get<vfloat>(codes + h) * tile.scale[g * R + r], memory.data() + (first + r) * K + g * 32 + h);
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
    rows<float, R, kBlocks>(values, K, weights, static_cast<const float*>(nullptr), sums, 0, x.M, N, K, {2048, 0});
  else
    rows<float, R, 1>(values, K, weights, static_cast<const float*>(nullptr), sums, 0, x.M, N, K, {2048, 0});
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
      (x.exact ? few_rows_sums<Form, B, true> : few_rows_sums<Form, B, false>)(x, at, K, sums);
    else
      (x.exact ? many_block_rows<Form, B, true> : many_block_rows<Form, B, false>)(x, at, K, sums);
  });
}

}  // namespace sharesd
