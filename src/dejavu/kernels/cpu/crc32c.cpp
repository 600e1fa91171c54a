#include "crc32c.h"

#include <array>
#include <cstring>

#ifdef DEJAVU_X86
#include <nmmintrin.h>
#endif

namespace dejavu {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // 0x1edc6f41 with its bits reversed

// table[k][b]: the checksum of byte b followed by k zero bytes, so that eight bytes take one step.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (int k = 1; k < 8; ++k)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

#ifdef DEJAVU_X86
__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(const uint8_t* data, size_t bytes,
                                                        uint32_t before) {
  uint64_t crc = ~before;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  for (; bytes; --bytes, ++data) crc = _mm_crc32_u8((uint32_t)crc, *data);
  return ~(uint32_t)crc;
}
#endif

}  // namespace

uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t before) {
  const uint8_t* at = (const uint8_t*)data;
  uint32_t crc = ~before;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    const uint32_t low = crc ^ (at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24);
    crc = kTables[7][low & 0xff] ^ kTables[6][low >> 8 & 0xff] ^ kTables[5][low >> 16 & 0xff] ^
          kTables[4][low >> 24] ^ kTables[3][at[4]] ^ kTables[2][at[5]] ^ kTables[1][at[6]] ^
          kTables[0][at[7]];
  }
  for (; bytes; --bytes, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 0xff];
  return ~crc;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
#ifdef DEJAVU_X86
  static const bool fast = __builtin_cpu_supports("sse4.2");
  if (fast) return crc32c_sse42((const uint8_t*)data, bytes, before);
#endif
  return crc32c_portable(data, bytes, before);
}

}  // namespace dejavu
