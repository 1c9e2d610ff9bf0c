// Branches in layers with a running state.
//
// A tree is decoded as one sequence, breadth first, so that every product has all rows in one pass. Four kinds of nodes
// mix rows, and would take each row for the successor of the one before it:
//
//   attention      Its mask hides what is no ancestor.
//   convolution    Each row is computed from the window of its own path.
//   scan, delta    The state is carried along each path: from a node's parent to the node.
//   copy           What is kept of the convolution's input is the window after the certain rows.
//
// The rows are computed by ggml's own operations, one step of a path at a time. These take rows one after the other
// anyway, so every row has the bits that a chain would give it, and a tree costs what a chain of as many rows costs.
//
// Nodes are marked when they are about to be computed: their `extra` points to the tree. So every thread sees the same
// marks, and several contexts may compute at the same time.
#include "recurrent.h"
#include "attention.h"
#include "ggml_abi.h"
#include "system.h"
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

namespace edgespec {
namespace {

constexpr int F32 = 0, F16 = 1, NONE = 0;
constexpr uint16_t F16_MINUS_INFINITY = 0xFC00;
constexpr uint32_t F32_MINUS_INFINITY = 0xFF800000;
constexpr size_t ALIGNMENT = 64;
constexpr int MAX_TREES = 64;

using Operation = void (*)(const ComputeParams *, Tensor *);
edgespec_recurrent_operations ops{-1, -1, -1, -1, -1, -1};
Operation convolve, scan, delta_net, copy;

struct Tree {
    bool on = false;
    int32_t rows = 0, certain = 0;
    int64_t first_cell = 0;
    std::vector<int32_t> parents;
    std::vector<int32_t> order;   // nodes below the certain rows, each after its parent and that one's earlier branches
    std::vector<int32_t> level;   // of each row: edges from the last certain one; -1 for rows that fill the pass
    int32_t levels = 0;           // of all nodes
    std::vector<uint8_t> sees;    // [row][other row]
    std::vector<const Tensor *> masks;   // that hide what they must
    std::vector<const Tensor *> inputs;  // of convolutions whose window has not been copied yet
    const char * problem = nullptr;

