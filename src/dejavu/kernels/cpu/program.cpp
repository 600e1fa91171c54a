#include "program.h"

#include <omp.h>

#include <chrono>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace dejavu {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr Size kFloatsOfLine = 16;
constexpr size_t kLargePage = size_t{2} << 20;

Size whole_lines(Size floats) {
  return (floats + kFloatsOfLine - 1) / kFloatsOfLine * kFloatsOfLine;
}

}  // namespace

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables = {&portable::table()};
#ifdef DEJAVU_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    tables.push_back(&avx2::table());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    tables.push_back(&avx512::table());
#endif
  return tables;
}

std::vector<std::string> Program::names() const {
  std::vector<std::string> names;
  for (const Call& call : calls_) names.push_back(call.name);
  return names;
}

void Program::reserve(Scratch need) {
  // A spare line a thread keeps neighbours' writes out of each other's cache lines.
  const Size shared = whole_lines(need.shared), local = whole_lines(need.local) + kFloatsOfLine;
  if (shared > size_.shared) size_.shared = shared;
  if (local > size_.local) size_.local = local;
  const size_t total = (size_t)(size_.shared + threads_ * size_.local + kFloatsOfLine);
  if (total > scratch_.size()) scratch_.resize(total);
}

void Program::work(Worker& worker, std::vector<double>* seconds) {
  for (size_t i = 0; i < calls_.size(); ++i) {
    const auto start = seconds ? Clock::now() : Clock::time_point();
    worker.start(phases_.data() + i * kMaxPhases);
    calls_[i].run(worker);
    if (seconds) (*seconds)[i] = seconds_since(start);
    // Neurons that did not come have no addresses. Every thread is past that call and sees it.
    if (fault_.load(std::memory_order_relaxed) == Fault::neurons) return;
  }
}

Fault Program::run(std::vector<double>* seconds) {
  const std::lock_guard<std::mutex> alone(running_);
  if (seconds) seconds->assign(calls_.size(), 0.0);
  const auto address = (uintptr_t)scratch_.data();
  float* shared = (float*)((address + 63) / 64 * 64);
  float* local = shared + size_.shared;
  if (threads_ == 1) {
    Worker worker(1, shared, local, &fault_);
    work(worker, seconds);
  } else {
    if (phases_.size() != calls_.size() * kMaxPhases)
      phases_ = std::vector<Phase>(calls_.size() * kMaxPhases);
    for (Phase& phase : phases_) {
      phase.taken.store(0, std::memory_order_relaxed);
      phase.done.store(0, std::memory_order_relaxed);
    }
#pragma omp parallel num_threads(threads_)
    {
      const int index = omp_get_thread_num();
      Worker worker(omp_get_num_threads(), shared, local + index * size_.local, &fault_);
      work(worker, index == 0 ? seconds : nullptr);
    }
  }
  return fault_.exchange(Fault::none);
}

bool use_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
#ifndef MADV_COLLAPSE
  constexpr int MADV_COLLAPSE = 25;  // Linux 6.1; older ones refuse it
#endif
  const uintptr_t first = ((uintptr_t)data + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t last = ((uintptr_t)data + bytes) / kLargePage * kLargePage;
  if (first >= last) return false;
  madvise((void*)first, last - first, MADV_HUGEPAGE);
  return madvise((void*)first, last - first, MADV_COLLAPSE) == 0;
#else
  return false;
#endif
}

std::vector<double> read_bandwidth(const KernelTable& kernels, Size bytes, int threads,
                                   int repeats) {
  const size_t size = ((size_t)bytes + kLargePage - 1) / kLargePage * kLargePage;
  std::unique_ptr<float, void (*)(void*)> data((float*)std::aligned_alloc(kLargePage, size),
                                               std::free);
  if (!data) throw std::bad_alloc();
#if defined(__linux__)
  // Large pages, where the system grants them: the limit is that of the memory, not of the TLB.
  madvise(data.get(), size, MADV_HUGEPAGE);
#endif
  const Size floats = (Size)(size / sizeof(float));
  std::vector<double> rates;
  volatile float sink = 0;
#pragma omp parallel num_threads(threads)
  {
    const Size first = floats / 16 * omp_get_thread_num() / omp_get_num_threads() * 16;
    const Size last = floats / 16 * (omp_get_thread_num() + 1) / omp_get_num_threads() * 16;
    for (Size i = first; i < last; ++i) data.get()[i] = 1.0f;
    for (int pass = 0; pass < repeats; ++pass) {
      Clock::time_point start;
#pragma omp barrier
#pragma omp master
      start = Clock::now();
      const float sum = kernels.stream_sum(data.get() + first, last - first);
#pragma omp critical
      sink = sink + sum;
#pragma omp barrier
#pragma omp master
      rates.push_back((double)size / seconds_since(start) / 1e9);
    }
  }
  return rates;
}

}  // namespace dejavu
