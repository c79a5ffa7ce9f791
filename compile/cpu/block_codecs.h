// Codecs of stored blocks: codes, scales and minima as in the file, never rounded again, in the order in which kernels read them.
//
// w[n, k] = scale[n, g] * (code - zero) - minimum[n, g], g a group of 16 or 32 inputs; zero is a power of two or, with minima, 0.
// Integers of checkpoint folders have groups of 32, 64 or 128 inputs, each with a zero of its own.
//
// A record holds 16 outputs: units of 64, 128 or 256 inputs, each the scales of its groups, then the codes of 32 inputs after the
// other. Records follow each other, so that a thread reads one stream of memory. Codes of 32 inputs are planes: their lower four
// bits [8 inputs][16 outputs][4 bytes], a byte with input k (low half) and input k + 4 (high half); then the bits above, if
// any: [16 outputs][4 bytes] for each 32 inputs (one bit of 8 inputs in a byte), or for each 16 (two bits of 4). Codes of 8 bits
// have their upper halves in the units; their lower halves are a second stream, after all units of the record.
#pragma once
#include "block_rows.h"

namespace sharesd {

constexpr int kOwnZeros = -1;  // in place of a form's `kZero`

inline uint32_t word(const void* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
inline void put_word(uint32_t v, void* p) { std::memcpy(p, &v, 4); }

// Sixteen small integers.
template <typename E, typename V> inline void load_small(const E* p, V* out) {
  if constexpr (IsPair<V>::value) {
    load_small(p, &out->low);
    load_small(p + V::kHalf, &out->high);
  } else {
    constexpr bool kSigned = std::is_signed_v<E>;
#if defined(__AVX512F__)
    const __m128i some = get<__m128i>(p);
    *out = (V)(kSigned ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some));
#elif defined(__AVX2__)
    const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    *out = (V)(kSigned ? _mm256_cvtepi8_epi32(some) : _mm256_cvtepu8_epi32(some));
#else
    for (size_t i = 0; i < sizeof(V) / 4; ++i) (*out)[i] = p[i];
#endif
  }
}
template <typename E> inline vint small(const uint8_t* p) {
  vint v;
  load_small(reinterpret_cast<const E*>(p), &v);
  return v;
}
template <typename E> inline vfloat small_floats(const uint8_t* p) { return convert<vfloat>(small<E>(p)); }
template <typename E> inline vfloat floats(const uint8_t* p) {
  vfloat v;
  load(reinterpret_cast<const E*>(p), &v);
  return v;
}

// Bits of a where the mask is set, else of b.
template <typename V> inline V by_bits(uint32_t mask, const V& a, const V& b) {
#if defined(__AVX512F__)
  return (V)_mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(mask)), (__m512i)a, (__m512i)b, 0xca);
#else
  return (a & mask) | (b & ~mask);
#endif
}

// Bytes of a table of 16, by bytes below 16.
template <typename V> inline V look_up(const uint8_t* table, const V& places) {
  if constexpr (IsPair<V>::value) {
    return pair_of(look_up(table, places.low), look_up(table, places.high));
  } else {
#if defined(__AVX512BW__)
    return (V)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(get<__m128i>(table)), (__m512i)places);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (V)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(get<__m128i>(table)), (__m256i)places);
#elif defined(__SSSE3__) && !defined(__AVX512F__)
    return (V)_mm_shuffle_epi8(get<__m128i>(table), (__m128i)places);
#else
    uint8_t some[sizeof(V)];
    std::memcpy(some, &places, sizeof(V));
    for (uint8_t& each : some) each = table[each];
    return get<V>(some);
#endif
  }
}

// Planes of 32 inputs: `pack` from the codes of 16 outputs, `pitch` apart; `pair` gives those of inputs 8 j to 8 j + 4 and of
// the next four, a byte each.
template <int BITS> struct Planes;
template <int BITS> struct Codes {
  static constexpr int kMost = (1 << BITS) - 1;
};

inline void pack_halves(const uint8_t* codes, int64_t pitch, int shift, uint8_t* to) {
  for (int64_t j = 0; j < 4; ++j)
    for (int64_t o = 0; o < 16; ++o) {
      const uint8_t* at = codes + o * pitch + j * 8;
      put_word((word(at) >> shift & 0x0f0f0f0fu) | (word(at + 4) >> shift & 0x0f0f0f0fu) << 4, to + j * 64 + o * 4);
    }
}

