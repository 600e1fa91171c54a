// Selections by a 4-bit predictor: two stages of whole-number dot products, then a comparison.
//
// Stored rows lie in blocks of 8, 8 columns of a block in one line of 32 bytes: byte 4 i + c holds
// column c of row i in its low nibble and column c + 4 in its high one. So a 32-bit lane is a row,
// and no sum ever crosses lanes. All sums are exact; every instruction set gives the same bits.

#include "dots.h"

namespace dejavu::DEJAVU_ISA {
namespace {

constexpr Size kBlock = 8;  // stored rows, and columns of a line
constexpr Size kLineBytes = 32;
constexpr Size kRun = 4;  // lines whose products fit 16 bits: 4 * 4 * 15 * 127
constexpr Size kAhead = 2048;  // bytes fetched ahead

Size blocks_of(Size count) { return (count + kBlock - 1) / kBlock; }

// A batch row in 8 bits, padded with zeros to whole blocks.
struct Whole {
  int8_t* q;
  int32_t sum;
  float unit;
};

Whole whole_of(const float* x, Size width, int8_t* q) {
  const Peak peak = peak_of(x, width);
  const float factor = peak.finite && peak.magnitude > 0 ? 127.0f / peak.magnitude : 0.0f;
  int32_t sum = 0;
  for (Size i = 0; i < blocks_of(width) * kBlock; i += 16) {
    int32_t rounded[16 + 16] = {};
    const Size end = i + 16 < width ? i + 16 : width;
    if (peak.finite && i < width)
      for_vectors(i, end, [&](Size k, Size n) {
        round_to_ints(load(x + k, n) * broadcast(factor), rounded + (k - i));
      });
    for (Size k = 0; k < 16 && i + k < blocks_of(width) * kBlock; ++k) {
      const int32_t value = i + k < width ? rounded[k] : 0;
      q[i + k] = (int8_t)(value > 127 ? 127 : value < -127 ? -127 : value);
      sum += q[i + k];
    }
  }
  return {q, sum, peak.finite ? peak.magnitude / 127.0f : __builtin_nanf("")};
}

// out[r][i] = sum over columns of (2 nibble - 15) * q, of the 8 rows of a block and R batch rows: a
// line is unpacked once for all of them.
template <int R>
DEJAVU_LOOP void block_dots(const uint8_t* lines, Size count, const Whole* x,
                            int32_t (*out)[kBlock]) {
#if defined(__AVX2__)
  const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  const auto four = [](const int8_t* at) __attribute__((always_inline)) {
    int32_t value;
    std::memcpy(&value, at, 4);
    return _mm256_set1_epi32(value);
  };
  __m256i total[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) total[r] = _mm256_setzero_si256();
  // A run known when compiled: the loop over its lines took twice as long.
  const auto run = [&](Size start, auto size) __attribute__((always_inline)) {
    constexpr int kSize = decltype(size)::value;
    __m256i part[R][2];
#pragma GCC unroll 4
    for (int line = 0; line < kSize; ++line) {
      const uint8_t* at = lines + (start + line) * kLineBytes;
      prefetch(at + kAhead);
      const __m256i w = _mm256_loadu_si256((const __m256i*)at);
      const __m256i half[2] = {_mm256_and_si256(w, low),
                               _mm256_and_si256(_mm256_srli_epi16(w, 4), low)};
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const int8_t* q = x[r].q + (start + line) * kBlock + 4 * i;
          const __m256i products = _mm256_maddubs_epi16(half[i], four(q));
          part[r][i] = line ? _mm256_add_epi16(part[r][i], products) : products;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      total[r] = _mm256_add_epi32(
          total[r], _mm256_madd_epi16(_mm256_add_epi16(part[r][0], part[r][1]), one));
  };
  Size line = 0;
  for (; line + kRun <= count; line += kRun) run(line, std::integral_constant<int, kRun>());
  for (; line < count; ++line) run(line, std::integral_constant<int, 1>());
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    _mm256_storeu_si256((__m256i*)out[r], _mm256_sub_epi32(_mm256_slli_epi32(total[r], 1),
                                                           _mm256_set1_epi32(15 * x[r].sum)));
#else
  for (int r = 0; r < R; ++r) {
    for (Size i = 0; i < kBlock; ++i) out[r][i] = -15 * x[r].sum;
    for (Size line = 0; line < count; ++line)
      for (Size i = 0; i < kBlock; ++i)
        for (Size c = 0; c < 4; ++c) {
          const int pair = lines[line * kLineBytes + 4 * i + c];
          out[r][i] += 2 * ((pair & 15) * x[r].q[line * kBlock + c] +
                            (pair >> 4) * x[r].q[line * kBlock + 4 + c]);
        }
  }
#endif
}

// The same for all batch rows.
inline void all_dots(const uint8_t* lines, Size count, const Whole* x, Size rows,
                     int32_t (*out)[kBlock]) {
  Size r = 0;
  for (; r + 4 <= rows; r += 4) block_dots<4>(lines, count, x + r, out + r);
  for (; r < rows; ++r) block_dots<1>(lines, count, x + r, out + r);
}

// Which of 8 sums times the unit lie above their limits, one bit each.
unsigned above(const int32_t* sums, float unit, const float* limits, Size count) {
  unsigned bits = 0;
#if defined(__AVX2__)
  if (count == kBlock) {
    const __m256 scores = _mm256_mul_ps(
        _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)sums)), _mm256_set1_ps(unit));
    const __m256 kept = _mm256_cmp_ps(scores, _mm256_loadu_ps(limits), _CMP_GT_OQ);
    return (unsigned)_mm256_movemask_ps(kept);
  }
#endif
  for (Size i = 0; i < count; ++i) bits |= (unsigned)((float)sums[i] * unit > limits[i]) << i;
  return bits;
}

