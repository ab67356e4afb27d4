/* y = x @ weight.T + bias in float32 arithmetic, with a weight that stays in its stored type until it is in registers.

   Packed weight: panels of 2 W output columns (W lanes of a vector); a panel is, for every 4 inputs in order, the
   4 x 2 W weights of a step. So a panel is one contiguous stream. By kind, a step is
     FLOAT32    [4][2 W] floats
     BFLOAT16   [4][W] words: column i of the lower vector in the lower half, of the upper vector in the upper half
     SIGNED8    [4][2 W] int8;  E4M3   [4][2 W] bytes
     SIGNED4    [W] words of 8 nibbles, signed: nibble 2 k + h belongs to input k and column h W + i
   Unsigned integers are stored less their middle (8 or 128).

   x is stored in blocks of at most MR rows: [input][row of the block], zero past the inputs (quire_linear_rows).

   Where the CPU multiplies pairs of bfloat16, PAIRED is BFLOAT16 for x of bfloat16. The unit adds the product of a
   pair's second input, then that of its first, each rounded once, as a fused multiply-add does (but it takes numbers
   below 2^-126 for 0). So a few rows, which stay float32, take the inputs of each pair in that order, and the results
   are the same bits. More rows are stored as words, [pair of inputs][row of the block].

   Sums: a chain of fused multiply-adds for each row and column, over the inputs in order. With groups, a chain starts
   anew for each chunk of inputs, and is added to the row's sum times the scale. So a result depends on its row alone,
   whatever the number of rows. */

enum { STEP_IN = 4, MR = W == 16 ? 12 : 6, DIRECT = 4 }; /* DIRECT: most rows whose weights are decoded in registers */
enum { CHUNK_IN = 256, MOST_BLOCK = 384 };               /* inputs in the first-level cache, rows of a task */
enum { X_BYTES = 768 << 10 };                            /* of x that stay in the second-level cache */
enum { FLOAT32, BFLOAT16, SIGNED8, SIGNED4, E4M3, PAIRED }; /* kinds */
enum { PLAIN, AS_FLOAT, GATED };                         /* out */

/* scale, zero: [panel][group][2 W] or NULL; xsum [block][group][row of the block]: sums of x; wide: scales are float32,
   else float16; chunk: inputs of a chain, a divisor of the group; group 0: the scale belongs to the column. */
typedef struct PanelsJob {
    Tasks tasks;
    const float *x, *xsum;
    const void *weight, *scale, *bias, *residual;
    const int8_t *zero;
    void *y;
    long rows, cols, inner, panels, block_rows;
    int group, chunk, kind, out, half, wide, each; /* each: panels of a task */
} PanelsJob;

_Static_assert(sizeof(PanelsJob) <= JOB_BYTES, "a recording has no room for the job");

INLINE long step_bytes(int kind) {
    return W * (kind == FLOAT32 ? 32 : kind == BFLOAT16 || kind == PAIRED ? 16 : kind == SIGNED4 ? 4 : 8);
}

#ifdef __AVX512F__

INLINE void bf16_pair(const char *w, Vec *v) {
    const __m512i words = _mm512_loadu_si512(w);
    v[0] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    v[1] = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xFFFF0000)));
}

INLINE Vec signed8(const char *w) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w)));
}

/* e4m3 << 7 is float16 with an exponent that is 8 too small, so the scale holds 256; the sign moves by one more. */
INLINE Vec e4m3(const char *w) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)w)), 8);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(wide, 1), _mm256_set1_epi16((short)0xBFFF));
    return _mm512_cvtph_ps(half);
}

INLINE void signed4(const char *w, Vec *v) {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    const __m512i words = _mm512_loadu_si512(w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) v[i] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * i), table);
}

INLINE Vec scales(const void *from, long at, int wide) {
    return wide ? _mm512_loadu_ps((const float *)from + at)
                : _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at)));
}

#else

INLINE void bf16_pair(const char *w, Vec *v) {
    const __m256i words = _mm256_loadu_si256((const __m256i *)w);
    v[0] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    v[1] = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xFFFF0000)));
}

