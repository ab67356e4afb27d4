/* The operands of quire_linear_panels in their layouts: rows of x, and weights. See panels.c. */

enum { AS_IS, TOKEN, GROUPS, TENSOR, POWERS }; /* how x is quantized */
enum { PIECE = 256 };                          /* inputs that are written at a time */
enum { IN_ORDER, SWAPPED, IN_PAIRS, IN_QUADS }; /* form of the blocks: inputs of a pair are swapped, or words */

typedef struct RowsOfX {
    Tasks tasks;
    const void *x;
    const int32_t *order;
    const float *scale;
    float *to, *xsum, *xscale;
    long rows, inner, padded, stride;
    int chunk, half, inputs, pieces, form, as_is; /* as_is: pairs of x are the words */
    float limit;
} RowsOfX;

INLINE void read_piece(const RowsOfX *job, long row, long from, long count, float *piece) {
    const void *x = element(job->x, row * job->stride, job->half);
    if (job->order)
        for (long i = 0; i < count; i++) {
            const bf16 *half = (const bf16 *)x + job->order[from + i];
            const uint32_t bits = job->half ? (uint32_t)*half << 16 : 0;
            if (job->half) memcpy(piece + i, &bits, 4);
            else piece[i] = ((const float *)x)[job->order[from + i]];
        }
    else
        for (long i = 0; i < count; i += W)
            put(piece + i, load(x, from + i, lanes_of(count - i), job->half));
    for (long i = count; i < PIECE; i++) piece[i] = 0;
}

INLINE float largest_magnitude(const float *x, long count) {
    Vec most = zeros();
    for (long i = 0; i < count; i += W) most = largest(get(x + i), largest(negative(get(x + i)), most));
    return largest_of(most);
}

/* x -> the nearest value of its type to x / scale. NaN stays NaN: see largest and smallest. */
INLINE void round_to_type(float *x, long count, float scale, float limit) {
    for (long i = 0; i < count; i += W) {
        const Vec bound = smallest(fill(limit), get(x + i) / fill(scale));
        const Vec value = largest(fill(limit == 127 ? -128 : -limit), bound);
        if (limit == 127) {
            put(x + i, nearest(value));
        } else { /* e4m3: 3 bits after the first, or multiples of 2^-9; the sum drops what lies below */
            const Vec ones = largest(power_of(value), fill(0x1p-6f)) * fill(0x1.8p20f);
            put(x + i, (value + ones) - ones);
        }
    }
}

/* Two bfloat16 that were widened, as a word. */
INLINE void write_pair(float *to, const float *pair) {
    uint32_t words[2];
    memcpy(words, pair, 8);
    words[0] = words[0] >> 16 | words[1];
    memcpy(to, words, 4);
}

/* Words [rows][count] with a stride between rows -> [count][rows]. */
INLINE void interleave(const uint32_t *words, long stride, long rows, long count, uint32_t *to) {
    for (long i = 0; i < count; i++)
#pragma GCC unroll 12
        for (long r = 0; r < rows; r++) to[i * rows + r] = words[r * stride + i];
}

/* Rows of x -> words of 4 inputs, each quantized to int8, plus 128. */
INLINE void quads_of_x(const RowsOfX *job, long first, long rows, int half) {
    uint8_t bytes[MR * PIECE] __attribute__((aligned(64)));
    float scales[MR];
    Vec strange[MR]; /* NaN if there is one */
    for (long r = 0; r < rows; r++) {
        const void *x = element(job->x, (first + r) * job->stride, half);
        Vec most = zeros();
        for (long k = 0; job->inputs == TOKEN && k < job->inner; k += W) {
            const Vec value = load(x, k, lanes_of(job->inner - k), half);
            most = largest(value, largest(negative(value), most));
        }
        scales[r] = job->inputs == TOKEN ? fmaxf(1e-10f, largest_of(most)) / job->limit : *job->scale;
        strange[r] = zeros();
    }
    for (long k = 0; k < job->padded; k += PIECE) {
        const long count = job->padded - k < PIECE ? job->padded - k : PIECE;
        for (long r = 0; r < rows; r++) {
            const void *x = element(job->x, (first + r) * job->stride, half);
            const Vec scale = fill(scales[r]);
            for (long i = 0; i < count; i += W) {
                const Vec value = load(x, k + i, lanes_of(job->inner - k - i), half) / scale;
                const Vec whole = nearest(largest(fill(-128), smallest(fill(127), value)));
                strange[r] = strange[r] + whole * zeros();
                put_bytes(bytes + r * PIECE + i, whole + fill(128));
            }
        }
        uint32_t *to = (uint32_t *)job->to + (first * job->padded + k * rows) / 4;
        if (rows == MR) interleave((const uint32_t *)bytes, PIECE / 4, MR, count / 4, to);
        else interleave((const uint32_t *)bytes, PIECE / 4, rows, count / 4, to);
    }
    for (long r = 0; r < rows; r++) job->xscale[first + r] = scales[r] + sum_of(strange[r]);
}

