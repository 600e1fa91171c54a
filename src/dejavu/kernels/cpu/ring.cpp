#include "ring.h"

#ifdef DEJAVU_RING

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

namespace dejavu {
namespace {

#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)  // Linux 5.19; older ones refuse it
#endif

constexpr int kAttempts = 10000;  // of a kernel that is short of memory

int enter(int ring, unsigned submit, unsigned complete, unsigned flags) {
  return (int)syscall(__NR_io_uring_enter, ring, submit, complete, flags, nullptr, 0);
}

void* map(int ring, size_t bytes, off_t what) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
  return found == MAP_FAILED ? nullptr : found;
}

bool can_read(int ring) {
  constexpr unsigned kOps = 64;
  std::vector<char> memory(sizeof(io_uring_probe) + kOps * sizeof(io_uring_probe_op), 0);
  auto* probe = (io_uring_probe*)memory.data();
  if (syscall(__NR_io_uring_register, ring, IORING_REGISTER_PROBE, probe, kOps) != 0) return false;
  return probe->last_op >= IORING_OP_READ &&
         (probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED);
}

}  // namespace

bool Ring::open(unsigned entries) {
  io_uring_params p;
  // A read that is back would interrupt the thread that started it, each by itself: 5 us a read in
  // the disk's interrupt, before which the disk is given nothing new. Instead it is noted when that
  // thread enters the kernel next, and a thread that waits does so all the time.
  for (const unsigned flags : {IORING_SETUP_COOP_TASKRUN, 0U}) {
    std::memset(&p, 0, sizeof p);
    p.flags = flags;
    file_ = (int)syscall(__NR_io_uring_setup, entries, &p);
    if (file_ >= 0) break;
  }
  // One mapping for both rings and polling for space are as old as the reads themselves.
  if (file_ < 0 || !(p.features & IORING_FEAT_SINGLE_MMAP) || !can_read(file_)) return false;
  const size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
  const size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe);
  submissions_bytes_ = sq > cq ? sq : cq;
  entries_bytes_ = p.sq_entries * sizeof(io_uring_sqe);
  submissions_ = map(file_, submissions_bytes_, IORING_OFF_SQ_RING);
  entries_ = map(file_, entries_bytes_, IORING_OFF_SQES);
  if (!submissions_ || !entries_) return false;
  char* base = (char*)submissions_;
  sq_tail_ = (unsigned*)(base + p.sq_off.tail);
  sq_array_ = (unsigned*)(base + p.sq_off.array);
  sq_mask_ = *(unsigned*)(base + p.sq_off.ring_mask);
  cq_head_ = (unsigned*)(base + p.cq_off.head);
  cq_tail_ = (unsigned*)(base + p.cq_off.tail);
  cq_mask_ = *(unsigned*)(base + p.cq_off.ring_mask);
  done_ = (io_uring_cqe*)(base + p.cq_off.cqes);
  tail_ = *sq_tail_;
  return true;
}

Ring::~Ring() {
  if (submissions_) munmap(submissions_, submissions_bytes_);
  if (entries_) munmap(entries_, entries_bytes_);
  if (file_ >= 0) close(file_);
}

void Ring::hold(void* memory, size_t bytes) {
  const iovec buffer = {memory, bytes};
  if (syscall(__NR_io_uring_register, file_, IORING_REGISTER_BUFFERS, &buffer, 1) != 0) return;
  held_ = (const char*)memory;
  held_end_ = held_ + bytes;
}

io_uring_sqe* Ring::next() {
  const unsigned at = tail_ & sq_mask_;
  io_uring_sqe* entry = (io_uring_sqe*)entries_ + at;
  std::memset(entry, 0, sizeof *entry);
  sq_array_[at] = at;
  ++tail_;
  ++pushed_;
  return entry;
}

void Ring::push_read(int file, void* to, uint32_t length, int64_t offset, uint64_t tag) {
  io_uring_sqe* entry = next();
  const bool held = to >= held_ && (const char*)to + length <= held_end_;
  entry->opcode = held ? IORING_OP_READ_FIXED : IORING_OP_READ;  // of buffer 0
  entry->fd = file;
  entry->addr = (uint64_t)(uintptr_t)to;
  entry->len = length;
  entry->off = (uint64_t)offset;
  entry->user_data = tag;
}

bool Ring::submit() {
  __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
  for (int attempts = 0; pushed_; ++attempts) {
    const int taken = enter(file_, pushed_, 0, 0);
    if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) return false;
    if (taken > 0) {
      pushed_ -= (unsigned)taken;
      attempts = 0;
    } else if (attempts > kAttempts) {
      return false;
    } else {
      std::this_thread::yield();
    }
  }
  return true;
}

unsigned Ring::drop() { return std::exchange(pushed_, 0); }

bool Ring::wait(unsigned least) {
  while (enter(file_, 0, least, IORING_ENTER_GETEVENTS) < 0)
    if (errno != EINTR && errno != EAGAIN && errno != EBUSY) return false;
  return true;
}

bool Ring::take(uint64_t* tag, int32_t* result) {
  const unsigned head = *cq_head_;
  if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
  const io_uring_cqe& done = done_[head & cq_mask_];
  *tag = done.user_data;
  *result = done.res;
  __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

}  // namespace dejavu

#endif