// Two bits of 16 inputs [2][16 outputs][4 bytes], those of every fourth input in a byte.
inline void pack_quarters(const uint8_t* codes, int64_t pitch, int shift, uint8_t* to) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t o = 0; o < 16; ++o) {
      uint32_t bits = 0;
      for (int j = 0; j < 4; ++j) bits |= (word(codes + o * pitch + half * 16 + j * 4) >> shift & 0x03030303u) << 2 * j;
      put_word(bits, to + half * 64 + o * 4);
    }
}
// One bit of 32 inputs [16 outputs][4 bytes].
inline void pack_eighths(const uint8_t* codes, int64_t pitch, int shift, uint8_t* to) {
  for (int64_t o = 0; o < 16; ++o) {
    uint32_t bits = 0;
    for (int j = 0; j < 8; ++j) bits |= (word(codes + o * pitch + j * 4) >> shift & 0x01010101u) << j;
    put_word(bits, to + o * 4);
  }
}

template <> struct Planes<4> : Codes<4> {
  static constexpr int64_t kBytes = 256, kLowBytes = 0;
  static void pack(const uint8_t* codes, int64_t pitch, uint8_t* to, uint8_t*) { pack_halves(codes, pitch, 0, to); }
  static inline void pair(const uint8_t* w, const uint8_t*, int64_t j, vuint& a, vuint& b) {
    const vuint v = get<vuint>(w + j * 64);
    a = v & 0x0f0f0f0fu;
    b = v >> 4 & 0x0f0f0f0fu;
  }
};

template <> struct Planes<5> : Codes<5> {
  static constexpr int64_t kBytes = 320, kLowBytes = 0;
  static void pack(const uint8_t* codes, int64_t pitch, uint8_t* to, uint8_t*) {
    pack_halves(codes, pitch, 0, to);
    pack_eighths(codes, pitch, 4, to + 256);
  }
  static inline vuint upper(const vuint& bits, int64_t j) {
    return (j < 4 ? bits << (4 - j) : bits >> (j - 4)) & 0x10101010u;
  }
  static inline void pair(const uint8_t* w, const uint8_t*, int64_t j, vuint& a, vuint& b) {
    const vuint v = get<vuint>(w + j * 64), bits = get<vuint>(w + 256);
    a = by_bits(0x0f0f0f0fu, v, upper(bits, 2 * j));
    b = by_bits(0x0f0f0f0fu, v >> 4, upper(bits, 2 * j + 1));
  }
};

template <> struct Planes<6> : Codes<6> {
  static constexpr int64_t kBytes = 384, kLowBytes = 0;
  static void pack(const uint8_t* codes, int64_t pitch, uint8_t* to, uint8_t*) {
    pack_halves(codes, pitch, 0, to);
    pack_quarters(codes, pitch, 4, to + 256);
  }
  static inline void pair(const uint8_t* w, const uint8_t*, int64_t j, vuint& a, vuint& b) {
    const vuint v = get<vuint>(w + j * 64), bits = get<vuint>(w + 256 + j / 2 * 64);
    const bool first = j % 2 == 0;
    a = by_bits(0x0f0f0f0fu, v, (first ? bits << 4 : bits) & 0x30303030u);
    b = by_bits(0x0f0f0f0fu, v >> 4, (first ? bits << 2 : bits >> 2) & 0x30303030u);
  }
};

template <> struct Planes<8> : Codes<8> {
  static constexpr int64_t kBytes = 256, kLowBytes = 256;
  static void pack(const uint8_t* codes, int64_t pitch, uint8_t* to, uint8_t* low) {
    pack_halves(codes, pitch, 4, to);
    pack_halves(codes, pitch, 0, low);
  }
  static inline void pair(const uint8_t* w, const uint8_t* low, int64_t j, vuint& a, vuint& b) {
    const vuint v = get<vuint>(w + j * 64), v2 = get<vuint>(low + j * 64);
    a = by_bits(0xf0f0f0f0u, v << 4, v2);
    b = by_bits(0xf0f0f0f0u, v, v2 >> 4);
  }
};

template <> struct Planes<2> : Codes<2> {
  static constexpr int64_t kBytes = 128, kLowBytes = 0;
  static void pack(const uint8_t* codes, int64_t pitch, uint8_t* to, uint8_t*) { pack_quarters(codes, pitch, 0, to); }
  static inline void pair(const uint8_t* w, const uint8_t*, int64_t j, vuint& a, vuint& b) {
    const vuint v = get<vuint>(w + j / 2 * 64);
    a = (j % 2 ? v >> 4 : v) & 0x03030303u;
    b = (j % 2 ? v >> 6 : v >> 2) & 0x03030303u;
  }
};

