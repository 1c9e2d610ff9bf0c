// Products of F32 matrices that are part of a model and lie in plain memory: routers of mixtures above all. ggml adds
// their products in an order that depends on the number of rows; see float_kernels.h for the order here.
#include "floats.h"
#include "planner.h"
#include "products.h"

namespace edgespec {
namespace {

constexpr int F32 = 0, NONE = 0;

FloatKernel kernels[EDGESPEC_ISA_COUNT];

class FloatTraits : public TensorTraits {
  public:
    bool work_size(int, const Tensor *, size_t & size) override {
        size = 0;
        return true;
    }

    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Tensor *w = op->src[0], *x = op->src[1];
        const int64_t n = w->ne[1], first = n * params->ith / params->nth, last = n * (params->ith + 1) / params->nth;
        const FloatKernel kernel = kernels[isa_of(op)];
        FloatProduct p{};
        p.k = w->ne[0], p.rows = x->ne[1];
        p.weight_stride = (int64_t) (w->nb[1] / sizeof(float));
        p.activation_stride = (int64_t) (x->nb[1] / sizeof(float));
        p.result_stride = (int64_t) (op->nb[1] / sizeof(float));
        for (int64_t i = 0; i < x->ne[2] * x->ne[3]; i++) {
            const int64_t i2 = i % x->ne[2], i3 = i / x->ne[2];
            // A matrix may serve several slices of the activations.
            p.weights = (const float *) (w->data + i2 / (x->ne[2] / w->ne[2]) * w->nb[2] + i3 / (x->ne[3] / w->ne[3]) * w->nb[3]);
            p.activations = (const float *) (x->data + i2 * x->nb[2] + i3 * x->nb[3]);
            p.result = (float *) (op->data + i2 * op->nb[2] + i3 * op->nb[3]);
            kernel(p, first, last);
        }
        return true;
    }
};

FloatTraits traits;

bool dense_rows(const Tensor * t) { return t->type == F32 && t->nb[0] == sizeof(float) && t->nb[1] % sizeof(float) == 0; }

}  // namespace

TensorTraits & float_product_traits() { return traits; }

bool can_multiply_floats(const Tensor * op, int isa) {
    const Tensor *w = op->src[0], *x = op->src[1];
    const bool of_model = w->op == NONE && !w->view_src;
    return of_model && kernels[isa] && dense_rows(w) && dense_rows(x) && dense_rows(op);
}

void add_float_kernel(FloatKernel kernel, const int * isas, int n_isas) {
    for (int i = 0; i < n_isas; i++) kernels[isas[i]] = kernel;
}

}  // namespace edgespec
