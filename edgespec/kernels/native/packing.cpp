// Packs the rows of a GGUF file into panels, and reads rows back.
#include "packing.h"

#include <cstring>

#include "types.h"

namespace edgespec {
namespace {

// One row's block: unsigned quants as packed (before VALUES), integer scales and mins, and the halves.
struct Block {
    uint8_t quants[256];
    uint8_t scales[16], mins[16];
    uint16_t d, m;
};

uint16_t half_at(const uint8_t * p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

float bits_as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

float half_as_float(uint16_t h) {
    const uint32_t sign = (uint32_t) (h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return bits_as_float(sign | 0x7f800000 | fraction << 13);
    if (exponent) return bits_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float value = (float) fraction * 0x1p-24f;
    return sign ? -value : value;
}

// Low nibbles are the first half of the values, high nibbles the second.
void read_nibbles(const uint8_t * from, int count, uint8_t * quants) {
    for (int i = 0; i < count / 2; i++) quants[i] = from[i] & 15;
    for (int i = 0; i < count / 2; i++) quants[count / 2 + i] = from[i] >> 4;
}

void read_two_bits(const uint8_t * from, uint8_t * quants) {
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 32; i++) quants[h * 128 + j * 32 + i] = from[h * 32 + i] >> (2 * j) & 3;
}

// Bit i of four bytes belongs to value i.
void add_high_bits(const uint8_t * from, uint8_t * quants) {
    constexpr uint64_t ONES = 0x0101010101010101, BITS = 0x8040201008040201, LOW = 0x7f7f7f7f7f7f7f7f;
    for (int i = 0; i < 4; i++) {
        const uint64_t chosen = from[i] * ONES & BITS;  // byte j keeps bit j
        uint64_t low;
        memcpy(&low, quants + i * 8, 8);
        low |= ((((chosen & LOW) + LOW) | chosen) >> 7 & ONES) << 4;
        memcpy(quants + i * 8, &low, 8);
    }
}

void read_six_bit_scales(const uint8_t * s, Block & b) {
    for (int j = 0; j < 4; j++) {
        b.scales[j] = s[j] & 63, b.mins[j] = s[j + 4] & 63;
        b.scales[j + 4] = (s[j + 8] & 15) | (s[j] >> 6) << 4;
        b.mins[j + 4] = s[j + 8] >> 4 | (s[j + 4] >> 6) << 4;
    }
}

void read(Q4_0, const uint8_t * f, Block & b) { b.d = half_at(f), read_nibbles(f + 2, 32, b.quants); }
void read(Q4_1, const uint8_t * f, Block & b) { b.d = half_at(f), b.m = half_at(f + 2), read_nibbles(f + 4, 32, b.quants); }
void read(Q5_0, const uint8_t * f, Block & b) {
    b.d = half_at(f);
    read_nibbles(f + 6, 32, b.quants), add_high_bits(f + 2, b.quants);
}
void read(Q5_1, const uint8_t * f, Block & b) {
    b.d = half_at(f), b.m = half_at(f + 2);
    read_nibbles(f + 8, 32, b.quants), add_high_bits(f + 4, b.quants);
}
void read(Q8_0, const uint8_t * f, Block & b) {
    b.d = half_at(f);
    for (int i = 0; i < 32; i++) b.quants[i] = f[2 + i] ^ 0x80;
}
void read(IQ4_NL, const uint8_t * f, Block & b) { b.d = half_at(f), read_nibbles(f + 2, 32, b.quants); }
void read(MXFP4, const uint8_t * f, Block & b) { b.d = f[0], read_nibbles(f + 1, 32, b.quants); }
void read(Q2_K, const uint8_t * f, Block & b) {
    for (int j = 0; j < 16; j++) b.scales[j] = f[j] & 15, b.mins[j] = f[j] >> 4;
    read_two_bits(f + 16, b.quants);
    b.d = half_at(f + 80), b.m = half_at(f + 82);
}
void read(Q3_K, const uint8_t * f, Block & b) {
    read_two_bits(f + 32, b.quants);
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) b.quants[j * 32 + i] |= (f[i] >> j & 1) << 2;
    const uint8_t * s = f + 96;
    for (int j = 0; j < 16; j++) {
        const int low = s[j % 8] >> (4 * (j / 8)) & 15, high = s[8 + j % 4] >> (2 * (j / 4)) & 3;
        b.scales[j] = (uint8_t) ((low | high << 4) - 32);
    }
    b.d = half_at(f + 108);
}
void read(Q4_K, const uint8_t * f, Block & b) {
    b.d = half_at(f), b.m = half_at(f + 2);
    read_six_bit_scales(f + 4, b);
    for (int p = 0; p < 4; p++) read_nibbles(f + 16 + p * 32, 64, b.quants + p * 64);
}
void read(Q5_K, const uint8_t * f, Block & b) {
    b.d = half_at(f), b.m = half_at(f + 2);
    read_six_bit_scales(f + 4, b);
    for (int p = 0; p < 4; p++) read_nibbles(f + 48 + p * 32, 64, b.quants + p * 64);
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) b.quants[j * 32 + i] |= (f[16 + i] >> j & 1) << 4;
}
void read(Q6_K, const uint8_t * f, Block & b) {
    for (int h = 0; h < 2; h++) {
        read_nibbles(f + h * 64, 128, b.quants + h * 128);
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < 32; i++) b.quants[h * 128 + q * 32 + i] |= (f[128 + h * 32 + i] >> (2 * q) & 3) << 4;
    }
    memcpy(b.scales, f + 192, 16);
    b.d = half_at(f + 208);
}
void read(IQ4_XS, const uint8_t * f, Block & b) {
    b.d = half_at(f);
    for (int j = 0; j < 8; j++) {
        const int low = f[4 + j / 2] >> (4 * (j % 2)) & 15, high = half_at(f + 2) >> (2 * j) & 3;
        b.scales[j] = (uint8_t) ((low | high << 4) - 32);
        read_nibbles(f + 8 + j * 16, 32, b.quants + j * 32);
    }
}

