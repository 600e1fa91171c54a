// Fetching the stored rows that follow while some are read.
#pragma once

#include "simd.h"

namespace dejavu::DEJAVU_ISA {

constexpr Size kLine = 64;
constexpr Size kAheadBytes = 1024;

// Fetches what follows J rows of `width` elements while they are read side by side, a line of each
// at a time. Rows that lie together in memory are fetched in the order of their addresses, a block
// ahead: DRAM and the prefetchers behind it then see one stream (17 GB/s a core against 9 with four
// streams of 512-byte rows). Scattered rows are fetched side by side, kAheadBytes ahead and past
// their ends at the start of a row that follows: what lies behind a short row is of no use.
template <int J, class W>
class Fetch {
 public:
  // `next`: the J rows that follow these, or that lie rows_ahead() on.
  Fetch(const W* const* w, const W* const* next, Size width)
      : w_(w), next_(next), turn_(width > kAhead ? width - kAhead : 0) {
    bool together = J > 1 && width * (Size)sizeof(W) <= kWidest;
    for (int j = 1; j < J; ++j) together = together && next[j] - next[0] == j * width;
    if (together) block_ = (const char*)next[0];
  }

  // Rows on that `next` is best, for blocks of J.
  static Size rows_ahead(Size width) {
    const Size bytes = width * (Size)sizeof(W);
    return bytes < kAheadBytes ? (kAheadBytes / bytes / J + 1) * J : J;
  }

  // Element i of the rows is about to be read; once a line.
  [[gnu::always_inline]] void at(Size i) const {
    if (block_) {
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) prefetch(block_ + i * (Size)sizeof(W) * J + j * kLine);
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) prefetch(i < turn_ ? w_[j] + i + kAhead : next_[j] + (i - turn_));
    }
  }

 private:
  static constexpr Size kAhead = kAheadBytes / (Size)sizeof(W);
  static constexpr Size kWidest = 2048;  // bytes; rows of 4096 read 10 % faster side by side

  const W *const *w_, *const *next_;
  Size turn_;
  const char* block_ = nullptr;
};

}  // namespace dejavu::DEJAVU_ISA
