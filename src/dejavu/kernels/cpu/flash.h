// Reading records of a file with many reads outstanding, past the page cache, every block checked.
//
// What is wanted is sorted by offset; neighbours become one read. A read lands in a bounce buffer
// of the reader's own, aligned as O_DIRECT asks; its blocks are compared with their checksums, and
// only then are records copied to where they are wanted. So a destination needs no alignment and
// never holds a byte that was not checked.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dejavu {

struct Stamp {  // of a file: changes when it is replaced or written to
  uint64_t device, inode;
  int64_t size, modified_ns;
  bool operator==(const Stamp& o) const {
    return device == o.device && inode == o.inode && size == o.size && modified_ns == o.modified_ns;
  }
};

struct Blocks {  // `count` blocks of `size` bytes from `start` on, with their CRC-32C
  int64_t start, size, count;
  const uint32_t* checksums;  // kept alive by the caller
};

enum class FlashFault : int { none, io, short_read, checksum, replaced };

struct Outcome {
  FlashFault fault = FlashFault::none;
  int error = 0;       // errno of io
  int64_t offset = 0;  // in the file, of the record concerned
};

struct Counters {
  int64_t bytes_wanted = 0, bytes_read = 0, reads = 0, requests = 0;
  double busy_seconds = 0;  // at least one read was outstanding
  double wait_seconds = 0;  // a caller stood still in wait
  double depth_seconds = 0; // integral over time of the reads outstanding, `depth` at most
};

struct Wanted {
  int64_t offset, length;
  uint8_t* to;
};

struct Ticket {
  std::vector<Wanted> wanted;  // ascending
  size_t reads_left = 0;
  std::atomic<size_t> away{0};  // of those, not back from the device
  Outcome outcome;
};

struct Extent {  // one read, for wanted[first, last) of its ticket
  int64_t offset = 0, length = 0;
  int64_t needed = 0;  // bytes that must arrive; the rest may lie past the end of the file
  size_t first = 0, last = 0;
  std::shared_ptr<Ticket> ticket;
};

struct Settled {  // a read that was examined
  Extent extent;
  int64_t got;
  Outcome outcome;
};

class FlashReader;

class Backend {  // performs the reader's extents, at most `depth` at a time
 public:
  virtual ~Backend() = default;
  virtual void wake() = 0;  // extents were added, or some that were may be started now
  // Check and copy some reads that came back, in the caller's thread; how many. Given a ticket,
  // waits for one while any of its reads is away. -1: threads of the backend's own do so.
  virtual int reap(const Ticket*) { return -1; }
  virtual const char* name() const = 0;
};

struct Aligned {  // memory for O_DIRECT
  explicit Aligned(size_t bytes);
  ~Aligned();
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  uint8_t* data;
  size_t bytes;
};

struct FlashOptions {
  int depth;          // reads outstanding at most
  bool direct;        // past the page cache where the file system allows it
  bool uring;         // io_uring where the kernel allows it, else a pool of threads
  int64_t gap;        // neighbours this many bytes apart or less become one read
  int64_t max_read;   // bytes of one read at most (one block at least)
};

class FlashReader {
 public:
  // Throws std::system_error when the file cannot be opened, std::runtime_error when it is not the
  // one that was expected.
  FlashReader(const std::string& path, const Blocks& blocks, const Stamp& expected,
              const FlashOptions& options);
  ~FlashReader();  // lets reads under way finish

  // Throws std::invalid_argument for a record outside the blocks or larger than a read.
  int64_t submit(const int64_t* offsets, const int64_t* lengths, const uint64_t* to, size_t count);
  Outcome wait(int64_t ticket);  // once for each ticket
  // Do some of what a waiting thread has to, without waiting; whether there was anything to do.
  bool help() { return backend_->reap(nullptr) > 0; }
  // Start what waited for another ticket's reads to be back, without waiting.
  void start() { backend_->wake(); }

  Counters counters();
  void reset_counters();
  bool direct() const { return direct_; }
  const char* backend() const { return backend_->name(); }
  int file() const { return file_; }

  // For backends.
  // Adds the next reads, so many at most, all of one ticket: this one (null: any).
  void take(std::vector<Extent>* extents, size_t most, const Ticket* of);
  bool take_or_stop(Extent* extent);  // blocks; false when the reader closes
  void notify() { extents_added_.notify_all(); }
  void finish(const Extent& extent, const uint8_t* data, int64_t got, int error);
  // finish() in two: what came of a read, its records copied; then, of several, word to those who
  // wait. Each extent must be given back once.
  Outcome examine(const Extent& extent, const uint8_t* data, int64_t got, int error) const;
  void settle(const Settled* reads, int count);
  int depth() const { return depth_; }
  int64_t max_read() const { return max_read_; }

 private:
  using Clock = std::chrono::steady_clock;
  Outcome check(const Extent& extent, const uint8_t* data) const;
  void account();  // before outstanding_ changes
  bool replaced() const;

  std::string path_;
  Blocks blocks_;
  Stamp stamp_;
  int depth_;
  int64_t gap_, max_record_, max_read_, align_ = 1;
  bool direct_;
  int file_ = -1;

  std::mutex mutex_;  // of everything below
  std::condition_variable extents_added_, ticket_done_;
  std::deque<Extent> queue_;
  std::map<int64_t, std::shared_ptr<Ticket>> tickets_;
  int64_t next_ticket_ = 1;
  size_t outstanding_ = 0;  // extents queued or being read
  bool closing_ = false;
  Clock::time_point changed_;  // outstanding_
  Counters counters_;

  std::unique_ptr<Backend> backend_;
};

// Reads the whole of an extent; the number of bytes, less only at the end of the file, or -errno.
int64_t read_fully(int file, uint8_t* to, int64_t length, int64_t offset);

std::unique_ptr<Backend> make_pool(FlashReader& reader);
std::unique_ptr<Backend> make_uring(FlashReader& reader);  // null where the kernel refuses

}  // namespace dejavu
