// Products of F32 matrices, compiled for one instruction set by each file that includes this.
//
// Value i of a row is added to total i mod 16 by fma, and the sixteen totals are added in pairs, halves first. So a
// result is a function of its two rows alone.
#pragma once
#include "floats.h"
#include "vector16.h"
#include <cstring>

namespace edgespec {
namespace {

constexpr int WIDTH = 16;
constexpr int64_t ROWS_AT_ONCE = 2;  // of the matrix, and of the activations

inline float sum_of(V16 total) {
    alignas(64) float t[WIDTH];
    total.store(t);
    for (int half = WIDTH / 2; half; half /= 2) {
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    }
    return t[0];
}

inline V16 load_part(const float * from, int64_t count) {
    alignas(64) float part[WIDTH] = {};
    memcpy(part, from, count * sizeof(float));
    return V16::load(part);
}

template <int W, int X> inline void multiply_block(const FloatProduct & p, int64_t w0, int64_t x0) {
    V16 totals[W * X];
    const float * w = p.weights + w0 * p.weight_stride;
    const float * x = p.activations + x0 * p.activation_stride;
    unrolled<W * X>(EDGESPEC_EACH(n) { totals[n] = V16::of(0.0f); });
    const auto add = [&](auto && load, int64_t at) EDGESPEC_ALWAYS {
        V16 rows[X];
        unrolled<X>(EDGESPEC_EACH(j) { rows[j] = load(x + j * p.activation_stride + at); });
        unrolled<W>(EDGESPEC_EACH(i) {
            const V16 weights = load(w + i * p.weight_stride + at);
            unrolled<X>(EDGESPEC_EACH(j) { totals[i * X + j] = fma(weights, rows[j], totals[i * X + j]); });
        });
    };
    int64_t at = 0;
    for (; at + WIDTH <= p.k; at += WIDTH) add(V16::load, at);
    if (at < p.k) add([&](const float * from) { return load_part(from, p.k - at); }, at);
    unrolled<W * X>(EDGESPEC_EACH(n) { p.result[(x0 + n % X) * p.result_stride + w0 + n / X] = sum_of(totals[n]); });
}

template <int W> inline void multiply_columns(const FloatProduct & p, int64_t w0) {
    int64_t x0 = 0;
    for (; x0 + ROWS_AT_ONCE <= p.rows; x0 += ROWS_AT_ONCE) multiply_block<W, ROWS_AT_ONCE>(p, w0, x0);
    if (x0 < p.rows) multiply_block<W, 1>(p, w0, x0);
}

void multiply_floats(const FloatProduct & p, int64_t first, int64_t last) {
    int64_t w0 = first;
    for (; w0 + ROWS_AT_ONCE <= last; w0 += ROWS_AT_ONCE) multiply_columns<ROWS_AT_ONCE>(p, w0);
    if (w0 < last) multiply_columns<1>(p, w0);
}

}  // namespace
}  // namespace edgespec
