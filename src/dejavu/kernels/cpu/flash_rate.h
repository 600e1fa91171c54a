// What the device itself can do: reads whose bytes nobody looks at.
#pragma once

#include <cstdint>
#include <string>

namespace dejavu {

struct Rate {
  int64_t reads = 0;
  double seconds = 0;
  bool direct = false;
};

// Reads of `size` bytes at the offsets, in their order and from the start again, `depth` at a time
// until `seconds` have passed. In an io_uring, `batch` of them have to end before as many new ones
// are started together: fewer calls and fewer interrupts, but fewer outstanding. Throws
// std::system_error naming the path.
Rate read_rate(const std::string& path, const int64_t* offsets, int64_t count, int64_t size,
               int depth, bool direct, bool uring, double seconds, int batch);

}  // namespace dejavu
