#include "batch_sums.h"

namespace dejavu::DEJAVU_ISA {
namespace {

constexpr Size kPassRows = 64;  // stored rows that are widened once for all batch rows

// How much less time a stored row takes with all batch rows together than for one by itself.
constexpr Size kTogetherGain = 3;

// Columns [at, at + lanes) of a row's sums: in column order from here on.
void finish(float* total, Size at, Size columns, const float* bias, const float* residual,
            float* out) {
  in_column_order(total);
  for_vectors(0, columns, [&](Size i, Size lanes) {
    Vec sum = load(total + i, lanes);
    if (bias) sum = sum + load(bias + at + i, lanes);
    if (residual) sum = sum + load(residual + at + i, lanes);
    store(out + at + i, sum, lanes);
  });
}

// Four stored rows from column `at` on, of which there may be fewer than a step has.
[[gnu::always_inline]] inline Quad quad_of(const int8_t* const* w, Size at, Size width) {
  if (at + kSumColumns <= width) return interleave(w, at);
  int8_t rest[kSumRows][kSumColumns] = {};
  const int8_t* from[kSumRows];
  for (Size i = 0; i < kSumRows; ++i) {
    std::memcpy(rest[i], w[i] + at, (size_t)(width - at));
    from[i] = rest[i];
  }
  return interleave(from, 0);
}

// acc[r][0..32) += the panel times q[r], or = where it is the first.
DEJAVU_LOOP void add_panel(const Quad* panel, Size quads, const int16_t* q, Size q_stride,
                           Size rows, bool first, int32_t* acc) {
  if (first) std::memset(acc, 0, (size_t)(rows * kSumColumns) * sizeof(int32_t));
  Size r = 0;
  for (; r + 2 <= rows; r += 2) {
    const int16_t* const coefficients[2] = {q + r * q_stride, q + (r + 1) * q_stride};
    int32_t* const to[2] = {acc + r * kSumColumns, acc + (r + 1) * kSumColumns};
    add_quads<2>(panel, quads, coefficients, to);
  }
  if (r < rows) {
    const int16_t* const coefficients[1] = {q + r * q_stride};
    int32_t* const to[1] = {acc + r * kSumColumns};
    add_quads<1>(panel, quads, coefficients, to);
  }
}

// Bit i: whether q[i] is not 0, i < count <= 64. Reads whole vectors, which `q` has room for.
inline uint64_t set_bits(const int16_t* q, Size count) {
  static_assert(kPassRows == 64);
  uint64_t bits = 0;
#if defined(__AVX2__)
  for (Size i = 0; i < count; i += 32) {
    const __m256i none = _mm256_setzero_si256();
    const __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i*)(q + i)), none);
    const __m256i high =
        _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i*)(q + i + 16)), none);
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
    bits |= (uint64_t)(uint32_t)~_mm256_movemask_epi8(both) << i;
  }
  if (count < 64) bits &= ((uint64_t)1 << count) - 1;
#else
  for (Size i = 0; i < count; ++i) bits |= (uint64_t)(q[i] != 0) << i;
#endif
  return bits;
}

}  // namespace

void Coefficients::columns(const Matrix& weight, Size first, Size last, const float* bias,
                           const float* residual, float* out) const {
  constexpr Size kSteps = kLine / kSumColumns;
  const Size width = weight.columns, steps_here = (last - first + kSumColumns - 1) / kSumColumns;
  alignas(64) Quad panel[kSteps][kPassRows / kSumRows];
  alignas(64) int32_t acc[kSteps][kMaxRows * kSumColumns];
  alignas(64) float total[kSteps][kMaxRows][kSumColumns];
  for (Size s = 0; s < steps_here; ++s)
    std::memset(total[s], 0, (size_t)(rows * kSumColumns) * sizeof(float));
  for (Size t = 0; t < tiles; ++t) {
    const Size count = counts[t];
    if (!count) continue;
    for (Size start = 0; start < count; start += kPassRows) {
      const int8_t* const* w = stored + t * padded(tile) + start;
      const Size left = count - start, size = left < kPassRows ? left : kPassRows;
      const Size known = left < 2 * kPassRows ? left : 2 * kPassRows;
      const Size passes = (size + kSumRows - 1) / kSumRows;
      // Into the second cache: lines that lie a power of two apart share few sets of the first.
      for (Size k = size; k < known; ++k) prefetch_near(w[k] + first);
      for (Size k = 0; k < passes; ++k)
        for (Size s = 0; s < steps_here; ++s)
          panel[s][k] = quad_of(w + kSumRows * k, first + s * kSumColumns, width);
      for (Size s = 0; s < steps_here; ++s)
        add_panel(panel[s], passes, of(t, 0) + start, padded(tile), rows, start == 0, acc[s]);
    }
    for (Size s = 0; s < steps_here; ++s)
      for (Size r = 0; r < rows; ++r)
        add_settled(acc[s] + r * kSumColumns, step(t, r), total[s][r]);
  }
  for (Size s = 0; s < steps_here; ++s) {
    const Size at = first + s * kSumColumns;
    const Size columns = last - at < kSumColumns ? last - at : kSumColumns;
    for (Size r = 0; r < rows; ++r)
      finish(total[s][r], at, columns, bias, residual ? residual + r * width : nullptr,
             out + r * width);
  }
}

