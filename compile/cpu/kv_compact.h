// Compaction of slots next to keys and values: see compile/kv_compact.py.
#pragma once
#include <cstdint>
#include <cstring>

namespace sharesd {

// Rows after lengths [B] on an ascending path [B, T] become the first `num` [B]; a row is `bytes` long.
inline void compact_slots(char* places, const int64_t* lengths, const int64_t* path, const int64_t* num, int64_t B, int64_t S,
                        int64_t T, int64_t bytes) {
  for (int64_t b = 0; b < B; ++b) {
    char* first = places + (b * S + lengths[b]) * bytes;
    for (int64_t t = 0; t < num[b]; ++t)
      if (path[b * T + t] != t) std::memcpy(first + t * bytes, first + path[b * T + t] * bytes, bytes);
  }
}

}  // namespace sharesd
