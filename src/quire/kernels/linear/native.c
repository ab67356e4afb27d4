#ifdef HAVE_TILES

/* y = x @ weight.T + bias in bfloat16 on AMX tiles, for any number of rows, with one packed weight.

   Packed weight: groups of 32 output columns; a group is, for every 32 inputs in order, two tiles of 16 columns; a tile
   is [16 pairs of inputs][16 columns][2], 1 KiB, as TDPBF16PS reads it. So a group is one contiguous stream, which is
   what a decode is bound by: it reads every weight once at the speed of memory.

   A product of 32 rows x 32 columns keeps its four sums in tiles over all inputs, in order. So a row's result depends
   on that row alone, for any number of rows. */

enum { GROUP = 32, PANEL = 32 };                    /* columns, rows */
enum { OUT_BF16 = 0, OUT_F32 = 1, OUT_GATED = 2 };  /* see quire_linear_bf16 */
enum { BLOCK_BYTES = 1 << 20, MAX_BLOCK = 512 };    /* rows of x that stay in the second-level cache */
enum { CHUNK = 8 };                                 /* steps of a weight that stay in the first-level cache */

typedef struct LinearJob {
    Tasks tasks;
    const bf16 *x, *weight, *bias, *residual;
    void *y;
    long rows, cols, steps, x_stride, block_rows, num_groups; /* steps: inputs / STEP */
    int out, act;
} LinearJob;

/* sums [32][32] += up to 32 rows of x times a group of columns, over `steps`. `both`: there are rows in the lower half.
   `fresh`: the sums start at zero. `coming`: weight that is needed soon, of which `lines` are fetched in every step:
   spread out, they take a third less time than all at once (128 rows). */
INLINE void multiply(const LinearJob *job, const bf16 *x, const bf16 *w, long steps, int both, int fresh,
                     const char *coming, long lines, float *sums) {
    const long stride = job->x_stride * (long)sizeof(bf16), pitch = GROUP * sizeof(float);
    const bf16 *below = x + 16 * job->x_stride;
    float *sums_below = sums + 16 * GROUP;
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, pitch);
        _tile_loadd(1, sums + 16, pitch);
        _tile_loadd(2, sums_below, pitch);
        _tile_loadd(3, sums_below + 16, pitch);
    }
    for (long k = 0; k < steps; k++) {
        for (long line = 0; line < lines; line++, coming += 64) _mm_prefetch(coming, _MM_HINT_T1);
        _tile_loadd(6, w, 64);
        _tile_loadd(4, x, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, below, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        w += 2 * TILE;
        x += STEP;
        below += STEP;
    }
    _tile_stored(0, sums, pitch);
    _tile_stored(1, sums + 16, pitch);
    if (both) {
        _tile_stored(2, sums_below, pitch);
        _tile_stored(3, sums_below + 16, pitch);
    }
}

/* Prefetch, for writing, the cache lines of y that `finish` will write: they lie a row apart, mostly in main memory. */
static inline void expect(const LinearJob *job, long row, long rows, long group) {
    const long width = job->out == OUT_GATED ? GROUP / 2 : GROUP, size = job->out == OUT_F32 ? 4 : 2;
    const char *to = (const char *)job->y + (row * job->cols + group * width) * size;
    for (long i = 0; i < rows; i++, to += job->cols * size) {
        __builtin_prefetch(to, 1);
        if (job->out == OUT_F32) __builtin_prefetch(to + 64, 1);
    }
}

/* Sums [rows][32] -> y at `row`, columns of `group`. */
static void finish(const LinearJob *job, const float *sums, long row, long rows, long group) {
    const long width = job->out == OUT_GATED ? GROUP / 2 : GROUP;
    const long at = group * width, left = job->cols - at;
    const Lanes low = lanes_of(left), high = lanes_of(left - 16);
    __m512 bias_low = _mm512_setzero_ps(), bias_high = _mm512_setzero_ps();
    if (job->bias) {
        bias_low = load(job->bias, at, low, 1);
        if (job->out == OUT_GATED) bias_high = load(job->bias, job->cols + at, low, 1);
        else bias_high = load(job->bias, at + 16, high, 1);
    }
    for (long i = 0; i < rows; i++, sums += GROUP) {
        __m512 a = _mm512_add_ps(_mm512_load_ps(sums), bias_low);
        __m512 b = _mm512_add_ps(_mm512_load_ps(sums + 16), bias_high);
        const long to = (row + i) * job->cols + at;
        if (job->residual) {
            a = _mm512_add_ps(a, load(job->residual, to, low, 1));
            b = _mm512_add_ps(b, load(job->residual, to + 16, high, 1));
        }
        if (job->out == OUT_F32) {
            _mm512_mask_storeu_ps((float *)job->y + to, low, a);
            _mm512_mask_storeu_ps((float *)job->y + to + 16, high, b);
        } else if (job->out == OUT_GATED) {
            store(job->y, to, low, gated_by(a, b, job->act), 1);
        } else {
            store(job->y, to, low, a, 1);
            store(job->y, to + 16, high, b, 1);
        }
    }
}

