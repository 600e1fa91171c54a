// Dot products of int8 rows in whole numbers.
//
// Turning an int8 into an fp32 costs as much as multiplying it, so the other side is turned
// instead, once an op: every block of 512 inputs becomes 16-bit whole numbers of one step, a power
// of two such that the largest takes all bits. Products and sums are then exact (16-bit
// multiply-add in pairs), in any order, and one rounding ends a block.
//
// Rounding an input to the step costs at most 2^-15 of its block's largest; the int8 weights are
// off by up to 2^-8 of their row's largest. Two digits an input, exact to 2^-30, made a dot product
// half as fast in cache (21 to 27 against 40 to 50 GB/s of one Zen 3 core).
#pragma once

#include "fetch.h"
#include "int16s.h"

namespace dejavu::DEJAVU_ISA {

// Inputs with a common step. All products of a block together fit 32 bits: 512 * 2^7 * 2^15.
constexpr Size kWholeBlock = 512;

// One batch row's input for rows of int8: whole numbers, padded with zeros to whole 64-element
// steps, and what a block's are to be multiplied by.
struct Digits {
  const int16_t* whole;
  const double* steps;
};

inline Size digits_width(Size width) { return (width + 63) / 64 * 64; }

// Floats of room for a row's numbers and steps: whole lines, and no more than that, for 16 rows of
// 512 at twice the distance would share half of the first cache's sets.
inline Size digits_floats(Size width) {
  const Size steps = (width + kWholeBlock - 1) / kWholeBlock;
  return digits_width(width) / 2 + (steps + 7) / 8 * 16;
}

// The largest magnitude among some numbers, and whether none of them is NaN or infinite.
struct Peak {
  float magnitude;
  bool finite;

  // The exponent that takes it to [2^(bits - 1), 2^bits); below 2^-90 everything counts as tiny.
  int shift(int bits) const {
    if (!finite || magnitude <= 1e-27f) return 119;
    uint32_t pattern;
    std::memcpy(&pattern, &magnitude, 4);
    return bits - 1 - ((int)(pattern >> 23) - 127);
  }
};

inline Peak peak_of(const float* x, Size width) {
  Vec top = zero(), strange = zero();
  for_vectors(0, width, [&](Size i, Size n) {
    const Vec v = load(x + i, n);
    top = max(top, max(v, zero() - v));
    strange = strange + (v - v);  // NaN once a NaN or an infinity is met
  });
  return {largest(top), sum(strange) == 0};
}

inline double power_of_two(int exponent) {
  const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

// x[0..width) in digits; `out` has room for digits_floats(width).
DEJAVU_LOOP Digits digits_of(const float* x, Size width, int16_t* out) {
  double* steps = (double*)(out + digits_width(width));
  for (Size start = 0; start < width; start += kWholeBlock) {
    const Size end = start + kWholeBlock < width ? start + kWholeBlock : width;
    const Peak peak = peak_of(x + start, end - start);
    const int shift = peak.shift(15);
    const float factor = (float)power_of_two(shift);
    Size i = start;
    if (peak.finite)  // the largest may be rounded up to 2^15
      for (; i < end; i += Vec::width)
        store_whole(load(x + i, end - i < Vec::width ? end - i : Vec::width) * broadcast(factor),
                    32767, out + i);
    const Size padded_end = (end + 63) / 64 * 64;
    if (i < padded_end) std::memset(out + i, 0, (size_t)(padded_end - i) * sizeof(int16_t));
    steps[start / kWholeBlock] = peak.finite ? power_of_two(-shift) : __builtin_nan("");
  }
  return {out, steps};
}

// out[r][j] = w[j] . x[r]; `next` as in Fetch.
template <int R, int J>
DEJAVU_LOOP void whole_dot(const int8_t* const* w, const int8_t* const* next, const Digits* x,
                           Size width, float* out, Size row_stride) {
  const Size lines = width / 64 * 64;
  const Fetch<J, int8_t> fetch(w, next, width);
  double sums[R][J] = {};
  for (Size start = 0, i = 0; start < width; start += kWholeBlock) {
    Int32s part[R][J];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < J; ++j) part[r][j] = no_sum();
    const auto step = [&](const Int16s(&stored)[J], Size at) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Int16s input = load_whole(x[r].whole + at);
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) {
          part[r][j] = add_products(part[r][j], stored[j], input);
          if (R > 1) settle_order(part[r][j]);
        }
      }
    };
    const Size end = start + kWholeBlock < lines ? start + kWholeBlock : lines;
    for (; i < end; i += 64) {
      fetch.at(i);
#pragma GCC unroll 8
      for (Size k = 0; k < 64; k += Int16s::width) {
        Int16s stored[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) stored[j] = widen(w[j] + i + k);
        step(stored, i + k);
      }
    }
    const Size rest_end = start + kWholeBlock < width ? i : width;
    for (; i < rest_end; i += Int16s::width) {
      Int16s stored[J];
      for (int j = 0; j < J; ++j) {
        if (i + Int16s::width <= width) {
          stored[j] = widen(w[j] + i);
          continue;
        }
        int8_t rest[Int16s::width] = {};
        std::memcpy(rest, w[j] + i, (size_t)(width - i));
        stored[j] = widen(rest);
      }
      step(stored, i);
    }
    if constexpr (R * J % 4 == 0) {
      if (width <= kWholeBlock) {
#pragma GCC unroll 2
        for (int k = 0; k < R * J; k += 4) {
          double steps[4];
          for (int i = 0; i < 4; ++i) steps[i] = x[(k + i) / J].steps[0];
          float totals[4];
          store_totals(&part[0][0] + k, steps, totals);
          for (int i = 0; i < 4; ++i) out[(k + i) / J * row_stride + (k + i) % J] = totals[i];
        }
        return;
      }
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < J; ++j)
        sums[r][j] += total(part[r][j]) * x[r].steps[start / kWholeBlock];
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) out[r * row_stride + j] = (float)sums[r][j];
}

