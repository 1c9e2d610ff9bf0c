// Products by any instruction set: I gives its vectors and dot products, T the type of the weights.
//
// A strip is as many of a panel's rows as a vector of 32-bit numbers has lanes (I::LANES). W strips are computed at once; their
// weights are decoded into registers, a step of 32 values at a time, and all rows of activations pass by.
//
// The order of additions, which no instruction set and no number of rows changes:
// - Super: per 256 values, the sum of scale * quant * activation and that of min * activation are exact integers; then
//   total = fma(activation scale, d * sum - dmin * mins, total), the difference fused as well.
// - Small: per 32 values, the sum of quant * activation is an exact integer; then
//   total = fma(sum, d * activation scale, total), and where there is an m, total = fma(m, scaled sum of activations, total).
// - Float: even and odd values go to totals of their own, each fused, which are added at the end.
#pragma once
#include <type_traits>

#include "activations.h"
#include "types.h"
#include "unrolled.h"

namespace edgespec {

// What a translation unit offers: one instruction set's functions.
struct Work {
    const uint8_t * packed;
    int64_t k, n, panel0, panel1;
    const void * activations;
    int64_t rows;
    float * out;
    size_t out_stride;
    const int64_t * out_rows;
};
struct Kernels {
    int isa;
    void (*quantize)(int kind, const float * x, size_t stride, int64_t k, int64_t rows, int64_t row0, int64_t row1,
                     void * activations);
    bool (*multiply)(int type, const Work & work);
};
void add_kernels(const Kernels & kernels);  // called by constructors of static objects
bool multiply_avx512(int type, const Work & work);
struct Registered {
    explicit Registered(const Kernels & kernels) { add_kernels(kernels); }
};

namespace {

#define EACH(w) _Pragma("GCC unroll 4") for (int w = 0; w < W; w++)

// Has memory read into the second cache: what is fetched is a panel away, and the first holds little more than a panel.
template <class I> inline void fetch(const uint8_t * from, int bytes) {
    for (int i = 0; i < bytes; i += 64) I::prefetch(from + i);
}

// Where strips read.
template <class I, class T, int W> struct Strips {
    const uint8_t * steps[W];   // of quants
    const uint8_t * scales[W];  // of blocks
    int part[W];                // strip of the panel
    int64_t ahead;              // bytes

    Strips(const Work & work, int64_t first) : ahead((W * I::LANES + PANEL - 1) / PANEL * (int64_t) panel_bytes<T>(work.k)) {
        EACH(w) {
            const int64_t panel = (first + w) / I::PARTS;
            part[w] = (int) ((first + w) % I::PARTS);
            steps[w] = work.packed + panel * panel_bytes<T>(work.k) + part[w] * I::BYTES;
            if constexpr (!is_float<T>) scales[w] = steps[w] + work.k / STEP * T::BITS * 64 - part[w] * I::BYTES;
        }
    }

    // Of the block of a Super type, whose vectors of scales have two bytes for a lane.
    const uint8_t * block_scales(int w) const { return scales[w] + part[w] * I::LANES * 2; }

    // Has the step of the next panels fetched, each part of a panel its share.
    void next_step(int w) {
        fetch<I>(steps[w] + ahead + part[w] * (T::BITS - 1) * I::BYTES, T::BITS * I::BYTES);
        steps[w] += T::BITS * 64;
    }

    // Has the scales of the next panels fetched.
    void next_scales(int w) {
        if (part[w] == 0) fetch<I>(scales[w] + ahead, T::SCALE_BYTES);
        scales[w] += T::SCALE_BYTES;
    }
};

template <class I, class T, int P> inline void add_plane(const uint8_t * step, typename I::Bytes * quants) {
    constexpr Plane plane = Planes<T::BITS>::LIST[P];
    constexpr int w = plane.bits;
    typename I::Bytes v[w];
#pragma GCC unroll 8
    for (int i = 0; i < w; i++) v[i] = I::load(step + plane.at + i * VECTOR_BYTES);
    if constexpr (w == 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) quants[i] = v[i];
    } else {
        const auto mask = I::bytes(((1 << w) - 1) << plane.shift);
#define FIELD(f)                                                                             \
    if constexpr ((f) < 8 / w) {                                                             \
        _Pragma("GCC unroll 4") for (int i = 0; i < w; i++) {                                \
            const auto moved = I::template shift<plane.shift - (f) * w>(v[i]);               \
            quants[(f) * w + i] = P ? I::or_masked(quants[(f) * w + i], moved, mask) : I::both(moved, mask); \
        }                                                                                    \
    }
        FIELD(0) FIELD(1) FIELD(2) FIELD(3) FIELD(4) FIELD(5) FIELD(6) FIELD(7)
#undef FIELD
    }
}

// A step's quants as the dot products want them.
template <class I, class T> inline void decode(const uint8_t * step, typename I::Bytes * quants) {
    add_plane<I, T, 0>(step, quants);
    if constexpr (sizeof(Planes<T::BITS>::LIST) > sizeof(Plane)) add_plane<I, T, 1>(step, quants);
    if constexpr (T::LOOKED_UP) {
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) quants[i] = I::lookup(T::VALUES, quants[i]);
    }
    if constexpr (I::template is_signed<T>) {
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) quants[i] = I::subtract(quants[i], I::bytes(T::OFFSET));
    }
    I::arrange(quants);
}

