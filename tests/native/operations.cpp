// Every operation of EdgeSpec's kernels as ggml would compute it, by one thread and by several, for sanitizers: see
// tests/integration/test_sanitizers.py. Results must have the same bits, and memory ends where it was asked to end.
//
// ggml itself is not compiled with sanitizers, so what the plug looks for in its processor backend is here as well: a
// barrier, a buffer type, and stand-ins for the operations that carry a state.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "ggml_abi.h"
#include "plug.h"
#include "products.h"
#include "recurrent.h"

using namespace edgespec;

struct ggml_backend_device;
struct ggml_tensor;

// ggml's side.

struct Pool {
    std::mutex mutex;
    std::condition_variable changed;
    int threads = 1, waiting = 0, round = 0;
};

std::vector<BufferType *> & ggml_backend_cpu_get_extra_buffer_types() {
    static std::vector<BufferType *> types;
    return types;
}

namespace ggml::cpu::repack {
class extra_buffer_type {
  public:
    virtual ~extra_buffer_type() = default;
    virtual bool supports_op(ggml_backend_device *, const ggml_tensor *);
    virtual void * get_tensor_traits(const ggml_tensor *);
};
bool extra_buffer_type::supports_op(ggml_backend_device *, const ggml_tensor *) { return false; }
void * extra_buffer_type::get_tensor_traits(const ggml_tensor *) { return nullptr; }
}  // namespace ggml::cpu::repack

extern "C" {
void ggml_barrier(void * threadpool) {
    Pool & pool = *(Pool *) threadpool;
    std::unique_lock<std::mutex> lock(pool.mutex);
    const int round = pool.round;
    if (++pool.waiting == pool.threads) pool.waiting = 0, pool.round++, pool.changed.notify_all();
    else pool.changed.wait(lock, [&] { return pool.round != round; });
}
BufferType * ggml_backend_cpu_buffer_type() {
    static BufferType plain{};
    return &plain;
}
Buffer * ggml_backend_buft_alloc_buffer(BufferType *, size_t) { return nullptr; }
size_t ggml_row_size(int type, int64_t n) { return edgespec_file_row_bytes(type, n); }
size_t ggml_quantize_chunk(int, const float *, void *, int64_t, int64_t, int64_t, const float *) { return 0; }

void ggml_compute_forward_ssm_conv(const ComputeParams * params, Tensor * op) {
    const Tensor *x = op->src[0], *w = op->src[1];
    const int64_t n = x->ne[1], each = (n + params->nth - 1) / params->nth;
    for (int64_t c = each * params->ith; c < n && c < each * (params->ith + 1); c++) {
        for (int64_t row = 0; row < op->ne[1]; row++) {
            float sum = 0;
            for (int64_t i = 0; i < w->ne[0]; i++)
                sum += ((float *) (x->data + c * x->nb[1]))[row + i] * ((float *) (w->data + c * w->nb[1]))[i];
            ((float *) (op->data + row * op->nb[1]))[c] = sum;
        }
    }
}
// A state of `each` floats for each value of a head: halved, plus the row's value.
static void carry(const ComputeParams * params, Tensor * op, const Tensor * x, const float * state, int64_t each) {
    const int64_t size = x->ne[0], heads = x->ne[1], rows = x->ne[2], of_thread = (heads + params->nth - 1) / params->nth;
    float *out = (float *) op->data, *after = out + rows * size * heads;
    for (int64_t h = of_thread * params->ith; h < heads && h < of_thread * (params->ith + 1); h++) {
        for (int64_t i = h * size; i < (h + 1) * size; i++) {
            for (int64_t s = i * each; s < (i + 1) * each; s++) after[s] = state[s];
            for (int64_t row = 0; row < rows; row++) {
                float sum = 0;
                for (int64_t s = i * each; s < (i + 1) * each; s++) {
                    after[s] = after[s] / 2 + ((const float *) (x->data + row * x->nb[2]))[i];
                    sum += after[s];
                }
                out[row * size * heads + i] = sum;
            }
        }
    }
}
void ggml_compute_forward_ssm_scan(const ComputeParams * params, Tensor * op) {
    carry(params, op, op->src[1], (const float *) op->src[0]->data, op->src[0]->ne[0]);
}
void ggml_compute_forward_gated_delta_net(const ComputeParams * params, Tensor * op) {
    if (params->nth > 1) ggml_barrier(params->threadpool);  // as ggml's own, before threads take heads
    carry(params, op, op->src[2], (const float *) op->src[5]->data, op->src[2]->ne[0]);
}
void ggml_compute_forward_cpy(const ComputeParams * params, Tensor * op) {
    const Tensor * from = op->src[0];
    for (int64_t c = params->ith; c < from->ne[1]; c += params->nth)
        memcpy(op->data + c * op->nb[1], from->data + c * from->nb[1], (size_t) from->ne[0] * sizeof(float));
}
}

