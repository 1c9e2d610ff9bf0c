#include "avx2.h"

namespace edgespec {
static const Registered registered({EDGESPEC_AVX2_VNNI, quantize, multiply<Avx2<true>>});
}
