// All blocks of a Llama-family decoder in one call: one parallel region with a few barriers per block. Between matrix products
// there is little work, so a step takes little longer than reading its weights.
//
// Threads share the outputs of each product; norms and the residual stream are so small that each thread has its own. Every row
// is computed by itself in a constant order: rows have the same bits at any width.
#pragma once
#include "attention.h"
#include "barrier.h"
#include "block_rows.h"
#include "delta_rule.h"

namespace sharesd {

// native_structs.py has these structs, field by field.
struct Linear {
  int64_t bits;  // 0: full precision, 16: bfloat16 weights of float32 rows, 4, 8: quantized, -1: blocks of a file
  const void* weight;
  const void* bias;
  int64_t N, K, G;  // of blocks G is the address of their table
  const BlockTable& blocks() const { return *reinterpret_cast<const BlockTable*>(G); }
};
struct Norm {
  const void* weight;  // null: no norm here
  int64_t wide;        // the weight is of the wide type and multiplies before rounding (Gemma)
};
// MLPs of which each row goes through those that its router scores highest.
struct Experts {
  int64_t count, per_row;  // all, and those of a row
  int64_t mlp, normalised;  // size between gate/up and down; the chosen probabilities are divided by their sum
  int64_t shared;  // experts of all rows, which are the last; the router has a score for each, whose sigmoid is its factor, or none
  int64_t wide;  // the router has weights of the wide type, and so have scores
  double scale, eps;  // factor on probabilities; added to the sum that they are divided by
  const void* bias;  // of the wide type; probabilities are sigmoids, and choose with this added. Null: a softmax
  Linear router;
  const Linear* linears;  // gate_up and down of each expert, [count][2]
};
// A depthwise convolution over the last inputs of each channel.
struct Conv {
  int64_t width;  // inputs
  const void* weight;  // [width, D], that of a token's own input last
  const void* bias;  // [D]; null: none
};
struct Block {
  Norm attn_norm, q_norm, k_norm, attn_out_norm, mlp_norm, mlp_out_norm;
  Linear linears[2][4];  // full precision, quantized: qkv, o, gate_up, down; without attention the first and last of what stands for it
  int64_t window, rope;  // rope: number of the table of angles, -1 = none
  const void* query_factors;  // [positions], of rotated queries; null: none
  const void* sinks;  // [H], see Attention; null: none
  const Experts* experts[2];  // full precision, quantized: instead of gate_up and down; null: none
  const Conv* conv;  // instead of attention; null: none
  const Delta* delta;  // likewise, see delta_rule.h
};
struct Step {
  const Block* blocks;  // of this call: all of a decoder's, or some neighbours
  int64_t num_blocks;
  const int64_t* kv;  // addresses: k and v of every block, twice the inputs [B, ring, D] of a convolution, or inputs and matrices
  const int64_t* angles;  // addresses [positions, r]: cosines of every rope, then sines
  int64_t num_ropes, positions;
  const int64_t* lengths;
  void* x;  // [B * T, D], replaced by the result
  Norm norm;  // of the result; none unless these are the last blocks
  int64_t B, T, H, K, S, d, r, D, mlp, activation, quantized, threads, recent;
  TreeAttentionMask tree;
  void* features;  // [B, S, num_taps * D]: rows after the tapped blocks are copied to their slots, null: none
  int64_t num_taps;
  const int64_t* taps;  // counted from the first of these blocks; one more than there are: after the norm
  int64_t* lost;  // nanoseconds lost to descheduled threads are added here
  // If ranks share the blocks, each with some outputs of every linear (H, K and mlp are then its own numbers): fills `whole`
  // with the rows of all ranks' parts side by side, or with their sum, if these are as wide. Linears after attention and the
  // MLP that have some of the inputs read this rank's part. Null: there is one rank.
  void (*join)(const void* part, void* whole, int64_t rows, int64_t part_bytes, int64_t whole_bytes);
  int64_t q8;  // keys and values are in 8 bits
  int64_t ring;  // slots of inputs of convolutions
  int64_t gates;  // as many heads after the queries have the gates of attention's outputs: H or 0
  const int64_t* held;  // addresses: numbers of tokens [B] that the matrices of every block hold
  const int64_t* certain;  // [B]: tokens that are known to be part of the text
};

template <typename W> inline W gelu(W x, int64_t kind) {
  if (kind == 1) return W(0.5) * x * (1 + std::erf(x * W(0.7071067811865476)));
  return W(0.5) * x * (1 + std::tanh(W(0.7978845608028654) * (x + W(0.044715) * x * x * x)));
}

// silu of a gate, times up.
template <typename T>
void gate_by_silu(const T* gate, const T* up, T* to, int64_t size) {
  by_vectors<T>(size, [&](auto get, auto put) {
    const auto x = get(gate);
    const auto e = exp_or_0<T>(-absolute(x));
    put(x * select(x < 0, e, e - e + 1) / (e + 1) * get(up), to);
  });
}

// The gate of gpt-oss, times up and one: both are clamped.
template <typename T>
void gate_by_swiglu_oai(const T* gate, const T* up, T* to, int64_t size) {
  using W = typename Wide<T>::type;
  constexpr W kAlpha = 1.702, kLimit = 7;
  by_vectors<T>(size, [&](auto get, auto put) {
    auto x = get(gate), y = get(up);
    const auto limit = x - x + kLimit;
    x = select(x > limit, limit, x), y = select(y > limit, limit, select(y < -limit, -limit, y));
    const auto e = exp_or_0<T>(-absolute(x * kAlpha));
    put(x * select(x < 0, e, e - e + 1) / (e + 1) * (y + 1), to);
  });
}

template <typename T>
void norm(const Norm& how, const T* x, T* y, int64_t size, double eps) {
  using W = typename Wide<T>::type;
  typename Vec<W>::type sums = {};
  by_vectors<T>(size, [&](auto get, auto) { sums += get(x) * get(x); });
  const W factor = 1 / std::sqrt(sum_of(sums) / size + static_cast<W>(eps));
  by_vectors<T>(size, [&](auto get, auto put) {
    if (how.wide)
      put(get(x) * factor * get(static_cast<const W*>(how.weight)), y);
    else
      put(get(static_cast<const T*>(how.weight)) * put(get(x) * factor, y), y);
  });
}

template <typename T>
void rotate(T* x, const T* cos, const T* sin, int64_t r) {
  for (int64_t i = 0; i < r; ++i) {
    const auto a = widen(x[i]), b = widen(x[r + i]), c = widen(cos[i]), s = widen(sin[i]);
    narrow(a * c - b * s, x + i);
    narrow(b * c + a * s, x + r + i);
  }
}

// Start of a thread's share of a product's weights; null if that does not matter.
template <typename T>
const void* begin_of(const Linear* l, int64_t me, int64_t all) {
  if (!l || (l->bits && l->bits != 4 && l->bits != 8)) return nullptr;
  const int64_t width = l->bits ? 16 : lanes<T>(), first = share((l->N + width - 1) / width, me, all);
  const int64_t bytes = l->bits ? low_bytes(l->bits, l->K, l->G) : width * l->K * sizeof(T);
  return static_cast<const char*>(l->weight) + first * bytes;
}

constexpr int64_t kSharedRows = 16;  // rows that threads round together: waiting for each other takes longer for fewer

// Rounded rows of a thread; `shared` are those of blocks that all threads have rounded.
struct Rounded {
  RoundedRows rows;
  BlockRows block_rows;
  const BlockRows* shared = nullptr;
};

// Vector blocks of a product's outputs; of blocks of a file see `block_share`.
template <typename T> int64_t blocks_of(const Linear& l) {
  const int64_t width = l.bits ? 16 : lanes<T>();
  return (l.N + width - 1) / width;
}

// Compute vector blocks begin..end of a product, not one of blocks of a file; then the thread reads from `next` on, if given.
template <typename T>
void product_blocks(const Linear& l, const void* next, const T* x, T* y, int64_t M, int64_t begin, int64_t end,
                    Rounded& rounded) {
  const T* bias = static_cast<const T*>(l.bias);
  if constexpr (std::is_same_v<T, float>)
    if (l.bits == 16) return linear_blocks(x, static_cast<const bf16*>(l.weight), bias, y, M, l.N, l.K, begin, end);
  if (l.bits) {
    round_rows(l.bits, x, M, l.K, l.G, rounded.rows);
    low_blocks(static_cast<int>(l.bits), rounded.rows, static_cast<const uint8_t*>(l.weight), bias, y, M, l.N, l.K, l.G, begin,
               end, next);
  } else {
    linear_blocks(x, static_cast<const T*>(l.weight), bias, y, M, l.N, l.K, begin, end, next);
  }
}

// Compute this thread's share of a product; `next` is the following product.
template <typename T>
void product(const Linear& l, const Linear* next, const T* x, T* y, int64_t M, int64_t me, int64_t all, Rounded& rounded) {
  if (l.bits < 0) {
    if (!rounded.shared) {
      rounded.block_rows.resize(M, l.K, l.blocks().exact);
      round_block_rows(x, l.K, l.blocks().order(), rounded.block_rows, 0, M);
    }
    const auto kernel = reinterpret_cast<BlockKernel>(l.blocks().kernel);
    return block_share(rounded.shared ? *rounded.shared : rounded.block_rows, static_cast<const uint8_t*>(l.weight), l.blocks(),
                       kernel, static_cast<const T*>(l.bias), y, l.N, l.K, me, all);
  }
  const int64_t blocks = blocks_of<T>(l);
  product_blocks(l, begin_of<T>(next, me, all), x, y, M, share(blocks, me, all), share(blocks, me + 1, all), rounded);
}

struct Numbers { double eps, scale, softcap; };

// An expert of a row, and the factor of its result.
template <typename T> struct Choice { int64_t expert; typename Wide<T>::type factor; };

// Results of experts that are kept at once, at least those of one expert: of a prompt all would need much memory.
inline int64_t visits_at_once(int64_t rows, const Experts& e) {
  return std::min(rows * e.per_row, std::max<int64_t>(rows, 256));
}

// Buffers that threads exchange: queries, keys and values of all new rows, and the rest of `kept` rows.
template <typename T> struct Shared {
  std::vector<T> qkv, attended, out, gate_up, hidden;
  std::vector<T> whole;  // one of these from all ranks
  std::vector<T> scores;  // of experts, for each row, perhaps of the wide type; their choices, and sums of their results
  std::vector<typename Wide<T>::type> wide_scores;
  std::vector<Choice<T>> chosen;
  std::vector<typename Wide<T>::type> sums;
  DeltaWork<typename Wide<T>::type> delta;
  BlockRows block_rows;
  Shared(const Step& s, int64_t kept)
      : qkv(s.B * s.T * (s.H + s.gates + 2 * s.K) * s.d), attended(kept * s.H * s.d), out(kept * s.D), gate_up(kept * 2 * s.mlp),
        hidden(kept * s.mlp) {
    const Linear* linears = s.blocks->linears[0];
    if (s.join) whole.resize(kept * std::max({linears[1].K, linears[3].K, s.D}));
    const auto grow = [](auto& v, int64_t n) { v.resize(std::max<int64_t>(v.size(), n)); };
    for (const Block* block = s.blocks; block < s.blocks + s.num_blocks; ++block) {
      if (block->conv) {
        grow(qkv, s.B * s.T * 3 * s.D);
        grow(attended, kept * s.D);
      }
      if (const Delta* d = block->delta) {
        grow(qkv, s.B * s.T * d->projected());
        grow(attended, kept * d->outputs());
      }
      if (const Experts* e = block->experts[s.quantized]) {
        const int64_t visits = visits_at_once(kept, *e);
        grow(gate_up, visits * 2 * e->mlp);
        grow(hidden, visits * e->mlp);
        grow(out, visits * s.D);
        if (e->wide)
          grow(wide_scores, kept * e->count);
        else
          grow(scores, kept * e->count);
        grow(chosen, kept * e->per_row);
        grow(sums, kept * s.D);
      }
    }
  }
};

// Run work(me, all, barrier) on so many threads; returns the nanoseconds that they lost (see barrier.h).
template <typename Work> int64_t together(int64_t threads, Work&& work) {
  std::unique_ptr<Barrier> barrier;
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
#pragma omp single
    barrier = std::make_unique<Barrier>(all);
    work(me, all, *barrier);
  }
  return barrier->lost();
}

