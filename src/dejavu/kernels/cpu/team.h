// How the threads of a run share work: phases of numbered items, each done before the next begins.
//
// A thread waits for items that others have taken, never for threads: while one is off its core
// (other programs run there) the rest take its share and go on, and when it comes back it walks
// past what is done. So a busy machine costs the lost core, not a time slice a phase.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>

namespace dejavu {

enum class Fault : int { none, token_id, position, length, block, neurons };

struct alignas(64) Phase {
  std::atomic<std::ptrdiff_t> taken{0}, done{0};
};

constexpr int kMaxPhases = 2;  // of one kernel

class Worker {
 public:
  Worker(int threads, float* shared, float* local, std::atomic<Fault>* fault)
      : shared(shared), local(local), threads_(threads), fault_(fault) {}

  float* const shared;  // scratch, the same for all threads of the run
  float* const local;   // scratch, this thread's own

  // Call item(i) for i in 0..count, here or in other threads; all are done on return. Every thread
  // passes the same count. Items must not depend on each other.
  template <class Item>
  void share(std::ptrdiff_t count, Item&& item) {
    if (threads_ == 1) {
      for (std::ptrdiff_t i = 0; i < count; ++i) item(i);
      return;
    }
    std::ptrdiff_t finished = 0;
    for (std::ptrdiff_t i; (i = take(count)) < count; ++finished) item(i);
    finish(count, finished);
  }

  // Call item() in one thread; the others go on at once and may be further when it returns.
  template <class Item>
  void once(Item&& item) {
    if (threads_ == 1)
      item();
    else if (take(1) == 0)
      item();
    ++phase_;
  }

  // Call item() in one thread; until it returns the others call idle(), which tells whether it
  // found anything to do.
  template <class Item, class Idle>
  void one(Item&& item, Idle&& idle) {
    if (threads_ == 1) return item();
    const bool mine = take(1) == 0;
    if (mine) item();
    while (!mine && phase_->done.load(std::memory_order_acquire) == 0)
      if (!idle()) std::this_thread::yield();
    finish(1, mine);
  }

  int threads() const { return threads_; }
  void fail(Fault fault) { fault_->store(fault, std::memory_order_relaxed); }
  void start(Phase* phases) { phase_ = phases; }

 private:
  // Out of line: code shared by objects compiled for different instruction sets.
  std::ptrdiff_t take(std::ptrdiff_t count);
  void finish(std::ptrdiff_t count, std::ptrdiff_t finished);

  int threads_;
  Phase* phase_ = nullptr;
  std::atomic<Fault>* fault_;
};

}  // namespace dejavu