// The operations.

namespace {

enum { NONE, PRODUCT, INDEXED, ROWS, ATTENTION, CONVOLUTION, SCAN, DELTA, COPY, CONCAT };
constexpr int F32 = 0, F16 = 1, Q8_0 = 8, I32 = 26;

[[noreturn]] void fail(const std::string & what) {
    fprintf(stderr, "operations: %s\n", what.c_str());
    exit(1);
}

// Numbers between 0 and 1 in any format: the bytes of no float or half are above 0x3b.
void fill(char * bytes, size_t size, uint32_t seed) {
    for (size_t i = 0; i < size; i++) bytes[i] = (char) ((seed = seed * 1664525 + 1013904223) >> 24 & 0x3b);
}

// A tensor with memory of its own size, aligned as ggml aligns it.
struct Value : Tensor {
    struct Free {
        void operator()(char * p) const { ::operator delete(p, std::align_val_t(64)); }
    };
    std::unique_ptr<char, Free> memory;
    size_t size;

    Value(int type_, std::vector<int64_t> shape, size_t row_bytes, size_t bytes = 0) : Tensor{} {
        type = type_;
        for (int i = 0; i < 4; i++) ne[i] = i < (int) shape.size() ? shape[i] : 1;
        nb[0] = type == F16 ? 2 : type == Q8_0 ? 34 : 4;
        nb[1] = row_bytes, nb[2] = nb[1] * ne[1], nb[3] = nb[2] * ne[2];
        size = bytes ? bytes : nb[3] * ne[3];
        memory.reset((char *) ::operator new(size, std::align_val_t(64)));
        data = memory.get();
        fill(data, size, (uint32_t) size);
    }
    static Value floats(std::vector<int64_t> shape) {
        const size_t row = (size_t) shape[0] * 4;
        return Value(F32, std::move(shape), row);
    }
};

void compute(Tensor & op, int n_threads) {
    auto * plug = (ExtraBufferType *) ((BufferType *) edgespec_buffer_type())->context;
    TensorTraits * traits = plug->get_tensor_traits(&op);
    size_t size = 0;
    if (!traits || !traits->work_size(n_threads, &op, size)) fail("an operation is not taken: " + std::to_string(op.op));
    std::unique_ptr<char[]> work(new char[size]);
    Pool pool;
    pool.threads = n_threads;
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; i++) {
        threads.emplace_back([&, i] {
            ComputeParams params{i, n_threads, size, work.get(), &pool, false};
            if (!traits->compute_forward(&params, &op)) fail("an operation was not computed");
        });
    }
    for (auto & thread : threads) thread.join();
}

// Computes an operation with several threads, and compares with one.
void check(const char * what, Value & op, const std::function<void()> & before = [] {}) {
    std::vector<char> alone;
    for (int n_threads : {1, 2, 3}) {
        memset(op.data, 0xff, op.size);
        before();
        compute(op, n_threads);
        if (n_threads == 1) alone.assign(op.data, op.data + op.size);
        else if (memcmp(alone.data(), op.data, op.size)) fail(std::string(what) + " depends on the threads");
    }
}

void products() {
    int types[32];
    Buffer packed{};
    packed.type = (BufferType *) edgespec_buffer_type();
    for (int t = edgespec_types(types, 32); t-- > 0;) {
        const int type = types[t], block = edgespec_type_block(type);
        const int64_t k = block > 1 ? 2 * block + (block == 32 ? block : 0) : 39, n = 37, stack = 3;
        const size_t of_file = edgespec_file_row_bytes(type, k) * n, of_packed = edgespec_packed_bytes(type, k, n);
        Value file(type, {k, n, stack}, of_file / n);
        Value w(type, {k, n, stack}, of_file / n, of_packed * stack);
        w.buffer = &packed;
        for (int64_t m = 0; m < stack; m++)
            for (int64_t panel = 0; panel < 3; panel++)
                edgespec_pack(type, file.data + m * of_file, k, n, panel, panel + 1, w.data + m * of_packed);
        Value indices(I32, {2, 9}, 8);
        for (int i = 0; i < 18; i++) ((int32_t *) indices.data)[i] = i * i % (int) stack;
        {
            Value x = Value::floats({k, 2, 9}), op = Value::floats({n, 2, 9});
            op.op = INDEXED, op.src[0] = &w, op.src[1] = &x, op.src[2] = &indices;
            check("a product with chosen matrices", op);
        }
        w.ne[2] = 1;
        for (int64_t rows : {1, 2, 7, 70}) {
            Value x = Value::floats({k, rows}), op = Value::floats({n, rows});
            op.op = PRODUCT, op.src[0] = &w, op.src[1] = &x;
            check("a product", op);
        }
        indices.ne[0] = 18, indices.ne[1] = 1;
        Value op = Value::floats({k, 18});
        op.op = ROWS, op.src[0] = &w, op.src[1] = &indices;
        check("rows of a matrix", op);
    }
    Value w = Value::floats({72, 21}), x = Value::floats({72, 5}), op = Value::floats({21, 5});
    op.op = PRODUCT, op.src[0] = &w, op.src[1] = &x;
    check("a product of floats", op);
}

