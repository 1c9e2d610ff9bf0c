// Rows of activations as the kernels read them, and their quantization, which is the same in every bit everywhere.
//
// Quants lie in groups of 64 values: [k / 64][padded rows][64]. So what a tile of AMX takes is contiguous, and a step of 32
// values of the next row is 64 bytes on. Beside them are scales and sums of quants, which kernels need where weights are
// unsigned or have a min.
#pragma once
#include <cstring>

#include "products.h"
#include "types.h"

namespace edgespec {
namespace {

constexpr int GROUP = 64;

constexpr int64_t CHUNK = 64;        // rows whose sums are held at once
constexpr int64_t TILE_CHUNK = 128;  // by AMX, where decoding costs more

// AMX takes the rows of a chunk in equal groups of at most 16; the rows that this adds are zeros.
inline int64_t padded_rows(int64_t rows) {
    if (rows <= 0) return 0;
    const int64_t rest = (rows - 1) % TILE_CHUNK + 1, tiles = (rest + 15) / 16;
    return rows - rest + (rest + tiles - 1) / tiles * tiles;
}

struct Activations {
    int64_t rows, padded;
    int8_t * quants;
    float * d;         // per 256: [k / 256][padded]; per 32: [k / 32][padded]
    int16_t * sums16;  // per 256: [k / 256][padded][16], sums of 16 quants
    int16_t * sums32;  // per 256: [k / 256][padded][8]
    int32_t * sums;    // per 32: [k / 32][padded]
    float * scaled;    // per 32: [k / 32][padded], d * sum
    float * floats;    // [rows][k]
    size_t bytes;

    // The rows from `row` on.
    Activations from(int64_t row, int64_t k) const {
        Activations a = *this;
        a.rows -= row;
        a.quants += row * GROUP, a.d += row, a.sums16 += row * 16, a.sums32 += row * 8;
        a.sums += row, a.scaled += row, a.floats += row * k;
        return a;
    }
};

inline Activations place(int kind, int64_t k, int64_t rows, void * memory) {
    Activations a = {};
    a.rows = rows, a.padded = padded_rows(rows);
    uint8_t * at = (uint8_t *) memory;
    auto take = [&](int64_t count, size_t each) {
        uint8_t * start = at;
        at += ((size_t) count * each + 63) / 64 * 64;
        return start;
    };
    if (kind == EDGESPEC_FLOATS) {
        a.floats = (float *) take(rows * k, 4);
    } else {
        const int64_t blocks = k / (kind == EDGESPEC_PER_256 ? 256 : 32) * a.padded;
        a.quants = (int8_t *) take((k + GROUP - 1) / GROUP * a.padded, GROUP);
        a.d = (float *) take(blocks, 4);
        if (kind == EDGESPEC_PER_256) {
            a.sums16 = (int16_t *) take(blocks, 32);
            a.sums32 = (int16_t *) take(blocks, 16);
        } else {
            a.sums = (int32_t *) take(blocks, 4);
            a.scaled = (float *) take(blocks, 4);
        }
    }
    a.bytes = at - (uint8_t *) memory;
    return a;
}

// Writes 8-bit quants of `count` values, 64 to a group, and the sums of each 16; returns the scale.
// The scale is the greatest magnitude / 127; a quant is value * (127 / greatest) rounded to the nearest, ties to even. What is
// too small for a reciprocal counts as zero; a row with an infinity or NaN gets NaN as its scale.
template <int COUNT> float quantize_block(const float * x, int8_t * quants, int64_t group_bytes, int16_t * sums) {
    uint32_t greatest = 0;
    for (int i = 0; i < COUNT; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        greatest = bits > greatest ? bits : greatest;
    }
    float max;
    memcpy(&max, &greatest, 4);
    const bool finite = greatest < 0x7f800000, usable = finite && max > 0x1p-118f;
    const float inverse = usable ? 127.0f / max : 0.0f;
    constexpr float MAGIC = 12582912.0f;  // adding it rounds to an integer, which is then in the low bits
    alignas(64) int32_t rounded[COUNT];
    if (!usable) memset(rounded, 0, sizeof rounded);
    else
        for (int i = 0; i < COUNT; i++) {
            const float moved = x[i] * inverse + MAGIC;
            memcpy(rounded + i, &moved, 4);
            rounded[i] -= 0x4b400000;
        }
    for (int j = 0; j < COUNT / 16; j++) {
        int8_t * to = quants + j / 4 * group_bytes + j % 4 * 16;
        int32_t sum = 0;
        for (int i = 0; i < 16; i++) sum += rounded[j * 16 + i];
        for (int i = 0; i < 16; i++) to[i] = (int8_t) rounded[j * 16 + i];
        sums[j] = (int16_t) sum;
    }
    if (!finite) {
        constexpr uint32_t NOT_A_NUMBER = 0x7fc00000;
        memcpy(&max, &NOT_A_NUMBER, 4);
        return max;
    }
    return usable ? max / 127.0f : 0.0f;
}

inline void quantize_row(const Activations & a, int kind, const float * x, int64_t k, int64_t row) {
    const int64_t group_bytes = a.padded * GROUP;
    if (kind == EDGESPEC_FLOATS) {
        memcpy(a.floats + row * k, x, k * 4);
    } else if (kind == EDGESPEC_PER_256) {
        for (int64_t b = 0; b < k / 256; b++) {
            const int64_t at = b * a.padded + row;
            int16_t *sums = a.sums16 + at * 16, *pairs = a.sums32 + at * 8;
            a.d[at] = quantize_block<256>(x + b * 256, a.quants + b * 4 * group_bytes + row * GROUP, group_bytes, sums);
            for (int j = 0; j < 8; j++) pairs[j] = sums[2 * j] + sums[2 * j + 1];
        }
    } else {
        for (int64_t b = 0; b < k / 32; b++) {
            const int64_t at = b * a.padded + row;
            int16_t sums[2];
            a.d[at] = quantize_block<32>(x + b * 32, a.quants + b / 2 * group_bytes + row * GROUP + b % 2 * 32, 0, sums);
            a.sums[at] = sums[0] + sums[1];
            a.scaled[at] = a.d[at] * (float) a.sums[at];
        }
    }
}

inline void quantize(int kind, const float * x, size_t stride, int64_t k, int64_t rows, int64_t row0, int64_t row1,
                     void * memory) {
    const Activations a = place(kind, k, rows, memory);
    for (int64_t r = row0; r < row1; r++) quantize_row(a, kind, x + r * stride, k, r);
    if (row1 == rows && kind != EDGESPEC_FLOATS)
        for (int64_t r = rows; r < a.padded; r++)
            for (int64_t g = 0; g < (k + GROUP - 1) / GROUP; g++) memset(a.quants + (g * a.padded + r) * GROUP, 0, GROUP);
}

}  // namespace
}  // namespace edgespec
