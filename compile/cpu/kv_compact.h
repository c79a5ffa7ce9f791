// What is kept beside keys and values for each place of a text moves with these: what compile/kv_compact.py describes.
#pragma once
#include <cstdint>
#include <cstring>

namespace sharesd {

// Of the rows behind lengths [B] those of an ascending path [B, T] become the first `num` [B] ones; a row is so many bytes.
inline void keep_places(char* places, const int64_t* lengths, const int64_t* path, const int64_t* num, int64_t B, int64_t S,
                        int64_t T, int64_t bytes) {
  for (int64_t b = 0; b < B; ++b) {
    char* first = places + (b * S + lengths[b]) * bytes;
    for (int64_t t = 0; t < num[b]; ++t)
      if (path[b * T + t] != t) std::memcpy(first + t * bytes, first + path[b * T + t] * bytes, bytes);
  }
}

}  // namespace sharesd
