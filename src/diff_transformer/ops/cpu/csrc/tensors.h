// Tensors by torch's stable interface: a library that uses nothing else of torch serves each one from 2.10 on, and every
// Python.
#pragma once

#define TORCH_TARGET_VERSION 0x020a000000000000
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string>

namespace diff_transformer {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::contiguous;
using torch::stable::Tensor;
using torch::stable::unsqueeze;

// What torch's operator aten::name returns.
template <class... Arguments>
Tensor call(const std::string& name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(("aten::" + name).c_str(), overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Of an axis counted from the last (−1), for a tensor that stands for one with more axes, or longer ones.
int64_t size(const Tensor& x, int64_t axis) { return axis + x.dim() < 0 ? 1 : x.size(axis); }
int64_t stride(const Tensor& x, int64_t axis) { return size(x, axis) == 1 ? 0 : x.stride(axis); }

// Uninitialised, and otherwise like another tensor. Boxed as by torch::stable::new_empty it takes a microsecond.
template <class Sizes = std::initializer_list<int64_t>>
Tensor new_empty(const Tensor& like, ScalarType type, const Sizes& sizes) {
  int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.get(), std::data(sizes), static_cast<int64_t>(sizes.size()),
                                                   &dtype, nullptr, nullptr, 0, nullptr, &made));
  return Tensor(made);
}

int32_t dtype_of(const Tensor& x) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return dtype;
}

bool is_dense_on_cpu(const Tensor& x) {
  int32_t device = 0, layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(x.get(), &layout));
  return device == aoti_torch_device_type_cpu() && layout == aoti_torch_layout_strided();
}

bool is_floating(const Tensor& x) {  // float8 is refused, as operator.py does
  const int32_t dtype = dtype_of(x);
  return dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_bfloat16() ||
         dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_float64();
}

}  // namespace
}  // namespace diff_transformer