static void rows_of_x_tasks(void *argument) {
    RowsOfX *job = argument;
    float piece[PIECE] __attribute__((aligned(64)));
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long first = task / job->pieces * MR, rows = job->rows - first < MR ? job->rows - first : MR;
        const long part = job->pieces == 1 ? job->padded : PIECE, begin = task % job->pieces * part;
        const long end = begin + part < job->padded ? begin + part : job->padded;
        if (job->form == IN_QUADS) {
            if (job->half) quads_of_x(job, first, rows, 1);
            else quads_of_x(job, first, rows, 0);
            continue;
        }
        if (job->as_is) {
            const uint32_t *words = (const uint32_t *)((const bf16 *)job->x + first * job->stride + begin);
            uint32_t *to = (uint32_t *)job->to + (first * job->padded + begin * rows) / 2;
            if (rows == MR) interleave(words, job->stride / 2, MR, (end - begin) / 2, to);
            else interleave(words, job->stride / 2, rows, (end - begin) / 2, to);
            continue;
        }
        for (long r = 0; r < rows; r++) {
            float scale = job->inputs == TENSOR ? *job->scale : 0;
            if (job->inputs == TOKEN) {
                float most = 1e-10f;
                for (long k = 0; k < job->inner; k += PIECE) {
                    const long count = job->inner - k < PIECE ? job->inner - k : PIECE;
                    read_piece(job, first + r, k, count, piece);
                    most = fmaxf(most, largest_magnitude(piece, PIECE));
                }
                scale = most / job->limit;
            }
            for (long k = begin; k < end; k += PIECE) {
                const long left = job->inner - k, count = left < PIECE ? (left > 0 ? left : 0) : PIECE;
                read_piece(job, first + r, k, count, piece);
                if (job->inputs == GROUPS || job->inputs == POWERS)
                    for (long i = 0; i < count; i += SCALE_IN) {
                        const float most = fmaxf(1e-10f, largest_magnitude(piece + i, SCALE_IN));
                        float own = most / job->limit;
                        if (job->inputs == POWERS && own <= 3.4e38f) { /* infinity stays */
                            int power;
                            const float part = frexpf(own, &power); /* in [0.5, 1) */
                            own = ldexpf(1.0f, part == 0.5f ? power - 1 : power);
                        }
                        round_to_type(piece + i, SCALE_IN, own, job->limit);
                        job->xscale[first * (job->padded / SCALE_IN) + (k + i) / SCALE_IN * rows + r] = own;
                    }
                else if (job->inputs)
                    round_to_type(piece, PIECE, scale, job->limit);
                const long stop = job->padded - k < PIECE ? job->padded - k : PIECE;
                float *to = job->to + first * job->padded + k * rows + r;
                if (job->form == IN_ORDER) {
                    for (long i = 0; i < stop; i++) to[i * rows] = piece[i];
                } else if (job->form == SWAPPED) {
                    for (long i = 0; i < stop; i++) to[(i ^ 1) * rows] = piece[i];
                } else {
                    to = job->to + (first * job->padded + k * rows) / 2 + r;
                    for (long i = 0; i < stop; i += 2) write_pair(to + i / 2 * rows, piece + i);
                }
                if (!job->xsum) continue;
                float *sums = job->xsum + first * (job->padded / job->chunk) + r;
                for (long i = 0; i < stop;) { /* a chunk may begin or end between two pieces */
                    const long chunk = (k + i) / job->chunk, last = (chunk + 1) * job->chunk - k;
                    float sum = i || !(k % job->chunk) ? 0 : sums[chunk * rows];
                    for (; i < last && i < stop; i++) sum += piece[i];
                    sums[chunk * rows] = sum;
                }
            }
            if (begin == 0 && (job->inputs == TOKEN || job->inputs == TENSOR)) job->xscale[first + r] = scale;
        }
    }
}

