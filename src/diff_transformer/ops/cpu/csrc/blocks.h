// The queries of a request in blocks, and which keys a block may see.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem.h"
#include "tile.h"
#include "vector.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

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
