// Scores of attention by AMX's tiles of bytes: a number of 16 bits is a signed high and an unsigned low byte.
#include "attention_kernels.h"
#include "products.h"
#include "tiles.h"

namespace edgespec {
namespace {

// The low bytes of four vectors of integers, and those above: of each lane, the first, second, third and fourth vector's.
inline void turn_bytes(const V16I * four, char * low, char * high) {
    constexpr __mmask64 ODD = 0xaaaaaaaaaaaaaaaa;
    constexpr __mmask32 ODD_SHORTS = 0xaaaaaaaa;
    __m512i lows[2], highs[2];  // of two vectors each, in the even shorts
    for (int i = 0; i < 2; i++) {
        const __m512i a = four[2 * i].v, b = four[2 * i + 1].v;
        lows[i] = _mm512_mask_blend_epi8(ODD, a, _mm512_slli_epi32(b, 8));
        highs[i] = _mm512_mask_blend_epi8(ODD, _mm512_srli_epi32(a, 8), b);
    }
    _mm512_storeu_si512(low, _mm512_mask_blend_epi16(ODD_SHORTS, lows[0], _mm512_slli_epi32(lows[1], 16)));
    _mm512_storeu_si512(high, _mm512_mask_blend_epi16(ODD_SHORTS, highs[0], _mm512_slli_epi32(highs[1], 16)));
}

struct ByteTiles {
    static constexpr int BYTES = 64;         // of a row of a tile
    static constexpr int TILE_BYTES = 1024;

    struct State {
        Tiles tiles{16, BYTES};
    };

    // For each 64 numbers, a tile of the low and one of the high bytes.
    static void put_queries(const float * turned, int64_t size, char * to) {
        for (int64_t i = 0; i < padded_size(size); i += 4) {
            V16I four[4];
            for (int n = 0; n < 4; n++) four[n] = integers(V16::load(turned + (i + n) * LANES));
            char * at = to + i / 64 * 2 * TILE_BYTES + i % 64 / 4 * BYTES;
            turn_bytes(four, at, at + TILE_BYTES);
        }
    }

    static void put_keys(V16I numbers, int64_t size, int64_t cell, int64_t i, char * keys) {
        const int64_t padded = padded_size(size);
        char *low = keys + cell * 2 * padded, *high = low + padded;
        const auto put = [&](int64_t at, __m128i low_bytes, __m128i high_bytes) {
            _mm_storeu_si128((__m128i *) (low + at), low_bytes), _mm_storeu_si128((__m128i *) (high + at), high_bytes);
        };
        put(i, _mm512_cvtepi32_epi8(numbers.v), _mm512_cvtepi32_epi8(_mm512_srli_epi32(numbers.v, 8)));
        if (i + LANES < size) return;
        for (i += LANES; i < padded; i += LANES) put(i, _mm_setzero_si128(), _mm_setzero_si128());
    }

    template <typename F> static void multiply(const char * queries, int, const char * keys, int64_t size, F && f) {
        const int64_t padded = padded_size(size);
        alignas(64) int32_t sums[2][4][LANES][LANES];
        const auto join = [&](int group) {
            for (int i = 0; i < LANES; i++) {
                const auto part = [&](int n) { return _mm512_load_si512(sums[group & 1][n][i]); };
                const __m512i middle = _mm512_add_epi32(part(1), part(2));
                const __m512i outer = _mm512_add_epi32(part(0), _mm512_slli_epi32(part(3), 16));
                f(group * LANES + i, V16I{_mm512_add_epi32(outer, _mm512_slli_epi32(middle, 8))});
            }
        };
        for (int group = 0; group < CELLS / LANES; group++) {
            const char * from = keys + group * LANES * 2 * padded;
            TILE_ZERO(4);
            TILE_ZERO(5);
            TILE_ZERO(6);
            TILE_ZERO(7);
            for (int64_t i = 0; i < padded; i += 64) {
                const char * q = queries + i * 2 * TILE_BYTES / 64;
                TILE_LOAD(0, from + i, 2 * padded);
                TILE_LOAD(1, from + padded + i, 2 * padded);
                TILE_LOAD(2, q, BYTES);
                TILE_LOAD(3, q + TILE_BYTES, BYTES);
                TILE_BOTH_UNSIGNED(4, 0, 2);
                TILE_UNSIGNED(5, 1, 2);
                TILE_FIRST_UNSIGNED(6, 0, 3);
                TILE_SIGNED(7, 1, 3);
            }
            if (group) join(group - 1);  // while the tiles are at work
            TILE_STORE(4, sums[group & 1][0], BYTES);
            TILE_STORE(5, sums[group & 1][1], BYTES);
            TILE_STORE(6, sums[group & 1][2], BYTES);
            TILE_STORE(7, sums[group & 1][3], BYTES);
        }
        join(CELLS / LANES - 1);
    }
};

const int ISAS[] = {EDGESPEC_AMX};
const bool ADDED = (add_attention(KERNELS<ByteTiles>, ISAS, 1), true);

}  // namespace
}  // namespace edgespec
