// What register.cpp calls. Each function is compiled for the instruction set of the build, and those that compute say
// whether their results were finite: not, wherever a key or value that is not finite came in, be its weight 0.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "problem.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

// out (B, H, N, dv) and statistics (B, G, r + 1, 2, N): for each map the highest score, and one over the sum of the
// exponentials below it (0 where a query sees nothing). Queries have the dtype of `out`, keys and values `source`.
bool attend(const Problem& p, at::ScalarType source, const at::Tensor& out, const at::Tensor& statistics);

// factor · RMSNorm(head) · weight over a head's dv channels; without weights there is no norm.
struct HeadwiseNorm {
  const float* weight = nullptr;
  float eps = 0.0f, factor = 1.0f;
};

// The same for few queries and many keys; reads any floating dtype as it is, and normalises the heads.
bool decode(const Problem& p, const HeadwiseNorm& norm, const at::Tensor& out, const at::Tensor& statistics);
// Of `source` keys and values: whether these rows of queries for each of so many key heads are few.
bool has_few_queries(at::ScalarType source, int64_t rows_of_unit, int64_t units);

// All contiguous, of the inputs' shapes and dtypes; grad_lam (B, H, N).
bool differentiate(const Problem& p, const at::Tensor& grad_out, const at::Tensor& statistics, const at::Tensor& grad_q,
                   const at::Tensor& grad_k, const at::Tensor& grad_v, const at::Tensor& grad_lam);

// Whether instructions multiply bfloat16, and which: "AMX", "AVX512-BF16", or "float32" where there are none.
bool multiplies_bfloat16();
std::string bfloat16_products();

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
