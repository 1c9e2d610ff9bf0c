#include "avx512.h"

namespace edgespec {
bool multiply_avx512(int type, const Work & work) { return multiply<Avx512>(type, work); }
static const Registered registered({EDGESPEC_AVX512_VNNI, quantize, multiply_avx512});
}
