// The one matrix product of this backend: C[m][lanes] (+)= Σ_k A(m, k) · B[k][lanes].
//
// A's numbers are read one step of depth at a time where they lie (two strides, in bytes) and broadcast, or by tiles;
// rows of B and C are strips of kStrip floats. In float32 keys and values therefore never have to be copied or
// transposed: either the queries of a block are the lanes (scores, the output), or the channels are (the gradients of
// keys and values).
#pragma once

#include <cstring>

#include "vector.h"

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
// How torch multiplies by AMX is no part of its stable interface. Weak: where a torch has none of these, or calls them
// otherwise, they are null.
namespace at::native::cpublas {
__attribute__((weak)) bool could_pack(c10::ScalarType);
__attribute__((weak)) void brgemm(int64_t m, int64_t n, int64_t k, int64_t row_a, int64_t row_b, int64_t row_c,
                                  bool accumulate, const c10::BFloat16* a, const c10::BFloat16* b, float* c,
                                  bool by_pairs);
__attribute__((weak)) void brgemm_release(bool by_pairs);
}  // namespace at::native::cpublas
#endif

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

// What a step of depth multiplies: one float, or a pair of bfloat16 that one instruction multiplies and adds up.
struct Float32 {
  using Scalar = float;
  using Operand = Vec;
  static constexpr int kDepth = 1;
  // Keys taken at a time: their scores, weights and the queries stay in the first two levels of cache.
  static constexpr int64_t kChunk = 96;
  // Depth is filled with zeros to a multiple of this.
  static constexpr int64_t kTile = 1;
  static Operand broadcast(const char* a) {
    float x;
    std::memcpy(&x, a, sizeof x);
    return Vec(x);
  }
  static Operand load(const char* b) { return Vec::loadu(b); }
  static Vec multiply_add(Operand a, Operand b, Vec c) { return at::vec::fmadd(a, b, c); }
  // One vector of each of kDepth consecutive rows, as `load` wants them.
  static void store(char* b, const Vec* rows) { rows[0].store(b); }
  // What `store` stored.
  static void unpack(const char* b, Vec* rows) { rows[0] = Vec::loadu(b); }
  // The same numbers as `broadcast` wants them: side by side.
  static void store_row(float* a, Vec row) { row.store(a); }
  // What a thread does when it has made its last product.
  static void release() {}
};

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define DIFF_TRANSFORMER_BFLOAT16_PAIRS
struct BFloat16Pair {
  using Scalar = c10::BFloat16;
  using Operand = __m512i;
  static constexpr int kDepth = 2;
  static constexpr int64_t kChunk = 96;
  static constexpr int64_t kTile = 2;
  static Operand broadcast(const char* a) {
    int32_t x;
    std::memcpy(&x, a, sizeof x);
    return _mm512_set1_epi32(x);
  }
  static Operand load(const char* b) { return _mm512_loadu_si512(b); }
  static Vec multiply_add(Operand a, Operand b, Vec c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static __m256i round(Vec x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
  static void store(char* b, const Vec* rows) {
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(rows[1], rows[0]));
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(b, _mm512_permutexvar_epi16(order, both));
  }
  static void unpack(const char* b, Vec* rows) {
    const __m512i both = load(b);
    rows[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    rows[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void store_row(c10::BFloat16* a, Vec row) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(a), round(row)); }
  static void release() {}
};

// The same numbers in the same layout, multiplied by AMX: 16 rows of 32 numbers are one of its tiles.
struct BFloat16Tiles : BFloat16Pair {
  static constexpr int64_t kChunk = 256;
  static constexpr int64_t kTile = 32;
  static bool are_supported() {
    using namespace at::native::cpublas;
    return could_pack && brgemm && brgemm_release && could_pack(c10::ScalarType::BFloat16);
  }
  // C (+)= A · B; strides count numbers, and B is stored by pairs.
  static void multiply(int64_t rows, int64_t lanes, int64_t depth, const char* a, int64_t row, const char* b, float* c,
                       bool accumulate) {
    at::native::cpublas::brgemm(rows, lanes, depth, row, kStrip, kStrip, accumulate,
                                reinterpret_cast<const c10::BFloat16*>(a), reinterpret_cast<const c10::BFloat16*>(b), c,
                                true);
  }
  static void release() { at::native::cpublas::brgemm_release(true); }
};
#endif

// Whether tiles are multiplied, and vectors only where they leave rows over.
template <class Kind>
constexpr bool kMultipliesTiles = Kind::kTile > Kind::kDepth;

// Held by a thread while it multiplies.
template <class Kind>
struct Products {
  Products() = default;
  Products(const Products&) = delete;
  ~Products() { Kind::release(); }
};

// A(m, k) at address a + m·row + k·step.
struct Left {
  const char* a;
  int64_t row, step;
  Left rows_from(int64_t m) const { return {a + m * row, row, step}; }
  Left depth_from(int64_t k) const { return {a + k * step, row, step}; }
};

// A range of the vectors of a strip.
struct Lanes {
  int first, last;
};

template <class Kind, int M, int N, bool kAccumulate>
inline __attribute__((always_inline)) void tile(Left left, const char* b, float* c, int64_t depth) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = Vec(0.0f);
  const char* a = left.a;
  for (int64_t k = 0; k < depth; ++k, a += left.step, b += kStrip * sizeof(float)) {
    typename Kind::Operand right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) right[n] = Kind::load(b + n * kLanes * sizeof(float));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto factor = Kind::broadcast(a + m * left.row);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = Kind::multiply_add(factor, right[n], sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* to = c + m * kStrip + n * kLanes;
      // Added at the end and not counted on from: a sum of short sums is the more exact one.
      (kAccumulate ? load(to) + sums[m][n] : sums[m][n]).store(to);
    }
}

template <class Kind, int N, bool kAccumulate>
void tiles(Left left, const char* b, float* c, int64_t rows, int64_t depth) {
  int64_t m = 0;
  for (; m + kTileRows <= rows; m += kTileRows)
    tile<Kind, kTileRows, N, kAccumulate>(left.rows_from(m), b, c + m * kStrip, depth);
  left = left.rows_from(m);
  c += m * kStrip;
  switch (rows - m) {
    case 5: return tile<Kind, 5, N, kAccumulate>(left, b, c, depth);
    case 4: return tile<Kind, 4, N, kAccumulate>(left, b, c, depth);
    case 3: return tile<Kind, 3, N, kAccumulate>(left, b, c, depth);
    case 2: return tile<Kind, 2, N, kAccumulate>(left, b, c, depth);
    case 1: return tile<Kind, 1, N, kAccumulate>(left, b, c, depth);
    default: return;
  }
}

// C (+)= A · B for the vectors `lanes` of a strip; `depth` counts steps of Kind::kDepth numbers.
template <class Kind, bool kAccumulate>
void product(Left left, const void* right, float* c, int64_t rows, Lanes lanes, int64_t depth) {
  const char* b = static_cast<const char*>(right) + lanes.first * kLanes * sizeof(float);
  c += lanes.first * kLanes;
  if constexpr (kMultipliesTiles<Kind>) {
    // Whole tiles of rows alone: oneDNN keeps code of its own for every number of rows that it meets.
    const int64_t whole = rows / Kind::kTile * Kind::kTile;
    if (whole > 0)
      Kind::multiply(whole, (lanes.last - lanes.first) * kLanes, depth * Kind::kDepth, left.a,
                     left.row / static_cast<int64_t>(sizeof(typename Kind::Scalar)), b, c, kAccumulate);
    left = left.rows_from(whole);
    c += whole * kStrip;
    rows -= whole;
  }
  int vecs = lanes.last - lanes.first;
  for (; vecs >= kPanelVecs; vecs -= kPanelVecs) {
    tiles<Kind, kPanelVecs, kAccumulate>(left, b, c, rows, depth);
    b += kPanelVecs * kLanes * sizeof(float);
    c += kPanelVecs * kLanes;
  }
  if constexpr (kPanelVecs > 2) {
    if (vecs == 3) return tiles<Kind, 3, kAccumulate>(left, b, c, rows, depth);
    if (vecs == 2) return tiles<Kind, 2, kAccumulate>(left, b, c, rows, depth);
  }
  if (vecs == 1) tiles<Kind, 1, kAccumulate>(left, b, c, rows, depth);
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
