/* y = x @ weight.T + bias, with a weight that stays in its stored type until it is in registers.

   Packed weight: panels of 2 W output columns (W lanes of a vector); a panel is, for every 4 inputs in order, the
   4 x 2 W weights of a step. So a panel is one contiguous stream. By kind, a step is
     FLOAT32    [4][2 W] floats
     BFLOAT16   [4][W] words: column i of the lower vector in the lower half, of the upper vector in the upper half
     SIGNED8    [4][2 W] int8;  E4M3   [4][2 W] bytes; inputs in the order 1, 0, 3, 2
     SIGNED4    [W] words of 8 nibbles, signed: nibble 4 (k % 2) + 2 (k / 2) + h belongs to input k and column h W + i
     E2M1       the same, nibbles are floating point of 4 bits
     QUADS      [2 W] words of 4 int8
   Unsigned integers are stored less their middle (8 or 128).

   x is stored in blocks of at most MR rows: [input][row of the block], zero past the inputs (quire_linear_rows). If the
   activations are quantized, x is the quantized values, and xscale their scales.

   QUADS: a unit (VNNI) adds 4 products of int8 and unsigned 8 bits to an int32. x is words of 4 inputs plus 128, and
   the sums start at -128 times the sum of the column's weights. So a sum is exact.

   All other arithmetic is float32. Where the CPU multiplies pairs of bfloat16, `pairs` is true for numbers that are
   bfloat16 exactly: weights of bfloat16 and all quantized ones, and x that is bfloat16 or quantized. The unit adds the
   product of a pair's second input, then that of its first, each rounded once, as a fused multiply-add does (but it
   takes numbers below 2^-126 for 0). So a few rows, which stay float32, take the inputs of each pair in that order, and
   the results are the same bits. More rows are stored as words, [pair of inputs][row of the block]. PAIRED is BFLOAT16
   with pairs; PAIRED4 and PAIRED_E2M1 are SIGNED4 and E2M1 with pairs, where few rows are stored as words, too.

   Sums: a chain of fused multiply-adds for each row and column, over the inputs in order, each second before its first
   (BFLOAT16 and FLOAT32 without pairs: in order). With groups, a chain starts anew for each chunk of inputs, and is
   added to the row's sum times the scales. So a result depends on its row alone, whatever the number of rows. */

enum { STEP_IN = 4, MR = W == 16 ? 12 : 6, DIRECT = 4 }; /* DIRECT: most rows whose weights are decoded in registers */
enum { CHUNK_IN = 256, MOST_BLOCK = 384 };               /* inputs in the first-level cache, rows of a task */
enum { SCALE_IN = 128 };                                 /* inputs of a scale of x, where there are several */
enum { X_BYTES = 768 << 10 };                            /* of x that stay in the second-level cache */
enum { QUADS_IN = 512 };                                 /* as CHUNK_IN, for QUADS */
enum { FLOAT32, BFLOAT16, SIGNED8, SIGNED4, E4M3, QUADS, E2M1, PAIRED, PAIRED4, PAIRED_E2M1 }; /* kinds */
enum { PLAIN, AS_FLOAT, GATED };                                                                /* out */
enum { FLOAT16_SCALES, FLOAT32_SCALES, POWER_SCALES, E4M3_SCALES }; /* type of scales; POWER_SCALES: E8M0 */

/* scale, zero: [panel][group][2 W] or NULL; xsum [block][chunk][row of the block]: sums of x; type: of scales; chunk:
   inputs of a chain, a divisor of the group; group 0: the scale belongs to the column.
   xscale: [row], or fine: [block][SCALE_IN inputs][row of the block]; offset [panel][2 W]: first sums of QUADS.
   factor: [panel][2 W] or NULL, multiplies the sums. */
typedef struct PanelsJob {
    Tasks tasks;
    const float *x, *xsum, *xscale, *factor;
    const void *weight, *scale, *bias, *residual;
    const int8_t *zero;
    const int32_t *offset;
    void *y;
    long rows, cols, inner, panels, block_rows;
    int group, chunk, kind, out, act, half, type, each, pairs, fine; /* each: panels of a task */
} PanelsJob;

