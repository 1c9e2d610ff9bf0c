#include "avx512.h"

namespace edgespec {
static const Registered registered({EDGESPEC_AVX512_VNNI, quantize, multiply<Avx512>});
}