INLINE Vec signed8(const char *w) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w)));
}

INLINE Vec e4m3(const char *w) {
    const __m128i wide = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)w));
    const __m128i half = _mm_and_si128(_mm_srai_epi16(wide, 1), _mm_set1_epi16((short)0xBFFF));
    return _mm256_cvtph_ps(half);
}

INLINE void signed4(const char *w, Vec *v) {
    const __m256i words = _mm256_loadu_si256((const __m256i *)w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        v[i] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 28 - 4 * i), 28));
}

INLINE Vec scales(const void *from, long at, int wide) {
    return wide ? _mm256_loadu_ps((const float *)from + at)
                : _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)from + at)));
}

#endif

/* A step of a panel -> v[2 k + h]: input k, lower (h = 0) and upper vector of columns. */
INLINE void decode(int kind, const char *w, Vec *v) {
    if (kind == SIGNED4) {
        signed4(w, v);
        return;
    }
#pragma GCC unroll 4
    for (int k = 0; k < STEP_IN; k++) {
        if (kind == BFLOAT16 || kind == PAIRED) {
            bf16_pair(w + (kind == PAIRED ? k ^ 1 : k) * 4 * W, v + 2 * k);
            continue;
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const long at = (2 * k + h) * W;
            if (kind == FLOAT32) v[2 * k + h] = get((const float *)w + at);
            else v[2 * k + h] = kind == SIGNED8 ? signed8(w + at) : e4m3(w + at);
        }
    }
}

/* sums += a block of `rows` rows of x times `count` panels that lie `pitch` bytes apart, over `steps`. */
INLINE void multiply_direct(int kind, int rows, int count, const float *x, const char *w, long pitch, long steps,
                            Vec *sums) {
    enum { AHEAD = 1024 }; /* bytes */
    const long size = step_bytes(kind);
    Vec own[8];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * rows * count; i++) own[i] = sums[i];
    for (long step = 0; step < steps; step++, x += STEP_IN * rows, w += size) {
#pragma GCC unroll 4
        for (int p = 0; p < count; p++) {
            Vec v[2 * STEP_IN];
            decode(kind, w + p * pitch, v);
#pragma GCC unroll 4
            for (int k = 0; k < STEP_IN; k++)
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    const Vec value = fill(x[k * rows + r]);
                    own[2 * (p * rows + r)] = madd(value, v[2 * k], own[2 * (p * rows + r)]);
                    own[2 * (p * rows + r) + 1] = madd(value, v[2 * k + 1], own[2 * (p * rows + r) + 1]);
                }
#pragma GCC unroll 8
            for (long line = 0; line < size; line += 64) _mm_prefetch(w + p * pitch + AHEAD + line, _MM_HINT_T0);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * rows * count; i++) sums[i] = own[i];
}

/* sums [rows][2 W] += a block of x times decoded inputs, or pairs of them, [count][2 W]. `coming`: weights that are
   needed next, of which `pace` bytes are fetched with each input; pace 0: none. */
INLINE void multiply_decoded(int rows, const float *x, const float *w, long count, const char *coming, long pace,
                             float *sums, int pairs) {
    Vec own[2 * MR];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * rows; i++) own[i] = get(sums + i * W);
    for (long k = 0; k < count; k++, x += rows, w += 2 * W, coming += pace) {
        _mm_prefetch(coming, _MM_HINT_T1);
        const Vec low = get(w), high = get(w + W);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const Vec value = fill(x[r]);
            own[2 * r] = madd_words(value, low, own[2 * r], pairs);
            own[2 * r + 1] = madd_words(value, high, own[2 * r + 1], pairs);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < 2 * rows; i++) put(sums + i * W, own[i]);
}

