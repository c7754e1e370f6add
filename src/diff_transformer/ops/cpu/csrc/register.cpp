// The operators as torch sees them: tensors in, tensors out.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "kernels.h"
#include "nonfinite.h"

namespace diff_transformer {
namespace {

using at::Tensor;

// The tensors of a request in a form that the kernels read.
struct Inputs {
  Tensor q, k, v, lam, mask, segment_bounds;

  Inputs(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& lam_, const std::optional<Tensor>& mask_,
         const std::optional<Tensor>& segment_bounds_)
      : q(with_rows(q_)), k(with_rows(k_)), v(with_rows(v_)), lam(lam_) {
    if (segment_bounds_.has_value()) {
      segment_bounds = segment_bounds_->contiguous();
      TORCH_CHECK(segment_bounds.dim() == 2 && segment_bounds.size(0) == 2 && segment_bounds.size(1) == q.size(3),
                  "documents must be (2, N)");
    }
    if (!mask_.has_value()) return;
    mask = *mask_;
    for (int64_t axis = 0; axis < mask.dim(); ++axis)  // a copy shall not be larger than what was expanded
      if (mask.stride(axis) == 0 && mask.size(axis) > 1) mask = mask.narrow(axis, 0, 1);
    if (mask.scalar_type() != at::kBool) mask = mask.to(at::kFloat);
    if (mask.size(-1) > 1) mask = with_rows(mask);
  }

  static Tensor with_rows(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

  // For products of blocks: bfloat16 where instructions multiply it, float32 otherwise.
  static Tensor multiplied(const Tensor& x) { return is_multiplied(x) ? paired(x) : with_rows(x.to(at::kFloat)); }

  // The same for what the kernel converts as it reads.
  static Tensor read(const Tensor& x) { return is_multiplied(x) ? paired(x) : with_rows(x); }

  static bool is_multiplied(const Tensor& x) {
    return x.scalar_type() == at::kBFloat16 && multiplies_bfloat16();
  }

  static Tensor paired(const Tensor& x) { return with_rows(x.size(-1) % 2 ? at::constant_pad_nd(x, {0, 1}) : x); }

  Problem problem(bool is_causal, double scale, std::optional<int64_t> window) const {
    Problem p{};
    p.batch = q.size(0), p.ratio = q.size(2) - 1, p.heads = q.size(1) * p.ratio, p.n = q.size(3), p.d = q.size(4);
    p.key_heads = k.size(1), p.key_maps = k.size(2), p.s = k.size(3), p.dv = v.size(3);
    p.q = q.data_ptr(), p.k = k.data_ptr(), p.v = v.data_ptr();
    p.q_batch = q.stride(0), p.q_group = q.stride(1), p.q_map = q.stride(2), p.q_row = q.stride(3);
    p.k_batch = k.stride(0), p.k_head = k.stride(1), p.k_map = k.stride(2), p.k_row = k.stride(3);
    p.v_batch = v.stride(0), p.v_head = v.stride(1), p.v_row = v.stride(2);
    p.lam = lam.data_ptr<float>();
    p.lam_batch = lam.stride(0), p.lam_head = lam.stride(1), p.lam_row = lam.stride(2);
    p.mask_kind = MaskKind::kNone;
    if (mask.defined()) {
      auto stride = [&](int64_t axis) { return mask.size(axis) == 1 ? 0 : mask.stride(axis); };
      p.mask_kind = mask.scalar_type() == at::kBool ? MaskKind::kBool : MaskKind::kFloat;
      p.mask = mask.data_ptr();
      TORCH_CHECK(p.ratio == 1 || stride(1) == 0, "heads that share a noise map must share their mask");
      p.mask_batch = stride(0), p.mask_head = stride(1), p.mask_row = stride(2), p.mask_key = stride(3);
    }
    p.segment_bounds = segment_bounds.defined() ? segment_bounds.data_ptr<int32_t>() : nullptr;
    p.is_causal = is_causal;
    p.window = std::min(window.value_or(0), p.s);  // the widest that hides anything
    p.scale = static_cast<float>(scale);
    return p;
  }
};

// The first `width` channels of a result, in the dtype of the request.
Tensor finished(const Tensor& x, const Tensor& like) {
  return x.narrow(-1, 0, like.size(-1)).to(like.scalar_type()).contiguous();
}

bool hides_keys(const Problem& p) {
  return p.mask_kind != MaskKind::kNone || p.window || p.segment_bounds || (p.is_causal && p.n > 1);
}

// The backward takes its statistics from the forward pass, and they fit only scores that are summed up as it does.
bool takes_few(const Tensor& q, const Tensor& k, bool differentiable) {
  const int64_t rows = q.size(1) / k.size(1) * (q.size(2) - 1) * q.size(3);
  return !differentiable && has_few_queries(k.scalar_type(), rows, k.size(0) * k.size(1));
}

Results results_of(const Tensor& out, const Tensor& statistics) {
  return {out.scalar_type(), out.data_ptr(), statistics.data_ptr<float>()};
}

std::tuple<Tensor, Tensor> attend_to(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lam,
                                     const std::optional<Tensor>& attn_mask, bool is_causal, double scale,
                                     std::optional<int64_t> window, const std::optional<Tensor>& segment_bounds,
                                     bool few, const HeadwiseNorm& norm) {
  auto inputs_of = [&](const Tensor& keys, const Tensor& values) {
    if (few) return Inputs(q, keys, values, lam, attn_mask, segment_bounds);
    return Inputs(Inputs::multiplied(q), Inputs::read(keys), Inputs::read(values), lam, attn_mask, segment_bounds);
  };
  const Inputs inputs = inputs_of(k, v);
  const Problem p = inputs.problem(is_causal, scale, window);
  Tensor out = at::empty({p.batch, p.heads, p.n, p.dv}, inputs.q.options());
  Tensor statistics = at::empty({p.batch, p.groups(), p.ratio + 1, 2, p.n}, lam.options());
  auto run = [&](const Problem& problem) {
    if (out.numel() == 0) return true;
    const Results results = results_of(out, statistics);
    return few ? decode(problem, norm, results) : attend(problem, inputs.k.scalar_type(), results);
  };
  if (!run(p) && hides_keys(p)) {
    const Finite finite(k, v);
    if (finite.rows.any().item<bool>()) {
      const Inputs others = inputs_of(finite.k, finite.v);
      run(others.problem(is_causal, scale, window));
      spoil(p, finite.rows, out);
    }
  }
  return {few ? out : finished(out, v), statistics};
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lam,
                                   const std::optional<Tensor>& attn_mask, bool is_causal, double scale,
                                   std::optional<int64_t> window, const std::optional<Tensor>& segment_bounds,
                                   bool differentiable) {
  return attend_to(q, k, v, lam, attn_mask, is_causal, scale, window, segment_bounds, takes_few(q, k, differentiable),
                   {});
}

// decode_fast_path does at once what Python does in many steps, which take longer than the work where a single token is
// decoded. It answers an ordinary request alone, and nothing for any other: then Python takes its steps, and says what
// is wrong with a request that cannot be answered.

constexpr c10::DispatchKeySet kKeysOfValues =
    c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU,
                         c10::DispatchKey::AutocastCPU, c10::DispatchKey::CPU});

// No gradient is needed, no transformation and no trace goes on, and autocast is off.
bool is_eager() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return c10::default_included_set.isSupersetOf(keys.included_) &&
         keys.excluded_.has(c10::DispatchKey::AutocastCPU) && !at::GradMode::is_enabled();
}

