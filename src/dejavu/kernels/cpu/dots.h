// The two inner loops of everything: dot products with stored rows, and sums of stored rows.
//
// Bits: a dot product runs over its row in kChains accumulators, vector k of the row going to
// accumulator k % kChains, whatever is computed beside it (with an int8 row it is a whole number
// before it is rounded once: whole.h). A sum of rows is one multiply-add chain an output, rows in
// the order given (with int8 rows it is a whole number: sums.h). Neither depends on the blocking
// chosen here.
#pragma once

#include <type_traits>

#include "sums.h"
#include "whole.h"

namespace dejavu::DEJAVU_ISA {

constexpr int kChains = 2;   // with 4 rows side by side: 8 chains hide the latency of an FMA
constexpr int kDotBlock = 4;
constexpr int kSumBlock = 4;  // stored rows a pass over the accumulator; more streams are slower

template <class W, int R, int J>
DEJAVU_LOOP void dot_block(const W* const* w, const W* const* next, const float* const* x,
                           Size width, float* out, Size row_stride) {
  constexpr Size kElements = kLine / (Size)sizeof(W);
  constexpr Size kPair = kChains * Vec::width;
  constexpr Size kStep = kElements > kPair ? kElements : kPair;
  Vec acc[R][J][kChains];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j)
      for (int c = 0; c < kChains; ++c) acc[r][j][c] = zero();
  auto step = [&](Size at, int c, auto&& fetch) __attribute__((always_inline)) {
    Vec stored[J];
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) stored[j] = fetch(w[j] + at);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec value = fetch(x[r] + at);
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) acc[r][j][c] = fma(value, stored[j], acc[r][j][c]);
    }
  };
  auto whole = [](auto* p) __attribute__((always_inline)) { return load(p); };
  const Fetch<J, W> fetch_ahead(w, next, width);
  Size i = 0;
  for (; i + kStep <= width; i += kStep) {
    fetch_ahead.at(i);
#pragma GCC unroll 16
    for (Size k = 0; k < kStep / Vec::width; ++k) step(i + k * Vec::width, k % kChains, whole);
  }
  for (; i + kPair <= width; i += kPair)
#pragma GCC unroll 2
    for (int c = 0; c < kChains; ++c) step(i + c * Vec::width, c, whole);
  if (i + Vec::width <= width) {
    step(i, 0, whole);
    i += Vec::width;
  }
  if (const Size rest = width - i)
    step(i, 1, [rest](auto* p) __attribute__((always_inline)) { return load_partial(p, rest); });
  for (int r = 0; r < R; ++r) {
    if constexpr (J == 4) {
      Vec totals[4];
      for (int j = 0; j < 4; ++j) totals[j] = acc[r][j][0] + acc[r][j][1];
      sum_four(totals, out + r * row_stride);
    } else {
      for (int j = 0; j < J; ++j) out[r * row_stride + j] = sum(acc[r][j][0] + acc[r][j][1]);
    }
  }
}

// out[r * row_stride + j] = w[j] . x[r] for all r < rows, j < count; `width` long. Of the `known`
// pointers (at least count) those past the end are only fetched ahead.
template <class W>
inline void dot_grid(const W* const* w, Size count, Size known, const float* const* x, Size rows,
                     Size width, float* out, Size row_stride) {
  if (rows == 1) {
    const Size ahead = Fetch<kDotBlock, W>::rows_ahead(width);
    Size j = 0;
    for (; j + kDotBlock <= count; j += kDotBlock)
      dot_block<W, 1, kDotBlock>(w + j, j + ahead + kDotBlock <= known ? w + j + ahead : w + j, x,
                                 width, out + j, row_stride);
    if (j < count) {
      // The last few, filled up with copies of the last: one row alone would wait for its own sums.
      const W* last[kDotBlock];
      float results[kDotBlock];
      for (Size k = 0; k < kDotBlock; ++k) last[k] = w[j + k < count ? j + k : count - 1];
      dot_block<W, 1, kDotBlock>(last, last, x, width, results, 0);
      for (Size k = 0; j + k < count; ++k) out[j + k] = results[k];
    }
    return;
  }
  for (Size j = 0; j < count; ++j) {
    const W* const* next = j + 1 < known ? w + j + 1 : w + j;
    Size r = 0;
    for (; r + 4 <= rows; r += 4)
      dot_block<W, 4, 1>(w + j, next, x + r, width, out + r * row_stride + j, row_stride);
    for (; r < rows; ++r)
      dot_block<W, 1, 1>(w + j, next, x + r, width, out + r * row_stride + j, row_stride);
  }
}

