// A list of kernel calls that runs in one parallel region, and the choice of the instruction set.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"

namespace dejavu {

// Tables this build has and this processor can run, the widest last.
std::vector<const KernelTable*> available_tables();

class Program {
 public:
  Program(const KernelTable& kernels, int threads) : kernels_(kernels), threads_(threads) {}

  // Append a call. `keep` owns whatever the arguments point to beyond plain memory.
  template <class Args>
  void add(const char* name, Kernel<Args> kernel, const Args& args, std::shared_ptr<void> keep) {
    const Scratch need = kernel.scratch(args);
    reserve(need);
    calls_.push_back({name, [kernel, args](Worker& worker) { kernel.run(args, worker); },
                      std::move(keep)});
  }
  void clear() { calls_.clear(); }

  // Run every call in order; `seconds`, if given, receives the time of each.
  Fault run(std::vector<double>* seconds = nullptr);

  const KernelTable& kernels() const { return kernels_; }
  int threads() const { return threads_; }
  std::vector<std::string> names() const;

 private:
  struct Call {
    const char* name;
    std::function<void(Worker&)> run;
    std::shared_ptr<void> keep;
  };
  void reserve(Scratch need);
  void work(Worker& worker, std::vector<double>* seconds);

  const KernelTable& kernels_;
  int threads_;
  std::vector<Call> calls_;
  std::vector<Phase> phases_;  // kMaxPhases a call
  std::vector<float> scratch_;
  Scratch size_;
  std::atomic<Fault> fault_{Fault::none};
  std::mutex running_;
};

// Ask the system to hold this memory in large pages now: rows picked here and there miss the TLB at
// every row otherwise (two Zen 3 cores, 10 % of the rows: 10 -> 17 GB/s int8, 17 -> 24 GB/s bf16).
// Whether it did; nothing depends on it.
bool use_large_pages(void* data, size_t bytes);

// GB/s of a streaming sum over `bytes` bytes by `threads` threads, each of `repeats` passes.
std::vector<double> read_bandwidth(const KernelTable& kernels, Size bytes, int threads,
                                   int repeats);

}  // namespace dejavu
