// The C interface of products: tables of instruction sets and types.
#include "products.h"

#include <iterator>

#include "kernels.h"
#include "packing.h"

namespace edgespec {
namespace {

Kernels * table() {
    static Kernels kernels[EDGESPEC_ISA_COUNT] = {};
    return kernels;
}

bool known(int isa) { return isa >= 0 && isa < EDGESPEC_ISA_COUNT; }

}  // namespace

void add_kernels(const Kernels & kernels) { table()[kernels.isa] = kernels; }

}  // namespace edgespec

using namespace edgespec;

extern "C" {

int edgespec_isa_compiled(int isa) { return known(isa) && table()[isa].multiply; }

int edgespec_isa_usable(int isa) { return edgespec_isa_compiled(isa) && edgespec_processor_has(isa); }

int edgespec_best_isa(void) {
    for (int isa = EDGESPEC_ISA_COUNT - 1; isa >= 0; isa--)
        if (edgespec_isa_usable(isa)) return isa;
    return -1;
}

int edgespec_types(int * types, int room) {
    constexpr int COUNT = std::size(Types::IDS);
    for (int i = 0; i < COUNT && i < room; i++) types[i] = Types::IDS[i];
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
