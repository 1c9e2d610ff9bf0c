// Takes products from files, so that another machine's kernels can be run by an emulator.
// Arguments, again and again: isa type k n rows, then the files of GGUF rows, activations, and results.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "products.h"

static bool read(const char * path, void * to, size_t bytes) {
    FILE * file = fopen(path, "rb");
    if (!file) return false;
    const bool whole = fread(to, 1, bytes, file) == bytes;
    fclose(file);
    return whole;
}

int main(int argc, char ** argv) {
    for (int i = 1; i + 7 < argc; i += 8) {
        const int isa = atoi(argv[i]), type = atoi(argv[i + 1]);
        const int64_t k = atoll(argv[i + 2]), n = atoll(argv[i + 3]), rows = atoll(argv[i + 4]);
        const int64_t panels = (n + EDGESPEC_PANEL_ROWS - 1) / EDGESPEC_PANEL_ROWS;
        if (!edgespec_isa_usable(isa)) return 2;
        std::vector<uint8_t> file(n * edgespec_file_row_bytes(type, k));
        std::vector<float> x(rows * k), out(rows * n);
        if (!read(argv[i + 5], file.data(), file.size()) || !read(argv[i + 6], x.data(), x.size() * 4)) return 3;
        const int kind = edgespec_activation_kind(type);
        const size_t packed_bytes = edgespec_packed_bytes(type, k, n);
        const size_t bytes = edgespec_activation_bytes(kind, k, rows);
        void * packed = aligned_alloc(64, (packed_bytes + 63) / 64 * 64);
        void * activations = aligned_alloc(64, (bytes + 63) / 64 * 64);
        edgespec_pack(type, file.data(), k, n, 0, panels, packed);
        edgespec_quantize(isa, kind, x.data(), k, k, rows, 0, rows, activations);
        edgespec_multiply(isa, type, packed, k, n, 0, panels, activations, rows, out.data(), n, nullptr);
        free(packed), free(activations);
        FILE * results = fopen(argv[i + 7], "wb");
        if (!results || fwrite(out.data(), 4, out.size(), results) != out.size()) return 4;
        fclose(results);
    }
    return 0;
}