INLINE int in_words(int kind) { return kind == PAIRED4 || kind == PAIRED_E2M1; } /* few rows of x, too */

INLINE long step_bytes(int kind) {
    if (kind == SIGNED4 || kind == E2M1 || in_words(kind)) return W * 4;
    return W * (kind == FLOAT32 ? 32 : kind == BFLOAT16 || kind == PAIRED ? 16 : 8);
}

/* Nibble i of a word of SIGNED4 or E2M1 -> its place among the vectors of `decode`. */
INLINE int of_nibble(int i) { return 2 * (i / 2 % 2 * 2 + (i < 4)) + i % 2; }

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

INLINE void nibbles(int kind, const char *w, Vec *v) {
    const __m512 integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    const __m512 floats = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512 table = kind == E2M1 ? floats : integers;
    const __m512i words = _mm512_loadu_si512(w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) v[of_nibble(i)] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * i), table);
}

/* A power of two is the exponent of a float32. 2^-127, whose exponent would be 0, is the first bit behind it. */
INLINE Vec scales(const void *from, long at, int type) {
    if (type == FLOAT32_SCALES) return _mm512_loadu_ps((const float *)from + at);
    if (type == FLOAT16_SCALES)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at)));
    if (type == E4M3_SCALES) return e4m3((const char *)from + at);
    const __m512i power = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)((const uint8_t *)from + at)));
    return as_floats(_mm512_max_epi32(_mm512_slli_epi32(power, 23), _mm512_set1_epi32(1 << 22)));
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

INLINE void nibbles(int kind, const char *w, Vec *v) {
    const __m256 sizes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i words = _mm256_loadu_si256((const __m256i *)w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m256i first = _mm256_slli_epi32(words, 28 - 4 * i); /* bits of the nibble */
        if (kind == E2M1) {
            const __m256 size = _mm256_permutevar8x32_ps(sizes, _mm256_srli_epi32(words, 4 * i)); /* reads 3 bits */
            const __m256 sign = _mm256_castsi256_ps(_mm256_and_si256(first, _mm256_set1_epi32((int)0x80000000)));
            v[of_nibble(i)] = _mm256_or_ps(size, sign);
        } else {
            v[of_nibble(i)] = _mm256_cvtepi32_ps(_mm256_srai_epi32(first, 28));
        }
    }
}

INLINE Vec scales(const void *from, long at, int type) {
    if (type == FLOAT32_SCALES) return _mm256_loadu_ps((const float *)from + at);
    if (type == FLOAT16_SCALES)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)from + at)));
    if (type == E4M3_SCALES) return e4m3((const char *)from + at);
    const __m256i power = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)((const uint8_t *)from + at)));
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(power, 23), _mm256_set1_epi32(1 << 22)));
}

#endif

/* A step of a panel -> v[2 k + h]: input k in the order of the chain, lower (h = 0) and upper vector of columns. */
INLINE void decode(int kind, const char *w, Vec *v) {
    if (kind == SIGNED4 || kind == E2M1) {
        nibbles(kind, w, v);
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

/* Inputs of a step as words of pairs, v[2 j + h]: pair j, lower and upper vector of columns. */
INLINE void decode_words(int kind, const char *w, Vec *v) {
#ifdef __AVX512BF16__
    if (kind == PAIRED) {
        const __m512i lower = _mm512_set1_epi32(0xFFFF);
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++, w += 8 * W) {
            const __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + 4 * W);
            v[2 * j] = as_floats(_mm512_mask_blend_epi16(0xAAAAAAAA, first, _mm512_slli_epi32(second, 16)));
            v[2 * j + 1] = as_floats(_mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_andnot_si512(lower, second)));
        }
    } else if (in_words(kind)) { /* the unit looks up 5 bits, of which the fifth does not count */
        static const uint16_t integers[16] = {0,      0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
                                              0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80};
        static const uint16_t floats[16] = {0,      0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                                            0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
        const __m256i half = _mm256_loadu_si256((const __m256i *)(kind == PAIRED_E2M1 ? floats : integers));
        const __m512i table = _mm512_broadcast_i64x4(half);
        const __m512i words = _mm512_loadu_si512(w);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) v[i] = as_floats(_mm512_permutexvar_epi16(_mm512_srli_epi32(words, 4 * i), table));
    } else {
        Vec one[2 * STEP_IN];
        decode(kind, w, one);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) { /* of a pair, the second input comes first */
            const int at = i / 2 * 4 + i % 2;
            v[i] = as_floats(_mm512_or_si512(as_words(one[at]), _mm512_srli_epi32(as_words(one[at + 2]), 16)));
        }
    }
