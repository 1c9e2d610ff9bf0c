/* The plug: a buffer type of ggml's processor backend whose weights are packed, and the nodes that read them.
 *
 * ggml asks its extra buffer types about every node of a graph: when it plans the work memory, and in every thread when
 * it computes. So nothing stops a graph, and no callback is needed. Where the type has been registered but is not
 * active, it is passed over.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ggml's numbers of operations. */
struct edgespec_operations {
    int32_t product, indexed_product, rows, attention;
};

/* Adds the buffer type to ggml's extra ones, as the first of them.
 *
 * `within` is any address in the library of ggml's processor backend, `device` its device. Returns null, or why this
 * build cannot be plugged into. To be called once, before any graph is computed. */
const char * edgespec_register(const void * within, void * device, const struct edgespec_operations * operations);
/* The buffer type; valid whether or not it is registered. */
void * edgespec_buffer_type(void);
/* Has ggml ask about nodes from now on; products use the best instruction set unless another was chosen. */
void edgespec_activate(void);
/* Chooses the instruction set of all products from now on; -1 for the best. Returns 0 if it cannot be used here. */
int edgespec_use_isa(int isa);
/* Computes attention, and products of F32 matrices, as well from now on (1), or leaves them to ggml (0). */
void edgespec_take_unpacked(int take);
/* How often ggml has asked about attention that is computed here (`ours`), and about attention and products that are
 * left to it (`left`). */
void edgespec_answers(int64_t * ours, int64_t * left);

#ifdef __cplusplus
}
#endif
