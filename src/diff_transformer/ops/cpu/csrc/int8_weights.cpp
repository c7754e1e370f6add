// Products with weights of int8, for few rows of activations: what counts is that each weight is read from memory once,
// in order, and turned to float32 on the way.
#include "block.h"
#include "kernels.h"
#include "parallel.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

namespace {

constexpr int kWeightRows = 4;  // at once: a block
// Bytes by which whole blocks are prefetched: the processor itself looks no farther than the end of a page.
constexpr int64_t kPrefetched = 8192;
constexpr int64_t kWorthThreads = 1 << 18;  // weights

template <class T>
struct Product {
  const Int8Weights& w;
  int64_t rows, depth;  // of x, and its width in whole vectors
  const float* x;       // zeros behind its width
  T* out;

  // Of weights `first` … with rows `row` … of x.
  template <int R>
  int64_t multiply(int64_t first, int64_t row) const {
    const int8_t* weights[kWeightRows];
    for (int i = 0; i < kWeightRows; ++i) weights[i] = w.numbers + std::min(first + i, w.count - 1) * w.width;
    Vec sums[kWeightRows][R];
    for (auto& of_weight : sums)
      for (Vec& sum : of_weight) sum = Vec(0.0f);
    auto add = [&](int64_t c, auto read) {
      for (int i = 0; i < kWeightRows; ++i) {
        const Vec weight = read(weights[i] + c);
        for (int r = 0; r < R; ++r) sums[i][r] = at::vec::fmadd(weight, load(x + (row + r) * depth + c), sums[i][r]);
      }
    };
    const int64_t ahead = round_up(kPrefetched, kWeightRows * w.width);
    int64_t c = 0;
    for (; c + kLanes <= w.width; c += kLanes) {
      if (row == 0 && c % 64 == 0)
        for (const int8_t* of_row : weights) __builtin_prefetch(of_row + c + ahead);
      add(c, [](const int8_t* numbers) { return load_row(numbers); });
    }
    if (c < w.width) add(c, [&](const int8_t* numbers) { return load_row(numbers, w.width - c); });
    for (int i = 0; i < std::min<int64_t>(kWeightRows, w.count - first); ++i)
      for (int r = 0; r < R; ++r)
        out[(row + r) * w.count + first + i] = static_cast<T>(w.scales[first + i] * sum(sums[i][r]));
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

template <class T>
void multiply(const Int8Weights& w, const void* x, int64_t rows, void* out) {
  const int64_t depth = round_up(w.width, kLanes), blocks = divide_up(w.count, kWeightRows);
  const Buffer<float> wide(rows * depth);
  for (int64_t r = 0; r < rows; ++r) {
    convert_rows(static_cast<const T*>(x) + r * w.width, w.width, 1, w.width, wide.get() + r * depth);
    std::fill_n(wide.get() + r * depth + w.width, depth - w.width, 0.0f);
  }
  const Product<T> product{w, rows, depth, wide.get(), static_cast<T*>(out)};
  w.count * w.width < kWorthThreads ? product(0, blocks) : parallel_for(blocks, product);
}

}  // namespace

void multiply_int8(const Int8Weights& weights, ScalarType dtype, const void* x, int64_t rows, void* out) {
  (dtype == ScalarType::BFloat16 ? multiply<c10::BFloat16> : multiply<float>)(weights, x, rows, out);
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