#else
    (void)kind, (void)w, (void)v;
#endif
}

/* sums += a block of `rows` rows of x times `count` panels that lie `pitch` bytes apart, over `steps`. */
INLINE void multiply_direct(int kind, int rows, int count, const float *x, const char *w, long pitch, long steps,
                            Vec *sums) {
    const long size = step_bytes(kind), ahead = size < 16 * W ? 2048 : 1024; /* bytes */
    Vec own[8];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * rows * count; i++) own[i] = sums[i];
    const int words = in_words(kind), count_in = words ? STEP_IN / 2 : STEP_IN;
    for (long step = 0; step < steps; step++, x += count_in * rows, w += size) {
#pragma GCC unroll 4
        for (int p = 0; p < count; p++) {
            Vec v[2 * STEP_IN];
            if (words) decode_words(kind, w + p * pitch, v);
            else decode(kind, w + p * pitch, v);
#pragma GCC unroll 4
            for (int k = 0; k < count_in; k++)
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    const Vec value = fill(x[k * rows + r]);
                    Vec *to = own + 2 * (p * rows + r);
                    to[0] = madd_words(value, v[2 * k], to[0], words);
                    to[1] = madd_words(value, v[2 * k + 1], to[1], words);
                }
#pragma GCC unroll 8
            for (long line = 0; line < size; line += 64) _mm_prefetch(w + p * pitch + ahead + line, _MM_HINT_T0);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * rows * count; i++) sums[i] = own[i];
}

/* Scales of a chunk: of the columns, and of x by row of the block; zero points and sums of x, or NULL. */
typedef struct Scaling {
    Vec scale[2], zero[2];
    const float *xsum, *xscale;
} Scaling;

/* sum + chain * scales; a zero point takes its part of the sum of x away first. */
INLINE Vec add_scaled(const Scaling *by, int half, long r, Vec chain, Vec sum) {
    if (by->xsum) chain = nmadd(by->zero[half], fill(by->xsum[r]), chain);
    if (by->xscale) chain = chain * fill(by->xscale[r]);
    return madd(chain, by->scale[half], sum);
}

/* sums [rows][2 W] += a block of x times decoded inputs, or pairs of them, [count][2 W]; with `by` a chain of its own
   times the scales. `coming`: weights that are needed next, of which `pace` bytes are fetched with each input; pace 0:
   none. */
INLINE void multiply_decoded(int rows, const float *x, const float *w, long count, const char *coming, long pace,
                             float *sums, int pairs, const Scaling *by) {
    Vec own[2 * MR];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * rows; i++) own[i] = by ? zeros() : get(sums + i * W);
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
    for (int i = 0; i < 2 * rows; i++)
        put(sums + i * W, by ? add_scaled(by, i % 2, i / 2, own[i], get(sums + i * W)) : own[i]);
}

