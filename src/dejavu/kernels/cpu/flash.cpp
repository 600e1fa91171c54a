#include "flash.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "crc32c.h"

namespace dejavu {
namespace {

constexpr int64_t kSafeAlignment = 4096;  // where the kernel does not tell

Stamp stamp_of(const struct stat& s) {
#ifdef __APPLE__
  const auto& modified = s.st_mtimespec;
#else
  const auto& modified = s.st_mtim;
#endif
  return {(uint64_t)s.st_dev, (uint64_t)s.st_ino, (int64_t)s.st_size,
          (int64_t)modified.tv_sec * 1000000000 + modified.tv_nsec};
}

// Alignment of direct reads in bytes; 0: this file system has none.
int64_t direct_alignment(int file) {
#ifdef STATX_DIOALIGN
  struct statx s;
  if (statx(file, "", AT_EMPTY_PATH, STATX_DIOALIGN, &s) == 0 && (s.stx_mask & STATX_DIOALIGN))
    return std::max(s.stx_dio_offset_align, s.stx_dio_mem_align);
#endif
  (void)file;
  return kSafeAlignment;
}

int64_t round_down(int64_t value, int64_t to) { return value / to * to; }
int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace

Aligned::Aligned(size_t bytes) : bytes(bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  data = (uint8_t*)found;
}

Aligned::~Aligned() { munmap(data, bytes); }

int64_t read_fully(int file, uint8_t* to, int64_t length, int64_t offset) {
  int64_t got = 0;
  while (got < length) {
    const ssize_t count = pread(file, to + got, length - got, offset + got);
    if (count < 0 && errno == EINTR) continue;
    // Direct reads cannot go on from an odd place: that place is the end of the file.
    if (count < 0 && errno == EINVAL && got) break;
    if (count < 0) return -errno;
    if (count == 0) break;
    got += count;
  }
  return got;
}

FlashReader::FlashReader(const std::string& path, const Blocks& blocks, const Stamp& expected,
                         const FlashOptions& options)
    : path_(path), blocks_(blocks), stamp_(expected), depth_(options.depth), gap_(options.gap),
      direct_(options.direct) {
#ifdef O_DIRECT
  if (direct_) file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (file_ >= 0) align_ = direct_alignment(file_);
#endif
  if (file_ < 0 || align_ == 0) {  // tmpfs, some overlays and network file systems
    if (file_ >= 0) close(file_);
    direct_ = false;
    align_ = 1;
    file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  }
  if (file_ < 0) throw std::system_error(errno, std::generic_category(), path);
  // A record may begin and end inside a block, and a block inside what direct reads align to.
  max_record_ = std::max(options.max_read, blocks.size);
  max_read_ = round_up(max_record_ + 2 * std::max(blocks.size, align_), kSafeAlignment);
  if (replaced()) {
    close(file_);
    throw std::runtime_error("replaced");
  }
  if (options.uring) backend_ = make_uring(*this);
  if (!backend_) backend_ = make_pool(*this);
}

FlashReader::~FlashReader() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    outstanding_ -= queue_.size();
    queue_.clear();
  }
  extents_added_.notify_all();
  backend_.reset();
  close(file_);
}

int64_t FlashReader::submit(const int64_t* offsets, const int64_t* lengths, const uint64_t* to,
                            size_t count) {
  auto ticket = std::make_shared<Ticket>();
  int64_t wanted_bytes = 0;
  const int64_t end = blocks_.start + blocks_.size * blocks_.count;
  for (size_t i = 0; i < count; ++i) {
    if (offsets[i] < blocks_.start || lengths[i] <= 0 || offsets[i] + lengths[i] > end ||
        lengths[i] > max_record_)
      throw std::invalid_argument(std::to_string(offsets[i]));
    ticket->wanted.push_back({offsets[i], lengths[i], (uint8_t*)to[i]});
    wanted_bytes += lengths[i];
  }
  std::sort(ticket->wanted.begin(), ticket->wanted.end(),
            [](const Wanted& a, const Wanted& b) { return a.offset < b.offset; });
  std::vector<Extent> extents;
  for (size_t i = 0; i < count; ++i) {
    const Wanted& w = ticket->wanted[i];
    const int64_t first = round_down(w.offset - blocks_.start, blocks_.size) + blocks_.start;
    const int64_t last =
        round_up(w.offset + w.length - blocks_.start, blocks_.size) + blocks_.start;
    const int64_t begin = round_down(first, align_), finish = round_up(last, align_);
    Extent* open = extents.empty() ? nullptr : &extents.back();
    if (open && begin <= open->offset + open->length + gap_ &&
        std::max(finish, open->offset + open->length) - open->offset <= max_read_) {
      open->length = std::max(open->length, finish - open->offset);
      open->needed = std::max(open->needed, last - open->offset);
      open->last = i + 1;
    } else {
      extents.push_back({begin, finish - begin, last - begin, i, i + 1, ticket});
    }
  }
  ticket->reads_left = extents.size();
  ticket->away = extents.size();
  int64_t number;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    number = next_ticket_++;
    tickets_[number] = ticket;
    account();
    outstanding_ += extents.size();
    counters_.requests += count;
    counters_.bytes_wanted += wanted_bytes;
    queue_.insert(queue_.end(), extents.begin(), extents.end());
  }
  if (!extents.empty()) backend_->wake();
  return number;
}

