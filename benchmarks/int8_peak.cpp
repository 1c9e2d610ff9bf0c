// The most 8-bit multiply-adds per second of one thread: products of registers alone, in as many independent
// sums as hide the latency of the instruction. benchmarks/kernels.py compiles and runs this once for each
// instruction set, which a macro SET_... names.

#include <chrono>
#include <cstdint>
#include <cstdio>

#if defined(__x86_64__)
#include <immintrin.h>
#define OPAQUE(vector) asm volatile("" : "+x"(vector))
#elif defined(__aarch64__)
#include <arm_neon.h>
#define OPAQUE(vector) asm volatile("" : "+w"(vector))
#endif

#if defined(SET_AVX2)
constexpr int kSums = 6;  // the additions take one cycle; the products need registers of their own
using Vector = __m256i;
constexpr double kMultiplyAdds = 32;
static inline Vector zero() { return _mm256_setzero_si256(); }
static inline Vector add(Vector sum, Vector a, Vector b) {
    // As the kernels do without VNNI: two steps of 16 bits are added before they are widened.
    Vector pairs = _mm256_maddubs_epi16(a, b);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#elif defined(SET_AVX2_VNNI)
constexpr int kSums = 12;
using Vector = __m256i;
constexpr double kMultiplyAdds = 32;
static inline Vector zero() { return _mm256_setzero_si256(); }
static inline Vector add(Vector sum, Vector a, Vector b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#elif defined(SET_AVX512_VNNI)
constexpr int kSums = 12;
using Vector = __m512i;
constexpr double kMultiplyAdds = 64;
static inline Vector zero() { return _mm512_setzero_si512(); }
static inline Vector add(Vector sum, Vector a, Vector b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(SET_NEON_DOTPROD)
constexpr int kSums = 16;
using Vector = int32x4_t;
constexpr double kMultiplyAdds = 16;
static inline Vector zero() { return vdupq_n_s32(0); }
static inline Vector add(Vector sum, Vector a, Vector b) {
    return vdotq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
#elif defined(SET_NEON_I8MM)
constexpr int kSums = 16;
using Vector = int32x4_t;
constexpr double kMultiplyAdds = 32;
static inline Vector zero() { return vdupq_n_s32(0); }
static inline Vector add(Vector sum, Vector a, Vector b) {
    return vmmlaq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
#endif

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#if defined(SET_AMX)

#include <sys/syscall.h>
#include <unistd.h>

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Four sums from two tiles of either operand: each tile of 16 x 64 bytes is used twice.
static double round_of(long times) {
    for (long i = 0; i < times; i++) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    return 4.0 * 16 * 16 * 64 * times;
}

static bool begin() {
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return false;
    alignas(64) static TileConfig config;
    alignas(64) static uint8_t data[1024];
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = 64;
        config.rows[tile] = 16;
    }
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, data, 64);
    _tile_loadd(5, data, 64);
    _tile_loadd(6, data, 64);
    _tile_loadd(7, data, 64);
    return true;
}

#else

static double round_of(long times) {
    Vector a = zero(), b = zero(), sums[kSums];
    OPAQUE(b);
    for (Vector &sum : sums) sum = zero();
    for (long i = 0; i < times; i++) {
        for (Vector &sum : sums) {
            OPAQUE(a);  // or the compiler multiplies once for all sums
            sum = add(sum, a, b);
        }
    }
    for (Vector &sum : sums) OPAQUE(sum);
    return kSums * kMultiplyAdds * times;
}

static bool begin() { return true; }

#endif

int main() {
    if (!begin()) return 1;
    double best = 0;
    for (int turn = 0; turn < 20; turn++) {
        double begun = seconds();
        double done = round_of(1'000'000);
        double speed = done / (seconds() - begun);
        best = speed > best ? speed : best;
    }
    std::printf("%.6g\n", best);
}
