// The steps of attention, compiled for one instruction set by each file that includes this.
//
// A query's result is a function of the cells that it sees, in their order, and of nothing else. Queries and keys are
// brought to a common length and rounded to 16 bits, so the sums of their products are exact in any order; the greatest
// score is exact however it is found, and weights and weighted values are added cell after cell. Cells that a query does
// not see have a weight of zero, which changes no sum. So neither the rows of a pass, nor cells of other texts in between,
// nor the number of threads change a bit.
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
constexpr float TINY = 1e-30f;      // shorter queries and keys are zero
constexpr float LENGTH = 32760.0f;  // of queries and keys: no sum of their products leaves 31 bits, however they are rounded

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

// With few queries, vectors of values waste less than vectors of queries; each result is made of the same operations.
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

// Joins the sixteen values of each vector: one sum for each vector.
inline V16 sums_of(const float (&vectors)[LANES][LANES]) {
    alignas(64) float turned[LANES][LANES];
    transpose(vectors[0], LANES, turned[0], LANES);
    V16 x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = V16::load(turned[i]);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) x[i] = add(x[i], x[i + n]);
    return x[0];
}

// What queries and keys are multiplied by to be of LENGTH, and what their products are multiplied by to undo it.
inline V16 to_length(V16 length) { return select(length, V16::of(TINY), div(V16::of(LENGTH), length), V16::of(0.0f)); }
inline V16 from_length(V16 length) { return mul(length, V16::of(1.0f / LENGTH)); }

// Products of queries and keys of 16 bits, two by two.
struct Pairs {
    struct State {};

    // The queries of all lanes, which have been brought to their length.
    static void put_queries(const float * turned, int64_t size, char * to) {
        for (int64_t i = 0; i < size; i += 2, to += PAIRS_BYTES)
            store_pairs(integers(V16::load(turned + i * LANES)), integers(V16::load(turned + (i + 1) * LANES)), to);
    }

    // Sixteen numbers of the key of a cell, from number `i` on.
    static void put_keys(V16I numbers, int64_t size, int64_t cell, int64_t i, char * keys) {
        store_shorts(numbers, (int16_t *) keys + cell * padded_size(size) + i);
    }

    // Calls f with each cell of a block and the sums of its products with the queries.
    template <typename F> static void multiply(const char * queries, int lanes, const char * keys, int64_t size, F && f) {
        if (V16I::PARTED && lanes <= LANES / 2) multiply_part<true>(queries, keys, size, f);
        else multiply_part<false>(queries, keys, size, f);
    }
    // With those of all lanes, or of the first half.
    template <bool HALF, typename F> static void multiply_part(const char * queries, const char * keys, int64_t size, F && f) {
        constexpr int N = HALF ? 2 * V16I::GROUP : V16I::GROUP;
        for (int cell = 0; cell < CELLS; cell += N) {
            const auto * from = (const int16_t *) keys + cell * padded_size(size);
            V16I sums[N];
            for (int c = 0; c < N; c++) sums[c] = V16I::of(0);
            for (int64_t i = 0; i < size; i += 2) {
                const LanePairs q = LanePairs::load(queries + i / 2 * PAIRS_BYTES);
                for (int c = 0; c < N; c++) sums[c] = add_pairs<HALF>(sums[c], q, from + c * padded_size(size) + i);
            }
            for (int c = 0; c < N; c++) f(cell + c, sums[c]);
        }
    }
};

template <class M> void begin(const Tile & t) {
    float * turned = t.converted;
    memset(turned, 0, padded_size(t.k_size) * LANES * sizeof(float));
    memset(t.sums, 0, t.v_size * LANES * sizeof(float));
    for (int lane = 0; lane < t.lanes; lane++) {
        const int64_t row = (t.first + lane) / t.group, head = (t.first + lane) % t.group;
        const auto * q = (const float *) (t.queries + row * t.query_row + head * t.query_head);
        for (int64_t i = 0; i < t.k_size; i++) turned[i * LANES + lane] = q[i];
    }
    V16 squares = V16::of(0.0f);
    for (int64_t i = 0; i < t.k_size; i++) {
        const V16 x = V16::load(turned + i * LANES);
        squares = fma(x, x, squares);
    }
    const V16 length = root(squares), by = to_length(length);
    for (int64_t i = 0; i < t.k_size; i++) mul(V16::load(turned + i * LANES), by).store(turned + i * LANES);
    M::put_queries(turned, t.k_size, t.queries_packed);
    mul(from_length(length), V16::of(t.scale)).store(t.query_scales);
}

