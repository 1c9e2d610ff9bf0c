// Products of F32 matrices, such as the routers of mixtures, as nodes that the plug computes: see floats.cpp.
#pragma once
#include "ggml_abi.h"

namespace edgespec {

// How such products are computed, and whether a product can be with an instruction set.
TensorTraits & float_product_traits();
bool can_multiply_floats(const Tensor * op, int isa);

// Rows of activations times rows of a matrix, both dense floats of length k; strides are in floats.
struct FloatProduct {
    const float *weights, *activations;
    float * result;
    int64_t k, rows, weight_stride, activation_stride, result_stride;
};

// Computes columns first .. last - 1 of the result, those of the same rows of the matrix.
using FloatKernel = void (*)(const FloatProduct &, int64_t first, int64_t last);

void add_float_kernel(FloatKernel kernel, const int * isas, int n_isas);

}  // namespace edgespec
