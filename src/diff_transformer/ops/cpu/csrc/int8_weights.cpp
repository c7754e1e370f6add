// Products with weights of int8, for few rows of activations: what counts is that each weight is read from memory once,
// in order, and widened on the way.
#include "block.h"
#include "bytes.h"
#include "kernels.h"
#include "parallel.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

namespace {

constexpr int kWeightRows = 4;  // at once: a block
// Bytes by which whole blocks are prefetched: the processor itself looks no farther than the end of a page.
constexpr int64_t kPrefetched = 8192;
constexpr int64_t kWorthThreads = 1 << 18;  // weights
constexpr int64_t kSummed = 8192;  // of a row at once: the integers of 32 bits hold any such sum

// Multiplies weights with activations in float32.
struct Floats {
  using Number = float;
  using Numbers = Vec;
  static constexpr int64_t kStep = kLanes;

  static float convert(const float* x, int64_t count, float* to) {
    std::copy(x, x + count, to);
    return 1.0f;
  }
  static Vec zero() { return Vec(0.0f); }
  static Vec read(const int8_t* weights) { return load_row(weights); }
  static Vec read(const int8_t* weights, int64_t count) { return load_row(weights, count); }
  static Vec add(Vec sum, Vec weights, const float* x) { return at::vec::fmadd(weights, load(x), sum); }
  static float total(Vec x) { return sum(x); }
};

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
// Multiplies weights with activations that are rounded to 16 bits, the largest of a row to 32767, in integers: what
// bfloat16 loses is 128 times as much.
struct Words {
  using Number = int16_t;
  using Numbers = __m512i;
  static constexpr int64_t kStep = 2 * kLanes;

  // Returns the factor of what it writes, a NaN where something is not finite.
  static float convert(const float* x, int64_t count, int16_t* to) {
    const float most = largest_magnitude(x, count), factor = most / 32767;
    const Vec inverse(factor > kLeast ? 1 / factor : 0.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
      const __m512i rounded = _mm512_cvtps_epi32(load(x + i) * inverse);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtepi32_epi16(rounded));
    }
    return most <= std::numeric_limits<float>::max() ? factor : std::numeric_limits<float>::quiet_NaN();
  }
  static __m512i zero() { return _mm512_setzero_si512(); }
  static __m512i read(const int8_t* weights, int64_t count = kStep) {
    const __mmask32 there = ~0u >> (kStep - count);
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(there, weights));
  }
  static __m512i add(__m512i sum, __m512i weights, const int16_t* x) {
    return _mm512_dpwssd_epi32(sum, weights, _mm512_loadu_si512(x));
  }
  static float total(__m512i x) { return sum(Vec(_mm512_cvtepi32_ps(x))); }
};
using OfBFloat16 = Words;
#else
using OfBFloat16 = Floats;
#endif

template <class T, class A>
struct Product {
  const Int8Weights& w;
  int64_t rows, depth;          // of x, and its width in whole vectors
  const typename A::Number* x;  // zeros behind its width
  const float* factors;
  T* out;

  // Of weights `first` … with rows `row` … of x.
  template <int R>
  int64_t multiply(int64_t first, int64_t row) const {
    const int8_t* weights[kWeightRows];
    for (int i = 0; i < kWeightRows; ++i) weights[i] = w.numbers + std::min(first + i, w.count - 1) * w.width;
    float totals[kWeightRows][R] = {};
    const int64_t ahead = round_up(kPrefetched, kWeightRows * w.width);
    for (int64_t begin = 0; begin < w.width; begin += kSummed) {
      typename A::Numbers sums[kWeightRows][R];
      for (auto& of_weight : sums)
        for (auto& sum : of_weight) sum = A::zero();
      auto add = [&](int64_t c, auto... count) {
        for (int i = 0; i < kWeightRows; ++i) {
          const auto numbers = A::read(weights[i] + c, count...);
          for (int r = 0; r < R; ++r) sums[i][r] = A::add(sums[i][r], numbers, x + (row + r) * depth + c);
        }
      };
      const int64_t end = std::min(begin + kSummed, w.width);
      int64_t c = begin;
      for (; c + A::kStep <= end; c += A::kStep) {
        if (row == 0 && c % 64 == 0)
          for (const int8_t* of_row : weights) __builtin_prefetch(of_row + c + ahead);
        add(c);
      }
      if (c < end) add(c, end - c);
      for (int i = 0; i < kWeightRows; ++i)
        for (int r = 0; r < R; ++r) totals[i][r] += A::total(sums[i][r]);
    }
    for (int i = 0; i < std::min<int64_t>(kWeightRows, w.count - first); ++i)
      for (int r = 0; r < R; ++r)
        out[(row + r) * w.count + first + i] = static_cast<T>(w.scales[first + i] * (factors[row + r] * totals[i][r]));
    return R;
  }

  void operator()(int64_t begin, int64_t end) const {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t row = 0; row < rows;) {
        const int64_t first = block * kWeightRows, left = rows - row;
        row += left >= 4 ? multiply<4>(first, row) : left >= 2 ? multiply<2>(first, row) : multiply<1>(first, row);
      }
  }
};

template <class T, class A>
void multiply(const Int8Weights& w, const void* x, int64_t rows, void* out) {
  const int64_t depth = round_up(w.width, A::kStep), blocks = divide_up(w.count, kWeightRows);
  const Buffer<float> wide(depth), factors(rows);
  const Buffer<typename A::Number> numbers(rows * depth);
  std::fill_n(wide.get() + w.width, depth - w.width, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    convert_rows(static_cast<const T*>(x) + r * w.width, w.width, 1, w.width, wide.get());
    factors.get()[r] = A::convert(wide.get(), depth, numbers.get() + r * depth);
  }
  const Product<T, A> product{w, rows, depth, numbers.get(), factors.get(), static_cast<T*>(out)};
  w.count * w.width < kWorthThreads ? product(0, blocks) : parallel_for(blocks, product);
}

}  // namespace

void multiply_int8(const Int8Weights& weights, ScalarType dtype, const void* x, int64_t rows, void* out) {
  const bool is_bfloat16 = dtype == ScalarType::BFloat16;
  (is_bfloat16 ? multiply<c10::BFloat16, OfBFloat16> : multiply<float, Floats>)(weights, x, rows, out);
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
