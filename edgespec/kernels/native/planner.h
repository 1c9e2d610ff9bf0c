// How the nodes of a context's graphs are computed: fixed when the context is made, so that contexts of one process
// which differ in this do not disturb each other.
//
// A thread that has ggml compute a graph names the planner first. ggml plans every node in that thread, and nodes are
// marked then: their `extra` points to the planner if they are computed here. All threads see the same marks.
#pragma once
#include "ggml_abi.h"

namespace edgespec {

struct Planner {
    int isa;             // instruction set
    bool takes_unpacked; // attention and products of F32 matrices are computed here, too
    int64_t attention = 0, left = 0;  // how often ggml has asked about attention computed here, and nodes left to it
};

// The instruction set of a node that has been planned.
int isa_of(const Tensor * op);

}  // namespace edgespec