// Four values at a time: no bit leaves its byte.
template <class T, int P> void put_plane(const uint8_t * quants, uint8_t * step, int row) {
    constexpr Plane plane = Planes<T::BITS>::LIST[P];
    constexpr int w = plane.bits;
    constexpr uint32_t MASK = 0x01010101u * ((1 << w) - 1);
    for (int v = 0; v < w; v++) {
        uint32_t joined = 0;
        for (int field = 0; field < 8 / w; field++) {
            uint32_t values;
            memcpy(&values, quants + (field * w + v) * 4, 4);
            joined |= (values >> plane.shift & MASK) << (field * w);
        }
        memcpy(step + plane.at + v * VECTOR_BYTES + row * 4, &joined, 4);
    }
}

// The planes of one row's step.
template <class T> void put_step(const uint8_t * quants, uint8_t * step, int row) {
    put_plane<T, 0>(quants, step, row);
    if constexpr (sizeof(Planes<T::BITS>::LIST) > sizeof(Plane)) put_plane<T, 1>(quants, step, row);
}

template <class T> void get_step(const uint8_t * step, int row, uint8_t * quants) {
    memset(quants, 0, STEP);
    for (const Plane & plane : Planes<T::BITS>::LIST)
        for (int i = 0; i < STEP; i++) {
            const int vector = i / 4 % plane.bits, field = i / 4 / plane.bits, mask = (1 << plane.bits) - 1;
            const uint8_t byte = step[plane.at + vector * VECTOR_BYTES + row * 4 + i % 4];
            quants[i] |= (byte >> (field * plane.bits) & mask) << plane.shift;
        }
}

template <class T> void put_scales(const Block & b, uint8_t * scales, int row) {
    if constexpr (T::BLOCK == 32) {
        if constexpr (T::SCALING == Scaling::POWER) scales[row] = (uint8_t) b.d;
        else memcpy(scales + row * 2, &b.d, 2);
        if constexpr (T::MIN) memcpy(scales + 32 + row * 2, &b.m, 2);
    } else {
        for (int j = 0; j < T::PAIRS * 2; j++) {
            uint8_t * at = scales + j / 2 * 32 + row * 2 + j % 2;
            if constexpr (T::SHARED) *at = b.scales[j] | b.mins[j] << 4;
            else *at = b.scales[j];
            if constexpr (T::MIN && !T::SHARED) at[T::MINS_AT] = b.mins[j];
        }
        memcpy(scales + T::D_AT + row * 2, &b.d, 2);
        if constexpr (T::MIN) memcpy(scales + T::D_AT + 32 + row * 2, &b.m, 2);
    }
}

template <class T> void get_scales(const uint8_t * scales, int row, Block & b) {
    if constexpr (T::BLOCK == 32) {
        b.d = T::SCALING == Scaling::POWER ? scales[row] : half_at(scales + row * 2);
        if constexpr (T::MIN) b.m = half_at(scales + 32 + row * 2);
    } else {
        for (int j = 0; j < T::PAIRS * 2; j++) {
            const uint8_t * at = scales + j / 2 * 32 + row * 2 + j % 2;
            b.scales[j] = T::SHARED ? *at & 15 : *at;
            if constexpr (T::MIN) b.mins[j] = T::SHARED ? *at >> 4 : at[T::MINS_AT];
        }
        b.d = half_at(scales + T::D_AT + row * 2);
        if constexpr (T::MIN) b.m = half_at(scales + T::D_AT + 32 + row * 2);
    }
}