static void multiply_block(int rows, const float *x, const float *w, long count, const char *coming, long pace,
                           float *sums, int pairs) {
#define CASE(n) case n: multiply_decoded(n, x, w, count, coming, pace, sums, 0); break;
#define PAIRS_CASE(n) case n + 16: multiply_decoded(n, x, w, count, coming, pace, sums, 1); break;
    switch (rows + 16 * pairs) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#ifdef __AVX512BF16__
    PAIRS_CASE(1) PAIRS_CASE(2) PAIRS_CASE(3) PAIRS_CASE(4) PAIRS_CASE(5) PAIRS_CASE(6)
    PAIRS_CASE(7) PAIRS_CASE(8) PAIRS_CASE(9) PAIRS_CASE(10) PAIRS_CASE(11) PAIRS_CASE(12)
#endif
    }
#undef CASE
#undef PAIRS_CASE
}

/* sums += chain * scale of a group; a zero point takes its part of the sum of x away first. */
INLINE void add_scaled(const PanelsJob *job, long panel, long group, long half, float xsum, Vec chain, float *sums) {
    const long at = ((panel * (job->inner / job->group) + group) * 2 + half) * W;
    if (job->zero) chain = nmadd(signed8((const char *)job->zero + at), fill(xsum), chain);
    put(sums, madd(chain, scales(job->scale, at, job->wide), get(sums)));
}

/* Sums [2 W] of a row and a panel -> y. */
INLINE void finish_row(const PanelsJob *job, const float *sums, long row, long panel, int half) {
    const int gated = job->out == GATED;
    const long at = panel * (gated ? W : 2 * W), left = job->cols - at, to = row * job->cols + at;
    const Lanes low = lanes_of(left), high = gated ? low : lanes_of(left - W);
    Vec a = get(sums), b = get(sums + W);
    if (job->scale && !job->group) {
        a = a * scales(job->scale, panel * 2 * W, job->wide);
        b = b * scales(job->scale, panel * 2 * W + W, job->wide);
    }
    if (job->bias) {
        a = a + load(job->bias, at, low, half);
        b = b + load(job->bias, gated ? job->cols + at : at + W, high, half);
    }
    if (job->residual) {
        a = a + load(job->residual, to, low, half);
        b = b + load(job->residual, to + W, high, half);
    }
    if (gated) {
        store(job->y, to, low, silu_mul_of(a, b), half);
    } else if (job->out == AS_FLOAT) {
        store(job->y, to, low, a, 0);
        store(job->y, to + W, high, b, 0);
    } else {
        store(job->y, to, low, a, half);
        store(job->y, to + W, high, b, half);
    }
}

static void finish_panel(const PanelsJob *job, const float *sums, long first, long rows, long panel) {
    for (long i = 0; i < rows; i++, sums += 2 * W) {
        if (job->half) finish_row(job, sums, first + i, panel, 1);
        else finish_row(job, sums, first + i, panel, 0);
    }
}

/* At most DIRECT rows; a task is `count` panels. */
INLINE void direct_panels(const PanelsJob *job, int kind, int rows, int count, long panel) {
    const long steps = job->inner / STEP_IN, pitch = steps * step_bytes(kind);
    const char *w = (const char *)job->weight + panel * pitch;
    float sums[4 * 2 * W] __attribute__((aligned(64)));
    Vec chains[8];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * rows * count; i++) chains[i] = zeros();
    if (!job->group) {
        multiply_direct(kind, rows, count, job->x, w, pitch, steps, chains);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * rows * count; i++) put(sums + i * W, chains[i]);
    } else {
        memset(sums, 0, sizeof sums);
        const long part = job->chunk / STEP_IN;
        for (long k = 0; k < steps; k += part) {
            const long group = k * STEP_IN / job->group;
#pragma GCC unroll 8
            for (int i = 0; i < 2 * rows * count; i++) chains[i] = zeros();
            const float *x = job->x + k * STEP_IN * rows;
            multiply_direct(kind, rows, count, x, w + k * step_bytes(kind), pitch, part, chains);
#pragma GCC unroll 8
            for (int i = 0; i < 2 * rows * count; i++) {
                const long r = i / 2 % rows, own = panel + i / 2 / rows;
                const float xsum = job->zero ? job->xsum[k / part * rows + r] : 0;
                add_scaled(job, own, group, i % 2, xsum, chains[i], sums + i * W);
            }
        }
    }
    for (int p = 0; p < count; p++) finish_panel(job, sums + p * rows * 2 * W, 0, rows, panel + p);
}

