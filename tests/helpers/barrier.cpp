// A stress of the barrier at which the threads of the kernels meet: whoever passes sees what all others wrote before it.
// Exits with 1 where that fails; scripts/sanitize.sh has ThreadSanitizer look at it too.
#include "../compile/cpu/decoder_stack.h"

#include <cstdio>
#include <vector>

int main() {
  constexpr int64_t rounds = 5000;
  for (int64_t all : {1, 2, 3, 7}) {
    sharesd::Barrier barrier(all);
    std::vector<int64_t> written(all, 0);  // plain memory: only the barrier orders it
    std::atomic<int64_t> wrong{0};
    auto work = [&](int64_t me) {
      for (int64_t round = 1; round <= rounds; ++round) {
        written[me] = round;
        barrier.wait();
        for (int64_t other = 0; other < all; ++other) wrong += written[other] != round;
        barrier.wait();
      }
    };
    std::vector<std::thread> threads;
    for (int64_t me = 0; me < all; ++me) threads.emplace_back(work, me);
    for (auto& thread : threads) thread.join();
    if (wrong) {
      std::printf("%lld threads: %lld reads of old values\n", static_cast<long long>(all), static_cast<long long>(wrong));
      return 1;
    }
  }
  std::puts("barrier: all threads see what the others wrote");
}
