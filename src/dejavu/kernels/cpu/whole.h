// Dot products of int8 rows in whole numbers.
//
// Turning an int8 into an fp32 costs as much as multiplying it, so the other side is turned
// instead, once an op: x = (hi * 2^15 + lo) * step with 16-bit hi and lo and a power of two for
// step, which is exact for all elements within 2^-6 of the largest and within 2^-30 of the largest
// for the others. Products and sums are then exact (16-bit multiply-add in pairs), in any order,
// and one rounding ends a dot product: closer to the truth than a sum in fp32, and on Zen 3 close
// to the read bandwidth of memory where the way by fp32 reaches 70-84 % of it.
#pragma once

#include "fetch.h"

namespace dejavu::DEJAVU_ISA {

#if defined(__AVX512F__)

struct Int16s {  // int8 numbers, widened
  static constexpr Size width = 32;
  __m512i v;
};
struct Int32s {  // sums of products
  __m512i v;
};

inline Int32s no_sum() { return {_mm512_setzero_si512()}; }
inline Int16s widen(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))};
}
inline Int32s add_products(Int32s sum, Int16s w, const int16_t* x) {
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(w.v, _mm512_loadu_si512(x)))};
}
inline double total(Int32s hi, Int32s lo) {
  const auto doubles = [](__m512i a) {
    return _mm512_add_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(a)),
                         _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(a, 1)));
  };
  return _mm512_reduce_add_pd(
      _mm512_fmadd_pd(doubles(hi.v), _mm512_set1_pd(32768.0), doubles(lo.v)));
}

#elif defined(__AVX2__)

struct Int16s {
  static constexpr Size width = 16;
  __m256i v;
};
struct Int32s {
  __m256i v;
};

inline Int32s no_sum() { return {_mm256_setzero_si256()}; }
inline Int16s widen(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p))};
}
inline Int32s add_products(Int32s sum, Int16s w, const int16_t* x) {
  return {_mm256_add_epi32(
      sum.v, _mm256_madd_epi16(w.v, _mm256_loadu_si256((const __m256i*)x)))};
}
inline double total(Int32s hi, Int32s lo) {
  const auto doubles = [](__m256i a) {
    return _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(a)),
                         _mm256_cvtepi32_pd(_mm256_extracti128_si256(a, 1)));
  };
  const __m256d four = _mm256_fmadd_pd(doubles(hi.v), _mm256_set1_pd(32768.0), doubles(lo.v));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

#else

struct Int16s {
  static constexpr Size width = 8;
  int16_t v[8];
};
struct Int32s {
  int32_t v[4];
};

inline Int32s no_sum() { return {{0, 0, 0, 0}}; }
inline Int16s widen(const int8_t* p) {
  Int16s w;
  for (int i = 0; i < 8; ++i) w.v[i] = p[i];
  return w;
}
inline Int32s add_products(Int32s sum, Int16s w, const int16_t* x) {
  for (int i = 0; i < 4; ++i)
    sum.v[i] += (int32_t)w.v[2 * i] * x[2 * i] + (int32_t)w.v[2 * i + 1] * x[2 * i + 1];
  return sum;
}
inline double total(Int32s hi, Int32s lo) {
  double sum = 0;
  for (int i = 0; i < 4; ++i) sum += hi.v[i] * 32768.0 + lo.v[i];
  return sum;
}

#endif

// Columns whose products fit 32 bits in every lane: at most 2048 / 8 pairs of 2 * 2^7 * 2^14.
constexpr Size kWholeBlock = 2048;

// One batch row's input for rows of int8: hi and lo, padded with zeros to whole 64-element steps.
struct Digits {
  const int16_t *hi, *lo;
  double step;
};

inline Size digits_width(Size width) { return (width + 63) / 64 * 64; }

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

// x[0..width) in digits, written to `out` [2, digits_width(width)].
DEJAVU_LOOP Digits digits_of(const float* x, Size width, int16_t* out) {
  int16_t *hi = out, *lo = out + digits_width(width);
  const Peak peak = peak_of(x, width);
  const int shift = peak.shift(29);
  const float factor = (float)power_of_two(shift);
  for (Size i = 0; i < width; i += 64) {
    int32_t q[64] = {};
    if (peak.finite)
      for_vectors(i, width - i < 64 ? width : i + 64, [&](Size k, Size n) {
        round_to_ints(load(x + k, n) * broadcast(factor), q + (k - i));
      });
    for (Size k = 0; k < 64; ++k) {
      const int32_t upper = (q[k] + (1 << 14)) >> 15;
      hi[i + k] = (int16_t)upper;
      lo[i + k] = (int16_t)(q[k] - upper * (1 << 15));
    }
  }
  return {hi, lo, peak.finite ? power_of_two(-shift) : __builtin_nan("")};
}

// out[r][j] = w[j] . x[r]; `next` as in Fetch.
template <int R, int J>
DEJAVU_LOOP void whole_dot(const int8_t* const* w, const int8_t* const* next, const Digits* x,
                           Size width, float* out, Size row_stride) {
  const Size lines = width / 64 * 64;
  const Fetch<J, int8_t> fetch(w, next, width);
  double sums[R][J] = {};
  Size i = 0;
  do {
    Int32s hi[R][J], lo[R][J];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < J; ++j) hi[r][j] = lo[r][j] = no_sum();
    const auto step = [&](const Int16s(&stored)[J], Size at) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) {
          hi[r][j] = add_products(hi[r][j], stored[j], x[r].hi + at);
          lo[r][j] = add_products(lo[r][j], stored[j], x[r].lo + at);
        }
    };
    const Size end = i + kWholeBlock < lines ? i + kWholeBlock : lines;
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
    for (; end == lines && i < width; i += Int16s::width) {
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
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < J; ++j) sums[r][j] += total(hi[r][j], lo[r][j]);
  } while (i < width);
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) out[r * row_stride + j] = (float)(sums[r][j] * x[r].step);
}

// out[r * row_stride + j] = w[j] . x[r]; `known` as in dot_grid.
inline void whole_grid(const int8_t* const* w, Size count, Size known, const Digits* x, Size rows,
                       Size width, float* out, Size row_stride) {
  Size j = 0;
  Size ahead = Fetch<4, int8_t>::rows_ahead(width);
  for (; rows == 1 && j + 4 <= count; j += 4)
    whole_dot<1, 4>(w + j, w + (j + ahead + 4 <= known ? j + ahead : j), x, width, out + j, 0);
  ahead = Fetch<1, int8_t>::rows_ahead(width);
  for (; j < count; ++j) {
    const int8_t* const* next = w + (j + ahead < known ? j + ahead : j);
    Size r = 0;
    for (; r + 4 <= rows; r += 4)
      whole_dot<4, 1>(w + j, next, x + r, width, out + r * row_stride + j, row_stride);
    for (; r + 2 <= rows; r += 2)
      whole_dot<2, 1>(w + j, next, x + r, width, out + r * row_stride + j, row_stride);
    for (; r < rows; ++r)
      whole_dot<1, 1>(w + j, next, x + r, width, out + r * row_stride + j, row_stride);
  }
}

}  // namespace dejavu::DEJAVU_ISA
