// The types of weights: how a packed panel holds them.
//
// A panel is 16 rows of a matrix. Its quants come first, 32 values of each row after another ("step"), then the scales of
// each block. Quants are unsigned (value = quant - OFFSET), cut into planes of 4, 2 and 1 bits. A plane of w bits takes w
// vectors of 64 bytes in a step; decoded, a step is 8 vectors. Vector i holds the values 4i to 4i+3 of each row: row r's
// are the bytes 4r to 4r+3. In the plane of w bits it is field i / w of vector i % w.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edgespec {

constexpr int PANEL = 16;                // rows
constexpr int STEP = 32;                 // values
constexpr int VECTORS = 8;               // of a decoded step
constexpr int VECTOR_BYTES = PANEL * 4;  // in memory, whatever the processor's vectors are

struct Plane {
    int bits;   // its width
    int shift;  // where its bits belong in a quant
    int at;     // its first byte in a step
};

template <int BITS> struct Planes;
template <> struct Planes<2> { static constexpr Plane LIST[] = {{2, 0, 0}}; };
template <> struct Planes<3> { static constexpr Plane LIST[] = {{2, 0, 0}, {1, 2, 128}}; };
template <> struct Planes<4> { static constexpr Plane LIST[] = {{4, 0, 0}}; };
template <> struct Planes<5> { static constexpr Plane LIST[] = {{4, 0, 0}, {1, 4, 256}}; };
template <> struct Planes<6> { static constexpr Plane LIST[] = {{4, 0, 0}, {2, 4, 256}}; };
template <> struct Planes<8> { static constexpr Plane LIST[] = {{8, 0, 0}}; };

// Scales of a block of 32 values: a half-precision d (and an m which is added), or a power of two.
enum class Scaling { HALF, POWER };

// Blocks of 32 values, activations quantized per 32: value = d * (quant - OFFSET) + m.
template <int ID_, int FILE_BYTES_, int BITS_, int MAX_, int OFFSET_, bool MIN_, Scaling SCALING_ = Scaling::HALF>
struct Small {
    static constexpr int ID = ID_, BLOCK = 32, FILE_BYTES = FILE_BYTES_, BITS = BITS_;
    static constexpr int MAX = MAX_;  // the greatest decoded quant
    static constexpr int OFFSET = OFFSET_;
    static constexpr bool MIN = MIN_;
    static constexpr Scaling SCALING = SCALING_;
    static constexpr bool LOOKED_UP = false;  // is what a packed quant stands for in VALUES, or the quant itself?
    static constexpr int SCALE_BYTES = SCALING == Scaling::POWER ? 16 : MIN ? 64 : 32;
};

// Blocks of 256 values with an integer scale per SUB values, activations quantized per 256:
// value = d * scale * (quant - OFFSET) - dmin * min.
template <int ID_, int FILE_BYTES_, int BITS_, int MAX_, int OFFSET_, int SUB_, bool MIN_> struct Super {
    static constexpr int ID = ID_, BLOCK = 256, FILE_BYTES = FILE_BYTES_, BITS = BITS_, MAX = MAX_, OFFSET = OFFSET_;
    static constexpr int SUB = SUB_;
    static constexpr bool MIN = MIN_;
    static constexpr bool LOOKED_UP = false;
    static constexpr int PAIRS = 256 / SUB / 2;  // scales come in pairs: 32 bytes for 16 rows
    // Where mins have 4 bits, a byte holds a scale and a min.
    static constexpr bool SHARED = MIN && SUB == 16;
    static constexpr int MINS_AT = SHARED ? 0 : PAIRS * 32;
    static constexpr int D_AT = PAIRS * 32 * (MIN && !SHARED ? 2 : 1);
    static constexpr int SCALE_BYTES = D_AT + (MIN ? 64 : 32);
};

// Shifted to be unsigned: by 128 and by 12.
inline constexpr uint8_t IQ4_VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
inline constexpr uint8_t MXFP4_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

using Q4_0 = Small<2, 18, 4, 15, 8, false>;
using Q4_1 = Small<3, 20, 4, 15, 0, true>;
using Q5_0 = Small<6, 22, 5, 31, 16, false>;
using Q5_1 = Small<7, 24, 5, 31, 0, true>;
using Q8_0 = Small<8, 34, 8, 255, 128, false>;
template <class Base, const uint8_t * VALUES_> struct LookedUp : Base {
    static constexpr bool LOOKED_UP = true;
    static constexpr const uint8_t * VALUES = VALUES_;
};
using IQ4_NL = LookedUp<Small<20, 18, 4, 255, 128, false>, IQ4_VALUES>;
using MXFP4 = LookedUp<Small<39, 17, 4, 24, 12, false, Scaling::POWER>, MXFP4_VALUES>;
using Q2_K = Super<10, 84, 2, 3, 0, 16, true>;
using Q3_K = Super<11, 110, 3, 7, 4, 16, false>;
using Q4_K = Super<12, 144, 4, 15, 0, 32, true>;
using Q5_K = Super<13, 176, 5, 31, 0, 32, true>;
using Q6_K = Super<14, 210, 6, 63, 32, 16, false>;
using IQ4_XS = LookedUp<Super<23, 136, 4, 255, 128, 32, false>, IQ4_VALUES>;

// Weights as floats, activations too: the 16 rows of a value are neighbours.
template <int ID_> struct Float {
    static constexpr int ID = ID_, BLOCK = 1, FILE_BYTES = 2;
};
using F16 = Float<1>;
using BF16 = Float<30>;

// All types of weights, in the one place that lists them.
template <class... Ts> struct TypeList {
    static constexpr int IDS[] = {Ts::ID...};
};
using Types =
    TypeList<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, F16, BF16>;

// In an anonymous namespace, as each file that includes this is compiled for another instruction set.
namespace {

template <class T> constexpr bool is_float = T::BLOCK == 1;
template <class T> constexpr size_t panel_bytes(int64_t k) {
    size_t bytes = 0;
    if constexpr (is_float<T>) bytes = (size_t) k * PANEL * 2;
    else bytes = (size_t) k / STEP * T::BITS * 64 + (size_t) k / T::BLOCK * T::SCALE_BYTES;
    return (bytes + 63) / 64 * 64;
}

// Calls f with the traits of the type of this number; false if there is none.
template <class F, class... Ts> bool with_type(int id, F && f, TypeList<Ts...>) {
    return ((id == Ts::ID && (f(Ts{}), true)) || ...);
}
template <class F> bool with_type(int id, F && f) { return with_type(id, f, Types{}); }

}  // namespace

}  // namespace edgespec
