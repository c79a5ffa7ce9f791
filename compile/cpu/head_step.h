// A step of a trained head in one call: embeddings, states from the target's features or its own, its only block over a KV
// cache of its own, norm and LM head. Rows keep their bits, as in decoder_stack.h: each is computed by itself.
//
// It reads positions of a text, from the target's features by their slots or from tokens alone: all need keys and values, and
// the last one logits, if any; masks may follow it, which draft further tokens. Or it continues a draft, with the rows of a
// tree's level or the next of a chain: from states of its own, or from their tokens.
#pragma once
#include "decoder_stack.h"

namespace sharesd {

// Cross attention to a layer of the target (GLIDE): its queries, and the output's linear.
struct CrossAttention {
  Linear q, o;
  Norm q_norm;
  void *k, *v;  // the target's cache of this layer
  const void *cos, *sin;  // [positions, r]; null: queries are not rotated
  int64_t positions, r, window;
  double scale, eps;  // eps: of q_norm
};

// native_structs.py has this struct, field by field.
struct HeadStep {
  Step stack;  // the block over the rows that are read; its norm is the one before the LM head
  const int64_t* tokens;  // [B, token_pitch]: by slot, each position reads the next; or those of the rows
  int64_t token_pitch;
  const void* embed;  // [vocab, D]
  int64_t vocab;
  int64_t reads;         // positions of a text; 0: rows of a draft
  const int64_t* ends;   // [B]: slots after the last positions that are read
  const void* features;  // [B, S, F], by slot
  int64_t num_kept;      // rows of a text with logits: the last position, and masks after it
  const void *mask_embeds, *mask_states;  // [num_kept - 1, D], added to that position's embedding and state; null: no masks
  void* states;  // [B, P, D]: of the root or a chain's last token, and of a tree's nodes, by slots after the length
  int64_t P;
  Linear fuse, mix, lm_head;  // F -> D, 2 D -> D, D -> draft tokens; without a weight: none
  Norm features_norm;    // [F], of features
  int64_t normed_parts;  // number of equal parts of them, each normalised by itself
  Norm embed_norm, state_norm;
  int64_t normed;        // the residual stream begins with the normalised state
  int64_t norms_states;  // states are the output of the norm before the LM head
  // Rows with cross attention have no features and no states.
  const CrossAttention* cross_attentions;
  int64_t num_cross_attentions;
  Norm cross_norm;
  const int64_t* seen;  // [B]: number of the target's slots that they attend to
  int64_t H, K, S, d, q8;  // of the target
  void* logits;  // [rows, draft tokens]; null: only keys and values are written
};

// Buffers of cross attention that all threads share.
template <typename T> struct CrossBuffers {
  using W = typename Wide<T>::type;
  std::vector<int64_t> zeros;  // all rows in one slot, after those that the target has read
  AttentionShape z;
  Plan plan;
  Aligned<W> parts;
  std::vector<T> queries, found;
  CrossBuffers(const HeadStep& h, int64_t rows)
      : zeros(rows), z{h.stack.B, rows / h.stack.B, h.H, h.K, h.S, h.d, h.q8 != 0, {zeros.data(), zeros.data(), 1}},
        plan(z, h.seen, h.stack.threads), parts(num_parts<T>(z, plan)), queries(rows * h.H * h.d), found(rows * h.H * h.d) {}
};

// Add the cross attention of a layer to x [rows, D], the residual stream. `from` [rows, D] are inputs of queries; position(m)
// is that of a row.
template <typename T, typename Position>
void attend_to_target(Worker<T>& worker, const HeadStep& head, const CrossAttention& layer, CrossBuffers<T>& at,
                      Scratch<T>& scratch, const T* from, T* x, Position&& position) {
  const AttentionShape& z = at.z;
  const int64_t me = worker.me, all = worker.all, M = z.B * z.T, size = z.H * z.d;
  worker.multiply(layer.q, &layer.o, from, at.queries.data(), M);
  for (int64_t item = share(M * z.H, me, all); item < share(M * z.H, me + 1, all); ++item) {
    T* query = at.queries.data() + item * z.d;
    if (layer.q_norm.weight) norm(layer.q_norm, query, query, z.d, layer.eps);
    if (!layer.cos) continue;
    const int64_t angle = std::clamp<int64_t>(position(item / z.H), 0, layer.positions - 1) * layer.r;
    rotate(query, static_cast<const T*>(layer.cos) + angle, static_cast<const T*>(layer.sin) + angle, layer.r);
  }
  // An entry of zeros, in the slot of the target's next token, is all that a row without others attends to.
  const std::vector<T> nothing(z.d);
  for (int64_t item = share(z.B * z.K, me, all); item < share(z.B * z.K, me + 1, all); ++item)
    store_kv(z, item / z.K, item % z.K, head.seen[item / z.K], nothing.data(), nothing.data(), layer.k, layer.v);
  worker.barrier.wait();
  const Attention<T> a{z, at.queries.data(), z.T * size, size, layer.k, layer.v, head.seen, at.found.data(), layer.scale, layer.window, 0, 0};
  attend_share(a, at.plan, me, all, at.parts.data(), scratch, [&] { worker.barrier.wait(); });
  worker.barrier.wait();
  worker.multiply(layer.o, nullptr, at.found.data(), worker.shared.out.data(), M);
  worker.add(worker.shared.out.data(), {}, M, x, nullptr);
}

template <typename T>
void run_head(const HeadStep& head, const Numbers& n) {
  using W = typename Wide<T>::type;
  const Step& s = head.stack;
  const Block& block = s.blocks[0];
  const Linear* linears = block.linears[0];
  const int64_t M = s.B * s.T, D = s.D, row = (s.H + 2 * s.K) * s.d, size = s.H * s.d;
  const int64_t F = head.fuse.weight ? head.fuse.K : D;
  const bool reads = head.reads, cross_attentions = head.num_cross_attentions;
  // Row of the last read position of a text; after it are masks, the same position `ahead` times further, or nothing.
  auto last = [&](int64_t b) { return std::clamp<int64_t>(head.ends[b] - 1 - s.lengths[b], 0, s.T - head.num_kept); };
  auto place = [&](int64_t m) { return head.mask_states ? std::min(m % s.T, last(m / s.T)) : m % s.T; };
  auto ahead = [&](int64_t m) { return std::min(m % s.T - place(m), head.num_kept - 1); };
  // Rows with logits: all, or the last read one of each text, and its masks.
  std::vector<int64_t> kept, lengths(s.lengths, s.lengths + s.B);
  if (!reads)
    for (int64_t m = 0; m < M; ++m) kept.push_back(m);
  for (int64_t b = 0; reads && head.logits && b < s.B; ++b) {
    for (int64_t k = 0; k < head.num_kept; ++k) kept.push_back(b * s.T + last(b) + k);
    lengths[b] += last(b);
  }
  const int64_t num = kept.size();
  const AttentionShape z{s.B, num / s.B, s.H, s.K, s.S, s.d, s.q8 != 0, s.tree};
  const Plan plan(z, lengths.data(), s.threads);
  Aligned<W> parts(num_parts<T>(z, plan));
  Shared<T> shared(s, num);
  std::vector<T> fused(head.fuse.weight && reads ? M * D : 0), mixed(head.mix.weight ? M * D : 0), queries(num * size);
  std::unique_ptr<CrossBuffers<T>> buffers(cross_attentions && num ? new CrossBuffers<T>(head, num) : nullptr);
  auto token = [&](int64_t m) {
    const int64_t b = m / s.T, at = reads ? s.lengths[b] + place(m) + 1 : m % s.T;
    const int64_t id = head.tokens[b * head.token_pitch + std::clamp<int64_t>(at, 0, head.token_pitch - 1)];
    return static_cast<const T*>(head.embed) + std::clamp<int64_t>(id, 0, head.vocab - 1) * D;
  };
  // State that a row continues, and the state that it becomes.
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
    std::vector<T> before(M * (reads && !cross_attentions ? F : D)), joined(M * 2 * D), x(num * D), h(num * D);
    std::vector<T> states(head.mask_states ? M * D : 0);
    const T *inputs = joined.data(), *begin = before.data();
    int64_t pitch = D;
    if (cross_attentions) {
      for (int64_t m = 0; m < M; ++m) {
        std::memcpy(before.data() + m * D, token(m), D * sizeof(T));
        norm(block.attn_norm, token(m), joined.data() + m * D, D, n.eps);
      }
    } else {
      for (int64_t m = 0; m < M; ++m) {
        const int64_t b = m / s.T, slot = std::clamp<int64_t>(s.lengths[b] + place(m), 0, s.S - 1);
        const T* from = reads ? static_cast<const T*>(head.features) + (b * s.S + slot) * F : state(m, false);
        const int64_t size = reads ? F : D;
        T* to = before.data() + m * size;
        std::memcpy(to, from, size * sizeof(T));
        if (!reads || !head.features_norm.weight) continue;
        const int64_t part = F / head.normed_parts;
        for (int64_t i = 0; i < F; i += part)
          norm<T>({static_cast<const T*>(head.features_norm.weight) + i, 0}, to + i, to + i, part, n.eps);
      }
      if (reads && head.fuse.weight) {
        worker.multiply(head.fuse, head.mix.weight ? &head.mix : linears, begin, fused.data(), M);
        begin = fused.data();
      }
      std::vector<T> embed(D);
      auto masked = [&](const T* from, const void* masks, int64_t m, T* to) {
        std::memcpy(to, from, D * sizeof(T));
        if (const int64_t k = ahead(m)) {
          const T* mask = static_cast<const T*>(masks) + (k - 1) * D;
          by_vectors<T>(D, [&](auto get, auto put) { put(get(from) + get(mask), to); });
        }
        return to;
      };
      if (head.mask_states) {
        for (int64_t m = 0; m < M; ++m) masked(begin + m * D, head.mask_states, m, states.data() + m * D);
        begin = states.data();
      }
      for (int64_t m = 0; m < M; ++m) {
        T* to = joined.data() + m * 2 * D;
        const T* next = head.mask_embeds ? masked(token(m), head.mask_embeds, m, embed.data()) : token(m);
        for (const auto& [how, from] : {std::pair{&head.embed_norm, next}, std::pair{&head.state_norm, begin + m * D}}) {
          if (how->weight)
            norm(*how, from, to, D, n.eps);
          else
            std::memcpy(to, from, D * sizeof(T));
          to += D;
        }
      }
      if (head.normed) begin = joined.data() + D, pitch = 2 * D;
      if (head.mix.weight) {
        worker.multiply(head.mix, linears, joined.data(), mixed.data(), M);
        inputs = begin = mixed.data(), pitch = D;
      }
    }
    worker.project(0, inputs);
    if (!head.logits) return;
    for (int64_t i = 0; i < num; ++i) {
      std::memcpy(x.data() + i * D, begin + kept[i] * pitch, D * sizeof(T));
      if (i % all == me) std::memcpy(queries.data() + i * size, shared.qkv.data() + kept[i] * row, size * sizeof(T));
    }
    barrier.wait();
    const Attention<T> a{z, queries.data(), z.T * size, size, reinterpret_cast<void*>(s.kv[0]),
                         reinterpret_cast<void*>(s.kv[1]), lengths.data(), shared.attended.data(), n.scale, block.window,
                         s.recent, n.softcap};
    worker.attend(0, a, plan, parts.data(), scratch, cross_attentions ? &head.cross_attentions->q : linears + 2, x.data(),
                  h.data());
    if (cross_attentions) {
      Scratch<T> scratch(buffers->z, buffers->plan);
      for (int64_t i = 0; i < num; ++i) norm(head.cross_norm, x.data() + i * D, joined.data() + i * D, D, n.eps);
      auto position = [&](int64_t i) { return lengths[i / z.T] + 1 + z.depth(i / z.T, i % z.T); };
      for (int64_t layer = 0; layer < head.num_cross_attentions; ++layer)
        attend_to_target(worker, head, head.cross_attentions[layer], *buffers, scratch, joined.data(), x.data(), position);
    }
    worker.feed_forward(0, num, &head.lm_head, x.data(), h.data());
    if (s.norm.weight)
      for (int64_t i = 0; i < num; ++i) norm(s.norm, x.data() + i * D, h.data() + i * D, D, n.eps);
    const std::vector<T>& after = head.norms_states ? h : x;
    for (int64_t i = share(num, me, all); head.states && i < share(num, me + 1, all); ++i)
      std::memcpy(reads ? static_cast<T*>(head.states) + i * head.P * D : state(i, true), after.data() + i * D, D * sizeof(T));
    product(head.lm_head, nullptr, s.norm.weight ? h.data() : x.data(), static_cast<T*>(head.logits), num, me, all,
            worker.rounded);
  });
}

}  // namespace sharesd
