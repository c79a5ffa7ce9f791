// Gumbel noise of a counter-based hash: one word of 32 bits for each token of the vocabulary, and two logarithms of it. Salts
// and multipliers of the hash are arguments; the formula is that of sharesd/sampling/noise.py.
#pragma once
#include "lowbit.h"

namespace sharesd {

// log of positive normal floats, error below 1.5 ulp.
inline vfloat log_pos(vfloat x) {
  constexpr uint32_t kRootHalf = 0x3f3504f3u;  // the mantissa's range becomes sqrt(1/2)..sqrt(2)
  const vuint u = as<vuint>(x) + (0x3f800000u - kRootHalf);
  const vfloat e = convert<vfloat>(as<vint>(u >> 23) - 127);
  const vfloat r = as<vfloat>((u & 0x007fffffu) + kRootHalf) - 1.0f, r2 = r * r;
  vfloat p = vfloat{} + 7.0376836292e-2f;
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = p * r + c;
  return r + (r * r2 * p - e * 2.12194440e-4f - 0.5f * r2) + e * 0.693359375f;
}

inline vfloat gumbel_of(vuint word) {
  vfloat w = (convert<vfloat>(word) + 0.5f) * 2.3283064365386963e-10f;
  const vfloat most = vfloat{} + (1.0f - 5.9604645e-8f), zero = vfloat{}, one = zero + 1.0f;
  w = select(w > most, most, w);
  const vfloat u = 1.0f - w, d = 1.0f - u;
  const vfloat scaled = w / select(d == zero, one, d) * -log_pos(u);
  return -log_pos(select(d == zero, w, scaled));  // -log1p(-w), exact for small w too (Kahan)
}

typedef VectorOf<uint64_t, 64>::type words;
constexpr uint64_t kWord = 0xffffffffu;

// Products of the low halves of each.
template <typename U> inline U times(const U& x, uint64_t multiplier) {  // below 2^32
  if constexpr (IsPair<U>::value) return {times(x.low, multiplier), times(x.high, multiplier)};
#if defined(__AVX512F__)
  return (U)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(static_cast<int64_t>(multiplier)));
#elif defined(__AVX2__)
  if constexpr (!IsPair<U>::value) return (U)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(static_cast<int64_t>(multiplier)));
#else
  if constexpr (!IsPair<U>::value) return (x & kWord) * multiplier;
#endif
}

// The hash: x -> ((x ^ key) * multiplier >> 16) mod 2^32 for each of its rounds.
struct Hash {
  const int64_t* multipliers;  // [rounds], below 2^32
  const int64_t* salts;        // [2, num_salts]: a word of a key hashes its position by the halves of the seed and these
  int64_t num_salts;

  uint64_t word(int64_t seed, int64_t place, const int64_t* salt) const {
    const uint64_t halves[] = {static_cast<uint64_t>(seed) & kWord, static_cast<uint64_t>(seed) >> 32};
    uint64_t x = place;
    for (int64_t j = 0; j < num_salts; ++j)
      x = ((x ^ halves[j % 2] ^ static_cast<uint64_t>(salt[j])) * static_cast<uint64_t>(multipliers[j]) >> 16) & kWord;
    return x;
  }
};

// A row's noise: hashes of tokens by J rounds, with the two words of its key in alternation.
struct RowNoise {
  const Hash& hash;
  int64_t J;
  uint64_t keys[2];
  RowNoise(const Hash& hash, int64_t J, int64_t seed, int64_t place)
      : hash(hash), J(J), keys{hash.word(seed, place, hash.salts), hash.word(seed, place, hash.salts + hash.num_salts)} {}

