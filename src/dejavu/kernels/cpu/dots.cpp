#include "dots.h"

namespace dejavu::DEJAVU_ISA {
namespace {

// Stored rows handled together. Where every batch row picks its own, a chunk is small enough to
// stay in the first two cache levels while the batch rows pass over it.
constexpr Size kChunk = 64, kPickedChunk = 16;

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
  }
  for (Size start = 0; use.mask && start < count; start += kPickedChunk) {
    const Size size = count - start < kPickedChunk ? count - start : kPickedChunk;
    const int32_t* chunk = listed + start;
    for (Size r = 0; r < x.rows; ++r) {
      Size own[kPickedChunk], used = 0;
      float results[kPickedChunk];
      for (Size k = 0; k < size; ++k)
        if (use(r, chunk[k])) {
          own[used] = k;
          w[used++] = data + weight.start(chunk[k]);
        }
      grid(w, used, used, x, r, 1, results, 0);
      for (Size k = 0; k < used; ++k) out[r * row_stride + start + own[k]] = results[k];
    }
  }
  for (Size r = 0; r < x.rows; ++r) {
    float* row = out + r * row_stride;
    if (!use.mask) {
      if (weight.scale)
        for (Size k = 0; k < count; ++k) row[k] *= weight.scale[listed[k]];
      if (bias)
        for (Size k = 0; k < count; ++k) row[k] += bias[listed[k]];
      continue;
    }
    for (Size k = 0; k < count; ++k) {
      if (!use(r, listed[k])) {
        row[k] = 0;
        continue;
      }
      if (weight.scale) row[k] *= weight.scale[listed[k]];
      if (bias) row[k] += bias[listed[k]];
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
    if (rows == 1 || 2 * used > rows * size) {
      for (Size k = known; k % kSumRows; ++k) w[k] = w[known - 1];
      add(w, size, known, q[0], 0, rows);
      continue;
    }
    for (Size r = 0; r < rows; ++r) {
      const int8_t* own[kChunk];
      Size k = 0;
      for (Size i = 0; i < size; ++i)
        if (q[r][i] != 0) {
          own[k] = w[i];
          q[r][k++] = q[r][i];
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
