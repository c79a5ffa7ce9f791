// Functions for sampling and drafting that Python calls.
#include "suffix_search.h"
#include "tree_expand.h"
#include "noise.h"
#include "top_p.h"
#include "kv_compact.h"
#include "topk.h"
#include "tree_verify.h"
#include "tree_rescore.h"
#include "finite_rows.h"

#define EXPORT(NAME)                                                                                                   \
  extern "C" void arg_max_##NAME(const sharesd::names::NAME* x, int64_t* out, int64_t R, int64_t V, int64_t threads) {  \
    sharesd::arg_max(x, out, R, V, static_cast<int>(threads));                                                         \
  }                                                                                                                    \
  extern "C" void count_finite_##NAME(const sharesd::names::NAME* x, const int64_t* path, const int64_t* num_new,       \
                                      int64_t* out, int64_t B, int64_t path_stride, int64_t num_stride, int64_t x_b,    \
                                      int64_t x_t, int64_t V, int64_t threads) {                                       \
    sharesd::count_finite(x, path, num_new, out, B, path_stride, num_stride, x_b, x_t, V, static_cast<int>(threads));   \
  }                                                                                                                    \
  extern "C" void top_k_##NAME(const sharesd::names::NAME* x, int64_t* out, int64_t R, int64_t V, int64_t k,            \
                               int64_t threads) {                                                                      \
    sharesd::top_k(x, out, R, V, k, static_cast<int>(threads));                                                        \
  }                                                                                                                    \
  extern "C" void top_logp_##NAME(const sharesd::names::NAME* x, int64_t* out,                                          \
                                  sharesd::Wide<sharesd::names::NAME>::type* logp, int64_t R, int64_t V, int64_t k,     \
                                  int64_t threads) {                                                                   \
    sharesd::top_logp(x, out, logp, R, V, k, static_cast<int>(threads));                                               \
  }                                                                                                                    \
  extern "C" void sample_##NAME(const sharesd::names::NAME* x, const double* temperature, const double* has_noise,     \
                                const int64_t* seeds, const int64_t* places, const int64_t* multipliers,               \
                                const int64_t* salts, int64_t num_salts, int64_t J, const int64_t* ids, int64_t* out,   \
                                int64_t R, int64_t V, int64_t threads) {                                               \
    sharesd::sample(x, temperature, has_noise, seeds, places, {multipliers, salts, num_salts}, J, ids, out, R, V,      \
                    static_cast<int>(threads));                                                                        \
  }
EXPORT(bfloat16)
EXPORT(float16)
EXPORT(float32)
EXPORT(float64)

extern "C" void top_p_float32(const float* x, const double* p, float* out, int64_t R, int64_t V, int64_t threads) {
  sharesd::top_p(x, p, out, R, V, static_cast<int>(threads));
}

extern "C" void top_p_float64(const double* x, const double* p, double* out, int64_t R, int64_t V, int64_t threads) {
  sharesd::top_p(x, p, out, R, V, static_cast<int>(threads));
}

extern "C" void gumbel_float32(const int64_t* seeds, const int64_t* places, const int64_t* multipliers, const int64_t* salts,
                               int64_t num_salts, int64_t J, const int64_t* ids, float* out, int64_t R, int64_t V,
                               int64_t threads) {
  sharesd::gumbel(seeds, places, {multipliers, salts, num_salts}, J, ids, out, R, V, static_cast<int>(threads));
}

extern "C" void accept_path_int64(const int64_t* tokens, const int64_t* depth, const int64_t* path, const int64_t* target,
                           int64_t* out, int64_t B, int64_t T, int64_t P) {
  sharesd::accept_path(tokens, depth, path, target, out, B, T, P);
}

// Writes root and the first num_new tokens of each row with new ones from place at on, as far as its text [S] goes.
extern "C" void append_tokens_int64(int64_t* text, const int64_t* root, const int64_t* at, const int64_t* num_new,
                                    const int64_t* tokens, int64_t B, int64_t S, int64_t text_b, int64_t tokens_b) {
  for (int64_t b = 0; b < B; ++b) {
    int64_t* const to = text + b * text_b;
    if (num_new[b] > 0) to[at[b]] = root[b];
    for (int64_t t = 0; t < num_new[b] && at[b] + 1 + t < S; ++t) to[at[b] + 1 + t] = tokens[b * tokens_b + t];
  }
}

extern "C" void expand_tree_int64(int64_t* levels, const sharesd::Nodes* nodes, const sharesd::Frontier* frontier,
                                  const int64_t* tokens, const float* logp, int64_t B, int64_t F, int64_t k, int64_t C,
                                  int64_t D) {
  sharesd::expand_tree(levels, *nodes, *frontier, tokens, logp, B, F, k, C, D);
}

extern "C" void select_nodes_int64(const int64_t* wanted, int64_t k, const sharesd::Nodes* nodes, const sharesd::Draft* draft,
                             int64_t B, int64_t C, int64_t D, int64_t N) {
  sharesd::select_nodes(*wanted, k, *nodes, *draft, B, C, D, N);
}

extern "C" void rescore_children_float32(const int64_t* levels, const float* calibrated_probs, float* draft_probs, float* logp,
                                         int64_t R, int64_t B, int64_t F, int64_t k, int64_t C, double spread) {
  sharesd::rescore_children(levels, calibrated_probs, draft_probs, logp, R, B, F, k, C, static_cast<float>(spread));
}

extern "C" void best_nodes_float32(const sharesd::Nodes* nodes, const float* draft_probs, float* best_draft_probs,
                                   float* accept_probs, int64_t* parents, int64_t k, int64_t B, int64_t C, int64_t D,
                                   int64_t N) {
  sharesd::best_nodes(*nodes, draft_probs, best_draft_probs, accept_probs, parents, k, B, C, D, N);
}

extern "C" void compact_slots_int64(char* places, const int64_t* lengths, const int64_t* path, const int64_t* num, int64_t B,
                                  int64_t S, int64_t T, int64_t bytes) {
  sharesd::compact_slots(places, lengths, path, num, B, S, T, bytes);
}

extern "C" void find_suffixes_int32(const uint8_t* backward, const uint8_t* order, const int32_t* wanted, int64_t n, int64_t N,
                           int64_t most, int64_t* out) {
  sharesd::find_suffixes({backward, order, N}, wanted, n, most, out);
}
