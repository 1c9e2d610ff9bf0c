#include "neon.h"

namespace edgespec {
static const Registered registered({EDGESPEC_NEON_DOTPROD, quantize, multiply<Neon<false>>});
}