template <class W, int R, int J>
DEJAVU_LOOP void sum_block(const W* const* w, const W* const* next,
                           const float* const* coefficients, float* const* acc, Size width) {
  Vec c[R][J];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) c[r][j] = broadcast(coefficients[r][j]);
  auto step = [&](Size at, auto&& fetch, auto&& put) __attribute__((always_inline)) {
    Vec total[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) total[r] = fetch(acc[r] + at);
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
      const Vec stored = fetch(w[j] + at);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total[r] = fma(c[r][j], stored, total[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) put(acc[r] + at, total[r]);
  };
  auto whole = [](auto* p) __attribute__((always_inline)) { return load(p); };
  auto put = [](float* p, Vec v) __attribute__((always_inline)) { store(p, v); };
  constexpr Size kElements = kLine / (Size)sizeof(W);
  constexpr Size kStep = kElements > Vec::width ? kElements : Vec::width;
  const Fetch<J, W> fetch_ahead(w, next, width);
  Size i = 0;
  for (; i + kStep <= width; i += kStep) {
    fetch_ahead.at(i);
    for (Size k = 0; k < kStep; k += Vec::width) step(i + k, whole, put);
  }
  for (; i + Vec::width <= width; i += Vec::width) step(i, whole, put);
  if (const Size rest = width - i)
    step(i, [rest](auto* p) __attribute__((always_inline)) { return load_partial(p, rest); },
         [rest](float* p, Vec v) __attribute__((always_inline)) { store_partial(p, v, rest); });
}

// acc[0..width) += sum over j < count of coefficients[j] * w[j], in order; `known` as above.
template <class W>
inline void sum_rows(const W* const* w, const float* coefficients, Size count, Size known,
                     float* acc, Size width) {
  const Size ahead = Fetch<kSumBlock, W>::rows_ahead(width);
  Size j = 0;
  const auto block = [&](auto size) __attribute__((always_inline)) {
    constexpr int J = decltype(size)::value;
    for (; j + J <= count; j += J) {
      const float* c = coefficients + j;
      sum_block<W, 1, J>(w + j, j + ahead + J <= known ? w + j + ahead : w + j, &c, &acc, width);
    }
  };
  block(std::integral_constant<int, kSumBlock>());
  block(std::integral_constant<int, 1>());
}

template <class Visit>
inline void with_dtype(Dtype dtype, Visit&& visit) {
  switch (dtype) {
    case Dtype::fp32: return visit((const float*)nullptr);
    case Dtype::bf16: return visit((const Bf16*)nullptr);
    case Dtype::int8: return visit((const int8_t*)nullptr);
  }
}

// Which of the listed stored rows a batch row uses: the mask of a selection, one byte a block.
struct Use {
  const uint8_t* mask = nullptr;
  Size stride = 0, block = 1;
  bool operator()(Size r, Size row) const {
    return !mask || mask[r * stride + (block == 1 ? row : row / block)];
  }
};

// The batch rows [N, width] of an op, in the form that the dtypes of its weights call for.
struct Inputs {
  Size rows, width;
  const float* row[kMaxRows];
  Digits digits[kMaxRows];  // for int8 only

  static Size floats(Size rows, Size width) { return rows * digits_floats(width); }
  Inputs(const float* x, Size rows, Size width, bool int8, float* scratch)
      : rows(rows), width(width) {
    for (Size r = 0; r < rows; ++r) {
      row[r] = x + r * width;
      if (int8)
        digits[r] = digits_of(row[r], width, (int16_t*)(scratch + r * digits_floats(width)));
    }
  }
};

constexpr Size kAheadRows = 32;  // listed rows past the last that are worth naming

// out[r * row_stride + k] = stored row listed[k] . x[r] * scale + bias where row r uses it, else 0,
// for k < count. Of the `known` listed rows those from count on are only fetched ahead.
void dots(const Matrix& weight, const int32_t* listed, Size count, Size known, const Inputs& x,
          const Use& use, const float* bias, float* out, Size row_stride);

// acc[r * acc_stride ...] = sum of coefficients[r * stride + k] * stored row listed[k], in order of
// k, over a tile of at most `stride` rows; acc comes as zeros, padded to whole kSumColumns.
// Coefficients carry the scale already. With `skip`, a stored row whose coefficient is 0 for some
// of several batch rows stays out of their sums.
void sums(const Matrix& weight, const int32_t* listed, Size count, const float* coefficients,
          Size stride, Size rows, bool skip, float* acc, Size acc_stride);

}  // namespace dejavu::DEJAVU_ISA
