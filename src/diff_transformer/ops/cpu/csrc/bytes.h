// Products of rows of int8 with 16 bits of something else, by instructions that multiply bytes and add up four of them.
#pragma once

#include <cstring>

#include "block.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
constexpr bool kHasByteProducts = true;
#else
constexpr bool kHasByteProducts = false;
#endif
// 16 bits are enough for queries and weights of 16 bits: what they lose is a 128th of bfloat16's rounding, and a 16th of
// float16's, of the largest number.
template <class T>
constexpr bool kMultipliesBytes = kHasByteProducts && sizeof(T) == 2;

constexpr int64_t kBytes = 64;        // of a vector
constexpr int64_t kInterleaved = 64;  // rows
constexpr float kMost16 = 127 * 257;  // of a number of two bytes, 256 · high + low with both from −128 to 127
constexpr float kLeast = 1e-30f;      // where all are smaller, they are 0: the inverse of a factor has to be finite

// Numbers rounded to 16 bits: x ≈ factor · (256 · high + low). What is not finite makes the factor a NaN.
struct TwoBytes {
  float factor;
  int32_t sum;  // of all
};

// Of whole vectors of numbers.
TwoBytes to_two_bytes(const float* x, int64_t count, int8_t* high, int8_t* low);

// Products of a query of V vectors of bytes, zeros behind its width, with keys j … j + kLanes − 1 (or `last` again).
template <int V>
Vec multiply_bytes(TwoBytes query, const int8_t* high, const int8_t* low, int64_t width, const int8_t* keys, int64_t stride,
                   int64_t j, int64_t last);

// At most kInterleaved rows of `width` bytes, four side by side: [width / kBytes][rows / 4][4 vectors], the last row for
// those that lack.
void interleave_rows(const int8_t* rows, int64_t stride, int64_t count, int64_t width, int8_t* to);

// Adds the sum over `count` interleaved rows, each times its weight, to kBytes channels. Weights behind them are 0.
void add_interleaved(TwoBytes weights, const int8_t* high, const int8_t* low, const int8_t* rows, int64_t count, float* to);

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)

// One operand of the instruction has no sign: 128 is added to it here, and 128 · sum taken off the products.
inline __m512i without_sign(__m512i x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }

inline float largest_magnitude(const float* x, int64_t count) {
  Vec top(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) top = at::vec::maximum(top, load(x + i).abs());
  return largest(top);
}

inline TwoBytes to_two_bytes(const float* x, int64_t count, int8_t* high, int8_t* low) {
  const float most = largest_magnitude(x, count);
  const bool finite = most <= std::numeric_limits<float>::max();
  const Vec inverse(finite && most > kLeast ? kMost16 / most : 0.0f);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m512i both = finite ? _mm512_cvtps_epi32(load(x + i) * inverse) : _mm512_setzero_si512();
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(both, _mm512_set1_epi32(128)), 8);
    const __m512i lower = _mm512_sub_epi32(both, _mm512_slli_epi32(upper, 8));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(lower));
    sum = _mm512_add_epi32(sum, both);
  }
  return {finite ? most / kMost16 : std::numeric_limits<float>::quiet_NaN(), _mm512_reduce_add_epi32(sum)};
}