static void multiply_block(int rows, const float *x, const float *w, long count, const char *coming, long pace,
                           float *sums, int pairs, const Scaling *by) {
#define CASE(n) case n: multiply_decoded(n, x, w, count, coming, pace, sums, 0, by); break;
#define PAIRS_CASE(n) case n + 16: multiply_decoded(n, x, w, count, coming, pace, sums, 1, by); break;
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

/* Scales of the chunk at input k, for a block of `rows` rows that starts at row `first`. */
INLINE Scaling scaling_at(const PanelsJob *job, long panel, long k, long first, long rows) {
    const long at = (panel * (job->inner / job->group) + k / job->group) * 2 * W;
    Scaling by = {.scale = {scales(job->scale, at, job->type), scales(job->scale, at + W, job->type)}};
    if (job->zero) {
        by.zero[0] = signed8((const char *)job->zero + at);
        by.zero[1] = signed8((const char *)job->zero + at + W);
        by.xsum = job->xsum + first * (job->inner / job->chunk) + k / job->chunk * rows;
    }
    if (job->fine) by.xscale = job->xscale + first * (job->inner / SCALE_IN) + k / SCALE_IN * rows;
    return by;
}

/* Sums [2 W] of a row and a panel -> y. */
INLINE void finish_row(const PanelsJob *job, const float *sums, long row, long panel, int half) {
    const int gated = job->out == GATED;
    const long at = panel * (gated ? W : 2 * W), left = job->cols - at, to = row * job->cols + at;
    const Lanes low = lanes_of(left), high = gated ? low : lanes_of(left - W);
    Vec a = get(sums), b = get(sums + W);
    if (job->xscale && !job->fine) {
        a = a * fill(job->xscale[row]);
        b = b * fill(job->xscale[row]);
    }
    if (job->scale && !job->group) {
        a = a * scales(job->scale, panel * 2 * W, job->type);
        b = b * scales(job->scale, panel * 2 * W + W, job->type);
    }
    if (job->factor) {
        a = a * get(job->factor + panel * 2 * W);
        b = b * get(job->factor + panel * 2 * W + W);
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
        store(job->y, to, low, gated_by(a, b, job->act), half);
    } else if (job->out == AS_FLOAT) {
        store(job->y, to, low, a, 0);
        store(job->y, to + W, high, b, 0);
    } else {
        store(job->y, to, low, a, half);
        store(job->y, to + W, high, b, half);
    }
}

static __attribute__((noinline)) void finish_panel(const PanelsJob *job, const float *sums, long first, long rows,
                                                   long panel) {
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
        const int words = in_words(kind) ? 2 : 1; /* inputs of a number of x */
        for (long k = 0; k < steps; k += part) {
#pragma GCC unroll 8
            for (int i = 0; i < 2 * rows * count; i++) chains[i] = zeros();
            const float *x = job->x + k * STEP_IN * rows / words;
            multiply_direct(kind, rows, count, x, w + k * step_bytes(kind), pitch, part, chains);
#pragma GCC unroll 4
            for (int p = 0; p < count; p++) {
                const Scaling by = scaling_at(job, panel + p, k * STEP_IN, 0, rows);
                float *to = sums + p * rows * 2 * W;
#pragma GCC unroll 8
                for (int i = 0; i < 2 * rows; i++, to += W)
                    put(to, add_scaled(&by, i % 2, i / 2, chains[2 * p * rows + i], get(to)));
            }
        }
    }
    for (int p = 0; p < count; p++) finish_panel(job, sums + p * rows * 2 * W, 0, rows, panel + p);
}

#ifdef HAVE_QUADS

/* At most DIRECT rows of QUADS. */
INLINE void quads_panels(const PanelsJob *job, int kind, int rows, int count, long panel) {
    enum { AHEAD = 2048 }; /* bytes */
    const long steps = job->inner / STEP_IN, pitch = steps * step_bytes(kind);
    const int32_t *x = (const int32_t *)job->x;
    const char *w = (const char *)job->weight + panel * pitch;
    float sums[4 * 2 * W] __attribute__((aligned(64)));
    Words own[8];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * rows * count; i++)
        own[i] = get_words(job->offset + ((panel + i / 2 / rows) * 2 + i % 2) * W);
    for (long step = 0; step < steps; step++, x += rows, w += 8 * W) {
#pragma GCC unroll 4
        for (int p = 0; p < count; p++) {
            const Words low = get_words(w + p * pitch), high = get_words(w + p * pitch + 4 * W);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const Words value = fill_words(x[r]);
                Words *to = own + 2 * (p * rows + r);
                to[0] = dot_quads(to[0], value, low);
                to[1] = dot_quads(to[1], value, high);
            }
#pragma GCC unroll 2
            for (long line = 0; line < 8 * W; line += 64) _mm_prefetch(w + p * pitch + AHEAD + line, _MM_HINT_T0);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * rows * count; i++) put(sums + i * W, from_words(own[i]));
    for (int p = 0; p < count; p++) finish_panel(job, sums + p * rows * 2 * W, 0, rows, panel + p);
}