// Sums of I::ROWS rows of activations, x and (where two) y.
template <class I, class T, int N>
inline void scaled_sums(const typename I::Bytes * quants, const int8_t * x, const int8_t * y, typename I::Scale scale,
                        typename I::Ints * sums) {
    if constexpr (I::ROWS == 2) I::template scaled_two<T, N>(quants, x, y, scale, sums);
    else sums[0] = I::template scaled<T, N>(quants, x, scale), (void) y;
}
template <class I, class T>
inline void dot_sums(typename I::Ints start, const typename I::Bytes * quants, const int8_t * x, const int8_t * y,
                     typename I::Ints * sums) {
    if constexpr (I::ROWS == 2) I::template dot_two<T>(quants, x, y, sums), (void) start;
    else sums[0] = I::template dot<T>(start, quants, x), (void) y;
}

template <class I, int W>
inline void write_rows(const Work & work, const float * totals, int64_t first, int64_t row0, int rows) {
    for (int r = 0; r < rows; r++) {
        float * out = work.out + (work.out_rows ? work.out_rows[row0 + r] : row0 + r) * (int64_t) work.out_stride;
        EACH(w) {
            const int64_t column = (first + w) * I::LANES;
            const float * from = totals + (r * W + w) * I::LANES;
            if (column + I::LANES <= work.n) I::store(out + column, I::floats(from));
            else
                for (int64_t c = column; c < work.n; c++) out[c] = from[c - column];
        }
    }
}

// What a block of a Super type adds.
template <class I, class T>
inline typename I::Floats super_total(typename I::Ints sum, typename I::Ints other, typename I::Floats d,
                                      typename I::Floats dmin, float scale, typename I::Floats total) {
    if constexpr (T::OFFSET != 0 && !I::template is_signed<T>) sum = I::subtract32(sum, I::template times<T::OFFSET>(other));
    auto value = I::multiply(d, I::to_floats(sum));
    if constexpr (T::MIN) value = I::minus_product(dmin, I::to_floats(other), value);
    return I::plus_product(I::same(scale), value, total);
}

// What a step of a Small type adds.
template <class I, class T>
inline typename I::Floats small_total(typename I::Ints sum, typename I::Floats d, typename I::Floats m, float scale,
                                      float scaled_sum, typename I::Floats total) {
    total = I::plus_product(I::to_floats(sum), I::multiply(d, I::same(scale)), total);
    if constexpr (T::MIN) total = I::plus_product(m, I::same(scaled_sum), total);
    return total;
}

// Pair p of a block's scales, and of what the sums of activations are multiplied by: its mins, or its scales again.
template <class I, class T> inline typename I::Ints scale_pair(const uint8_t * scales, int p) {
    const auto pair = I::pairs(scales + p * 32);
    return T::SHARED ? I::low_nibbles(pair) : pair;
}
template <class I, class T> inline typename I::Ints other_pair(const uint8_t * scales, int p) {
    const auto pair = I::pairs(scales + (T::MIN ? T::MINS_AT : 0) + p * 32);
    return T::SHARED ? I::high_nibbles(pair) : pair;
}

