// The two inner loops of everything: dot products with stored rows, and sums of stored rows.
//
// Bits: a dot product runs over its row in kChains accumulators, vector k of the row going to
// accumulator k % kChains, whatever is computed beside it. A sum of rows is one multiply-add chain
// an output, rows in the order given. Neither depends on the blocking chosen here.
#pragma once

#include "simd.h"

namespace dejavu::DEJAVU_ISA {

constexpr int kChains = 2;   // with 4 rows side by side: 8 chains hide the latency of an FMA
constexpr int kDotBlock = 4;
constexpr int kSumBlock = 8;  // stored rows a pass over the accumulator
constexpr Size kLine = 64;

template <class W, int R, int J>
inline void dot_block(const W* const* w, const W* const* next, const float* const* x, Size width,
                      float* out, Size row_stride) {
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
  Size i = 0;
  for (; i + kStep <= width; i += kStep) {
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) prefetch(next[j] + i);
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
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) out[r * row_stride + j] = sum(acc[r][j][0] + acc[r][j][1]);
}

// out[r * row_stride + j] = w[j] . x[r] for all r < rows, j < count; `width` long.
template <class W>
inline void dot_grid(const W* const* w, Size count, const float* const* x, Size rows, Size width,
                     float* out, Size row_stride) {
  if (rows == 1) {
    Size j = 0;
    for (; j + kDotBlock <= count; j += kDotBlock)
      dot_block<W, 1, kDotBlock>(w + j, j + 2 * kDotBlock <= count ? w + j + kDotBlock : w + j, x,
                                 width, out + j, row_stride);
    for (; j < count; ++j) dot_block<W, 1, 1>(w + j, w + j, x, width, out + j, row_stride);
    return;
  }
  for (Size j = 0; j < count; ++j) {
    const W* const* next = j + 1 < count ? w + j + 1 : w + j;
    Size r = 0;
    for (; r + 4 <= rows; r += 4)
      dot_block<W, 4, 1>(w + j, next, x + r, width, out + r * row_stride + j, row_stride);
    for (; r < rows; ++r)
      dot_block<W, 1, 1>(w + j, next, x + r, width, out + r * row_stride + j, row_stride);
  }
}

template <class W, int R, int J>
inline void sum_block(const W* const* w, const W* const* next, const float* const* coefficients,
                      float* const* acc, Size width) {
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
  Size i = 0;
  for (; i + kStep <= width; i += kStep) {
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) prefetch(next[j] + i);
    for (Size k = 0; k < kStep; k += Vec::width) step(i + k, whole, put);
  }
  for (; i + Vec::width <= width; i += Vec::width) step(i, whole, put);
  if (const Size rest = width - i)
    step(i, [rest](auto* p) __attribute__((always_inline)) { return load_partial(p, rest); },
         [rest](float* p, Vec v) __attribute__((always_inline)) { store_partial(p, v, rest); });
}

// acc[0..width) += sum over j < count of coefficients[j] * w[j], in order.
template <class W>
inline void sum_rows(const W* const* w, const float* coefficients, Size count, float* acc,
                     Size width) {
  Size j = 0;
  for (; j + kSumBlock <= count; j += kSumBlock) {
    const float* c = coefficients + j;
    sum_block<W, 1, kSumBlock>(w + j, j + 2 * kSumBlock <= count ? w + j + kSumBlock : w + j, &c,
                               &acc, width);
  }
  for (; j + 2 <= count; j += 2) {
    const float* c = coefficients + j;
    sum_block<W, 1, 2>(w + j, j + 4 <= count ? w + j + 2 : w + j, &c, &acc, width);
  }
  for (; j < count; ++j) {
    const float* c = coefficients + j;
    sum_block<W, 1, 1>(w + j, w + j, &c, &acc, width);
  }
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

// out[r * row_stride + k] = stored row rows[k] . x[r] * scale + bias where row r uses it, else 0.
void dots(const Matrix& weight, const int32_t* listed, Size count, const float* x, Size rows,
          const Use& use, const float* bias, float* out, Size row_stride);

// acc[r * acc_stride ...] += coefficients[r * stride + k] * stored row listed[k], k ascending.
// Coefficients carry the scale already. With `skip`, a stored row whose coefficient is 0 is not
// used for that batch row, and not read when that is so for all.
void sums(const Matrix& weight, const int32_t* listed, Size count, const float* coefficients,
          Size stride, Size rows, bool skip, float* acc, Size acc_stride);

}  // namespace dejavu::DEJAVU_ISA