/* As multiply_decoded, for QUADS: `count` steps. */
INLINE void multiply_quads(int rows, const int32_t *x, const char *w, long count, const char *coming, long pace,
                           int32_t *sums) {
    Words own[2 * MR];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * rows; i++) own[i] = get_words(sums + i * W);
    for (long k = 0; k < count; k++, x += rows, w += 8 * W, coming += pace) {
#pragma GCC unroll 2
        for (long line = 0; line < 8 * W; line += 64) _mm_prefetch(coming + line, _MM_HINT_T1);
        const Words low = get_words(w), high = get_words(w + 4 * W);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const Words value = fill_words(x[r]);
            own[2 * r] = dot_quads(own[2 * r], value, low);
            own[2 * r + 1] = dot_quads(own[2 * r + 1], value, high);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < 2 * rows; i++) put_words(sums + i * W, own[i]);
}

static void multiply_quads_block(int rows, const int32_t *x, const char *w, long count, const char *coming, long pace,
                                 int32_t *sums) {
#define CASE(n) case n: multiply_quads(n, x, w, count, coming, pace, sums); break;
    switch (rows) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
#undef CASE
}

/* Many rows of QUADS: as decoded_tasks, without decoding. */
static void quads_tasks(void *argument) {
    PanelsJob *job = argument;
    int32_t sums[MOST_BLOCK * 2 * W] __attribute__((aligned(64)));
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long first = task / job->panels * job->block_rows, panel = task % job->panels;
        const long rows = job->rows - first < job->block_rows ? job->rows - first : job->block_rows;
        const char *w = (const char *)job->weight + panel * job->inner * 2 * W;
        for (long i = 0; i < rows; i++) memcpy(sums + i * 2 * W, job->offset + panel * 2 * W, 2 * W * sizeof(int32_t));
        for (long k = 0; k < job->inner; k += QUADS_IN) {
            const long count = job->inner - k < QUADS_IN ? job->inner - k : QUADS_IN;
            for (long row = 0; row < rows; row += MR) {
                const long own = rows - row < MR ? rows - row : MR;
                const int32_t *x = (const int32_t *)job->x + ((first + row) * job->inner + k * own) / STEP_IN;
                multiply_quads_block((int)own, x, w + k * 2 * W, count / STEP_IN, w + (k + count) * 2 * W,
                                     row ? 0 : 8 * W, sums + row * 2 * W);
            }
        }
        for (long i = 0; i < 2 * rows; i++) put((float *)sums + i * W, from_words(get_words(sums + i * W)));
        finish_panel(job, (const float *)sums, first, rows, panel);
    }
}

#endif

/* Functions of at most DIRECT rows. Each is a function of its own: in one, they compile for 2 seconds more. */
#define SHAPE(panels, kind, ROWS, COUNT)                                                                               \
    static __attribute__((noinline)) void kind##_##ROWS##_##COUNT(const PanelsJob *job, long panel) {                  \
        panels(job, kind, ROWS, COUNT, panel);                                                                         \
    }
#define SHAPES(panels, kind)                                                                                           \
    SHAPE(panels, kind, 1, 4) SHAPE(panels, kind, 1, 1) SHAPE(panels, kind, 2, 1) SHAPE(panels, kind, 3, 1)            \
    SHAPE(panels, kind, 4, 1)
#define TABLE(kind) [kind] = {kind##_1_4, kind##_1_1, kind##_2_1, kind##_3_1, kind##_4_1}

SHAPES(direct_panels, FLOAT32)
SHAPES(direct_panels, BFLOAT16)
SHAPES(direct_panels, SIGNED8)
SHAPES(direct_panels, SIGNED4)
SHAPES(direct_panels, E4M3)
SHAPES(direct_panels, E2M1)
#ifdef __AVX512BF16__
SHAPES(direct_panels, PAIRED)
SHAPES(direct_panels, PAIRED4)
SHAPES(direct_panels, PAIRED_E2M1)
#endif
#ifdef HAVE_QUADS
SHAPES(quads_panels, QUADS)
#endif

