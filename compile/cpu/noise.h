// Gumbel noise of a counter-based hash: one word of 32 bits for each token of the vocabulary, and two logarithms of it. The
// numbers of the hash are the caller's (salts and multipliers); the formula is that of sharesd/sampling/noise.py.
#pragma once
#include "lowbit.h"

namespace sharesd {

// log of positive normal floats, error below 1.5 ulp.
inline vfloat log_pos(vfloat x) {
  constexpr uint32_t kRootHalf = 0x3f3504f3u;  // the mantissa's range becomes sqrt(1/2)..sqrt(2)
  const vuint u = (vuint)x + (0x3f800000u - kRootHalf);
  const vfloat e = __builtin_convertvector((vint)(u >> 23) - 127, vfloat);
  const vfloat r = (vfloat)((u & 0x007fffffu) + kRootHalf) - 1.0f, r2 = r * r;
  vfloat p = 7.0376836292e-2f - vfloat{};
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = p * r + c;
  return r + (r * r2 * p - e * 2.12194440e-4f - 0.5f * r2) + e * 0.693359375f;
}

inline vfloat gumbel_of(vuint word) {
  vfloat w = (__builtin_convertvector(word, vfloat) + 0.5f) * 2.3283064365386963e-10f;
  const vfloat most = vfloat{} + (1.0f - 5.9604645e-8f), zero = vfloat{}, one = zero + 1.0f;
  w = w > most ? most : w;
  const vfloat u = 1.0f - w, d = 1.0f - u;
  const vfloat scaled = w / (d == zero ? one : d) * -log_pos(u);
  return -log_pos(d == zero ? w : scaled);  // -log1p(-w), exact for small w too (Kahan)
}

typedef uint64_t words __attribute__((vector_size(64)));
constexpr uint64_t kWord = 0xffffffffu;

inline words times(const words& x, uint64_t multiplier) {  // both below 2^32
#if defined(__AVX512F__)
  return (words)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(static_cast<int64_t>(multiplier)));
#else
  return x * multiplier;
#endif
}

// The hash: x -> ((x ^ key) * multiplier >> 16) mod 2^32 for each of its rounds.
struct Hash {
  const int64_t* multipliers;  // [rounds], below 2^32
  const int64_t* salts;        // [2, num_salts]: a word of a key is the hash of its place by the halves of the seed and these
  int64_t num_salts;

  uint64_t word(int64_t seed, int64_t place, const int64_t* salt) const {
    const uint64_t halves[] = {static_cast<uint64_t>(seed) & kWord, static_cast<uint64_t>(seed) >> 32};
    uint64_t x = place;
    for (int64_t j = 0; j < num_salts; ++j)
      x = ((x ^ halves[j % 2] ^ static_cast<uint64_t>(salt[j])) * static_cast<uint64_t>(multipliers[j]) >> 16) & kWord;
    return x;
  }
};

// out [R, V] of seeds and places [R]: the hashes of 0..V-1 by J rounds, with the two words of the key by turns.
inline void gumbel(const int64_t* seeds, const int64_t* places, const Hash& hash, int64_t J, float* out, int64_t R, int64_t V,
                   int threads) {
  typedef uint32_t half __attribute__((vector_size(32)));
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (int64_t r = 0; r < R; ++r)
    for (int64_t block = 0; block < (V + 1023) / 1024; ++block) {
      const uint64_t keys[] = {hash.word(seeds[r], places[r], hash.salts),
                               hash.word(seeds[r], places[r], hash.salts + hash.num_salts)};
      const int64_t end = std::min(V, (block + 1) * 1024);
      for (int64_t v = block * 1024; v < end; v += 16) {
        words x[2];
        for (int i = 0; i < 16; ++i) x[i / 8][i % 8] = v + i;
        for (int64_t j = 0; j < J; ++j)
          for (words& half_x : x) half_x = (times(half_x ^ keys[j % 2], hash.multipliers[j]) >> 16) & kWord;
        const half low = __builtin_convertvector(x[0], half), high = __builtin_convertvector(x[1], half);
        vuint word;
        std::memcpy(&word, &low, 32);
        std::memcpy(reinterpret_cast<char*>(&word) + 32, &high, 32);
        const vfloat noise = gumbel_of(word);
        std::memcpy(out + r * V + v, &noise, std::min<int64_t>(16, end - v) * 4);
      }
    }
}

}  // namespace sharesd