template <> struct Planes<3> : Codes<3> {
  static constexpr int64_t kBytes = 192, kLowBytes = 0;
  static void pack(const uint8_t* codes, int64_t pitch, uint8_t* to, uint8_t*) {
    pack_quarters(codes, pitch, 0, to);
    pack_eighths(codes, pitch, 2, to + 128);
  }
  static inline vuint upper(const vuint& bits, int64_t j) {
    return (j < 2 ? bits << (2 - j) : bits >> (j - 2)) & 0x04040404u;
  }
  static inline void pair(const uint8_t* w, const uint8_t*, int64_t j, vuint& a, vuint& b) {
    const vuint bits = get<vuint>(w + 128);
    Planes<2>::pair(w, nullptr, j, a, b);
    a = a | upper(bits, 2 * j);
    b = b | upper(bits, 2 * j + 1);
  }
};

// Codes of four bits are places in a table of bytes.
struct NonLinear {  // of IQ4_NL and IQ4_XS, plus 128
  static constexpr int kMost = 241;
  alignas(16) static constexpr uint8_t kTable[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};
struct SmallFloats {  // twice the numbers of four bits of MXFP4 and NVFP4, plus 16
  static constexpr int kMost = 28;
  alignas(16) static constexpr uint8_t kTable[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
};
template <typename TABLE> struct TablePlanes : Planes<4> {
  static constexpr int kMost = TABLE::kMost;
  static inline void pair(const uint8_t* w, const uint8_t* low, int64_t j, vuint& a, vuint& b) {
    Planes<4>::pair(w, low, j, a, b);
    a = look_up(TABLE::kTable, a);
    b = look_up(TABLE::kTable, b);
  }
};

// Blocks of 32 inputs with a scale, and perhaps a minimum, of their own; a unit is two of them.
template <int BITS, int ZERO, bool MIN> struct PlainForm : Planes<BITS> {
  static constexpr int64_t kUnit = 64, kInputs = 32, kGroup = 32, kHeader = MIN ? 128 : 64;
  static constexpr int kZero = ZERO;  // the logarithm of the code of 0
  static constexpr bool kMin = MIN;
  static constexpr int64_t kBlock = (MIN ? 4 : 2) + BITS * 4;  // bytes in a file
  static void header(const uint8_t* block, int64_t index, int64_t o, uint8_t* to) {
    std::memcpy(to + index * 32 + o * 2, block, 2);
    if (MIN) std::memcpy(to + 64 + index * 32 + o * 2, block + 2, 2);
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) { return floats<f16>(unit + g * 32); }
  static inline vfloat minimum(const uint8_t* unit, int64_t g) { return -floats<f16>(unit + 64 + g * 32); }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    block += MIN ? 4 : 2;
    if constexpr (BITS == 8) {
      for (int i = 0; i < 32; ++i) codes[i] = block[i] ^ 0x80;
    } else {
      const uint8_t* halves = block + (BITS == 5 ? 4 : 0);
      for (int i = 0; i < 16; ++i) codes[i] = halves[i] & 15, codes[i + 16] = halves[i] >> 4;
      if (BITS == 5)
        for (int i = 0; i < 32; ++i) codes[i] |= (word(block) >> i & 1) << 4;
    }
  }
};

// Blocks of 256 inputs, whose groups have small integers as scales.
struct SuperForm {
  static constexpr int64_t kUnit = 256, kInputs = 256;
};

template <int BITS> struct MinimaForm : SuperForm, Planes<BITS> {  // Q4_K and Q5_K
  static constexpr int64_t kGroup = 32, kHeader = 320, kBlock = BITS == 4 ? 144 : 176;
  static constexpr int kZero = 0;
  static constexpr bool kMin = true;
  static void header(const uint8_t* block, int64_t, int64_t o, uint8_t* to) {
    std::memcpy(to + o * 2, block, 2);
    std::memcpy(to + 32 + o * 2, block + 2, 2);
    const uint8_t* b = block + 4;
    for (int i = 0; i < 4; ++i) {
      to[64 + i * 16 + o] = b[i] & 63;
      to[192 + i * 16 + o] = b[4 + i] & 63;
      to[128 + i * 16 + o] = (b[8 + i] & 15) | b[i] >> 6 << 4;
      to[256 + i * 16 + o] = b[8 + i] >> 4 | b[4 + i] >> 6 << 4;
    }
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) {
    return floats<f16>(unit) * small_floats<uint8_t>(unit + 64 + g * 16);
  }
  static inline vfloat minimum(const uint8_t* unit, int64_t g) {
    return floats<f16>(unit + 32) * small_floats<uint8_t>(unit + 192 + g * 16);
  }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    const uint8_t *upper = block + 16, *halves = block + (BITS == 5 ? 48 : 16);
    for (int c = 0; c < 4; ++c)
      for (int i = 0; i < 32; ++i) {
        codes[c * 64 + i] = halves[c * 32 + i] & 15;
        codes[c * 64 + 32 + i] = halves[c * 32 + i] >> 4;
        if (BITS == 5) {
          codes[c * 64 + i] |= (upper[i] >> 2 * c & 1) << 4;
          codes[c * 64 + 32 + i] |= (upper[i] >> (2 * c + 1) & 1) << 4;
        }
      }
  }
};

