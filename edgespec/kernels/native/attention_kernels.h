// The steps of attention, compiled for one instruction set by each file that includes this.
//
// A query's result is a function of the cells that it sees, in their order, and of nothing else: a score adds its
// products one after another, the greatest score is exact however it is found, and weights and weighted values are
// added cell after cell. Cells that a query does not see have a weight of zero, which changes no sum. So neither the
// rows of a pass, nor cells of other texts in between, nor the number of threads change a bit.
#pragma once
#include "attention.h"
#include "vector16.h"
#include <cmath>
#include <cstring>
#include <type_traits>

namespace edgespec {
namespace {

constexpr uint16_t HALF_NEVER = 0xfc00;  // minus infinity as a half
constexpr float NEVER = -INFINITY;

inline float half(uint16_t h) {  // of masks, in which few values are neither 0 nor minus infinity
    alignas(64) uint16_t halves[LANES] = {h};
    alignas(64) float floats[LANES];
    V16::halves(halves).store(floats);
    return floats[0];
}

inline const uint16_t * mask_of(const Tile & t, int lane) {
    return (const uint16_t *) (t.mask + (t.first + lane) / t.group * t.mask_row);
}

// Sixteen values from number `i` of a cell on, a multiple of sixteen.
inline V16 values_at(const char * cell, int64_t i, bool quantized) {
    if (!quantized) return V16::halves((const uint16_t *) cell + i);
    const char * block = cell + i / 32 * (2 + 32);  // a scale, and 32 quants
    uint16_t scale;
    memcpy(&scale, block, sizeof scale);
    return mul(V16::of(half(scale)), V16::bytes((const int8_t *) block + 2 + i % 32));
}

// Values first .. first + size - 1 of some cells as floats.
inline void convert(const char * from, size_t stride, int64_t cells, int64_t first, int64_t size, bool quantized, float * to) {
    for (int64_t c = 0; c < cells; c++) {
        for (int64_t i = 0; i < size; i += LANES) values_at(from + c * stride, first + i, quantized).store(to + c * size + i);
    }
}

// With few queries, vectors of cells and of values waste less than vectors of queries; each result is made of the same
// operations.
constexpr int FEW = 6;
inline bool few(const Tile & t) { return t.lanes <= FEW; }

// Calls f with the number of queries of a tile that has few, as a constant.
template <typename F> inline void with_lanes(const Tile & t, F && f) {
    switch (t.lanes) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case 3: return f(std::integral_constant<int, 3>());
        case 4: return f(std::integral_constant<int, 4>());
        case 5: return f(std::integral_constant<int, 5>());
        default: return f(std::integral_constant<int, FEW>());
    }
}

// The score of a cell for a query, and the distance to the next cell's.
inline float * score_at(const Tile & t, int64_t cell, int lane) {
    return t.scores + (few(t) ? lane * padded_cells(t.n_cells) + cell : cell * LANES + lane);
}
inline int64_t score_stride(const Tile & t) { return few(t) ? 1 : LANES; }

// The bits by which some masks differ from 0, and from minus infinity. Finished sequences leave many cells that no row
// sees, so this runs over whole caches: four masks at a time, without a branch, which compilers turn into vectors.
inline void differences(const uint16_t * mask, int64_t cells, uint64_t & from_zero, uint64_t & from_never) {
    constexpr uint64_t NEVERS = 0x0001000100010001u * (uint64_t) HALF_NEVER;
    constexpr int64_t AT_ONCE = sizeof(uint64_t) / sizeof(uint16_t);
    int64_t c = 0;
    for (; c + AT_ONCE <= cells; c += AT_ONCE) {
        uint64_t masks;
        memcpy(&masks, mask + c, sizeof masks);
        from_zero |= masks, from_never |= masks ^ NEVERS;
    }
    for (; c < cells; c++) from_zero |= mask[c], from_never |= mask[c] ^ HALF_NEVER;
}

// Which of the cells does a row see? For each CELLS of them.
void see(const uint16_t * mask, int64_t n_cells, uint8_t * seen) {
    for (int64_t block = 0; block < n_cells; block += CELLS) {
        uint64_t from_zero = 0, from_never = 0;
        differences(mask + block, n_cells - block < CELLS ? n_cells - block : CELLS, from_zero, from_never);
        seen[block / CELLS] = !from_never ? SEEN_BY_NONE : !from_zero ? SEEN_BY_ALL : SEEN_BY_SOME;
    }
}

// Which of the cells do the rows of a tile see?
inline Seen seen_by(const Tile & t, int64_t block) {
    if (!t.rows_seen) return SEEN_BY_ALL;
    const int64_t first = t.first / t.group, last = (t.first + t.lanes - 1) / t.group;
    const uint8_t found = t.rows_seen[first * t.n_blocks + block];
    for (int64_t row = first + 1; row <= last; row++)
        if (t.rows_seen[row * t.n_blocks + block] != found) return SEEN_BY_SOME;
    return (Seen) found;
}

void begin(const Tile & t) {
    memset(t.queries_turned, 0, t.k_size * LANES * sizeof(float));
    memset(t.sums, 0, t.v_size * LANES * sizeof(float));
    for (int lane = 0; lane < t.lanes; lane++) {
        const int64_t row = (t.first + lane) / t.group, head = (t.first + lane) % t.group;
        const auto * q = (const float *) (t.queries + row * t.query_row + head * t.query_head);
        for (int64_t i = 0; i < t.k_size; i++) t.queries_turned[i * LANES + lane] = q[i];
    }
}

// Sums of products, scaled and capped.
inline V16 scaled(const Tile & t, V16 sums) {
    V16 x = mul(sums, V16::of(t.scale));
    if (t.cap != 0.0f) {  // cap * tanh(x), the scale being divided by the cap
        const V16 most = V16::of(20.0f), one = V16::of(1.0f), two = V16::of(2.0f);
        x = max(min(x, most), V16::of(-20.0f));
        x = mul(V16::of(t.cap), sub(one, div(two, add(exponential(mul(two, x)), one))));
    }
    return x;
}

// Of N cells, for all queries.
template <int N> inline void scores_of(const Tile & t, const float * keys, float * scores) {
    V16 s[N];
    for (int c = 0; c < N; c++) s[c] = V16::of(0.0f);
    for (int64_t i = 0; i < t.k_size; i++) {
        const V16 q = V16::load(t.queries_turned + i * LANES);
        for (int c = 0; c < N; c++) s[c] = fma(V16::of(keys[c * t.k_size + i]), q, s[c]);
    }
    for (int c = 0; c < N; c++) scaled(t, s[c]).store(scores + c * LANES);
}

// Of LANES cells, for N queries.
template <int N> inline void scores_of_few(const Tile & t, int64_t cell) {
    V16 s[N];
    for (int lane = 0; lane < N; lane++) s[lane] = V16::of(0.0f);
    for (int64_t i = 0; i < t.k_size; i++) {
        const V16 keys = V16::load(t.keys_turned + i * LANES);
        for (int lane = 0; lane < N; lane++) s[lane] = fma(keys, V16::of(t.queries_turned[i * LANES + lane]), s[lane]);
    }
    for (int lane = 0; lane < N; lane++) scaled(t, s[lane]).store(score_at(t, cell, lane));
}

void score_block(const Tile & t, int64_t block, int64_t cells) {
    if (few(t)) {
        // Scores up to the next multiple of LANES are computed from what was converted before, and never seen.
        for (int64_t c = 0; c < cells; c += LANES) {
            for (int64_t i = 0; i < t.k_size; i += LANES)
                transpose(t.converted + c * t.k_size + i, t.k_size, t.keys_turned + i * LANES, LANES);
            with_lanes(t, [&](auto n) { scores_of_few<n>(t, block + c); });
        }
        for (int64_t c = block + cells; c < padded_cells(block + cells); c++) {
            for (int lane = 0; lane < t.lanes; lane++) *score_at(t, c, lane) = NEVER;
        }
        return;
    }
    int64_t c = 0;
    for (; c + V16::GROUP <= cells; c += V16::GROUP)
        scores_of<V16::GROUP>(t, t.converted + c * t.k_size, t.scores + (block + c) * LANES);
    for (; c < cells; c++) scores_of<1>(t, t.converted + c * t.k_size, t.scores + (block + c) * LANES);
}

void score(const Tile & t, int64_t cell0, int64_t cell1) {
    for (int64_t block = cell0; block < cell1; block += CELLS) {
        const int64_t end = block + CELLS < t.n_cells ? block + CELLS : t.n_cells, cells = end - block;
        const Seen seen = seen_by(t, block / CELLS);
        t.seen[block / CELLS] = (uint8_t) seen;
        if (seen == SEEN_BY_NONE) continue;
        convert(t.keys + block * t.key_cell, t.key_cell, cells, 0, t.k_size, t.quantized_keys, t.converted);
        score_block(t, block, cells);
        if (seen == SEEN_BY_ALL) continue;
        for (int lane = 0; lane < t.lanes; lane++) {
            const uint16_t * mask = mask_of(t, lane);
            float * score = score_at(t, block, lane);
            for (int64_t c = block; c < end; c++, score += score_stride(t)) {
                if (mask[c] == HALF_NEVER) *score = NEVER;
                else if (mask[c]) *score += half(mask[c]);
            }
        }
    }
}

inline float greatest_of(V16 x) {
    alignas(64) float all[LANES];
    x.store(all);
    float greatest = all[0];
    for (int i = 1; i < LANES; i++) greatest = all[i] > greatest ? all[i] : greatest;
    return greatest;
}

template <int N> inline void soften_few(const Tile & t) {
    const auto each = [&](auto && f) {
        for (int64_t block = 0; block < t.n_cells; block += CELLS) {
            if (!t.seen[block / CELLS]) continue;
            const int64_t end = block + CELLS < t.n_cells ? block + CELLS : t.n_cells;
            for (int64_t c = block; c < end; c += LANES) f(c);
        }
    };
    V16 greatest[N];
    for (int lane = 0; lane < N; lane++) {
        V16 found = V16::of(-3.0e38f);  // of a query that sees nothing
        each([&](int64_t c) { found = max(found, V16::load(score_at(t, c, lane))); });
        float most = greatest_of(found);
        if (t.sinks) {
            const float sink = t.sinks[(t.first + lane) % t.group];
            most = most > sink ? most : sink;
        }
        greatest[lane] = V16::of(most);
    }
    float totals[N] = {};
    each([&](int64_t c) {
        for (int lane = 0; lane < N; lane++) {
            float * s = score_at(t, c, lane);
            exponential(sub(V16::load(s), greatest[lane])).store(s);
        }
        for (int i = 0; i < LANES; i++) {
            for (int lane = 0; lane < N; lane++) totals[lane] += *score_at(t, c + i, lane);
        }
    });
    for (int lane = 0; lane < N; lane++) {
        V16 total = V16::of(totals[lane]);
        if (t.sinks) {
            const V16 sink = V16::of(t.sinks[(t.first + lane) % t.group]);
            total = add(total, exponential(sub(sink, greatest[lane])));
        }
        alignas(64) float all[LANES];
        total.store(all);
        t.totals[lane] = all[0];
    }
}

void soften(const Tile & t) {
    if (few(t)) return with_lanes(t, [&](auto n) { soften_few<n>(t); });
    const auto each = [&](auto && f) {
        for (int64_t block = 0; block < t.n_cells; block += CELLS) {
            if (!t.seen[block / CELLS]) continue;
            const int64_t end = block + CELLS < t.n_cells ? block + CELLS : t.n_cells;
            for (int64_t c = block; c < end; c++) f(t.scores + c * LANES);
        }
    };
    V16 greatest = V16::of(NEVER), sinks = V16::of(NEVER);
    if (t.sinks) {
        float of_lane[LANES];
        for (int lane = 0; lane < LANES; lane++) of_lane[lane] = t.sinks[(t.first + lane) % t.group];
        greatest = sinks = V16::load(of_lane);
    }
    each([&](float * s) { greatest = max(greatest, V16::load(s)); });
    greatest = max(greatest, V16::of(-3.0e38f));  // of a query that sees nothing
    V16 total = V16::of(0.0f);
    each([&](float * s) {
        const V16 weight = exponential(sub(V16::load(s), greatest));
        weight.store(s);
        total = add(total, weight);
    });
    if (t.sinks) total = add(total, exponential(sub(sinks, greatest)));
    total.store(t.totals);
}

template <int N> inline void add_values(const Tile & t, const float * values, int64_t stride, int64_t value,
                                        int64_t cell0, int64_t cells) {
    V16 s[N];
    for (int i = 0; i < N; i++) s[i] = V16::load(t.sums + (value + i) * LANES);
    for (int64_t c = 0; c < cells; c++) {
        const V16 weight = V16::load(t.scores + (cell0 + c) * LANES);
        for (int i = 0; i < N; i++) s[i] = fma(V16::of(values[c * stride + i]), weight, s[i]);
    }
    for (int i = 0; i < N; i++) s[i].store(t.sums + (value + i) * LANES);
}

template <int N> inline void sum_few(const Tile & t, int64_t value0, int64_t value1) {
    for (int64_t block = 0; block < t.n_cells; block += CELLS) {
        if (!t.seen[block / CELLS]) continue;
        const int64_t end = block + CELLS < t.n_cells ? block + CELLS : t.n_cells;
        for (int64_t i = value0; i < value1; i += LANES) {
            V16 s[N];
            for (int lane = 0; lane < N; lane++) s[lane] = V16::load(t.sums + lane * t.v_size + i);
            for (int64_t c = block; c < end; c++) {
                const V16 values = values_at(t.values + c * t.value_cell, i, t.quantized_values);
                for (int lane = 0; lane < N; lane++) s[lane] = fma(values, V16::of(*score_at(t, c, lane)), s[lane]);
            }
            for (int lane = 0; lane < N; lane++) s[lane].store(t.sums + lane * t.v_size + i);
        }
    }
}

void sum(const Tile & t, int64_t value0, int64_t value1) {
    if (few(t)) return with_lanes(t, [&](auto n) { sum_few<n>(t, value0, value1); });
    const int64_t size = value1 - value0;
    for (int64_t block = 0; block < t.n_cells; block += CELLS) {
        if (!t.seen[block / CELLS]) continue;
        const int64_t cells = block + CELLS < t.n_cells ? CELLS : t.n_cells - block;
        convert(t.values + block * t.value_cell, t.value_cell, cells, value0, size, t.quantized_values, t.converted);
        for (int64_t i = 0; i < size; i += V16::GROUP)
            add_values<V16::GROUP>(t, t.converted + i, size, value0 + i, block, cells);
    }
}

void end(const Tile & t) {
    float inverse[LANES];
    for (int lane = 0; lane < LANES; lane++) inverse[lane] = t.totals[lane] > 0.0f ? 1.0f / t.totals[lane] : 0.0f;
    for (int lane = 0; lane < t.lanes; lane++) {
        const int64_t row = (t.first + lane) / t.group, head = (t.first + lane) % t.group;
        auto * out = (float *) (t.result + row * t.result_row + head * t.result_head);
        const int64_t first = few(t) ? lane * t.v_size : lane, step = few(t) ? 1 : LANES;
        for (int64_t i = 0; i < t.v_size; i++) out[i] = t.sums[first + i * step] * inverse[lane];
    }
}

constexpr AttentionKernels KERNELS = {see, begin, score, soften, sum, end};

}  // namespace
}  // namespace edgespec
