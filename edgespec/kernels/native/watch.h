/* Watches: at which nodes of a graph somebody wants to be called.
 *
 * llama.cpp's eval callback is asked about every node before a run of nodes is computed, and told when the run has been
 * computed. `edgespec_on_node` is that callback. It answers for nearly all nodes by itself, and calls its handler only
 * where a watch says so. kernels/watch.py does the same in Python, and says what each watch can be told.
 */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct edgespec_watch edgespec_watch;
typedef struct edgespec_gate edgespec_gate;

/* Called about a node for the watch with this number. `ask` is 1 before the node is computed: the result says whether the
 * graph is to stop after it. It is 0 when the graph has stopped after the node. A negative result ends the pass. */
typedef int (*edgespec_handler)(void * node, int watch, int ask);

/* A node that reads a tensor which is watched. */
struct edgespec_reader {
    const void * tensor;
    int32_t at;      /* the node's number in the order of asking */
    char name[64];
    char before[64]; /* the name of the node before it */
};

edgespec_watch * edgespec_watch_new(void);
void edgespec_watch_free(edgespec_watch * watch);

/* Stop after nodes of this name or, with `prefix`, of names that begin so. */
void edgespec_watch_name(edgespec_watch * watch, const char * name, int prefix);
/* Ask about nodes with this operation whose first source has at least so many rows. */
void edgespec_watch_operation(edgespec_watch * watch, int32_t operation, int64_t least_rows);
/* Ask about the first of all nodes in a row whose names end in "-<number>". */
void edgespec_watch_numbers(edgespec_watch * watch);

/* Ask about nodes that read this tensor or are views of it, unless its group is the current one and the node has a mark. */
void edgespec_watch_tensor(edgespec_watch * watch, const void * tensor, int32_t group);
void edgespec_watch_no_tensor(edgespec_watch * watch, const void * tensor);
/* Ask about nodes that read a device's copy of this tensor, which has this name, as about those that read the tensor. */
void edgespec_watch_copies(edgespec_watch * watch, const char * name, const void * tensor);
void edgespec_watch_current(edgespec_watch * watch, int32_t group);
/* What to do about the node with this number and name: 1 stop after it without asking, 0 pass it over, -1 ask. Without
 * `of_copies`, the mark does not hold where the node reads copies of watched tensors. */
void edgespec_watch_mark(edgespec_watch * watch, int32_t at, const char * name, int stop, int of_copies);
void edgespec_watch_unmark(edgespec_watch * watch);
/* Has any reader been passed over since the graph stopped last? It is then not computed yet. */
int edgespec_watch_pending(const edgespec_watch * watch);
/* The readers of the pass in their order; null behind the last one. */
const struct edgespec_reader * edgespec_watch_reader(const edgespec_watch * watch, int number);
/* The number of the node that was asked about last. */
int32_t edgespec_watch_at(const edgespec_watch * watch);

/* Have products with chosen matrices of this stack choose by `indices`, once the choice of their group is known: ask about
 * products that choose by anything else, or too early. A choice holds for a pass. */
void edgespec_watch_redirect(edgespec_watch * watch, int32_t operation, const void * stack, int32_t group, void * indices);
void edgespec_watch_choice(edgespec_watch * watch, int32_t group, const void * chosen);

/* The watches must outlive the gate. */
edgespec_gate * edgespec_gate_new(edgespec_handler handler);
void edgespec_gate_free(edgespec_gate * gate);
void edgespec_gate_watches(edgespec_gate * gate, edgespec_watch * const * watches, int count);
/* A pass begins. */
void edgespec_gate_begin(edgespec_gate * gate);
/* The eval callback; `gate` is its user data. */
int8_t edgespec_on_node(void * node, int8_t ask, void * gate);

#ifdef __cplusplus
}
#endif
