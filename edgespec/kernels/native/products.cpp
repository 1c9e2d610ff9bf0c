// The C interface of products: tables of instruction sets and types, and what the processor can do.
#include "products.h"

#include <cstring>

#include "kernels.h"
#include "packing.h"

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

namespace edgespec {
namespace {

const char * const NAMES[EDGESPEC_ISA_COUNT] = {"avx2", "avx2-vnni", "avx512-vnni", "amx", "neon-dotprod", "neon-i8mm"};

Kernels * table() {
    static Kernels kernels[EDGESPEC_ISA_COUNT] = {};
    return kernels;
}

bool known(int isa) { return isa >= 0 && isa < EDGESPEC_ISA_COUNT; }

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

void add_kernels(const Kernels & kernels) { table()[kernels.isa] = kernels; }

}  // namespace edgespec

using namespace edgespec;

extern "C" {

const char * edgespec_isa_name(int isa) { return known(isa) ? NAMES[isa] : ""; }

int edgespec_isa_id(const char * name) {
    for (int isa = 0; isa < EDGESPEC_ISA_COUNT; isa++)
        if (!strcmp(name, NAMES[isa])) return isa;
    return -1;
}

int edgespec_isa_compiled(int isa) { return known(isa) && table()[isa].multiply; }

int edgespec_isa_usable(int isa) { return edgespec_isa_compiled(isa) && processor_has(isa); }

int edgespec_best_isa(void) {
    for (int isa = EDGESPEC_ISA_COUNT - 1; isa >= 0; isa--)
        if (edgespec_isa_usable(isa)) return isa;
    return -1;
}

int edgespec_types(int * types, int room) {
    constexpr int COUNT = sizeof TYPE_IDS / sizeof *TYPE_IDS;
    for (int i = 0; i < COUNT && i < room; i++) types[i] = TYPE_IDS[i];
    return COUNT;
}

int edgespec_type_block(int type) {
    int block = 0;
    with_type(type, [&](auto t) { block = decltype(t)::BLOCK; });
    return block;
}

size_t edgespec_file_row_bytes(int type, int64_t k) {
    size_t bytes = 0;
    with_type(type, [&](auto t) { bytes = (size_t) (k / decltype(t)::BLOCK) * decltype(t)::FILE_BYTES; });
    return bytes;
}

size_t edgespec_panel_bytes(int type, int64_t k) {
    size_t bytes = 0;
    with_type(type, [&](auto t) { bytes = panel_bytes<decltype(t)>(k); });
    return bytes;
}

size_t edgespec_packed_bytes(int type, int64_t k, int64_t n) {
    return (size_t) ((n + PANEL - 1) / PANEL) * edgespec_panel_bytes(type, k);
}

void edgespec_pack(int type, const void * file, int64_t k, int64_t n, int64_t panel0, int64_t panel1, void * packed) {
    pack(type, (const uint8_t *) file, k, n, panel0, panel1, (uint8_t *) packed);
}

void edgespec_unpack_row(int type, const void * packed, int64_t k, int64_t row, float * out) {
    unpack_row(type, (const uint8_t *) packed, k, row, out);
}

int edgespec_activation_kind(int type) {
    int kind = -1;
    with_type(type, [&](auto t) { kind = activation_kind<decltype(t)>(); });
    return kind;
}

size_t edgespec_activation_bytes(int kind, int64_t k, int64_t rows) { return place(kind, k, rows, nullptr).bytes; }

void edgespec_quantize(int isa, int kind, const float * x, size_t stride, int64_t k, int64_t rows, int64_t row0,
                       int64_t row1, void * activations) {
    if (edgespec_isa_compiled(isa)) table()[isa].quantize(kind, x, stride, k, rows, row0, row1, activations);
}

void edgespec_multiply(int isa, int type, const void * packed, int64_t k, int64_t n, int64_t panel0, int64_t panel1,
                       const void * activations, int64_t rows, float * out, size_t out_stride,
                       const int64_t * out_rows) {
    if (!edgespec_isa_compiled(isa)) return;
    table()[isa].multiply(type, {(const uint8_t *) packed, k, n, panel0, panel1, activations, rows, out, out_stride, out_rows});
}

}  // extern "C"
