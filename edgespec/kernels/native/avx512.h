// Vectors of 512 bits, dot products by VNNI.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "kernels.h"

namespace edgespec {
namespace {

struct Avx512 {
    using Bytes = __m512i;
    using Ints = __m512i;
    using Floats = __m512;
    using Scale = __m512i;
    static constexpr int BYTES = 64, LANES = 16, PARTS = 1, STRIPS = 2, ROWS = 1, FLOAT_ROWS = 4;
    template <class T> static constexpr bool is_signed = false;

    static Bytes load(const uint8_t * p) { return _mm512_loadu_si512(p); }
    static Bytes bytes(int value) { return _mm512_set1_epi8((char) value); }
    static Bytes both(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
    static Bytes or_masked(Bytes a, Bytes b, Bytes mask) { return _mm512_ternarylogic_epi64(a, b, mask, 0xf8); }
    static Bytes subtract(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }
    template <int LEFT> static Bytes shift(Bytes a) {
        if constexpr (LEFT > 0) return _mm512_slli_epi16(a, LEFT);
        else if constexpr (LEFT < 0) return _mm512_srli_epi16(a, -LEFT);
        else return a;
    }
    static Bytes lookup(const uint8_t * table, Bytes index) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table)), index);
    }
    static void arrange(Bytes *) {}
    static void prefetch(const uint8_t * p) { _mm_prefetch((const char *) p, _MM_HINT_T1); }

    static Ints no_ints() { return _mm512_setzero_si512(); }
    static Ints ints(const int32_t * p) { return _mm512_load_si512(p); }
    static void store(int32_t * p, Ints v) { _mm512_store_si512(p, v); }
    static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
    static Ints subtract32(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
    template <int N> static Ints times(Ints a) { return _mm512_mullo_epi32(a, _mm512_set1_epi32(N)); }
    static Ints same_word(const void * p) {
        int32_t word;
        memcpy(&word, p, 4);
        return _mm512_set1_epi32(word);
    }

    // Two scales for each lane, as 16-bit numbers.
    static Ints pairs(const uint8_t * p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *) p)); }
    static Ints low_nibbles(Ints p) { return _mm512_and_si512(p, _mm512_set1_epi16(15)); }
    static Ints high_nibbles(Ints p) { return _mm512_and_si512(_mm512_srli_epi16(p, 4), _mm512_set1_epi16(15)); }
    static Scale first(Ints p) { return _mm512_srai_epi32(_mm512_slli_epi32(p, 16), 16); }
    static Scale second(Ints p) { return _mm512_srai_epi32(p, 16); }
    static Ints first_of_pair(int value) { return _mm512_set1_epi32(value & 0xffff); }
    static Ints dot_pairs(Ints p, const int16_t * x) { return _mm512_madd_epi16(p, same_word(x)); }
    static Ints add_dot_pairs(Ints a, Ints p, const int16_t * x) { return _mm512_dpwssd_epi32(a, p, same_word(x)); }

    // Products of N vectors with N words of activations, times `scale`.
    template <class T, int N> static Ints scaled(const Bytes * quants, const int8_t * x, Scale scale) {
        return _mm512_mullo_epi32(sum<N>(no_ints(), quants, x), scale);
    }
    template <class T> static Ints dot(Ints start, const Bytes * quants, const int8_t * x) {
        return sum<VECTORS>(start, quants, x);
    }
    template <int N> static Ints sum(Ints total, const Bytes * quants, const int8_t * x) {
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) total = _mm512_dpbusd_epi32(total, quants[i], same_word(x + 4 * i));
        return total;
    }

    static Floats zeros() { return _mm512_setzero_ps(); }
    static Floats same(float value) { return _mm512_set1_ps(value); }
    static Floats floats(const float * p) { return _mm512_load_ps(p); }
    static void store(float * p, Floats v) { _mm512_storeu_ps(p, v); }
    static Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats plus_product(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats minus_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static Floats halves(const uint8_t * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
    static Floats upper_halves(const uint8_t * p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) p)), 16));
    }
    static Floats powers(const uint8_t * p) {  // 2^(byte - 128)
        const Ints e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p)), one = _mm512_set1_epi32(1);
        const Ints tiny = _mm512_slli_epi32(_mm512_add_epi32(_mm512_min_epi32(e, one), one), 21);
        return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(e, one), 23), tiny));
    }
};

}  // namespace
}  // namespace edgespec
