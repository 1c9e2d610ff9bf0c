#include "avx2.h"

namespace edgespec {
static const Registered registered({EDGESPEC_AVX2, quantize, multiply<Avx2<false>>});
}