// W strips of a Super type by at most CHUNK rows.
template <class I, class T, int W>
inline void multiply_super(const Work & work, const Activations & a, int64_t first, int64_t row0, int rows) {
    using Ints = typename I::Ints;
    constexpr bool OFFSET = T::OFFSET != 0 && !I::template is_signed<T>;
    alignas(64) int32_t sums[CHUNK * W * I::LANES];
    alignas(64) float totals[CHUNK * W * I::LANES];
    Strips<I, T, W> s(work, first);
    for (int i = 0; i < rows * W; i++) I::store(totals + i * I::LANES, I::zeros());
    for (int64_t block = 0; block < work.k / 256; block++) {
#pragma GCC unroll 8
        for (int step = 0; step < 8; step++) {
            typename I::Bytes quants[W][VECTORS];
            typename I::Scale scale[W], second[W];
            EACH(w) {
                decode<I, T>(s.steps[w], quants[w]);
                s.next_step(w);
                const Ints pair = scale_pair<I, T>(s.block_scales(w), step * T::PAIRS / 8);
                scale[w] = T::SUB == 32 && step % 2 ? I::second(pair) : I::first(pair);
                if constexpr (T::SUB == 16) second[w] = I::second(pair);
            }
            const int8_t * x = a.quants + ((block * 4 + step / 2) * a.padded + row0) * GROUP + step % 2 * STEP;
            for (int r = 0; r < rows; r += I::ROWS, x += I::ROWS * GROUP) {
                const int here = rows - r < I::ROWS ? 1 : I::ROWS;
                const int8_t * y = here == 2 ? x + GROUP : x;
                EACH(w) {
                    Ints found[I::ROWS];
                    if constexpr (T::SUB == 32) {
                        scaled_sums<I, T, 8>(quants[w], x, y, scale[w], found);
                    } else {
                        Ints more[I::ROWS];
                        scaled_sums<I, T, 4>(quants[w], x, y, scale[w], found);
                        scaled_sums<I, T, 4>(quants[w] + 4, x + 16, y + 16, second[w], more);
                        for (int i = 0; i < I::ROWS; i++) found[i] = I::add(found[i], more[i]);
                    }
                    for (int i = 0; i < I::ROWS && i < here; i++) {
                        int32_t * to = sums + ((r + i) * W + w) * I::LANES;
                        I::store(to, step ? I::add(I::ints(to), found[i]) : found[i]);
                    }
                }
            }
        }
        const int64_t at = block * a.padded + row0;
        for (int w = 0; w < W; w++) {
            const uint8_t *scales = s.block_scales(w), *halves = scales + T::D_AT;
            const typename I::Floats d = I::halves(halves), dmin = T::MIN ? I::halves(halves + 32) : d;
            for (int r = 0; r < rows; r++) {
                const int16_t * of = T::SUB == 32 ? a.sums32 + (at + r) * 8 : a.sums16 + (at + r) * 16;
                Ints sum = I::ints(sums + (r * W + w) * I::LANES), other = I::no_ints();
                if constexpr (OFFSET || T::MIN) {
                    other = I::dot_pairs(other_pair<I, T>(scales, 0), of);
#pragma GCC unroll 7
                    for (int p = 1; p < T::PAIRS; p++)
                        other = I::add_dot_pairs(other, other_pair<I, T>(scales, p), of + 2 * p);
                }
                float * total = totals + (r * W + w) * I::LANES;
                I::store(total, super_total<I, T>(sum, other, d, dmin, a.d[at + r], I::floats(total)));
            }
            s.next_scales(w);
        }
    }
    write_rows<I, W>(work, totals, first, row0, rows);
}

template <class I, class T, int W>
inline void multiply_small(const Work & work, const Activations & a, int64_t first, int64_t row0, int rows) {
    using Ints = typename I::Ints;
    alignas(64) float totals[CHUNK * W * I::LANES];
    Strips<I, T, W> s(work, first);
    for (int i = 0; i < rows * W; i++) I::store(totals + i * I::LANES, I::zeros());
    for (int64_t step = 0; step < work.k / STEP; step++) {
        typename I::Bytes quants[W][VECTORS];
        typename I::Floats d[W], m[W];
        EACH(w) {
            decode<I, T>(s.steps[w], quants[w]);
            s.next_step(w);
            if constexpr (T::SCALING == Scaling::POWER) d[w] = I::powers(s.scales[w] + s.part[w] * I::LANES);
            else d[w] = I::halves(s.scales[w] + s.part[w] * I::LANES * 2);
            m[w] = T::MIN ? I::halves(s.scales[w] + 32 + s.part[w] * I::LANES * 2) : d[w];
            s.next_scales(w);
        }
        const int8_t * x = a.quants + (step / 2 * a.padded + row0) * GROUP + step % 2 * STEP;
        const int64_t at = step * a.padded + row0;
        for (int r = 0; r < rows; r += I::ROWS, x += I::ROWS * GROUP) {
            const int here = rows - r < I::ROWS ? 1 : I::ROWS;
            Ints start = I::no_ints();
            if constexpr (T::OFFSET != 0 && !I::template is_signed<T>)
                start = I::dot_pairs(I::first_of_pair(-T::OFFSET), (const int16_t *) (a.sums + at + r));
            EACH(w) {
                Ints found[I::ROWS];
                dot_sums<I, T>(start, quants[w], x, here == 2 ? x + GROUP : x, found);
                for (int i = 0; i < I::ROWS && i < here; i++) {
                    const int64_t row = at + r + i;
                    float * to = totals + ((r + i) * W + w) * I::LANES;
                    I::store(to, small_total<I, T>(found[i], d[w], m[w], a.d[row], a.scaled[row], I::floats(to)));
                }
            }
        }
    }
    write_rows<I, W>(work, totals, first, row0, rows);
}