// Short rows that lie one behind the other, N vectors each, with one batch row that stays in
// registers: out[j] = row j . x. Half the time of whole_dot at 96 numbers a row.
template <int N>
DEJAVU_LOOP void narrow_dots(const int8_t* w, Size count, const Digits& x, float* out) {
  constexpr Size kWidth = N * Int16s::width;
  Int16s input[N];
  for (int i = 0; i < N; ++i) input[i] = load_whole(x.whole + i * Int16s::width);
  const double steps[4] = {x.steps[0], x.steps[0], x.steps[0], x.steps[0]};
  const auto dot = [&](const int8_t* row) __attribute__((always_inline)) {
    Int32s sum = no_sum();
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i)
      sum = add_products(sum, widen(row + i * Int16s::width), input[i]);
    return sum;
  };
  Size j = 0;
  for (; j + 4 <= count; j += 4, w += 4 * kWidth) {
#pragma GCC unroll 8
    for (Size line = 0; line < 4 * kWidth; line += kLine) prefetch(w + kAheadBytes + line);
    const Int32s sums[4] = {dot(w), dot(w + kWidth), dot(w + 2 * kWidth), dot(w + 3 * kWidth)};
    store_totals(sums, steps, out + j);
  }
  for (; j < count; ++j, w += kWidth) out[j] = (float)(total(dot(w)) * x.steps[0]);
}

// Whether it did them: rows of whole vectors, eight at most.
inline bool try_narrow_dots(const int8_t* w, Size count, const Digits& x, Size width, float* out) {
  if (width % Int16s::width) return false;
  switch (width / Int16s::width) {
    case 1: narrow_dots<1>(w, count, x, out); return true;
    case 2: narrow_dots<2>(w, count, x, out); return true;
    case 3: narrow_dots<3>(w, count, x, out); return true;
    case 4: narrow_dots<4>(w, count, x, out); return true;
    case 5: narrow_dots<5>(w, count, x, out); return true;
    case 6: narrow_dots<6>(w, count, x, out); return true;
    case 7: narrow_dots<7>(w, count, x, out); return true;
    case 8: narrow_dots<8>(w, count, x, out); return true;
  }
  return false;
}

