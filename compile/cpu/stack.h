// All blocks of a Llama-family decoder in one call. One parallel region with a few barriers per block: between matrix
// products there is nothing but the little that a block does besides, so a step costs hardly more than reading its weights.
//
// Threads share the outputs of each product; norms and the residual stream are so small that each thread keeps its own.
// Every row is computed by itself, in an order that nothing else enters: rows have the same bits at any width.
#pragma once
#include "attention.h"
#include "barrier.h"
#include "lowbit.h"

#include <memory>

namespace sharesd {

// The descriptions below are written by stack.py as int64 words; keep both in step.
struct Linear {
  int64_t bits;  // 0: full precision, 4, 8: low
  const void* weight;
  const void* bias;
  int64_t N, K, G;
};
struct Norm {
  const void* weight;  // null: no norm here
  int64_t wide;        // the weight is kept in the wide type and multiplies before rounding (Gemma)
};
struct Block {
  Norm attn_norm, q_norm, k_norm, attn_out_norm, mlp_norm, mlp_out_norm;
  Linear linears[2][4];  // full, low: qkv, o, gate_up, down
  int64_t window, rope;  // rope: which table of angles, -1 = none
};
struct Step {
  const Block* blocks;  // that run in this call, all of a decoder's or some next to each other
  int64_t num_blocks;
  const int64_t* kv;  // addresses: k and v of every block
  const int64_t* angles;  // addresses [positions, r]: cosines of every rope, then sines
  int64_t num_ropes, positions;
  const int64_t* lengths;
  void* x;  // [B * T, D], replaced by the result
  Norm norm;  // of the result; where these are not the last blocks there is none
  int64_t B, T, H, K, S, d, r, D, mlp, activation, low, threads, recent;
  Branches tree;
  void* features;  // [B, S, num_taps * D]: rows behind so many blocks are copied to their slots, null: none
  int64_t num_taps;
  const int64_t* taps;  // counted from the first of these blocks; one more than there are: behind the norm
  const void* inputs;  // [B * T, K of qkv]: of attentions without a norm before them
  int64_t* lost;  // nanoseconds that threads waited for one which had lost its core are added here
};
static_assert(sizeof(Block) == 62 * 8 && sizeof(Step) == 31 * 8, "stack.py writes these words");

template <typename W> inline W activate(W x, int64_t kind) {
  if (kind == 0) {  // silu
    const W e = exp_neg(x < 0 ? x : -x);
    return x * (x < 0 ? e : W(1)) / (1 + e);
  }
  if (kind == 1) return W(0.5) * x * (1 + std::erf(x * W(0.7071067811865476)));
  return W(0.5) * x * (1 + std::tanh(W(0.7978845608028654) * (x + W(0.044715) * x * x * x)));
}

template <typename T>
void norm(const Norm& how, const T* x, T* y, int64_t size, double eps) {
  using W = typename Wide<T>::type;
  W sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
  const W factor = 1 / std::sqrt(sum / size + static_cast<W>(eps));
  if (how.wide) {
    const W* w = static_cast<const W*>(how.weight);
    for (int64_t i = 0; i < size; ++i) narrow(widen(x[i]) * factor * w[i], y + i);
  } else {
    const T* w = static_cast<const T*>(how.weight);
    for (int64_t i = 0; i < size; ++i) {
      T rounded;
      narrow(widen(x[i]) * factor, &rounded);
      narrow(widen(w[i]) * widen(rounded), y + i);
    }
  }
}

template <typename T>
void rotate(T* x, const T* cos, const T* sin, int64_t r) {
  for (int64_t i = 0; i < r; ++i) {
    const auto a = widen(x[i]), b = widen(x[r + i]), c = widen(cos[i]), s = widen(sin[i]);
    narrow(a * c - b * s, x + i);
    narrow(b * c + a * s, x + r + i);
  }
}

// Where a thread's share of a product's weights begins; null where that does not matter.
template <typename T>
const void* begin_of(const Linear* l, int64_t me, int64_t all) {
  if (!l || l->bits) return nullptr;
  return static_cast<const T*>(l->weight) + share((l->N + lanes<T>() - 1) / lanes<T>(), me, all) * lanes<T>() * l->K;
}

// This thread's share of a product; `next` is the one which follows.
template <typename T>
void product(const Linear& l, const Linear* next, const T* x, T* y, int64_t M, int64_t me, int64_t all,
             RoundedRows& rounded) {
  const T* bias = static_cast<const T*>(l.bias);
  const int64_t width = l.bits ? 16 : lanes<T>(), blocks = (l.N + width - 1) / width;
  const int64_t begin = share(blocks, me, all), end = share(blocks, me + 1, all);
  if (l.bits) {
    round_rows(x, M, l.K, rounded);
    low_blocks(static_cast<int>(l.bits), rounded, static_cast<const uint8_t*>(l.weight), bias, y, M, l.N, l.K, l.G, begin,
               end);
  } else {
    linear_blocks(x, static_cast<const T*>(l.weight), bias, y, M, l.N, l.K, begin, end, begin_of<T>(next, me, all));
  }
}

template <typename T>
void run_stack(const Step& s, double eps, double scale, double softcap) {
  using W = typename Wide<T>::type;
  const int64_t M = s.B * s.T, heads = s.H + 2 * s.K, row = heads * s.d;
  const AttentionShape z{s.B, s.T, s.H, s.K, s.S, s.d, s.tree};
  const Plan plan(z, s.lengths, s.threads);
  Aligned<W> parts(num_parts<T>(z, plan));
  std::vector<T> qkv(M * row), attended(M * s.H * s.d), out(M * s.D), gate_up(M * 2 * s.mlp), hidden(M * s.mlp);
  std::unique_ptr<Barrier> barrier;
#pragma omp parallel num_threads(static_cast<int>(s.threads))
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
#pragma omp single
    barrier = std::make_unique<Barrier>(all);
    std::vector<T> x(static_cast<const T*>(s.x), static_cast<const T*>(s.x) + M * s.D), h(M * s.D);
    Scratch<T> scratch(z, plan);
    RoundedRows rounded;
    auto add_out = [&](const Norm& how) {  // x += out, perhaps normalised
      for (int64_t m = 0; m < M; ++m) {
        const T* y = out.data() + m * s.D;
        if (how.weight) {
          norm(how, y, h.data() + m * s.D, s.D, eps);
          y = h.data() + m * s.D;
        }
        T* xm = x.data() + m * s.D;
        for (int64_t i = 0; i < s.D; ++i) narrow(widen(xm[i]) + widen(y[i]), xm + i);
      }
    };
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
      const Linear* linears = block.linears[s.low];
      const Linear* next = index + 1 < s.num_blocks ? s.blocks[index + 1].linears[s.low] : nullptr;
      T* k_cache = reinterpret_cast<T*>(s.kv[2 * index]);
      T* v_cache = reinterpret_cast<T*>(s.kv[2 * index + 1]);

      if (block.attn_norm.weight)
        for (int64_t m = 0; m < M; ++m) norm(block.attn_norm, x.data() + m * s.D, h.data() + m * s.D, s.D, eps);
      const T* inputs = block.attn_norm.weight ? h.data() : static_cast<const T*>(s.inputs);
      product(linears[0], &linears[1], inputs, qkv.data(), M, me, all, rounded);
      barrier->wait();
      for (int64_t item = share(M * (s.H + s.K), me, all); item < share(M * (s.H + s.K), me + 1, all); ++item) {
        const int64_t m = item / (s.H + s.K), head = item % (s.H + s.K);
        T* vector = qkv.data() + m * row + head * s.d;
        const Norm& how = head < s.H ? block.q_norm : block.k_norm;
        if (how.weight) norm(how, vector, vector, s.d, eps);
        if (block.rope >= 0) {
          const int64_t ahead = s.tree.path ? s.tree.depth[m] : m % s.T;
          const int64_t at = std::min(s.lengths[m / s.T] + ahead, s.positions - 1) * s.r;  // padding may lie beyond
          rotate(vector, reinterpret_cast<const T*>(s.angles[block.rope]) + at,
                 reinterpret_cast<const T*>(s.angles[s.num_ropes + block.rope]) + at, s.r);
        }
        if (head >= s.H)
          store_kv(z, m / s.T, head - s.H, s.lengths[m / s.T] + z.place(m / s.T, m % s.T), vector, vector + s.K * s.d, k_cache, v_cache);
      }
      barrier->wait();
      const Attention<T> a{z,       qkv.data(),      s.T * row, row,          k_cache,  v_cache,
                           s.lengths, attended.data(), scale,     block.window, s.recent, softcap};
      attend_share(a, plan, me, all, parts.data(), scratch, [&] { barrier->wait(); });
      barrier->wait();
      product(linears[1], &linears[2], attended.data(), out.data(), M, me, all, rounded);
      barrier->wait();
      add_out(block.attn_out_norm);

      for (int64_t m = 0; m < M; ++m) norm(block.mlp_norm, x.data() + m * s.D, h.data() + m * s.D, s.D, eps);
      product(linears[2], &linears[3], h.data(), gate_up.data(), M, me, all, rounded);
      barrier->wait();
      for (int64_t m = 0; m < M; ++m) {
        const T* gate = gate_up.data() + m * 2 * s.mlp;
        const T* up = gate + s.mlp;
        T* to = hidden.data() + m * s.mlp;
        const int64_t begin = share(s.mlp, me, all), end = share(s.mlp, me + 1, all);
        if (s.activation == 0)
          for (int64_t i = begin; i < end; ++i) narrow(activate<W>(widen(gate[i]), 0) * widen(up[i]), to + i);
        else
          for (int64_t i = begin; i < end; ++i) narrow(activate<W>(widen(gate[i]), s.activation) * widen(up[i]), to + i);
      }
      barrier->wait();
      product(linears[3], next, hidden.data(), out.data(), M, me, all, rounded);
      barrier->wait();
      add_out(block.mlp_out_norm);
      for (int64_t m = mine; m < mine_end; ++m) tap(index + 1, m, x.data() + m * s.D);
    }
    for (int64_t m = mine; m < mine_end; ++m) {
      T* to = static_cast<T*>(s.x) + m * s.D;
      if (s.norm.weight) {
        norm(s.norm, x.data() + m * s.D, to, s.D, eps);
        tap(s.num_blocks + 1, m, to);
      } else {
        std::memcpy(to, x.data() + m * s.D, s.D * sizeof(T));
      }
    }
  }
  *s.lost += barrier->lost();
}

}  // namespace sharesd