bool holds_values(const Tensor& x) { return kKeysOfValues.isSupersetOf(x.key_set()) && !x._fw_grad(0).defined(); }

// float8 is refused, as operator.py does.
bool is_floating(const Tensor& x) { return x.is_floating_point() && x.element_size() > 1; }

bool broadcasts(const Tensor& x, at::IntArrayRef to) {
  const int64_t missing = static_cast<int64_t>(to.size()) - x.dim();
  if (missing < 0) return false;
  for (int64_t axis = 0; axis < x.dim(); ++axis)
    if (x.size(axis) != 1 && x.size(axis) != to[axis + missing]) return false;
  return true;
}

std::optional<Tensor> decode_fast_path(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lam,
                                 const std::optional<Tensor>& attn_mask, bool is_causal, std::optional<double> scale,
                                 std::optional<int64_t> window, const std::optional<Tensor>& norm_weight,
                                 double norm_eps, double norm_scale) {
  if (!is_eager() || !holds_values(q) || !holds_values(k) || !holds_values(v) || !holds_values(lam)) return {};
  const auto type = q.scalar_type();
  const bool known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  if (!known || k.scalar_type() != type || v.scalar_type() != type || lam.scalar_type() != at::kFloat) return {};
  if (q.dim() != 5 || k.dim() != 5 || v.dim() != 4 || q.numel() == 0 || k.numel() == 0 || v.numel() == 0) return {};
  if (q.size(2) < 2 || k.size(2) > 2 || q.size(0) != k.size(0) || q.size(4) != k.size(4)) return {};
  if (q.size(1) % k.size(1) || v.size(0) != k.size(0) || v.size(1) != k.size(1) || v.size(2) != k.size(3)) return {};
  const int64_t heads[] = {q.size(0), q.size(1) * (q.size(2) - 1), q.size(3)};
  if (!takes_few(q, k, false) || !broadcasts(lam, heads)) return {};
  if (scale && !std::isfinite(*scale)) return {};
  if (window && *window < 1) return {};
  std::optional<Tensor> mask;
  if (attn_mask) {
    const bool boolean = attn_mask->scalar_type() == at::kBool;
    if (!holds_values(*attn_mask) || (!boolean && !is_floating(*attn_mask))) return {};
    if (!broadcasts(*attn_mask, {heads[0], heads[1], heads[2], k.size(3)})) return {};
    mask = *attn_mask;
    while (mask->dim() < 4) mask = mask->unsqueeze(0);
    if (q.size(2) > 2 && mask->size(1) > 1) return {};  // heads that share a noise map share their mask
  }
  HeadwiseNorm norm;
  Tensor weight;
  if (norm_weight) {
    const bool fits = norm_weight->dim() == 1 && norm_weight->size(0) == v.size(3);
    if (!fits || !holds_values(*norm_weight) || !is_floating(*norm_weight)) return {};
    if (!std::isfinite(norm_eps) || norm_eps < 0 || !std::isfinite(norm_scale)) return {};
    weight = norm_weight->to(at::kFloat).contiguous();
    norm = {weight.data_ptr<float>(), static_cast<float>(norm_eps), static_cast<float>(norm_scale)};
  }
  const double factor = scale.value_or(std::pow(static_cast<double>(q.size(4)), -0.5));
  return std::get<0>(attend_to(q, k, v, lam.expand(heads), mask, is_causal, factor, window, {}, true, norm));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                    const Tensor& v, const Tensor& lam,
                                                    const std::optional<Tensor>& attn_mask, const Tensor& statistics,
                                                    bool is_causal, double scale, std::optional<int64_t> window,
                                                    const std::optional<Tensor>& segment_bounds) {
  auto inputs_of = [&](const Tensor& keys, const Tensor& values) {
    return Inputs(Inputs::multiplied(q), Inputs::multiplied(keys), Inputs::multiplied(values), lam, attn_mask,
                  segment_bounds);
  };
  const Inputs inputs = inputs_of(k, v);
  const Problem p = inputs.problem(is_causal, scale, window);
  Tensor grad_q = at::empty(inputs.q.sizes(), inputs.q.options());
  Tensor grad_k = at::empty(inputs.k.sizes(), inputs.q.options());
  Tensor grad_v = at::empty(inputs.v.sizes(), inputs.q.options());
  Tensor grad_lam = at::empty(lam.sizes(), lam.options());
  auto run = [&](const Problem& problem, const Tensor& sums) {
    const Tensor dout = Inputs::multiplied(grad_out);
    return differentiate(problem, {dout.scalar_type(), dout.data_ptr(), dout.stride(0), dout.stride(1), dout.stride(2),
                                   sums.data_ptr<float>(), grad_q.data_ptr(), grad_k.data_ptr(), grad_v.data_ptr(),
                                   grad_lam.data_ptr<float>()});
  };
  if (grad_q.numel() > 0 && !run(p, statistics) && hides_keys(p)) {
    const Finite finite(k, v);
    if (finite.rows.any().item<bool>()) {
      const Inputs others = inputs_of(finite.k, finite.v);
      const Problem problem = others.problem(is_causal, scale, window);
      // The forward may have met an infinite key that left its output finite: its statistics would not fit.
      const Tensor sums = at::empty_like(statistics);
      const Tensor out = at::empty({p.batch, p.heads, p.n, p.dv}, inputs.q.options());
      attend(problem, others.k.scalar_type(), results_of(out, sums));
      run(problem, sums);
    }
  }
  return {finished(grad_q, q), finished(grad_k, k), finished(grad_v, v), grad_lam};
}

}  // namespace

// cpu_backend.py defines forward and backward, so that torch knows them before this library is loaded.
TORCH_LIBRARY_FRAGMENT(diff_transformer_cpu, library) {
  library.def(
      "decode_fast_path(Tensor q, Tensor k, Tensor v, Tensor lam, Tensor? attn_mask, bool is_causal, float? scale,"
      " int? window, Tensor? norm_weight, float norm_eps, float norm_scale) -> Tensor?",
      &decode_fast_path);
  library.def("bfloat16_products() -> str", &bfloat16_products);
}

TORCH_LIBRARY_IMPL(diff_transformer_cpu, CPU, library) {
  library.impl("forward", &forward);
  library.impl("backward", &backward);
}

}  // namespace diff_transformer
