/* Put in front of every C++ file of llama.cpp by scripts/setup.py (-include): what must be different for some
 * compilers and processors.
 */

/* GCC releases without the fix of its bug 114098 (12.2 among them, Debian 12's) tell the optimizer that
 * _tile_loadconfig reads 8 bytes of the 64 that it does read. The other stores into the configuration are
 * dropped as dead, and ldtilecfg faults on what lay on the stack. Here the operand has its true size.
 */
#if defined(__AMX_TILE__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)))
#endif

/* With AVX512-FP16, ggml adds up values of attention 128 at a time, and what remains one by one, through tables:
 * all of them in heads of 64. Without, it takes 64 at a time, and adds in single precision.
 */
#undef __AVX512FP16__
