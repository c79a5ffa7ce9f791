// Records of blocks in memory, by type: see block_codecs.h for what they hold.
#pragma once
#include "block_codecs.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sharesd {

enum BlockType : int64_t {
#define BLOCK_TYPE(NAME, ...) k##NAME,
#include "block_types.def"
  kSplitQ8_0 = 100, kUpperQ8_0,  // in memory only, of one content: Q8_0, and its upper halves alone
  kF32 = 200, kF16, kBF16  // plain numbers next to blocks of the same linear
};

// Call f with the codec of a type.
template <typename F> inline void with_form(int64_t type, F&& f) {
  switch (type) {
#define BLOCK_TYPE(NAME, INPUTS, BYTES, UNIT, UNIT_BYTES, GPU, QUANTIZE, ...) case k##NAME: return f(__VA_ARGS__{});
#include "block_types.def"
    case kSplitQ8_0: return f(SplitQ8{});
    case kUpperQ8_0: return f(UpperQ8{});
  }
}

// Numbers next to blocks: a record is [K][16], as the rows of `linear.h` are.
inline bool is_number(int64_t type) { return type >= kF32; }
template <typename F> inline void with_number(int64_t type, F&& f) {
  if (type == kF32) return f(float{});
  if (type == kF16) return f(f16{});
  f(bf16{});
}

template <typename Form> struct Record {  // sizes in bytes, of K inputs
  static constexpr int64_t kUnitBytes = Form::kHeader + Form::kUnit / 32 * Form::kBytes;
  static constexpr int64_t kLowUnitBytes = Form::kUnit / 32 * Form::kLowBytes;
  static constexpr int64_t units(int64_t K) { return (K + Form::kUnit - 1) / Form::kUnit; }
  static constexpr int64_t low(int64_t K) { return units(K) * kUnitBytes; }
  static constexpr int64_t bytes(int64_t K) { return low(K) + units(K) * kLowUnitBytes; }
};
template <> struct Record<UpperQ8> : Record<SplitQ8> {
  static constexpr int64_t kLowUnitBytes = 0;
};

