// ggml's structures and classes, as far as the plug reads or provides them: those of ggml.h, ggml-backend-impl.h
// (interface version 2) and ggml-cpu/traits.h. kernels/ggml/checks.py compares the structures with what ggml's public
// functions say about real objects; `edgespec_register` compares the classes' virtual tables.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edgespec {

struct BufferType;
struct Tensor;

struct Buffer {
    void (*free_buffer)(Buffer *);
    void * (*get_base)(Buffer *);
    int (*init_tensor)(Buffer *, Tensor *);
    void (*memset_tensor)(Buffer *, Tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(Buffer *, Tensor *, const void *, size_t, size_t);
    void (*get_tensor)(Buffer *, const Tensor *, void *, size_t, size_t);
    void (*set_tensor_2d)(void);
    void (*get_tensor_2d)(void);
    bool (*cpy_tensor)(Buffer *, const Tensor *, Tensor *);
    void (*clear)(Buffer *, uint8_t);
    void (*reset)(Buffer *);
    BufferType * type;
    void * context;
    size_t size;
    int usage;
};

struct BufferType {
    const char * (*get_name)(BufferType *);
    Buffer * (*alloc_buffer)(BufferType *, size_t);
    size_t (*get_alignment)(BufferType *);
    size_t (*get_max_size)(BufferType *);
    size_t (*get_alloc_size)(BufferType *, const Tensor *);
    bool (*is_host)(BufferType *);
    void * device;
    void * context;  // of an extra buffer type of the processor: its ExtraBufferType, or null
};

struct Tensor {
    int type;
    Buffer * buffer;
    int64_t ne[4];
    size_t nb[4];
    int op;
    int32_t op_params[16];
    int32_t flags;
    Tensor * src[10];
    Tensor * view_src;
    size_t view_offs;
    char * data;
    char name[64];
    void * extra;
    char padding[8];
};

// What a thread of ggml's is told when it computes a node.
struct ComputeParams {
    int ith, nth;
    size_t work_size;
    char * work;
    void * threadpool;
    bool use_ref;
};

// How nodes of some kind are computed.
class TensorTraits {
  public:
    virtual ~TensorTraits() = default;
    virtual bool work_size(int n_threads, const Tensor * op, size_t & size) = 0;
    virtual bool compute_forward(ComputeParams * params, Tensor * op) = 0;
};

// What the processor's backend asks about every node.
class ExtraBufferType {
  public:
    virtual ~ExtraBufferType() = default;
    virtual bool supports_op(void * device, const Tensor * op) = 0;
    virtual TensorTraits * get_tensor_traits(const Tensor * op) = 0;
};

}  // namespace edgespec
