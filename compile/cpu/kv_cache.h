// Keys and values of a head in memory, as numbers of the model's type or in 8 bits.
//
// As numbers: keys [S / L, d / P, L, P], values [S / P, d, P], with L and P of linear.h, and d padded to whole P and L.
//
// In 8 bits: blocks of 32 slots, each of them codes in the same order, then scales [groups, 32] of float32. Every token has its
// own scales, so that tokens are written, moved and dropped alone. A number is its code times the scale of its group, rounded
// to the model's type: attention computes as with a cache that holds these numbers.
#pragma once
#include "linear.h"

namespace sharesd {

constexpr int64_t kBlock = 32;       // slots; caches are multiples of it
constexpr int64_t kKVGroup = 32;     // numbers of a head that share a scale
constexpr float kLeastKV = 1e-30f;   // groups of smaller numbers are 0, so that no product is subnormal

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Positions of a head's numbers in packed memory.
template <typename T> struct Layout {
  static constexpr int64_t P = Kernel<T>::P, L = lanes<T>();
  int64_t d;
  int64_t key_size() const { return round_up(d, P); }
  int64_t value_size() const { return round_up(d, L); }
  int64_t key(int64_t slot) const { return slot / L * L * key_size() + slot % L * P; }  // its numbers i, and i + 1 with P = 2,
  static int64_t key_step(int64_t i) { return i / P * L * P + i % P; }                  // are this far after it
  int64_t value(int64_t slot) const { return slot / P * P * value_size() + slot % P; }
  static int64_t value_step(int64_t i) { return i * P; }
  // A part: W top, W total, and from element L on W sums [value_size].
  int64_t part() const { return L + value_size(); }
};

// Codes of numbers that share a scale, `step(i)` apart; returns the scale: NaN if a number is not finite.
template <typename T, typename Step> float quantize_group(const T* x, int64_t first, int64_t end, int8_t* codes, Step&& step) {
  float most = 0;
  bool is_finite = true;
  for (int64_t i = first; i < end; ++i) {
    const float size = std::fabs(static_cast<float>(widen(x[i])));
    most = std::max(most, size), is_finite &= size <= std::numeric_limits<float>::max();
  }
  const bool is_zero = !is_finite || most < kLeastKV;
  const float inverse = is_zero ? 0 : 127 / most;
  for (int64_t i = first; i < end; ++i)
    codes[step(i)] = is_zero ? 0 : static_cast<int8_t>(std::nearbyintf(static_cast<float>(widen(x[i])) * inverse));
  return !is_finite ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0 : most / 127;
}

// Numbers of n codes, whole vectors, which have these scales in turn. Prefetches the codes `ahead` bytes further.
template <typename T, size_t PERIOD>
void expand_codes(const int8_t* codes, const vfloat (&scales)[PERIOD], int64_t n, int64_t ahead, T* to) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>)
    for (vfloat x, y; i + 32 <= n; i += 32) {
      load(codes + i, &x), load(codes + i + 16, &y);
      __builtin_prefetch(codes + i + ahead, 0, 2);
      x *= scales[0], y *= scales[PERIOD - 1];
      put((vuint)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x), to + i);
    }
#endif
  for (; i < n; i += 16 * PERIOD)
    for (size_t p = 0; p < PERIOD; ++p) {
      vfloat x;
      load(codes + i + 16 * p, &x);
      __builtin_prefetch(codes + i + 16 * p + ahead, 0, 2);
      x *= scales[p];
      if constexpr (std::is_same_v<T, double>) {
        float some[16];
        put(x, some);
        std::copy(some, some + 16, to + i + 16 * p);
      } else {
        store_rounded(x, to + i + 16 * p, &x);
      }
    }
}

// A vector of n numbers again and again.
template <int64_t n> vfloat repeated(const float* x) {
  if constexpr (n == 1) return vfloat{} + *x;
  int64_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return as<vfloat>(VectorOf<int64_t, 64>::type{} + pair);
}