struct Q6KForm : SuperForm, Planes<6> {
  static constexpr int64_t kGroup = 16, kHeader = 320, kBlock = 210;
  static constexpr int kZero = 5;
  static constexpr bool kMin = false;
  static void header(const uint8_t* block, int64_t, int64_t o, uint8_t* to) {
    std::memcpy(to + o * 2, block + 208, 2);
    for (int g = 0; g < 16; ++g) to[64 + g * 16 + o] = block[192 + g];
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) {
    return floats<f16>(unit) * small_floats<int8_t>(unit + 64 + g * 16);
  }
  static inline vfloat minimum(const uint8_t*, int64_t) { return vfloat{}; }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    for (int h = 0; h < 2; ++h, codes += 128) {
      const uint8_t *halves = block + h * 64, *upper = block + 128 + h * 32;
      for (int i = 0; i < 32; ++i) {
        codes[i] = (halves[i] & 15) | (upper[i] & 3) << 4;
        codes[32 + i] = (halves[32 + i] & 15) | (upper[i] >> 2 & 3) << 4;
        codes[64 + i] = halves[i] >> 4 | (upper[i] >> 4 & 3) << 4;
        codes[96 + i] = halves[32 + i] >> 4 | upper[i] >> 6 << 4;
      }
    }
  }
};

struct NonLinearForm : PlainForm<4, 7, false>, TablePlanes<NonLinear> {  // IQ4_NL
  using TablePlanes<NonLinear>::kMost;
  using TablePlanes<NonLinear>::kBytes;
  using TablePlanes<NonLinear>::kLowBytes;
  using TablePlanes<NonLinear>::pack;
  using TablePlanes<NonLinear>::pair;
};

struct MXFP4Form : PlainForm<4, 4, false>, TablePlanes<SmallFloats> {
  static constexpr int64_t kBlock = 17;
  using TablePlanes<SmallFloats>::kMost;
  using TablePlanes<SmallFloats>::kBytes;
  using TablePlanes<SmallFloats>::kLowBytes;
  using TablePlanes<SmallFloats>::pack;
  using TablePlanes<SmallFloats>::pair;
  static void header(const uint8_t* block, int64_t index, int64_t o, uint8_t* to) {  // half the power of two, as bfloat16
    const uint16_t bits = static_cast<uint16_t>(*block < 2 ? 0x20 << *block : (*block - 1) << 7);
    std::memcpy(to + index * 32 + o * 2, &bits, 2);
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) { return floats<bf16>(unit + g * 32); }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) { PlainForm<4, 4, false>::decode(block - 1, codes); }
};

struct IQ4XSForm : SuperForm, TablePlanes<NonLinear> {
  static constexpr int64_t kGroup = 32, kHeader = 192, kBlock = 136;
  static constexpr int kZero = 7;
  static constexpr bool kMin = false;
  static void header(const uint8_t* block, int64_t, int64_t o, uint8_t* to) {
    std::memcpy(to + o * 2, block, 2);
    const int upper = block[2] | block[3] << 8;
    for (int g = 0; g < 8; ++g) {
      const int lower = block[4 + g / 2] >> g % 2 * 4 & 15;
      to[64 + g * 16 + o] = static_cast<uint8_t>((lower | (upper >> 2 * g & 3) << 4) - 32);
    }
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) {
    return floats<f16>(unit) * small_floats<int8_t>(unit + 64 + g * 16);
  }
  static inline vfloat minimum(const uint8_t*, int64_t) { return vfloat{}; }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    for (int g = 0; g < 8; ++g)
      for (int i = 0; i < 16; ++i) {
        codes[g * 32 + i] = block[8 + g * 16 + i] & 15;
        codes[g * 32 + 16 + i] = block[8 + g * 16 + i] >> 4;
      }
  }
};

