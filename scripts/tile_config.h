/* Put in front of every C++ file of llama.cpp by scripts/setup.py (-include).
 *
 * GCC releases without the fix of its bug 114098 (12.2 among them, Debian 12's) tell the optimizer that
 * _tile_loadconfig reads 8 bytes of the 64 that it does read. The other stores into the configuration are
 * dropped as dead, and ldtilecfg faults on what lay on the stack. Here the operand has its true size.
 */
#if defined(__AMX_TILE__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)))
#endif