void attention(int type, int64_t rows, int64_t heads, int64_t cells) {
    const int64_t size = 64, groups = 2;
    const size_t of_cell = type == F16 ? size * 2 : size / 32 * 34;
    Value q = Value::floats({size, rows, heads}), k(type, {size, cells, groups}, of_cell);
    Value v(type, {size, cells, groups}, of_cell), mask(F16, {cells, rows}, (size_t) cells * 2);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t cell = 0; cell < cells; cell++)
            ((uint16_t *) mask.data)[row * cells + cell] = cell && (row * 7 + cell) % 3 ? 0xfc00 : 0;
    Value op = Value::floats({size, heads, rows});
    const float scale = 0.125f;
    memcpy(op.op_params, &scale, sizeof scale);
    op.op = ATTENTION, op.src[0] = &q, op.src[1] = &k, op.src[2] = &v, op.src[3] = &mask;
    check("attention", op);
}

// A tree of 6 rows: two certain ones, three nodes below, one that fills the pass.
void states() {
    constexpr int64_t ROWS_OF_PASS = 6, HEADS = 5, SIZE = 4, WINDOW = 4, CHANNELS = 7;
    const int32_t parents[ROWS_OF_PASS] = {-1, 0, 1, 1, 3, -1};
    void * tree = edgespec_tree_new();
    if (!edgespec_tree_begin(tree, ROWS_OF_PASS, 2, parents, 0)) fail("a tree is refused");
    const auto marked = [&](Value & op) { return [&] { edgespec_tree_node(tree, &op); }; };

    Value whole = Value::floats({WINDOW - 1 + ROWS_OF_PASS, CHANNELS}), weights = Value::floats({WINDOW, CHANNELS});
    whole.op = CONCAT;
    Tensor part = whole;
    part.ne[0] = WINDOW - 1, part.view_src = &whole, part.view_offs = ROWS_OF_PASS * 4, part.data += part.view_offs;
    Value copy = Value::floats({WINDOW - 1, CHANNELS}), convolution = Value::floats({CHANNELS, ROWS_OF_PASS});
    copy.op = COPY, copy.src[0] = &part;
    convolution.op = CONVOLUTION, convolution.src[0] = &whole, convolution.src[1] = &weights;
    edgespec_tree_node(tree, &copy);
    check("a window", copy);
    edgespec_tree_node(tree, &convolution);
    check("a convolution", convolution);

    Value x = Value::floats({SIZE, HEADS, ROWS_OF_PASS}), state = Value::floats({3, SIZE, HEADS}), first(I32, {1}, 4);
    *(int32_t *) first.data = 0;
    Value scan = Value::floats({(ROWS_OF_PASS + 3) * SIZE * HEADS});
    scan.op = SCAN, scan.op_params[0] = 1;
    for (int i = 0; i < 7; i++) scan.src[i] = i == 0 ? &state : i == 6 ? &first : &x;
    check("a scan", scan, marked(scan));

    Value square = Value::floats({SIZE, SIZE, HEADS}), delta = Value::floats({(ROWS_OF_PASS + SIZE) * SIZE * HEADS});
    delta.op = DELTA, delta.op_params[0] = 1;
    for (int i = 0; i < 6; i++) delta.src[i] = i == 5 ? &square : &x;
    check("a delta rule", delta, marked(delta));
    if (const char * problem = edgespec_tree_end(tree)) fail(problem);
    edgespec_tree_free(tree);
}

}  // namespace

int operations() {
    const edgespec_operations ops{PRODUCT, INDEXED, ROWS, ATTENTION};
    const edgespec_recurrent_operations state_ops{CONVOLUTION, SCAN, DELTA, COPY, CONCAT, ATTENTION};
    if (edgespec_best_isa() < 0) return 77;
    if (const char * problem = edgespec_register((const void *) ggml_barrier, nullptr, &ops)) fail(problem);
    if (const char * problem = edgespec_recurrent_register((const void *) ggml_barrier, &state_ops)) fail(problem);
    edgespec_activate();
    for (int isa = 0; isa < EDGESPEC_ISA_COUNT; isa++) {
        if (!edgespec_isa_usable(isa)) continue;
        void * planner = edgespec_planner_new(isa, 1);
        edgespec_plan_with(planner);
        products();
        for (int type : {F16, Q8_0})
            for (int64_t rows : {1, 3, 40}) attention(type, rows, 4, 70);
        edgespec_plan_with(nullptr);
        edgespec_planner_free(planner);
    }
    states();
    puts("every operation was computed");
    return 0;
}
