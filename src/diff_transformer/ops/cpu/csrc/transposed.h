// A head's channels in rows, chunk by chunk: [chunks][width][keys of a chunk]. A product that sums over keys reads it
// where a step of depth is a pair.
#pragma once

#include <optional>

#include "block.h"
#include "parallel.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

// One chunk: squares of rows to channels, and zeros for the keys that it lacks.
template <class T>
void transpose_chunk(const T* from, int64_t row_stride, int64_t keys, int64_t width, int64_t chunk, T* to) {
  constexpr int64_t kSide = 32;
  for (int64_t c = 0; c < width; c += kSide)
    for (int64_t r = 0; r < keys; r += kSide)
      at::vec::transpose_mxn<T>(from + r * row_stride + c, row_stride, to + c * chunk + r, chunk,
                                std::min(kSide, keys - r), std::min(kSide, width - c));
  for (int64_t c = 0; c < width; ++c) std::fill_n(to + c * chunk + keys, chunk - keys, T(0.0f));
}

// All chunks of all heads, made once for the whole call; nothing where a step is one number.
// A(m, k) = number m of row k of a head, for rows from a multiple of Kind::kDepth on.
template <class Kind>
class Transposed {
  using T = typename Kind::Scalar;
  static constexpr int64_t kSize = sizeof(T);

 public:
  Transposed(const Problem& p, Heads<T> heads)
      : p_(p), heads_(heads), chunk_(std::min(Kind::kChunk, round_up(p.s, Kind::kTile))) {
    if constexpr (Kind::kDepth > 1) {
      const int64_t count = p.units() * heads.maps, chunks = divide_up(p.s, chunk_), size = heads.width * chunk_;
      // A tile that begins near the end of the last chunk reads beyond it, and multiplies that by 0.
      channels_.emplace(count * chunks * size + Kind::kTile);
      std::fill_n(channels_->get() + count * chunks * size, Kind::kTile, T(0.0f));
      parallel_for(count * chunks, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t low = i % chunks * chunk_, head = i / chunks;
          transpose_chunk(heads.row(p, head / heads.maps, head % heads.maps, low), heads.row_stride,
                          std::min(chunk_, p.s - low), heads.width, chunk_, channels_->get() + i * size);
        }
      });
    }
  }

  Left from(int64_t unit, int64_t map, int64_t row) const {
    if constexpr (Kind::kDepth == 1) {
      const T* a = heads_.row(p_, unit, map, row);
      return {reinterpret_cast<const char*>(a), kSize, heads_.row_stride * kSize};
    } else {
      const int64_t head = unit * heads_.maps + map % heads_.maps;
      const int64_t chunk = head * divide_up(p_.s, chunk_) + row / chunk_;
      const T* a = channels_->get() + chunk * heads_.width * chunk_ + row % chunk_;
      return {reinterpret_cast<const char*>(a), chunk_ * kSize, Kind::kDepth * kSize};
    }
  }

 private:
  const Problem& p_;
  Heads<T> heads_;
  int64_t chunk_;
  std::optional<Buffer<T>> channels_;
};

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
