/* Branches in layers with a running state: see recurrent.cpp. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ggml's numbers of the operations that mix rows in such layers, and of those around them. */
struct edgespec_recurrent_operations {
    int32_t convolution, scan, delta_net, copy, concat, attention;
};

/* Finds ggml's own operations in its processor backend. `within` is any address in that library. Returns null, or why
 * branches cannot be computed with this build. To be called once, before any graph is computed. */
const char * edgespec_recurrent_register(const void * within, const struct edgespec_recurrent_operations * operations);

/* What a context needs for trees; null if there are too many contexts. To be freed after the context. */
void * edgespec_tree_new(void);
void edgespec_tree_free(void * tree);
/* The next pass has these rows: `certain` ones that follow the text, each the next one's parent, and then nodes, each
 * after its parent, or with the parent -1: rows that fill the pass. Row i takes the cell `first_cell` + i. What is kept
 * as the state is the one after the certain rows. Returns 0 if that is no such tree. */
int edgespec_tree_begin(void * tree, int32_t rows, int32_t certain, const int32_t * parents, int64_t first_cell);
/* The pass is over. Returns null, or why its branches are wrong. */
const char * edgespec_tree_end(void * tree);
/* Says that a node is about to be computed. */
void edgespec_tree_node(void * tree, void * node);
/* The same as an eval callback of llama.cpp's, with the tree as its data. */
int8_t edgespec_tree_callback(void * node, int8_t ask, void * tree);

#ifdef __cplusplus
}

namespace edgespec {

struct Tensor;
class TensorTraits;

// How a node with a mark is computed; null if the mark is none of a tree.
TensorTraits * recurrent_traits(const Tensor * op);

}  // namespace edgespec
#endif
