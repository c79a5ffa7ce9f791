// Rows against weights of stored blocks: what does not depend on their types. Activations are rounded with one scale for
// every 32 of them, so that sums of products within a group are integers; groups are added in float32, in order of the inputs. A
// row's sums do not depend on the other rows, nor on the thread that computed them.
//
// Rounded activations have 8 bits, or 16: q = 256 a + b, two rows of 8 bits that take the same products. Without VNNI, which adds
// four products of bytes, most products need fewer instructions with whole q: these are kept too, or instead.
#pragma once
#include "lowbit.h"

namespace sharesd {

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool kHasVnni = true;
#else
constexpr bool kHasVnni = false;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define SHARESD_ADDS_PAIRS  // products of bytes, in 16 bits
constexpr bool kAddsPairs = true;
#else
constexpr bool kAddsPairs = false;
#endif

// Rows that weights are unpacked for in registers, one tile, and rows of a tile of more. More take long to compile.
constexpr int kFewRows = kWideRegisters ? 8 : 6;
constexpr int kTileRows = 4;
constexpr int kBlocks = kWideRegisters ? 2 : 1;    // records that are read at once

// Rounded rows in tiles, the rows of a tile interleaved: [K / 4][rows][4] codes, and so on. K is a multiple of 128 here. The four of
// a whole row are in the order 0, 2, 1, 3: even and odd bytes of weights are multiplied apart.
struct BlockRows {
  int64_t M = 0, K = 0, tiles = 0;
  bool exact = false;
  std::vector<int8_t> codes, fine;  // of a and b
  std::vector<int16_t> whole;       // q
  std::vector<float> scale, sum;    // of every 32 inputs; the sum is of the decoded values
  std::vector<int32_t> less, less16;  // negative sums of 32 codes, and of 16
  int64_t first(int64_t tile) const { return M * tile / tiles; }
  bool is_few() const { return M <= kFewRows; }
  bool has_whole() const { return exact && !kHasVnni; }
  bool has_bytes() const { return !has_whole() || (kAddsPairs && is_few()); }
  void resize(int64_t rows, int64_t inputs, bool is_exact) {
    M = rows, K = (inputs + 127) / 128 * 128, exact = is_exact;
    tiles = is_few() ? 1 : (M + kTileRows - 1) / kTileRows;
    const auto grow = [](auto& v, int64_t n) {
      if (static_cast<int64_t>(v.size()) < n) v.resize(n);
    };
    if (has_whole()) grow(whole, M * K);
    if (has_bytes()) grow(codes, M * K);
    if (has_bytes() && exact) grow(fine, M * K);
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
  for (int h = 0; h < 2; ++h)
    if (left > h * 16) load_floats(x + h * 16, &v[h]);
  const float top = largest(greater(absolute(v[0]), absolute(v[1])));
  const float bad = sum_of(v[0] * 0.0f + v[1] * 0.0f);  // NaN if one of them is, or infinite
  const float inverse = top > 1e-30f ? most / top : 0;
  const float scale = top / most + bad;
  int32_t sums[2];
  const int64_t place = tile_begin * K + (g * 8 * R + r) * 4;
  for (int h = 0; h < 2; ++h) {
    const auto put_quads = [&](const vint& codes, std::vector<int8_t>& to) {
      int8_t some[16];
      store_narrow(codes, some);
      for (int j = 0; j < 4; ++j) std::memcpy(to.data() + place + (h * 4 + j) * R * 4, some + j * 4, 4);
    };
    const vint q = convert<vint>((v[h] * inverse + 12582912.0f) - 12582912.0f);
    if (to.has_whole()) {
      int16_t some[16];
      store_narrow(q, some);
      for (int j = 0; j < 4; ++j) {
        uint64_t quad;
        std::memcpy(&quad, some + j * 4, 8);
        quad = (quad & 0xffff00000000ffff) | (quad << 16 & 0xffff00000000) | (quad >> 16 & 0xffff0000);
        std::memcpy(to.whole.data() + place + (h * 4 + j) * R * 4, &quad, 8);
      }
    }
    if (to.has_bytes()) {
      const vint a = EXACT ? (q + 128) >> 8 : q;
      put_quads(a, to.codes);
      if (EXACT) put_quads(q - (a << 8), to.fine);
    }
    sums[h] = sum_of(q);
    to.less16[tile_begin * K / 16 + (g * 2 + h) * R + r] = -sums[h];
  }
  to.less[at] = -sums[0] - sums[1];
  to.scale[at] = scale;
  to.sum[at] = scale * static_cast<float>(sums[0] + sums[1]);
}

// A row's inputs in another order, in memory of this thread.
template <typename T> const T* in_order(const T* x, const int32_t* order, int64_t K) {
  thread_local std::vector<T> row;
  row.resize(K);
  for (int64_t k = 0; k < K; ++k) row[k] = x[order[k]];
  return row.data();
}

// Round rows `begin` to `end` of x [M, K], for which there is room; see BlockTable::order.
template <typename T>
void round_block_rows(const T* x, int64_t K, const int32_t* order, BlockRows& to, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < to.tiles; ++t) {
    const int64_t first = to.first(t), R = to.first(t + 1) - first;
    for (int64_t m = std::max(first, begin); m < std::min(first + R, end); ++m) {
      const T* row = order ? in_order(x + m * K, order, K) : x + m * K;
      for (int64_t g = 0; g < to.K / 32; ++g)
        if (to.exact)
          round_group<true>(row + g * 32, K - g * 32, to, first, R, m - first, g);
        else
          round_group<false>(row + g * 32, K - g * 32, to, first, R, m - first, g);
    }
  }
}

// Sums of rounded rows times `num` records of weights from `w` on, of the same type, at most kBlocks: [M][kBlocks][16]. It is part
// of a library of its own (block_ops.cpp), which is built if there are such weights.
using BlockKernel = void (*)(const BlockRows& x, const uint8_t* w, int64_t type, int64_t K, int64_t num, float* sums);

// A part of a linear: outputs whose weights have one type. block_linear.py writes these words.
struct BlockPart {
  int64_t type, records, offset, record;  // offset and record in bytes
};
struct BlockTable {
  int64_t num_parts, exact, kernel, ordered;  // kernel: address of a BlockKernel
  const BlockPart* parts() const { return reinterpret_cast<const BlockPart*>(this + 1); }
  // Numbers of the inputs in the order of the weights, [K]; null if they are in order.
  const int32_t* order() const { return ordered ? reinterpret_cast<const int32_t*>(parts() + num_parts) : nullptr; }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const BlockPart* part = parts(); part < parts() + num_parts; ++part) sum += part->records * part->record;
    return sum;
  }
};
static_assert(sizeof(BlockPart) == 32 && sizeof(BlockTable) == 32, "block_linear.py writes these words");

