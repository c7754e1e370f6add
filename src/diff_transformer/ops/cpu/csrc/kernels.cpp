// The functions of one instruction set, by which register.cpp calls them.
#include "kernels.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

extern const Kernels kKernels{attend,        decode,        has_few_queries,     differentiate,
                              multiply_int8, multiplies_bfloat16, bfloat16_products};

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