// Two stored rows of whole lines and one block with batch rows, four at a time. This is where steps
// of many rows spend their time: whole_dot takes as long for what stands around its loop of 512
// numbers as for the loop.
DEJAVU_LOOP void whole_pair(const int8_t* const* w, const int8_t* const* next, const Digits* x,
                            Size rows, Size width, float* out, Size row_stride) {
  const Fetch<2, int8_t> fetch(w, next, width);
  for (Size i = 0; i < width; i += kLine) fetch.at(i);
  const int8_t *first = w[0], *second = w[1];
  for (Size r = 0; r < rows; r += 4) {
    const int16_t *a = x[r].whole, *b = x[r + 1].whole, *c = x[r + 2].whole, *d = x[r + 3].whole;
    Int32s sum[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i] = no_sum();
    const auto add = [&](const int16_t* from, Int16s one, Int16s two, int at)
                         __attribute__((always_inline)) {
      Int16s input = load_whole(from);
      settle_order(input);  // loaded once, or loads would be the limit
      sum[at] = add_products(sum[at], one, input);
      settle_order(sum[at]);
      sum[at + 1] = add_products(sum[at + 1], two, input);
      settle_order(sum[at + 1]);
    };
    for (Size i = 0; i < width; i += kLine)
#pragma GCC unroll 8
      for (Size k = i; k < i + kLine; k += Int16s::width) {
        const Int16s one = widen(first + k), two = widen(second + k);
        add(a + k, one, two, 0);
        add(b + k, one, two, 2);
        add(c + k, one, two, 4);
        add(d + k, one, two, 6);
      }
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      const double even = x[r + i].steps[0], odd = x[r + i + 1].steps[0];
      float totals[4];
      store_totals(sum + 2 * i, {even, even, odd, odd}, totals);
      std::memcpy(out + (r + i) * row_stride, totals, 2 * sizeof(float));
      std::memcpy(out + (r + i + 1) * row_stride, totals + 2, 2 * sizeof(float));
    }
  }
}

// J stored rows with all batch rows, up to four of them at a time.
template <int J>
inline void whole_rows(const int8_t* const* w, const int8_t* const* next, const Digits* x,
                       Size rows, Size width, float* out, Size row_stride) {
  Size r = 0;
  if (J == 2 && rows >= 4 && width <= kWholeBlock && width % kLine == 0) {
    r = rows / 4 * 4;
    whole_pair(w, next, x, r, width, out, row_stride);
  }
  for (; r + 4 <= rows; r += 4)
    whole_dot<4, J>(w, next, x + r, width, out + r * row_stride, row_stride);
  for (; r + 2 <= rows; r += 2)
    whole_dot<2, J>(w, next, x + r, width, out + r * row_stride, row_stride);
  for (; r < rows; ++r)
    whole_dot<1, J>(w, next, x + r, width, out + r * row_stride, row_stride);
}

// out[r * row_stride + j] = w[j] . x[r]; `known` as in dot_grid.
inline void whole_grid(const int8_t* const* w, Size count, Size known, const Digits* x, Size rows,
                       Size width, float* out, Size row_stride) {
  Size j = 0;
  const auto next = [&](Size step, Size ahead) {
    return w + (j + ahead + step <= known ? j + ahead : j);
  };
  for (; rows == 1 && j + 4 <= count; j += 4)
    whole_dot<1, 4>(w + j, next(4, Fetch<4, int8_t>::rows_ahead(width)), x, width, out + j, 0);
  for (; rows > 1 && j + 2 <= count; j += 2)
    whole_rows<2>(w + j, next(2, Fetch<2, int8_t>::rows_ahead(width)), x, rows, width, out + j,
                  row_stride);
  if (rows == 1 && j < count) {
    // The last few, filled up with copies of the last: one row alone would wait for its own sums.
    const int8_t* last[4];
    float results[4];
    for (Size k = 0; k < 4; ++k) last[k] = w[j + k < count ? j + k : count - 1];
    whole_dot<1, 4>(last, last, x, width, results, 0);
    for (Size k = 0; j < count; ++k) out[j++] = results[k];
  }
  for (; j < count; ++j)
    whole_rows<1>(w + j, next(1, Fetch<1, int8_t>::rows_ahead(width)), x, rows, width, out + j,
                  row_stride);
}

}  // namespace dejavu::DEJAVU_ISA
