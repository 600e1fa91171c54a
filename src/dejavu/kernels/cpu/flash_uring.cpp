// Outstanding reads in an io_uring, without a thread: who waits for reads looks after them.
//
// A thread of its own would take a core from a kernel in the middle of an item, and all other
// threads would wait for that item. A virtual disk tells of dozens of reads at once, so that it
// would do so for half a millisecond.
#include "flash.h"
#include "program.h"
#include "ring.h"

#ifdef DEJAVU_RING

#include <cerrno>
#include <thread>

namespace dejavu {
namespace {

constexpr int kFirst = 8;     // reads that a burst begins with, so that the device begins early
constexpr int kShare = 8;     // reads that a thread looks after before others may take some
constexpr int kLooks = 100;  // at the ring before sleeping in it: waking up takes as long

class Uring : public Backend {
 public:
  explicit Uring(FlashReader& reader)
      : reader_(reader), extents_(reader.depth()),
        buffers_((size_t)reader.depth() * reader.max_read()) {
    use_large_pages(buffers_.data, buffers_.bytes);
    for (int slot = reader.depth() - 1; slot >= 0; --slot) free_.push_back(slot);
  }

  bool open() { return ring_.open((unsigned)reader_.depth()); }

  ~Uring() override {  // the buffers are the kernel's until its last read is back
    uint64_t tag;
    int32_t result;
    for (int left = under_way_; left > 0 && ring_.wait();)
      while (ring_.take(&tag, &result)) --left;
  }

  void wake() override { start(); }
  const char* name() const override { return "io_uring"; }

  int reap(const Ticket* until) override {
    int32_t results[kShare];
    int slots[kShare], count = 0;
    {
      std::unique_lock<std::mutex> taking(taking_, std::defer_lock);
      if (until)
        taking.lock();
      else if (!taking.try_lock())
        return 0;
      count = take(slots, results);
      for (int looks = 0; until && !count && until->away; count = take(slots, results)) {
        if (looks++ < kLooks)
          std::this_thread::yield();
        else if (!ring_.wait())
          return 0;
      }
    }
    if (count) start(count);
    for (int i = 0; i < count; ++i) finish(slots[i], results[i]);
    release(slots, count);
    return count;
  }

 private:
  uint8_t* buffer(int slot) { return buffers_.data + (size_t)slot * reader_.max_read(); }

  int take(int* slots, int32_t* results) {
    int count = 0;
    for (uint64_t tag; count < kShare && ring_.take(&tag, &results[count]); ++count) {
      slots[count] = (int)tag;
      --extents_[tag].ticket->away;
    }
    return count;
  }

  // One ticket's reads at a time. A virtual disk may tell of nothing before all it was given is
  // done: reads for the next layer among them would hold up this one's. back: reads that are.
  void start(int back = 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    away_ -= back;
    Extent extent;
    int pushed = 0;
    while (!free_.empty() && reader_.take(&extent, away_ ? current_ : nullptr)) {
      const int slot = free_.back();
      free_.pop_back();
      current_ = extent.ticket.get();
      ring_.push_read(reader_.file(), buffer(slot), (uint32_t)extent.length, extent.offset,
                      (uint64_t)slot);
      extents_[slot] = std::move(extent);
      ++under_way_;
      ++away_;
      if (++pushed == kFirst) ring_.submit();
    }
    ring_.submit();
  }

  void finish(int slot, int32_t result) {
    const Extent extent = std::move(extents_[slot]);
    int64_t got = result;
    // The kernel may return part of a read, or want it repeated; the end of the file is another
    // matter, and a second attempt tells them apart.
    if (got == -EAGAIN || got == -EINTR) got = 0;
    if (got >= 0 && got < extent.needed) {
      const int64_t more = read_fully(reader_.file(), buffer(slot) + got, extent.length - got,
                                      extent.offset + got);
      if (more >= 0)
        got += more;
      else if (more != -EINVAL || got == 0)
        got = more;
    }
    reader_.finish(extent, buffer(slot), got < 0 ? 0 : got, got < 0 ? (int)-got : 0);
  }

  void release(const int* slots, int count) {
    if (!count) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      free_.insert(free_.end(), slots, slots + count);
      under_way_ -= count;
    }
    start();
  }

  FlashReader& reader_;
  std::vector<Extent> extents_;  // by slot
  Aligned buffers_;
  Ring ring_;
  std::mutex taking_;  // what came back from the ring
  std::mutex mutex_;   // of what goes in, and of what follows
  std::vector<int> free_;
  int under_way_ = 0;  // slots that are not free
  int away_ = 0;       // of them, reads that are not back
  const Ticket* current_ = nullptr;  // whose they are
};

}  // namespace

std::unique_ptr<Backend> make_uring(FlashReader& reader) {
  auto backend = std::make_unique<Uring>(reader);
  if (!backend->open()) return nullptr;
  return backend;
}

}  // namespace dejavu

#else

namespace dejavu {

std::unique_ptr<Backend> make_uring(FlashReader&) { return nullptr; }

}  // namespace dejavu

#endif
