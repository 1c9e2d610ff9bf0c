// AMX's tile instructions, or what they compute in plain C++ (EDGESPEC_EMULATED_TILES), to test kernels without AMX.
// Tiles are named by literal numbers, as the compiler's macros want them.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace edgespec {
namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// On Windows, a program must ask for AMX, which nothing here does, and GCC's instructions take strides of 32 bits.
#if defined(EDGESPEC_EMULATED_TILES) || defined(_WIN32)

struct EmulatedTiles {
    TileConfig config;
    uint8_t data[8][16][64];

    void load(int tile, const void * from, size_t stride) {
        memset(data[tile], 0, sizeof data[tile]);
        for (int r = 0; r < config.rows[tile]; r++)
            memcpy(data[tile][r], (const uint8_t *) from + r * stride, config.row_bytes[tile]);
    }
    void store(int tile, void * to, size_t stride) {
        for (int r = 0; r < config.rows[tile]; r++)
            memcpy((uint8_t *) to + r * stride, data[tile][r], config.row_bytes[tile]);
    }
    void multiply(int to, int a, int b, bool is_signed) {
        for (int m = 0; m < config.rows[to]; m++)
            for (int n = 0; n < config.row_bytes[to] / 4; n++) {
                int32_t sum;
                memcpy(&sum, data[to][m] + n * 4, 4);
                for (int k = 0; k < config.row_bytes[a]; k++) {
                    const uint8_t weight = data[b][k / 4][n * 4 + k % 4];
                    sum += (int8_t) data[a][m][k] * (is_signed ? (int8_t) weight : (int) weight);
                }
                memcpy(data[to][m] + n * 4, &sum, 4);
            }
    }
};
inline thread_local EmulatedTiles emulated;

#define TILE_LOAD(tile, from, stride) emulated.load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated.store(tile, to, stride)
#define TILE_ZERO(tile) memset(emulated.data[tile], 0, sizeof emulated.data[tile])
#define TILE_SIGNED(to, a, b) emulated.multiply(to, a, b, true)     // signed activations, signed weights
#define TILE_UNSIGNED(to, a, b) emulated.multiply(to, a, b, false)  // signed activations, unsigned weights
inline void store_config(TileConfig * config) { *config = emulated.config; }
inline void load_config(const TileConfig * config) { emulated.config = *config; }
inline void release_tiles() {}

#else

// Compilers do not know that tile instructions read and write the memory behind a pointer, and may drop stores to it
// (GCC bug 114098). A statement that takes the pointer and may do anything keeps them.
#define ANYTHING_MAY_HAPPEN_TO(pointer) __asm__ volatile("" ::"r"(pointer) : "memory")
#define TILE_LOAD(tile, from, stride) \
    do { ANYTHING_MAY_HAPPEN_TO(from); _tile_loadd(tile, from, stride); } while (0)
#define TILE_STORE(tile, to, stride) \
    do { _tile_stored(tile, to, stride); ANYTHING_MAY_HAPPEN_TO(to); } while (0)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_SIGNED(to, a, b) _tile_dpbssd(to, a, b)
#define TILE_UNSIGNED(to, a, b) _tile_dpbsud(to, a, b)
inline void store_config(TileConfig * config) {
    _tile_storeconfig(config);
    ANYTHING_MAY_HAPPEN_TO(config);
}
inline void load_config(const TileConfig * config) {
    ANYTHING_MAY_HAPPEN_TO(config);
    _tile_loadconfig(config);
}
inline void release_tiles() { _tile_release(); }

#endif

// Tiles 0 and 1 take `rows` rows of activations of `depth` values, 2 and 3 weights, 4 to 7 sums.
// ggml loads its own configuration once for each thread, so ours must not outlive a product.
class Tiles {
  public:
    Tiles(int rows, int depth) {
        store_config(&before_);
        TileConfig config;
        for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = (uint8_t) rows;
        config.row_bytes[0] = config.row_bytes[1] = (uint16_t) depth;
        config.rows[2] = config.rows[3] = (uint8_t) (depth / 4);
        load_config(&config);
    }
    ~Tiles() {
        if (before_.palette) load_config(&before_);
        else release_tiles();
    }
    Tiles(const Tiles &) = delete;

  private:
    TileConfig before_;
};

}  // namespace
}  // namespace edgespec
