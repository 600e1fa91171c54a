#include "team.h"

#include <thread>

namespace dejavu {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// An item takes microseconds, a switch of threads about as long: spin for some items' time, then
// let others have the core (it may be the thread we wait for).
constexpr int kSpins = 4000;

}  // namespace

std::ptrdiff_t Worker::take(std::ptrdiff_t count) {
  // Look before adding: latecomers should not fight over a line that says "nothing left".
  if (phase_->taken.load(std::memory_order_relaxed) >= count) return count;
  return phase_->taken.fetch_add(1, std::memory_order_relaxed);
}

void Worker::finish(std::ptrdiff_t count, std::ptrdiff_t finished) {
  if (finished) phase_->done.fetch_add(finished, std::memory_order_release);
  for (int spins = 0; phase_->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins < kSpins)
      relax();
    else
      std::this_thread::yield();
  }
  ++phase_;
}

}  // namespace dejavu
