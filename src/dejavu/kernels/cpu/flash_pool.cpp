// Outstanding reads as threads that each wait for one: works everywhere.
#include <algorithm>
#include <thread>

#include "flash.h"

namespace dejavu {
namespace {

class Pool : public Backend {
 public:
  explicit Pool(FlashReader& reader) : reader_(reader) {
    for (int i = 0; i < reader.depth(); ++i) threads_.emplace_back([this] { serve(); });
  }

  ~Pool() override {
    for (std::thread& thread : threads_) thread.join();
  }

  void wake() override { reader_.notify(); }
  const char* name() const override { return "threads"; }

 private:
  void serve() {
    const Aligned buffer(reader_.max_read());
    Extent extent;
    while (reader_.take_or_stop(&extent)) {
      const int64_t got = read_fully(reader_.file(), buffer.data, extent.length, extent.offset);
      reader_.finish(extent, buffer.data, std::max<int64_t>(got, 0), got < 0 ? (int)-got : 0);
      extent.ticket.reset();
    }
  }

  FlashReader& reader_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_pool(FlashReader& reader) { return std::make_unique<Pool>(reader); }

}  // namespace dejavu
