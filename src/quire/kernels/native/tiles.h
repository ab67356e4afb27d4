/* AMX tiles: eight registers of 16 rows of 64 bytes. TDPBF16PS adds, to 16 x 16 float32 sums, the product of 16 x 32
   bfloat16 (rows as they lie in memory) and 32 x 16 stored as [16 pairs][16 columns][2]. */

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAVE_TILES 1
#endif

enum { STEP = 32, TILE = 512 }; /* inputs per tile, its bfloat16 elements */

#ifdef HAVE_TILES

typedef struct __attribute__((aligned(64))) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Tiles 0-3 are sums (upper left, upper right, lower left, lower right), 4-5 rows of the left factor (upper, lower),
   6-7 columns of the right one. `upper`, `lower`: rows of the two halves, 1 to 16. */
static void configure_tiles(long upper, long lower) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = 16;
    }
    config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)upper;
    config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)lower;
    _tile_loadconfig(&config);
}

/* AMX state is off until a process asks for it (Linux: arch_prctl ARCH_REQ_XCOMP_PERM, 18 = tile data). */
int quire_enable_amx(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }

#endif
