// Attention as one more node that the plug computes: see attention.cpp.
#pragma once
#include "ggml_abi.h"

namespace edgespec {

// How attention nodes are computed, and whether a node can be with an instruction set.
TensorTraits & attention_traits();
bool can_attend(const Tensor * op, int isa);

// ggml's barrier for the threads of a computation.
void wait_for_all(const ComputeParams * params);

// Queries that share the keys and values of a head, from several rows of a pass and the heads of a group: as many as fit
// into one vector, and the vectors of a tile, for which cells are converted once.
constexpr int LANES = 16;
constexpr int MOST_VECTORS = 4;
constexpr int CELLS = 32;  // that are converted and skipped together

// In an anonymous namespace, as each file that includes this is compiled for another instruction set.
namespace {
inline int64_t padded_cells(int64_t cells) { return (cells + LANES - 1) / LANES * LANES; }
}  // namespace

// Who sees some cells?
enum Seen : uint8_t { SEEN_BY_NONE, SEEN_BY_ALL, SEEN_BY_SOME };

struct Tile {
    int64_t k_size, v_size, n_cells, n_blocks;
    int64_t first;                     // the first lane's number among the queries of the head: row * group + head
    int lanes;                         // that are used
    int group;                         // queries of a row that share a head of keys and values
    const char * queries;              // of row 0 and the group's first head
    size_t query_row, query_head;      // bytes
    const char *keys, *values;         // of the head's first cell
    size_t key_cell, value_cell;       // bytes
    bool quantized_keys, quantized_values;  // Q8_0 instead of F16
    const char * mask;                 // of row 0; null if there is none
    size_t mask_row;                   // bytes
    const uint8_t * rows_seen;         // [rows][n_blocks]: which cells each row sees; null if there is no mask
    float scale, cap;                  // cap 0: none
    const float * sinks;               // of the group's heads; null if there are none
    char * result;                     // of row 0 and the group's first head
    size_t result_row, result_head;    // bytes
    // Work memory.
    float * scores;                    // [vectors][n_cells][LANES], or of few queries [lanes][padded_cells(n_cells)]
    float * queries_turned;            // [vectors][k_size][LANES]
    float * sums;                      // [vectors][v_size][LANES], or of few queries [lanes][v_size]
    float * totals;                    // [vectors][LANES]
    float * converted;                 // [CELLS][the greater size]
    float * keys_turned;               // [k_size][LANES]: of LANES cells, where queries are few
    uint8_t * seen;                    // [n_blocks]: which cells the tile's rows see
};

// The steps of a tile. Each may be divided: scores by cells (multiples of CELLS), sums by values (multiples of LANES).
struct AttentionKernels {
    void (*see)(const uint16_t * mask, int64_t n_cells, uint8_t * seen);  // of a row
    void (*begin)(const Tile &);
    void (*score)(const Tile &, int64_t cell0, int64_t cell1);
    void (*soften)(const Tile &);
    void (*sum)(const Tile &, int64_t value0, int64_t value1);
    void (*end)(const Tile &);
};

void add_attention(const AttentionKernels & kernels, const int * isas, int n_isas);

}  // namespace edgespec
