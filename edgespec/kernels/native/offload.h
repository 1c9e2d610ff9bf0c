/* Which operations a device computes of those with weights in memory.
 *
 * Where a model's weights are partly on a device, ggml's scheduler asks the device about every operation whose weights are in
 * memory that is not rearranged. ggml's own answer is a number of rows that is read from the environment when the
 * backend starts. Here it is set for each thread, so for each context that computes.
 */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ggml's numbers of these operations. */
struct edgespec_sent_operations {
    int32_t product, indexed_product, rows;
};

/* A part of ggml's table of a device. */
struct edgespec_device_functions {
    void *supports_op, *supports_buft, *offload_op;
};

/* Replaces the device's functions that say what it takes over and what it supports. It is not to compute what reads views of
 * a layer's weights in memory that it cannot use. A second call for a device does nothing. Returns 0 if there are too many. */
int edgespec_offload_install(void * device, struct edgespec_device_functions * functions,
                             const struct edgespec_sent_operations * operations);
/* Lets weights in buffers of this type be sent, too, where a thread says so: `slot` is the type's function that says whether
 * others can read them. Returns 0 if there are too many. */
int edgespec_offload_rearranged(void * type, void ** slot);
/* Operations of this thread are taken over from so many rows on, but for products with weights outside of layers; 0 leaves
 * it to the device. With `rearranged`, the scheduler copies rearranged weights as they are, and somebody has to write over
 * the copies before they are read. */
void edgespec_offload_from(int64_t rows, int rearranged);

#ifdef __cplusplus
}
#endif
