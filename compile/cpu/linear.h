// y = x W^T + b for a few rows of x, batch invariant. Weights are packed so that the lanes of a vector are neighbouring
// outputs; every output is summed over k in order, one accumulator, whatever the number of rows, the tile or the thread. A
// row's result has the same bits in a plain step and in a wide verify step, for every dtype and shape.
//
// Packed weights: [N / L][K / P][L][P], padded with zeros; L lanes (16, or 8 of float64), P = 2 for bfloat16, else 1.
//
// Rows are widened first if the processor has no product of their type: a widened number is an operand in memory, others would
// be widened again for every output.
//
// With AMX, bfloat16 is multiplied by tiles instead (see `linear_tiles`): same layout, other sums, and the same ones for a row
// in any step.
#pragma once
#include <type_traits>

#include "dtypes.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define SHARESD_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define SHARESD_TILES 0
#endif

namespace sharesd {

template <typename T> struct Kernel {  // one step: acc += x[k] * w[k], all lanes
  using W = float;
  using V = vfloat;
  using X = float;  // type of the rows in products
  static constexpr int64_t P = 1;
  template <typename S> static inline V weights(const S* w) {  // S: type of the weights, T or a narrower one
    V v;
    load(w, &v);
    return v;
  }
  static inline void step(V& acc, const X* x, const V& w) { acc += *x * w; }
};
template <> struct Kernel<double> {
  using W = double;
  using V = vdouble;
  using X = double;
  static constexpr int64_t P = 1;
  static inline V weights(const double* w) {
    V v;
    load(w, &v);
    return v;
  }
  static inline void step(V& acc, const X* x, const V& w) { acc += *x * w; }
};
template <> struct Kernel<bf16> {
  using W = float;
  using V = vfloat;
  static constexpr int64_t P = 2;
  static inline vuint weights(const bf16* w) { return get<vuint>(w); }
#if defined(__AVX512BF16__)
  using X = bf16;
  static inline void step(V& acc, const X* x, const vuint& w) {
    int pair;
    std::memcpy(&pair, x, 4);
    acc = (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
  }
#else
  using X = float;
  static inline void step(V& acc, const X* x, const vuint& w) {
    acc += x[0] * as<vfloat>(w << 16);
    acc += x[1] * as<vfloat>(w & 0xffff0000u);
  }
#endif
};

template <typename T> using Operand = typename Kernel<T>::X;

constexpr int64_t kWidened = 128;  // rows at once, which bounds their memory

// Rows of K numbers, and their distance.
template <typename X> struct Operands {
  const X* x;
  int64_t pitch;
};

// M rows as operands: themselves, or copied to `memory`, widened or further apart: rows at a multiple of 4,096 bytes have their
// lines in one set of the first cache, which costs 2 to 3 % of a product.
template <typename T> Operands<Operand<T>> as_operands(const T* x, int64_t M, int64_t K, std::vector<Operand<T>>& memory) {
  constexpr bool kWidens = !std::is_same_v<T, Operand<T>>;
  constexpr int64_t kLine = 64 / sizeof(Operand<T>);
  const bool collide = M > 2 && M <= kWidened && K * sizeof(Operand<T>) % 4096 == 0;
  if constexpr (!kWidens)
    if (!collide) return {x, K};
  const int64_t pitch = K + (collide ? kLine : 0);
  if (static_cast<int64_t>(memory.size()) < M * pitch) memory.resize(M * pitch);
  for (int64_t m = 0; m < M; ++m)
    if constexpr (kWidens)
      widen_all(x + m * K, K, memory.data() + m * pitch);
    else
      std::memcpy(memory.data() + m * pitch, x + m * K, K * sizeof(T));
  return {memory.data(), pitch};
}

// acc += M rows of x, `x_pitch` apart, times B vector blocks of packed weights: `steps` steps of k, `step` elements apart in a
// block, blocks `block` apart. Prefetches the bytes `ahead` further, into the first CACHE or the second.
template <typename T, int M, int B, int CACHE, typename S>
inline void multiply(const Operand<T>* x, int64_t x_pitch, const S* w, int64_t block, int64_t step, int64_t steps,
                     int64_t ahead, typename Kernel<T>::V (&acc)[M][B]) {
  using Kn = Kernel<T>;
  for (int64_t k = 0; k < steps; ++k) {
    decltype(Kn::weights(w)) wv[B];
    for (int b = 0; b < B; ++b) {
      const S* at = w + b * block + k * step;
      wv[b] = Kn::weights(at);
      __builtin_prefetch(reinterpret_cast<const char*>(at) + ahead, 0, 4 - CACHE);
    }
    for (int i = 0; i < M; ++i)
      for (int b = 0; b < B; ++b) Kn::step(acc[i][b], x + i * x_pitch + k * Kn::P, wv[b]);
  }
}

// By how many bytes prefetches lead, and by how many more where that is beyond the end of their block.
struct Ahead { int64_t bytes, beyond; };

// Multiply rows m..m+M of x by vector blocks n..n+B of the weights.
template <typename T, int M, int B, typename S>
void tile(const Operand<T>* x, int64_t x_pitch, const S* w, const T* bias, T* y, int64_t m, int64_t n, int64_t N, int64_t K,
          Ahead ahead) {
  using W = typename Kernel<T>::W;
  constexpr int64_t P = Kernel<T>::P, L = 64 / sizeof(W), step = L * P;
  const int64_t steps = K / P, last = ahead.beyond ? std::min<int64_t>(steps, ahead.bytes / (step * sizeof(S))) : 0;
  const int64_t first = steps - last;
  typename Kernel<T>::V acc[M][B] = {};
  x += m * x_pitch;
  w += n * K * L;
  multiply<T, M, B, 1>(x, x_pitch, w, K * L, step, first, ahead.bytes, acc);
  multiply<T, M, B, 1>(x + first * P, x_pitch, w + first * step, K * L, step, last, ahead.bytes + ahead.beyond, acc);
  for (int i = 0; i < M; ++i)
    for (int b = 0; b < B; ++b) {
      W sums[L];
      put(acc[i][b], sums);
      for (int64_t l = 0; l < std::min(L, N - (n + b) * L); ++l) {
        const int64_t o = (n + b) * L + l;
        narrow(bias ? sums[l] + static_cast<W>(widen(bias[o])) : sums[l], y + (m + i) * N + o);
      }
    }
}

// All rows against vector blocks n..n+B, at most R at once, since their sums fill the registers; those beyond read the weights
// again, from cache.
template <typename T, int R, int B, typename S>
void rows(const Operand<T>* x, int64_t x_pitch, const S* w, const T* bias, T* y, int64_t n, int64_t M, int64_t N, int64_t K,
          Ahead ahead) {
  if constexpr (R > 1)
    if (M <= (M + R - 1) / R * (R - 1))  // fewer at once take as many passes, and a short last one wastes the most
      return rows<T, R - 1, B>(x, x_pitch, w, bias, y, n, M, N, K, ahead);
  int64_t m = 0;
  for (; m + R <= M; m += R) tile<T, R, B>(x, x_pitch, w, bias, y, m, n, N, K, ahead);
  if constexpr (R > 1)
    if (m < M) rows<T, R - 1, B>(x + m * x_pitch, x_pitch, w, bias, y + m * N, n, M - m, N, K, ahead);
}

template <typename T> constexpr int64_t lanes() { return 64 / sizeof(typename Kernel<T>::W); }

constexpr int64_t STEP = 32;  // inputs of a step of tiles

#if SHARESD_TILES
// Linux gives a process its tiles on request (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
inline const bool has_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

constexpr int64_t TILE = 16;     // rows and columns of a tile of sums
constexpr int64_t AHEAD = 2048;  // weights that are prefetched while others are multiplied

struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};

// GCC does not see that tiles read memory: their inputs are written before this.
inline void written() { asm volatile("" : : : "memory"); }

// Tiles of this thread: sums 0 to 5 and inputs 6, of so many rows, and weights 7. With 16 rows all have one shape.
inline void shape_tiles(int64_t rows) {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) shapes.row_bytes[t] = 64, shapes.num_rows[t] = t < 7 ? rows : TILE;
  asm volatile("" : : "r"(&shapes) : "memory");  // of which GCC takes only the beginning to be read
  _tile_loadconfig(&shapes);
}

