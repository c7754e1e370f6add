// What register.cpp calls. Each function is compiled for the instruction set of the build, and those that compute say
// whether their results were finite: not, wherever a key or value that is not finite came in, be its weight 0.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "problem.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

// Pointers in place of tensors, whose header alone takes more than a second to compile.

// out (B, H, N, dv), of the queries' dtype, and statistics (B, G, r + 1, 2, N): for each map the highest score, and one
// over the sum of the exponentials below it (0 where a query sees nothing).
struct Results {
  at::ScalarType dtype;
  void* out;
  float* statistics;
};

// `source` is the dtype of keys and values.
bool attend(const Problem& p, at::ScalarType source, const Results& results);

// factor · RMSNorm(head) · weight over a head's dv channels; without weights there is no norm.
struct HeadwiseNorm {
  const float* weight = nullptr;
  float eps = 0.0f, factor = 1.0f;
};

// The same for few queries and many keys; reads any floating dtype as it is, and normalises the heads.
bool decode(const Problem& p, const HeadwiseNorm& norm, const Results& results);
// Of `source` keys and values: whether these rows of queries for each of so many key heads are few.
bool has_few_queries(at::ScalarType source, int64_t rows_of_unit, int64_t units);

struct Gradients {
  // What is given: the dtype of inputs and gradients, the output's gradient in rows of dv with its strides, and what
  // `attend` has kept.
  at::ScalarType dtype;
  const void* out;
  int64_t out_batch, out_head, out_row;
  const float* statistics;
  // What is computed: contiguous, of the inputs' shapes; that of λ is (B, H, N).
  void *q, *k, *v;
  float* lam;
};

bool differentiate(const Problem& p, const Gradients& gradients);

// Whether instructions multiply bfloat16, and which: "AMX", "AVX512-BF16", or "float32" where there are none.
bool multiplies_bfloat16();
std::string bfloat16_products();

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
