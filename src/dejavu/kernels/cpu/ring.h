// io_uring by its three system calls, for reads: no library is needed, and where the kernel or a
// sandbox refuses, open() says so and something else must do. See io_uring(7).
#pragma once

#ifdef __linux__
#include <sys/syscall.h>
#endif
#if defined(__linux__) && defined(__NR_io_uring_setup) && __has_include(<linux/io_uring.h>)
#define DEJAVU_RING 1
#include <linux/io_uring.h>
#endif

#include <cstddef>
#include <cstdint>

namespace dejavu {

#ifdef DEJAVU_RING
class Ring {  // one thread at a time may push and submit, one (perhaps another) may take
 public:
  Ring() = default;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  bool open(unsigned entries);  // false where reads by io_uring are not to be had
  // Reads into this memory need not look its pages up any more, where the kernel grants that. It
  // takes the memory now, all of it, and has it until the ring is gone.
  void hold(void* memory, size_t bytes);
  // At most `entries` between two calls of submit.
  void push_read(int file, void* to, uint32_t length, int64_t offset, uint64_t tag);
  bool submit();            // what was pushed; false: the kernel does not take it, see drop()
  unsigned drop();          // forget what was pushed last and not taken; how many
  bool wait(unsigned least = 1);  // until so much is done; false: interrupted for good
  bool take(uint64_t* tag, int32_t* result);  // something done; result: bytes or -errno

 private:
  io_uring_sqe* next();

  int file_ = -1;
  unsigned pushed_ = 0, tail_ = 0;
  const char *held_ = nullptr, *held_end_ = nullptr;
  void *submissions_ = nullptr, *entries_ = nullptr;
  size_t submissions_bytes_ = 0, entries_bytes_ = 0;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* done_ = nullptr;
};
#endif

}  // namespace dejavu
