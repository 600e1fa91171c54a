// CRC-32C (Castagnoli), the checksum of blocks that are read from flash: RFC 3720, appendix B.4.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dejavu {

// Of `bytes` bytes; `before` is the checksum of what came before them, 0 at the start.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

// The same without special instructions: what other machines run, and the truth in tests.
uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace dejavu
