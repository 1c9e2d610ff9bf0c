// The plug into ggml's processor backend: see plug.h.
#include "plug.h"
#include "attention.h"
#include "floats.h"
#include "ggml_abi.h"
#include "planner.h"
#include "products.h"
#include "recurrent.h"
#include "system.h"
#include "types.h"
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <vector>

namespace edgespec {
namespace {

constexpr int F32 = 0, I32 = 26;
constexpr size_t ALIGNMENT = 64;
constexpr int GRABS = 8;          // a thread's shares of a product, so that one that is held up delays nobody
constexpr int64_t MAX_PANELS = 16;  // of a share
constexpr size_t COPIED_BYTES = 16 << 20;  // of a weight that is packed in place, at a time
constexpr size_t CLEARED_BYTES = 8 << 20, SMALLEST_PAGE = 4096;
constexpr size_t WIDE_BLOCK = 34;   // bytes of 32 weights, from which a head can be narrowed

edgespec_operations ops;
thread_local Planner * planner = nullptr;  // of the graphs that this thread has ggml compute
thread_local bool narrows_heads = false;  // of the models that this thread loads
Buffer * (*alloc_plain)(BufferType *, size_t);
void (*free_plain)(Buffer *);
size_t (*quantize)(int type, const float *, void *, int64_t start, int64_t rows, int64_t k, const float * importance);
BufferType * plain_type;
void (*barrier)(void * threadpool);
extern BufferType packed_type;

size_t aligned(size_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

bool is_packed(const Tensor * t) { return t && t->buffer && t->buffer->type == &packed_type; }

// Bytes from one matrix of a stack to the next: where a stack was placed in a pool of slots, those of a slot. Packed
// matrices are never smaller than the file's, so a stride that is the file's belongs to a stack as it was loaded.
size_t stack_stride(const Tensor * w) {
    const size_t of_file = edgespec_file_row_bytes(w->type, w->ne[0]) * w->ne[1];
    return w->nb[2] == of_file ? edgespec_packed_bytes(w->type, w->ne[0], w->ne[1]) : w->nb[2];
}

// Can the type hold a weight of this shape?
bool holds(const Tensor * w) {
    const int block = edgespec_type_block(w->type);
    return block && w->ne[0] % block == 0 && w->ne[3] == 1;
}

// The share of `count` that begins the range of thread `ith`.
int64_t share(int64_t count, int ith, int nth) { return count * ith / nth; }

// Notes how a node is computed, when ggml plans it.
void mark(const Tensor * op, Planner * by) { ((Tensor *) op)->extra = by; }

// Hands out ranges of panels to threads; lies in the work memory.
struct Counter {
    std::atomic<int64_t> next;
};

int64_t panels_of(const Tensor * w) { return (w->ne[1] + EDGESPEC_PANEL_ROWS - 1) / EDGESPEC_PANEL_ROWS; }

int64_t panels_at_once(int64_t panels, int nth) {
    const int64_t even = panels / (nth * GRABS);
    return even < 1 ? 1 : even > MAX_PANELS ? MAX_PANELS : even;
}

// Rows of activations times one packed matrix.
class Product : public TensorTraits {
  public:
    bool work_size(int, const Tensor * op, size_t & size) override {
        mark(op, planner);
        const Tensor * x = op->src[1];
        const int64_t rows = x->ne[1] * x->ne[2] * x->ne[3];
        const int kind = edgespec_activation_kind(op->src[0]->type);
        size = 2 * ALIGNMENT + (rows ? edgespec_activation_bytes(kind, x->ne[0], rows) : 0);
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Tensor *w = op->src[0], *x = op->src[1];
        const int isa = isa_of(op), kind = edgespec_activation_kind(w->type);
        const int64_t k = w->ne[0], n = w->ne[1], slice = x->ne[1], slices = x->ne[2] * x->ne[3], rows = slice * slices;
        char * work = (char *) aligned((size_t) params->work);
        auto * counter = (Counter *) work;
        char * activations = work + ALIGNMENT;
        const int64_t end = share(rows, params->ith + 1, params->nth);
        for (int64_t row = share(rows, params->ith, params->nth); row < end;) {
            // Rows of a slice lie at equal distances.
            const int64_t s = row / slice, last = (s + 1) * slice < end ? (s + 1) * slice : end;
            const char * first = x->data + s % x->ne[2] * x->nb[2] + s / x->ne[2] * x->nb[3];
            const int64_t stride = (int64_t) (x->nb[1] / sizeof(float));
            edgespec_quantize(isa, kind, (const float *) first - s * slice * stride, (size_t) stride, k, rows, row, last,
                              activations);
            row = last;
        }
        if (params->ith == 0) new (counter) Counter{{0}};
        wait_for_all(params);
        const int64_t panels = panels_of(w), step = panels_at_once(panels, params->nth);
        for (int64_t p; (p = counter->next.fetch_add(step, std::memory_order_relaxed)) < panels;) {
            edgespec_multiply(isa, w->type, w->data, k, n, p, p + step < panels ? p + step : panels, activations, rows,
                              (float *) op->data, (size_t) n, nullptr);
        }
        return true;
    }
};

// Each row of activations times matrices of a stack that are chosen by index.
class IndexedProduct : public TensorTraits {
    static int64_t most_used(int64_t matrices, int64_t n_slots) { return n_slots < matrices ? n_slots : matrices; }

    // The work memory: which rows each matrix is multiplied by, and their activations.
    struct Plan {
        Counter * counter;
        int64_t * place;      // of each matrix: its place among those that have rows, from 1; 0 if it has none
        int64_t * n_used;     // matrices that have rows
        int64_t * used;       // these
        int64_t * first;      // of each of these: its first slot
        int64_t * slots;      // sorted by matrix: the row of the result
        size_t * activations; // of each of these: where they begin
        char * memory;
        size_t n_bytes;

        Plan(char * work, int64_t matrices, int64_t n_slots) {
            const int64_t most = most_used(matrices, n_slots);
            char * at = (char *) aligned((size_t) work);
            char * begin = at;
            const auto take = [&](size_t bytes) {
                char * taken = at;
                at += aligned(bytes);
                return taken;
            };
            counter = (Counter *) take(sizeof(Counter));
            place = (int64_t *) take(matrices * sizeof(int64_t));
            n_used = (int64_t *) take(sizeof(int64_t));
            used = (int64_t *) take(most * sizeof(int64_t));
            first = (int64_t *) take((most + 1) * sizeof(int64_t));
            slots = (int64_t *) take(n_slots * sizeof(int64_t));
            activations = (size_t *) take(most * sizeof(size_t));
            memory = at;
            n_bytes = (size_t) (at - begin);
        }
    };

  public:
    bool work_size(int, const Tensor * op, size_t & size) override {
        mark(op, planner);
        const Tensor *w = op->src[0], *indices = op->src[2];
        const int64_t slots = indices->ne[0] * indices->ne[1], most = most_used(w->ne[2], slots);
        const int kind = edgespec_activation_kind(w->type);
        size = 0;
        if (!slots) return true;
        size = ALIGNMENT + Plan(nullptr, w->ne[2], slots).n_bytes + slots * edgespec_activation_bytes(kind, w->ne[0], 1);
        // The rows of a matrix may be padded to a multiple of 16.
        size += edgespec_activation_bytes(kind, w->ne[0], 16 * most) + most * ALIGNMENT;
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Tensor *w = op->src[0], *x = op->src[1], *indices = op->src[2];
        const int isa = isa_of(op), kind = edgespec_activation_kind(w->type);
        const int64_t k = w->ne[0], n = w->ne[1], matrices = w->ne[2];
        const int64_t per_token = indices->ne[0], n_slots = per_token * indices->ne[1];
        Plan plan(params->work, matrices, n_slots);
        if (params->ith == 0) sort(plan, w, indices);
        wait_for_all(params);
        const int64_t end = share(n_slots, params->ith + 1, params->nth);
        int64_t u = 0;
        for (int64_t at = share(n_slots, params->ith, params->nth); at < end; at++) {
            while (plan.first[u + 1] <= at) u++;
            const int64_t token = plan.slots[at] / per_token, used = plan.slots[at] % per_token;
            const char * row = x->data + token * x->nb[2] + used % x->ne[1] * x->nb[1];
            const int64_t rows = plan.first[u + 1] - plan.first[u], r = at - plan.first[u];
            edgespec_quantize(isa, kind, (const float *) row, 0, k, rows, r, r + 1,
                              plan.memory + plan.activations[u]);
        }
        wait_for_all(params);
        const int64_t panels = panels_of(w), step = panels_at_once(panels, params->nth);
        const int64_t parts = (panels + step - 1) / step, all = *plan.n_used * parts;
        const size_t stride = stack_stride(w);
        for (int64_t part; (part = plan.counter->next.fetch_add(1, std::memory_order_relaxed)) < all;) {
            u = part / parts;
            const int64_t rows = plan.first[u + 1] - plan.first[u], p = part % parts * step;
            edgespec_multiply(isa, w->type, w->data + plan.used[u] * stride, k, n, p,
                              p + step < panels ? p + step : panels, plan.memory + plan.activations[u], rows,
                              (float *) op->data, (size_t) n, plan.slots + plan.first[u]);
        }
        return true;
    }

  private:
    static int32_t index(const Tensor * indices, int64_t slot) {
        const int64_t token = slot / indices->ne[0], used = slot % indices->ne[0];
        return *(const int32_t *) (indices->data + token * indices->nb[1] + used * indices->nb[0]);
    }

    static void sort(Plan & plan, const Tensor * w, const Tensor * indices) {
        const int64_t matrices = w->ne[2], n_slots = indices->ne[0] * indices->ne[1];
        const int kind = edgespec_activation_kind(w->type);
        new (plan.counter) Counter{{0}};
        memset(plan.place, 0, matrices * sizeof(int64_t));
        int64_t n_used = 0;
        plan.first[0] = 0;
        for (int64_t slot = 0; slot < n_slots; slot++) {
            const int64_t m = index(indices, slot);
            if (!plan.place[m]) {
                plan.used[n_used] = m;
                plan.place[m] = ++n_used;
                plan.first[n_used] = 0;
            }
            plan.first[plan.place[m]]++;
        }
        *plan.n_used = n_used;
        size_t at = 0;
        for (int64_t u = 0; u < n_used; u++) {
            plan.activations[u] = at;
            at += aligned(edgespec_activation_bytes(kind, w->ne[0], plan.first[u + 1]));
            plan.first[u + 1] += plan.first[u];
        }
        for (int64_t slot = 0; slot < n_slots; slot++) {
            plan.slots[plan.first[plan.place[index(indices, slot)] - 1]++] = slot;
        }
        for (int64_t u = n_used; u > 0; u--) plan.first[u] = plan.first[u - 1];
        plan.first[0] = 0;
    }
};

// Rows of a packed matrix as floats: embeddings.
class Rows : public TensorTraits {
  public:
    bool work_size(int, const Tensor *, size_t & size) override {
        size = 0;
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Tensor *w = op->src[0], *indices = op->src[1];
        const int64_t end = share(indices->ne[0], params->ith + 1, params->nth);
        for (int64_t i = share(indices->ne[0], params->ith, params->nth); i < end; i++) {
            const int32_t row = *(const int32_t *) (indices->data + i * indices->nb[0]);
            edgespec_unpack_row(w->type, w->data, w->ne[0], row, (float *) (op->data + i * op->nb[1]));
        }
        return true;
    }
};

// A node without packed weights, which is computed here if its planner takes such nodes.
class Unpacked : public TensorTraits {
    TensorTraits & kernels;
    bool (*possible)(const Tensor *, int isa);
    bool is_attention;

  public:
    Unpacked(TensorTraits & kernels_, bool (*possible_)(const Tensor *, int), bool is_attention_)
        : kernels(kernels_), possible(possible_), is_attention(is_attention_) {}

    bool work_size(int n_threads, const Tensor * op, size_t & size) override {
        const bool taken = planner && planner->takes_unpacked && possible(op, planner->isa);
        mark(op, taken ? planner : nullptr);
        if (planner) (taken ? planner->attention : planner->left) += !taken || is_attention;
        return taken && kernels.work_size(n_threads, op, size);
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        return op->extra && kernels.compute_forward(params, op);
    }
};

Product product;
IndexedProduct indexed_product;
Rows rows_of;
Unpacked float_product(float_product_traits(), can_multiply_floats, false);
Unpacked attention(attention_traits(), can_attend, true);

class Packed : public ExtraBufferType {
  public:
    bool supports_op(void *, const Tensor * op) override {
        const Tensor *w = op->src[0], *x = op->src[1];
        if (!is_packed(w) || is_packed(x) || w->view_src || !holds(w)) return false;
        if (op->op == ops.rows) return w->ne[2] == 1 && op->type == F32 && x->ne[1] * x->ne[2] * x->ne[3] == 1;
        if (x->type != F32 || op->type != F32 || x->nb[0] != sizeof(float) || x->nb[1] % sizeof(float)) return false;
        if (op->op == ops.product) return w->ne[2] == 1;
        return op->op == ops.indexed_product && op->src[2]->type == I32;
    }

    TensorTraits * get_tensor_traits(const Tensor * op) override {
        if (op->op == ops.product) {
            if (is_packed(op->src[0])) return &product;
            return op->src[0]->type == F32 ? &float_product : left();
        }
        if (op->op == ops.indexed_product) return is_packed(op->src[0]) ? &indexed_product : left();
        if (op->op == ops.rows) return is_packed(op->src[0]) ? &rows_of : nullptr;
        if (op->op == ops.attention) return &attention;
        return op->extra ? recurrent_traits(op) : nullptr;
    }

  private:
    // Asked by the thread with the planner, and by others when they compute.
    static TensorTraits * left() {
        if (planner) planner->left++;
        return nullptr;
    }
};

Packed packed;

[[noreturn]] void refuse(const char * what) {
    fprintf(stderr, "EdgeSpec's kernels: %s\n", what);
    abort();
}

// Is it an output head with so many bits that fewer do to draft? Embeddings that serve as one need theirs.
bool can_be_narrowed(const Tensor * t) {
    return !strcmp(t->name, "output.weight") && t->ne[2] == 1 && t->ne[0] % 32 == 0 && edgespec_file_row_bytes(t->type, 256) >= 8 * WIDE_BLOCK;
}

// Packs a panel in 5 bits.
void pack_narrowed(const Tensor * t, const char * data, int64_t panel) {
    const int64_t k = t->ne[0], first = panel * EDGESPEC_PANEL_ROWS, left = t->ne[1] - first;
    const int64_t rows = left < EDGESPEC_PANEL_ROWS ? left : EDGESPEC_PANEL_ROWS;
    std::vector<char> wide(edgespec_packed_bytes(t->type, k, rows)), narrow(rows * edgespec_file_row_bytes(Q5_0::ID, k));
    std::vector<float> values(rows * k);
    edgespec_pack(t->type, data + first * edgespec_file_row_bytes(t->type, k), k, rows, 0, 1, wide.data());
    for (int64_t row = 0; row < rows; row++) edgespec_unpack_row(t->type, wide.data(), k, row, values.data() + row * k);
    quantize(Q5_0::ID, values.data(), narrow.data(), 0, rows, k, nullptr);
    edgespec_pack(Q5_0::ID, narrow.data(), k, rows, 0, 1, t->data + panel * edgespec_panel_bytes(Q5_0::ID, k));
}

// Has threads work on shares of a range, `step` at a time.
template <class Work> void in_parallel(int64_t first, int64_t last, int64_t step, int n_threads, const Work & work) {
    std::atomic<int64_t> next{first};
    const auto run = [&] {
        for (int64_t at; (at = next.fetch_add(step, std::memory_order_relaxed)) < last;) {
            work(at, at + step < last ? at + step : last);
        }
    };
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < n_threads; i++) others.emplace_back(run);
    } catch (const std::exception &) {
        // The system has no more threads or memory: those that there are do all of it.
    }
    run();
    for (auto & thread : others) thread.join();
}

// Has the system clear memory ahead of a loader: it reads in one thread, which would wait for every page.
class Clearing {
    std::vector<std::thread> threads;
    std::atomic<bool> ended{false};