struct Q3KForm : SuperForm, Planes<3> {
  static constexpr int64_t kGroup = 16, kHeader = 320, kBlock = 110;
  static constexpr int kZero = 2;
  static constexpr bool kMin = false;
  static void header(const uint8_t* block, int64_t, int64_t o, uint8_t* to) {
    std::memcpy(to + o * 2, block + 108, 2);
    const uint8_t* b = block + 96;
    for (int g = 0; g < 16; ++g) {
      const int lower = b[g % 8] >> g / 8 * 4 & 15, upper = b[8 + g % 4] >> g / 4 * 2 & 3;
      to[64 + g * 16 + o] = static_cast<uint8_t>((lower | upper << 4) - 32);
    }
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) {
    return floats<f16>(unit) * small_floats<int8_t>(unit + 64 + g * 16);
  }
  static inline vfloat minimum(const uint8_t*, int64_t) { return vfloat{}; }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    for (int k = 0; k < 8; ++k)
      for (int i = 0; i < 32; ++i)
        codes[k * 32 + i] = (block[32 + k / 4 * 32 + i] >> k % 4 * 2 & 3) | (block[i] >> k & 1) << 2;
  }
};

struct Q2KForm : SuperForm, Planes<2> {
  static constexpr int64_t kGroup = 16, kHeader = 320, kBlock = 84;
  static constexpr int kZero = 0;
  static constexpr bool kMin = true;
  static void header(const uint8_t* block, int64_t, int64_t o, uint8_t* to) {
    std::memcpy(to + o * 2, block + 80, 2);
    std::memcpy(to + 32 + o * 2, block + 82, 2);
    for (int g = 0; g < 16; ++g) to[64 + g * 16 + o] = block[g];
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) {
    return floats<f16>(unit) * convert<vfloat>(small<uint8_t>(unit + 64 + g * 16) & 15);
  }
  static inline vfloat minimum(const uint8_t* unit, int64_t g) {
    return floats<f16>(unit + 32) * convert<vfloat>(small<uint8_t>(unit + 64 + g * 16) >> 4);
  }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    for (int k = 0; k < 8; ++k)
      for (int i = 0; i < 32; ++i) codes[k * 32 + i] = block[16 + k / 4 * 32 + i] >> k % 4 * 2 & 3;
  }
};

// Scales of 16 inputs are floats of 8 bits (E4M3), times a float for each output.
struct NVFP4Form : TablePlanes<SmallFloats> {
  static constexpr int64_t kUnit = 128, kInputs = 16, kGroup = 16, kHeader = 192, kBlock = 13;
  static constexpr int kZero = 4;
  static constexpr bool kMin = false;
  static void header(const uint8_t* block, int64_t index, int64_t o, uint8_t* to) {
    float common;
    std::memcpy(&common, block, 4);
    common *= 128.0f;  // half, since codes are twice their numbers, and 256, see `scale`
    std::memcpy(to + o * 4, &common, 4);
    to[64 + index * 16 + o] = block[4];
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) {  // as float16 the bits of E4M3 are 1 / 256 of their number
    typedef int8_t Bytes __attribute__((vector_size(16)));
    typedef uint16_t Halves __attribute__((vector_size(32)));
    const Halves bits = __builtin_convertvector(get<Bytes>(unit + 64 + g * 16), Halves) << 7 & 0xbf80;
    return floats<float>(unit) * floats<f16>(reinterpret_cast<const uint8_t*>(&bits));
  }
  static inline vfloat minimum(const uint8_t*, int64_t) { return vfloat{}; }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    for (int i = 0; i < 8; ++i) codes[i] = block[5 + i] & 15, codes[i + 8] = block[5 + i] >> 4;
  }
};

