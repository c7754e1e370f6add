// What the forward and the backward pass do alike with a block of queries.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <new>

#include "blocks.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

// Keys of a chunk in which something is hidden: fewer at a time, to skip the lanes that see none of them.
constexpr int64_t kStep = kLanes >= 16 ? kLanes : 16;
static_assert(kStep % 2 == 0);

// The maps of a block are stored for so many keys; with more they are computed twice, or they would fill the memory.
constexpr int64_t kMostStored = 1 << 16;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// 64-byte aligned memory that is not set to anything; in huge pages where it is large: a processor keeps the addresses of
// few pages at hand.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(size ? static_cast<T*>(allocate(size * sizeof(T))) : nullptr) {}
  T* get() const { return data_.get(); }

 private:
  static void* allocate(int64_t bytes) {
    constexpr int64_t kHugePage = 1 << 21;
    const int64_t aligned = bytes < kHugePage ? 64 : kHugePage;
    void* data = std::aligned_alloc(aligned, round_up(bytes, aligned));
    if (!data) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (aligned == kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
#endif
    return data;
  }
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };

  std::unique_ptr<T, Free> data_;
};

// Queries of a block: a whole strip, or fewer where the threads would otherwise not all have work.
inline int64_t block_rows(const Problem& p, int64_t threads) {
  int64_t size = kStrip;
  while (size > kLanes && p.units() * divide_up(p.groups_of_key_head() * p.n, size) < 2 * threads) size /= 2;
  return size;
}

// Steps of depth that `width` numbers take.
template <class Kind>
int64_t steps(int64_t width) {
  return divide_up(width, Kind::kDepth);
}

// A(m, k) = number k of row m.
template <class Kind>
Left left_rows(const typename Kind::Scalar* a, int64_t row_stride) {
  constexpr int64_t size = sizeof(typename Kind::Scalar);
  return {reinterpret_cast<const char*>(a), row_stride * size, Kind::kDepth * size};
}

// Numbers of some rows as those of a product: float32 of the same numbers.
template <class T>
void convert_rows(const T* from, int64_t row_stride, int64_t rows, int64_t width, float* to) {
  for (int64_t r = 0; r < rows; ++r, from += row_stride, to += width) {
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) load_row(from + c).store(to + c);
    for (; c < width; ++c) to[c] = static_cast<float>(from[c]);
  }
}

// Of the `map` of its group: 0 … r − 1 are the signal heads', r is the noise map's.
template <class T>
const T* query_row(const Problem& p, int64_t batch, const Rows& rows, int64_t map, int64_t r) {
  return static_cast<const T*>(p.q) + batch * p.q_batch + rows.group[r] * p.q_group + map * p.q_map +
         rows.query[r] * p.q_row;
}

// Which signal head of the batch entry has the lane's query.
inline int64_t head_of(const Problem& p, const Rows& rows, int64_t signal, int64_t r) {
  return rows.group[r] * p.ratio + signal;
}

inline float lambda_of(const Problem& p, int64_t batch, const Rows& rows, int64_t signal, int64_t r) {
  return p.lam[batch * p.lam_batch + head_of(p, rows, signal, r) * p.lam_head + rows.query[r] * p.lam_row];
}

inline float signal_of(const Problem& p, int64_t batch, const Rows& rows, int64_t signal, int64_t r) {
  if (!p.signal) return 1.0f;
  return p.signal[batch * p.signal_batch + head_of(p, rows, signal, r) * p.signal_head + rows.query[r] * p.signal_row];
}

// Where the number of a map for the lane's query stands in (B, G, r + 1, …, N), of which the middle axes have `inner`
// rows.
inline int64_t map_index(const Problem& p, int64_t batch, const Rows& rows, int64_t map, int64_t r, int64_t inner) {
  return ((batch * p.groups() + rows.group[r]) * (p.ratio + 1) + map) * inner * p.n + rows.query[r];
}

// Memory for the maps of a block of queries: for all its chunks, or for one at a time.
struct MapStorage {
  bool all;
  int64_t size;

  MapStorage(const Blocks& blocks, int64_t chunk) {
    int64_t most = 0;
    const int64_t different = blocks.per_group ? blocks.per_group : blocks.count;  // groups are alike
    for (int64_t i = 0; i < different; ++i) most = std::max(most, blocks.rows(0, i).by_any.size());
    all = most <= kMostStored;
    size = ((all ? most : 0) + chunk) * kStrip;
  }

  int64_t offset(const Rows& rows, Range chunk) const { return all ? (chunk.low - rows.by_any.low) * kStrip : 0; }
};

