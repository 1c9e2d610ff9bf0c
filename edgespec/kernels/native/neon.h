// Vectors of 128 bits. Quants are made signed when decoded. I8MM: products of two rows of activations at once.
#pragma once
#include <arm_neon.h>

#include "kernels.h"

namespace edgespec {
namespace {

template <bool I8MM> struct Neon {
    using Bytes = uint8x16_t;
    using Ints = int32x4_t;
    using Floats = float32x4_t;
    using Scale = int32x4_t;
    static constexpr int BYTES = 16, LANES = 4, PARTS = 4, STRIPS = 2, ROWS = I8MM ? 2 : 1, FLOAT_ROWS = 4;
    template <class T> static constexpr bool is_signed = T::OFFSET != 0;

    static Bytes load(const uint8_t * p) { return vld1q_u8(p); }
    static Bytes bytes(int value) { return vdupq_n_u8((uint8_t) value); }
    static Bytes both(Bytes a, Bytes b) { return vandq_u8(a, b); }
    static Bytes or_masked(Bytes a, Bytes b, Bytes mask) { return vorrq_u8(a, vandq_u8(b, mask)); }
    static Bytes subtract(Bytes a, Bytes b) { return vsubq_u8(a, b); }
    template <int LEFT> static Bytes shift(Bytes a) {
        if constexpr (LEFT > 0) return vshlq_n_u8(a, LEFT);
        else if constexpr (LEFT < 0) return vshrq_n_u8(a, -LEFT);
        else return a;
    }
    static Bytes lookup(const uint8_t * table, Bytes index) { return vqtbl1q_u8(vld1q_u8(table), index); }
    static void prefetch(const uint8_t * p) { __builtin_prefetch(p, 0, 2); }
    // What a product of matrices takes: eight values of two rows of weights in a vector.
    static void arrange(Bytes * quants) {
        if constexpr (I8MM) {
            for (int i = 0; i < VECTORS; i += 2) {
                const auto a = vreinterpretq_u32_u8(quants[i]), b = vreinterpretq_u32_u8(quants[i + 1]);
                quants[i] = vreinterpretq_u8_u32(vzip1q_u32(a, b));
                quants[i + 1] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
            }
        }
    }

    static Ints no_ints() { return vdupq_n_s32(0); }
    static Ints ints(const int32_t * p) { return vld1q_s32(p); }
    static void store(int32_t * p, Ints v) { vst1q_s32(p, v); }
    static Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }

    // Two scales for each lane, as 16-bit numbers.
    static Ints pairs(const uint8_t * p) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8((const int8_t *) p))); }
    static Ints low_nibbles(Ints p) {
        return vreinterpretq_s32_s16(vandq_s16(vreinterpretq_s16_s32(p), vdupq_n_s16(15)));
    }
    static Ints high_nibbles(Ints p) { return low_nibbles(vshrq_n_s32(p, 4)); }
    static Scale first(Ints p) { return vshrq_n_s32(vshlq_n_s32(p, 16), 16); }
    static Scale second(Ints p) { return vshrq_n_s32(p, 16); }
    static Ints dot_pairs(Ints p, const int16_t * x) {
        int32_t word;
        memcpy(&word, x, 4);
        const int16x8_t a = vreinterpretq_s16_s32(p), b = vreinterpretq_s16_s32(vdupq_n_s32(word));
        return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
    }
    static Ints add_dot_pairs(Ints a, Ints p, const int16_t * x) { return vaddq_s32(a, dot_pairs(p, x)); }

    // Products of N vectors with N words of activations.
    template <int N> static Ints sum(const Bytes * quants, const int8_t * x) {
        Ints total = no_ints();
        for (int i = 0; i < N; i += 4) {
            const int8x16_t words = vld1q_s8(x + 4 * i);
            total = vdotq_laneq_s32(total, vreinterpretq_s8_u8(quants[i]), words, 0);
            total = vdotq_laneq_s32(total, vreinterpretq_s8_u8(quants[i + 1]), words, 1);
            total = vdotq_laneq_s32(total, vreinterpretq_s8_u8(quants[i + 2]), words, 2);
            total = vdotq_laneq_s32(total, vreinterpretq_s8_u8(quants[i + 3]), words, 3);
        }
        return total;
    }
    template <class T, int N> static Ints scaled(const Bytes * quants, const int8_t * x, Scale scale) {
        return vmulq_s32(sum<N>(quants, x), scale);
    }
    template <class T> static Ints dot(Ints, const Bytes * quants, const int8_t * x) { return sum<VECTORS>(quants, x); }

#ifdef __ARM_FEATURE_MATMUL_INT8
    // The same for two rows of activations, x and y.
    template <int N> static void sum_two(const Bytes * quants, const int8_t * x, const int8_t * y, Ints * sums) {
        Ints low = no_ints(), high = no_ints();  // of two rows of weights each
        for (int i = 0; i < N; i += 4) {
            const auto a = vreinterpretq_s64_s8(vld1q_s8(x + 4 * i)), b = vreinterpretq_s64_s8(vld1q_s8(y + 4 * i));
            const auto early = vreinterpretq_s8_s64(vzip1q_s64(a, b)), late = vreinterpretq_s8_s64(vzip2q_s64(a, b));
            low = vmmlaq_s32(low, vreinterpretq_s8_u8(quants[i]), early);
            high = vmmlaq_s32(high, vreinterpretq_s8_u8(quants[i + 1]), early);
            low = vmmlaq_s32(low, vreinterpretq_s8_u8(quants[i + 2]), late);
            high = vmmlaq_s32(high, vreinterpretq_s8_u8(quants[i + 3]), late);
        }
        sums[0] = vuzp1q_s32(low, high), sums[1] = vuzp2q_s32(low, high);
    }
    template <class T, int N>
    static void scaled_two(const Bytes * quants, const int8_t * x, const int8_t * y, Scale scale, Ints * sums) {
        sum_two<N>(quants, x, y, sums);
        sums[0] = vmulq_s32(sums[0], scale), sums[1] = vmulq_s32(sums[1], scale);
    }
    template <class T> static void dot_two(const Bytes * quants, const int8_t * x, const int8_t * y, Ints * sums) {
        sum_two<VECTORS>(quants, x, y, sums);
    }
#endif

    static Floats zeros() { return vdupq_n_f32(0); }
    static Floats same(float value) { return vdupq_n_f32(value); }
    static Floats floats(const float * p) { return vld1q_f32(p); }
    static void store(float * p, Floats v) { vst1q_f32(p, v); }
    static Floats to_floats(Ints v) { return vcvtq_f32_s32(v); }
    static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
    static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats plus_product(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
    static Floats minus_product(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }
    static Floats halves(const uint8_t * p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
    static Floats upper_halves(const uint8_t * p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    }
    static Floats powers(const uint8_t * p) {  // 2^(byte - 128)
        int32_t word;
        memcpy(&word, p, 4);
        const auto bytes = vreinterpret_u8_s32(vdup_n_s32(word));
        const Ints e = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes)))), one = vdupq_n_s32(1);
        const Ints tiny = vshlq_n_s32(vaddq_s32(vminq_s32(e, one), one), 21);
        return vreinterpretq_f32_s32(vmaxq_s32(vshlq_n_s32(vsubq_s32(e, one), 23), tiny));
    }
};

}  // namespace
}  // namespace edgespec
