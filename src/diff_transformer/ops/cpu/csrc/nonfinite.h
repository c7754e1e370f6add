// Keys and values that hold a NaN or an infinity reach the queries that see them, and no others: the rule that
// nonfinite.py states for all backends. Nothing is looked for beforehand. A weight of 0 times such a value is a NaN, so
// a result that is finite has met none; only for one that is not are they put aside, and the kernel runs once more.
#pragma once

#include <limits>

#include "problem.h"
#include "tensors.h"

namespace diff_transformer {
namespace {

// Keys (B, H_kv, 2 or 1, S, d) and values (B, H_kv, S, dv) with zeros for the rows that are not finite in one of them.
struct Finite {
  Tensor rows;  // (B, H_kv, S), boolean: which
  Tensor k, v;

  Finite(const Tensor& keys, const Tensor& values)
      : rows(contiguous(call("logical_not", "", call("logical_and", "", all(are_finite(keys), 2), are_finite(values))))),
        k(without(keys, unsqueeze(unsqueeze(rows, 2), -1))),
        v(without(values, unsqueeze(rows, -1))) {}

  bool is_any() const { return *call("any", "", rows).const_data_ptr<bool>(); }

 private:
  static Tensor all(const Tensor& x, int64_t axis) { return call("all", "dim", x, axis, false); }
  static Tensor are_finite(const Tensor& x) { return all(call("isfinite", "", x), -1); }
  static Tensor without(const Tensor& x, const Tensor& hidden) {
    return call("where", "self", hidden, torch::stable::new_zeros(x, {}), x);
  }
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
inline void spoil(const Problem& p, const Tensor& rows, const Tensor& out) {
  const bool* all = rows.const_data_ptr<bool>();
  for (int64_t i = 0; i < p.batch * p.heads; ++i) {
    const int64_t batch = i / p.heads, head = i % p.heads;
    const bool* of_head = all + (batch * p.key_heads + head / (p.heads / p.key_heads)) * p.s;
    for (int64_t query = 0; query < p.n; ++query) {
      if (!sees_any(p, batch, head, query, of_head)) continue;
      Tensor row = torch::stable::select(torch::stable::select(out, 0, batch), 0, head);
      row = torch::stable::select(row, 0, query);
      torch::stable::fill_(row, std::numeric_limits<double>::quiet_NaN());
    }
  }
}

}  // namespace
}  // namespace diff_transformer
