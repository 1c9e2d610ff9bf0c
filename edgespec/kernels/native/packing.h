#pragma once
#include <cstdint>

namespace edgespec {

// The arguments are those of edgespec_pack and edgespec_unpack_row.
void pack(int type, const uint8_t * file, int64_t k, int64_t n, int64_t panel0, int64_t panel1, uint8_t * packed);
void unpack_row(int type, const uint8_t * packed, int64_t k, int64_t row, float * out);

}  // namespace edgespec