inline __m512i joined(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

template <int V, bool kIsWhole>
struct ByteQuery {
  __m512i high[V], low[V];
  __mmask64 rest;  // which bytes of the last vector there are

  ByteQuery(const int8_t* upper, const int8_t* lower, int64_t width) : rest(~0ull >> (V * kBytes - width)) {
    for (int k = 0; k < V; ++k) {
      high[k] = _mm512_loadu_si512(upper + k * kBytes);
      low[k] = _mm512_loadu_si512(lower + k * kBytes);
    }
  }

  // Products with keys j … j + Count − 1 (or `last` again), each over kLanes / Count lanes that are yet to be added up.
  template <int Count>
  inline __attribute__((always_inline)) __m512i multiply(const int8_t* keys, int64_t stride, int64_t j,
                                                         int64_t last) const {
    if constexpr (Count == 1) {
      const int8_t* key = keys + std::min(j, last) * stride;
      __m512i upper = _mm512_setzero_si512(), lower = upper;
      for (int k = 0; k < V; ++k) {
        const __m512i x = without_sign(kIsWhole || k < V - 1 ? _mm512_loadu_si512(key + k * kBytes)
                                                             : _mm512_maskz_loadu_epi8(rest, key + k * kBytes));
        upper = _mm512_dpbusd_epi32(upper, x, high[k]);
        lower = _mm512_dpbusd_epi32(lower, x, low[k]);
      }
      return joined(upper, lower);
    } else {
      const __m512i x = multiply<Count / 2>(keys, stride, j, last);
      const __m512i y = multiply<Count / 2>(keys, stride, j + Count / 2, last);
      const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
      const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
      return _mm512_add_epi32(_mm512_permutex2var_epi32(x, even, y), _mm512_permutex2var_epi32(x, odd, y));
    }
  }
};

template <int V>
Vec multiply_bytes(TwoBytes query, const int8_t* high, const int8_t* low, int64_t width, const int8_t* keys, int64_t stride,
                   int64_t j, int64_t last) {
  const __m512i products =
      width == V * kBytes ? ByteQuery<V, true>(high, low, width).template multiply<kLanes>(keys, stride, j, last)
                          : ByteQuery<V, false>(high, low, width).template multiply<kLanes>(keys, stride, j, last);
  return Vec(_mm512_cvtepi32_ps(_mm512_sub_epi32(products, _mm512_set1_epi32(128 * query.sum)))) * Vec(query.factor);
}

inline void interleave_rows(const int8_t* rows, int64_t stride, int64_t count, int64_t width, int8_t* to) {
  for (int64_t j = 0; j < count; j += 4)
    for (int64_t channel = 0; channel < width; channel += kBytes) {
      __m512i x[4];
      for (int64_t r = 0; r < 4; ++r)
        x[r] = without_sign(_mm512_loadu_si512(rows + std::min(j + r, count - 1) * stride + channel));
      const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
      const __m512i c = _mm512_unpackhi_epi8(x[0], x[1]), d = _mm512_unpackhi_epi8(x[2], x[3]);
      int8_t* four = to + channel * kInterleaved + j * kBytes;
      _mm512_storeu_si512(four, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(four + kBytes, _mm512_unpackhi_epi16(a, b));
      _mm512_storeu_si512(four + 2 * kBytes, _mm512_unpacklo_epi16(c, d));
      _mm512_storeu_si512(four + 3 * kBytes, _mm512_unpackhi_epi16(c, d));
    }
}

inline void add_interleaved(TwoBytes weights, const int8_t* high, const int8_t* low, const int8_t* rows, int64_t count,
                            float* to) {
  __m512i upper[4], lower[4];
  for (int n = 0; n < 4; ++n) upper[n] = lower[n] = _mm512_setzero_si512();
  for (int64_t j = 0; j < count; j += 4, rows += 4 * kBytes) {
    int32_t four[2];
    std::memcpy(four, high + j, 4);
    std::memcpy(four + 1, low + j, 4);
    const __m512i a = _mm512_set1_epi32(four[0]), b = _mm512_set1_epi32(four[1]);
    for (int n = 0; n < 4; ++n) {
      const __m512i x = _mm512_loadu_si512(rows + n * kBytes);
      upper[n] = _mm512_dpbusd_epi32(upper[n], x, a);
      lower[n] = _mm512_dpbusd_epi32(lower[n], x, b);
    }
  }
  // Quarter L of vector n has channels 16 L + 4 n … + 3.
  const __m512i offset = _mm512_set1_epi32(128 * weights.sum);
  __m512i x[4];
  for (int n = 0; n < 4; ++n) x[n] = _mm512_sub_epi32(joined(upper[n], lower[n]), offset);
  const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(x[0], x[1], 0xee), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
  const __m512i channels[] = {_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd),
                              _mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd)};
  for (int n = 0; n < 4; ++n) {
    float* part = to + n * kLanes;
    at::vec::fmadd(Vec(_mm512_cvtepi32_ps(channels[n])), Vec(weights.factor), load(part)).store(part);
  }
}

#endif

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