/* By kind: 4 panels of a row, then a panel of 1 to DIRECT rows. */
static void (*const direct_functions[][1 + DIRECT])(const PanelsJob *, long) = {
    TABLE(FLOAT32), TABLE(BFLOAT16), TABLE(SIGNED8), TABLE(SIGNED4), TABLE(E4M3), TABLE(E2M1),
#ifdef __AVX512BF16__
    TABLE(PAIRED), TABLE(PAIRED4), TABLE(PAIRED_E2M1),
#endif
#ifdef HAVE_QUADS
    TABLE(QUADS),
#endif
};

static void direct_tasks(void *argument) {
    PanelsJob *job = argument;
    const int each = job->each;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        long panel = task * each;
        const long end = panel + each < job->panels ? panel + each : job->panels;
        while (panel < end) {
            const int count = job->rows == 1 && end - panel >= 4 ? 4 : 1;
            direct_functions[job->kind][count == 4 ? 0 : job->rows](job, panel);
            panel += count;
        }
    }
}

/* `steps` of a panel -> to: [input][2 W] floats, or [pair of inputs][2 W] words. */
static void decode_chunk(int kind, int pairs, const char *w, long steps, float *to) {
#define CASE(kind, words)                                                                  \
    case kind + 16 * words:                                                                \
        for (long step = 0; step < steps; step++, w += step_bytes(kind)) {                 \
            Vec v[2 * STEP_IN];                                                            \
            if (words) decode_words(kind, w, v);                                           \
            else decode(kind, w, v);                                                       \
            _mm_prefetch(w + 1024, _MM_HINT_T0);                                           \
            for (int i = 0; i < (words ? 4 : 8); i++, to += W) put(to, v[i]);              \
        }                                                                                  \
        break;
    switch (kind + 16 * pairs) {
    CASE(FLOAT32, 0) CASE(BFLOAT16, 0) CASE(SIGNED8, 0) CASE(SIGNED4, 0) CASE(E4M3, 0) CASE(E2M1, 0)
#ifdef __AVX512BF16__
    CASE(PAIRED, 1) CASE(SIGNED8, 1) CASE(PAIRED4, 1) CASE(E4M3, 1) CASE(PAIRED_E2M1, 1)
#endif
    }
#undef CASE
}

/* Many rows: a task is a panel with a block of rows. Some chunks of the panel are decoded once, and stay in the
   first-level cache while the rows stream past. */
static void decoded_tasks(void *argument) {
    PanelsJob *job = argument;
    float sums[MOST_BLOCK * 2 * W] __attribute__((aligned(64))), decoded[CHUNK_IN * 2 * W] __attribute__((aligned(64)));
    const long bytes = step_bytes(job->kind), word = job->pairs ? 2 : 1; /* inputs */
    const long chunk = job->group ? job->chunk : CHUNK_IN, part = CHUNK_IN / chunk * chunk;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long first = task / job->panels * job->block_rows, panel = task % job->panels;
        const long rows = job->rows - first < job->block_rows ? job->rows - first : job->block_rows;
        const char *w = (const char *)job->weight + panel * (job->inner / STEP_IN) * bytes;
        memset(sums, 0, rows * 2 * W * sizeof(float));
        for (long from = 0; from < job->inner; from += part) {
            const long end = from + part < job->inner ? from + part : job->inner;
            decode_chunk(job->kind, job->pairs, w + from / STEP_IN * bytes, (end - from) / STEP_IN, decoded);
            for (long row = 0; row < rows; row += MR) {
                const long own = rows - row < MR ? rows - row : MR, pace = row ? 0 : bytes / STEP_IN * word;
                for (long k = from; k < end; k += chunk) {
                    const long count = end - k < chunk ? end - k : chunk;
                    const float *x = job->x + ((first + row) * job->inner + k * own) / word;
                    const char *coming = w + (end + k - from) / STEP_IN * bytes;
                    const Scaling by = job->group ? scaling_at(job, panel, k, first + row, own) : (Scaling){0};
                    multiply_block((int)own, x, decoded + (k - from) / word * 2 * W, count / word, coming, pace,
                                   sums + row * 2 * W, job->pairs, job->group ? &by : NULL);
                }
            }
        }
        finish_panel(job, sums, first, rows, panel);
    }
}