// Choose experts by scores [router.N] of a row: those of the highest probability, of equal ones the lowest. In the order of
// their numbers, the shared ones last.
template <typename T, typename S> void choose_experts(const Experts& e, const S* scores, Choice<T>* chosen) {
  using W = typename Wide<T>::type;
  constexpr W kTaken = -std::numeric_limits<W>::infinity();
  thread_local std::vector<W> probs, by;
  const int64_t count = e.count - e.shared, per_row = e.per_row - e.shared;
  const W* bias = static_cast<const W*>(e.bias);
  probs.resize(count);
  W most = widen(scores[0]), sum = 0, sum_of_chosen = 0;
  for (int64_t i = 1; i < count; ++i) most = std::max<W>(most, widen(scores[i]));
  for (int64_t i = 0; i < count && !bias; ++i) sum += probs[i] = std::exp(widen(scores[i]) - most);
  for (int64_t i = 0; i < count; ++i) {
    const W score = widen(scores[i]);
    probs[i] = bias ? 1 / (1 + std::exp(-score)) : probs[i] / sum;
  }
  by = probs;
  for (int64_t i = 0; i < count && bias; ++i) by[i] += bias[i];
  for (int64_t j = 0; j < per_row; ++j) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
      if (by[i] != kTaken && (best < 0 || by[i] > by[best])) best = i;
    chosen[j] = {best, probs[best]};
    sum_of_chosen += probs[best];
    by[best] = kTaken;  // which NaN is not, so that no expert is chosen twice
  }
  std::sort(chosen, chosen + per_row, [](const Choice<T>& a, const Choice<T>& b) { return a.expert < b.expert; });
  for (Choice<T>* each = chosen; each < chosen + per_row; ++each) {
    S factor;
    const W part = e.normalised ? each->factor / (sum_of_chosen + static_cast<W>(e.eps)) : each->factor;
    narrow(static_cast<W>(part * static_cast<W>(e.scale)), &factor);
    each->factor = widen(factor);
  }
  for (int64_t j = 0; j < e.shared; ++j) {
    S factor;
    const W score = e.router.N > count ? widen(scores[count + j]) : 0;
    narrow(e.router.N > count ? static_cast<W>(1 / (1 + std::exp(-score))) : 1, &factor);
    chosen[per_row + j] = {count + j, widen(factor)};
  }
}

