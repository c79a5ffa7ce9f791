// A step of a trained head in one call: embeddings, what it makes of the target's hidden states or of its own, its only block
// over a KV cache of its own, norm and LM head. Rows keep their bits, as in stack.h: each is computed by itself.
//
// It reads places of a text from the target's features, by their slots: of all of these it needs keys and values, and of the
// last one logits, if anything. Or it goes on from states of its own, the rows of a level of a tree or the next of a chain.
#pragma once
#include "stack.h"

namespace sharesd {

// Written by head.py as int64 words.
struct HeadStep {
  Step stack;  // the block over the rows that are read; its norm is the one before the LM head
  const int64_t* tokens;  // [B, token_pitch]: by slot, of which each place reads the next; or those of the rows
  int64_t token_pitch;
  const void* embed;  // [vocab, D]
  int64_t vocab;
  const void* features;  // [B, S, F], by slot; null: rows go on from states
  const int64_t* ends;  // [B]: slots behind the last places that are read
  void* states;  // [B, P, D]: of the root or a chain's last guess, and of a tree's nodes, by slots behind the length;
  int64_t P;     // null: only keys and values are wanted
  Linear fuse, mix, lm_head;  // F -> D, 2 D -> D, D -> draft tokens; without a weight: none
  Norm embed_norm, state_norm;
  int64_t normed;  // the residual stream begins with the normalised state
  void* logits;  // [rows, draft tokens]
};
static_assert(sizeof(HeadStep) == 63 * 8, "head.py writes these words");

template <typename T>
void run_head(const HeadStep& head, const Numbers& n) {
  using W = typename Wide<T>::type;
  const Step& s = head.stack;
  const Block& block = s.blocks[0];
  const Linear* linears = block.linears[0];
  const int64_t M = s.B * s.T, D = s.D, row = (s.H + 2 * s.K) * s.d, size = s.H * s.d;
  const int64_t F = head.fuse.weight ? head.fuse.K : D;
  const bool reads = head.features, ends = head.states;
  // Rows of which there will be states: all, or of those that are read the last of each text.
  std::vector<int64_t> kept, lengths(s.lengths, s.lengths + s.B);
  if (!reads)
    for (int64_t m = 0; m < M; ++m) kept.push_back(m);
  for (int64_t b = 0; reads && ends && b < s.B; ++b) {
    const int64_t last = std::clamp<int64_t>(head.ends[b] - 1 - s.lengths[b], 0, s.T - 1);
    kept.push_back(b * s.T + last), lengths[b] += last;
  }
  const int64_t num = kept.size();
  const AttentionShape z{s.B, num / s.B, s.H, s.K, s.S, s.d, s.tree};
  const Plan plan(z, lengths.data(), s.threads);
  Aligned<W> parts(num_parts<T>(z, plan));
  Shared<T> shared(s, num);
  std::vector<T> fused(head.fuse.weight && reads ? M * D : 0), mixed(head.mix.weight ? M * D : 0), queries(num * size);
  // Which state a row goes on from, and which one it becomes.
  auto state = [&](int64_t m, bool own) {
    int64_t at = 0;
    if (s.tree.path) {
      const int64_t depth = s.tree.depth[m], *path = s.tree.path + m * s.tree.P;
      at = own ? path[depth] + 1 : depth > 0 ? path[depth - 1] + 1 : 0;
    }
    return static_cast<T*>(head.states) + (m / s.T * head.P + std::clamp<int64_t>(at, 0, head.P - 1)) * D;
  };
  *s.lost += together(s.threads, [&](int64_t me, int64_t all, Barrier& barrier) {
    Worker<T> worker{s, n, shared, barrier, me, all};
    Scratch<T> scratch(z, plan);
    std::vector<T> before(M * (reads ? F : D)), joined(M * 2 * D), x(num * D), h(num * D);
    for (int64_t m = 0; m < M; ++m) {
      const int64_t b = m / s.T, slot = std::clamp<int64_t>(s.lengths[b] + m % s.T, 0, s.S - 1);
      const T* from = reads ? static_cast<const T*>(head.features) + (b * s.S + slot) * F : state(m, false);
      const int64_t size = reads ? F : D;
      std::memcpy(before.data() + m * size, from, size * sizeof(T));
    }
    const T* states = before.data();
    if (reads && head.fuse.weight) {
      worker.multiply(head.fuse, head.mix.weight ? &head.mix : linears, states, fused.data(), M);
      states = fused.data();
    }
    for (int64_t m = 0; m < M; ++m) {
      const int64_t b = m / s.T, at = reads ? s.lengths[b] + m % s.T + 1 : m % s.T;
      const int64_t token = head.tokens[b * head.token_pitch + std::clamp<int64_t>(at, 0, head.token_pitch - 1)];
      const T* embed = static_cast<const T*>(head.embed) + std::clamp<int64_t>(token, 0, head.vocab - 1) * D;
      T* to = joined.data() + m * 2 * D;
      for (const auto& [how, from] : {std::pair{&head.embed_norm, embed}, std::pair{&head.state_norm, states + m * D}}) {
        if (how->weight)
          norm(*how, from, to, D, n.eps);
        else
          std::memcpy(to, from, D * sizeof(T));
        to += D;
      }
    }
    const T *inputs = joined.data(), *begin = head.normed ? joined.data() + D : states;
    int64_t pitch = head.normed ? 2 * D : D;
    if (head.mix.weight) {
      worker.multiply(head.mix, linears, joined.data(), mixed.data(), M);
      inputs = begin = mixed.data(), pitch = D;
    }
    worker.project(0, inputs);
    if (!ends) return;
    for (int64_t i = 0; i < num; ++i) {
      std::memcpy(x.data() + i * D, begin + kept[i] * pitch, D * sizeof(T));
      if (i % all == me) std::memcpy(queries.data() + i * size, shared.qkv.data() + kept[i] * row, size * sizeof(T));
    }
    barrier.wait();
    const Attention<T> a{z, queries.data(), z.T * size, size, reinterpret_cast<const T*>(s.kv[0]),
                         reinterpret_cast<const T*>(s.kv[1]), lengths.data(), shared.attended.data(), n.scale, block.window,
                         s.recent, n.softcap};
    worker.finish(0, a, plan, parts.data(), scratch, &head.lm_head, x.data(), h.data());
    for (int64_t i = share(num, me, all); i < share(num, me + 1, all); ++i)
      std::memcpy(reads ? static_cast<T*>(head.states) + i * head.P * D : state(i, true), x.data() + i * D, D * sizeof(T));
    if (s.norm.weight)
      for (int64_t i = 0; i < num; ++i) norm(s.norm, x.data() + i * D, h.data() + i * D, D, n.eps);
    product(head.lm_head, nullptr, s.norm.weight ? h.data() : x.data(), static_cast<T*>(head.logits), num, me, all,
            worker.rounded);
  });
}

}  // namespace sharesd
