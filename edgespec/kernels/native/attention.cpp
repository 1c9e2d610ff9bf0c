// Flash attention that is exact for any number of rows: see attention_kernels.h.
//
// Its vectors hold queries, not values: of each head of keys and values, those of several rows and of all heads that
// share it. A tile has a few such vectors. Where these are few, vectors hold cells and values instead.
#include "attention.h"
#include "planner.h"
#include "products.h"
#include <atomic>
#include <cstring>
#include <new>

namespace edgespec {
namespace {

constexpr int F32 = 0, F16 = 1, Q8_0 = 8;
constexpr size_t BLOCK_BYTES = 34;  // of Q8_0, for 32 values
constexpr size_t ALIGNMENT = 64;

const AttentionKernels * kernels[EDGESPEC_ISA_COUNT];

size_t aligned(size_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

int64_t share(int64_t count, int ith, int nth) { return count * ith / nth; }

// The queries of a tile, at most so many vectors. Wide tiles convert cells less often, but may leave threads idle at the end.
int64_t width_of_tiles(int64_t queries_of_head, int64_t heads, int64_t most_vectors, int n_threads) {
    constexpr int64_t VECTOR = 10, CONVERSION = 3;  // their cost, in proportion
    int64_t found = LANES, least = INT64_MAX;
    for (int64_t vectors = 1; vectors <= most_vectors; vectors++) {
        const int64_t tiles = (queries_of_head + vectors * LANES - 1) / (vectors * LANES) * heads;
        const int64_t turns = tiles < n_threads ? tiles : (tiles + n_threads - 1) / n_threads * n_threads;
        const int64_t cost = turns * (vectors * VECTOR + CONVERSION);
        if (cost < least) least = cost, found = vectors * LANES;
    }
    return found;
}

// The tiles of a node, and the work memory for them.
struct Plan {
    int64_t k_size, v_size, n_cells, n_blocks, rows, masks, heads, streams, group, width, tiles_of_head, n_tiles;
    size_t rows_seen;  // for all slots
    size_t scores, queries, sums, totals, converted, turned, seen, per_slot;

    // There is work memory for tiles of any width, as fewer threads may come than were planned with.
    Plan(const Tensor * op, int n_threads) {
        const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
        k_size = k->ne[0], v_size = v->ne[0], n_cells = k->ne[1];
        n_blocks = (n_cells + CELLS - 1) / CELLS;
        masks = op->src[3] ? op->src[3]->ne[3] : 0;
        rows = q->ne[1], heads = k->ne[2], streams = q->ne[3], group = q->ne[2] / heads;
        const int64_t queries_of_head = rows * group, vectors = (queries_of_head + LANES - 1) / LANES;
        const int64_t most = vectors < MOST_VECTORS ? vectors : MOST_VECTORS, widest = most * LANES;
        width = width_of_tiles(queries_of_head, heads * streams, most, n_threads);
        tiles_of_head = (queries_of_head + width - 1) / width;
        n_tiles = tiles_of_head * heads * streams;
        rows_seen = aligned(masks * rows * n_blocks);
        size_t at = 0;
        const auto take = [&](size_t bytes) {
            const size_t begin = at;
            at += aligned(bytes);
            return begin;
        };
        scores = take(padded_cells(n_cells) * widest * sizeof(float));
        queries = take(k_size * widest * sizeof(float));
        sums = take(v_size * widest * sizeof(float));
        totals = take(widest * sizeof(float));
        converted = take(CELLS * (k_size > v_size ? k_size : v_size) * sizeof(float));
        turned = take(k_size * LANES * sizeof(float));
        seen = take(n_blocks);
        per_slot = at;
    }

    // Finds out which cells each row sees, once for all heads: this thread's share of the rows.
    void see(const Tensor * op, const AttentionKernels & run, char * found, int ith, int nth) const {
        const Tensor * mask = op->src[3];
        const int64_t last = share(masks * rows, ith + 1, nth);
        for (int64_t n = share(masks * rows, ith, nth); n < last; n++) {
            const char * row = mask->data + n / rows * mask->nb[3] + n % rows * mask->nb[1];
            run.see((const uint16_t *) row, n_cells, (uint8_t *) found + n * n_blocks);
        }
    }

    // Tile `number`, with the work memory of a slot.
    Tile tile(const Tensor * op, int64_t number, const char * found, char * slot) const {
        const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
        const int64_t head = number / tiles_of_head % heads, stream = number / tiles_of_head / heads;
        Tile t{};
        t.k_size = k_size, t.v_size = v_size, t.n_cells = n_cells, t.n_blocks = n_blocks;
        t.first = number % tiles_of_head * width, t.group = (int) group;
        const int64_t left = rows * group - t.first;
        t.lanes = (int) (left < width ? left : width);
        const int64_t first_head = head * group;
        t.queries = q->data + first_head * q->nb[2] + stream * q->nb[3];
        t.query_row = q->nb[1], t.query_head = q->nb[2];
        t.keys = k->data + head * k->nb[2] + stream / (streams / k->ne[3]) * k->nb[3];
        t.values = v->data + head * v->nb[2] + stream / (streams / v->ne[3]) * v->nb[3];
        t.key_cell = k->nb[1], t.value_cell = v->nb[1];
        t.quantized_keys = k->type == Q8_0, t.quantized_values = v->type == Q8_0;
        t.mask = mask ? mask->data + stream % mask->ne[3] * mask->nb[3] : nullptr;
        t.mask_row = mask ? mask->nb[1] : 0;
        t.rows_seen = mask ? (const uint8_t *) found + stream % masks * rows * n_blocks : nullptr;
        memcpy(&t.scale, op->op_params, sizeof(float));
        memcpy(&t.cap, op->op_params + 2, sizeof(float));
        if (t.cap != 0.0f) t.scale /= t.cap;
        t.sinks = sinks ? (const float *) sinks->data + first_head : nullptr;
        // The result has heads before rows.
        t.result = op->data + (stream * rows * op->ne[1] + first_head) * op->nb[1];
        t.result_row = op->ne[1] * op->nb[1], t.result_head = op->nb[1];
        t.scores = (float *) (slot + scores), t.queries_turned = (float *) (slot + queries);
        t.sums = (float *) (slot + sums), t.totals = (float *) (slot + totals);
        t.converted = (float *) (slot + converted), t.keys_turned = (float *) (slot + turned);
        t.seen = (uint8_t *) (slot + seen);
        return t;
    }
};

class Attention : public TensorTraits {
  public:
    bool work_size(int n_threads, const Tensor * op, size_t & size) override {
        const Plan plan(op, n_threads);
        size = 2 * ALIGNMENT + plan.rows_seen + n_threads * plan.per_slot;
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Plan plan(op, params->nth);
        const AttentionKernels & run = *kernels[isa_of(op)];
        char * work = (char *) aligned((size_t) params->work);
        auto * next = (std::atomic<int64_t> *) work;
        char * found = work + ALIGNMENT;
        char * slots = found + plan.rows_seen;
        plan.see(op, run, found, params->ith, params->nth);
        if (plan.n_tiles >= params->nth) {
            if (params->ith == 0) new (next) std::atomic<int64_t>(0);
            wait_for_all(params);
            for (int64_t n; (n = next->fetch_add(1, std::memory_order_relaxed)) < plan.n_tiles;) {
                const Tile t = plan.tile(op, n, found, slots + params->ith * plan.per_slot);
                run.begin(t);
                run.score(t, 0, plan.n_cells);
                run.soften(t);
                run.sum(t, 0, plan.v_size);
                run.end(t);
            }
            return true;
        }
        // Fewer tiles than threads: all threads share each.
        char * own = slots + params->ith * plan.per_slot;
        const auto mine = [&](int64_t n) { return n % params->nth == params->ith; };
        const auto tile = [&](int64_t n) {
            Tile t = plan.tile(op, n, found, slots + n * plan.per_slot);
            t.converted = (float *) (own + plan.converted), t.keys_turned = (float *) (own + plan.turned);
            return t;
        };
        for (int64_t n = 0; n < plan.n_tiles; n++)
            if (mine(n)) run.begin(tile(n));
        wait_for_all(params);
        const int64_t vectors = plan.v_size / LANES;
        for (int64_t n = 0; n < plan.n_tiles; n++) {
            const int64_t last = share(plan.n_blocks, params->ith + 1, params->nth) * CELLS;
            run.score(tile(n), share(plan.n_blocks, params->ith, params->nth) * CELLS, last < plan.n_cells ? last : plan.n_cells);
        }
        wait_for_all(params);
        for (int64_t n = 0; n < plan.n_tiles; n++)
            if (mine(n)) run.soften(tile(n));
        wait_for_all(params);
        for (int64_t n = 0; n < plan.n_tiles; n++) {
            const Tile t = tile(n);
            const int64_t first = share(vectors, params->ith, params->nth) * LANES;
            const int64_t last = share(vectors, params->ith + 1, params->nth) * LANES;
            if (first < last) run.sum(t, first, last);
        }
        wait_for_all(params);
        for (int64_t n = 0; n < plan.n_tiles; n++)
            if (mine(n)) run.end(tile(n));
        return true;
    }
};

Attention attention;

bool readable(const Tensor * cache) {
    return cache->type == F16    ? cache->nb[0] == 2 && cache->ne[0] % LANES == 0
           : cache->type == Q8_0 ? cache->nb[0] == BLOCK_BYTES && cache->ne[0] % 32 == 0
                                 : false;
}

}  // namespace

TensorTraits & attention_traits() { return attention; }

bool can_attend(const Tensor * op, int isa) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    float bias;
    memcpy(&bias, op->op_params + 1, sizeof bias);
    return kernels[isa] && q->type == F32 && readable(k) && readable(v) && bias == 0.0f &&
           k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0 && q->nb[0] == sizeof(float) &&
           op->nb[0] == sizeof(float) && (!mask || (mask->type == F16 && mask->nb[0] == 2 && mask->ne[2] == 1));
}

void add_attention(const AttentionKernels & added, const int * isas, int n_isas) {
    for (int i = 0; i < n_isas; i++) kernels[isas[i]] = &added;
}

}  // namespace edgespec
