// One float vector type per instruction set, chosen by the flags of the translation unit.
//
// Everything lives in namespace dejavu::DEJAVU_ISA, so that the copies compiled with other flags
// never meet at link time. A multiply-add rounds once where the set has FMA and twice where it has
// not; -ffp-contract=off keeps the compiler from deciding that per call site, which would make a
// row's bits depend on how many rows were computed beside it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.h"

#ifndef DEJAVU_ISA
#define DEJAVU_ISA portable
#endif

namespace dejavu::DEJAVU_ISA {

struct Bf16 {
  uint16_t bits;
};

// Rounded to nearest, ties to even, as torch does; NaN stays NaN.
inline Bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {(uint16_t)((bits >> 16) | 0x40)};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

#if defined(__AVX512F__)

struct Vec {
  static constexpr int width = 16;
  __m512 v;
};

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const Bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Vec load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round_even(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec pow2(Vec n) {  // 2^n for whole n in [-126, 127]
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
inline void round_to_ints(Vec a, int32_t* p) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(a.v)); }
inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) {  // a < b ? yes : no
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline uint32_t less_bits(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }

#elif defined(__AVX2__)

struct Vec {
  static constexpr int width = 8;
  __m256 v;
};

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const Bf16* p) {
  // A broadcast costs only the load, and one byte shuffle puts every number where an fp32 has its
  // upper half: half the work of widening and shifting.
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  const __m256i upper = _mm256_setr_epi8(
      -1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
      -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return {_mm256_castsi256_ps(_mm256_shuffle_epi8(both, upper))};
}
inline Vec load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec round_even(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec pow2(Vec n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}
inline void round_to_ints(Vec a, int32_t* p) {
  _mm256_storeu_si256((__m256i*)p, _mm256_cvtps_epi32(a.v));
}
inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline uint32_t less_bits(Vec a, Vec b) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ));
}

#else

// Four lanes of the compiler's own vector type: SSE2 and NEON registers without naming either.
typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Uint4 __attribute__((vector_size(16)));

struct Vec {
  static constexpr int width = 4;
  Float4 v;
};

inline Vec zero() { return {Float4{0, 0, 0, 0}}; }
inline Vec broadcast(float x) { return {Float4{x, x, x, x}}; }
inline Vec load(const float* p) {
  Vec a;
  std::memcpy(&a.v, p, sizeof(a.v));
  return a;
}
inline Vec load(const Bf16* p) {
  const Uint4 wide = {p[0].bits, p[1].bits, p[2].bits, p[3].bits};
  return {(Float4)(wide << 16)};
}
inline Vec load(const int8_t* p) {
  return {Float4{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}};
}
inline void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof(a.v)); }
inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
  for (int i = 0; i < 4; ++i) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
#else
  return {a.v * b.v + c.v};
#endif
}
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec round_even(Vec a) {
  // Adding 1.5 * 2^23 pushes the fraction out; enough for the |a| < 2^22 that exp() passes.
  const Float4 big = broadcast(12582912.0f).v;
  return {(a.v + big) - big};
}
inline Vec pow2(Vec n) {
  const Int4 e = __builtin_convertvector(n.v, Int4) + 127;
  return {(Float4)(e << 23)};
}
inline void round_to_ints(Vec a, int32_t* p) {
  for (int i = 0; i < 4; ++i) p[i] = (int32_t)__builtin_rintf(a.v[i]);
}
inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) { return {a.v < b.v ? yes.v : no.v}; }
inline uint32_t less_bits(Vec a, Vec b) {
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= (uint32_t)(a.v[i] < b.v[i]) << i;
  return bits;
}

#endif

template <class T>
inline Vec load_partial(const T* p, Size n) {  // lanes from n on are 0
  T lanes[Vec::width] = {};
  std::memcpy(lanes, p, (size_t)n * sizeof(T));
  return load(lanes);
}