/* Nonzero: this CPU multiplies pairs of bfloat16. */
int quire_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* Nonzero: there is the kind QUADS. */
int quire_quads(void) {
#ifdef HAVE_QUADS
    return 1;
#else
    return 0;
#endif
}

/* The kind that runs with `pairs`. */
static int paired(int kind, int pairs) {
    if (!pairs) return kind;
    return kind == BFLOAT16 ? PAIRED : kind == SIGNED4 ? PAIRED4 : kind == E2M1 ? PAIRED_E2M1 : kind;
}

/* x [rows][inner], xsum and xscale as quire_linear_rows wrote them for this kind (one row of float32 without padding
   may be x itself, if the weight is not quantized), weight packed.

   scale      [panel][groups][2 W] of a type, with groups of `group` inputs; group 0: [panel][2 W];
              NULL: none
   zero       as scale, or NULL: zero points less the middle;  xsum  from quire_linear_rows with the same chunk
   offset     [panel][2 W] of QUADS: -128 times the sum of the column's weights
   factor     [panel][2 W] or NULL: numbers that multiply the sums of a column; those of E4M3_SCALES hold 256
   chunk      inputs of a chain: a divisor of the group, at most CHUNK_IN, and of SCALE_IN if fine
   out        0: y [rows, cols];  1: y [rows, cols] float32;  2: y [rows, cols] = gated_of(gate, up), where a panel has
              W columns of gate and W of up; bias is [2 * cols], gate's first
   act        activation of gate and up, 0 if out is not 2
   bias       [cols] or NULL;  residual  [rows, cols] or NULL
   half       bias, residual and y are bfloat16, else float32
   pairs      the CPU multiplies pairs of bfloat16, and weight and x are exact in it
   fine       xscale has a number for every SCALE_IN inputs of a row, else for a row
   inner is a multiple of 4. */
void quire_linear_panels(const float *x, const float *xsum, const float *xscale, const void *weight, const void *scale,
                         const int8_t *zero, const int32_t *offset, const float *factor, const void *bias,
                         const void *residual, void *y, long rows, long cols, long inner, int group, int chunk,
                         int kind, int out, int act, int half, int type, int pairs, int fine, int threads) {
    const long width = out == GATED ? W : 2 * W, panels = (cols + width - 1) / width;
    PanelsJob job = {.x = x, .xsum = xsum, .xscale = xscale, .weight = weight, .scale = scale, .zero = zero,
                     .offset = offset, .factor = factor, .bias = bias, .residual = residual, .y = y, .rows = rows,
                     .cols = cols, .inner = inner, .panels = panels, .group = group, .chunk = chunk,
                     .kind = paired(kind, pairs), .out = out, .act = act, .half = half, .type = type, .each = 4,
                     .pairs = pairs, .fine = fine};
    if (rows == 0) return;
    if (rows <= DIRECT) {
        while (job.each > 1 && panels < 4L * threads * job.each) job.each /= 2;
        job.tasks.count = (panels + job.each - 1) / job.each;
        RUN(direct_tasks, &job, threads);
        return;
    }
    job.block_rows = X_BYTES / inner / (kind == QUADS ? 1 : pairs ? 2 : 4) / MR * MR;
    if (job.block_rows < 2 * MR) job.block_rows = 2 * MR;
    if (job.block_rows > MOST_BLOCK) job.block_rows = MOST_BLOCK;
    job.tasks.count = panels * ((rows + job.block_rows - 1) / job.block_rows);
#ifdef HAVE_QUADS
    if (kind == QUADS) {
        RUN(quads_tasks, &job, threads);
        return;
    }
#endif
    RUN(decoded_tasks, &job, threads);
}