    // Writes without a change, as the loader may have been there before.
    void touch(char * base, size_t size, std::atomic<size_t> & next) const {
        for (size_t at; !ended && (at = next.fetch_add(CLEARED_BYTES)) < size;) {
            const size_t end = at + CLEARED_BYTES < size ? at + CLEARED_BYTES : size;
            for (; at < end; at += SMALLEST_PAGE) reinterpret_cast<std::atomic<char> *>(base + at)->fetch_or(0);
        }
    }

  public:
    void begin(char * base, size_t size) {
        const auto next = std::make_shared<std::atomic<size_t>>(0);
        const int n_threads = usable_cores() > 2 ? usable_cores() - 1 : 1;
        try {
            for (int i = 0; i < n_threads; i++) threads.emplace_back([=] { touch(base, size, *next); });
        } catch (const std::exception &) {
            // The loader has the pages cleared itself.
        }
    }

    void end() {
        ended = true;
        for (auto & thread : threads) thread.join();
        threads.clear();
        ended = false;
    }

    ~Clearing() { end(); }
};

// Of a loader that reads weights to where they are to be packed.
struct Loading {
    std::vector<Tensor *> weights;  // that are not packed yet
    std::vector<char> copied;       // of the one that is packed
    Clearing clearing;
};

// Of the loader that this thread runs. A pointer, because MinGW frees the objects of a thread that ends before it calls their
// destructors.
thread_local Loading * loading = nullptr;

// How the panels of a weight are packed.
struct Packing {
    Tensor * t;
    const int64_t k, n, panels, total;
    const size_t row, of_packed;
    const bool narrowed;

