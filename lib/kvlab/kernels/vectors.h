// Vectors as wide as the registers; numbers of all kinds become float32 on the way in.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Arrays of vectors stay in registers only if the loops over them are unrolled early; with 4 bits 6.7 ms become 4.4.
#define UNROLL _Pragma("GCC unroll 8")

namespace vectors {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__F16C__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));

template <class V> inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Vec widen(const float* p) { return load<Vec>(p); }
// bfloat16 is the upper half of a float32.
#if defined(__AVX512F__)
inline Vec widen(const c10::BFloat16* p) {  // one instruction, where GCC 12 makes five of __builtin_convertvector
  return (Vec)((Ints)_mm512_cvtepu16_epi32(load<__m256i>(p)) << 16);
}
inline Vec widen(const c10::Half* p) { return (Vec)_mm512_cvtph_ps(load<__m256i>(p)); }
inline float sum(Vec v) { return _mm512_reduce_add_ps((__m512)v); }
#else
inline Vec widen(const c10::BFloat16* p) { return (Vec)(__builtin_convertvector(load<Shorts>(p), Ints) << 16); }
#if defined(__AVX2__) && defined(__F16C__)
inline Vec widen(const c10::Half* p) { return (Vec)_mm256_cvtph_ps(load<__m128i>(p)); }
#else
inline Vec widen(const c10::Half* p) { return Vec{p[0], p[1], p[2], p[3]}; }
#endif
inline float sum(Vec v) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}
#endif

}  // namespace vectors
