#include "neon.h"

namespace edgespec {
static const Registered registered({EDGESPEC_NEON_I8MM, quantize, multiply<Neon<true>>});
}