// Rows by the experts that they chose; those of an expert are in order.
template <typename T> struct Visits {
  struct Visit { int64_t row; typename Wide<T>::type factor; };
  std::vector<Visit> all;
  std::vector<int64_t> first;  // number of each expert's first visit, and of all
  void group(const Experts& e, const Choice<T>* chosen, int64_t M) {
    first.assign(e.count + 2, 0);
    all.resize(M * e.per_row);
    for (int64_t i = 0; i < M * e.per_row; ++i) ++first[chosen[i].expert + 2];
    for (int64_t i = 0; i < e.count; ++i) first[i + 2] += first[i + 1];
    for (int64_t i = 0; i < M * e.per_row; ++i) all[first[chosen[i].expert + 1]++] = {i / e.per_row, chosen[i].factor};
  }
};

// One of the threads that run blocks.
template <typename T> struct Worker {
  const Step& s;
  const Numbers& n;
  Shared<T>& shared;
  Barrier& barrier;
  int64_t me, all;
  Rounded rounded{};
  Visits<T> visits{};
  std::vector<T> gathered = std::vector<T>(shared.sums.size());  // rows of an expert
  std::vector<T> nothing{};  // zeros: inputs of a convolution before a text
  std::vector<const T*> taps{};

  void multiply(const Linear& l, const Linear* next, const T* x, T* y, int64_t M) {
    if (l.bits < 0 && M >= kSharedRows) {
      if (me == 0) shared.block_rows.resize(M, l.K, l.blocks().exact);
      barrier.wait();
      round_block_rows(x, l.K, l.blocks().order(), shared.block_rows, share(M, me, all), share(M, me + 1, all));
      barrier.wait();
      rounded.shared = &shared.block_rows;
    }
    product(l, next, x, y, M, me, all, rounded);
    rounded.shared = nullptr;
    barrier.wait();
  }

  // Inputs of a linear, of which all threads have written their share: `width` columns, of `whole_width` that it needs.
  const T* inputs(const std::vector<T>& part, int64_t width, int64_t whole_width, int64_t M) {
    return width == whole_width ? part.data() : joined(part, width, whole_width, M);
  }

  // Rows of which all threads have written their share of this rank's part: `width` of `whole_width` columns.
  const T* joined(const std::vector<T>& part, int64_t width, int64_t whole_width, int64_t M) {
    if (!s.join) return part.data();
    if (me == 0) s.join(part.data(), shared.whole.data(), M, width * sizeof(T), whole_width * sizeof(T));
    barrier.wait(false);
    return shared.whole.data();
  }

  // x += out, normalised if there is a norm.
  void add(const T* out, const Norm& how, int64_t M, T* x, T* h) {
    for (int64_t m = 0; m < M; ++m) {
      const T* y = out + m * s.D;
      if (how.weight) {
        norm(how, y, h + m * s.D, s.D, n.eps);
        y = h + m * s.D;
      }
      T* xm = x + m * s.D;
      by_vectors<T>(s.D, [&](auto get, auto put) { put(get(xm) + get(y), xm); });
    }
  }

  // Queries, keys and values of all new rows from `inputs` [B * T, K of qkv]; keys and values into their slots.
  void project(int64_t index, const T* inputs) {
    const Block& block = s.blocks[index];
    const Linear* linears = block.linears[s.quantized];
    const AttentionShape z{s.B, s.T, s.H, s.K, s.S, s.d, s.q8 != 0, s.tree};
    const int64_t M = s.B * s.T, row = (s.H + s.gates + 2 * s.K) * s.d;
    void* k_cache = reinterpret_cast<void*>(s.kv[2 * index]);
    void* v_cache = reinterpret_cast<void*>(s.kv[2 * index + 1]);
    multiply(linears[0], &linears[1], inputs, shared.qkv.data(), M);
    auto turn = [&](int64_t m, int64_t head) {
      T* vector = shared.qkv.data() + m * row + (head < s.H ? head : s.gates + head) * s.d;
      const Norm& how = head < s.H ? block.q_norm : block.k_norm;
      if (how.weight) norm(how, vector, vector, s.d, n.eps);
      const int64_t ahead = s.tree.path ? s.tree.depth[m] : m % s.T;
      const int64_t at = std::min(s.lengths[m / s.T] + ahead, s.positions - 1);  // padding may lie beyond
      if (block.rope >= 0)
        rotate(vector, reinterpret_cast<const T*>(s.angles[block.rope]) + at * s.r,
               reinterpret_cast<const T*>(s.angles[s.num_ropes + block.rope]) + at * s.r, s.r);
      if (head < s.H && block.query_factors) {
        const auto factor = 1.0f * widen(static_cast<const T*>(block.query_factors)[at]);  // at least float
        by_vectors<T>(s.d, [&](auto get, auto put) { put(get(vector) * factor, vector); });
      }
      return vector;
    };
    for (int64_t item = share(M * s.H, me, all); item < share(M * s.H, me + 1, all); ++item) turn(item / s.H, item % s.H);
    // Neighbouring rows of a head share cache lines: one thread writes them.
    const int64_t pieces = (s.T + kRows - 1) / kRows, items = s.B * s.K * pieces;
    for (int64_t item = share(items, me, all); item < share(items, me + 1, all); ++item) {
      const int64_t b = item / pieces / s.K, h = item / pieces % s.K, first = item % pieces * kRows;
      for (int64_t t = first; t < std::min(s.T, first + kRows); ++t) {
        const T* key = turn(b * s.T + t, s.H + h);
        store_kv(z, b, h, s.lengths[b] + z.place(b, t), key, key + s.K * s.d, k_cache, v_cache);
      }
    }
    barrier.wait();
  }

  // Attention of rows as `a` describes, onto the residual stream x [rows, D]; h is memory of the same size.
  void attend(int64_t index, const Attention<T>& a, const Plan& plan, typename Wide<T>::type* parts, Scratch<T>& scratch,
              const Linear* next, T* x, T* h) {
    const Block& block = s.blocks[index];
    const Linear& o = block.linears[s.quantized][1];
    const int64_t M = a.z.B * a.z.T;
    attend_share(a, plan, me, all, parts, scratch, [&] { barrier.wait(); });
    barrier.wait();
    if (s.gates) {
      const int64_t row = (s.H + s.gates + 2 * s.K) * s.d;
      for (int64_t item = share(M * s.H, me, all); item < share(M * s.H, me + 1, all); ++item) {
        const T* gate = shared.qkv.data() + item / s.H * row + (s.H + item % s.H) * s.d;
        T* to = shared.attended.data() + item * s.d;
        by_vectors<T>(s.d, [&](auto get, auto put) {
          const auto x = get(gate);
          const auto e = exp_or_0<typename Wide<T>::type>(-absolute(x));
          put(get(to) * select(x < 0, e, e - e + 1) / (e + 1), to);
        });
      }
      barrier.wait();
    }
    multiply(o, next, inputs(shared.attended, s.H * s.d, o.K, M), shared.out.data(), M);
    add(joined(shared.out, o.N, s.D, M), block.attn_out_norm, M, x, h);
  }

  // Convolution of all rows, onto the residual stream x [B * T, D]; h is memory of the same size, with the normed rows. With
  // b, c and v the thirds of the first product, inputs u are b * v, and the last product's are c * (sums of u). In a tree a row's
  // inputs are those on its path. Threads share channels in whole vectors: where a rest begins must not depend on their number.
  void convolve(int64_t index, const Linear* next, T* x, T* h) {
    using W = typename Wide<T>::type;
    const Block& block = s.blocks[index];
    const Conv& conv = *block.conv;
    const Linear* linears = block.linears[s.quantized];
    const AttentionShape z{s.B, s.T, s.H, s.K, s.S, s.d, s.q8 != 0, s.tree};
    multiply(linears[0], &linears[1], h, shared.qkv.data(), s.B * s.T);
    const auto channels = [&](int64_t thread) {
      return std::min(s.D, share((s.D + lanes<T>() - 1) / lanes<T>(), thread, all) * lanes<T>());
    };
    const int64_t begin = channels(me), size = channels(me + 1) - begin;
    const T* weight = static_cast<const T*>(conv.weight) + begin;
    const T* bias = conv.bias ? static_cast<const T*>(conv.bias) + begin : nullptr;
    T* ring = reinterpret_cast<T*>(s.kv[2 * index]) + begin;
    const std::vector<T> nothing(size);
    const auto inputs_of = [&](int64_t b, int64_t slot) { return ring + (b * s.ring + slot % s.ring) * s.D; };
    const auto third = [&](int64_t m, int64_t part) { return shared.qkv.data() + (m * 3 + part) * s.D + begin; };
    const auto store = [&](int64_t b, int64_t t) {
      const int64_t m = b * s.T + t, slot = s.lengths[b] + z.place(b, t);
      if (slot < 0) return;  // a row without a text
      T* to = inputs_of(b, slot);
      by_vectors<T>(size, [&](auto get, auto put) { put(get(third(m, 0)) * get(third(m, 2)), to); });
    };
    std::vector<const T*> taps(conv.width);
    const auto sum = [&](int64_t b, int64_t t) {
      const int64_t m = b * s.T + t, depth = z.depth(b, t);
      for (int64_t i = 0; i < conv.width; ++i) {
        const int64_t ahead = depth - (conv.width - 1 - i);  // depth of this input's token; below 0: in the text before
        const int64_t slot = s.lengths[b] + (s.tree.path && ahead >= 0 ? z.path(b, t)[ahead] : ahead);
        taps[i] = slot < 0 ? nothing.data() : inputs_of(b, slot);
      }
      T* to = shared.attended.data() + m * s.D + begin;
      by_vectors<T>(size, [&](auto get, auto put) {
        typename Vec<W>::type sums = {};
        for (int64_t i = 0; i < conv.width; ++i) sums += get(taps[i]) * get(weight + i * s.D);
        if (bias) sums += get(bias);
        put(get(third(m, 1)) * put(sums, to), to);
      });
    };
    for (int64_t b = 0; b < s.B; ++b) {
      // The ring may be shorter than a prompt, whose inputs overwrite older ones in turn.
      for (int64_t t = 0; t < s.T; ++t) {
        store(b, t);
        if (!s.tree.path) sum(b, t);
      }
      for (int64_t t = 0; s.tree.path && t < s.T; ++t) sum(b, t);
    }
    barrier.wait();
    multiply(linears[1], next, shared.attended.data(), shared.out.data(), s.B * s.T);
    add(shared.out.data(), block.attn_out_norm, s.B * s.T, x, h);
  }

  // Gated delta rule of all rows, likewise. Threads share heads.
  void recur(int64_t index, const Linear* next, T* x, T* h) {
    using W = typename Wide<T>::type;
    const Block& block = s.blocks[index];
    const Delta& d = *block.delta;
    const Linear* linears = block.linears[s.quantized];
    const AttentionShape z{s.B, s.T, s.H, s.K, s.S, s.d, s.q8 != 0, s.tree};
    DeltaWork<W>& work = shared.delta;
    int64_t* held = reinterpret_cast<int64_t*>(s.held[index]);
    if (me == 0) {  // while the others multiply
      work.plans.resize(s.B);
      int64_t rows = 0;
      for (int64_t b = 0; b < s.B; ++b) {
        work.plans[b].make(z, b, s.lengths[b], held[b], s.certain[b], s.ring, d.width);
        work.plans[b].first_row = rows;
        rows += work.plans[b].tokens.size();
      }
      work.mixed.resize(std::max<size_t>(work.mixed.size(), rows * d.mixed()));  // with 0 where nothing is written
      work.gates.resize(std::max<size_t>(work.gates.size(), rows * 2 * d.value_heads));
    }
    multiply(linears[0], &linears[1], h, shared.qkv.data(), s.B * s.T);
    const int64_t groups = 2 * d.key_heads + d.value_heads;
    for (int64_t item = share(s.B * groups, me, all); item < share(s.B * groups, me + 1, all); ++item)
      mix(index, z, item / groups, item % groups);
    barrier.wait();
    size_t kept = 1;  // states of tokens
    for (int64_t b = 0; s.tree.path && b < s.B; ++b) kept = std::max(kept, work.plans[b].tokens.size());
    std::vector<W> out(s.T * d.padded());
    Aligned<W> states(kept * d.key_size * kValues);
    for (int64_t item = share(s.B * d.value_heads, me, all); item < share(s.B * d.value_heads, me + 1, all); ++item) {
      const int64_t b = item / d.value_heads, head = item % d.value_heads;
      const DeltaPlan& plan = work.plans[b];
      std::fill(out.begin(), out.end(), W(0));  // of rows without a text
      W* matrix = reinterpret_cast<W*>(s.kv[2 * index + 1]) + item * d.matrix();
      advance_head(d, plan, work, head, matrix, states.data(), s.tree.path != nullptr, out.data());
      for (int64_t t = 0; t < s.T; ++t) {
        const int64_t m = b * s.T + t;
        const T* gate = shared.qkv.data() + m * d.projected() + d.channels() + head * d.value_size;
        const W* from = out.data() + t * d.padded();
        T* to = shared.attended.data() + m * d.outputs() + head * d.value_size;
        by_vectors<T>(d.value_size, [&](auto get, auto put) { put(get(from), to); });
        norm(Norm{d.norm, 0}, to, to, d.value_size, n.eps);
        by_vectors<T>(d.value_size, [&](auto get, auto put) { put(get(to) * silu(get(gate)), to); });
      }
    }
    barrier.wait();
    for (int64_t b = 0; me == 0 && b < s.B; ++b) held[b] = work.plans[b].held;
    multiply(linears[1], next, shared.attended.data(), shared.out.data(), s.B * s.T);
    add(shared.out.data(), block.attn_out_norm, s.B * s.T, x, h);
  }

  // Queries, keys or values of one head and row, after the convolution; also writes the inputs of new tokens to the ring.
  // `group`: queries of all heads, then keys, then values, with which go decay and rate.
  void mix(int64_t index, const AttentionShape& z, int64_t b, int64_t group) {
    using W = typename Wide<T>::type;
    const Delta& d = *s.blocks[index].delta;
    const DeltaPlan& plan = shared.delta.plans[b];
    const int64_t head = group - 2 * d.key_heads, size = head < 0 ? d.key_size : d.value_size, num = plan.tokens.size();
    const int64_t begin = head < 0 ? group * d.key_size : 2 * d.key_heads * d.key_size + head * d.value_size;
    const int64_t to_begin = head < 0 ? group * d.key_size : 2 * d.key_heads * d.key_size + head * d.padded();
    const T* weight = static_cast<const T*>(d.kernel) + begin;
    T* ring = reinterpret_cast<T*>(s.kv[2 * index]) + b * s.ring * d.inputs();
    const auto inputs_of = [&](int64_t slot) { return ring + slot % s.ring * d.inputs(); };
    nothing.resize(std::max<size_t>(nothing.size(), size));
    taps.resize(d.width);
    const auto fetch = [&](const T* row) {  // of the next group
      for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(row + size + i);
    };
    for (int64_t i = 0; i < d.width; ++i) fetch(weight + i * d.channels());
    const auto store = [&](const DeltaToken& token) {
      const T* row = shared.qkv.data() + (b * s.T + token.out) * d.projected();
      T* to = inputs_of(token.slot);
      std::memcpy(to + begin, row + begin, size * sizeof(T));
      for (int64_t i = 0; head >= 0 && i < 2; ++i)
        to[d.channels() + i * d.value_heads + head] = row[d.channels() + d.outputs() + i * d.value_heads + head];
    };
    const auto sum = [&](int64_t number) {
      const DeltaToken& token = plan.tokens[number];
      for (int64_t i = 0; i < d.width; ++i) {
        const int64_t back = d.width - 1 - i, ahead = token.depth - back;  // depth of this input's token in a tree
        int64_t slot = token.slot - back;
        if (token.t >= 0) slot = s.lengths[b] + (ahead >= 0 ? z.path(b, token.t)[ahead] : ahead);
        taps[i] = slot < 0 ? nothing.data() : inputs_of(slot) + begin;
      }
      W* to = shared.delta.mixed.data() + (plan.first_row + number) * d.mixed() + to_begin;
      by_vectors<W>(size, [&](auto get, auto put) {
        typename Vec<W>::type sums = {};
        for (int64_t i = 0; i < d.width; ++i) sums += get(taps[i]) * get(weight + i * d.channels());
        put(silu(sums), to);
      });
      if (head < 0) return normalise<W>(to, size, group < d.key_heads ? 1 / std::sqrt(W(d.key_size)) : W(1));
      const T* gates = inputs_of(token.slot) + d.channels() + head;
      const W rate = widen(gates[0]), step = widen(gates[d.value_heads]) + static_cast<const W*>(d.dt_bias)[head];
      W* both = shared.delta.gates.data() + ((plan.first_row + number) * d.value_heads + head) * 2;
      both[0] = std::exp(static_cast<const W*>(d.decay)[head] * (step > 20 ? step : std::log1p(std::exp(step))));
      both[1] = 1 / (1 + std::exp(-rate));
    };
    // Inputs of the text are read before those of new tokens overwrite older ones in the ring. It may be shorter than a prompt,
    // whose inputs overwrite each other in turn.
    const auto is_known = [&](int64_t i) { return i < num && plan.tokens[i].out < 0 && plan.tokens[i].t < 0; };
    const int64_t before = num ? plan.tokens[0].slot : 0;
    for (int64_t slot = std::max<int64_t>(before - d.width + 1, 0); slot < before; ++slot) fetch(inputs_of(slot) + begin);
    int64_t i = 0;
    for (; is_known(i); ++i) {
      fetch(inputs_of(plan.tokens[i].slot) + begin);
      sum(i);
    }
    for (int64_t j = i; s.tree.path && j < num; ++j)
      if (plan.tokens[j].out >= 0) store(plan.tokens[j]);
    for (; i < num; ++i) {
      if (!s.tree.path) store(plan.tokens[i]);
      sum(i);
    }
  }

  // This thread's share of act(gate) * up of M rows.
  void activate(int64_t M, int64_t mlp) {
    using W = typename Wide<T>::type;
    const int64_t begin = share(mlp, me, all), end = share(mlp, me + 1, all);
    for (int64_t m = 0; m < M; ++m) {
      const T* gate = shared.gate_up.data() + m * 2 * mlp;
      const T* up = gate + mlp;
      T* to = shared.hidden.data() + m * mlp;
      if (s.activation == 0)
        gate_by_silu(gate + begin, up + begin, to + begin, end - begin);
      else if (s.activation == 3)
        gate_by_swiglu_oai(gate + begin, up + begin, to + begin, end - begin);
      else
        for (int64_t i = begin; i < end; ++i) narrow(gelu<W>(widen(gate[i]), s.activation) * widen(up[i]), to + i);
    }
    barrier.wait();
  }

  // MLP of M rows, likewise.
  void feed_forward(int64_t index, int64_t M, const Linear* next, T* x, T* h) {
    const Block& block = s.blocks[index];
    const Linear* linears = block.linears[s.quantized];
    for (int64_t m = 0; m < M; ++m) norm(block.mlp_norm, x + m * s.D, h + m * s.D, s.D, n.eps);
    if (const Experts* experts = block.experts[s.quantized]) {
      add_experts(*experts, M, h);
      return add(h, block.mlp_out_norm, M, x, h);
    }
    multiply(linears[2], &linears[3], h, shared.gate_up.data(), M);
    activate(M, s.mlp);
    multiply(linears[3], next, inputs(shared.hidden, s.mlp, linears[3].K, M), shared.out.data(), M);
    add(joined(shared.out, linears[3].N, s.D, M), block.mlp_out_norm, M, x, h);
  }

  // Replace M rows of h by the results of their experts. A row's experts are added in the order of their numbers: it has the
  // same bits whatever the others chose.
  void add_experts(const Experts& e, int64_t M, T* h) {
    using W = typename Wide<T>::type;
    if (e.wide) {
      std::vector<W> wide(M * s.D);
      for (int64_t i = 0; i < M * s.D; ++i) wide[i] = widen(h[i]);
      const int64_t blocks = blocks_of<W>(e.router);
      product_blocks(e.router, nullptr, wide.data(), shared.wide_scores.data(), M, share(blocks, me, all), share(blocks, me + 1, all),
                     rounded);
      barrier.wait();
    } else {
      multiply(e.router, nullptr, h, shared.scores.data(), M);
    }
    for (int64_t m = share(M, me, all); m < share(M, me + 1, all); ++m) {
      Choice<T>* chosen = shared.chosen.data() + m * e.per_row;
      if (e.wide)
        choose_experts(e, shared.wide_scores.data() + m * e.router.N, chosen);
      else
        choose_experts(e, shared.scores.data() + m * e.router.N, chosen);
    }
    barrier.wait();
    visits.group(e, shared.chosen.data(), M);
    // Columns of sums that this thread adds, in whole vectors: where a rest begins must not depend on the number of threads.
    const auto columns = [&](int64_t thread) {
      return std::min(s.D, share((s.D + lanes<T>() - 1) / lanes<T>(), thread, all) * lanes<T>());
    };
    const int64_t begin = columns(me), size = columns(me + 1) - begin, room = visits_at_once(M, e);
    for (int64_t m = 0; m < M; ++m) std::fill_n(shared.sums.data() + m * s.D + begin, size, 0);
    for (int64_t from = 0, to = 0; from < e.count; from = to) {
      const int64_t first = visits.first[from];
      for (to = from + 1; to < e.count && visits.first[to + 1] - first <= room;) ++to;
      const int64_t num = visits.first[to] - first;
      if (!num) continue;
      multiply_each(e.linears, from, to, shared.gate_up.data(), [&](int64_t i) {
        const int64_t rows = visits.first[i + 1] - visits.first[i];
        if (rows == M) return static_cast<const T*>(h);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t row = visits.all[visits.first[i] + r].row;
          std::memcpy(gathered.data() + r * s.D, h + row * s.D, s.D * sizeof(T));
        }
        return static_cast<const T*>(gathered.data());
      });
      activate(num, e.mlp);
      multiply_each(e.linears + 1, from, to, shared.out.data(),
                    [&](int64_t i) { return shared.hidden.data() + (visits.first[i] - first) * e.mlp; });
      for (int64_t i = 0; i < num; ++i) {
        const auto& visit = visits.all[first + i];
        const T* out = shared.out.data() + i * s.D + begin;
        auto* sum = shared.sums.data() + visit.row * s.D + begin;
        by_vectors<typename Wide<T>::type>(size, [&](auto get, auto put) { put(get(sum) + visit.factor * get(out), sum); });
      }
    }
    barrier.wait();
    for (int64_t i = 0; i < M * s.D; ++i) narrow(shared.sums[i], h + i);
  }

  // Products of experts from..to, whose linears are every other one: this thread's share of all their outputs. A few rows cost
  // about what reading the weights does.
  template <typename Inputs>
  void multiply_each(const Linear* linears, int64_t from, int64_t to, T* y, Inputs&& inputs) {
    constexpr int64_t kReading = 8;
    const auto rows_of = [&](int64_t i) { return visits.first[i + 1] - visits.first[i]; };
    const auto cost_of = [&](int64_t i) { return rows_of(i) ? kReading + rows_of(i) : 0; };
    int64_t total = 0, before = 0;
    for (int64_t i = from; i < to; ++i) total += cost_of(i) * blocks_of<T>(linears[2 * i]);
    for (int64_t i = from; i < to; ++i) {
      const Linear& l = linears[2 * i];
      const int64_t rows = rows_of(i), cost = cost_of(i), blocks = blocks_of<T>(l);
      if (!rows) continue;
      const auto block_at = [&](int64_t thread) {
        return std::min(blocks, (std::max<int64_t>(share(total, thread, all) - before, 0) + cost - 1) / cost);
      };
      T* to_rows = y + (visits.first[i] - visits.first[from]) * l.N;
      if (l.bits < 0)
        product(l, nullptr, inputs(i), to_rows, rows, me, all, rounded);
      else if (block_at(me) < block_at(me + 1))
        product_blocks(l, nullptr, inputs(i), to_rows, rows, block_at(me), block_at(me + 1), rounded);
      before += cost * blocks;
    }
    barrier.wait();
  }
};

