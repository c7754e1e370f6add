// The operators as torch sees them: tensors in, tensors out.
#include "tensors.h"  // first: the other headers ask which torch is meant

#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "nonfinite.h"

// Of the operators; a package for the Hub has one of its own for each version.
#ifndef TORCH_EXTENSION_NAME
#define TORCH_EXTENSION_NAME diff_transformer_cpu
#endif

// The instruction sets in this library: the one that it was compiled for at first use, or all that a wheel brings.
#ifdef DIFF_TRANSFORMER_ALL_OF_X86
#define DIFF_TRANSFORMER_FOR_EACH(X) X(AVX2) X(AVX512) X(AVX512_BF16)
#else
#define DIFF_TRANSFORMER_FOR_EACH(X) X(CPU_CAPABILITY)
#endif

namespace diff_transformer {

#define DIFF_TRANSFORMER_DECLARE(capability) \
  namespace capability {                     \
  extern const Kernels kKernels;             \
  }
DIFF_TRANSFORMER_FOR_EACH(DIFF_TRANSFORMER_DECLARE)

namespace {

struct Choice {
  const char* capability;
  const Kernels* kernels;
};

#define DIFF_TRANSFORMER_CHOICE(capability) {C10_STRINGIZE(capability), &capability::kKernels},
constexpr Choice kChoices[] = {DIFF_TRANSFORMER_FOR_EACH(DIFF_TRANSFORMER_CHOICE)};

const Kernels* kernels = kChoices[0].kernels;

// cpu_build.py says it once, when it has loaded the library: what torch has found this processor to be capable of.
void use(const std::string& capability) {
  const auto is_meant = [&](const Choice& choice) { return capability == choice.capability; };
  const auto found = std::find_if(std::begin(kChoices), std::end(kChoices), is_meant);
  STD_TORCH_CHECK(found != std::end(kChoices), "the library has no kernels for ", capability);
  kernels = found->kernels;
}

float* floats(const Tensor& x) { return x.mutable_data_ptr<float>(); }

// Rows of ops/packed.py, keys (B, H_kv, S, maps · d + 4) and values (B, H_kv, S, dv + 4), as nothing else is int8.
bool is_packed(const Tensor& x) { return dtype_of(x) == aoti_torch_dtype_int8(); }
int64_t width_of(const Tensor& x) { return x.size(-1) - (is_packed(x) ? static_cast<int64_t>(sizeof(float)) : 0); }
int64_t maps_of(const Tensor& k, int64_t d) { return is_packed(k) ? width_of(k) / d : k.size(2); }

// The tensors of a request in a form that the kernels read.
struct Inputs {
  Tensor q, k, v, lam;
  std::optional<Tensor> mask, segment_bounds, signal;

  // λ, the signal's weight and the mask may have fewer axes than they stand for, and axes of size 1.
  Inputs(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& lam_, const std::optional<Tensor>& mask_,
         const std::optional<Tensor>& segment_bounds_, const std::optional<Tensor>& signal_)
      : q(with_rows(q_)), k(with_rows(k_)), v(with_rows(v_)), lam(lam_), signal(signal_) {
    if (segment_bounds_) {
      segment_bounds = contiguous(*segment_bounds_);
      STD_TORCH_CHECK(segment_bounds->dim() == 2 && segment_bounds->size(0) == 2 && segment_bounds->size(1) == q.size(3),
                      "documents must be (2, N)");
    }
    if (!mask_) return;
    mask = *mask_;
    for (int64_t axis = 0; axis < mask->dim(); ++axis)  // a copy shall not be larger than what was expanded
      if (mask->stride(axis) == 0 && mask->size(axis) > 1) mask = torch::stable::narrow(*mask, axis, 0, 1);
    if (mask->scalar_type() != ScalarType::Bool) mask = as(*mask, ScalarType::Float);
    if (diff_transformer::size(*mask, -1) > 1) mask = with_rows(*mask);
  }

  static Tensor with_rows(const Tensor& x) { return x.stride(-1) == 1 ? x : contiguous(x); }

  static Tensor as(const Tensor& x, ScalarType type) { return x.scalar_type() == type ? x : torch::stable::to(x, type); }