// Rows m..m+rows of the sums in a tile, `pitch` apart, with the bias, to y.
inline void store_sums(const float* sums, int64_t pitch, const bf16* bias, bf16* y, int64_t rows, int64_t m, int64_t n,
                       int64_t N) {
  const int64_t left = std::min(TILE, N - n * TILE);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t l = 0; l < left; ++l) {
      const int64_t o = n * TILE + l;
      narrow(bias ? sums[i * pitch + l] + widen(bias[o]) : sums[i * pitch + l], y + (m + i) * N + o);
    }
}

// Results of tiles for M rows and B blocks of weights, bit for bit: in each step inputs of even and of odd number are summed by
// themselves, and subnormal numbers count as 0.
template <int M, int B>
void sums_as_in_tiles(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t n, int64_t N, int64_t K) {
  const int64_t block = K * TILE;
  vfloat sums[M][B] = {};
  for (int64_t k = 0; k < K; k += STEP) {
    vfloat even[M][B] = {}, odd[M][B] = {};
    for (int64_t i = k; i < k + STEP; i += 2)
      for (int b = 0; b < B; ++b) {
        const bf16* at = w + (n + b) * block + i * TILE;
        const vuint pair = Kernel<bf16>::weights(at);
        __builtin_prefetch(reinterpret_cast<const char*>(at) + 1024, 0, 2);
        for (int m = 0; m < M; ++m) {
          const __m512 first = _mm512_set1_ps(widen(x[m * K + i])), second = _mm512_set1_ps(widen(x[m * K + i + 1]));
          even[m][b] = (vfloat)_mm512_fmadd_ps(first, (__m512)(pair << 16), (__m512)even[m][b]);
          odd[m][b] = (vfloat)_mm512_fmadd_ps(second, (__m512)(pair & 0xffff0000u), (__m512)odd[m][b]);
        }
      }
    for (int m = 0; m < M; ++m)
      for (int b = 0; b < B; ++b) sums[m][b] += even[m][b] + odd[m][b];
  }
  for (int m = 0; m < M; ++m)
    for (int b = 0; b < B; ++b) store_sums(reinterpret_cast<const float*>(&sums[m][b]), TILE, bias, y, 1, m, n + b, N);
}

