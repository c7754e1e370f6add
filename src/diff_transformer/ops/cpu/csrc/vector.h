// One name for the widest float vector that this build has, and the few functions at::vec lacks.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <limits>

// What at::vec says where it is used wrongly. It is no part of torch's stable interface: weak, so that a torch without
// it loads the library all the same.
namespace c10::detail {
__attribute__((weak)) void torchCheckFail(const char*, const char*, uint32_t, const char*);
}

namespace diff_transformer {

// Each build is for one instruction set: names of their own keep two builds in one process apart.
inline namespace CPU_CAPABILITY {

using Vec = at::vec::Vectorized<float>;
using IntVec = at::vec::Vectorized<int32_t>;

constexpr int kLanes = Vec::size();
// Vectors side by side in a tile: with kTileRows accumulators each they fill the registers without spilling.
constexpr int kPanelVecs = kLanes == 8 ? 2 : 4;
constexpr int kTileRows = 6;
// A row of every buffer: the queries of a block, or as many channels.
constexpr int kStrip = 64;
constexpr int kStripVecs = kStrip / kLanes;
static_assert(kStrip % kLanes == 0);

constexpr float kLowest = -std::numeric_limits<float>::max();
constexpr float kLog2E = 1.4426950408889634f;

// Sums, or maxima, that do not wait for one another.
constexpr int kChains = 4;

inline Vec load(const float* x) { return Vec::loadu(x); }

// A vector of a row in any of the three dtypes.
inline Vec load_row(const float* x) { return Vec::loadu(x); }
inline Vec load_row(const c10::BFloat16* x) {
  Vec y;
  at::vec::load_fp32_from_bf16(x, y);
  return y;
}
inline Vec load_row(const c10::Half* x) {
  Vec y;
  at::vec::load_fp32_from_fp16(x, y);
  return y;
}

inline Vec load_row(const int8_t* x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
#else
  alignas(64) float y[kLanes];
  for (int i = 0; i < kLanes; ++i) y[i] = x[i];
  return load(y);
#endif
}

// The first `count` numbers, then zeros.
template <class T>
Vec load_row(const T* x, int64_t count) {
  if (count >= kLanes) return load_row(x);
  alignas(64) T part[kLanes] = {};
  std::copy(x, x + count, part);
  return load_row(part);
}
inline Vec load_row(const float* x, int64_t count) { return Vec::loadu(x, std::min<int64_t>(count, kLanes)); }

inline float sum(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

inline float largest(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x);
}

// Are all of `count` numbers, whole vectors of them, finite?
inline bool are_finite(const float* x, int64_t count) {
  Vec zeros[kChains] = {Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)};
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes)
    for (int c = 0; c < kChains; ++c) zeros[c] = at::vec::fmadd(load(x + i + c * kLanes), Vec(0.0f), zeros[c]);
  for (; i < count; i += kLanes) zeros[0] = at::vec::fmadd(load(x + i), Vec(0.0f), zeros[0]);
  alignas(64) float lanes[kLanes];
  ((zeros[0] + zeros[1]) + (zeros[2] + zeros[3])).store(lanes);
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return sum == 0.0f;
}

// e^x for x ≤ 0 within 4 units in the last place; exactly 1 at 0, and exactly 0 below −88, −infinity included.
inline Vec exp_of_negative(Vec x) {
  // Adding 1.5·2^23 leaves the nearest integer in the low bits; the 127 beside it is the exponent's bias.
  const Vec magic(12582912.0f + 127.0f);
  x = at::vec::clamp_min(x * Vec(kLog2E), Vec(-127.0f));
  const Vec shifted = x + magic;
  const Vec f = x - (shifted - magic);
  Vec y = at::vec::fmadd(Vec(1.3276472454890609e-3f), f, Vec(9.675540961325169e-3f));
  y = at::vec::fmadd(y, f, Vec(5.550713092088699e-2f));
  y = at::vec::fmadd(y, f, Vec(2.4022120237350464e-1f));
  y = at::vec::fmadd(y, f, Vec(6.931469440460205e-1f));
  y = at::vec::fmadd(y, f, Vec(1.0f));
  const IntVec exponent = at::vec::cast<int32_t>(shifted) << IntVec(23);
  return y * at::vec::cast<float>(exponent);
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
