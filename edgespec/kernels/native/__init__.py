"""EdgeSpec's own kernels: C++ that multiplies quantized weights by few rows, and its plug into ggml.

`build` compiles the library, `library` loads it. `products.h` is what the kernels offer; `plug.cpp` makes a
ggml buffer type of them, so that llama.cpp loads and computes with the layout as with ggml's own.
"""