// Integers with a scale and a zero for GROUP inputs, each pair in a line of memory of its own.
template <int BITS, int64_t GROUP> struct ZerosForm : Planes<BITS> {
  static constexpr int64_t kUnit = std::max<int64_t>(GROUP, 64), kInputs = GROUP, kGroup = 32;
  static constexpr int64_t kHeader = kUnit / GROUP * 64, kBlock = 3 + GROUP / 8 * BITS;
  static constexpr int kZero = kOwnZeros;
  static constexpr bool kMin = false;
  static constexpr int64_t line(int64_t g) { return g * kGroup / GROUP * 64; }
  static void header(const uint8_t* block, int64_t index, int64_t o, uint8_t* to) {
    std::memcpy(to + index * 64 + o * 2, block, 2);
    to[index * 64 + 32 + o] = block[2];
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) { return floats<f16>(unit + line(g)); }
  static inline vint zero(const uint8_t* unit, int64_t g) { return small<uint8_t>(unit + line(g) + 32); }
  static inline vfloat minimum(const uint8_t*, int64_t) { return vfloat{}; }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    block += 3;
    if constexpr (BITS == 8) {
      std::memcpy(codes, block, GROUP);
    } else {
      for (int64_t k = 0; k < GROUP; k += 32)
        for (int64_t i = 0; i < 16; ++i) {
          codes[k + i] = block[k / 2 + i] & 15;
          codes[k + 16 + i] = block[k / 2 + i] >> 4;
        }
    }
  }
};

// Q8_0 whose halves are numbers of their own: c = 16 upper + lower, with lower from -8 to 7, so that the upper halves alone draft.
// Of 16 uppers, -8 to 7, none is left for c > 119. Such a block is negated, codes and scale, or if it has c < -119 too, not
// centred: lower is 0 to 15. Bit 14 of a scale, which scales below 2 leave free, is set in centred blocks.
struct SplitQ8 : PlainForm<8, 7, false> {
  typedef uint16_t Halves __attribute__((vector_size(32)));
  static constexpr uint16_t kCentred = 0x4000;
  static bool splits(const uint8_t* block) { return !(block[1] & kCentred >> 8); }
  struct Choice { bool centred, negated; };
  static Choice choice(const uint8_t* block) {
    int least = 0, most = 0;
    for (int i = 2; i < 34; ++i) {
      const int code = static_cast<int8_t>(block[i]);
      least = std::min(least, code), most = std::max(most, code);
    }
    return {most <= 119 || least >= -119, most > 119 && least >= -119};
  }
  static void header(const uint8_t* block, int64_t index, int64_t o, uint8_t* to) {
    const Choice how = choice(block);
    uint16_t scale;
    std::memcpy(&scale, block, 2);
    scale = static_cast<uint16_t>((how.negated ? scale ^ 0x8000 : scale) | (how.centred ? kCentred : 0));
    std::memcpy(to + index * 32 + o * 2, &scale, 2);
  }
  static void decode(const uint8_t* block, uint8_t* codes) {
    const Choice how = choice(block);
    for (int i = 0; i < 32; ++i) {
      const int code = static_cast<int8_t>(block[2 + i]);
      codes[i] = static_cast<uint8_t>((how.negated ? -code : code) + (how.centred ? 136 : 128));
    }
  }
  static inline vint centred(const uint8_t* unit, int64_t g) {  // all bits, or none
    return as<vint>(as<vuint>(floats<bf16>(unit + g * 32)) << 1) >> 31;
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) {
    const Halves bits = get<Halves>(unit + g * 32) & static_cast<uint16_t>(~kCentred);
    return floats<f16>(reinterpret_cast<const uint8_t*>(&bits));
  }
  // What codes of a group have too much, in each byte.
  static inline vuint excess(const uint8_t* unit, int64_t g) { return as<vuint>(centred(unit, g)) & 0x08080808u; }
};
template <typename Form> constexpr bool kHasExcess = std::is_same_v<Form, SplitQ8>;

template <typename V> inline V less_bytes(const V& a, const V& b) {
  if constexpr (IsPair<V>::value) {
    return pair_of(less_bytes(a.low, b.low), less_bytes(a.high, b.high));
  } else {
    using Bytes = typename VectorOf<uint8_t, sizeof(V)>::type;
    return (V)((Bytes)a - (Bytes)b);
  }
}

// The upper halves: codes of 4 bits, with the middle of a block that is not centred at half a step.
struct UpperQ8 : SplitQ8 {
  static constexpr int kMost = 15;
  static constexpr int64_t kLowBytes = 0;
  static constexpr int kZero = 0;
  static constexpr bool kMin = true;
  static inline void pair(const uint8_t* w, const uint8_t* low, int64_t j, vuint& a, vuint& b) {
    Planes<4>::pair(w, low, j, a, b);
  }
  static inline vfloat scale(const uint8_t* unit, int64_t g) { return SplitQ8::scale(unit, g) * 16.0f; }
  static inline vfloat minimum(const uint8_t* unit, int64_t g) {
    return SplitQ8::scale(unit, g) * convert<vfloat>((centred(unit, g) & 8) + 120);
  }
};

}  // namespace sharesd