    explicit Packing(Tensor * t)
        : t(t), k(t->ne[0]), n(t->ne[1]), panels(panels_of(t)), total(panels * t->ne[2]),
          row(edgespec_file_row_bytes(t->type, k)), of_packed(edgespec_packed_bytes(t->type, k, n)),
          narrowed(narrows_heads && can_be_narrowed(t)) {}

    // Bytes of the weight in a file before a panel.
    size_t before(int64_t panel) const {
        const int64_t rows = panel % panels * EDGESPEC_PANEL_ROWS;
        return (panel / panels * n + rows) * row;
    }

    // Packs some panels, from the bytes of the whole weight in a file.
    void pack(const char * file, int64_t first, int64_t last) const {
        for (; narrowed && first < last; first++) pack_narrowed(t, file, first);
        while (first < last) {
            const int64_t m = first / panels, p = first % panels, count = panels - p < last - first ? panels - p : last - first;
            edgespec_pack(t->type, file + m * n * row, k, n, p, p + count, t->data + m * of_packed);
            first += count;
        }
    }

    // The same, with all processors that this process may use.
    void pack_together(const char * file, int64_t first, int64_t last) const {
        const int n_threads = (last - first) * EDGESPEC_PANEL_ROWS * row < (1 << 20) ? 1 : usable_cores();
        in_parallel(first, last, panels_at_once(last - first, n_threads), n_threads, [&](int64_t from, int64_t to) {
            pack(file, from, to);
        });
    }

