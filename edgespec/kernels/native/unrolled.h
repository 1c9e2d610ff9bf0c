// Loops whose bodies are written out, by any compiler.
#pragma once
#include <type_traits>
#include <utility>

namespace edgespec {
namespace {

#define EDGESPEC_ALWAYS __attribute__((always_inline))

// Calls f with 0 .. N - 1 as constants. Unlike in a loop, every compiler then keeps the elements of arrays in registers.
template <typename F, int... I> inline EDGESPEC_ALWAYS void call_with(std::integer_sequence<int, I...>, F && f) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F> inline EDGESPEC_ALWAYS void unrolled(F && f) {
    call_with(std::make_integer_sequence<int, N>(), f);
}
#define EDGESPEC_EACH(i) [&](auto i) EDGESPEC_ALWAYS

}  // namespace
}  // namespace edgespec