  // Noise of tokens v..v+15, or of those named there, up to the last. Two are in each word of products.
  vuint words_of(int64_t v, const int64_t* ids, int64_t V) const {
    uint32_t tokens[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (ids) std::copy(ids + v, ids + std::min(v + 16, V), tokens);
    vuint x = get<vuint>(tokens) + (ids ? 0 : static_cast<uint32_t>(v));
    for (int64_t j = 0; j < J; ++j) {
      const words pairs = as<words>(x ^ static_cast<uint32_t>(keys[j % 2]));
      const words first = times(pairs, hash.multipliers[j]) >> 16, second = times(pairs >> 32, hash.multipliers[j]) << 16;
      x = as<vuint>((first & kWord) | (second & ~kWord));
    }
    return x;
  }
};

// out [R, V] of seeds and places [R], for all tokens or those named by ids [V].
inline void gumbel(const int64_t* seeds, const int64_t* places, const Hash& hash, int64_t J, const int64_t* ids, float* out,
                   int64_t R, int64_t V, int threads) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (int64_t r = 0; r < R; ++r)
    for (int64_t block = 0; block < (V + 1023) / 1024; ++block) {
      const RowNoise row(hash, J, seeds[r], places[r]);
      const int64_t end = std::min(V, (block + 1) * 1024);
      for (int64_t v = block * 1024; v < end; v += 16) {
        float noise[16];
        put(gumbel_of(row.words_of(v, ids, V)), noise);
        std::copy(noise, noise + std::min<int64_t>(16, end - v), out + r * V + v);
      }
    }
}

// Sample the index of the largest sum of noise and x / temperature of each row, the first among equals; without noise if
// `has_noise` is 0.
//
// Noise above n has a word below 2^32 exp(-n): the word excludes most tokens, and blocks whose best logit is low need no hash
// at all.
template <typename T>
void sample(const T* x, const double* temperature, const double* has_noise, const int64_t* seeds, const int64_t* places,
            const Hash& hash, int64_t J, const int64_t* ids, int64_t* out, int64_t R, int64_t V, int threads) {
  using W = typename Wide<T>::type;
  using Vw = typename Vec<W>::type;
  constexpr int64_t L = 64 / sizeof(W), kBlock = 256;
  constexpr double kMost = 23;  // noise is below
#pragma omp parallel for schedule(static) num_threads(R > 1 ? threads : 1)
  for (int64_t r = 0; r < R; ++r) {
    const T* row = x + r * V;
    const RowNoise noise(hash, J, seeds[r], places[r]);
    const W hot = static_cast<W>(temperature[r]), low = -std::numeric_limits<W>::infinity();
    const int64_t blocks = (V + kBlock - 1) / kBlock;
    std::vector<W> tops(blocks, low);
    for (int64_t block = 0; block < blocks; ++block) {
      int64_t v = block * kBlock;
      const int64_t end = std::min(V, v + kBlock);
      Vw most = Vw{} + low, next;
      for (; v + L <= end; v += L) {
        load(row + v, &next);
        most = greater(next, most);
      }
      tops[block] = largest(most);
      for (; v < end; ++v) tops[block] = std::max(tops[block], static_cast<W>(widen(row[v])));
    }
    W best = low;
    out[r] = 0;
    const auto visit = [&](int64_t block) {
      const double top = tops[block] / hot, need = best - top;
      if (!(tops[block] > low)) return;
      // Sums are rounded, and so is the noise.
      const double margin = 1e-4 + 1e-6 * (std::abs(static_cast<double>(best)) + std::abs(top));
      const bool any = !(best > low) || !(need > margin);
      if (!any && need - margin > (has_noise[r] != 0 ? kMost : 0)) return;
      const uint32_t limit = any ? 0xffffffffu : static_cast<uint32_t>(4294967294.0 * std::exp(margin - need)) + 1;
      const int64_t end = std::min(V, (block + 1) * kBlock);
      for (int64_t v = block * kBlock; v < end; v += 16) {
        float some[16] = {};
        if (has_noise[r] != 0) {
          const vuint word = noise.words_of(v, ids, V);
          if (!any_of(word <= limit)) continue;
          put(gumbel_of(word), some);
        }
        for (int64_t i = 0; i < std::min<int64_t>(16, end - v); ++i) {
          const W sum = static_cast<W>(widen(row[v + i])) / hot + static_cast<W>(some[i]);
          if (sum > best || (sum == best && v + i < out[r])) best = sum, out[r] = v + i;
        }
      }
    };
    const int64_t first = std::max_element(tops.begin(), tops.end()) - tops.begin();
    visit(first);
    for (int64_t block = 0; block < blocks; ++block)
      if (block != first) visit(block);
  }
}

}  // namespace sharesd
