// Vectors of 16-bit whole numbers and the exact sums of their products, one pair of types an
// instruction set, chosen as in simd.h.
#pragma once

#include "simd.h"

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
inline void settle_order(Int32s& sum) { asm("" : "+v"(sum.v)); }
inline void settle_order(Int16s& numbers) { asm("" : "+v"(numbers.v)); }
inline void store_whole(Vec a, int32_t largest, int16_t* out) {
  const __m512i limit = _mm512_set1_epi32(largest);
  const __m512i low = _mm512_max_epi32(_mm512_cvtps_epi32(a.v),
                                       _mm512_sub_epi32(_mm512_setzero_si512(), limit));
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi32_epi16(_mm512_min_epi32(low, limit)));
}
inline Int16s load_whole(const int16_t* x) { return {_mm512_loadu_si512(x)}; }
inline Int32s add_products(Int32s sum, Int16s w, Int16s x) {
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(w.v, x.v))};
}
inline double total(Int32s sum) { return _mm512_reduce_add_epi32(sum.v); }

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
inline void settle_order(Int32s& sum) { asm("" : "+x"(sum.v)); }
inline void settle_order(Int16s& numbers) { asm("" : "+x"(numbers.v)); }
inline void store_whole(Vec a, int32_t largest, int16_t* out) {
  const __m256i limit = _mm256_set1_epi32(largest);
  const __m256i low = _mm256_max_epi32(_mm256_cvtps_epi32(a.v),
                                       _mm256_sub_epi32(_mm256_setzero_si256(), limit));
  const __m256i q = _mm256_min_epi32(low, limit);
  _mm_storeu_si128((__m128i*)out, _mm_packs_epi32(_mm256_castsi256_si128(q),
                                                  _mm256_extracti128_si256(q, 1)));
}
inline Int16s load_whole(const int16_t* x) {
  return {_mm256_loadu_si256((const __m256i*)x)};
}
inline Int32s add_products(Int32s sum, Int16s w, Int16s x) {
  return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(w.v, x.v))};
}
inline double total(Int32s sum) {
  const __m128i four =
      _mm_add_epi32(_mm256_castsi256_si128(sum.v), _mm256_extracti128_si256(sum.v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
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
inline void settle_order(Int32s&) {}
inline void settle_order(Int16s&) {}
inline void store_whole(Vec a, int32_t largest, int16_t* out) {
  int32_t q[Vec::width];
  round_to_ints(a, q);
  for (int i = 0; i < Vec::width; ++i)
    out[i] = (int16_t)(q[i] > largest ? largest : q[i] < -largest ? -largest : q[i]);
}
inline Int16s load_whole(const int16_t* x) {
  Int16s v;
  std::memcpy(v.v, x, sizeof(v.v));
  return v;
}
inline Int32s add_products(Int32s sum, Int16s w, Int16s x) { return add_products(sum, w, x.v); }
inline double total(Int32s sum) { return sum.v[0] + sum.v[1] + sum.v[2] + sum.v[3]; }

#endif

// Four sums times powers of two, rounded once.
inline void store_totals(const Int32s* sum, const double (&step)[4], float* out) {
#if defined(__AVX2__)
  const auto halves = [](Int32s a) {
#if defined(__AVX512F__)
    return _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1));
#else
    return a.v;
#endif
  };
  const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(halves(sum[0]), halves(sum[1])),
                                          _mm256_hadd_epi32(halves(sum[2]), halves(sum[3])));
  const __m128i four =
      _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_ps(out, _mm_mul_ps(_mm_cvtepi32_ps(four), _mm256_cvtpd_ps(_mm256_loadu_pd(step))));
#else
  for (int j = 0; j < 4; ++j) out[j] = (float)(total(sum[j]) * step[j]);
#endif
}

}  // namespace dejavu::DEJAVU_ISA