// mask[i] = bit i.
inline void spread(unsigned bits, Size count, uint8_t* mask) {
#if defined(__AVX2__)
  if (count == kBlock) {
    // Bit i alone in byte i; adding 127 takes whatever is there to the byte's highest bit.
    const uint64_t apart = bits * 0x0101010101010101ull & 0x8040201008040201ull;
    const uint64_t bytes = (apart + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
    std::memcpy(mask, &bytes, sizeof(bytes));
    return;
  }
#endif
  for (Size i = 0; i < count; ++i) mask[i] = bits >> i & 1;
}

}  // namespace

Scratch scratch_select_nibbles(const SelectNibblesArgs& a) {
  const Size wide = blocks_of(a.width), narrow = blocks_of(a.rank);
  return {a.rows * narrow * kBlock, a.rows * (wide + narrow) * kBlock / 4};
}

void run_select_nibbles(const SelectNibblesArgs& a, Worker& worker) {
  const Size wide = blocks_of(a.width), narrow = blocks_of(a.rank), stride = narrow * kBlock;
  int8_t* q = (int8_t*)worker.local;
  Whole x[kMaxRows], hidden[kMaxRows];
  for (Size r = 0; r < a.rows; ++r)
    x[r] = whole_of(a.x + r * a.width, a.width, q + r * wide * kBlock);
  worker.share(narrow, [&](Size block) {
    const Size first = block * kBlock;
    int32_t found[kMaxRows][kBlock];
    all_dots(a.first + block * wide * kLineBytes, wide, x, a.rows, found);
    for (Size r = 0; r < a.rows; ++r)
      for (Size i = 0; i < kBlock && first + i < a.rank; ++i)
        worker.shared[r * stride + first + i] = (float)found[r][i] * a.scales[first + i];
  });
  q += a.rows * wide * kBlock;
  for (Size r = 0; r < a.rows; ++r) {
    hidden[r] = whole_of(worker.shared + r * stride, a.rank, q + r * stride);
    hidden[r].unit *= x[r].unit;
  }
  const Selection& out = a.out;
  worker.share(out.tiles(), [&](Size t) {
    const Size begin = t * out.tile;
    const Size end = begin + out.tile < out.entries ? begin + out.tile : out.entries;
    int32_t* listed = out.indices + begin;
    Size count = 0;
    for (Size entry = begin; entry < end; entry += kBlock) {
      const Size size = end - entry < kBlock ? end - entry : kBlock;
      unsigned any = 0;
      int32_t found[kMaxRows][kBlock];
      all_dots(a.second + entry * narrow * kLineBytes / kBlock, narrow, hidden, a.rows, found);
      for (Size r = 0; r < a.rows; ++r) {
        const unsigned bits = above(found[r], hidden[r].unit, a.limits + entry, size);
        any |= bits;
        if (out.mask) spread(bits, size, out.mask + r * out.entries + entry);
      }
      for (; any; any &= any - 1) listed[count++] = (int32_t)(entry + __builtin_ctz(any));
    }
    out.counts[t] = (int32_t)count;
  });
}

}  // namespace dejavu::DEJAVU_ISA
