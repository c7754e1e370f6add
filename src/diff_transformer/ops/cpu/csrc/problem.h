// The request as pointers and strides, its queries in blocks, and which keys a block may see.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tile.h"
#include "vector.h"

namespace diff_transformer {

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

// The queries of a block: the lanes of a strip, of each signal head of a group in turn. Those of several groups may share
// one if they share their keys.
struct Rows {
  int count, vecs;
  int64_t group[kStrip];  // among all groups of the batch entry
  int64_t query[kStrip];
  Range seen[kStrip];        // what position leaves to each query
  Range by_vec[kStripVecs];  // from the first to the last key that queries of a vector see; {0, 0} if there is none
  Range by_any;              // the same for the whole block, beginning at an even key, for products of pairs
  Range by_all;              // what each query of the block sees

  Lanes lanes() const { return {0, vecs}; }
};

// Makes `range` as wide as it takes to hold another.
inline void widen(Range& range, Range other) {
  if (other.size() <= 0) return;
  range = range.size() <= 0 ? other : Range{std::min(range.low, other.low), std::max(range.high, other.high)};
}

// A unit's queries cut into blocks of at most `size`; where N is at least that, a block never crosses groups.
struct Blocks {
  const Problem& problem;
  int64_t size, per_group, count;

  Blocks(const Problem& p, int64_t size_) : problem(p), size(size_) {
    per_group = p.n >= size ? (p.n + size - 1) / size : 0;
    count = per_group ? per_group * p.groups_of_key_head() : (p.groups_of_key_head() * p.n + size - 1) / size;
  }

  Rows rows(int64_t key_head, int64_t block) const {
    Rows rows;
    const int64_t begin = per_group ? block / per_group * problem.n + block % per_group * size : block * size;
    const int64_t end = per_group ? std::min(begin + size, (block / per_group + 1) * problem.n)
                                  : std::min(begin + size, problem.groups_of_key_head() * problem.n);
    rows.count = static_cast<int>(end - begin);
    rows.vecs = (rows.count + kLanes - 1) / kLanes;
    rows.by_any = {0, 0};
    rows.by_all = {0, problem.s};
    for (Range& seen : rows.by_vec) seen = {0, 0};
    for (int r = 0; r < kStrip; ++r) {
      const int64_t row = std::min(begin + r, end - 1);  // spare lanes repeat the last query
      rows.group[r] = key_head * problem.groups_of_key_head() + row / problem.n;
      rows.query[r] = row % problem.n;
      const Range seen = rows.seen[r] = seen_by(problem, rows.query[r]);
      widen(rows.by_vec[r / kLanes], seen);
      widen(rows.by_any, seen);
      rows.by_all = {std::max(rows.by_all.low, seen.low), std::min(rows.by_all.high, seen.high)};
    }
    rows.by_any.low -= rows.by_any.low % 2;
    return rows;
  }
};

// Is anything in these keys hidden by position from some query of the block?
inline bool has_edge(const Rows& rows, Range keys) {
  return keys.low < rows.by_all.low || keys.high > rows.by_all.high;
}

// The vectors of lanes from the first to the last with a query that sees one of these keys.
inline Lanes active_lanes(const Rows& rows, Range keys) {
  auto sees = [&](int v) { return rows.by_vec[v].low < keys.high && rows.by_vec[v].high > keys.low; };
  Lanes lanes = rows.lanes();
  while (lanes.first < lanes.last && !sees(lanes.first)) ++lanes.first;
  while (lanes.first < lanes.last && !sees(lanes.last - 1)) --lanes.last;
  return lanes;
}

// Set to −infinity what position hides in scores [keys][kStrip].
inline void hide_by_position(const Rows& rows, Range keys, float* scores) {
  const bool before = keys.low < rows.by_all.low, after = keys.high > rows.by_all.high;
  const Vec hidden(kHidden);
  for (int v = 0; v < rows.vecs; ++v) {
    alignas(64) float low[kLanes], high[kLanes];  // counted from the first of these keys, so that float32 holds them
    for (int i = 0; i < kLanes; ++i) {
      const Range seen = rows.seen[v * kLanes + i];
      low[i] = static_cast<float>(std::clamp<int64_t>(seen.low - keys.low, 0, keys.size()));
      high[i] = static_cast<float>(std::clamp<int64_t>(seen.high - keys.low, 0, keys.size()));
    }
    const Vec first = load(low), past = load(high);
    for (int64_t j = 0; j < keys.size(); ++j) {
      const Vec key(static_cast<float>(j));
      float* x = scores + j * kStrip + v * kLanes;
      Vec y = load(x);
      if (before) y = Vec::blendv(y, hidden, key < first);
      if (after) y = Vec::blendv(y, hidden, key >= past);
      y.store(x);
    }
  }
}

enum class Visible { kAll, kSome, kNone };

// The part of the mask that meets these keys, as [keys][kStrip] numbers to add. Where all is visible
// or nothing is, `tile` is not written.
inline Visible mask_tile(const Problem& p, int64_t batch, const Rows& rows, Range keys, float* tile) {
  if (p.mask_kind == MaskKind::kNone) return Visible::kAll;
  const int64_t count = keys.size();
  auto offset = [&](int r) {
    return batch * p.mask_batch + rows.group[r] * p.mask_head + rows.query[r] * p.mask_row + keys.low * p.mask_key;
  };
  if (p.mask_kind == MaskKind::kFloat) {
    const float* mask = static_cast<const float*>(p.mask);
    bool hidden = true;
    for (int r = 0; r < rows.vecs * kLanes; ++r) {
      const float* row = mask + offset(r);
      for (int64_t j = 0; j < count; ++j) {
        const float x = row[j * p.mask_key];
        hidden = hidden && x == kHidden;
        tile[j * kStrip + r] = x;
      }
    }
    return hidden ? Visible::kNone : Visible::kSome;
  }
  const bool* mask = static_cast<const bool*>(p.mask);
  int64_t seen = 0;
  int distinct = rows.count;
  if (p.mask_row == 0 && (p.mask_head == 0 || rows.group[0] == rows.group[rows.count - 1])) distinct = 1;
  for (int r = 0; r < distinct; ++r) {
    const bool* row = mask + offset(r);
    if (p.mask_key == 1)
      for (int64_t j = 0; j < count; ++j) seen += row[j];
    else
      seen += row[0] ? count : 0;
  }
  if (seen == 0) return Visible::kNone;
  if (seen == distinct * count) return Visible::kAll;
  for (int r = 0; r < rows.vecs * kLanes; ++r) {
    const bool* row = mask + offset(r);
    for (int64_t j = 0; j < count; ++j) tile[j * kStrip + r] = row[j * p.mask_key] ? 0.0f : kHidden;
  }
  return Visible::kSome;
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