#define BY_KIND(job, ROWS, COUNT, panel)                                      \
    switch ((job)->kind) {                                                    \
    case FLOAT32: direct_panels(job, FLOAT32, ROWS, COUNT, panel); break;     \
    case BFLOAT16: direct_panels(job, BFLOAT16, ROWS, COUNT, panel); break;   \
    case SIGNED8: direct_panels(job, SIGNED8, ROWS, COUNT, panel); break;     \
    case SIGNED4: direct_panels(job, SIGNED4, ROWS, COUNT, panel); break;     \
    case E4M3: direct_panels(job, E4M3, ROWS, COUNT, panel); break;           \
    case PAIRED: direct_panels(job, PAIRED, ROWS, COUNT, panel); break;       \
    }

static void direct_tasks(void *argument) {
    PanelsJob *job = argument;
    const int each = job->each;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        long panel = task * each;
        const long end = panel + each < job->panels ? panel + each : job->panels;
        while (panel < end) {
            const long left = end - panel;
            if (job->rows == 1 && left >= 4) {
                BY_KIND(job, 1, 4, panel)
                panel += 4;
            } else if (job->rows <= 2 && left >= 2) {
                if (job->rows == 1) BY_KIND(job, 1, 2, panel)
                else BY_KIND(job, 2, 2, panel)
                panel += 2;
            } else {
                if (job->rows == 1) BY_KIND(job, 1, 1, panel)
                else if (job->rows == 2) BY_KIND(job, 2, 1, panel)
                else if (job->rows == 3) BY_KIND(job, 3, 1, panel)
                else BY_KIND(job, 4, 1, panel)
                panel++;
            }
        }
    }
}

/* Weights of a step -> words of input pairs [2][2 W]. */
static void decode_pairs(const char *w, long steps, float *to) {
#ifdef __AVX512BF16__
    const __m512i lower = _mm512_set1_epi32(0xFFFF);
    for (long pair = 0; pair < 2 * steps; pair++, w += 8 * W, to += 2 * W) {
        const __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + 4 * W);
        _mm_prefetch(w + 1024, _MM_HINT_T0);
        _mm_prefetch(w + 1024 + 4 * W, _MM_HINT_T0);
        put(to, as_floats(_mm512_mask_blend_epi16(0xAAAAAAAA, first, _mm512_slli_epi32(second, 16))));
        put(to + W, as_floats(_mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_andnot_si512(lower, second))));
    }
#else
    (void)w, (void)steps, (void)to;
#endif
}

static void decode_chunk(int kind, const char *w, long steps, float *to) {
#define CASE(kind)                                                                         \
    case kind:                                                                             \
        for (long step = 0; step < steps; step++, w += step_bytes(kind), to += 8 * W) {    \
            Vec v[2 * STEP_IN];                                                            \
            decode(kind, w, v);                                                            \
            _mm_prefetch(w + 1024, _MM_HINT_T0);                                           \
            for (int i = 0; i < 2 * STEP_IN; i++) put(to + i * W, v[i]);                   \
        }                                                                                  \
        break;
    switch (kind) {
    CASE(FLOAT32) CASE(BFLOAT16) CASE(SIGNED8) CASE(SIGNED4) CASE(E4M3)
    case PAIRED: decode_pairs(w, steps, to); break;
    }
#undef CASE
}

/* Many rows: a task is a panel with a block of rows. A chunk of the panel is decoded once, and stays in the first-level
   cache while the rows stream past. */
