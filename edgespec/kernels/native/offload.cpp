// Which products a device takes over from the processor: see offload.h.
#include "offload.h"
#include "ggml_abi.h"
#include <cstring>
#include <mutex>

using edgespec::BufferType;
using edgespec::Tensor;

namespace {

typedef bool (*Answer)(void *, const Tensor *);
typedef bool (*TypeAnswer)(void *, const BufferType *);

// A device, and its own functions.
struct Device {
    void * device;
    Answer takes_over, supports;
    TypeAnswer uses;
};

// A type of buffers with rearranged weights.
struct HostType {
    void * type;
    bool (*own)(void *);
};

constexpr int MAX_DEVICES = 64;
Device devices[MAX_DEVICES];
HostType types[MAX_DEVICES];
int count = 0, type_count = 0;
std::mutex installing;
edgespec_sent_operations operations;
thread_local int64_t least_rows = 0;
thread_local bool rearranged_too = false;

constexpr char LAYERS[] = "blk.";  // how the names of their weights begin

// A copy of the output, or of the embeddings that it is tied to, would be larger than all buffers of a device.
bool is_of_layer(const Tensor * weight) { return !strncmp(weight->name, LAYERS, sizeof(LAYERS) - 1); }

// Whoever follows the copies of weights knows them by name, and ggml cuts names that are longer, with that of the device.
constexpr size_t MAX_NAME = 36;

bool reads_long_names(const Tensor * node) {
    for (const Tensor * source : node->src) {
        if (source && is_of_layer(source) && strnlen(source->name, sizeof(source->name)) > MAX_NAME) return true;
    }
    return false;
}

constexpr int64_t MAX_HEAD = 512;  // elements; some models scale all heads at once

// Whether a node scales the queries or keys of single heads, which are where others have rows.
bool scales_heads(const Tensor * node) {
    for (const Tensor * source : node->src) {
        if (!source || !is_of_layer(source) || source->ne[0] > MAX_HEAD) continue;
        if (strstr(source->name, "_q_norm") || strstr(source->name, "_k_norm")) return true;
    }
    return false;
}

// As ggml's backends count them, but for heads.
int64_t rows_of(const Tensor * node) {
    if (node->op == operations.rows) return 0;
    if (node->op == operations.product) return is_of_layer(node->src[0]) ? node->ne[1] : 0;
    if (node->op == operations.indexed_product) return is_of_layer(node->src[0]) ? node->ne[2] : 0;
    const int64_t rows = node->ne[2] * node->ne[3];
    return scales_heads(node) ? rows : node->ne[1] * rows;
}

const Device * find(void * device) {
    for (int i = 0; i < count; i++) {
        if (devices[i].device == device) return &devices[i];
    }
    return nullptr;
}

bool takes_over(void * device, const Tensor * node) {
    if (least_rows > 0) return rows_of(node) >= least_rows && !reads_long_names(node);
    const Device * known = find(device);
    return known && known->takes_over && known->takes_over(device, node);
}

// The scheduler finds the place of an operation by the buffers of its weights, but a view of a weight has none before the
// graph is allocated. What reads one may end up anywhere, with a copy of the view from wherever its weight points to then:
// a layer that is not in memory, or bytes that are rearranged.
bool reads_view_of_weights_elsewhere(const Device & device, const Tensor * node) {
    for (const Tensor * source : node->src) {
        const Tensor * weight = source ? source->view_src : nullptr;
        if (!weight || !weight->buffer || !is_of_layer(weight)) continue;
        if (!device.uses(device.device, weight->buffer->type)) return true;
    }
    return false;
}

bool supports(void * device, const Tensor * node) {
    const Device * known = find(device);
    return known && known->supports(device, node) && !reads_view_of_weights_elsewhere(*known, node);
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

int edgespec_offload_install(void * device, struct edgespec_device_functions * functions,
                             const edgespec_sent_operations * known) {
    const std::lock_guard<std::mutex> guard(installing);
    if (find(device)) return 1;
    if (count == MAX_DEVICES || !functions->supports_op || !functions->supports_buft) return 0;
    operations = *known;
    devices[count++] = {device, (Answer) functions->offload_op, (Answer) functions->supports_op,
                        (TypeAnswer) functions->supports_buft};
    functions->offload_op = (void *) takes_over;
    functions->supports_op = (void *) supports;
    return 1;
}

int edgespec_offload_rearranged(void * type, void ** slot) {
    const std::lock_guard<std::mutex> guard(installing);
    for (int i = 0; i < type_count; i++) {
        if (types[i].type == type) return 1;
    }
    if (type_count == MAX_DEVICES) return 0;
    types[type_count++] = {type, (bool (*)(void *)) *slot};
    *slot = (void *) is_host;
    return 1;
}

void edgespec_offload_from(int64_t rows, int rearranged) {
    least_rows = rows;
    rearranged_too = rearranged != 0;
}
}