  // For products of blocks: bfloat16 where instructions multiply it, float32 otherwise.
  static Tensor multiplied(const Tensor& x) {
    return is_multiplied(x) ? paired(x) : with_rows(as(x, ScalarType::Float));
  }

  // The same for what the kernel converts as it reads.
  static Tensor read(const Tensor& x) { return is_multiplied(x) ? paired(x) : with_rows(x); }

  static bool is_multiplied(const Tensor& x) {
    return x.scalar_type() == ScalarType::BFloat16 && kernels->multiplies_bfloat16();
  }

  static Tensor paired(const Tensor& x) { return with_rows(x.size(-1) % 2 ? torch::stable::pad(x, {0, 1}) : x); }

  Problem problem(bool is_causal, double scale, std::optional<int64_t> window) const {
    Problem p{};
    p.batch = q.size(0), p.ratio = q.size(2) - 1, p.heads = q.size(1) * p.ratio, p.n = q.size(3), p.d = q.size(4);
    p.key_heads = k.size(1), p.key_maps = maps_of(k, p.d), p.s = v.size(2), p.dv = width_of(v);
    p.q = q.data_ptr(), p.k = k.data_ptr(), p.v = v.data_ptr();
    p.q_batch = q.stride(0), p.q_group = q.stride(1), p.q_map = q.stride(2), p.q_row = q.stride(3);
    p.k_batch = k.stride(0), p.k_head = k.stride(1), p.k_map = is_packed(k) ? p.d : k.stride(2), p.k_row = k.stride(-2);
    p.v_batch = v.stride(0), p.v_head = v.stride(1), p.v_row = v.stride(2);
    p.lam = floats(lam);
    p.lam_batch = stride(lam, -3), p.lam_head = stride(lam, -2), p.lam_row = stride(lam, -1);
    if (signal) {
      p.signal = floats(*signal);
      p.signal_batch = stride(*signal, -3), p.signal_head = stride(*signal, -2), p.signal_row = stride(*signal, -1);
    }
    p.mask_kind = MaskKind::kNone;
    if (mask) {
      p.mask_kind = mask->scalar_type() == ScalarType::Bool ? MaskKind::kBool : MaskKind::kFloat;
      p.mask = mask->data_ptr();
      p.mask_batch = stride(*mask, -4), p.mask_head = stride(*mask, -3);
      p.mask_row = stride(*mask, -2), p.mask_key = stride(*mask, -1);
      STD_TORCH_CHECK(p.ratio == 1 || p.mask_head == 0, "heads that share a noise map must share their mask");
    }
    p.segment_bounds = segment_bounds ? segment_bounds->const_data_ptr<int32_t>() : nullptr;
    p.is_causal = is_causal;
    p.window = std::min(window.value_or(0), p.s);  // the widest that hides anything
    p.scale = static_cast<float>(scale);
    return p;
  }
};

// The first `width` channels of a result, in the dtype of the request.
Tensor finished(Tensor x, const Tensor& like) {
  return contiguous(Inputs::as(torch::stable::narrow(x, -1, 0, like.size(-1)), like.scalar_type()));
}

bool hides_keys(const Problem& p) {
  return p.mask_kind != MaskKind::kNone || p.window || p.segment_bounds || (p.is_causal && p.n > 1);
}

// The backward takes its statistics from the forward pass, and they fit only scores that are summed up as it does.
bool takes_few(const Tensor& q, const Tensor& k, bool differentiable) {
  const int64_t rows = q.size(1) / k.size(1) * (q.size(2) - 1) * q.size(3);
  return !differentiable && kernels->has_few_queries(k.scalar_type(), rows, k.size(0) * k.size(1));
}

// Nothing for packed rows that are not finite where keys are hidden: unpacked, they are put aside as others are.
std::optional<Tensor> attend_to(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lam,
                                const std::optional<Tensor>& attn_mask, bool is_causal, double scale,
                                std::optional<int64_t> window, const std::optional<Tensor>& segment_bounds,
                                const std::optional<Tensor>& signal, bool few, const HeadwiseNorm& norm,
                                float* statistics) {
  auto inputs_of = [&](const Tensor& keys, const Tensor& values) {
    if (few) return Inputs(q, keys, values, lam, attn_mask, segment_bounds, signal);
    return Inputs(Inputs::multiplied(q), Inputs::read(keys), Inputs::read(values), lam, attn_mask, segment_bounds,
                  signal);
  };
  const Inputs inputs = inputs_of(k, v);
  const Problem p = inputs.problem(is_causal, scale, window);
  const ScalarType type = inputs.q.scalar_type();
  const Tensor out = new_empty(q, type, {p.batch, p.heads, p.n, p.dv});
  auto run = [&](const Problem& problem) {
    if (out.numel() == 0) return true;
    const Results results{type, out.data_ptr(), statistics};
    return few ? kernels->decode(problem, inputs.k.scalar_type(), norm, results)
               : kernels->attend(problem, inputs.k.scalar_type(), results);
  };
  if (!run(p) && hides_keys(p)) {
    if (is_packed(k)) return {};
    const Finite finite(k, v);
    if (finite.is_any()) {
      const Inputs others = inputs_of(finite.k, finite.v);
      run(others.problem(is_causal, scale, window));
      spoil(p, finite.rows, out);
    }
  }
  return few ? out : finished(out, v);
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lam,
                                   const std::optional<Tensor>& attn_mask, bool is_causal, double scale,
                                   std::optional<int64_t> window, const std::optional<Tensor>& segment_bounds,
                                   bool differentiable, const std::optional<Tensor>& signal) {
  const Tensor statistics = new_empty(q, ScalarType::Float, {q.size(0), q.size(1), q.size(2), 2, q.size(3)});
  const Tensor out = *attend_to(q, k, v, lam, attn_mask, is_causal, scale, window, segment_bounds, signal,
                                takes_few(q, k, differentiable), {}, floats(statistics));
  return {out, statistics};
}

// decode_fast_path does at once what Python does in many steps, which take longer than the work where a single token is
// decoded. It answers an ordinary request alone, and nothing for any other: then Python takes its steps, and says what
// is wrong with a request that cannot be answered. cpu_backend.py has seen to it that no gradient is needed, and that no
// transformation and no trace goes on.

// To sizes, of which the last ones are the tensor's.
template <size_t N>
bool broadcasts(const Tensor& x, const std::array<int64_t, N>& to) {
  if (x.dim() > static_cast<int64_t>(N)) return false;
  for (int64_t axis = -x.dim(); axis < 0; ++axis)
    if (x.size(axis) != 1 && x.size(axis) != to[N + axis]) return false;
  return true;
}

std::optional<Tensor> decode_fast_path(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lam,
                                       const std::optional<Tensor>& attn_mask, bool is_causal,
                                       std::optional<double> scale, std::optional<int64_t> window,
                                       const std::optional<Tensor>& norm_weight, double norm_eps, double norm_scale,
                                       const std::optional<Tensor>& signal, bool packed) {
  if (!is_dense_on_cpu(q) || !is_dense_on_cpu(k) || !is_dense_on_cpu(v) || !is_dense_on_cpu(lam)) return {};
  const int32_t dtype = dtype_of(q);
  if (!is_floating(q) || dtype == aoti_torch_dtype_float64()) return {};
  const int32_t stored = packed ? aoti_torch_dtype_int8() : dtype;
  if (dtype_of(k) != stored || dtype_of(v) != stored || dtype_of(lam) != aoti_torch_dtype_float32()) return {};
  if (q.dim() != 5 || k.dim() != (packed ? 4 : 5) || v.dim() != 4) return {};
  if (q.numel() == 0 || k.numel() == 0 || v.numel() == 0 || width_of(v) < 1) return {};
  const int64_t maps = maps_of(k, q.size(4)), width = packed ? maps * q.size(4) : q.size(4);
  if (q.size(2) < 2 || maps < 1 || maps > 2 || q.size(0) != k.size(0) || width != width_of(k)) return {};
  if (q.size(1) % k.size(1) || v.size(0) != k.size(0) || v.size(1) != k.size(1) || v.size(2) != k.size(-2)) return {};
  const int64_t batch = q.size(0), heads = q.size(1) * (q.size(2) - 1), n = q.size(3);
  if (!takes_few(q, k, false) || !broadcasts<3>(lam, {batch, heads, n})) return {};
  if (signal) {
    if (!is_dense_on_cpu(*signal) || dtype_of(*signal) != aoti_torch_dtype_float32()) return {};
    if (!broadcasts<3>(*signal, {batch, heads, n})) return {};
  }
  if (!std::isfinite(scale.value_or(0)) || !std::isfinite(norm_eps) || norm_eps < 0 || !std::isfinite(norm_scale)) {
    return {};
  }
  if (window && *window < 1) return {};
  if (attn_mask) {
    const bool boolean = dtype_of(*attn_mask) == aoti_torch_dtype_bool();
    if (!is_dense_on_cpu(*attn_mask) || (!boolean && !is_floating(*attn_mask))) return {};
    if (!broadcasts<4>(*attn_mask, {batch, heads, n, v.size(2)})) return {};
    if (q.size(2) > 2 && size(*attn_mask, -3) > 1) return {};  // heads that share a noise map share their mask
  }
  HeadwiseNorm norm;
  std::optional<Tensor> weight;
  if (norm_weight) {
    const bool fits = norm_weight->dim() == 1 && norm_weight->size(0) == width_of(v);
    if (!fits || !is_dense_on_cpu(*norm_weight) || !is_floating(*norm_weight)) return {};
    weight = Inputs::with_rows(Inputs::as(*norm_weight, ScalarType::Float));
    norm = {floats(*weight), static_cast<float>(norm_eps), static_cast<float>(norm_scale)};
  }
  const double factor = scale.value_or(std::pow(static_cast<double>(q.size(4)), -0.5));
  std::vector<float> statistics(q.size(0) * q.size(1) * q.size(2) * 2 * n);
  return attend_to(q, k, v, lam, attn_mask, is_causal, factor, window, {}, signal, true, norm, statistics.data());
}

// While autocast is on, and for zeros without memory, which torch would fill in: operator.py knows the dtype of the one
// and refuses the other.
std::optional<Tensor> refuse(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                             bool, std::optional<double>, std::optional<int64_t>, const std::optional<Tensor>&, double,
                             double, const std::optional<Tensor>&, bool) {
  return {};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lam,
    const std::optional<Tensor>& attn_mask, const Tensor& given_statistics, bool is_causal, double scale,
    std::optional<int64_t> window, const std::optional<Tensor>& segment_bounds,
    const std::optional<Tensor>& grad_statistics, const std::optional<Tensor>& signal) {
  auto inputs_of = [&](const Tensor& keys, const Tensor& values) {
    return Inputs(Inputs::multiplied(q), Inputs::multiplied(keys), Inputs::multiplied(values), lam, attn_mask,
                  segment_bounds, signal);
  };
  const Inputs inputs = inputs_of(k, v);
  const Problem p = inputs.problem(is_causal, scale, window);
  const Tensor statistics = contiguous(given_statistics);  // a hook on saved tensors may have turned them
  const ScalarType type = inputs.q.scalar_type();
  const Tensor grad_q = new_empty(q, type, {p.batch, p.groups(), p.ratio + 1, p.n, p.d});
  const Tensor grad_k = new_empty(k, type, {p.batch, p.key_heads, p.key_maps, p.s, p.d});
  const Tensor grad_v = new_empty(v, type, {p.batch, p.key_heads, p.s, p.dv});
  const Tensor grad_lam = new_empty(lam, ScalarType::Float, {p.batch, p.heads, p.n});
  const Tensor grad_signal = new_empty(lam, ScalarType::Float, {signal ? p.batch : int64_t{0}, p.heads, p.n});
  std::optional<Tensor> of_log_sums;
  // A log-sum is the highest score and a logarithm: its gradient is what has come to the first of the two.
  if (grad_statistics) of_log_sums = contiguous(torch::stable::select(*grad_statistics, 3, 0));
  auto run = [&](const Problem& problem, const Tensor& sums) {
    const Tensor dout = Inputs::multiplied(grad_out);
    return kernels->differentiate(
        problem, {type, dout.data_ptr(), dout.stride(0), dout.stride(1), dout.stride(2), floats(sums),
                  of_log_sums ? floats(*of_log_sums) : nullptr, grad_q.data_ptr(), grad_k.data_ptr(),
                  grad_v.data_ptr(), floats(grad_lam), floats(grad_signal)});
  };
  if (grad_q.numel() > 0 && !run(p, statistics) && hides_keys(p)) {
    const Finite finite(k, v);
    if (finite.is_any()) {
      const Inputs others = inputs_of(finite.k, finite.v);
      const Problem problem = others.problem(is_causal, scale, window);
      // The forward may have met an infinite key that left its output finite: its statistics would not fit.
      const Tensor sums = torch::stable::empty_like(statistics);
      const Tensor out = new_empty(q, type, {p.batch, p.heads, p.n, p.dv});
      kernels->attend(problem, others.k.scalar_type(), {type, out.data_ptr(), floats(sums)});
      run(problem, sums);
    }
  }
  return {finished(grad_q, q), finished(grad_k, k), finished(grad_v, v), grad_lam, grad_signal};
}

// A layer's steps for a token that take longer as operators of torch than the work in them: each does at once, bit by
// bit, what several of those do. They answer dense tensors of one dtype, float32 or bfloat16, and nothing for others.

bool is_float32_or_bfloat16(const Tensor& x) {
  return dtype_of(x) == aoti_torch_dtype_float32() || dtype_of(x) == aoti_torch_dtype_bfloat16();
}

bool are_alike(std::initializer_list<Tensor> tensors) {
  const int32_t dtype = dtype_of(*tensors.begin());
  bool alike = is_float32_or_bfloat16(*tensors.begin());
  for (const Tensor& x : tensors)  // torch takes several threads for more numbers
    alike = alike && is_dense_on_cpu(x) && dtype_of(x) == dtype && x.is_contiguous() && x.numel() < 1 << 15;
  return alike;
}

// Calls body(from, to) with the numbers of two tensors that are alike; returns the second.
template <class Body>
Tensor written(const Tensor& x, const Tensor& out, const Body& body) {
  auto of = [](const Tensor& y) { return static_cast<torch::headeronly::BFloat16*>(y.data_ptr()); };
  dtype_of(x) == aoti_torch_dtype_float32() ? body(floats(x), floats(out)) : body(of(x), of(out));
  return out;
}

// The sum is torch's, whose order of additions is its own.
std::optional<Tensor> normed(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t n = weight.numel(), count = x.numel();
  if (!are_alike({x, weight}) || weight.dim() != 1 || count == 0 || size(x, -1) != n) return {};
  return written(x, torch::stable::empty_like(x), [&](const auto* from, auto* to) {
    const Tensor squares = new_empty(x, ScalarType::Float, {count / n, n});
    float* square = floats(squares);
    for (int64_t i = 0; i < count; ++i) square[i] = static_cast<float>(from[i]) * static_cast<float>(from[i]);
    const Tensor sums = torch::stable::sum(squares, std::vector<int64_t>{-1});
    const auto* factors = static_cast<decltype(from)>(weight.data_ptr());
    const float* sum = floats(sums);
    for (int64_t i = 0; i < count; i += n) {
      const float inverse = 1.0f / std::sqrt(*sum++ / static_cast<float>(n) + static_cast<float>(eps));
      for (int64_t c = 0; c < n; ++c) to[i + c] = static_cast<float>(from[i + c]) * inverse * factors[c];
    }
  });
}

// Of the products q and k (B, 1, heads · d): queries (B, 1, heads, d), and keys (B, heads, 1, width) as they are cached.
std::tuple<std::optional<Tensor>, std::optional<Tensor>> rotated(const Tensor& q, const Tensor& k, const Tensor& cos,
                                                                 const Tensor& sin, int64_t width) {
  const int64_t batch = size(q, -3), d = size(cos, -1), half = d / 2;
  if (!are_alike({q, k, cos, sin}) || d < 2 || d % 2 || width < 1 || width % d || size(sin, -1) != d) return {};
  if (!broadcasts<3>(cos, {batch, 1, d}) || !broadcasts<3>(sin, {batch, 1, d})) return {};
  if (q.dim() != 3 || q.size(1) != 1 || q.size(2) % d) return {};
  if (k.dim() != 3 || k.size(1) != 1 || k.size(2) % width || k.size(0) != batch) return {};
  auto rotate = [&](const Tensor& x, std::initializer_list<int64_t> sizes) {
    return written(x, new_empty(x, x.scalar_type(), sizes), [&](const auto* from, auto* to) {
      for (int64_t i = 0, count = x.numel(), row = x.size(2); i < count; i += d, from += d, to += d) {
        const auto* c = static_cast<decltype(from)>(cos.data_ptr()) + i / row * stride(cos, -3);
        const auto* s = static_cast<decltype(from)>(sin.data_ptr()) + i / row * stride(sin, -3);
        for (int64_t j = 0; j < half; ++j) {
          to[j] = from[j] * c[j] - from[j + half] * s[j];
          to[j + half] = from[j + half] * c[j + half] + from[j] * s[j + half];
        }
      }
    });
  };
  return {rotate(q, {batch, 1, q.size(2) / d, d}), rotate(k, {batch, k.size(2) / width, 1, width})};
}

// λ (a scalar) of the four vectors and λ_init, if these are the numbers that `known` begins with; λ is the one behind them.
std::optional<Tensor> known_lambda(const Tensor& q1, const Tensor& k1, const Tensor& q2, const Tensor& k2,
                                   double lambda_init, const Tensor& known) {
  if (!are_alike({q1, k1, q2, k2, known}) || dtype_of(known) != aoti_torch_dtype_float32()) return {};
  const int64_t d = q1.numel();
  if (known.numel() != 4 * d + 2) return {};
  const float* number = floats(known);
  for (const Tensor& vector : {q1, k1, q2, k2}) {
    if (vector.numel() != d || std::memcmp(number, vector.data_ptr(), d * sizeof(float)) != 0) return {};
    number += d;
  }
  if (number[0] != static_cast<float>(lambda_init)) return {};
  const Tensor lam = new_empty(known, ScalarType::Float, {});
  floats(lam)[0] = number[1];
  return lam;
}

// At which token of memory with room for more those seen begin, if new ones can be written behind them; else −1. All are
// (B, heads, tokens, width).
int64_t place_of(const Tensor& seen, const Tensor& memory, const Tensor& added) {
  for (const Tensor& x : {seen, memory, added})
    if (!is_dense_on_cpu(x) || x.dim() != 4 || dtype_of(x) != dtype_of(memory) || x.stride(3) != 1) return -1;
  for (int64_t axis = 0; axis < 4; ++axis) {
    if (seen.stride(axis) != memory.stride(axis)) return -1;
    if (axis != 2 && (seen.size(axis) != memory.size(axis) || added.size(axis) != memory.size(axis))) return -1;
  }
  const int64_t offset = static_cast<char*>(seen.data_ptr()) - static_cast<char*>(memory.data_ptr());
  const int64_t start = offset / (memory.stride(2) * static_cast<int64_t>(memory.element_size()));
  return offset >= 0 && start + seen.size(2) + added.size(2) <= memory.size(2) ? start : -1;
}

// The view of memory that begins at a token and holds those seen and the new ones, which are written there.
Tensor with_added(const Tensor& memory, int64_t start, const Tensor& seen, const Tensor& added) {
  const size_t bytes = memory.element_size();
  auto at = [&](const Tensor& x, int64_t batch, int64_t head, int64_t token) {
    return static_cast<char*>(x.data_ptr()) + (batch * x.stride(0) + head * x.stride(1) + token * x.stride(2)) * bytes;
  };
  for (int64_t b = 0; b < added.size(0); ++b)
    for (int64_t h = 0; h < added.size(1); ++h)
      for (int64_t n = 0; n < added.size(2); ++n)
        std::memcpy(at(memory, b, h, start + seen.size(2) + n), at(added, b, h, n), added.size(3) * bytes);
  Tensor all = memory;
  return torch::stable::narrow(all, 2, start, seen.size(2) + added.size(2));
}

// Keys and values of a cache, each with the memory of which they are a view and what comes behind them.
std::tuple<std::optional<Tensor>, std::optional<Tensor>> appended(const Tensor& keys, const Tensor& keys_memory,
                                                                  const Tensor& new_keys, const Tensor& values,
                                                                  const Tensor& values_memory, const Tensor& new_values) {
  const int64_t key = place_of(keys, keys_memory, new_keys), value = place_of(values, values_memory, new_values);
  if (key < 0 || value < 0) return {};
  return {with_added(keys_memory, key, keys, new_keys), with_added(values_memory, value, values, new_values)};
}

// x (…, width) times the transposed weights (n, width) of int8, each row of which has its scale: (…, n).
std::optional<Tensor> multiplied_int8(const Tensor& x, const Tensor& weight, const Tensor& scales, int64_t most_rows) {
  for (const Tensor& each : {x, weight, scales})
    if (!is_dense_on_cpu(each) || !each.is_contiguous() || each.dim() == 0) return {};
  if (!is_float32_or_bfloat16(x) || dtype_of(weight) != aoti_torch_dtype_int8() || weight.dim() != 2) return {};
  if (dtype_of(scales) != aoti_torch_dtype_float32()) return {};
  const Int8Weights weights{static_cast<int8_t*>(weight.data_ptr()), floats(scales), weight.size(0), weight.size(1)};
  if (weights.width != x.size(-1) || scales.numel() != weights.count || x.numel() == 0 || weights.count == 0) return {};
  const int64_t rows = x.numel() / weights.width;
  if (rows > most_rows) return {};
  std::vector<int64_t> sizes(x.dim(), weights.count);
  for (int64_t axis = 0; axis + 1 < x.dim(); ++axis) sizes[axis] = x.size(axis);
  const Tensor out = new_empty(x, x.scalar_type(), sizes);
  kernels->multiply_int8(weights, x.scalar_type(), x.data_ptr(), rows, out.data_ptr());
  return out;
}

// In a graph, which asks for it only where it can answer.
Tensor int8_product(const Tensor& x, const Tensor& weight, const Tensor& scales) {
  const std::optional<Tensor> out = multiplied_int8(contiguous(x), contiguous(weight), contiguous(scales), x.numel());
  STD_TORCH_CHECK(out.has_value(), "x and its eight-bit weights do not fit");
  return *out;
}

std::string products() { return kernels->bfloat16_products(); }

}  // namespace

// Python defines those of graphs, so that torch knows them before this library is loaded.
STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, library) {
  library.def(
      "decode_fast_path(Tensor q, Tensor k, Tensor v, Tensor lam, Tensor? attn_mask, bool is_causal, float? scale,"
      " int? window, Tensor? norm_weight, float norm_eps, float norm_scale, Tensor? signal_weight=None,"
      " bool packed=False) -> Tensor?");
  library.def("normed(Tensor x, Tensor weight, float eps) -> Tensor?");
  library.def("rotated(Tensor q, Tensor k, Tensor cos, Tensor sin, int width) -> (Tensor?, Tensor?)");
  library.def("known_lambda(Tensor q1, Tensor k1, Tensor q2, Tensor k2, float lambda_init, Tensor known) -> Tensor?");
  library.def(
      "appended(Tensor keys, Tensor(a!) keys_memory, Tensor new_keys, Tensor values, Tensor(b!) values_memory,"
      " Tensor new_values) -> (Tensor(a)?, Tensor(b)?)");
  library.def("multiplied_int8(Tensor x, Tensor weight, Tensor scales, int most_rows) -> Tensor?");
  library.def("bfloat16_products() -> str");
  library.def("use(str capability) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("forward", TORCH_BOX(&forward));
  library.impl("backward", TORCH_BOX(&backward));
  library.impl("int8_product", TORCH_BOX(&int8_product));
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, library) {
  library.impl("decode_fast_path", TORCH_BOX(&decode_fast_path));
  library.impl("normed", TORCH_BOX(&normed));
  library.impl("rotated", TORCH_BOX(&rotated));
  library.impl("known_lambda", TORCH_BOX(&known_lambda));
  library.impl("appended", TORCH_BOX(&appended));
  library.impl("multiplied_int8", TORCH_BOX(&multiplied_int8));
  library.impl("bfloat16_products", TORCH_BOX(&products));
  library.impl("use", TORCH_BOX(&use));
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, AutocastCPU, library) {
  library.impl("decode_fast_path", TORCH_BOX(&refuse));
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, ZeroTensor, library) {
  library.impl("decode_fast_path", TORCH_BOX(&refuse));
}

}  // namespace diff_transformer
