#include "flash_rate.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#include "flash.h"
#include "ring.h"

namespace dejavu {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Job {
  int file;
  const int64_t* offsets;
  int64_t count, size;
  int depth;
  double seconds;
  int batch;  // reads that end before new ones are started
};

// Number of reads, or -errno.
int64_t with_threads(const Job& job, Clock::time_point start) {
  std::atomic<int64_t> next{0}, reads{0};
  std::atomic<int> fault{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < job.depth; ++i)
    threads.emplace_back([&] {
      const Aligned buffer((size_t)job.size);
      while (since(start) < job.seconds && !fault) {
        const int64_t offset = job.offsets[next++ % job.count];
        const int64_t got = read_fully(job.file, buffer.data, job.size, offset);
        if (got < job.size) fault = got < 0 ? (int)-got : EIO;
        ++reads;
      }
    });
  for (std::thread& thread : threads) thread.join();
  return fault ? -fault : reads.load();
}

#ifdef DEJAVU_RING
int64_t with_ring(Ring& ring, const Job& job, Clock::time_point start) {
  const Aligned buffers((size_t)(job.depth * job.size));
  ring.hold(buffers.data, buffers.bytes);
  int64_t next = 0, reads = 0, under_way = 0;
  int fault = 0;
  const auto push = [&](uint64_t slot) {
    ring.push_read(job.file, buffers.data + slot * job.size, (uint32_t)job.size,
                   job.offsets[next++ % job.count], slot);
    ++under_way;
  };
  for (int slot = 0; slot < job.depth; ++slot) push(slot);
  if (!ring.submit()) return -EIO;
  while (under_way) {
    if (!ring.wait((unsigned)std::min<int64_t>(job.batch, under_way))) return -EIO;
    const bool more = since(start) < job.seconds && !fault;
    uint64_t slot;
    int32_t result;
    while (ring.take(&slot, &result)) {
      --under_way;
      ++reads;
      if (result < job.size) fault = result < 0 ? -result : EIO;
      if (more) push(slot);
    }
    if (!ring.submit()) return -EIO;
  }
  return fault ? -fault : reads;
}
#endif

}  // namespace

Rate read_rate(const std::string& path, const int64_t* offsets, int64_t count, int64_t size,
               int depth, bool direct, bool uring, double seconds, int batch) {
  int file = -1;
#ifdef O_DIRECT
  if (direct) file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
#endif
  if (file < 0) {
    direct = false;
    file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  }
  if (file < 0) throw std::system_error(errno, std::generic_category(), path);
  const Job job = {file, offsets, count, size, depth, seconds, batch};
  const auto start = Clock::now();
  int64_t reads;
#ifdef DEJAVU_RING
  Ring ring;
  if (uring && ring.open((unsigned)depth))
    reads = with_ring(ring, job, start);
  else
#endif
    reads = with_threads(job, start);
  const double took = since(start);
  close(file);
  if (reads < 0) throw std::system_error((int)-reads, std::generic_category(), path);
  return {reads, took, direct};
}

}  // namespace dejavu