// As above, for blocks begin..end. One or two rows wait for memory, which vectors read better than tiles do.
template <int M, int B>
void linear_as_in_tiles(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t N, int64_t K, int64_t begin,
                        int64_t end) {
  const unsigned control = _mm_getcsr();
  _mm_setcsr(control | 0x8040);  // subnormal numbers, read and written, are 0
  int64_t n = begin;
  for (; n + B <= end; n += B) sums_as_in_tiles<M, B>(x, w, bias, y, n, N, K);
  for (; n + 2 <= end; n += 2) sums_as_in_tiles<M, 2>(x, w, bias, y, n, N, K);
  for (; n < end; ++n) sums_as_in_tiles<M, 1>(x, w, bias, y, n, N, K);
  _mm_setcsr(control);
}

// Prefetch a tile of weights some kilobytes after `at`, which is input k of one of `blocks` blocks that are read at once: of
// this block, or of the one that is read next. Processors predict a stream to the end of a page only.
inline void fetch_tile(const bf16* at, int64_t k, int64_t K, int64_t blocks) {
  const bf16* to = at + AHEAD + (k * TILE + AHEAD < K * TILE ? 0 : (blocks - 1) * K * TILE);
  for (int64_t line = 0; line < 16; ++line) __builtin_prefetch(to + line * 32, 0, 2);
}

