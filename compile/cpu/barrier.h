// Barrier of a step's threads, some two hundred times a token.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace sharesd {

// Spin briefly, since the work between is short, then yield: on a busy machine the missing thread may need this very core.
// (Sleeping instead was tried: with a busy neighbour steps took a third longer.)
class Barrier {
 public:
  explicit Barrier(int64_t threads) : threads_(threads) {}

  // `counts`: long waiting means that a thread has lost its core, not that one of them waits for other things.
  void wait(bool counts = true) {
    const uint64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; spins < 2000; ++spins) {
      if (round_.load(std::memory_order_acquire) != round) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    using Clock = std::chrono::steady_clock;
    const auto since = Clock::now();
    while (round_.load(std::memory_order_acquire) == round) std::this_thread::yield();
    if (counts) lost_ += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - since).count();
  }

  // Nanoseconds lost to descheduled threads: waiting time beyond spinning, averaged over the threads that may wait.
  int64_t lost() const { return threads_ > 1 ? lost_.load() / (threads_ - 1) : 0; }

 private:
  const int64_t threads_;
  std::atomic<int64_t> arrived_{0};
  std::atomic<uint64_t> round_{0};
  std::atomic<int64_t> lost_{0};
};

}  // namespace sharesd