// Calls body(chunk, edge, number) for the keys that a block sees, cut at the multiples of a chunk.
template <class Kind, class Body>
void for_each_chunk(const Rows& rows, const Body& body) {
  int64_t number = 0;
  for (int64_t low = rows.by_any.low, high; low < rows.by_any.high; low = high, ++number) {
    high = std::min((low / Kind::kChunk + 1) * Kind::kChunk, rows.by_any.high);
    const Range chunk{low, high};
    body(chunk, has_edge(rows, chunk), number);
  }
}

// Calls body(keys, lanes) for the parts of a chunk: all of it at once, or in steps where something is hidden. AMX takes
// longer for parts than what it saves.
template <class Kind, class Body>
void for_each_part(const Rows& rows, Range chunk, bool edge, const Body& body) {
  if (kMultipliesTiles<Kind> || !edge) return body(chunk, rows.lanes());
  for (int64_t j = chunk.low; j < chunk.high; j += kStep) {
    const Range keys{j, std::min(j + kStep, chunk.high)};
    body(keys, active_lanes(rows, keys));
  }
}

// Rows of `width` numbers (row r at row(r)) turned into lanes: [steps][kStrip].
template <class Kind, class Row>
void pack_lanes(const Rows& rows, int64_t width, const Row& row, float* to) {
  const int64_t depth = width / Kind::kDepth;
  for (int r = 0; r < rows.vecs * kLanes; ++r) {
    const char* from = reinterpret_cast<const char*>(row(r));
    for (int64_t k = 0; k < depth; ++k) std::memcpy(to + k * kStrip + r, from + k * sizeof(float), sizeof(float));
  }
}

// Products of a chunk's keys (or values) with the lanes: out[keys][kStrip]; what no lane of a vector sees is 0. `left`
// begins at the chunk's first key.
template <class Kind>
void multiply_rows(const Rows& rows, Range chunk, bool edge, Left left, const float* lanes, int64_t width,
                   float* out) {
  for_each_part<Kind>(rows, chunk, edge, [&](Range keys, Lanes active) {
    const int64_t j = keys.low - chunk.low;
    product<Kind, false>(left.rows_from(j), lanes, out + j * kStrip, keys.size(), active, steps<Kind>(width));
    for (int v = 0; v < rows.vecs; ++v) {
      if (v >= active.first && v < active.last) continue;
      for (int64_t i = j; i < j + keys.size(); ++i) Vec(0.0f).store(out + i * kStrip + v * kLanes);
    }
  });
}

// Scores of a chunk, mask added and hidden ones −infinity. What is returned is still to be multiplied with them. `keys`
// begins at the chunk's first key.
template <class Kind>
Vec score_chunk(const Problem& p, const Rows& rows, Range chunk, bool edge, Left keys, const float* queries,
                const float* mask, float* out) {
  multiply_rows<Kind>(rows, chunk, edge, keys, queries, p.d, out);
  const Vec factor(p.scale), hidden(kHidden);
  if (!mask && !edge) return factor;
  for (int64_t j = 0; j < chunk.size(); ++j)
    for (int v = 0; v < rows.vecs; ++v) {
      float* x = out + j * kStrip + v * kLanes;
      Vec y = load(x) * factor;
      if (mask) {
        const Vec addend = load(mask + j * kStrip + v * kLanes);
        y = Vec::blendv(y + addend, hidden, addend == hidden);  // a NaN would stay one in a sum
      }
      y.store(x);
    }
  if (edge) hide_by_position(rows, chunk, out);
  return Vec(1.0f);
}

// Sums over keys: out[channels][kStrip] += Σ_j left(channel, j) · weights[j]. `left` begins at the chunk's first key.
template <class Kind>
void multiply_channels(const Rows& rows, Range chunk, bool edge, Left left, const float* weights, int64_t channels,
                       float* out) {
  for_each_part<Kind>(rows, chunk, edge, [&](Range keys, Lanes active) {
    const int64_t k = (keys.low - chunk.low) / Kind::kDepth;
    const int64_t size = round_up(keys.size(), Kind::kTile);
    product<Kind, true>(left.depth_from(k), weights + k * kStrip, out, channels, active, steps<Kind>(size));
  });
}

// x[channels][kStrip] → rows of a tensor.
template <class Kind, class Row>
void unpack_lanes(const Rows& rows, int64_t channels, const float* x, const Row& row) {
  using T = typename Kind::Scalar;
  alignas(64) float square[kLanes * kLanes];
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes)
    for (int first = 0; first < rows.count; first += kLanes) {
      at::vec::transpose_mxn<float, kLanes, kLanes>(x + c * kStrip + first, kStrip, square, kLanes);
      for (int r = 0; r < std::min(kLanes, rows.count - first); ++r)
        Kind::store_row(row(first + r) + c, load(square + r * kLanes));
    }
  for (; c < channels; ++c)
    for (int r = 0; r < rows.count; ++r) row(r)[c] = static_cast<T>(x[c * kStrip + r]);
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