// y [M, y_pitch] += x [M, x_pitch] times B blocks of weights, up to 6, which are read at once, by tiles of M rows. Rows of a
// tile of weights are `row` apart, tiles of the next of `steps` steps `step` further, those of the next block `block`.
// fetch(tile, step) is called for each.
template <int B, typename Fetch>
void add_tiles(const bf16* x, int64_t x_pitch, const bf16* w, int64_t block, int64_t row, int64_t step, int64_t steps, float* y,
               int64_t y_pitch, Fetch&& fetch) {
  const int64_t pitch = x_pitch * sizeof(bf16), stride = row * sizeof(bf16), sums = y_pitch * sizeof(float);
  written();
  _tile_loadd(0, y, sums);
  if constexpr (B > 1) _tile_loadd(1, y + TILE, sums);
  if constexpr (B > 2) _tile_loadd(2, y + 2 * TILE, sums);
  if constexpr (B > 3) _tile_loadd(3, y + 3 * TILE, sums);
  if constexpr (B > 4) _tile_loadd(4, y + 4 * TILE, sums);
  if constexpr (B > 5) _tile_loadd(5, y + 5 * TILE, sums);
  for (int64_t k = 0; k < steps; ++k, x += STEP, w += step) {
    for (int b = 0; b < B; ++b) fetch(w + b * block, k);
    _tile_loadd(6, x, pitch);
    _tile_loadd(7, w, stride);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (B > 1) {
      _tile_loadd(7, w + block, stride);
      _tile_dpbf16ps(1, 6, 7);
    }
    if constexpr (B > 2) {
      _tile_loadd(7, w + 2 * block, stride);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (B > 3) {
      _tile_loadd(7, w + 3 * block, stride);
      _tile_dpbf16ps(3, 6, 7);
    }
    if constexpr (B > 4) {
      _tile_loadd(7, w + 4 * block, stride);
      _tile_dpbf16ps(4, 6, 7);
    }
    if constexpr (B > 5) {
      _tile_loadd(7, w + 5 * block, stride);
      _tile_dpbf16ps(5, 6, 7);
    }
  }
  _tile_stored(0, y, sums);
  if constexpr (B > 1) _tile_stored(1, y + TILE, sums);
  if constexpr (B > 2) _tile_stored(2, y + 2 * TILE, sums);
  if constexpr (B > 3) _tile_stored(3, y + 3 * TILE, sums);
  if constexpr (B > 4) _tile_stored(4, y + 4 * TILE, sums);
  if constexpr (B > 5) _tile_stored(5, y + 5 * TILE, sums);
}

// Up to 16 rows against B blocks.
template <int B>
void few_rows_by_tiles(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t M, int64_t n, int64_t N, int64_t K) {
  alignas(64) float sums[TILE * B * TILE];
  std::memset(sums, 0, M * B * TILE * sizeof(float));
  add_tiles<B>(x, K, w + n * K * TILE, K * TILE, STEP, STEP * TILE, K / STEP, sums, B * TILE,
               [&](const bf16* at, int64_t k) { fetch_tile(at, k * STEP, K, B); });
  for (int b = 0; b < B; ++b) store_sums(sums + b * TILE, B * TILE, bias, y, M, 0, n + b, N);
}

// More rows against two blocks, 32 rows at once. The last tiles of rows begin early
// enough to be whole: what they share with those before is computed twice. Of an only block (`single`) the second tile of
// weights is the first once more.
inline void many_rows_by_tiles(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t M, int64_t n, int64_t N,
                               int64_t K, bool single) {
  const int64_t pitch = K * sizeof(bf16), block = K * TILE, other = single ? 0 : block;
  alignas(64) float sums[4][TILE * TILE];
  written();
  for (int64_t m = 0; m < M; m += 2 * TILE) {
    const int64_t upper = std::max<int64_t>(std::min(m, M - 2 * TILE), 0), lower = std::min(m + TILE, M - TILE);
    const bf16 *at = w + n * block, *a = x + upper * K, *b = x + lower * K;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < K; k += STEP, at += STEP * TILE) {
      if (m == 0) fetch_tile(at, k, K, 2), fetch_tile(at + other, k, K, 2);
      _tile_loadd(4, a + k, pitch);
      _tile_loadd(6, at, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, at + other, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, b + k, pitch);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int i = 0; i < 2 - single; ++i) {
      store_sums(sums[i], TILE, bias, y, TILE, upper, n + i, N);
      store_sums(sums[2 + i], TILE, bias, y, TILE, lower, n + i, N);
    }
  }
}

// Vector blocks begin..end of the outputs. A tile of weights is 16 outputs and 32 inputs, a kilobyte that lies in a piece, and
// multiplies a tile of up to 16 rows in as many cycles; each sum takes its products in the order of the inputs, whatever the
// other rows are.
inline void linear_tiles(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t M, int64_t N, int64_t K,
                         int64_t begin, int64_t end) {
  if (M == 1) return linear_as_in_tiles<1, 6>(x, w, bias, y, N, K, begin, end);
  if (M == 2) return linear_as_in_tiles<2, 4>(x, w, bias, y, N, K, begin, end);
  int64_t n = begin;
  if (M <= TILE) {
    shape_tiles(M);
    for (; n + 6 <= end; n += 6) few_rows_by_tiles<6>(x, w, bias, y, M, n, N, K);
    for (; n + 2 <= end; n += 2) few_rows_by_tiles<2>(x, w, bias, y, M, n, N, K);
    for (; n < end; ++n) few_rows_by_tiles<1>(x, w, bias, y, M, n, N, K);
  } else {
    shape_tiles(TILE);
    for (; n < end; n += 2) many_rows_by_tiles(x, w, bias, y, M, n, N, K, n + 1 == end);
  }
  _tile_release();
}