/* At most 32 rows: a task is a group of columns, read once, front to back. */
static void few_rows_tasks(void *argument) {
    LinearJob *job = argument;
    float sums[PANEL * GROUP] __attribute__((aligned(64)));
    const long top = job->rows < 16 ? job->rows : 16, bottom = job->rows - top;
    configure_tiles(top, bottom ? bottom : 1);
    long group;
    while ((group = claim(&job->tasks)) >= 0) {
        const bf16 *w = job->weight + group * job->steps * 2 * TILE;
        if (bottom) multiply(job, job->x, w, job->steps, 1, 1, NULL, 0, sums);
        else multiply(job, job->x, w, job->steps, 0, 1, NULL, 0, sums);
        finish(job, sums, 0, job->rows, group);
    }
    _tile_release();
}

/* Many rows: a task is a group of columns with a block of rows that stays in the second-level cache. CHUNK steps of the
   weight (16 KiB) stay in the first-level cache while the rows stream past; the next ones are fetched meanwhile. */
static void many_rows_tasks(void *argument) {
    LinearJob *job = argument;
    float sums[MAX_BLOCK * GROUP] __attribute__((aligned(64)));
    configure_tiles(16, 16);
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long block = task / job->num_groups, group = task % job->num_groups;
        const long first = block * job->block_rows, end = first + job->block_rows;
        const long rows = (end < job->rows ? end : job->rows) - first, panels = (rows + PANEL - 1) / PANEL;
        const bf16 *x = job->x + first * job->x_stride;
        const bf16 *w = job->weight + group * job->steps * 2 * TILE;
        const long lines = (2 * TILE / 32 + panels - 1) / panels;
        for (long k = 0; k < job->steps; k += CHUNK, x += CHUNK * STEP, w += CHUNK * 2 * TILE) {
            const long steps = job->steps - k < CHUNK ? job->steps - k : CHUNK;
            const int last = k + CHUNK >= job->steps;
            for (long panel = 0; panel < panels; panel++) {
                const long row = panel * PANEL, count = rows - row < PANEL ? rows - row : PANEL;
                const bf16 *from = x + row * job->x_stride;
                const char *coming = (const char *)(w + CHUNK * 2 * TILE) + panel * lines * CHUNK * 64;
                float *to = sums + row * GROUP;
                if (last) expect(job, first + row, count, group);
                if (count == PANEL) {
                    multiply(job, from, w, steps, 1, k == 0, coming, lines, to);
                } else {
                    configure_tiles(count < 16 ? count : 16, count > 16 ? count - 16 : 1);
                    multiply(job, from, w, steps, count > 16, k == 0, coming, lines, to);
                    configure_tiles(16, 16);
                }
                if (last) finish(job, to, first + row, count, group);
            }
        }
    }
    _tile_release();
}

/* x [rows, inner] with a stride between rows, weight packed, bias [cols] or NULL -> y.

   out       0: y [rows, cols] bfloat16;  1: y [rows, cols] float32;
             2: y [rows, cols] bfloat16 = gated_of(gate, up), where the packed weight has groups of 16 gate and 16
                up columns (quire_pack_bf16 with gated) and bias is [2 * cols], gate's first
   act       activation of gate and up, 0 if out is not 2
   residual  [rows, cols] to be added to y, with out 0 or 1, or NULL
   inner is a multiple of 32. */
