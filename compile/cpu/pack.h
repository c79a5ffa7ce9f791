// Packing of weights, in the pass that reads them: rows [N, K] of a checkpoint, in the order of linear.h.
#pragma once
#include "linear.h"

namespace sharesd {

// Exponent bits of a number; all of them are ones in NaN and infinity.
template <typename T, typename Word> constexpr Word exponents() {
  if constexpr (sizeof(T) == 8) return Word(0x7ff0000000000000);
  if constexpr (sizeof(T) == 4) return Word(0x7f800000);
  return std::is_same_v<T, bf16> ? Word(0x7f80) : Word(0x7c00);
}
template <typename T, typename Word> inline bool is_finite(Word word) {
  constexpr int kShift = 8 * sizeof(T);
  constexpr Word kOnes = exponents<T, Word>();
  bool finite = (word & kOnes) != kOnes;
  if constexpr (sizeof(Word) > sizeof(T)) finite &= ((word >> kShift) & kOnes) != kOnes;
  return finite;
}

// Rows w [N, K], `pitch` numbers apart, to blocks of L outputs, padded with zeros. Returns if all numbers are finite.
template <typename T, int64_t P = Kernel<T>::P, int64_t L = lanes<T>()>
bool pack_rows(const T* w, int64_t pitch, T* to, int64_t N, int64_t K, int threads) {
  constexpr int64_t kTile = 64;
  using Word = std::conditional_t<P * sizeof(T) == 8, uint64_t, std::conditional_t<P * sizeof(T) == 4, uint32_t, uint16_t>>;
  const int64_t words = (K + P - 1) / P, whole = K / P;
  int64_t wrong = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : wrong)
  for (int64_t n = 0; n < (N + L - 1) / L; ++n) {
    Word tile[L][kTile];
    Word* out = reinterpret_cast<Word*>(to) + n * words * L;
    for (int64_t k = 0; k < words; k += kTile) {
      const int64_t size = std::min(kTile, words - k);
      for (int64_t l = 0; l < L; ++l) {
        const int64_t row = n * L + l, here = row < N ? std::clamp<int64_t>(whole - k, 0, size) : 0;
        std::memset(tile[l], 0, sizeof tile[l]);
        if (row < N) std::memcpy(tile[l], w + row * pitch + k * P, here * sizeof(Word));
        if (row < N && here < size) std::memcpy(&tile[l][here], w + row * pitch + whole * P, sizeof(T));  // the odd last one
        int bad = 0;
        for (int64_t i = 0; i < kTile; ++i) bad += !is_finite<T>(tile[l][i]);
        wrong += bad;
      }
      for (int64_t i = 0; i < size; ++i)
        for (int64_t l = 0; l < L; ++l) out[(k + i) * L + l] = tile[l][i];
    }
  }
  return wrong == 0;
}

}  // namespace sharesd
