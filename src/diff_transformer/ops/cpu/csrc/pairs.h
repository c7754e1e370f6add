// Two rows of a head side by side, [rows / 2][width] of two numbers: what a product that sums over rows reads where a
// step of depth is a pair. Made once for the whole call; nothing where a step is one number.
#pragma once

#include <optional>

#include "block.h"
#include "parallel.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

// A(m, k) = number m of row k of a head, for rows from an even one on.
template <class Kind>
class Transposed {
  using T = typename Kind::Scalar;
  static constexpr int64_t kSize = sizeof(T);

 public:
  Transposed(const Problem& p, Heads<T> heads) : p_(p), heads_(heads) {
    if constexpr (Kind::kDepth == 2) {
      const int64_t pairs = divide_up(p.s, 2), width = heads.width;
      pairs_.emplace(p.units() * heads.maps * pairs * width * 2);
      T* all = pairs_->get();
      at::parallel_for(0, p.units() * heads.maps * pairs, 1 + 32768 / width, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t row = i % pairs * 2, head = i / pairs;
          const T* first = heads.head(p, head / heads.maps, head % heads.maps) + row * heads.row_stride;
          const T* second = row + 1 < p.s ? first + heads.row_stride : first;  // multiplied by 0 where there is none
          T* to = all + i * width * 2;
          for (int64_t c = 0; c < width; ++c) {
            to[2 * c] = first[c];
            to[2 * c + 1] = second[c];
          }
        }
      });
    }
  }

  Left from(int64_t unit, int64_t map, int64_t row) const {
    if constexpr (Kind::kDepth == 1) {
      const T* a = heads_.head(p_, unit, map) + row * heads_.row_stride;
      return {reinterpret_cast<const char*>(a), kSize, heads_.row_stride * kSize};
    } else {
      const int64_t width = heads_.width, head = unit * heads_.maps + map % heads_.maps;
      const T* a = pairs_->get() + (head * divide_up(p_.s, 2) + row / 2) * width * 2;
      return {reinterpret_cast<const char*>(a), 2 * kSize, 2 * width * kSize};
    }
  }

 private:
  const Problem& p_;
  Heads<T> heads_;
  std::optional<Buffer<T>> pairs_;
};

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
