// Sixteen floats, and the operations on them that attention and F32 products need. Each is the same IEEE operation on every
// processor, so what is computed with them is the same in every bit.
#pragma once
#include "unrolled.h"
#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace edgespec {
namespace {

#if defined(__AVX512F__)
struct V16 {
    __m512 v;
    static constexpr int GROUP = 8;     // sums that fit into registers with what they are made of
    static constexpr int TOGETHER = 2;  // such groups, which share one of their factors
    static V16 load(const float * p) { return {_mm512_loadu_ps(p)}; }
    static V16 of(float x) { return {_mm512_set1_ps(x)}; }
    static V16 halves(const uint16_t * p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p))}; }
    static V16 bytes(const int8_t * p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p)))};
    }
    void store(float * p) const { _mm512_storeu_ps(p, v); }
};
inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// a where x >= bound, else b.
inline V16 select(V16 x, V16 bound, V16 a, V16 b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ), b.v, a.v)};
}
// Multiplies by 2 to the power of the integer in the lowest bits of `power`.
inline V16 scale_by_power(V16 a, V16 power) {
    const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(power.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), shifted))};
}
#elif defined(__AVX2__)
struct V16 {
    __m256 a, b;
    static constexpr int GROUP = 4, TOGETHER = 1;
    static V16 load(const float * p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static V16 of(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static V16 halves(const uint16_t * p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (p + 8)))};
    }
    static V16 bytes(const int8_t * p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) (p + 8))))};
    }
    void store(float * p) const { _mm256_storeu_ps(p, a), _mm256_storeu_ps(p + 8, b); }
};
#define EDGESPEC_BOTH(name, operation) \
    inline V16 name(V16 x, V16 y) { return {operation(x.a, y.a), operation(x.b, y.b)}; }
EDGESPEC_BOTH(add, _mm256_add_ps)
EDGESPEC_BOTH(sub, _mm256_sub_ps)
EDGESPEC_BOTH(mul, _mm256_mul_ps)
EDGESPEC_BOTH(div, _mm256_div_ps)
EDGESPEC_BOTH(max, _mm256_max_ps)
EDGESPEC_BOTH(min, _mm256_min_ps)
#undef EDGESPEC_BOTH
inline V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V16 select(V16 x, V16 bound, V16 a, V16 b) {
    return {_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, bound.a, _CMP_GE_OQ)),
            _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, bound.b, _CMP_GE_OQ))};
}
inline __m256 scale_by_power(__m256 a, __m256 power) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(power), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shifted));
}
inline V16 scale_by_power(V16 a, V16 power) { return {scale_by_power(a.a, power.a), scale_by_power(a.b, power.b)}; }
#elif defined(__ARM_NEON)
struct V16 {
    float32x4_t v[4];
    static constexpr int GROUP = 4, TOGETHER = 1;
    static V16 load(const float * p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
    static V16 of(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
    static V16 halves(const uint16_t * p) {
        V16 r;
        for (int i = 0; i < 4; i++) r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
        return r;
    }
    static V16 bytes(const int8_t * p) {
        const int8x16_t all = vld1q_s8(p);
        const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_s8(vget_high_s8(all));
        return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
    }
    void store(float * p) const {
        for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v[i]);
    }
};
template <typename F> inline V16 each(F && f) { return {{f(0), f(1), f(2), f(3)}}; }
inline V16 fma(V16 a, V16 b, V16 c) { return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
inline V16 add(V16 a, V16 b) { return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
inline V16 sub(V16 a, V16 b) { return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
inline V16 mul(V16 a, V16 b) { return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
inline V16 div(V16 a, V16 b) { return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
inline V16 max(V16 a, V16 b) { return each([&](int i) { return vmaxq_f32(a.v[i], b.v[i]); }); }
inline V16 min(V16 a, V16 b) { return each([&](int i) { return vminq_f32(a.v[i], b.v[i]); }); }
inline V16 select(V16 x, V16 bound, V16 a, V16 b) {
    return each([&](int i) { return vbslq_f32(vcgeq_f32(x.v[i], bound.v[i]), a.v[i], b.v[i]); });
}
inline V16 scale_by_power(V16 a, V16 power) {
    return each([&](int i) {
        const int32x4_t shifted = vshlq_n_s32(vreinterpretq_s32_f32(power.v[i]), 23);
        return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v[i]), shifted));
    });
}
#endif

#if defined(__AVX2__)
// Transposes 8 x 8 floats.
inline void transpose8(const float * from, int64_t from_stride, float * to, int64_t to_stride) {
    __m256 r[8], s[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(from + i * from_stride);
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44), r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44), r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

// Transposes 16 x 16 floats.
inline void transpose(const float * from, int64_t from_stride, float * to, int64_t to_stride) {
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 16; j += 8) transpose8(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
    }
}
#else
inline void transpose(const float * from, int64_t from_stride, float * to, int64_t to_stride) {
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 16; j++) to[j * to_stride + i] = from[i * from_stride + j];
    }
}
#endif

// e to the power of x, to about one unit in the last place; 0 where x < -86. x must be below 88.
inline EDGESPEC_ALWAYS V16 exponential(V16 x) {
    const V16 low = V16::of(-86.0f), magic = V16::of(12582912.0f);  // rounds to an integer, in the lowest bits
    const V16 bounded = max(x, low), n = fma(bounded, V16::of(1.44269504f), magic), whole = sub(n, magic);
    const V16 r = fma(whole, V16::of(1.43241613e-6f), fma(whole, V16::of(-0.693148613f), bounded));
    V16 p = V16::of(1.3888889e-3f);
    constexpr float TERMS[] = {8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f, 1.0f, 1.0f};
    for (float term : TERMS) p = fma(p, r, V16::of(term));
    return select(x, low, scale_by_power(p, n), V16::of(0.0f));
}

}  // namespace
}  // namespace edgespec
