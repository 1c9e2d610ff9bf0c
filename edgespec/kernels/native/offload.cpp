// Which products a device takes over from the processor: see offload.h.
#include "offload.h"
#include "ggml_abi.h"
#include <cstring>

using edgespec::Tensor;

namespace {

typedef bool (*Answer)(void *, const Tensor *);

struct Device {
    void * device;
    Answer own;
};

// A type of buffers with rearranged weights.
struct HostType {
    void * type;
    bool (*own)(void *);
};

constexpr int MOST = 64;
Device devices[MOST];
HostType types[MOST];
int count = 0, type_count = 0;
edgespec_sent_operations operations;
thread_local int64_t least_rows = 0;
thread_local bool rearranged_too = false;

constexpr char LAYERS[] = "blk.";  // how the names of their weights begin

// A copy of the output, or of the embeddings that it is tied to, would be larger than all buffers of a device.
bool is_of_layer(const Tensor * weight) { return !strncmp(weight->name, LAYERS, sizeof(LAYERS) - 1); }

// Whoever follows the copies of weights knows them by name, and ggml cuts names that are longer, with that of the device.
constexpr size_t LONGEST_NAME = 36;

// Copies of views have names of their own.
bool reads_unnamed_weights(const Tensor * node) {
    for (const Tensor * source : node->src) {
        const Tensor * weight = source && source->view_src ? source->view_src : source;
        if (!weight || !is_of_layer(weight)) continue;
        if (weight != source || strnlen(weight->name, sizeof(weight->name)) > LONGEST_NAME) return true;
    }
    return false;
}

// As ggml's backends count them.
int64_t rows_of(const Tensor * node) {
    if (node->op == operations.rows) return 0;
    if (node->op == operations.product) return is_of_layer(node->src[0]) ? node->ne[1] : 0;
    if (node->op == operations.indexed_product) return is_of_layer(node->src[0]) ? node->ne[2] : 0;
    return node->ne[1] * node->ne[2] * node->ne[3];
}

bool takes_over(void * device, const Tensor * node) {
    if (least_rows > 0) return rows_of(node) >= least_rows && !reads_unnamed_weights(node);
    for (int i = 0; i < count; i++) {
        if (devices[i].device == device) return devices[i].own && devices[i].own(device, node);
    }
    return false;
}

// The scheduler asks devices only about weights in memory that they could read.
bool is_host(void * type) {
    if (rearranged_too) return true;
    for (int i = 0; i < type_count; i++) {
        if (types[i].type == type) return types[i].own && types[i].own(type);
    }
    return false;
}

}  // namespace

extern "C" {

int edgespec_offload_install(void * device, void ** slot, const edgespec_sent_operations * known) {
    for (int i = 0; i < count; i++) {
        if (devices[i].device == device) return 1;
    }
    if (count == MOST) return 0;
    operations = *known;
    devices[count++] = {device, (Answer) *slot};
    *slot = (void *) takes_over;
    return 1;
}

int edgespec_offload_rearranged(void * type, void ** slot) {
    for (int i = 0; i < type_count; i++) {
        if (types[i].type == type) return 1;
    }
    if (type_count == MOST) return 0;
    types[type_count++] = {type, (bool (*)(void *)) *slot};
    *slot = (void *) is_host;
    return 1;
}

void edgespec_offload_from(int64_t rows, int rearranged) {
    least_rows = rows;
    rearranged_too = rearranged != 0;
}
}