template <class T> int value_of(uint8_t quant) {
    if constexpr (T::LOOKED_UP) return T::VALUES[quant];
    else return quant;
}

float scale_as_float(uint16_t d, Scaling scaling) {
    if (scaling == Scaling::HALF) return half_as_float(d);
    return bits_as_float(d < 2 ? 0x00200000u << d : (uint32_t) (d - 1) << 23);
}

}  // namespace

template <class T> void pack_panel(const uint8_t * file, int64_t k, int rows, uint8_t * panel) {
    const int64_t blocks = k / T::BLOCK;
    if constexpr (is_float<T>) {
        if (rows < PANEL) memset(panel, 0, panel_bytes<T>(k));
        for (int r = 0; r < rows; r++)
            for (int64_t i = 0; i < k; i++) memcpy(panel + (i * PANEL + r) * 2, file + (r * k + i) * 2, 2);
    } else {
        constexpr int STEPS = T::BLOCK / STEP, STEP_BYTES = T::BITS * 64;
        uint8_t * scales = panel + k / STEP * STEP_BYTES;
        memset(scales, 0, panel_bytes<T>(k) - (scales - panel));
        if (rows < PANEL) memset(panel, 0, scales - panel);
        Block b;
        for (int64_t i = 0; i < blocks; i++)
            for (int r = 0; r < rows; r++) {
                read(T{}, file + (r * blocks + i) * T::FILE_BYTES, b);
                for (int s = 0; s < STEPS; s++)
                    put_step<T>(b.quants + s * STEP, panel + (i * STEPS + s) * STEP_BYTES, r);
                put_scales<T>(b, scales + i * T::SCALE_BYTES, r);
            }
    }
}

template <class T> void unpack_row(const uint8_t * panel, int64_t k, int row, float * out) {
    if constexpr (is_float<T>) {
        for (int64_t i = 0; i < k; i++) {
            const uint16_t h = half_at(panel + (i * PANEL + row) * 2);
            out[i] = T::ID == F16::ID ? half_as_float(h) : bits_as_float((uint32_t) h << 16);
        }
    } else {
        constexpr int STEPS = T::BLOCK / STEP, STEP_BYTES = T::BITS * 64;
        const uint8_t * scales = panel + k / STEP * STEP_BYTES;
        Block b;
        for (int64_t i = 0; i < k / T::BLOCK; i++, out += T::BLOCK) {
            for (int s = 0; s < STEPS; s++) get_step<T>(panel + (i * STEPS + s) * STEP_BYTES, row, b.quants + s * STEP);
            get_scales<T>(scales + i * T::SCALE_BYTES, row, b);
            for (int v = 0; v < T::BLOCK; v++) {
                const float quant = (float) (value_of<T>(b.quants[v]) - T::OFFSET);
                if constexpr (T::BLOCK == 32) {
                    out[v] = scale_as_float(b.d, T::SCALING) * quant;
                    if constexpr (T::MIN) out[v] += half_as_float(b.m);
                } else {
                    out[v] = half_as_float(b.d) * (float) (int8_t) b.scales[v / T::SUB] * quant;
                    if constexpr (T::MIN) out[v] -= half_as_float(b.m) * (float) b.mins[v / T::SUB];
                }
            }
        }
    }
}

void pack(int type, const uint8_t * file, int64_t k, int64_t n, int64_t panel0, int64_t panel1, uint8_t * packed) {
    with_type(type, [&](auto t) {
        using T = decltype(t);
        for (int64_t p = panel0; p < panel1; p++) {
            const int rows = (int) (n - p * PANEL < PANEL ? n - p * PANEL : PANEL);
            const uint8_t * first = file + p * PANEL * (k / T::BLOCK) * T::FILE_BYTES;
            pack_panel<T>(first, k, rows, packed + p * panel_bytes<T>(k));
        }
    });
}

void unpack_row(int type, const uint8_t * packed, int64_t k, int64_t row, float * out) {
    with_type(type, [&](auto t) {
        using T = decltype(t);
        unpack_row<T>(packed + row / PANEL * panel_bytes<T>(k), k, (int) (row % PANEL), out);
    });
}

}  // namespace edgespec
