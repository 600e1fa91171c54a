#include "dots.h"

namespace dejavu::DEJAVU_ISA {
namespace {

// Stored rows handled together: few enough to stay in the first two cache levels while the batch
// rows pass over them. kPickedChunk: of rows in fp32, where every batch row picks its own.
constexpr Size kChunk = 64, kPickedChunk = 16;

// Dots of int8 rows with several batch rows together take so much less time each than those of one
// batch row with the stored rows that it picks.
constexpr Size kGridGain = 3;

// What follows a dot product: the stored row's scale and its bias, side by side for a chunk.
struct Finish {
  bool scaled, biased;
  Size size;
  float scale[kChunk], bias[kChunk];

  Finish(const Matrix& weight, const int32_t* listed, Size size, const float* all_biases)
      : scaled(weight.scale), biased(all_biases), size(size) {
    for (Size k = 0; scaled && k < size; ++k) scale[k] = weight.scale[listed[k]];
    for (Size k = 0; biased && k < size; ++k) bias[k] = all_biases[listed[k]];
  }
  void operator()(float* row) const {
    for (Size k = 0; scaled && k < size; ++k) row[k] *= scale[k];
    for (Size k = 0; biased && k < size; ++k) row[k] += bias[k];
  }
  float operator()(float product, Size k) const {
    if (scaled) product *= scale[k];
    return biased ? product + bias[k] : product;
  }
};

template <class W>
void grid(const W* const* w, Size count, Size known, const Inputs& x, Size first, Size rows,
          float* out, Size row_stride) {
  if constexpr (std::is_same_v<W, int8_t>)
    whole_grid(w, count, known, x.digits + first, rows, x.width, out, row_stride);
  else
    dot_grid(w, count, known, x.row + first, rows, x.width, out, row_stride);
}

template <class W>
void dots_of(const Matrix& weight, const int32_t* listed, Size count, Size known, const Inputs& x,
             const Use& use, const float* bias, float* out, Size row_stride) {
  const W* data = (const W*)weight.data;
  const W* w[kChunk + kAheadRows];
  for (Size start = 0, size; !use.mask && start < count; start += size) {
    const Size left = count - start;
    size = left < kChunk ? left : kChunk;
    const Size rest = known - start;
    const Size named = rest < kChunk + kAheadRows ? rest : kChunk + kAheadRows;
    for (Size k = 0; k < named; ++k) w[k] = data + weight.start(listed[start + k]);
    grid(w, size, named, x, 0, x.rows, out + start, row_stride);
    const Finish finish(weight, listed + start, size, bias);
    for (Size r = 0; r < x.rows; ++r) finish(out + r * row_stride + start);
  }
  for (Size start = 0, size; use.mask && start < count; start += size) {
    size = count - start < kChunk ? count - start : kChunk;
    const int32_t* chunk = listed + start;
    const Finish finish(weight, chunk, size, bias);
    uint8_t used[kMaxRows][kChunk];
    Size total = 0;
    for (Size k = 0; k < size; ++k) {
      const uint8_t* mask = use.mask + (use.block == 1 ? chunk[k] : chunk[k] / use.block);
      for (Size r = 0; r < x.rows; ++r) total += used[r][k] = mask[r * use.stride] != 0;
    }
    if (std::is_same_v<W, int8_t> && x.rows > 1 && kGridGain * total > x.rows * size) {
      for (Size k = 0; k < size; ++k) w[k] = data + weight.start(chunk[k]);
      grid(w, size, size, x, 0, x.rows, out + start, row_stride);
      for (Size r = 0; r < x.rows; ++r) {
        float* row = out + r * row_stride + start;
        finish(row);
        for (Size k = 0; k < size; ++k) row[k] = used[r][k] ? row[k] : 0.0f;
      }
      continue;
    }
    for (Size r = 0; r < x.rows; ++r) {
      // Without a branch on the mask: what a row uses cannot be foretold.
      Size own[kChunk], count_own = 0;
      float results[kChunk];
      for (Size k = 0; k < size; ++k) {
        own[count_own] = k;
        w[count_own] = data + weight.start(chunk[k]);
        count_own += used[r][k];
      }
      grid(w, count_own, count_own, x, r, 1, results, 0);
      float* row = out + r * row_stride + start;
      std::memset(row, 0, (size_t)size * sizeof(float));
      for (Size k = 0; k < count_own; ++k) row[own[k]] = finish(results[k], own[k]);
    }
  }
}

template <class W>
void sums_of(const Matrix& weight, const int32_t* listed, Size count, const float* coefficients,
             Size stride, Size rows, bool skip, float* acc, Size acc_stride) {
  const W* data = (const W*)weight.data;
  const Size width = weight.columns;
  const W* w[kChunk + kAheadRows];
  float own[kPickedChunk];
  for (Size start = 0, size; rows == 1 && start < count; start += size) {
    const Size left = count - start;
    size = left < kChunk ? left : kChunk;
    const Size known = left < kChunk + kAheadRows ? left : kChunk + kAheadRows;
    for (Size k = 0; k < known; ++k) w[k] = data + weight.start(listed[start + k]);
    sum_rows(w, coefficients + start, size, known, acc, width);
  }
  for (Size start = 0; rows > 1 && start < count; start += kPickedChunk) {
    const Size size = count - start < kPickedChunk ? count - start : kPickedChunk;
    const int32_t* chunk = listed + start;
    bool full = size % 4 == 0;
    for (Size r = 0; full && skip && r < rows; ++r)
      for (Size k = 0; k < size; ++k) full = full && coefficients[r * stride + start + k] != 0;
    if (full) {
      for (Size k = 0; k < size; ++k) w[k] = data + weight.start(chunk[k]);
      for (Size j = 0; j < size; j += 4) {
        Size r = 0;
        for (; r + 2 <= rows; r += 2) {
          const float* c[2] = {coefficients + r * stride + start + j,
                               coefficients + (r + 1) * stride + start + j};
          float* totals[2] = {acc + r * acc_stride, acc + (r + 1) * acc_stride};
          sum_block<W, 2, 4>(w + j, j + 8 <= size ? w + j + 4 : w + j, c, totals, width);
        }
        if (r < rows) {
          const float* c = coefficients + r * stride + start + j;
          float* totals = acc + r * acc_stride;
          sum_block<W, 1, 4>(w + j, w + j, &c, &totals, width);
        }
      }
      continue;
    }
    for (Size r = 0; r < rows; ++r) {
      const float* c = coefficients + r * stride + start;
      Size used = 0;
      for (Size k = 0; k < size; ++k)
        if (!skip || c[k] != 0) {
          w[used] = data + weight.start(chunk[k]);
          own[used++] = c[k];
        }
      sum_rows(w, own, used, used, acc + r * acc_stride, width);
    }
  }
}

constexpr Size kPanelRows = 32;  // of 32 columns: 2 KiB; as many are named ahead

// acc[r][0..width) += `count` stored rows, in whole passes, times q[r], for several batch rows:
// four stored rows are interleaved and widened once for all of them. Of the `known` rows those from
// count on are only fetched ahead.
DEJAVU_LOOP void panel_sums(const int8_t* const* w, Size count, Size known, const int16_t* q,
                            Size q_stride, Size rows, int32_t* acc, Size acc_stride, Size width) {
  alignas(64) Quad panel[kPanelRows / kSumRows];
  const Size quads = count / kSumRows;
  for (Size at = 0; at < width; at += kSumColumns) {
    for (Size k = 0; k < quads; ++k) {
      if (at % kLine == 0)
        for (Size i = kSumRows * k; i < kSumRows * (k + 1); ++i)
          if (count + i < known) prefetch(w[count + i] + at);
      if (at + kSumColumns <= width) {
        panel[k] = interleave(w + kSumRows * k, at);
        continue;
      }
      int8_t rest[kSumRows][kSumColumns] = {};
      const int8_t* from[kSumRows];
      for (Size i = 0; i < kSumRows; ++i) {
        std::memcpy(rest[i], w[kSumRows * k + i] + at, (size_t)(width - at));
        from[i] = rest[i];
      }
      panel[k] = interleave(from, 0);
    }
    Size r = 0;
    for (; r + 2 <= rows; r += 2) {
      const int16_t* const coefficients[2] = {q + r * q_stride, q + (r + 1) * q_stride};
      int32_t* const to[2] = {acc + r * acc_stride + at, acc + (r + 1) * acc_stride + at};
      add_quads<2>(panel, quads, coefficients, to);
    }
    if (r < rows) {
      const int16_t* const coefficients[1] = {q + r * q_stride};
      int32_t* const to[1] = {acc + r * acc_stride + at};
      add_quads<1>(panel, quads, coefficients, to);
    }
  }
}

// Batch rows from which a panel pays, and how much less time a stored row takes there than one that
// a batch row adds up by itself.
constexpr Size kPanelLeast = 8, kPanelGain = 3;

// Sums of int8 rows: see sums.h. Which zeros are passed over changes no bit, so it is only a
// question of speed.
void whole_sums(const Matrix& weight, const int32_t* listed, Size count, const float* coefficients,
                Size stride, Size rows, float* acc, Size acc_stride) {
  const int8_t* data = (const int8_t*)weight.data;
  const Size width = weight.columns;
  const Size ahead = Fetch<kSumRows, int8_t>::rows_ahead(width);
  Steps steps[kMaxRows];
  for (Size r = 0; r < rows; ++r)
    steps[r] = steps_of(coefficients + r * stride, count, stride);

  const auto add = [&](const int8_t* const* w, Size size, Size known, const int16_t* q, Size first,
                       Size last) {
    for (Size k = 0; k < size; k += kSumRows) {
      const int8_t* const* next = w + (k + ahead + kSumRows <= known ? k + ahead : k);
      const int16_t* from[2];
      int32_t* to[2];
      Size r = first;
      const auto pass = [&](auto together) __attribute__((always_inline)) {
        constexpr int R = decltype(together)::value;
        for (; r + R <= last; r += R) {
          for (Size i = 0; i < R; ++i) {
            from[i] = q + (r + i - first) * kChunk + k;
            to[i] = (int32_t*)(acc + (r + i) * acc_stride);
          }
          whole_sum<R>(w + k, next, from, to, width);
        }
      };
      pass(std::integral_constant<int, 2>());
      pass(std::integral_constant<int, 1>());
    }
  };

  const int8_t* w[kChunk + kAheadRows];
  int16_t q[kMaxRows][kChunk];
  for (Size start = 0, size; start < count; start += size) {
    const Size left = count - start;
    size = left < kChunk ? left : kChunk;
    const Size known = left < kChunk + kAheadRows ? left : kChunk + kAheadRows;
    for (Size k = 0; k < known; ++k) w[k] = data + weight.start(listed[start + k]);
    Size used = 0;
    for (Size r = 0; r < rows; ++r) {
      whole_coefficients(coefficients + r * stride + start, size, steps[r], q[r]);
      for (Size k = 0; rows > 1 && k < size; ++k) used += q[r][k] != 0;
    }
    if (rows < kPanelLeast && (rows == 1 || 2 * used > rows * size)) {
      for (Size k = known; k % kSumRows; ++k) w[k] = w[known - 1];
      add(w, size, known, q[0], 0, rows);
      continue;
    }
    if (rows >= kPanelLeast && kPanelGain * used > rows * size) {
      const Size passes = (size + kSumRows - 1) / kSumRows * kSumRows;
      for (Size k = known; k < passes; ++k) w[k] = w[known - 1];
      for (Size k = 0; k < passes; k += kPanelRows)
        panel_sums(w + k, passes - k < kPanelRows ? passes - k : kPanelRows, known - k, q[0] + k,
                   kChunk, rows, (int32_t*)acc, acc_stride, width);
      continue;
    }
    for (Size r = 0; r < rows; ++r) {
      const int8_t* own[kChunk];
      Size k = 0;
      for (Size i = 0; i < size; ++i) {
        own[k] = w[i];
        const int16_t coefficient = q[r][k] = q[r][i];
        k += coefficient != 0;
      }
      for (used = k; k % kSumRows; ++k) {
        own[k] = own[used - 1];
        q[r][k] = 0;
      }
      add(own, used, used, q[r], r, r + 1);
    }
  }
  for (Size r = 0; r < rows; ++r)
    for (Size i = 0; i < width; i += kSumColumns)
      settle(acc + r * acc_stride + i, steps[r].step);
}

}  // namespace

void dots(const Matrix& weight, const int32_t* listed, Size count, Size known, const Inputs& x,
          const Use& use, const float* bias, float* out, Size row_stride) {
  with_dtype(weight.dtype, [&](auto* type) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    dots_of<W>(weight, listed, count, known, x, use, bias, out, row_stride);
  });
}

void sums(const Matrix& weight, const int32_t* listed, Size count, const float* coefficients,
          Size stride, Size rows, bool skip, float* acc, Size acc_stride) {
  if (weight.dtype == Dtype::int8)
    return whole_sums(weight, listed, count, coefficients, stride, rows, acc, acc_stride);
  with_dtype(weight.dtype, [&](auto* type) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    sums_of<W>(weight, listed, count, coefficients, stride, rows, skip, acc, acc_stride);
  });
}

}  // namespace dejavu::DEJAVU_ISA
