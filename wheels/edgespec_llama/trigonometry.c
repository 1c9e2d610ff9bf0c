/* sinf and cosf for Windows, with the bits of glibc's: positions are encoded by them (RoPE). Those of MinGW-w64 round some
 * values in the other way, after which greedy decoding may choose another token than on Linux.
 *
 * From ARM's optimized routines, as glibc's are: Copyright (c) 2018-2024, Arm Limited.
 * SPDX-License-Identifier: MIT OR Apache-2.0 WITH LLVM-exception
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* 4 / pi: 32 bits of it from every byte on. */
static const uint32_t INVERSE[24] = {
    0xa2,       0xa2f9,     0xa2f983,   0xa2f9836e, 0xf9836e4e, 0x836e4e44, 0x6e4e4415, 0x4e441529,
    0x441529fc, 0x1529fc27, 0x29fc2757, 0xfc2757d1, 0x2757d1f5, 0x57d1f534, 0xd1f534dd, 0xf534ddc0,
    0x34ddc0db, 0xddc0db62, 0xc0db6295, 0xdb629599, 0x6295993c, 0x95993c43, 0x993c4390, 0x3c439041,
};

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* x is from -pi / 4 to pi / 4, here and below. */
static double sine(double x) {
    const double x2 = x * x, x3 = x * x2, x7 = x3 * x2;
    const double s1 = 0x1.1107605230bc4p-7 + x2 * -0x1.994eb3774cf24p-13;
    return x + x3 * -0x1.555545995a603p-3 + x7 * s1;
}

static double cosine(double x) {
    const double x2 = x * x, x4 = x2 * x2, x6 = x4 * x2;
    const double c2 = -0x1.6c087e89a359dp-10 + x2 * 0x1.99343027bf8c3p-16;
    const double c1 = 0x1p0 + x2 * -0x1.ffffffd0c621cp-2;
    return c1 + x4 * 0x1.55553e1068f19p-5 + x6 * c2;
}

/* What is left of |y| < 120 after whole quarter turns. */
static double reduced(double y, int * quarters) {
    *quarters = ((int32_t) (y * 0x1.45F306DC9C883p+23) + 0x800000) >> 24;
    return y - *quarters * 0x1.921FB54442D18p0;
}

/* The same of |y|, at least 2, by multiplying its 24 bits by 96 bits of 4 / pi. */
static double reduced_exactly(uint32_t y, int * quarters) {
    const uint32_t * inverse = &INVERSE[y >> 26 & 15];
    const uint32_t fraction = ((y & 0xffffff) | 0x800000) << (y >> 23 & 7);
    const uint64_t high = (uint64_t) (uint32_t) (fraction * inverse[0]) << 32;
    const uint64_t product = ((uint64_t) fraction * inverse[8] >> 32 | high) + (uint64_t) fraction * inverse[4];
    const uint64_t whole = (product + (1ull << 61)) >> 62;
    *quarters = (int) whole;
    return (double) (int64_t) (product - (whole << 62)) * 0x1.921FB54442D18p-62;
}

/* The sine of y, after a quarter turn if `turn` is 1: its cosine. */
static float turned(float y, int turn) {
    const float size = fabsf(y);
    int quarters = 0, negative = 0;
    double x = y;
    if (size < 0x1p-12f) return turn ? 1.0f : y;
    if (!(size < INFINITY)) return y - y;
    if (size >= 120.0f) {
        x = reduced_exactly(bits_of(y), &quarters);
        negative = y < 0 && !turn;
    } else {
        x = reduced(x, &quarters);
    }
    quarters += turn;
    const float found = (float) (quarters & 1 ? cosine(x) : sine(x));
    return (quarters >> 1 & 1) != negative ? -found : found;
}

float sinf(float x) { return turned(x, 0); }

float cosf(float x) { return turned(x, 1); }

/* GCC calls this for the sine and the cosine of one number. */
void sincosf(float x, float * s, float * c) {
    *s = turned(x, 0);
    *c = turned(x, 1);
}
