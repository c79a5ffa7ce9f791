// Search for a text's end in a corpus whose positions are sorted by the tokens before them.
#pragma once
#include "dtypes.h"

namespace sharesd {

struct Corpus {
  const uint8_t *backward, *order;  // [N] big-endian int32: tokens from the last to the first; their suffixes' starts, sorted
  int64_t N;

  static int64_t word(const uint8_t* at) {
    uint32_t x;
    std::memcpy(&x, at, 4);
    return __builtin_bswap32(x);
  }
  int64_t start(int64_t rank) const { return word(order + 4 * rank); }
  // Tokens that the suffix of a rank shares with the beginning of `wanted`, and the smaller of both: -1 the suffix, 0 neither.
  int64_t common(int64_t rank, const int32_t* wanted, int64_t n, int64_t* sign) const {
    const int64_t first = start(rank);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = first + i < N ? word(backward + 4 * (first + i)) : -1;  // a suffix that ends sooner comes first
      if (token != wanted[i]) {
        *sign = token < wanted[i] ? -1 : 1;
        return i;
      }
    }
    *sign = 0;
    return n;
  }
};

template <typename Before> int64_t boundary(int64_t low, int64_t high, Before before) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (before(middle))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Find the suffixes with the longest match of wanted [n]. out: its length, then the number of their starts that follow: at most
// `most`, spread evenly. The length is -1 if the order points outside the corpus.
inline void find_suffixes(const Corpus& corpus, const int32_t* wanted, int64_t n, int64_t most, int64_t* out) {
  int64_t sign, matched = 0;
  auto compare = [&](int64_t rank, int64_t length) {
    corpus.common(rank, wanted, length, &sign);
    return sign;
  };
  const int64_t near = boundary(0, corpus.N, [&](int64_t rank) { return compare(rank, n) < 0; });
  for (int64_t rank : {near - 1, near})
    if (rank >= 0 && rank < corpus.N) matched = std::max(matched, corpus.common(rank, wanted, n, &sign));
  out[0] = matched;
  out[1] = 0;
  if (matched == 0) return;
  int64_t below = 1, above = 1;  // most matches are few: search nearby first
  while (near - below > 0 && compare(near - below, matched) == 0) below *= 2;
  while (near + above < corpus.N && compare(near + above, matched) == 0) above *= 2;
  const int64_t first =
      boundary(std::max<int64_t>(0, near - below), near, [&](int64_t rank) { return compare(rank, matched) < 0; });
  const int64_t end =
      boundary(near, std::min(corpus.N, near + above), [&](int64_t rank) { return compare(rank, matched) <= 0; });
  const int64_t num = std::min(most, end - first);
  for (int64_t i = 0; i < num; ++i) {
    const int64_t start = corpus.start(first + i * (end - first) / num);
    if (start >= corpus.N) out[0] = -1;
    out[2 + i] = start;
  }
  out[1] = num;
}

}  // namespace sharesd