void quire_linear_bf16(const bf16 *x, const bf16 *weight, const bf16 *bias, const bf16 *residual, void *y, long rows,
                       long cols, long inner, long x_stride, int out, int act, int threads) {
    const long width = out == OUT_GATED ? GROUP / 2 : GROUP;
    if (rows == 0) return; /* no tile can be configured to have no rows */
    LinearJob job = {.x = x, .weight = weight, .bias = bias, .residual = residual, .y = y, .rows = rows, .cols = cols,
                     .steps = inner / STEP, .x_stride = x_stride, .num_groups = (cols + width - 1) / width, .out = out,
                     .act = act};
    job.block_rows = BLOCK_BYTES / (inner * (long)sizeof(bf16)) / PANEL * PANEL;
    if (job.block_rows < PANEL) job.block_rows = PANEL;
    if (job.block_rows > MAX_BLOCK) job.block_rows = MAX_BLOCK;
    const int many = rows > PANEL;
    job.tasks.count = job.num_groups * (many ? (rows + job.block_rows - 1) / job.block_rows : 1);
    RUN(many ? many_rows_tasks : few_rows_tasks, &job, threads);
}

typedef struct PackJob {
    Tasks tasks;
    const bf16 *weight;
    bf16 *packed;
    long cols, inner, steps;
    int gated;
} PackJob;

static void pack_tasks(void *argument) {
    PackJob *job = argument;
    const long cols = job->gated ? job->cols / 2 : job->cols, width = job->gated ? GROUP / 2 : GROUP;
    long group;
    while ((group = claim(&job->tasks)) >= 0) {
        bf16 *to = job->packed + group * job->steps * 2 * TILE;
        for (long k = 0; k < job->steps; k++)
            for (long half = 0; half < 2; half++, to += TILE) {
                const long first = group * width + (job->gated ? 0 : half * 16);
                const bf16 *from = job->weight + ((job->gated ? half * cols : 0) + first) * job->inner + k * STEP;
                const __mmask32 mask = mask32_of(job->inner - k * STEP);
                __m512i rows[16];
                for (long i = 0; i < 16; i++)
                    rows[i] = first + i < cols ? _mm512_maskz_loadu_epi16(mask, from + i * job->inner)
                                               : _mm512_setzero_si512();
                transpose(rows);
                for (long i = 0; i < 16; i++) _mm512_storeu_si512(to + i * 32, rows[i]);
            }
    }
}

/* weight [cols, inner] -> packed, zero past both ends. `gated`: the first half of the rows is the gate, the second
   up, and a group holds 16 columns of each. */
void quire_pack_bf16(const bf16 *weight, bf16 *packed, long cols, long inner, int gated, int threads) {
    const long groups = gated ? (cols / 2 + 15) / 16 : (cols + GROUP - 1) / GROUP;
    PackJob job = {.weight = weight, .packed = packed, .cols = cols, .inner = inner,
                   .steps = (inner + STEP - 1) / STEP, .gated = gated};
    job.tasks.count = groups;
    RUN(pack_tasks, &job, threads);
}

typedef struct RowsJob {
    Tasks tasks;
    const bf16 *packed;
    const int64_t *ids;
    bf16 *y;
    long cols, inner, steps;
} RowsJob;

static void rows_tasks(void *argument) {
    RowsJob *job = argument;
    long row;
    while ((row = claim(&job->tasks)) >= 0) {
        const long n = job->ids[row], column = n % 16, half = n % GROUP / 16;
        if (n < 0 || n >= job->cols) {
            memset(job->y + row * job->inner, 0xFF, 2 * job->inner);
            continue;
        }
        const uint32_t *from = (const uint32_t *)(job->packed + (n / GROUP * job->steps * 2 + half) * TILE) + column;
        bf16 *to = job->y + row * job->inner;
        for (long k = 0; k < job->steps; k++, from += TILE) {
            uint32_t pairs[16];
            const long left = job->inner - k * STEP;
            for (int pair = 0; pair < 16; pair++) pairs[pair] = from[pair * 16];
            memcpy(to + k * STEP, pairs, 2 * (left < STEP ? left : STEP));
        }
    }
}

/* Rows `ids` [rows] of the weight [cols, inner] that was packed (not gated) -> y [rows, inner]. An id outside [0, cols)
   gives NaN, so that only its own sequence fails. */
void quire_rows_bf16(const bf16 *packed, const int64_t *ids, bf16 *y, long rows, long cols, long inner, int threads) {
    RowsJob job = {.tasks.count = rows, .packed = packed, .ids = ids, .y = y, .cols = cols, .inner = inner,
                   .steps = (inner + STEP - 1) / STEP};
    RUN(rows_tasks, &job, rows < 8 ? 1 : threads);
}

#endif
