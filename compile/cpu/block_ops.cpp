// Functions for weights of GGUF files, of all types and for every dtype of a model. block_sums is called by those of models.
#include "block_linear.h"

extern "C" void block_sums_uint8(const sharesd::BlockRows& x, const uint8_t* w, int64_t type, int64_t K, int64_t num,
                                 float* sums) {
  sharesd::block_sums(x, w, type, K, num, sums);
}

extern "C" void repack_blocks_uint8(const uint8_t* raw, int64_t pitch, int64_t rows, int64_t K, int64_t* type, uint8_t* to,
                                    int64_t* finite, int64_t threads) {
  *finite = sharesd::repack_blocks(raw, pitch, rows, K, *type, to, static_cast<int>(threads));
}

#define EXPORT(NAME)                                                                                              \
  extern "C" void decode_rows_##NAME(const int64_t* rows, int64_t num, const uint8_t* weight,                     \
                                     const sharesd::BlockTable* table, int64_t K, sharesd::names::NAME* to,       \
                                     int64_t threads) {                                                           \
    sharesd::decode_block_rows(rows, num, weight, *table, K, to, static_cast<int>(threads));                      \
  }
EXPORT(bfloat16)
EXPORT(float16)
EXPORT(float32)
EXPORT(float64)