void Coefficients::picked(const Matrix& weight, Size r, Size first, Size last, const float* bias,
                          const float* residual, float* out, float* scratch) const {
  const Size width = last - first, whole = padded(width);
  float* total = scratch;
  int32_t* acc = (int32_t*)(scratch + whole);
  std::memset(total, 0, (size_t)whole * sizeof(float));
  const Size ahead = Fetch<kSumRows, int8_t>::rows_ahead(width);
  for (Size t = 0; t < tiles; ++t) {
    if (!counts[t]) continue;
    std::memset(acc, 0, (size_t)whole * sizeof(int32_t));
    for (Size start = 0; start < counts[t]; start += kPassRows) {
      const Size left = counts[t] - start, size = left < kPassRows ? left : kPassRows;
      const int8_t* own[kPassRows + kSumRows];
      int16_t q[kPassRows + kSumRows];
      Size count = 0;
      const int16_t* all = of(t, r) + start;
      const int8_t* const* rows_here = stored + t * padded(tile) + start;
      for (uint64_t bits = set_bits(all, size); bits; bits &= bits - 1) {
        const int k = __builtin_ctzll(bits);
        own[count] = rows_here[k] + first;
        q[count++] = all[k];
      }
      const Size used_here = count;
      for (; count % kSumRows; ++count) {
        own[count] = own[used_here - 1];
        q[count] = 0;
      }
      for (Size k = 0; k < count; k += kSumRows) {
        const int16_t* const from[1] = {q + k};
        int32_t* const to[1] = {acc};
        whole_sum<1>(own + k, own + (k + ahead + kSumRows <= count ? k + ahead : k), from, to,
                     width);
      }
    }
    for (Size i = 0; i < whole; i += kSumColumns) add_settled(acc + i, step(t, r), total + i);
  }
  for (Size i = 0; i < width; i += kSumColumns)
    finish(total + i, first + i, width - i < kSumColumns ? width - i : kSumColumns, bias,
           residual ? residual + r * weight.columns : nullptr, out + r * weight.columns);
}

bool Coefficients::dense() const {
  Size all = 0, own = 0;
  for (Size t = 0; t < tiles; ++t) {
    all += counts[t] * rows;
    own += used[t];
  }
  return kTogetherGain * own > all;
}

void Coefficients::add_up(const Matrix& weight, const float* bias, const float* residual,
                          float* out, Worker& worker) const {
  const Size width = weight.columns, lines = (width + kLine - 1) / kLine;
  const Size parts = lines > rows ? lines / rows : 1, span = (lines + parts - 1) / parts * kLine;
  worker.share(lines, [&](Size item) {
    // Looked at in an item only: a thread that comes when all is done finds others' numbers there.
    if (dense()) {
      const Size first = item * kLine, end = first + kLine;
      return columns(weight, first, end < width ? end : width, bias, residual, out);
    }
    for (Size cell = item; cell < rows * parts; cell += lines) {
      const Size first = cell / rows * span, end = first + span;
      if (first < width)
        picked(weight, cell % rows, first, end < width ? end : width, bias, residual, out,
               worker.local);
    }
  });
}

}  // namespace dejavu::DEJAVU_ISA