template <typename Form> constexpr bool has_sizes(int64_t inputs, int64_t bytes, int64_t unit, int64_t unit_bytes) {
  return Form::kInputs == inputs && Form::kBlock == bytes && Form::kUnit == unit && Record<Form>::bytes(unit) == unit_bytes;
}
#define BLOCK_TYPE(NAME, INPUTS, BYTES, UNIT, UNIT_BYTES, GPU, QUANTIZE, ...)      \
  static_assert(has_sizes<__VA_ARGS__>(INPUTS, BYTES, UNIT, UNIT_BYTES),           \
                "block_types.def: the sizes of " #NAME " are not those of its codec");
#include "block_types.def"

// 16 rows of a file, `pitch` bytes apart, as a record; rows beyond `rows` are zeros. True if all weights are finite.
template <typename Form>
bool repack_record(const uint8_t* raw, int64_t pitch, int64_t rows, int64_t K, uint8_t* to) {
  constexpr int64_t per = Form::kUnit / Form::kInputs;  // blocks in a unit
  uint8_t* low = to + Record<Form>::low(K);
  vfloat wrong{};  // 0, or NaN
  for (int64_t u = 0; u < Record<Form>::units(K); ++u, to += Record<Form>::kUnitBytes, low += Record<Form>::kLowUnitBytes) {
    uint8_t codes[16 * Form::kUnit] = {};
    std::memset(to, 0, Form::kHeader);
    for (int64_t o = 0; o < rows; ++o)
      for (int64_t b = 0; b < per && (u * per + b) * Form::kInputs < K; ++b) {
        const uint8_t* block = raw + o * pitch + (u * per + b) * Form::kBlock;
        Form::header(block, b, o, to);
        Form::decode(block, codes + o * Form::kUnit + b * Form::kInputs);
      }
    for (int64_t g = 0; g < Form::kUnit / Form::kGroup; ++g) {
      vfloat most = Form::scale(to, g) * 256.0f;  // codes are below 256
      if constexpr (Form::kMin) most = most + Form::minimum(to, g);
      wrong = wrong + (most - most);
    }
    for (int64_t g = 0; g < Form::kUnit / 32; ++g)
      Form::pack(codes + g * 32, Form::kUnit, to + Form::kHeader + g * Form::kBytes, low + g * Form::kLowBytes);
  }
  alignas(64) float sums[16];
  put(wrong, sums);
  return std::all_of(sums, sums + 16, [](float sum) { return sum == 0; });
}

// Large memory needs fewer lookups if its pages are huge: asks for those that lie wholly in it.
inline void advise_huge_pages([[maybe_unused]] uint8_t* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// True if halves of Q8_0 can be numbers of their own: their scales leave a bit free.
inline bool split_q8(const uint8_t* raw, int64_t pitch, int64_t rows, int64_t K, int threads) {
  bool all = true;
#pragma omp parallel for num_threads(threads) reduction(&& : all)
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t b = 0; b < K / 32; ++b) all = all && SplitQ8::splits(raw + n * pitch + b * SplitQ8::kBlock);
  return all;
}

// Rows of a file, a part of a linear, as records. Q8_0 becomes kSplitQ8_0 where it can. True if all weights are finite.
inline bool repack_blocks(const uint8_t* raw, int64_t pitch, int64_t rows, int64_t K, int64_t& type, uint8_t* to, int threads) {
  bool finite = true;
  if (type == kQ8_0 && split_q8(raw, pitch, rows, K, threads)) type = kSplitQ8_0;
  with_form(type, [&](auto form) {
    using Form = decltype(form);
    const int64_t bytes = Record<Form>::bytes(K);
    advise_huge_pages(to, (rows + 15) / 16 * bytes);
#pragma omp parallel for num_threads(threads) reduction(&& : finite)
    for (int64_t n = 0; n < rows; n += 16)
      finite = repack_record<Form>(raw + n * pitch, pitch, std::min<int64_t>(16, rows - n), K, to + n / 16 * bytes) && finite;
  });
  return finite;
}

// Weights of up to 256 inputs of a record, from unit `u` on: a byte for each code [inputs / 4][16][4], and floats for groups.
struct UnpackedBlocks {
  static constexpr int64_t kInputs = 256;
  alignas(64) uint8_t codes[kInputs * 16];
  alignas(64) float scale[kInputs / 16][16], minimum[kInputs / 16][16];
  alignas(64) int32_t zero[kInputs / 32][16];  // of kOwnZeros
};
template <typename Form>
void unpack_blocks(const uint8_t* record, int64_t K, int64_t u, int64_t units, UnpackedBlocks& to) {
  const uint8_t *unit = record + u * Record<Form>::kUnitBytes,
                *low = record + Record<Form>::low(K) + u * Record<Form>::kLowUnitBytes;
  constexpr int64_t groups = Form::kUnit / Form::kGroup;
  uint8_t* code = to.codes;
  for (int64_t i = 0; i < units; ++i, unit += Record<Form>::kUnitBytes, low += Record<Form>::kLowUnitBytes) {
    for (int64_t g = 0; g < groups; ++g) {
      put(Form::scale(unit, g), to.scale[i * groups + g]);
      if (Form::kMin) put(Form::minimum(unit, g), to.minimum[i * groups + g]);
      if constexpr (Form::kZero == kOwnZeros) put(Form::zero(unit, g), to.zero[i * groups + g]);
    }
    for (int64_t g = 0; g < Form::kUnit / 32; ++g) {
      const uint8_t *codes = unit + Form::kHeader + g * Form::kBytes, *codes_low = low + g * Form::kLowBytes;
      for (int64_t j = 0; j < 4; ++j, code += 128) {
        vuint a, b;
        Form::pair(codes, codes_low, j, a, b);
        if constexpr (kHasExcess<Form>) {
          const vuint excess = Form::excess(unit, g);
          a = less_bytes(a, excess), b = less_bytes(b, excess);
        }
        put(a, code);
        put(b, code + 64);
      }
    }
  }
}

// Row n of a linear, decoded.
template <typename T>
void decode_block_row(const uint8_t* weight, const BlockTable& table, int64_t n, int64_t K, T* to) {
  const BlockPart* part = table.parts();
  const int32_t* order = table.order();
  int64_t record = n / 16;
  for (; record >= part->records; ++part) record -= part->records;
  const uint8_t* at = weight + part->offset + record * part->record;
  if (is_number(part->type))
    return with_number(part->type, [&](auto number) {
      const auto* from = reinterpret_cast<const decltype(number)*>(at) + n % 16;
      for (int64_t k = 0; k < K; ++k) narrow(static_cast<float>(widen(from[k * 16])), to + (order ? order[k] : k));
    });
  with_form(part->type, [&](auto form) {
    using Form = decltype(form);
    constexpr int64_t per = UnpackedBlocks::kInputs / Form::kUnit;
    constexpr bool own_zeros = Form::kZero == kOwnZeros;
    UnpackedBlocks some;
    const int64_t units = Record<Form>::units(K);
    for (int64_t u = 0; u < units; u += per) {
      unpack_blocks<Form>(at, K, u, std::min(per, units - u), some);
      const int64_t begin = u * Form::kUnit, end = std::min(K, begin + UnpackedBlocks::kInputs), o = n % 16;
      for (int64_t k = begin, g = 0; k < end; k += Form::kGroup, ++g) {
        const int zero = own_zeros ? some.zero[g][o] : Form::kMin ? 0 : 1 << std::max(Form::kZero, 0);
        float values[Form::kGroup];
        for (int64_t i = 0; i < Form::kGroup; ++i) {
          const float code = some.codes[(g * Form::kGroup + i) / 4 * 64 + o * 4 + i % 4] - zero;
          values[i] = some.scale[g][o] * code - (Form::kMin ? some.minimum[g][o] : 0.0f);
        }
        if (order)
          for (int64_t i = 0; i < Form::kGroup; ++i) narrow(values[i], to + order[k + i]);
        else
          for (int64_t i = 0; i < Form::kGroup; ++i) narrow(values[i], to + k + i);
      }
    }
  });
}

template <typename T>
void decode_block_rows(const int64_t* rows, int64_t num, const uint8_t* weight, const BlockTable& table, int64_t K, T* to,
                       int threads) {
#pragma omp parallel for num_threads(threads) if (num > 1)
  for (int64_t i = 0; i < num; ++i) decode_block_row(weight, table, rows[i], K, to + i * K);
}

}  // namespace sharesd
