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
constexpr float LEAST = -3.0e38f;  // the greatest score of a query that sees nothing

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
template <bool QUANTIZED> inline V16 values_at(const char * cell, int64_t i) {
    if (!QUANTIZED) return V16::halves((const uint16_t *) cell + i);
    const char * block = cell + i / 32 * (2 + 32);  // a scale, and 32 quants
    uint16_t scale;
    memcpy(&scale, block, sizeof scale);
    return mul(V16::of(half(scale)), V16::bytes((const int8_t *) block + 2 + i % 32));
}

// Values first .. first + size - 1 of some cells as floats.
template <bool QUANTIZED>
inline void convert(const char * from, size_t stride, int64_t cells, int64_t first, int64_t size, float * to) {
    for (int64_t c = 0; c < cells; c++, from += stride, to += size) {
        for (int64_t i = 0; i < size; i += LANES) values_at<QUANTIZED>(from, first + i).store(to + i);
    }
}

// The same for a block of cells of either type; has the next block fetched from memory meanwhile.
inline void convert_block(const char * from, size_t stride, int64_t cells, int64_t first, int64_t size, bool quantized, float * to) {
    if (quantized) convert<true>(from, stride, cells, first, size, to);
    else convert<false>(from, stride, cells, first, size, to);
    const char * next = from + CELLS * stride + first * sizeof(uint16_t);
    for (int64_t c = 0; c < cells; c++, next += stride) {
        for (size_t i = 0; i < size * sizeof(uint16_t); i += 64) __builtin_prefetch(next + i, 0, 2);  // the second cache
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
    if (few(t)) return t.scores + lane * padded_cells(t.n_cells) + cell;
    return t.scores + (lane / LANES * t.n_cells + cell) * LANES + lane % LANES;
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

inline int vectors(const Tile & t) { return (t.lanes + LANES - 1) / LANES; }

// Calls f with the first of each block of cells that some row of the tile sees, and how many they are.
template <typename F> inline EDGESPEC_ALWAYS void each_seen(const Tile & t, F && f) {
    for (int64_t block = 0; block < t.n_cells; block += CELLS) {
        if (t.seen[block / CELLS]) f(block, block + CELLS < t.n_cells ? CELLS : t.n_cells - block);
    }
}

// Calls f with a number of vectors of queries that are computed together, as a constant, and the first of them.
template <typename F> inline void each_group(const Tile & t, F && f) {
    int vector = 0;
    for (; vector + V16::TOGETHER <= vectors(t); vector += V16::TOGETHER) f(std::integral_constant<int, V16::TOGETHER>(), vector);
    for (; vector < vectors(t); vector++) f(std::integral_constant<int, 1>(), vector);
}

void begin(const Tile & t) {
    memset(t.queries_turned, 0, vectors(t) * t.k_size * LANES * sizeof(float));
    memset(t.sums, 0, vectors(t) * t.v_size * LANES * sizeof(float));
    for (int lane = 0; lane < t.lanes; lane++) {
        const int64_t row = (t.first + lane) / t.group, head = (t.first + lane) % t.group;
        const auto * q = (const float *) (t.queries + row * t.query_row + head * t.query_head);
        float * turned = t.queries_turned + lane / LANES * t.k_size * LANES + lane % LANES;
        for (int64_t i = 0; i < t.k_size; i++) turned[i * LANES] = q[i];
    }
}

// Scales sums of products, and caps them.
inline void scale(const Tile & t, float * sums, int64_t stride, int n) {
    for (int j = 0; j < n; j++, sums += stride) {
        V16 x = mul(V16::load(sums), V16::of(t.scale));
        if (t.cap != 0.0f) {  // cap * tanh(x), the scale being divided by the cap
            const V16 most = V16::of(20.0f), one = V16::of(1.0f), two = V16::of(2.0f);
            x = max(min(x, most), V16::of(-20.0f));
            x = mul(V16::of(t.cap), sub(one, div(two, add(exponential(mul(two, x)), one))));
        }
        x.store(sums);
    }
}

// Of N cells, for V vectors of queries.
template <int V, int N>
inline void scores_of(const Tile & t, const float * keys, const float * queries, float * scores) {
    const int64_t size = t.k_size, next = t.n_cells * LANES;
    V16 s[V * N];
    unrolled<V * N>(EDGESPEC_EACH(j) { s[j] = V16::of(0.0f); });
    for (int64_t i = 0; i < size; i++) {
        V16 q[V];
        unrolled<V>(EDGESPEC_EACH(v) { q[v] = V16::load(queries + (v * size + i) * LANES); });
        unrolled<N>(EDGESPEC_EACH(c) {
            const V16 key = V16::of(keys[c * size + i]);
            unrolled<V>(EDGESPEC_EACH(v) { s[v * N + c] = fma(key, q[v], s[v * N + c]); });
        });
    }
    unrolled<V * N>(EDGESPEC_EACH(j) { s[j].store(scores + j / N * next + j % N * LANES); });
    for (int v = 0; v < V; v++) scale(t, scores + v * next, LANES, N);
}

// Of LANES cells, for N queries.
template <int N> inline void scores_of_few(const Tile & t, float * scores) {
    const int64_t size = t.k_size, next = padded_cells(t.n_cells);
    V16 s[N];
    unrolled<N>(EDGESPEC_EACH(lane) { s[lane] = V16::of(0.0f); });
    for (int64_t i = 0; i < size; i++) {
        const V16 keys = V16::load(t.keys_turned + i * LANES);
        const float * q = t.queries_turned + i * LANES;
        unrolled<N>(EDGESPEC_EACH(lane) { s[lane] = fma(keys, V16::of(q[lane]), s[lane]); });
    }
    unrolled<N>(EDGESPEC_EACH(lane) { s[lane].store(scores + lane * next); });
    scale(t, scores, next, N);
}

template <int V> inline void score_vectors(const Tile & t, int vector, int64_t block, int64_t cells) {
    const float * queries = t.queries_turned + vector * t.k_size * LANES;
    float * scores = t.scores + (vector * t.n_cells + block) * LANES;
    int64_t c = 0;
    for (; c + V16::GROUP <= cells; c += V16::GROUP)
        scores_of<V, V16::GROUP>(t, t.converted + c * t.k_size, queries, scores + c * LANES);
    for (; c < cells; c++) scores_of<V, 1>(t, t.converted + c * t.k_size, queries, scores + c * LANES);
}

void score_block(const Tile & t, int64_t block, int64_t cells) {
    if (few(t)) {
        // Scores up to the next multiple of LANES are computed from what was converted before, and never seen.
        for (int64_t c = 0; c < cells; c += LANES) {
            for (int64_t i = 0; i < t.k_size; i += LANES)
                transpose(t.converted + c * t.k_size + i, t.k_size, t.keys_turned + i * LANES, LANES);
            with_lanes(t, [&](auto n) { scores_of_few<n>(t, t.scores + block + c); });
        }
        for (int64_t c = block + cells; c < padded_cells(block + cells); c++) {
            for (int lane = 0; lane < t.lanes; lane++) *score_at(t, c, lane) = NEVER;
        }
        return;
    }
    each_group(t, [&](auto v, int vector) { score_vectors<v>(t, vector, block, cells); });
}

void score(const Tile & t, int64_t cell0, int64_t cell1) {
    for (int64_t block = cell0; block < cell1; block += CELLS) {
        const int64_t end = block + CELLS < t.n_cells ? block + CELLS : t.n_cells, cells = end - block;
        const Seen seen = seen_by(t, block / CELLS);
        t.seen[block / CELLS] = (uint8_t) seen;
        if (seen == SEEN_BY_NONE) continue;
        convert_block(t.keys + block * t.key_cell, t.key_cell, cells, 0, t.k_size, t.quantized_keys, t.converted);
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
    const int64_t next = padded_cells(t.n_cells);
    V16 greatest[N];
    unrolled<N>(EDGESPEC_EACH(lane) {
        V16 found = V16::of(LEAST);
        each_seen(t, [&](int64_t block, int64_t cells) EDGESPEC_ALWAYS {
            for (int64_t c = block; c < block + cells; c += LANES) found = max(found, V16::load(t.scores + lane * next + c));
        });
        float most = greatest_of(found);
        if (t.sinks) {
            const float sink = t.sinks[(t.first + lane) % t.group];
            most = most > sink ? most : sink;
        }
        greatest[lane] = V16::of(most);
    });
    float totals[N] = {};
    each_seen(t, [&](int64_t block, int64_t cells) EDGESPEC_ALWAYS {
        for (int64_t c = block; c < block + cells; c += LANES) {
            float * scores = t.scores + c;
            unrolled<N>(EDGESPEC_EACH(lane) {
                float * s = scores + lane * next;
                exponential(sub(V16::load(s), greatest[lane])).store(s);
            });
            for (int i = 0; i < LANES; i++) unrolled<N>(EDGESPEC_EACH(lane) { totals[lane] += scores[lane * next + i]; });
        }
    });
    unrolled<N>(EDGESPEC_EACH(lane) {
        V16 total = V16::of(totals[lane]);
        if (t.sinks) {
            const V16 sink = V16::of(t.sinks[(t.first + lane) % t.group]);
            total = add(total, exponential(sub(sink, greatest[lane])));
        }
        alignas(64) float all[LANES];
        total.store(all);
        t.totals[lane] = all[0];
    });
}

inline void soften_vector(const Tile & t, int vector) {
    float * scores = t.scores + vector * t.n_cells * LANES;
    V16 greatest = V16::of(LEAST), sinks = V16::of(NEVER);
    if (t.sinks) {
        float of_lane[LANES];
        for (int lane = 0; lane < LANES; lane++) of_lane[lane] = t.sinks[(t.first + vector * LANES + lane) % t.group];
        sinks = V16::load(of_lane);
        greatest = max(greatest, sinks);
    }
    each_seen(t, [&](int64_t block, int64_t cells) EDGESPEC_ALWAYS {
        for (int64_t c = block; c < block + cells; c++) greatest = max(greatest, V16::load(scores + c * LANES));
    });
    V16 total = V16::of(0.0f);
    each_seen(t, [&](int64_t block, int64_t cells) EDGESPEC_ALWAYS {
        for (int64_t c = block; c < block + cells; c++) {
            const V16 weight = exponential(sub(V16::load(scores + c * LANES), greatest));
            weight.store(scores + c * LANES);
            total = add(total, weight);
        }
    });
    if (t.sinks) total = add(total, exponential(sub(sinks, greatest)));
    total.store(t.totals + vector * LANES);
}

void soften(const Tile & t) {
    if (few(t)) return with_lanes(t, [&](auto n) { soften_few<n>(t); });
    for (int vector = 0; vector < vectors(t); vector++) soften_vector(t, vector);
}

// Numbers of some cells, V vectors or N single ones, and the distances to those of the next cell and to the next of a cell.
struct OfCells {
    const float * at;
    int64_t cell, next;
};

// Adds the products of each vector and each single number, cell after cell.
template <int V, int N>
inline EDGESPEC_ALWAYS void add_products(int64_t cells, OfCells vectors, OfCells singles, float * sums, int64_t next_vector,
                                         int64_t next_single) {
    V16 s[V * N];
    unrolled<V * N>(EDGESPEC_EACH(j) { s[j] = V16::load(sums + j / N * next_vector + j % N * next_single); });
    for (int64_t c = 0; c < cells; c++) {
        V16 x[V];
        unrolled<V>(EDGESPEC_EACH(v) { x[v] = V16::load(vectors.at + c * vectors.cell + v * vectors.next); });
        unrolled<N>(EDGESPEC_EACH(n) {
            const V16 single = V16::of(singles.at[c * singles.cell + n * singles.next]);
            unrolled<V>(EDGESPEC_EACH(v) { s[v * N + n] = fma(x[v], single, s[v * N + n]); });
        });
    }
    unrolled<V * N>(EDGESPEC_EACH(j) { s[j].store(sums + j / N * next_vector + j % N * next_single); });
}

template <int V>
inline void sum_vectors(const Tile & t, int vector, int64_t block, int64_t cells, int64_t value0, int64_t size) {
    const float * weights = t.scores + (vector * t.n_cells + block) * LANES;
    float * sums = t.sums + (vector * t.v_size + value0) * LANES;
    for (int64_t i = 0; i < size; i += V16::GROUP) {
        add_products<V, V16::GROUP>(cells, {weights, LANES, t.n_cells * LANES}, {t.converted + i, size, 1}, sums + i * LANES,
                                    t.v_size * LANES, LANES);
    }
}

template <int N> inline void sum_few(const Tile & t, int64_t block, int64_t cells, int64_t value0, int64_t size) {
    constexpr int M = N > V16::GROUP ? 1 : N > V16::GROUP / 2 ? 2 : 4;
    const auto add = [&](auto m, int64_t i) {
        add_products<m, N>(cells, {t.converted + i, size, LANES}, {t.scores + block, 1, padded_cells(t.n_cells)},
                           t.sums + value0 + i, LANES, t.v_size);
    };
    int64_t i = 0;
    for (; i + M * LANES <= size; i += M * LANES) add(std::integral_constant<int, M>(), i);
    for (; i < size; i += LANES) add(std::integral_constant<int, 1>(), i);
}

void sum(const Tile & t, int64_t value0, int64_t value1) {
    const int64_t size = value1 - value0;
    each_seen(t, [&](int64_t block, int64_t cells) {
        convert_block(t.values + block * t.value_cell, t.value_cell, cells, value0, size, t.quantized_values, t.converted);
        if (few(t)) return with_lanes(t, [&](auto n) { sum_few<n>(t, block, cells, value0, size); });
        each_group(t, [&](auto v, int vector) { sum_vectors<v>(t, vector, block, cells, value0, size); });
    });
}

void end(const Tile & t) {
    for (int lane = 0; lane < t.lanes; lane++) {
        const int64_t row = (t.first + lane) / t.group, head = (t.first + lane) % t.group;
        auto * out = (float *) (t.result + row * t.result_row + head * t.result_head);
        const float inverse = t.totals[lane] > 0.0f ? 1.0f / t.totals[lane] : 0.0f;
        const float * sums = t.sums + (few(t) ? lane * t.v_size : lane / LANES * t.v_size * LANES + lane % LANES);
        const int64_t step = few(t) ? 1 : LANES;
        for (int64_t i = 0; i < t.v_size; i++) out[i] = sums[i * step] * inverse;
    }
}

constexpr AttentionKernels KERNELS = {see, begin, score, soften, sum, end};

}  // namespace
}  // namespace edgespec
