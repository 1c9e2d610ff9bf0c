// Vectors of 256 bits. VNNI: dot products by vpdpbusd instead of vpmaddubsw.
#pragma once
#include <immintrin.h>

#include "kernels.h"

namespace edgespec {
namespace {

template <bool VNNI> struct Avx2 {
    using Bytes = __m256i;
    using Ints = __m256i;
    using Floats = __m256;
    using Scale = __m256i;  // VNNI: 32-bit numbers; else each twice, as 16-bit numbers
    static constexpr int BYTES = 32, LANES = 8, PARTS = 2, STRIPS = 1, ROWS = 1, FLOAT_ROWS = 4;
    // vpmaddubsw adds two products in 16 bits, so bytes above 127 must be taken as signed numbers.
    template <class T> static constexpr bool is_signed = !VNNI && T::MAX > 127;

    static Bytes load(const uint8_t * p) { return _mm256_loadu_si256((const __m256i *) p); }
    static Bytes bytes(int value) { return _mm256_set1_epi8((char) value); }
    static Bytes both(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
    static Bytes or_masked(Bytes a, Bytes b, Bytes mask) { return _mm256_or_si256(a, _mm256_and_si256(b, mask)); }
    static Bytes subtract(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }
    template <int LEFT> static Bytes shift(Bytes a) {
        if constexpr (LEFT > 0) return _mm256_slli_epi16(a, LEFT);
        else if constexpr (LEFT < 0) return _mm256_srli_epi16(a, -LEFT);
        else return a;
    }
    static Bytes lookup(const uint8_t * table, Bytes index) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table)), index);
    }
    static void arrange(Bytes *) {}
    static void prefetch(const uint8_t * p) { _mm_prefetch((const char *) p, _MM_HINT_T1); }

    static Ints no_ints() { return _mm256_setzero_si256(); }
    static Ints ints(const int32_t * p) { return _mm256_load_si256((const __m256i *) p); }
    static void store(int32_t * p, Ints v) { _mm256_store_si256((__m256i *) p, v); }
    static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
    static Ints subtract32(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
    template <int N> static Ints times(Ints a) { return _mm256_mullo_epi32(a, _mm256_set1_epi32(N)); }
    static Ints same_word(const void * p) {
        int32_t word;
        memcpy(&word, p, 4);
        return _mm256_set1_epi32(word);
    }

    // Two scales for each lane, as 16-bit numbers.
    static Ints pairs(const uint8_t * p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) p)); }
    static Ints low_nibbles(Ints p) { return _mm256_and_si256(p, _mm256_set1_epi16(15)); }
    static Ints high_nibbles(Ints p) { return _mm256_and_si256(_mm256_srli_epi16(p, 4), _mm256_set1_epi16(15)); }
    static Scale first(Ints p) {
        const Ints left = _mm256_slli_epi32(p, 16);
        if constexpr (VNNI) return _mm256_srai_epi32(left, 16);
        else return _mm256_blend_epi16(p, left, 0xaa);
    }
    static Scale second(Ints p) {
        if constexpr (VNNI) return _mm256_srai_epi32(p, 16);
        else return _mm256_blend_epi16(_mm256_srli_epi32(p, 16), p, 0xaa);
    }
    static Ints first_of_pair(int value) { return _mm256_set1_epi32(value & 0xffff); }
    static Ints dot_pairs(Ints p, const int16_t * x) { return _mm256_madd_epi16(p, same_word(x)); }
    static Ints add_dot_pairs(Ints a, Ints p, const int16_t * x) {
        if constexpr (VNNI) return _mm256_dpwssd_avx_epi32(a, p, same_word(x));
        else return _mm256_add_epi32(a, dot_pairs(p, x));
    }

    // Products of N vectors with N words of activations, times `scale`.
    template <class T, int N> static Ints scaled(const Bytes * quants, const int8_t * x, Scale scale) {
        if constexpr (VNNI) return _mm256_mullo_epi32(sum<N>(no_ints(), quants, x), scale);
        else return wide<T, N>(quants, x, scale);
    }
    template <class T> static Ints dot(Ints start, const Bytes * quants, const int8_t * x) {
        if constexpr (VNNI) return sum<VECTORS>(start, quants, x);
        else {
            const Ints products = wide<T, VECTORS>(quants, x, _mm256_set1_epi16(1));
            return T::OFFSET && !is_signed<T> ? add(start, products) : products;
        }
    }
    template <int N> static Ints sum(Ints total, const Bytes * quants, const int8_t * x) {
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) total = _mm256_dpbusd_avx_epi32(total, quants[i], same_word(x + 4 * i));
        return total;
    }
    template <class T, int N> static Ints wide(const Bytes * quants, const int8_t * x, Scale scale) {
        // As many vectors as can be added in 16 bits.
        constexpr int EACH = T::MAX <= 15 ? 8 : T::MAX <= 31 ? 4 : T::MAX <= 63 ? 2 : 1, G = EACH < N ? EACH : N;
        Ints total;
#pragma GCC unroll 8
        for (int g = 0; g < N; g += G) {
            Ints narrow;
#pragma GCC unroll 8
            for (int i = g; i < g + G; i++) {
                const Ints word = same_word(x + 4 * i);
                Ints products;
                if constexpr (is_signed<T>)
                    products = _mm256_maddubs_epi16(_mm256_abs_epi8(quants[i]), _mm256_sign_epi8(word, quants[i]));
                else products = _mm256_maddubs_epi16(quants[i], word);
                narrow = i == g ? products : _mm256_add_epi16(narrow, products);
            }
            const Ints product = _mm256_madd_epi16(narrow, scale);
            total = g ? _mm256_add_epi32(total, product) : product;
        }
        return total;
    }

    static Floats zeros() { return _mm256_setzero_ps(); }
    static Floats same(float value) { return _mm256_set1_ps(value); }
    static Floats floats(const float * p) { return _mm256_load_ps(p); }
    static void store(float * p, Floats v) { _mm256_storeu_ps(p, v); }
    static Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats plus_product(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats minus_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
    static Floats halves(const uint8_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
    static Floats upper_halves(const uint8_t * p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) p)), 16));
    }
    static Floats powers(const uint8_t * p) {  // 2^(byte - 128)
        const Ints e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p)), one = _mm256_set1_epi32(1);
        const Ints tiny = _mm256_slli_epi32(_mm256_add_epi32(_mm256_min_epi32(e, one), one), 21);
        return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(e, one), 23), tiny));
    }
};

}  // namespace
}  // namespace edgespec