inline void store_partial(float* p, Vec a, Size n) {
  float lanes[Vec::width];
  store(lanes, a);
  std::memcpy(p, lanes, (size_t)n * sizeof(float));
}

template <class T>
inline Vec load(const T* p, Size lanes) {
  return lanes == Vec::width ? load(p) : load_partial(p, lanes);
}

inline void store(float* p, Vec a, Size lanes) {
  if (lanes == Vec::width)
    store(p, a);
  else
    store_partial(p, a, lanes);
}

// each(i, lanes) over [first, last), `lanes` short only in the last call.
template <class Each>
inline void for_vectors(Size first, Size last, Each&& each) {
  Size i = first;
  for (; i + Vec::width <= last; i += Vec::width) each(i, (Size)Vec::width);
  if (i < last) each(i, last - i);
}

// Halves folded onto each other: the same tree for every width.
inline float sum(Vec a) {
  float lanes[Vec::width];
  store(lanes, a);
  for (int half = Vec::width / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Four such sums at once, each by the same tree.
inline void sum_four(const Vec* a, float* out) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  __m256 h[4];
  for (int i = 0; i < 4; ++i)
    h[i] = _mm256_add_ps(_mm512_castps512_ps256(a[i].v), _mm512_extractf32x8_ps(a[i].v, 1));
#else
  const __m256 h[4] = {a[0].v, a[1].v, a[2].v, a[3].v};
#endif
  const __m256 x = _mm256_add_ps(_mm256_permute2f128_ps(h[0], h[1], 0x20),
                                 _mm256_permute2f128_ps(h[0], h[1], 0x31));
  const __m256 y = _mm256_add_ps(_mm256_permute2f128_ps(h[2], h[3], 0x20),
                                 _mm256_permute2f128_ps(h[2], h[3], 0x31));
  const __m256 q =
      _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));  // 0 2 | 1 3
  const __m256 r = _mm256_hadd_ps(q, q);
  const __m128 even = _mm256_castps256_ps128(r), odd = _mm256_extractf128_ps(r, 1);
  _mm_storeu_ps(out, _mm_unpacklo_ps(even, odd));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(a[i]);
#endif
}

inline float largest(Vec a) {
  float lanes[Vec::width];
  store(lanes, a);
  float top = lanes[0];
  for (int i = 1; i < Vec::width; ++i) top = lanes[i] > top ? lanes[i] : top;
  return top;
}

// A hot loop stands alone: inlined into its callers it loses vector registers to what they keep.
#define DEJAVU_LOOP [[gnu::noinline]] static

// Always inline: GCC takes a function that only fetches ahead for one without effect, and drops it.
[[gnu::always_inline]] inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
[[gnu::always_inline]] inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 2); }

// exp(a) within 1.5 ulp: a = n ln 2 + r, |r| <= ln 2 / 2 (ln 2 in two parts), Taylor to r^7, whose
// remainder is below 2^-25 of the result. Underflow gives 0, overflow infinity.
inline Vec exp(Vec a) {
  const Vec high = broadcast(88.72283f), low = broadcast(-87.33654f);
  const Vec x = min(max(a, low), high);
  const Vec n = round_even(x * broadcast(1.44269504f));
  const Vec r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
  Vec p = broadcast(1.0f / 5040);
  p = fma(p, r, broadcast(1.0f / 720));
  p = fma(p, r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p * r, r, r) + broadcast(1.0f);
  // n reaches 128 at the upper end, which no float holds as a power: scale in two steps.
  const Vec half = round_even(n * broadcast(0.5f));
  Vec y = (p * pow2(half)) * pow2(n - half);
  y = select_less(a, low, zero(), y);
  y = select_less(high, a, broadcast(__builtin_inff()), y);
  return select_less(a, broadcast(__builtin_inff()), y, a);  // NaN stays NaN
}

}  // namespace dejavu::DEJAVU_ISA