// y [M, y_pitch] += x [M, x_pitch] times any number of blocks of weights, for up to 16 rows: see `add_tiles`. Fetches what lies
// `ahead` bytes further on.
inline void add_tile_products(const bf16* x, int64_t x_pitch, const bf16* w, int64_t block, int64_t row, int64_t step,
                              int64_t blocks, int64_t steps, int64_t ahead, float* y, int64_t y_pitch, int64_t M) {
  auto fetch = [&](const bf16* at, int64_t) {
    for (int64_t i = 0; ahead && i < TILE; ++i) __builtin_prefetch(reinterpret_cast<const char*>(at + i * row) + ahead, 0, 2);
  };
  shape_tiles(M);
  for (; blocks >= 4; blocks -= 4, w += 4 * block, y += 4 * TILE)
    add_tiles<4>(x, x_pitch, w, block, row, step, steps, y, y_pitch, fetch);
  for (; blocks; --blocks, w += block, y += TILE) add_tiles<1>(x, x_pitch, w, block, row, step, steps, y, y_pitch, fetch);
  _tile_release();
}
#else
constexpr bool has_tiles = false;
#endif

#if defined(__AVX512BF16__)
constexpr int kMostRows = 9;
#else
constexpr int kMostRows = kWideRegisters ? 16 : 8;
#endif
constexpr int kStreams = kWideRegisters ? 2 : 3;

// Compute vector blocks begin..end of the outputs; several threads may share a product. Processors predict a stream of memory
// to the end of a page only, so what follows is prefetched by instruction, into the first cache. The additions of one row or
// two take longer than reading, since each waits for the one before, so `kStreams` blocks are multiplied at once. With more
// rows it is one block after the other, which is read fastest. The last one prefetches from `next` on, where this thread will
// read then, if that is given. Beyond `kMostRows` rows, which read weights again, two blocks at once spare loads of x and are
// in cache still. The numbers were found by timing.
template <typename T, typename S>
void linear_blocks(const T* x, const S* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t begin, int64_t end,
                   const void* next = nullptr) {
  if constexpr (SHARESD_TILES && std::is_same_v<T, bf16>)
    if (has_tiles && M > 0 && K % STEP == 0) return linear_tiles(x, w, bias, y, M, N, K, begin, end);
  if (M > kWidened && !std::is_same_v<T, Operand<T>>) {
    linear_blocks(x, w, bias, y, M / 2, N, K, begin, end, w + begin * K * lanes<T>());
    return linear_blocks(x + M / 2 * K, w, bias, y + M / 2 * N, M - M / 2, N, K, begin, end, next);
  }
  thread_local std::vector<Operand<T>> memory;
  const auto [from, x_pitch] = as_operands(x, M, K, memory);
  const int64_t block = K * lanes<T>() * sizeof(S);
  int64_t n = begin;
  if (M <= 2)
    for (; n + kStreams < end; n += kStreams)
      rows<T, 2, kStreams>(from, x_pitch, w, bias, y, n, M, N, K, {4096, (kStreams - 1) * block});
  if (M > kMostRows)
    for (; n + 2 <= end; n += 2) rows<T, kMostRows, 2>(from, x_pitch, w, bias, y, n, M, N, K, {12288, block});
  const int64_t beyond = next ? reinterpret_cast<intptr_t>(next) - reinterpret_cast<intptr_t>(w) - end * block : 0;
  for (; n < end; ++n) rows<T, kMostRows, 1>(from, x_pitch, w, bias, y, n, M, N, K, {12288, n + 1 < end ? 0 : beyond});
}

// The part of `total` blocks which a thread of `threads` takes.
inline int64_t share(int64_t total, int64_t thread, int64_t threads) { return total * thread / threads; }

template <typename T, typename S>
void linear(const T* x, const S* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int threads) {
  const int64_t blocks = (N + lanes<T>() - 1) / lanes<T>();
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    linear_blocks(x, w, bias, y, M, N, K, share(blocks, me, all), share(blocks, me + 1, all));
  }
}

}  // namespace sharesd