/* x [rows, inner] with a stride between rows -> to: blocks of at most MR rows, [padded][row of the block], zero past
   the inputs. See panels.c for the forms of other kinds.

   order    [inner] int32: input k is x[:, order[k]]; or NULL
   inputs   0: x as it is; else every value is divided by a scale and rounded to int8 (limit 127) or e4m3 (limit 448).
            The scale is the largest magnitude / limit of the row (1) or of SCALE_IN inputs (2), or `scale` (3), or
            that of SCALE_IN inputs rounded up to a power of two (4)
   xscale   scales: [rows], or [block][padded / SCALE_IN][row of the block] (2, 4). QUADS: a row with NaN has NaN
   xsum     [block][padded / chunk][row of the block]: sums of the inputs of a chunk; or NULL
   half     x is bfloat16, else float32
   kind     of the weight;  pairs  see quire_linear_panels */
void quire_linear_rows(const void *x, float *to, float *xsum, float *xscale, const int32_t *order, const float *scale,
                       long rows, long inner, long padded, long stride, int chunk, int half, int inputs, int kind,
                       int pairs, int threads, float limit) {
    const int words = pairs && (rows > DIRECT || kind == SIGNED4 || kind == E2M1), swapped = pairs || kind >= SIGNED8;
    const int whole = inputs == TOKEN || xsum || kind == QUADS; /* a task has whole rows */
    RowsOfX job = {.x = x, .order = order, .scale = scale, .to = to, .xsum = xsum, .xscale = xscale, .rows = rows,
                   .inner = inner, .padded = padded, .stride = stride, .chunk = chunk, .half = half, .inputs = inputs,
                   .form = kind == QUADS ? IN_QUADS : words ? IN_PAIRS : swapped ? SWAPPED : IN_ORDER,
                   .pieces = whole ? 1 : (int)((padded + PIECE - 1) / PIECE), .limit = limit};
    job.as_is = job.form == IN_PAIRS && half && !inputs && !order && !xsum && inner == padded && stride % 2 == 0;
    job.tasks.count = (rows + MR - 1) / MR * job.pieces;
    RUN(rows_of_x_tasks, &job, rows * padded < SMALL / 4 ? 1 : threads);
}

typedef struct PackPanels {
    Tasks tasks;
    const void *weight;
    void *packed;
    long cols, inner, padded;
    int kind, gated;
} PackPanels;

/* Input k of column c of a step that starts at input k0, as it is stored; 0 past both ends. */
INLINE uint32_t stored(const PackPanels *job, int kind, long column, long k) {
    if (column < 0 || k >= job->inner) return 0;
    const long at = column * job->inner + k;
    if (kind == FLOAT32) return ((const uint32_t *)job->weight)[at];
    if (kind == BFLOAT16) return ((const bf16 *)job->weight)[at];
    if (kind != SIGNED4 && kind != E2M1) return ((const uint8_t *)job->weight)[at];
    const uint8_t pair = ((const uint8_t *)job->weight)[column * ((job->inner + 1) / 2) + k / 2];
    return (k % 2 ? pair >> 4 : pair & 15) ^ (kind == SIGNED4 ? 8 : 0);
}