    void finish() const {
        if (!narrowed) return;
        t->type = Q5_0::ID;
        t->nb[0] = edgespec_file_row_bytes(t->type, 32);
        t->nb[1] = edgespec_file_row_bytes(t->type, k);
        t->nb[2] = t->nb[3] = t->nb[1] * n;
    }
};

// Packs a weight from its bytes in a file.
void set_tensor(Buffer *, Tensor * t, const void * data, size_t offset, size_t size) {
    const Packing packing(t);
    if (offset || size != packing.before(packing.total)) refuse("a weight was set in parts");
    packing.pack_together((const char *) data, 0, packing.total);
    packing.finish();
    if (!loading) return;
    auto & weights = loading->weights;
    weights.erase(std::remove(weights.begin(), weights.end(), t), weights.end());
}

// Packs a weight whose bytes were read from a file to where they are to be packed: some panels at a time from a copy,
// so that none is overwritten before it is copied.
void pack_in_place(Tensor * t) {
    const Packing packing(t);
    const size_t panel = EDGESPEC_PANEL_ROWS * packing.row;
    const bool shrinks = edgespec_panel_bytes(packing.narrowed ? (int) Q5_0::ID : t->type, packing.k) < panel;
    const int64_t at_once = panel < COPIED_BYTES ? COPIED_BYTES / panel : 1;
    for (int64_t done = 0; done < packing.total; done += at_once) {
        const int64_t count = at_once < packing.total - done ? at_once : packing.total - done;
        const int64_t first = shrinks ? done : packing.total - done - count;
        const size_t start = packing.before(first), end = packing.before(first + count);
        loading->copied.assign(t->data + start, t->data + end);
        packing.pack_together(loading->copied.data() - start, first, first + count);
    }
    packing.finish();
}

int init_tensor(Buffer * buffer, Tensor * t) {
    if (loading && buffer->type == &packed_type && !t->view_src) loading->weights.push_back(t);
    return 0;
}

const char * get_name(BufferType *) { return "EDGESPEC"; }
size_t get_alignment(BufferType *) { return ALIGNMENT; }
// Loaders read weights straight into memory of the host, and have others set from a copy. Types that follow this one's
// example, here and below, have no memory.
bool is_host(BufferType * type) { return loading && type == &packed_type; }

size_t get_alloc_size(BufferType *, const Tensor * t) {
    return edgespec_packed_bytes(t->type, t->ne[0], t->ne[1]) * (size_t) (t->ne[2] * t->ne[3]);
}

void free_buffer(Buffer * buffer) {
    if (loading) loading->clearing.end();
    free_plain(buffer);
}

Buffer * alloc_buffer(BufferType *, size_t size) {
    Buffer * buffer = alloc_plain(plain_type, size);
    if (!buffer) return nullptr;
    char * base = (char *) buffer->get_base(buffer);
    advise_huge_pages(base, size);
    if (loading) {
        loading->clearing.begin(base, size);
        free_plain = buffer->free_buffer;
        buffer->free_buffer = free_buffer;
    }
    buffer->type = &packed_type;
    buffer->init_tensor = init_tensor;
    buffer->set_tensor = set_tensor;
    buffer->get_tensor = nullptr;
    buffer->cpy_tensor = nullptr;
    return buffer;
}

BufferType packed_type = {get_name, alloc_buffer, get_alignment, nullptr, get_alloc_size, is_host, nullptr, nullptr};

// An entry of a class's virtual table; the first two are destructors, and two fields come before all entries.
const void * virtual_entry(const void * table, int number) { return ((const void * const *) table)[2 + number]; }

}  // namespace