// W strips by R rows.
template <class I, class T, int W, int R>
inline void multiply_floats(const Work & work, const Activations & a, int64_t first, int64_t row0) {
    Strips<I, T, W> s(work, first);
    typename I::Floats even[R * W], odd[R * W];
    const float * x = a.floats + row0 * work.k;
    unrolled<R * W>(EDGESPEC_EACH(n) { even[n] = odd[n] = I::zeros(); });
    const uint8_t * from[W];
    unrolled<W>(EDGESPEC_EACH(w) { from[w] = s.steps[w] - s.part[w] * I::BYTES + s.part[w] * I::LANES * 2; });
    const auto add = [&](int64_t i, auto & totals) EDGESPEC_ALWAYS {
        typename I::Floats weights[W];
        unrolled<W>(EDGESPEC_EACH(w) {
            if constexpr (T::ID == F16::ID) weights[w] = I::halves(from[w] + i * PANEL * 2);
            else weights[w] = I::upper_halves(from[w] + i * PANEL * 2);
        });
        unrolled<R>(EDGESPEC_EACH(r) {
            const auto row = I::same(x[r * work.k + i]);
            unrolled<W>(EDGESPEC_EACH(w) { totals[r * W + w] = I::plus_product(weights[w], row, totals[r * W + w]); });
        });
    };
    int64_t i = 0;
    for (; i + 1 < work.k; i += 2) {
        unrolled<W>(EDGESPEC_EACH(w) { I::prefetch(from[w] + i * PANEL * 2 + s.ahead); });
        add(i, even), add(i + 1, odd);
    }
    if (i < work.k) add(i, even);
    alignas(64) float totals[R * W * I::LANES];
    unrolled<R * W>(EDGESPEC_EACH(n) { I::store(totals + n * I::LANES, I::add(even[n], odd[n])); });
    write_rows<I, W>(work, totals, first, row0, R);
}

template <class I, class T, int W> void multiply_strips(const Work & work, const Activations & a, int64_t first) {
    if constexpr (is_float<T>) {
        int64_t r = 0;
        for (; r + I::FLOAT_ROWS <= a.rows; r += I::FLOAT_ROWS) multiply_floats<I, T, W, I::FLOAT_ROWS>(work, a, first, r);
        for (; r < a.rows; r++) multiply_floats<I, T, W, 1>(work, a, first, r);
    } else {
        for (int64_t r = 0; r < a.rows; r += CHUNK) {
            const int rows = (int) (a.rows - r < CHUNK ? a.rows - r : CHUNK);
            if constexpr (T::BLOCK == 256) multiply_super<I, T, W>(work, a, first, r, rows);
            else multiply_small<I, T, W>(work, a, first, r, rows);
        }
    }
}

template <class T> constexpr int activation_kind() {
    return is_float<T> ? EDGESPEC_FLOATS : T::BLOCK == 256 ? EDGESPEC_PER_256 : EDGESPEC_PER_32;
}

template <class I> bool multiply(int type, const Work & work) {
    return with_type(type, [&](auto t) {
        using T = decltype(t);
        const Activations a = place(activation_kind<T>(), work.k, work.rows, const_cast<void *>(work.activations));
        int64_t strip = work.panel0 * I::PARTS;
        const int64_t end = work.panel1 * I::PARTS;
        for (; strip + I::STRIPS <= end; strip += I::STRIPS) multiply_strips<I, T, I::STRIPS>(work, a, strip);
        if constexpr (I::STRIPS > 1)
            for (; strip < end; strip++) multiply_strips<I, T, 1>(work, a, strip);
    });
}

}  // namespace
}  // namespace edgespec
