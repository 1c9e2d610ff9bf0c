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
/* Has ggml ask about nodes from now on. Products of packed weights are computed with the best instruction set where no
 * planner says otherwise. */
void edgespec_activate(void);
/* Has output heads that this thread loads from now on and whose weights take 8 bits or more packed in 5 bits (Q5_0), or
 * no longer: for models that only draft, whose every step reads the whole head. */
void edgespec_narrow_heads(int on);
/* Has loaders that this thread runs from now on read weights to where they are to be packed, or no longer. When they have
 * read all, each call of `edgespec_pack_next` packs one, and returns how many there were before it: 0 when all are packed. */
void edgespec_read_in_place(int on);
int64_t edgespec_pack_next(void);
/* How the nodes of a context are computed: with which instruction set (-1: the best one), and whether attention and
 * products of F32 matrices are computed here as well or left to ggml. Null if the instruction set cannot be used here.
 * To be freed after the context. */
void * edgespec_planner_new(int isa, int takes_unpacked);
void edgespec_planner_free(void * planner);
/* Plans the graphs that this thread has ggml compute from now on; null: nothing but products of packed weights is
 * computed here. */
void edgespec_plan_with(void * planner);
/* How often ggml has asked about attention of a planner's graphs that is computed here (`ours`), and about attention and
 * products that are left to it (`left`). */
void edgespec_answers(const void * planner, int64_t * ours, int64_t * left);

#ifdef __cplusplus
}
#endif
