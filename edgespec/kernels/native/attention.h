// Attention as one more node that the plug computes: see attention.cpp.
#pragma once
#include "ggml_abi.h"

namespace edgespec {

// How an attention node is computed; null if ggml is to compute it.
TensorTraits * attention_traits(const Tensor * op);

}  // namespace edgespec
