// Quantizing to blocks of GGUF files, from numbers of any stored type.
#include "block_quantize.h"

#define EXPORT(NAME)                                                                                                  \
  extern "C" void quantize_blocks_##NAME(const sharesd::names::NAME* x, int64_t pitch, int64_t rows, int64_t K,       \
                                         int64_t type, int64_t inputs, int64_t bytes, uint8_t* to, int64_t* wrong,    \
                                         int64_t threads) {                                                           \
    *wrong = sharesd::quantize_rows(x, pitch, rows, K, type, inputs, bytes, to, static_cast<int>(threads));           \
  }
EXPORT(bfloat16)
EXPORT(float16)
EXPORT(float32)