template <typename T>
void run_stack(const Step& s, const Numbers& n) {
  using W = typename Wide<T>::type;
  const int64_t M = s.B * s.T, row = (s.H + s.gates + 2 * s.K) * s.d;
  const AttentionShape z{s.B, s.T, s.H, s.K, s.S, s.d, s.q8 != 0, s.tree};
  const Plan plan(z, s.lengths, s.threads);
  Aligned<W> parts(num_parts<T>(z, plan));
  Shared<T> shared(s, M);
  *s.lost += together(s.threads, [&](int64_t me, int64_t all, Barrier& barrier) {
    std::vector<T> x(static_cast<const T*>(s.x), static_cast<const T*>(s.x) + M * s.D), h(M * s.D);
    Scratch<T> scratch(z, plan);
    Worker<T> worker{s, n, shared, barrier, me, all};
    auto tap = [&](int64_t depth, int64_t m, const T* row) {
      const int64_t slot = s.lengths[m / s.T] + m % s.T;
      if (!s.features || slot < 0 || slot >= s.S) return;  // rows of ended texts, as in store_kv
      T* to = static_cast<T*>(s.features) + (m / s.T * s.S + slot) * s.num_taps * s.D;
      for (int64_t i = 0; i < s.num_taps; ++i)
        if (s.taps[i] == depth) std::memcpy(to + i * s.D, row, s.D * sizeof(T));
    };
    const int64_t mine = share(M, me, all), mine_end = share(M, me + 1, all);
    for (int64_t index = 0; index < s.num_blocks; ++index) {
      const Block& block = s.blocks[index];
      const Linear* next = index + 1 < s.num_blocks ? s.blocks[index + 1].linears[s.quantized] : nullptr;
      for (int64_t m = 0; m < M; ++m) norm(block.attn_norm, x.data() + m * s.D, h.data() + m * s.D, s.D, n.eps);
      const Linear* mlp = &block.linears[s.quantized][2];
      if (block.conv) {
        worker.convolve(index, mlp, x.data(), h.data());
      } else if (block.delta) {
        worker.recur(index, mlp, x.data(), h.data());
      } else {
        worker.project(index, h.data());
        const Attention<T> a{z, shared.qkv.data(), s.T * row, row, reinterpret_cast<void*>(s.kv[2 * index]),
                             reinterpret_cast<void*>(s.kv[2 * index + 1]), s.lengths, shared.attended.data(),
                             n.scale, block.window, s.recent, n.softcap, static_cast<const T*>(block.sinks)};
        worker.attend(index, a, plan, parts.data(), scratch, mlp, x.data(), h.data());
      }
      worker.feed_forward(index, M, next, x.data(), h.data());
      for (int64_t m = mine; m < mine_end; ++m) tap(index + 1, m, x.data() + m * s.D);
    }
    for (int64_t m = mine; m < mine_end; ++m) {
      T* to = static_cast<T*>(s.x) + m * s.D;
      if (s.norm.weight) {
        norm(s.norm, x.data() + m * s.D, to, s.D, n.eps);
        tap(s.num_blocks + 1, m, to);
      } else {
        std::memcpy(to, x.data() + m * s.D, s.D * sizeof(T));
      }
    }
  });
}

}  // namespace sharesd