Outcome FlashReader::wait(int64_t number) {
  const auto start = Clock::now();
  std::shared_ptr<Ticket> ticket;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tickets_.find(number);
    if (found == tickets_.end()) throw std::out_of_range(std::to_string(number));
    ticket = found->second;
  }
  while (true) {
    const int reaped = backend_->reap(ticket->away ? ticket.get() : nullptr);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto complete = [&] { return ticket->reads_left == 0; };
    if (reaped < 0) ticket_done_.wait(lock, complete);
    if (complete()) {
      tickets_.erase(number);
      counters_.wait_seconds += std::chrono::duration<double>(Clock::now() - start).count();
      break;
    }
    lock.unlock();
    if (reaped == 0) std::this_thread::yield();  // another thread has the last of them in hand
  }
  Outcome outcome = ticket->outcome;
  if (outcome.fault == FlashFault::none && replaced())
    outcome = {FlashFault::replaced, 0, ticket->wanted.empty() ? 0 : ticket->wanted[0].offset};
  return outcome;
}

void FlashReader::account() {
  const auto now = Clock::now();
  const double passed = std::chrono::duration<double>(now - changed_).count();
  changed_ = now;
  if (!outstanding_) return;
  counters_.busy_seconds += passed;
  counters_.depth_seconds += passed * (double)std::min(outstanding_, (size_t)depth_);
}

Counters FlashReader::counters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  account();
  return counters_;
}

void FlashReader::reset_counters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  account();
  counters_ = {};
}

void FlashReader::take(std::vector<Extent>* extents, size_t most, const Ticket* of) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!of && !queue_.empty()) of = queue_.front().ticket.get();
  for (; most && !queue_.empty() && queue_.front().ticket.get() == of; --most) {
    extents->push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
}

bool FlashReader::take_or_stop(Extent* extent) {
  std::unique_lock<std::mutex> lock(mutex_);
  extents_added_.wait(lock, [&] { return closing_ || !queue_.empty(); });
  if (queue_.empty()) return false;
  *extent = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

void FlashReader::finish(const Extent& extent, const uint8_t* data, int64_t got, int error) {
  const Settled read = {extent, got, examine(extent, data, got, error)};
  settle(&read, 1);
}

Outcome FlashReader::examine(const Extent& extent, const uint8_t* data, int64_t got,
                             int error) const {
  const int64_t wanted = extent.ticket->wanted[extent.first].offset;
  if (error) return {FlashFault::io, error, wanted};
  if (got < extent.needed) return {FlashFault::short_read, 0, wanted};
  return check(extent, data);
}

void FlashReader::settle(const Settled* reads, int count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  account();
  for (int i = 0; i < count; ++i) {
    counters_.reads += 1;
    counters_.bytes_read += reads[i].got;
    Ticket& ticket = *reads[i].extent.ticket;
    if (ticket.outcome.fault == FlashFault::none) ticket.outcome = reads[i].outcome;
    --outstanding_;
    if (--ticket.reads_left == 0) ticket_done_.notify_all();
  }
}

Outcome FlashReader::check(const Extent& extent, const uint8_t* data) const {
  int64_t checked = -1;  // blocks up to this one are as they were written
  for (size_t i = extent.first; i < extent.last; ++i) {
    const Wanted& w = extent.ticket->wanted[i];
    const int64_t first = (w.offset - blocks_.start) / blocks_.size;
    const int64_t last = (w.offset + w.length - 1 - blocks_.start) / blocks_.size;
    for (int64_t block = std::max(first, checked + 1); block <= last; ++block) {
      const uint8_t* at = data + (blocks_.start + block * blocks_.size - extent.offset);
      if (crc32c(at, blocks_.size) != blocks_.checksums[block])
        return {FlashFault::checksum, 0, w.offset};
      checked = block;
    }
    std::memcpy(w.to, data + (w.offset - extent.offset), w.length);
  }
  return {};
}

bool FlashReader::replaced() const {
  struct stat ours, named;
  if (fstat(file_, &ours) != 0 || !(stamp_of(ours) == stamp_)) return true;
  // A file that was only removed stays what it was for those who have it open.
  return stat(path_.c_str(), &named) == 0 &&
         (named.st_ino != ours.st_ino || named.st_dev != ours.st_dev);
}

}  // namespace dejavu