static void decoded_tasks(void *argument) {
    PanelsJob *job = argument;
    float sums[MOST_BLOCK * 2 * W] __attribute__((aligned(64))), chunk[CHUNK_IN * 2 * W] __attribute__((aligned(64)));
    float chains[MR * 2 * W] __attribute__((aligned(64)));
    const long bytes = step_bytes(job->kind), size = job->group ? job->chunk : CHUNK_IN;
    const long groups = job->group ? job->inner / job->chunk : 0, word = job->kind == PAIRED ? 2 : 1; /* inputs */
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long first = task / job->panels * job->block_rows, panel = task % job->panels;
        const long rows = job->rows - first < job->block_rows ? job->rows - first : job->block_rows;
        const char *w = (const char *)job->weight + panel * (job->inner / STEP_IN) * bytes;
        memset(sums, 0, rows * 2 * W * sizeof(float));
        for (long k = 0; k < job->inner; k += size) {
            const long count = job->inner - k < size ? job->inner - k : size;
            decode_chunk(job->kind, w + k / STEP_IN * bytes, count / STEP_IN, chunk);
            for (long row = 0; row < rows; row += MR) {
                const long own = rows - row < MR ? rows - row : MR;
                const float *x = job->x + ((first + row) * job->inner + k * own) / word;
                const char *coming = w + (k + count) / STEP_IN * bytes;
                const long pace = row ? 0 : bytes / STEP_IN * word;
                float *to = sums + row * 2 * W;
                if (!job->group) {
                    multiply_block((int)own, x, chunk, count / word, coming, pace, to, word == 2);
                    continue;
                }
                memset(chains, 0, own * 2 * W * sizeof(float));
                multiply_block((int)own, x, chunk, count, coming, pace, chains, 0);
                const float *xsum = job->zero ? job->xsum + (first + row) * groups + k / size * own : NULL;
                for (long i = 0; i < 2 * own; i++, to += W)
                    add_scaled(job, panel, k / job->group, i % 2, xsum ? xsum[i / 2] : 0, get(chains + i * W), to);
            }
        }
        finish_panel(job, sums, first, rows, panel);
    }
}

/* Nonzero: there is the kind PAIRED. */
int quire_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* x [rows][inner] as quire_linear_rows wrote it for this kind (one row of float32 without padding may be x itself),
   weight packed.

   scale      [panel][groups][2 W] float32 (wide) or float16, with groups of `group` inputs; group 0: [panel][2 W];
              NULL: none
   zero       as scale, or NULL: zero points less the middle;  xsum  from quire_linear_rows with the same chunk
   chunk      inputs of a chain: a divisor of the group, at most CHUNK_IN
   bias       [cols] or NULL;  residual  [rows, cols] or NULL
   out        0: y [rows, cols];  1: y [rows, cols] float32;  2: y [rows, cols] = silu(gate) * up, where a panel has W
              columns of gate and W of up; bias is [2 * cols], gate's first
   half       bias, residual and y are bfloat16, else float32
   inner is a multiple of 4. */
void quire_linear_panels(const float *x, const float *xsum, const void *weight, const void *scale, const int8_t *zero,
                         const void *bias, const void *residual, void *y, long rows, long cols, long inner, int group,
                         int chunk, int kind, int out, int half, int wide, int threads) {
    const long width = out == GATED ? W : 2 * W, panels = (cols + width - 1) / width;
    PanelsJob job = {.x = x, .xsum = xsum, .weight = weight, .scale = scale, .zero = zero, .bias = bias,
                     .residual = residual, .y = y, .rows = rows, .cols = cols, .inner = inner, .panels = panels,
                     .group = group, .chunk = chunk, .kind = kind, .out = out, .half = half, .wide = wide, .each = 4};
    if (rows == 0) return;
    if (rows <= DIRECT) {
        while (job.each > 1 && panels < 4L * threads * job.each) job.each /= 2;
        job.tasks.count = (panels + job.each - 1) / job.each;
        RUN(direct_tasks, &job, threads);
        return;
    }
    job.block_rows = X_BYTES / (inner * (long)sizeof(float)) * (kind == PAIRED ? 2 : 1) / MR * MR;
    if (job.block_rows < 2 * MR) job.block_rows = 2 * MR;
    if (job.block_rows > MOST_BLOCK) job.block_rows = MOST_BLOCK;
    job.tasks.count = panels * ((rows + job.block_rows - 1) / job.block_rows);
    RUN(decoded_tasks, &job, threads);
}
