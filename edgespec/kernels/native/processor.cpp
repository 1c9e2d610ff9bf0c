// The instruction sets by name, and those that the processor has. build.py asks this file, compiled on its own, which of the
// others are worth compiling here.
#include <cstring>

#include "products.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

const char * const NAMES[EDGESPEC_ISA_COUNT] = {"avx2", "avx2-vnni", "avx512-vnni", "amx", "neon-dotprod", "neon-i8mm"};

#if defined(__x86_64__)
struct Leaf {
    unsigned a = 0, b = 0, c = 0, d = 0;
    explicit Leaf(unsigned leaf, unsigned sub = 0) { __get_cpuid_count(leaf, sub, &a, &b, &c, &d); }
};
bool bit(unsigned word, int at) { return word >> at & 1; }

bool processor_has(int isa) {
    const Leaf one(1), seven(7), more(7, 1);
    if (!bit(one.c, 27)) return false;  // the system saves no vector registers
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const bool avx2 = (low & 6) == 6 && bit(seven.b, 5) && bit(one.c, 12) && bit(one.c, 29);  // with FMA and F16C
    const bool avx512 = avx2 && (low & 0xe6) == 0xe6 && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) &&
                        bit(seven.b, 31) && bit(seven.c, 11);  // F, DQ, BW, VL, VNNI
    switch (isa) {
        case EDGESPEC_AVX2: return avx2;
        case EDGESPEC_AVX2_VNNI: return avx2 && bit(more.a, 4);
        case EDGESPEC_AVX512_VNNI: return avx512;
        case EDGESPEC_AMX: {
            if (!avx512 || (low & 0x60000) != 0x60000 || !bit(seven.d, 24) || !bit(seven.d, 25)) return false;
#if defined(__linux__)
            constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
            static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
            return granted;
#else
            return false;
#endif
        }
        default: return false;
    }
}
#elif defined(__aarch64__) && defined(__linux__)
bool processor_has(int isa) {
    constexpr unsigned long DOTPROD = 1ul << 20, I8MM = 1ul << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
    const bool dotprod = getauxval(AT_HWCAP) & DOTPROD;
    if (isa == EDGESPEC_NEON_DOTPROD) return dotprod;
    return isa == EDGESPEC_NEON_I8MM && dotprod && (getauxval(AT_HWCAP2) & I8MM);
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool says_yes(const char * name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
bool processor_has(int isa) {
    if (isa == EDGESPEC_NEON_DOTPROD) return says_yes("hw.optional.arm.FEAT_DotProd");
    return isa == EDGESPEC_NEON_I8MM && says_yes("hw.optional.arm.FEAT_DotProd") && says_yes("hw.optional.arm.FEAT_I8MM");
}
#else
bool processor_has(int) { return false; }
#endif

}  // namespace

extern "C" {

const char * edgespec_isa_name(int isa) { return isa >= 0 && isa < EDGESPEC_ISA_COUNT ? NAMES[isa] : ""; }

int edgespec_isa_id(const char * name) {
    for (int isa = 0; isa < EDGESPEC_ISA_COUNT; isa++)
        if (!strcmp(name, NAMES[isa])) return isa;
    return -1;
}

int edgespec_processor_has(int isa) { return processor_has(isa); }

}  // extern "C"