// The keys of a block in 16 bits, and their scales.
template <class M, bool QUANTIZED> void convert_keys(const Tile & t, int64_t block, int64_t cells) {
    for (int64_t first = 0; first < cells; first += LANES) {
        const int64_t count = cells - first < LANES ? cells - first : LANES;
        const auto key = [&](int64_t c) { return t.keys + (block + first + c) * t.key_cell; };
        alignas(64) float squares[LANES][LANES] = {}, by[LANES];
        for (int64_t c = 0; c < count; c++) {
            V16 sum = V16::of(0.0f);
            for (int64_t i = 0; i < t.k_size; i += LANES) {
                const V16 x = values_at(key(c), i, QUANTIZED);
                sum = fma(x, x, sum);
            }
            sum.store(squares[c]);
        }
        const V16 length = root(sums_of(squares));
        to_length(length).store(by);
        from_length(length).store(t.key_scales + first);
        for (int64_t c = 0; c < count; c++) {
            for (int64_t i = 0; i < t.k_size; i += LANES) {
                const V16 x = values_at(key(c), i, QUANTIZED);
                M::put_keys(integers(mul(x, V16::of(by[c]))), t.k_size, first + c, i, t.keys_packed);
            }
        }
    }
}

// Caps a score.
inline V16 capped(const Tile & t, V16 x) {
    if (t.cap == 0.0f) return x;
    // cap * tanh(x), the scale being divided by the cap
    const V16 most = V16::of(20.0f), one = V16::of(1.0f), two = V16::of(2.0f);
    x = max(min(x, most), V16::of(-20.0f));
    return mul(V16::of(t.cap), sub(one, div(two, add(exponential(mul(two, x)), one))));
}

template <class M> void score_block(const Tile & t, int64_t block) {
    const V16 query_scales = V16::load(t.query_scales);
    float * scores = t.scores + block * LANES;
    M::multiply(t.queries_packed, t.lanes, t.keys_packed, t.k_size, [&](int c, V16I sum) {
        const V16 x = mul(mul(floats(sum), V16::of(t.key_scales[c])), query_scales);
        capped(t, x).store(scores + c * LANES);
    });
}

// Those of some tiles whose rows see a cell of a block, and the last of them apart if it has few queries.
struct Seeing {
    const Tile * tiles[COMPANY];
    int count = 0;
    const Tile * last_few = nullptr;

    Seeing(const Tile * from, int n, int64_t block) {
        for (int i = 0; i < n; i++) {
            if (from[i].seen[block / CELLS] == SEEN_BY_NONE) continue;
            if (few(from[i])) last_few = from + i;
            else tiles[count++] = from + i;
        }
    }
    // Calls f with as many tiles as registers serve at once, and their number as a constant.
    template <typename F> void each(F && f) const {
        int i = 0;
        for (; i + V16::TILES <= count; i += V16::TILES) f(tiles + i, std::integral_constant<int, V16::TILES>());
        for (; i < count; i++) f(tiles + i, std::integral_constant<int, 1>());
    }
};

void hide(const Tile & t, int64_t block, int64_t end) {
    if (t.seen[block / CELLS] != SEEN_BY_SOME) return;
    for (int lane = 0; lane < t.lanes; lane++) {
        const uint16_t * mask = mask_of(t, lane);
        for (int64_t c = block; c < end; c++) {
            float & score = t.scores[c * LANES + lane];
            if (mask[c] == HALF_NEVER) score = NEVER;
            else if (mask[c]) score += half(mask[c]);
        }
    }
}

// Has the values of a block fetched while the one before it is worked on.
inline void fetch(const char * from, size_t stride, int64_t cells, int64_t bytes) {
    for (int64_t c = 0; c < cells; c++)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + c * stride + i);
}
inline int64_t bytes_of(int64_t size, bool quantized) { return quantized ? size / 32 * 34 : size * 2; }
inline int64_t cells_from(const Tile & t, int64_t block) { return t.n_cells - block < CELLS ? t.n_cells - block : CELLS; }

