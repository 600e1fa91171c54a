// Outstanding reads in an io_uring, without a thread: who waits for reads looks after them.
//
// A thread of its own would take a core from a kernel in the middle of an item, and all other
// threads would wait for that item. A virtual disk tells of dozens of reads at once, so that it
// would do so for half a millisecond.
#include "flash.h"
#include "program.h"
#include "ring.h"

#ifdef DEJAVU_RING

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace dejavu {
namespace {

constexpr int kFirst = 8;    // reads that a burst begins with, so that the device begins early
constexpr int kShare = 8;    // reads that a thread looks after before others may take some
constexpr int kLooks = 100;  // at the ring before sleeping in it: waking up takes as long

class Uring : public Backend {
 public:
  explicit Uring(FlashReader& reader)
      : reader_(reader), extents_(reader.depth()), buffer_(reader.depth()),
        away_from_(reader.depth(), 0) {
    new_buffers();
    for (int slot = reader.depth() - 1; slot >= 0; --slot) {
      buffer_[slot] = place(slot);
      free_.push_back(slot);
    }
  }

  bool open() {
    if (!ring_.open((unsigned)reader_.depth())) return false;
    ring_.hold(buffers_->data, buffers_->bytes);
    return true;
  }

  ~Uring() override {  // the buffers are the kernel's until its last read is back
    uint64_t tag;
    int32_t result;
    for (int left = away_ - (int)lost_.size(); !given_up_ && left > 0 && ring_.wait();)
      while (ring_.take(&tag, &result)) --left;
  }

  void wake() override { start(reader_.depth()); }
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
          give_up();
      }
    }
    if (!count) return 0;
    start(kFirst);
    Settled reads[kShare];
    for (int i = 0; i < count; ++i) reads[i] = examine(slots[i], results[i]);
    reader_.settle(reads, count);
    release(slots, count);
    return count;
  }

 private:
  uint8_t* place(size_t slot) { return buffers_->data + slot * (size_t)reader_.max_read(); }

  void new_buffers() {
    buffers_ = std::make_unique<Aligned>((size_t)reader_.depth() * reader_.max_read());
    use_large_pages(buffers_->data, buffers_->bytes);
  }

  // Reads that came back, or that the kernel did not take: nothing of those is here.
  int take(int* slots, int32_t* results) {
    int count = 0;
    for (uint64_t tag; !given_up_ && count < kShare && ring_.take(&tag, &results[count]);
         ++count)
      slots[count] = (int)tag;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (; count < kShare && !lost_.empty(); ++count) {
      slots[count] = lost_.back();
      results[count] = 0;
      lost_.pop_back();
    }
    for (int i = 0; i < count; ++i) {
      away_from_[slots[i]] = 0;
      --extents_[slots[i]].ticket->away;
    }
    away_ -= count;
    return count;
  }

  // Starts reads that wait, so many at most. It takes 3 to 5 us a read: one thread does so at a
  // time, and others leave with it what they ask for.
  void start(int most) {
    for (int asked = asked_; asked < most && !asked_.compare_exchange_weak(asked, most);) {
    }
    while (asked_) {
      const std::unique_lock<std::mutex> pushing(pushing_, std::try_to_lock);
      if (!pushing) return;
      const int now = asked_.exchange(0);
      for (int pushed = 0, next = std::min(kFirst, now); next;) {
        const int more = push(next);
        submit();
        pushed += more;
        next = more < next ? 0 : now - pushed;
      }
    }
  }

  // One ticket's reads at a time. A virtual disk may tell of nothing before all it was given is
  // done: reads for the next layer among them would hold up this one's.
  int push(int most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    most = std::min(most, (int)free_.size());
    taken_.clear();
    reader_.take(&taken_, most, away_ ? current_ : nullptr);
    for (Extent& extent : taken_) {
      const int slot = free_.back();
      free_.pop_back();
      current_ = extent.ticket.get();
      ++away_;
      away_from_[slot] = 1;
      const int64_t offset = extent.offset, length = extent.length;
      extents_[slot] = std::move(extent);
      if (error_) {
        lost_.push_back(slot);
        continue;
      }
      ring_.push_read(reader_.file(), buffer_[slot], (uint32_t)length, offset, (uint64_t)slot);
      pushed_.push_back(slot);
    }
    return (int)taken_.size();
  }

  // Reads that the kernel does not take, now and for good, are left to those who wait for them.
  void submit() {
    if (!pushed_.empty() && !ring_.submit()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      const size_t refused = std::min<size_t>(ring_.drop(), pushed_.size());
      lost_.insert(lost_.end(), pushed_.end() - (ptrdiff_t)refused, pushed_.end());
      error_ = true;
    }
    pushed_.clear();
  }

  // Nothing more is heard of what is under way: those reads failed. Their slots get other buffers,
  // as the kernel may still write to theirs; the rest keep theirs, at which threads may look now.
  void give_up() {
    const int error = errno ? errno : EIO;
    if (given_up_) return start(reader_.depth());  // the kernel has been given nothing since
    std::vector<Extent> failed;
    {
      const std::lock_guard<std::mutex> pushing(pushing_);
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = true;
      given_up_ = std::move(buffers_);
      new_buffers();
      for (const int slot : lost_) away_from_[slot] = 0;
      for (size_t slot = 0; slot < extents_.size(); ++slot)
        if (std::exchange(away_from_[slot], 0)) {
          --extents_[slot].ticket->away;
          --away_;
          failed.push_back(std::move(extents_[slot]));
          buffer_[slot] = place(slot);
          free_.push_back((int)slot);
        }
      for (const int slot : lost_) away_from_[slot] = 1;
    }
    for (const Extent& extent : failed) reader_.finish(extent, nullptr, 0, error);
    start(reader_.depth());
  }

  Settled examine(int slot, int32_t result) {
    Extent extent = std::move(extents_[slot]);
    int64_t got = result;
    // The kernel may return part of a read, or want it repeated; the end of the file is another
    // matter, and a second attempt tells them apart.
    if (got == -EAGAIN || got == -EINTR) got = 0;
    if (got >= 0 && got < extent.needed) {
      const int64_t more = read_fully(reader_.file(), buffer_[slot] + got, extent.length - got,
                                      extent.offset + got);
      if (more >= 0)
        got += more;
      else if (more != -EINVAL || got == 0)
        got = more;
    }
    const int error = got < 0 ? (int)-got : 0;
    got = std::max<int64_t>(got, 0);
    const Outcome outcome = reader_.examine(extent, buffer_[slot], got, error);
    return {std::move(extent), got, outcome};
  }

  void release(const int* slots, int count) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      free_.insert(free_.end(), slots, slots + count);
    }
    start(kFirst);
  }

  FlashReader& reader_;
  std::vector<Extent> extents_;   // by slot
  std::vector<uint8_t*> buffer_;  // by slot
  std::unique_ptr<Aligned> buffers_;
  std::unique_ptr<Aligned> given_up_;  // that the kernel may write to; guarded by taking_
  Ring ring_;
  std::mutex taking_;   // what came back from the ring
  std::mutex pushing_;  // what goes in, pushed_ and taken_; taken before mutex_
  std::atomic<int> asked_{0};  // of start, not done yet
  std::vector<int> pushed_;  // slots, since the last submit
  std::vector<Extent> taken_;
  std::mutex mutex_;  // of what follows
  std::vector<char> away_from_;  // by slot: its read is not back
  std::vector<int> free_, lost_;  // lost_: slots whose reads the kernel did not take
  int away_ = 0;                  // slots whose reads are not back
  std::atomic<bool> error_{false};  // the ring is of no use any more
  const Ticket* current_ = nullptr;  // whose the reads away are
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
