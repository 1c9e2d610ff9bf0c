/* Products of quantized weights with rows of activations: the C interface.
 *
 * A matrix is packed once from its GGUF blocks, without loss and by no other input than these bytes, so a packed copy
 * on disk serves every instruction set. Sixteen rows of the matrix form a panel; panels follow one another, each
 * edgespec_panel_bytes long and 64-byte aligned, and the last is padded with zero rows. Rows of activations are
 * quantized into a buffer which all products that share the input may use; then products are taken for ranges of
 * panels, by any number of threads. Each element of a result is the same in every bit for any number of rows, any
 * division into ranges, and every instruction set.
 *
 * Types are ggml's numbers. Functions that get a type or a kind they do not know return 0 or do nothing.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EDGESPEC_PANEL_ROWS 16

/* Instruction sets, from the least to the most capable of one processor family. */
enum edgespec_isa {
    EDGESPEC_AVX2 = 0,
    EDGESPEC_AVX2_VNNI = 1,
    EDGESPEC_AVX512_VNNI = 2,
    EDGESPEC_AMX = 3,
    EDGESPEC_NEON_DOTPROD = 4,
    EDGESPEC_NEON_I8MM = 5,
    EDGESPEC_ISA_COUNT = 6
};

const char * edgespec_isa_name(int isa); /* "avx2", "avx2-vnni", "avx512-vnni", "amx", "neon-dotprod", "neon-i8mm" */
int edgespec_isa_id(const char * name);  /* -1: unknown */
int edgespec_processor_has(int isa);     /* 1 if this processor and system run it; asks for AMX */
int edgespec_isa_compiled(int isa);      /* 1 if this library has its kernels */
int edgespec_isa_usable(int isa);        /* 1 if both */
int edgespec_best_isa(void);             /* -1: none */

/* The types that are supported: writes at most `room` numbers, returns how many there are. */
int edgespec_types(int * types, int room);
/* Values of a row must be a multiple of this; 0: the type is not supported. */
int edgespec_type_block(int type);
/* Bytes of one row of `k` values in a GGUF file. */
size_t edgespec_file_row_bytes(int type, int64_t k);

/* Bytes of 16 packed rows, and of a packed matrix of `n` rows of `k` values. */
size_t edgespec_panel_bytes(int type, int64_t k);
size_t edgespec_packed_bytes(int type, int64_t k, int64_t n);
/* Packs the panels [panel0, panel1) of a matrix whose first row is at `file`; `packed` is the whole packed matrix. */
void edgespec_pack(int type, const void * file, int64_t k, int64_t n, int64_t panel0, int64_t panel1, void * packed);
/* Writes row `row` as floats (for embeddings). */
void edgespec_unpack_row(int type, const void * packed, int64_t k, int64_t row, float * out);

/* How activations are quantized: 8 bits with a scale per 256 or per 32 values, or not at all. */
enum edgespec_kind { EDGESPEC_PER_256 = 0, EDGESPEC_PER_32 = 1, EDGESPEC_FLOATS = 2 };
int edgespec_activation_kind(int type); /* -1: the type is not supported */
size_t edgespec_activation_bytes(int kind, int64_t k, int64_t rows);
/* Quantizes the rows [row0, row1) of `rows` rows of `k` values; `stride` floats lie between rows of `x`.
 * `activations` is 64-byte aligned. Threads may share the rows among them. */
void edgespec_quantize(int isa, int kind, const float * x, size_t stride, int64_t k, int64_t rows, int64_t row0,
                       int64_t row1, void * activations);

/* Multiplies all rows of `activations` by the panels [panel0, panel1) of a packed matrix of `n` rows.
 * Element (row, column) goes to out[out_rows[row] * out_stride + column], or out[row * out_stride + column] where
 * `out_rows` is null; columns of other panels are left alone. */
void edgespec_multiply(int isa, int type, const void * packed, int64_t k, int64_t n, int64_t panel0, int64_t panel1,
                       const void * activations, int64_t rows, float * out, size_t out_stride,
                       const int64_t * out_rows);

#ifdef __cplusplus
}
#endif