// Records of a linear before those of a thread: threads take as many bytes.
inline int64_t first_record(const BlockTable& table, int64_t me, int64_t all) {
  int64_t bytes = table.bytes() * me / all, before = 0;
  const BlockPart* part = table.parts();
  for (int64_t p = 0; p < table.num_parts; before += part->records, bytes -= part->records * part->record, ++p, ++part)
    if (bytes < part->records * part->record) return before + (bytes + part->record - 1) / part->record;
  return before;
}

// This thread's share of y = x W^T of rounded rows.
template <typename T>
void block_share(const BlockRows& x, const uint8_t* w, const BlockTable& table, BlockKernel kernel, const T* bias, T* y,
                 int64_t N, int64_t K, int64_t me, int64_t all) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < x.M * kBlocks * 16) memory.resize(x.M * kBlocks * 16);
  const int64_t begin = first_record(table, me, all), end = first_record(table, me + 1, all);
  int64_t before = 0;
  for (const BlockPart* part = table.parts(); part < table.parts() + table.num_parts; before += part->records, ++part) {
    const int64_t to = std::min(end - before, part->records);
    for (int64_t n = std::max(begin - before, int64_t{0}); n < to; n += kBlocks) {
      const int64_t num = std::min<int64_t>(kBlocks, to - n), o = (before + n) * 16, left = std::min(num * 16, N - o);
      kernel(x, w + part->offset + n * part->record, part->type, K, num, memory.data());
      for (int64_t m = 0; m < x.M; ++m) {
        const float* sums = memory.data() + m * kBlocks * 16;
        for (int64_t l = 0; l < left; ++l)
          narrow(bias ? sums[l] + static_cast<float>(widen(bias[o + l])) : sums[l], y + m * N + o + l);
      }
    }
  }
}

template <typename T>
void block_linear(const T* x, const uint8_t* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, const BlockTable& table,
                  BlockKernel kernel, int threads) {
  BlockRows rounded;
  rounded.resize(M, K, table.exact);
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    round_block_rows(x, K, table.order(), rounded, share(M, me, all), share(M, me + 1, all));
#pragma omp barrier
    block_share(rounded, w, table, kernel, bias, y, N, K, me, all);
  }
}

}  // namespace sharesd
