// Keys and values that hold a NaN or an infinity reach the queries that see them, and no others: the rule that
// nonfinite.py states for all backends. Nothing is looked for beforehand. A weight of 0 times such a value is a NaN, so
// a result that is finite has met none; only for one that is not are they put aside, and the kernel runs once more.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>

#include <limits>

#include "problem.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

// Keys (B, H_kv, 2 or 1, S, d) and values (B, H_kv, S, dv) with zeros for the rows that are not finite in one of them.
struct Finite {
  at::Tensor rows;  // (B, H_kv, S), boolean: which
  at::Tensor k, v;

  Finite(const at::Tensor& keys, const at::Tensor& values)
      : rows(at::isfinite(keys).all(-1).all(2).logical_and(at::isfinite(values).all(-1)).logical_not().contiguous()),
        k(keys.masked_fill(rows.unsqueeze(2).unsqueeze(-1), 0)),
        v(values.masked_fill(rows.unsqueeze(-1), 0)) {}
};

// Does a query see one of its head's `rows` (S)?
inline bool sees_any(const Problem& p, int64_t batch, int64_t head, int64_t query, const bool* rows) {
  const Range seen = seen_by(p, query);
  const int64_t start = batch * p.mask_batch + head * p.mask_head + query * p.mask_row;
  for (int64_t j = seen.low; j < seen.high; ++j) {
    if (!rows[j]) continue;
    const int64_t index = start + j * p.mask_key;
    if (p.mask_kind == MaskKind::kNone) return true;
    if (p.mask_kind == MaskKind::kBool ? static_cast<const bool*>(p.mask)[index]
                                       : static_cast<const float*>(p.mask)[index] != kHidden)
      return true;
  }
  return false;
}

// Sets the outputs (B, H, N, dv) of all queries that see one of the rows to NaN.
inline void spoil(const Problem& p, const at::Tensor& rows, const at::Tensor& out) {
  const bool* all = rows.const_data_ptr<bool>();
  for (int64_t i = 0; i < p.batch * p.heads; ++i) {
    const int64_t batch = i / p.heads, head = i % p.heads;
    const bool* of_head = all + (batch * p.key_heads + head / (p.heads / p.key_heads)) * p.s;
    for (int64_t query = 0; query < p.n; ++query)
      if (sees_any(p, batch, head, query, of_head))
        out[batch][head][query].fill_(std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
