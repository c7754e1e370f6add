// The request as pointers and strides, and which keys a query may see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace diff_transformer {

// What an additive mask adds to the score of a key that it hides.
constexpr float kHidden = -std::numeric_limits<float>::infinity();

enum class MaskKind { kNone, kBool, kFloat };

// Strides count elements. `q` (B, G, r + 1, N, d): the queries of a group's r signal heads and then the one of its noise
// map, which is subtracted from all of theirs; H = r·G, and r = 1 but in grouped differential attention. `k` (B, H_kv, 2 or
// 1, S, d), `v` (B, H_kv, S, dv), last axes contiguous.
struct Problem {
  int64_t batch, heads, ratio, key_heads, key_maps, n, s, d, dv;
  const void *q, *k, *v;
  int64_t q_batch, q_group, q_map, q_row;
  int64_t k_batch, k_head, k_map, k_row;
  int64_t v_batch, v_head, v_row;
  const float* lam;  // (B, H, N)
  int64_t lam_batch, lam_head, lam_row;
  const float* signal;  // (B, H, N), the factor of the signal map; null: 1
  int64_t signal_batch, signal_head, signal_row;
  MaskKind mask_kind;
  const void* mask;  // (B, H, N, S), broadcast axes with stride 0: that of heads always is where r > 1
  int64_t mask_batch, mask_head, mask_row, mask_key;
  bool is_causal;
  int64_t window;                 // 0: none
  const int32_t* segment_bounds;  // (2, N): the first key of each query's document, then the one past its last; or null
  float scale;

  int64_t groups() const { return heads / ratio; }                       // G
  int64_t groups_of_key_head() const { return groups() / key_heads; }
  int64_t units() const { return batch * key_heads; }  // a unit: a head of keys and values with all its queries
};

// A tensor (batch, key heads, maps, S, width) by pointer and strides.
template <class T>
struct Heads {
  const T* data;
  int64_t batch_stride, head_stride, map_stride, row_stride, maps, width;

  const T* head(const Problem& p, int64_t unit, int64_t map) const {
    return data + unit / p.key_heads * batch_stride + unit % p.key_heads * head_stride + map % maps * map_stride;
  }
  const T* row(const Problem& p, int64_t unit, int64_t map, int64_t index) const {
    return head(p, unit, map) + index * row_stride;
  }
};

template <class T>
Heads<T> keys_of(const Problem& p) {
  return {static_cast<const T*>(p.k), p.k_batch, p.k_head, p.k_map, p.k_row, p.key_maps, p.d};
}

template <class T>
Heads<T> values_of(const Problem& p) {
  return {static_cast<const T*>(p.v), p.v_batch, p.v_head, 0, p.v_row, 1, p.dv};
}

inline namespace CPU_CAPABILITY {

struct Range {
  int64_t low, high;
  int64_t size() const { return high - low; }
};

// The keys that position leaves to a query: those up to its position under causality, within the window, of its own
// document. Whatever the bounds hold, it stays within the keys.
inline Range seen_by(const Problem& p, int64_t query) {
  const int64_t position = query + p.s - p.n;
  Range seen{p.window ? position - p.window + 1 : 0, p.is_causal ? position + 1 : p.s};
  if (p.segment_bounds) {
    seen.low = std::max<int64_t>(seen.low, p.segment_bounds[query]);
    seen.high = std::min<int64_t>(seen.high, p.segment_bounds[p.n + query]);
  }
  seen.high = std::clamp<int64_t>(seen.high, 0, p.s);
  seen.low = std::clamp<int64_t>(seen.low, 0, seen.high);
  return seen;
}

// Makes `range` as wide as it takes to hold another.
inline void widen(Range& range, Range other) {
  if (other.size() <= 0) return;
  range = range.size() <= 0 ? other : Range{std::min(range.low, other.low), std::max(range.high, other.high)};
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