INLINE void pack_panel(const PackPanels *job, int kind, long panel) {
    const int nibbles = kind == SIGNED4 || kind == E2M1;
    char *to = (char *)job->packed + panel * (job->padded / STEP_IN) * step_bytes(kind);
    long columns[2 * W]; /* of the weight, by place in the panel; -1: none */
    for (long i = 0; i < 2 * W; i++) {
        const long half = job->cols / 2, place = panel * W + i % W;
        columns[i] = !job->gated ? panel * 2 * W + i : place < half ? (i < W ? place : half + place) : -1;
        if (columns[i] >= job->cols) columns[i] = -1;
    }
    for (long k = 0; k < job->padded; k += STEP_IN, to += step_bytes(kind))
        for (long i = 0; i < (nibbles ? W : 2 * W); i++) {
            uint32_t word = 0;
            for (long j = 0; j < STEP_IN; j++) {
                const uint32_t value = stored(job, kind, columns[i], k + j);
                if (kind == FLOAT32) ((uint32_t *)to)[j * 2 * W + i] = value;
                else if (kind == BFLOAT16) ((bf16 *)to)[j * 2 * W + 2 * (i % W) + i / W] = (bf16)value;
                else if (kind == QUADS) ((uint8_t *)to)[4 * i + j] = (uint8_t)value;
                else if (!nibbles) ((uint8_t *)to)[(j ^ 1) * 2 * W + i] = (uint8_t)value;
                else word |= (value | stored(job, kind, columns[W + i], k + j) << 4) << (16 * (j % 2) + 8 * (j / 2));
            }
            if (nibbles) ((uint32_t *)to)[i] = word;
        }
}

static void pack_panels_tasks(void *argument) {
    PackPanels *job = argument;
    long panel;
    while ((panel = claim(&job->tasks)) >= 0) {
        if (job->kind == FLOAT32) pack_panel(job, FLOAT32, panel);
        else if (job->kind == BFLOAT16) pack_panel(job, BFLOAT16, panel);
        else if (job->kind == SIGNED4) pack_panel(job, SIGNED4, panel);
        else if (job->kind == E2M1) pack_panel(job, E2M1, panel);
        else if (job->kind == QUADS) pack_panel(job, QUADS, panel);
        else pack_panel(job, E4M3, panel);
    }
}

/* weight [cols, inner] (of 4 bits: uint8 [cols, (inner + 1) / 2], even inputs in the low half) -> panels of `padded`
   inputs. `gated`: the first half of the rows is the gate, the second up, and a panel holds W columns of each. */
void quire_linear_pack(const void *weight, void *packed, long cols, long inner, long padded, int kind, int gated,
                       int threads) {
    PackPanels job = {.weight = weight, .packed = packed, .cols = cols, .inner = inner, .padded = padded, .kind = kind,
                      .gated = gated};
    job.tasks.count = gated ? (cols / 2 + W - 1) / W : (cols + 2 * W - 1) / (2 * W);
    RUN(pack_panels_tasks, &job, threads);
}

typedef struct UnpackRows {
    Tasks tasks;
    const void *packed;
    const int64_t *ids;
    void *y;
    long cols, inner, padded;
    int kind, half;
} UnpackRows;

static void unpack_rows_tasks(void *argument) {
    UnpackRows *job = argument;
    long row;
    while ((row = claim(&job->tasks)) >= 0) {
        const long n = job->ids[row], size = job->half ? 2 : 4;
        char *to = (char *)job->y + row * job->inner * size;
        if (n < 0 || n >= job->cols) {
            memset(to, 0xFF, job->inner * size);
            continue;
        }
        const long first = n / (2 * W) * job->padded * 2 * W, i = n % (2 * W);
        for (long k = 0; k < job->inner; k++) {
            uint32_t bits;
            if (job->kind == FLOAT32) bits = ((const uint32_t *)job->packed)[first + k * 2 * W + i];
            else bits = (uint32_t)((const bf16 *)job->packed)[first + k * 2 * W + 2 * (i % W) + i / W] << 16;
            if (job->half) ((bf16 *)to)[k] = (bf16)(bits >> 16);
            else ((uint32_t *)to)[k] = bits;
        }
    }
}

/* Rows `ids` [rows] of the weight [cols, inner] that was packed (float32 or bfloat16, not gated) -> y [rows, inner],
   bfloat16 (half) or float32. An id outside [0, cols) gives NaN, so that only its own sequence fails. */
void quire_linear_unpack_rows(const void *packed, const int64_t *ids, void *y, long rows, long cols, long inner,
                              long padded, int kind, int half, int threads) {
    UnpackRows job = {.tasks.count = rows, .packed = packed, .ids = ids, .y = y, .cols = cols, .inner = inner,
                      .padded = padded, .kind = kind, .half = half};
    RUN(unpack_rows_tasks, &job, rows < 8 ? 1 : threads);
}

/* Lanes of a vector and rows of a block, for the caller's sizes. */
int quire_lanes(void) { return W; }
int quire_block_rows(void) { return MR; }