// Keys (or values) of a head, of one row of the batch.
template <typename T, bool KEYS> class HeadCache {
 public:
  HeadCache(void* cache, int64_t head, int64_t S, int64_t d, bool q8) : at_{d}, q8_(q8) {
    memory_ = static_cast<char*>(cache) + head * (q8 ? S / kBlock * block_bytes() : S * size() * sizeof(T));
  }

  // Write a token's numbers.
  void write(int64_t slot, const T* x) const {
    if (!q8_) {
      T* to = numbers() + place(slot);
      for (int64_t i = 0; i < at_.d; ++i) to[step(i)] = x[i];
      return;
    }
    float* scales = scales_of(slot);
    for (int64_t i = 0; i < at_.d; i += kKVGroup, scales += kBlock)
      *scales = quantize_group(x, i, std::min(at_.d, i + kKVGroup), codes_of(slot), step);
  }

  // Move a token to an earlier slot.
  void move(int64_t from, int64_t slot) const {
    if (!q8_) return copy(from, numbers(), slot);
    const int8_t* codes = codes_of(from);
    int8_t* to = codes_of(slot);
    for (int64_t i = 0; i < at_.d; ++i) to[step(i)] = codes[step(i)];
    for (int64_t g = 0; g < groups(); ++g) scales_of(slot)[g * kBlock] = scales_of(from)[g * kBlock];
  }

  // Copy a token's numbers to a slot of memory in the order of numbers.
  void copy(int64_t from, T* to, int64_t slot) const {
    to += place(slot);
    if (!q8_) {
      const T* x = numbers() + place(from);
      for (int64_t i = 0; i < at_.d; ++i) to[step(i)] = x[step(i)];
      return;
    }
    const int8_t* codes = codes_of(from);
    const float* scales = scales_of(from);
    for (int64_t i = 0; i < at_.d; i += 16) {
      const int64_t num = std::min<int64_t>(16, at_.d - i);
      int8_t some[16] = {};
      T numbers[16];
      for (int64_t j = 0; j < num; ++j) some[j] = codes[step(i + j)];
      expand_codes(some, {vfloat{} + scales[i / kKVGroup * kBlock]}, 16, 0, numbers);
      for (int64_t j = 0; j < num; ++j) to[step(i + j)] = numbers[j];
    }
  }

  // Numbers of `num` slots from `base` on, whole blocks: those of the cache, or in `memory`. Prefetches codes of slots `ahead`.
  const T* slots(int64_t base, int64_t num, int64_t ahead, T* memory) const {
    if (!q8_) return numbers() + base * size();
    const int64_t bytes = ahead / kBlock * block_bytes();
    for (int64_t slot = 0; slot < num; slot += kBlock) expand(base + slot, bytes, memory + slot * size());
    return memory;
  }

 private:
  static constexpr int64_t P = Layout<T>::P, L = Layout<T>::L;
  static int64_t step(int64_t i) { return KEYS ? Layout<T>::key_step(i) : Layout<T>::value_step(i); }
  int64_t size() const { return KEYS ? at_.key_size() : at_.value_size(); }
  int64_t place(int64_t slot) const { return KEYS ? at_.key(slot) : at_.value(slot); }
  int64_t groups() const { return (at_.d + kKVGroup - 1) / kKVGroup; }
  int64_t block_bytes() const { return kBlock * (size() + groups() * sizeof(float)); }
  T* numbers() const { return reinterpret_cast<T*>(memory_); }
  char* block(int64_t slot) const { return memory_ + slot / kBlock * block_bytes(); }
  int8_t* codes_of(int64_t slot) const { return reinterpret_cast<int8_t*>(block(slot)) + place(slot % kBlock); }
  float* scales_of(int64_t slot) const { return reinterpret_cast<float*>(block(slot) + kBlock * size()) + slot % kBlock; }

  // Numbers of the block that begins with this slot. Codes that lie together have the scales of neighbouring slots in turn: of L
  // slots, or with values of P.
  void expand(int64_t slot, int64_t ahead, T* to) const {
    constexpr int64_t TURN = KEYS ? L : P;
    const int8_t* codes = codes_of(slot);
    const float* scales = scales_of(slot);
    for (int64_t s = 0; s < kBlock; s += TURN)
      for (int64_t first = 0; first < at_.d; first += kKVGroup) {
        const float* from = scales + first / kKVGroup * kBlock + s;
        __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead, 0, 2);
        const int64_t n = (std::min(size(), first + kKVGroup) - first) * TURN, at = place(s) + step(first);
        if constexpr (std::is_same_v<T, double>) {
          for (int64_t i = 0; i < n; ++i) to[at + i] = static_cast<float>(codes[at + i]) * from[(KEYS ? i / P : i) % TURN];
        } else if constexpr (!KEYS) {
          expand_codes(codes + at, {repeated<P>(from)}, n, ahead, to + at);
        } else if constexpr (P == 1) {
          expand_codes(codes + at, {get<vfloat>(from)}, n, ahead, to + at);
        } else {
          float twice[2 * L];
          for (int64_t i = 0; i < 2 * L; ++i) twice[i] = from[i / 2];
          expand_codes(codes + at, {get<vfloat>(twice), get<vfloat>(twice + 16)}, n, ahead, to + at);
        }
      }
  }

  Layout<T> at_;
  bool q8_;
  char* memory_;
};

template <typename T> using Keys = HeadCache<T, true>;
template <typename T> using Values = HeadCache<T, false>;

}  // namespace sharesd
