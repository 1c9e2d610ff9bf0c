#include "attention_kernels.h"
#include "float_kernels.h"
#include "products.h"

namespace {
const int ISAS[] = {EDGESPEC_AVX2, EDGESPEC_AVX2_VNNI};
const bool ADDED = (edgespec::add_attention(edgespec::KERNELS, ISAS, 2),
                    edgespec::add_float_kernel(edgespec::multiply_floats, ISAS, 2), true);
}  // namespace
