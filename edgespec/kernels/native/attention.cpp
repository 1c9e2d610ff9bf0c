// Flash attention that is exact for any number of rows: see attention_kernels.h.
//
// Its vectors hold queries, not values: of each head of keys and values, those of several rows and of all heads that
// share it. Where these are few, values are summed by vectors of values instead.
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
constexpr int EVEN = 8;  // shares of a thread, of which one more or less hardly counts
constexpr int64_t SCORE_BYTES = 2 << 20;  // of tiles that are computed together, if there are several

const AttentionKernels * kernels[EDGESPEC_ISA_COUNT];

size_t aligned(size_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

int64_t share(int64_t count, int ith, int nth) { return count * ith / nth; }

// The tiles of a node, and the work memory for them.
struct Plan {
    int64_t k_size, v_size, n_cells, n_blocks, rows, masks, heads, streams, group, tiles_of_head, n_tiles;
    size_t rows_seen;  // for all slots
    size_t scores, queries, query_scales, sums, totals, seen, per_slot;  // of a tile
    size_t converted, keys, key_scales, per_thread;

    explicit Plan(const Tensor * op) {
        const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
        k_size = k->ne[0], v_size = v->ne[0], n_cells = k->ne[1];
        n_blocks = (n_cells + CELLS - 1) / CELLS;
        masks = op->src[3] ? op->src[3]->ne[3] : 0;
        rows = q->ne[1], heads = k->ne[2], streams = q->ne[3], group = q->ne[2] / heads;
        tiles_of_head = (rows * group + LANES - 1) / LANES;
        n_tiles = tiles_of_head * heads * streams;
        rows_seen = aligned(masks * rows * n_blocks);
        size_t at = 0;
        const auto take = [&](size_t bytes) {
            const size_t begin = at;
            at += aligned(bytes);
            return begin;
        };
        scores = take(n_blocks * CELLS * LANES * sizeof(float));
        queries = take(padded_size(k_size) * LANES * sizeof(int16_t));
        query_scales = take(LANES * sizeof(float));
        sums = take(v_size * LANES * sizeof(float));
        totals = take(LANES * sizeof(float));
        seen = take(n_blocks);
        per_slot = at;
        at = company() * per_slot;
        const int64_t turned = padded_size(k_size) * LANES, values = CELLS * v_size;
        converted = take((turned > values ? turned : values) * sizeof(float));
        keys = take(CELLS * padded_size(k_size) * sizeof(int16_t));
        key_scales = take(CELLS * sizeof(float));
        per_thread = at;
    }

    // The most tiles of a head that a thread computes together.
    int64_t company() const {
        int64_t most = SCORE_BYTES / (n_blocks * CELLS * LANES * (int64_t) sizeof(float));
        most = most < 1 ? 1 : most > COMPANY ? COMPANY : most;
        return tiles_of_head < most ? tiles_of_head : most;
    }

    // How many tiles of a head are computed together: as many as leave all threads an even share.
    int64_t company_for(int nth) const {
        int64_t size = company();
        for (; size > 1; size--) {
            const int64_t count = (tiles_of_head + size - 1) / size * heads * streams;
            if (count % nth == 0 || count >= EVEN * nth) break;
        }
        return size;
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

    // Tile `number`, with the work memory of a slot and of a thread.
    Tile tile(const Tensor * op, int64_t number, const char * found, char * slot, char * own) const {
        const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
        const int64_t head = number / tiles_of_head % heads, stream = number / tiles_of_head / heads;
        Tile t{};
        t.k_size = k_size, t.v_size = v_size, t.n_cells = n_cells, t.n_blocks = n_blocks;
        t.first = number % tiles_of_head * LANES, t.group = (int) group;
        const int64_t left = rows * group - t.first;
        t.lanes = left < LANES ? (int) left : LANES;
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
        t.scores = (float *) (slot + scores);
        t.queries_packed = slot + queries, t.query_scales = (float *) (slot + query_scales);
        t.sums = (float *) (slot + sums), t.totals = (float *) (slot + totals);
        t.seen = (uint8_t *) (slot + seen);
        t.converted = (float *) (own + converted), t.keys_packed = own + keys, t.key_scales = (float *) (own + key_scales);
        return t;
    }
};

class Attention : public TensorTraits {
  public:
    bool work_size(int n_threads, const Tensor * op, size_t & size) override {
        const Plan plan(op);
        size = 2 * ALIGNMENT + plan.rows_seen + n_threads * plan.per_thread;
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Plan plan(op);
        const AttentionKernels & run = *kernels[isa_of(op)];
        char * work = (char *) aligned((size_t) params->work);
        auto * next = (std::atomic<int64_t> *) work;
        char * found = work + ALIGNMENT;
        char * slots = found + plan.rows_seen;
        plan.see(op, run, found, params->ith, params->nth);
        char * own = slots + params->ith * plan.per_thread;
        if (plan.n_tiles >= params->nth) {
            if (params->ith == 0) new (next) std::atomic<int64_t>(0);
            wait_for_all(params);
            const int64_t company = plan.company_for(params->nth), of_head = (plan.tiles_of_head + company - 1) / company;
            for (int64_t n; (n = next->fetch_add(1, std::memory_order_relaxed)) < of_head * plan.heads * plan.streams;) {
                const int64_t first = n % of_head * company, left = plan.tiles_of_head - first;
                const int count = (int) (left < company ? left : company);
                Tile tiles[COMPANY];
                for (int i = 0; i < count; i++) {
                    const int64_t number = n / of_head * plan.tiles_of_head + first + i;
                    tiles[i] = plan.tile(op, number, found, own + i * plan.per_slot, own);
                    run.begin(tiles[i]);
                }
                run.score(tiles, count, 0, plan.n_cells);
                for (int i = 0; i < count; i++) run.soften(tiles[i]);
                run.sum(tiles, count, 0, plan.v_size);
                for (int i = 0; i < count; i++) run.end(tiles[i]);
            }
            return true;
        }
        // Fewer tiles than threads: all threads share each.
        const auto mine = [&](int64_t n) { return n % params->nth == params->ith; };
        const auto tile = [&](int64_t n) { return plan.tile(op, n, found, slots + n * plan.per_thread, own); };
        // Calls f with tiles of a head.
        const auto each_company = [&](auto && f) {
            Tile tiles[COMPANY];
            for (int64_t n = 0, count; n < plan.n_tiles; n += count) {
                const int64_t left = plan.tiles_of_head - n % plan.tiles_of_head;
                count = left < COMPANY ? left : COMPANY;
                for (int64_t i = 0; i < count; i++) tiles[i] = tile(n + i);
                f(tiles, (int) count);
            }
        };
        for (int64_t n = 0; n < plan.n_tiles; n++)
            if (mine(n)) run.begin(tile(n));
        wait_for_all(params);
        const int64_t end = share(plan.n_blocks, params->ith + 1, params->nth) * CELLS;
        each_company([&](const Tile * tiles, int count) {
            run.score(tiles, count, share(plan.n_blocks, params->ith, params->nth) * CELLS,
                      end < plan.n_cells ? end : plan.n_cells);
        });
        wait_for_all(params);
        for (int64_t n = 0; n < plan.n_tiles; n++)
            if (mine(n)) run.soften(tile(n));
        wait_for_all(params);
        const int64_t vectors = plan.v_size / LANES;
        const int64_t value0 = share(vectors, params->ith, params->nth) * LANES;
        const int64_t value1 = share(vectors, params->ith + 1, params->nth) * LANES;
        if (value0 < value1)
            each_company([&](const Tile * tiles, int count) { run.sum(tiles, count, value0, value1); });
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