template <class M> void score(const Tile * tiles, int n, int64_t cell0, int64_t cell1) {
    const typename M::State state;
    (void) state;
    const Tile & t = *tiles;
    for (int64_t block = cell0; block < cell1; block += CELLS) {
        const int64_t cells = cells_from(t, block), next = block + CELLS;
        bool seen = false;
        for (int i = 0; i < n; i++) {
            const Seen found = seen_by(tiles[i], block / CELLS);
            tiles[i].seen[block / CELLS] = (uint8_t) found, seen |= found != SEEN_BY_NONE;
        }
        if (!seen) continue;
        if (next < cell1)
            fetch(t.keys + next * t.key_cell, t.key_cell, cells_from(t, next), bytes_of(t.k_size, t.quantized_keys));
        if (t.quantized_keys) convert_keys<M, true>(t, block, cells);
        else convert_keys<M, false>(t, block, cells);
        for (int i = 0; i < n; i++) {
            if (tiles[i].seen[block / CELLS] == SEEN_BY_NONE) continue;
            score_block<M>(tiles[i], block);
            hide(tiles[i], block, block + cells);
        }
    }
}

void soften(const Tile & t) {
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

// Adds N values from `value` on of some cells, weighted, to the sums of T tiles.
template <int N, int T> inline void add_values(const Tile * const * tiles, const float * values, int64_t stride,
                                               int64_t value, int64_t cell0, int64_t cells) {
    V16 s[T][N];
    for (int t = 0; t < T; t++)
        for (int i = 0; i < N; i++) s[t][i] = V16::load(tiles[t]->sums + (value + i) * LANES);
    for (int64_t c = 0; c < cells; c++) {
        V16 weights[T];
        for (int t = 0; t < T; t++) weights[t] = V16::load(tiles[t]->scores + (cell0 + c) * LANES);
        for (int i = 0; i < N; i++) {
            const V16 one = V16::of(values[c * stride + i]);
            for (int t = 0; t < T; t++) s[t][i] = fma(one, weights[t], s[t][i]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < N; i++) s[t][i].store(tiles[t]->sums + (value + i) * LANES);
}

template <int N> inline void sum_few(const Tile & t, int64_t block, int64_t cells, int64_t value0, int64_t value1) {
    for (int64_t i = value0; i < value1; i += LANES) {
        V16 s[N];
        for (int lane = 0; lane < N; lane++) s[lane] = V16::load(t.sums + lane * t.v_size + i);
        for (int64_t c = block; c < block + cells; c++) {
            const V16 values = values_at(t.values + c * t.value_cell, i, t.quantized_values);
            for (int lane = 0; lane < N; lane++) s[lane] = fma(values, V16::of(t.scores[c * LANES + lane]), s[lane]);
        }
        for (int lane = 0; lane < N; lane++) s[lane].store(t.sums + lane * t.v_size + i);
    }
}

void sum(const Tile * tiles, int n, int64_t value0, int64_t value1) {
    const Tile & t = *tiles;
    const int64_t size = value1 - value0;
    for (int64_t block = 0; block < t.n_cells; block += CELLS) {
        const int64_t cells = cells_from(t, block), next = block + CELLS;
        const Seeing seeing(tiles, n, block);
        if (!seeing.count && !seeing.last_few) continue;
        if (next < t.n_cells)
            fetch(t.values + next * t.value_cell + bytes_of(value0, t.quantized_values), t.value_cell, cells_from(t, next),
                  bytes_of(size, t.quantized_values));
        if (seeing.count)
            convert(t.values + block * t.value_cell, t.value_cell, cells, value0, size, t.quantized_values, t.converted);
        seeing.each([&](auto some, auto count) {
            for (int64_t i = 0; i < size; i += V16::GROUP)
                add_values<V16::GROUP, count>(some, t.converted + i, size, value0 + i, block, cells);
        });
        if (seeing.last_few)
            with_lanes(*seeing.last_few, [&](auto lanes) { sum_few<lanes>(*seeing.last_few, block, cells, value0, value1); });
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

template <class M> constexpr AttentionKernels KERNELS = {see, begin<M>, score<M>, soften, sum, end};

}  // namespace
}  // namespace edgespec
