// Outstanding reads in an io_uring: submitted by whoever asks, finished by one thread.
#include "flash.h"
#include "ring.h"

#ifdef DEJAVU_RING

#include <algorithm>
#include <cerrno>
#include <thread>

namespace dejavu {
namespace {

constexpr uint64_t kStop = ~0ull;
constexpr int kShare = 4;
// Reads finished before new ones are started: fewer system calls, interrupts and messages to a
// virtual disk (two cores, 8 KiB, 32 outstanding: a third more reads a second than one by one).
constexpr int kRefill = 8;

class Uring : public Backend {
 public:
  explicit Uring(FlashReader& reader)
      : reader_(reader), extents_(reader.depth()),
        buffers_((size_t)reader.depth() * reader.max_read()) {
    for (int slot = reader.depth() - 1; slot >= 0; --slot) free_.push_back(slot);
  }

  bool open() {
    if (!ring_.open((unsigned)reader_.depth() + 1)) return false;
    thread_ = std::thread([this] { reap(); });
    return true;
  }

  ~Uring() override {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ring_.push_nothing(kStop);
      ring_.submit();
    }
    thread_.join();
  }

  void wake() override { start(); }
  const char* name() const override { return "io_uring"; }

 private:
  uint8_t* buffer(int slot) { return buffers_.data + (size_t)slot * reader_.max_read(); }

  void start() {
    const std::lock_guard<std::mutex> lock(mutex_);
    Extent extent;
    while (!free_.empty() && reader_.take(&extent)) {
      const int slot = free_.back();
      free_.pop_back();
      ring_.push_read(reader_.file(), buffer(slot), (uint32_t)extent.length, extent.offset,
                      (uint64_t)slot);
      extents_[slot] = std::move(extent);
      ++under_way_;
    }
    ring_.submit();
  }

  void reap() {
    bool stop = false;
    std::vector<int> finished;
    while (true) {
      int under_way;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (stop && !under_way_) return;
        under_way = under_way_;
      }
      // Not for more than a share of them, or the device would run dry meanwhile.
      if (!ring_.wait((unsigned)std::clamp(under_way / kShare, 1, kRefill))) return;
      uint64_t tag;
      int32_t result;
      while (ring_.take(&tag, &result)) {
        if (tag == kStop) {
          stop = true;
          continue;
        }
        finish((int)tag, result);
        finished.push_back((int)tag);
        if (finished.size() == kRefill) release(&finished);
      }
      release(&finished);
    }
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

  void release(std::vector<int>* slots) {
    if (slots->empty()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      free_.insert(free_.end(), slots->begin(), slots->end());
      under_way_ -= (int)slots->size();
    }
    slots->clear();
    start();
  }

  FlashReader& reader_;
  std::vector<Extent> extents_;  // by slot
  Aligned buffers_;
  Ring ring_;
  std::mutex mutex_;  // of the ring's submissions and of what follows
  std::vector<int> free_;
  int under_way_ = 0;
  std::thread thread_;
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
