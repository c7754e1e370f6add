// What register.cpp calls: each function for every instruction set of the library. Those that compute say whether their
// results were finite: not, wherever a key or value that is not finite came in, be its weight 0.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <string>

#include "problem.h"

namespace diff_transformer {

using torch::headeronly::ScalarType;

// Pointers in place of tensors, whose header alone takes more than a second to compile.

// out (B, H, N, dv), of the queries' dtype, and statistics (B, G, r + 1, 2, N): for each map the highest score, and one
// over the sum of the exponentials below it (0 where a query sees nothing).
struct Results {
  ScalarType dtype;
  void* out;
  float* statistics;
};

// factor · RMSNorm(head) · weight over a head's dv channels; without weights there is no norm.
struct HeadwiseNorm {
  const float* weight = nullptr;
  float eps = 0.0f, factor = 1.0f;
};

struct Gradients {
  // What is given: the dtype of inputs and gradients, the output's gradient in rows of dv with its strides, and what
  // `attend` has kept.
  ScalarType dtype;
  const void* out;
  int64_t out_batch, out_head, out_row;
  const float *statistics, *log_sums;  // the second: gradients of the log-sums, (B, G, r + 1, N), or null
  // What is computed: contiguous, of the inputs' shapes; those of λ and the signal's weight, if it has one, are (B, H, N).
  void *q, *k, *v;
  float *lam, *signal;
};

// Weights (count, width) in eight bits, each row with its scale.
struct Int8Weights {
  const int8_t* numbers;
  const float* scales;
  int64_t count, width;
};

struct Kernels {
  // `source` is the dtype of keys and values.
  bool (*attend)(const Problem& p, ScalarType source, const Results& results);
  // The same for few queries and many keys; reads any floating dtype, and rows of int8, as it is, and normalises the heads.
  bool (*decode)(const Problem& p, ScalarType source, const HeadwiseNorm& norm, const Results& results);
  // Of `source` keys and values: whether these rows of queries for each of so many key heads are few.
  bool (*has_few_queries)(ScalarType source, int64_t rows_of_unit, int64_t units);
  bool (*differentiate)(const Problem& p, const Gradients& gradients);
  // x (rows, width) times the transposed weights, (rows, count); both float32 or bfloat16.
  void (*multiply_int8)(const Int8Weights& weights, ScalarType dtype, const void* x, int64_t rows, void* out);
  // Whether instructions multiply bfloat16, and which: "AMX", "AVX512-BF16", or "float32" where there are none.
  bool (*multiplies_bfloat16)();
  std::string (*bfloat16_products)();
};

inline namespace CPU_CAPABILITY {

bool attend(const Problem& p, ScalarType source, const Results& results);
bool decode(const Problem& p, ScalarType source, const HeadwiseNorm& norm, const Results& results);
bool has_few_queries(ScalarType source, int64_t rows_of_unit, int64_t units);
bool differentiate(const Problem& p, const Gradients& gradients);
void multiply_int8(const Int8Weights& weights, ScalarType dtype, const void* x, int64_t rows, void* out);
bool multiplies_bfloat16();
std::string bfloat16_products();

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
