// Products by AMX's tiles of 8-bit numbers. Few rows are left to AVX512, which is faster there and gives the same bits.
//
// Weights of Super types are decoded to scale * quant, which is kept exact in two bytes, so sums are read out of tiles once per
// 256 values: a low and a high sum, joined as low + (high << shift). Weights of Small types have a scale per 32 values, so
// their sums are read out for each step.
#include "avx512.h"
#include "tiles.h"

namespace edgespec {
namespace {

using I = Avx512;
using Ints = I::Ints;
using Floats = I::Floats;

constexpr int FEW_ROWS = 4;
constexpr int STEP_BYTES = VECTORS * VECTOR_BYTES;
constexpr int SUMS = 16 * PANEL;  // of a tile

// The rows of a chunk in equal groups of at most 16.
struct Groups {
    int count, rows;
    explicit Groups(int n) : count((n + 15) / 16), rows((n + count - 1) / count) {}
};

// Where scales and quants are small and unsigned, the product with the scale's low and high three bits fits a byte.
template <class T> constexpr bool has_small_scales = T::MIN;
template <class T> constexpr int HIGH_SHIFT = has_small_scales<T> ? 3 : 8;

// One vector of quants times the scale of its values (in both halves of a lane).
template <class T> void put_products(Ints quants, Ints scale, uint8_t * low, uint8_t * high) {
    const Ints low_byte = _mm512_set1_epi16(255);
    if constexpr (has_small_scales<T>) {
        _mm512_store_si512(low, _mm512_mullo_epi16(quants, _mm512_and_si512(scale, _mm512_set1_epi16(7))));
        _mm512_store_si512(high, _mm512_mullo_epi16(quants, _mm512_srli_epi16(scale, 3)));
    } else {
        const Ints even = _mm512_mullo_epi16(_mm512_and_si512(quants, low_byte), scale);
        const Ints odd = _mm512_mullo_epi16(_mm512_srli_epi16(quants, 8), scale);
        constexpr int CHOOSE = 0xca;  // the first where low_byte is set
        _mm512_store_si512(low, _mm512_ternarylogic_epi64(low_byte, even, _mm512_slli_epi16(odd, 8), CHOOSE));
        _mm512_store_si512(high, _mm512_ternarylogic_epi64(low_byte, _mm512_srli_epi16(even, 8), odd, CHOOSE));
    }
}

template <class T> struct SuperBlock {
    alignas(64) uint8_t low[8 * STEP_BYTES], high[8 * STEP_BYTES];

    void decode(const uint8_t * steps, const uint8_t * scales, int64_t ahead) {
        for (int step = 0; step < 8; step++, steps += T::BITS * 64) {
            Ints quants[VECTORS];
            edgespec::decode<I, T>(steps, quants);
            fetch<I>(steps + ahead, T::BITS * 64);
            constexpr int EACH = T::SUB / 4;  // vectors
            for (int part = 0; part < VECTORS / EACH; part++) {
                const int index = step * (VECTORS / EACH) + part;
                const Ints pair = scale_pair<I, T>(scales, index / 2);
                const Ints left = _mm512_slli_epi32(pair, 16), right = _mm512_srli_epi32(pair, 16);
                const Ints scale = index % 2 ? _mm512_mask_blend_epi16(0xaaaaaaaa, right, pair)
                                             : _mm512_mask_blend_epi16(0xaaaaaaaa, pair, left);
#pragma GCC unroll 8
                for (int i = part * EACH; i < (part + 1) * EACH; i++)
                    put_products<T>(quants[i], scale, low + step * STEP_BYTES + i * VECTOR_BYTES,
                                    high + step * STEP_BYTES + i * VECTOR_BYTES);
            }
        }
    }
};

// High bytes are unsigned where scales are.
#define MULTIPLY_HIGH(to, a, b)                                      \
    if constexpr (has_small_scales<T>) TILE_UNSIGNED(to, a, b);      \
    else TILE_SIGNED(to, a, b);

template <class T> void multiply_super_panel(const Work & work, const Activations & a, int64_t panel, int64_t row0, int n) {
    const Groups groups(n);
    const int M = groups.rows;
    SuperBlock<T> blocks[2];
    alignas(64) int32_t sums[4][SUMS];
    alignas(64) float totals[TILE_CHUNK * PANEL];
    const uint8_t * steps = work.packed + panel * panel_bytes<T>(work.k);
    const uint8_t * scales = steps + work.k / STEP * T::BITS * 64;
    const int64_t count = work.k / 256;
    auto decode = [&](int64_t block) {
        blocks[block & 1].decode(steps + block * 8 * T::BITS * 64, scales + block * T::SCALE_BYTES, panel_bytes<T>(work.k));
    };
    for (int i = 0; i < groups.count * M; i++) I::store(totals + i * PANEL, I::zeros());
    decode(0);
    for (int64_t block = 0; block < count; block++) {
        const uint8_t *low = blocks[block & 1].low, *high = blocks[block & 1].high;
        const uint8_t * own_scales = scales + block * T::SCALE_BYTES;
        const Floats d = I::halves(own_scales + T::D_AT);
        const Floats dmin = T::MIN ? I::halves(own_scales + T::D_AT + 32) : d;
        Ints by[T::PAIRS];  // what sums of activations are multiplied by
        for (int p = 0; p < T::PAIRS; p++) by[p] = other_pair<I, T>(own_scales, p);
        const size_t next = a.padded * GROUP;
        for (int g = 0; g < groups.count; g += 2) {
            const int8_t * x = a.quants + (block * 4 * a.padded + row0 + g * M) * GROUP;
            const bool two = g + 1 < groups.count;
            TILE_ZERO(4);
            TILE_ZERO(5);
            if (two) {
                TILE_ZERO(6);
                TILE_ZERO(7);
                for (int i = 0; i < 4; i++, x += next) {
                    TILE_LOAD(0, x, GROUP);
                    TILE_LOAD(2, low + i * 2 * STEP_BYTES, VECTOR_BYTES);
                    TILE_LOAD(3, high + i * 2 * STEP_BYTES, VECTOR_BYTES);
                    TILE_LOAD(1, x + M * GROUP, GROUP);
                    TILE_UNSIGNED(4, 0, 2);
                    MULTIPLY_HIGH(5, 0, 3)
                    TILE_UNSIGNED(6, 1, 2);
                    MULTIPLY_HIGH(7, 1, 3)
                }
            } else {
                for (int i = 0; i < 4; i++, x += next) {
                    TILE_LOAD(0, x, GROUP);
                    TILE_LOAD(2, low + i * 2 * STEP_BYTES, VECTOR_BYTES);
                    TILE_LOAD(3, high + i * 2 * STEP_BYTES, VECTOR_BYTES);
                    TILE_UNSIGNED(4, 0, 2);
                    MULTIPLY_HIGH(5, 0, 3)
                }
            }
            if (g == 0 && block + 1 < count) decode(block + 1);  // while the tiles are at work
            TILE_STORE(4, sums[0], VECTOR_BYTES);
            TILE_STORE(5, sums[1], VECTOR_BYTES);
            if (two) {
                TILE_STORE(6, sums[2], VECTOR_BYTES);
                TILE_STORE(7, sums[3], VECTOR_BYTES);
            }
            for (int r = 0; r < (two ? 2 * M : M); r++) {
                const int64_t at = block * a.padded + row0 + g * M + r;
                const int32_t * of = sums[r / M * 2] + r % M * PANEL;
                const int16_t * x_sums = T::SUB == 32 ? a.sums32 + at * 8 : a.sums16 + at * 16;
                Ints sum = I::add(I::ints(of), _mm512_slli_epi32(I::ints(of + SUMS), HIGH_SHIFT<T>)), other = I::no_ints();
                if constexpr (T::OFFSET || T::MIN) {
                    other = I::dot_pairs(by[0], x_sums);
#pragma GCC unroll 7
                    for (int p = 1; p < T::PAIRS; p++) other = I::add_dot_pairs(other, by[p], x_sums + 2 * p);
                }
                float * total = totals + (g * M + r) * PANEL;
                I::store(total, super_total<I, T>(sum, other, d, dmin, a.d[at], I::floats(total)));
            }
        }
    }
    write_rows<I, 1>(work, totals, panel, row0, n);
}

#undef MULTIPLY_HIGH

constexpr int BATCH = 4;  // steps: one tile of sums each

template <class T> struct SmallSteps {
    alignas(64) uint8_t quants[BATCH * STEP_BYTES];

    void decode(const uint8_t * steps, int count, int64_t ahead) {
        for (int step = 0; step < count; step++, steps += T::BITS * 64) {
            Ints decoded[VECTORS];
            edgespec::decode<I, T>(steps, decoded);
            fetch<I>(steps + ahead, T::BITS * 64);
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++)
                _mm512_store_si512(quants + step * STEP_BYTES + i * VECTOR_BYTES, I::subtract(decoded[i], I::bytes(T::OFFSET)));
        }
    }
};

template <class T> void multiply_small_panel(const Work & work, const Activations & a, int64_t panel, int64_t row0, int n) {
    const Groups groups(n);
    const int M = groups.rows;
    SmallSteps<T> batches[2];
    alignas(64) int32_t sums[2][BATCH][SUMS];
    alignas(64) float totals[TILE_CHUNK * PANEL];
    const uint8_t * steps = work.packed + panel * panel_bytes<T>(work.k);
    const uint8_t * scales = steps + work.k / STEP * T::BITS * 64;
    const int64_t count = work.k / STEP;
    auto steps_from = [&](int64_t first) { return (int) (count - first < BATCH ? count - first : BATCH); };
    auto decode = [&](int64_t first) {
        batches[first / BATCH & 1].decode(steps + first * T::BITS * 64, steps_from(first), panel_bytes<T>(work.k));
    };
    for (int i = 0; i < groups.count * M; i++) I::store(totals + i * PANEL, I::zeros());
    decode(0);
    for (int64_t first = 0; first < count; first += BATCH) {
        const int here = steps_from(first);
        const uint8_t * quants = batches[first / BATCH & 1].quants;
        Floats d[BATCH], m[BATCH];
        for (int i = 0; i < here; i++) {
            const uint8_t * own = scales + (first + i) * T::SCALE_BYTES;
            d[i] = T::SCALING == Scaling::POWER ? I::powers(own) : I::halves(own);
            m[i] = T::MIN ? I::halves(own + 32) : d[i];
        }
        for (int g = 0; g < groups.count; g++) {
            auto x = [&](int i) {
                return a.quants + ((first + i) / 2 * a.padded + row0 + g * M) * GROUP + (first + i) % 2 * STEP;
            };
            int32_t(*to)[SUMS] = sums[g & 1];
#define MULTIPLY(i, activations, weights, into)                    \
    if (i < here) {                                                \
        TILE_ZERO(into);                                           \
        TILE_LOAD(activations, x(i), GROUP);                       \
        TILE_LOAD(weights, quants + i * STEP_BYTES, VECTOR_BYTES); \
        TILE_SIGNED(into, activations, weights);                   \
    }
            MULTIPLY(0, 0, 2, 4)
            MULTIPLY(1, 1, 3, 5)
            MULTIPLY(2, 0, 2, 6)
            MULTIPLY(3, 1, 3, 7)
#undef MULTIPLY
            if (g == 0 && first + BATCH < count) decode(first + BATCH);
            TILE_STORE(4, to[0], VECTOR_BYTES);
            if (here > 1) TILE_STORE(5, to[1], VECTOR_BYTES);
            if (here > 2) TILE_STORE(6, to[2], VECTOR_BYTES);
            if (here > 3) TILE_STORE(7, to[3], VECTOR_BYTES);
            for (int r = 0; r < M; r++) {
                float * at = totals + (g * M + r) * PANEL;
                Floats total = I::floats(at);
                for (int i = 0; i < here; i++) {
                    const int64_t row = (first + i) * a.padded + row0 + g * M + r;
                    total = small_total<I, T>(I::ints(to[i] + r * PANEL), d[i], m[i], a.d[row], a.scaled[row], total);
                }
                I::store(at, total);
            }
        }
    }
    write_rows<I, 1>(work, totals, panel, row0, n);
}

bool multiply_tiles(int type, const Work & work) {
    if (work.rows <= FEW_ROWS) return multiply_avx512(type, work);
    return with_type(type, [&](auto t) {
        using T = decltype(t);
        if constexpr (is_float<T>) {
            multiply_avx512(type, work);
        } else {
            const Activations a = place(activation_kind<T>(), work.k, work.rows, const_cast<void *>(work.activations));
            for (int64_t row = 0; row < work.rows; row += TILE_CHUNK) {
                const int n = (int) (work.rows - row < TILE_CHUNK ? work.rows - row : TILE_CHUNK);
                const Tiles tiles(Groups(n).rows, T::BLOCK == 256 ? GROUP : STEP);
                for (int64_t panel = work.panel0; panel < work.panel1; panel++) {
                    if constexpr (T::BLOCK == 256) multiply_super_panel<T>(work, a, panel, row, n);
                    else multiply_small_panel<T>(work, a, panel, row, n);
                }
            }
        }
    });
}

const Registered registered({EDGESPEC_AMX, quantize, multiply_tiles});

}  // namespace
}  // namespace edgespec