    bool begin(int32_t n_rows, int32_t n_certain, const int32_t * above, int64_t cell) {
        rows = n_rows, certain = n_certain, first_cell = cell, problem = nullptr, levels = 0;
        if (rows < 1 || certain < 1 || certain > rows) return false;
        parents.assign(above, above + rows);
        level.assign(rows, -1);
        order.clear(), inputs.clear(), masks.clear();
        sees.assign((size_t) rows * rows, 0);
        std::vector<std::vector<int32_t>> children(rows);
        for (int32_t i = 0; i < rows; i++) {
            const int32_t parent = parents[i];
            if (i < certain ? parent != i - 1 : parent >= i || (parent >= 0 && (parent < certain - 1 || level[parent] < 0))) {
                return false;
            }
            if (i < certain) {
                level[i] = 0;
            } else if (parent >= 0) {
                level[i] = level[parent] + 1;
                levels = std::max(levels, level[i]);
                children[parent].push_back(i);
            }
            if (parent >= 0) memcpy(&sees[(size_t) i * rows], &sees[(size_t) parent * rows], rows);
            sees[(size_t) i * rows + i] = 1;
        }
        std::vector<int32_t> open(children[certain - 1].rbegin(), children[certain - 1].rend());
        while (!open.empty()) {
            const int32_t node = open.back();
            open.pop_back();
            order.push_back(node);
            open.insert(open.end(), children[node].rbegin(), children[node].rend());
        }
        return on = true;
    }
};

std::atomic<Tree *> live[MAX_TREES];
std::mutex changing;

bool is_live(const void * tree) {
    for (const auto & slot : live) {
        if (slot.load(std::memory_order_relaxed) == tree) return true;
    }
    return false;
}

size_t aligned(size_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
int64_t share(int64_t count, int ith, int nth) { return count * ith / nth; }
const Tree & tree_of(const Tensor * op) { return *(const Tree *) op->extra; }

// Work memory: the certain rows' results and the state after them, and those of one node for each level below.
struct States {
    int64_t result, state;  // floats of a row's result, and of the state
    size_t certain, node;   // bytes
    int32_t levels;

    States(const Tree & tree, int64_t result_, int64_t state_)
        : result(result_), state(state_), certain(aligned((tree.certain * result + state) * sizeof(float))),
          node(aligned((result + state) * sizeof(float))), levels(tree.levels) {}

    size_t bytes() const { return ALIGNMENT + certain + levels * node; }
    float * of(char * work, int32_t level) const {
        char * begin = (char *) aligned((size_t) work);
        return (float *) (level ? begin + certain + (level - 1) * node : begin);
    }
    // The state behind the results.
    float * state_of(const Tree & tree, char * work, int32_t level) const {
        return of(work, level) + (level ? 1 : tree.certain) * result;
    }
};

// The same tensor from row `row` on, `count` rows of it, along a dimension.
Tensor rows_of(const Tensor * t, int dimension, int64_t row, int64_t count) {
    Tensor part = *t;
    part.data += row * t->nb[dimension];
    part.ne[dimension] = count;
    return part;
}

// Gated delta rule. Threads take heads as they come, so each step ends with a barrier.
class DeltaNet : public TensorTraits {
    static States states(const Tensor * op) {
        const Tensor * v = op->src[2];
        return States(tree_of(op), v->ne[0] * v->ne[1], v->ne[0] * v->ne[0] * v->ne[1]);
    }

  public:
    bool work_size(int n_threads, const Tensor * op, size_t & size) override {
        size = states(op).bytes() + ALIGNMENT + (ALIGNMENT + n_threads * op->src[2]->ne[0]) * sizeof(float);
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Tree & tree = tree_of(op);
        const States plan = states(op);
        ComputeParams own = *params;
        own.work = params->work + aligned(plan.bytes());
        own.work_size = params->work_size - aligned(plan.bytes());
        const auto step = [&](int64_t row, int64_t count, float * before, int32_t level) {
            Tensor node = *op, parts[6];
            for (int i = 0; i < 6; i++) {
                parts[i] = i < 5 ? rows_of(op->src[i], 2, row, count) : *op->src[i];
                node.src[i] = &parts[i];
            }
            if (before) parts[5].data = (char *) before;
            node.data = (char *) plan.of(params->work, level);
            node.extra = nullptr;
            delta_net(&own, &node);
            wait_for_all(params);
            const int64_t begin = share(count * plan.result, params->ith, params->nth);
            const int64_t end = share(count * plan.result, params->ith + 1, params->nth);
            memcpy((float *) op->data + row * plan.result + begin, (float *) node.data + begin, (end - begin) * sizeof(float));
        };
        step(0, tree.certain, nullptr, 0);
        for (int32_t node : tree.order) {
            step(node, 1, plan.state_of(tree, params->work, tree.level[node] - 1), tree.level[node]);
        }
        clear_others(params, tree, op, plan.result);
        const int64_t begin = share(plan.state, params->ith, params->nth), end = share(plan.state, params->ith + 1, params->nth);
        memcpy((float *) op->data + tree.rows * plan.result + begin, plan.state_of(tree, params->work, 0) + begin,
               (end - begin) * sizeof(float));
        return true;
    }

    // Rows that fill the pass: nobody reads them, but they must be numbers.
    static void clear_others(const ComputeParams * params, const Tree & tree, Tensor * op, int64_t result) {
        for (int32_t row = tree.certain; params->ith == 0 && row < tree.rows; row++) {
            if (tree.level[row] < 0) memset((float *) op->data + row * result, 0, result * sizeof(float));
        }
    }
};

// Selective scan. Each thread has the same heads in every step, so none waits for another.
class Scan : public TensorTraits {
    static States states(const Tensor * op) {
        const Tensor *s = op->src[0], *x = op->src[1];
        return States(tree_of(op), x->ne[0] * x->ne[1], s->ne[0] * x->ne[0] * x->ne[1]);
    }

  public:
    bool work_size(int, const Tensor * op, size_t & size) override {
        size = states(op).bytes();
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Tree & tree = tree_of(op);
        const States plan = states(op);
        const Tensor *s = op->src[0], *x = op->src[1];
        const int heads = (int) x->ne[1], each = (heads + params->nth - 1) / params->nth;
        const int64_t head0 = std::min(each * params->ith, heads), head1 = std::min(each * (params->ith + 1), heads);
        const int64_t of_head = x->ne[0], state_of_head = s->ne[0] * x->ne[0];
        int32_t first = 0;
        const auto step = [&](int64_t row, int64_t count, float * before, int32_t level) {
            Tensor node = *op, parts[7];
            for (int i = 0; i < 7; i++) {
                parts[i] = *op->src[i];
                node.src[i] = &parts[i];
            }
            for (int i : {1, 4, 5}) parts[i] = rows_of(op->src[i], 2, row, count);
            parts[2] = rows_of(op->src[2], 1, row, count);
            if (before) {
                parts[0].data = (char *) before;
                parts[0].ne[3] = 1;
                parts[6].data = (char *) &first;
            }
            node.data = (char *) plan.of(params->work, level);
            node.ne[0] = count * plan.result + plan.state, node.ne[1] = node.ne[2] = node.ne[3] = 1;
            node.extra = nullptr;
            scan(params, &node);
            for (int64_t i = 0; i < count; i++) {
                const int64_t begin = head0 * of_head;
                memcpy((float *) op->data + (row + i) * plan.result + begin, (float *) node.data + i * plan.result + begin,
                       (head1 - head0) * of_head * sizeof(float));
            }
        };
        step(0, tree.certain, nullptr, 0);
        for (int32_t node : tree.order) {
            step(node, 1, plan.state_of(tree, params->work, tree.level[node] - 1), tree.level[node]);
        }
        DeltaNet::clear_others(params, tree, op, plan.result);
        const int64_t begin = head0 * state_of_head;
        memcpy((float *) op->data + tree.rows * plan.result + begin, plan.state_of(tree, params->work, 0) + begin,
               (head1 - head0) * state_of_head * sizeof(float));
        return true;
    }
};

// A short convolution over the last rows. Each thread has the same channels in every step.
class Convolution : public TensorTraits {
  public:
    bool work_size(int, const Tensor * op, size_t & size) override {
        size = ALIGNMENT + op->src[1]->ne[0] * op->src[0]->ne[1] * sizeof(float);
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Tree & tree = tree_of(op);
        const Tensor * input = op->src[0];
        const int64_t window = op->src[1]->ne[0], kept = window - 1, channels = input->ne[1];
        const int64_t each = (channels + params->nth - 1) / params->nth;
        const int64_t begin = std::min(each * params->ith, channels), end = std::min(each * (params->ith + 1), channels);
        Tensor node = *op, part = *input;
        node.extra = nullptr;
        node.ne[1] = tree.certain;
        convolve(params, &node);
        node.src[0] = &part;
        node.ne[1] = 1;
        part.data = (char *) aligned((size_t) params->work);
        part.ne[0] = window;
        part.nb[1] = window * sizeof(float);
        part.nb[2] = part.nb[3] = part.nb[1] * channels;
        std::vector<int64_t> columns(window);
        for (int32_t row : tree.order) {
            int64_t at = row;
            for (int64_t i = window; i-- > 0;) {
                columns[i] = kept + at;
                at = at < tree.certain ? at - 1 : tree.parents[at];  // the columns of the text come before the rows'
            }
            for (int64_t c = begin; c < end; c++) {
                const float * from = (const float *) (input->data + c * input->nb[1]);
                float * to = (float *) part.data + c * window;
                for (int64_t i = 0; i < window; i++) to[i] = from[columns[i]];
            }
            node.data = op->data + row * op->nb[1];
            convolve(params, &node);
        }
        for (int32_t row = tree.certain; row < tree.rows; row++) {
            if (tree.level[row] < 0 && end > begin) {
                memset(op->data + row * op->nb[1] + begin * op->nb[0], 0, (end - begin) * sizeof(float));
            }
        }
        return true;
    }
};

// The copy that keeps the end of a convolution's input.
class Window : public TensorTraits {
  public:
    bool work_size(int, const Tensor *, size_t & size) override {
        size = 0;
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Tree & tree = tree_of(op);
        Tensor node = *op, part = *op->src[0];
        part.data -= (tree.rows - tree.certain) * (int64_t) sizeof(float);
        node.src[0] = &part;
        node.extra = nullptr;
        copy(params, &node);
        return true;
    }
};

DeltaNet delta_net_of;
Scan scan_of;
Convolution convolution_of;
Window window_of;

bool one_sequence(const Tensor * t) { return t->ne[3] == 1; }

void hide_others(Tree & tree, const Tensor * mask) {
    while (mask && mask->op != NONE) mask = mask->src[0];  // conversions of the mask come later
    // Layers share masks, and may describe them in other ways meanwhile.
    if (std::find(tree.masks.begin(), tree.masks.end(), mask) != tree.masks.end()) return;
    if (!mask || (mask->type != F16 && mask->type != F32) || mask->ne[1] < tree.rows || mask->ne[2] * mask->ne[3] != 1 ||
        mask->ne[0] < tree.first_cell + tree.rows) {
        tree.problem = "the attention's mask has another form";
        return;
    }
    const bool half = mask->type == F16;
    const size_t size = half ? sizeof F16_MINUS_INFINITY : sizeof F32_MINUS_INFINITY;
    const void * never = half ? (const void *) &F16_MINUS_INFINITY : &F32_MINUS_INFINITY;
    const auto hidden = [&](const char * at) { return !memcmp(at, never, size); };
    for (int64_t i = 0; i < tree.rows; i++) {
        char * row = mask->data + i * mask->nb[1] + tree.first_cell * mask->nb[0];
        if (hidden(row + i * mask->nb[0]) ||
            (mask->ne[0] > tree.first_cell + tree.rows && !hidden(row + tree.rows * mask->nb[0]))) {
            tree.problem = "the rows are in other cells";
            return;
        }
        for (int64_t j = 0; j < tree.rows; j++) {
            if (tree.sees[i * tree.rows + j]) continue;
            memcpy(row + j * mask->nb[0], never, size);
        }
    }
    tree.masks.push_back(mask);
}

void reached(Tree & tree, Tensor * node) {
    const int op = node->op;
    if (op == ops.attention) {
        if (tree.on) hide_others(tree, node->src[3]);
        return;
    }
    if (op != ops.convolution && op != ops.scan && op != ops.delta_net && op != ops.copy) return;
    if (node->extra == &tree) node->extra = nullptr;
    if (!tree.on) return;
    bool known = true;
    if (op == ops.convolution) {
        const Tensor * input = node->src[0];
        known = node->ne[1] == tree.rows && node->ne[2] == 1 && one_sequence(node) &&
                input->ne[0] == tree.rows + node->src[1]->ne[0] - 1;
        // Its window is copied before it is computed.
        const auto found = std::find(tree.inputs.begin(), tree.inputs.end(), input);
        if (found == tree.inputs.end()) known = false;
        else tree.inputs.erase(found);
    } else if (op == ops.scan) {
        const Tensor * x = node->src[1];
        known = x->ne[2] == tree.rows && one_sequence(x) && node->op_params[0] == 1;
    } else if (op == ops.delta_net) {
        const Tensor * v = node->src[2];
        known = v->ne[2] == tree.rows && one_sequence(v) && node->op_params[0] == 1;
    } else {
        const Tensor *part = node->src[0], *whole = part->view_src;
        if (!whole || whole->op != ops.concat) return;
        known = whole->type == F32 && whole->ne[0] == part->ne[0] + tree.rows && part->nb[0] == sizeof(float) &&
                part->view_offs == tree.rows * sizeof(float) && whole->ne[2] == 1 && one_sequence(whole);
        tree.inputs.push_back(whole);
    }
    if (known) node->extra = &tree;
    else tree.problem = "a layer keeps its state in another form";
}

}  // namespace

TensorTraits * recurrent_traits(const Tensor * op) {
    if (!is_live(op->extra)) return nullptr;
    if (op->op == ops.delta_net) return &delta_net_of;
    if (op->op == ops.scan) return &scan_of;
    if (op->op == ops.convolution) return &convolution_of;
    return op->op == ops.copy ? &window_of : nullptr;
}

}  // namespace edgespec

using namespace edgespec;

extern "C" {

const char * edgespec_recurrent_register(const void * within, const edgespec_recurrent_operations * operations) {
    LoadedLibrary library;
    if (!library.open(within)) return "its processor backend cannot be opened";
    convolve = (Operation) library.find("ggml_compute_forward_ssm_conv");
    scan = (Operation) library.find("ggml_compute_forward_ssm_scan");
    delta_net = (Operation) library.find("ggml_compute_forward_gated_delta_net");
    copy = (Operation) library.find("ggml_compute_forward_cpy");
    if (!convolve || !scan || !delta_net || !copy) return "it hides its operations on states";
    ops = *operations;
    return nullptr;
}

void * edgespec_tree_new(void) {
    const std::lock_guard<std::mutex> lock(changing);
    for (auto & slot : live) {
        if (!slot.load()) {
            slot = new Tree;
            return slot.load();
        }
    }
    return nullptr;
}

void edgespec_tree_free(void * tree) {
    const std::lock_guard<std::mutex> lock(changing);
    for (auto & slot : live) {
        if (tree && slot.load() == tree) {
            slot = nullptr;
            delete (Tree *) tree;
        }
    }
}

int edgespec_tree_begin(void * tree, int32_t rows, int32_t certain, const int32_t * parents, int64_t first_cell) {
    return ((Tree *) tree)->begin(rows, certain, parents, first_cell);
}

const char * edgespec_tree_end(void * tree) {
    Tree & t = *(Tree *) tree;
    t.on = false;
    return t.problem;
}

void edgespec_tree_node(void * tree, void * node) { reached(*(Tree *) tree, (Tensor *) node); }

int8_t edgespec_tree_callback(void * node, int8_t ask, void * tree) {
    if (ask) reached(*(Tree *) tree, (Tensor *) node);
    return !ask;
}
}