int isa_of(const Tensor * op) {
    static const int best = edgespec_best_isa();
    return op->extra ? ((const Planner *) op->extra)->isa : best;
}

void wait_for_all(const ComputeParams * params) {
    if (params->nth > 1) barrier(params->threadpool);
}

}  // namespace edgespec

using namespace edgespec;

extern "C" {

const char * edgespec_register(const void * within, void * device, const edgespec_operations * operations) {
    LoadedLibrary library;
    if (!library.open(within)) return "its processor backend cannot be opened";
    auto types = (std::vector<BufferType *> & (*) ()) library.find("_Z39ggml_backend_cpu_get_extra_buffer_typesv");
    barrier = (void (*)(void *)) library.find("ggml_barrier");
    alloc_plain = (Buffer * (*) (BufferType *, size_t)) library.find("ggml_backend_buft_alloc_buffer");
    auto plain = (BufferType * (*) ()) library.find("ggml_backend_cpu_buffer_type");
    auto row_size = (size_t (*)(int, int64_t)) library.find("ggml_row_size");
    quantize = (decltype(quantize)) library.find("ggml_quantize_chunk");
    const void * table = library.find("_ZTVN4ggml3cpu6repack17extra_buffer_typeE");
    const void * supports = library.find(
        "_ZN4ggml3cpu6repack17extra_buffer_type11supports_opEP19ggml_backend_devicePK11ggml_tensor");
    const void * traits =
        library.find("_ZN4ggml3cpu6repack17extra_buffer_type17get_tensor_traitsEPK11ggml_tensor");
    if (!types || !barrier || !alloc_plain || !plain || !row_size || !quantize || !table || !supports || !traits) {
        return "it hides its extra buffer types";
    }
    if (virtual_entry(table, 2) != supports || virtual_entry(table, 3) != traits) {
        return "its extra buffer types have other functions";
    }
    for (int type : Types::IDS)
        if (row_size(type, 256) != edgespec_file_row_bytes(type, 256)) return "its blocks of weights have other sizes";
    plain_type = plain();
    ops = *operations;
    packed_type.device = device;
    types().insert(types().begin(), &packed_type);
    return nullptr;
}

void * edgespec_buffer_type(void) { return &packed_type; }

void edgespec_narrow_heads(int on) { narrows_heads = on; }

void edgespec_read_in_place(int on) {
    delete loading;
    loading = on ? new Loading : nullptr;
}

int64_t edgespec_pack_next(void) {
    if (!loading) return 0;
    loading->clearing.end();
    auto & weights = loading->weights;
    if (weights.empty()) return 0;
    pack_in_place(weights.back());
    weights.pop_back();
    return (int64_t) weights.size() + 1;
}

void edgespec_activate(void) { packed_type.context = &packed; }

void * edgespec_planner_new(int isa, int takes_unpacked) {
    const int chosen = isa < 0 ? edgespec_best_isa() : isa;
    if (chosen < 0 || !edgespec_isa_usable(chosen)) return nullptr;
    return new Planner{chosen, takes_unpacked != 0};
}

void edgespec_planner_free(void * freed) { delete (Planner *) freed; }

void edgespec_plan_with(void * next) { planner = (Planner *) next; }

void edgespec_answers(const void * asked, int64_t * ours, int64_t * left) {
    *ours = ((const Planner *) asked)->attention, *left = ((const Planner *) asked)->left;
}
}
