/* Latent attention to chosen tokens: a task has some heads of a row. Tokens come in tiles: gathered in float32, turned
   for the scores, and summed with a running softmax (Milakov and Gimelshein, 2018). */

enum {
    CHOSEN_KEYS = 32, /* tokens of a tile */
    CHOSEN_VECS = CHOSEN_KEYS / W,
    CHOSEN_HEADS = W == 16 ? 8 : 2, /* heads whose scores are in registers */
    CHOSEN_WIDE = 4,                /* vectors of a sum in registers, of CHOSEN_SUMS heads */
    CHOSEN_SUMS = W == 16 ? 4 : 2,
    CHOSEN_TILE = 128 /* codes that share a scale */
};

/* Numbers of a token in the cache: bytes between blocks and between tokens, and their type. */
typedef struct ChosenSide {
    const char *base;
    long block_stride, token_stride, width;
    int half, coded;
} ChosenSide;

typedef struct ChosenJob {
    Tasks tasks;
    const void *q;
    ChosenSide latent, rope;
    const char *scales; /* of codes, one for each CHOSEN_TILE; NULL: all are `unit` */
    const float *codes;
    const int32_t *tables, *positions;
    const int64_t *table_rows;
    void *out;
    char *scratch;
    long heads, parts, top_k, block_size, table_stride, scale_block_stride, scale_token_stride, scratch_bytes;
    float scale, unit;
    int half, entered;
} ChosenJob;

/* Memory of a thread. */
typedef struct ChosenScratch {
    float *q, *wide, *packed, *scores, *sums, *most, *total;
} ChosenScratch;

static ChosenScratch chosen_scratch(ChosenJob *job) {
    const long thread = __atomic_fetch_add(&job->entered, 1, __ATOMIC_RELAXED);
    const long width = job->latent.width + job->rope.width, heads = job->heads;
    ChosenScratch own = {.q = (float *)(job->scratch + thread * job->scratch_bytes)};
    own.wide = own.q + heads * width;
    own.packed = own.wide + CHOSEN_KEYS * width;
    own.scores = own.packed + CHOSEN_KEYS * width;
    own.sums = own.scores + heads * CHOSEN_KEYS;
    own.most = own.sums + heads * job->latent.width;
    own.total = own.most + heads;
    return own;
}

/* Read the numbers of a side of a token to `to`, without scales. */
static void read_side(const ChosenSide *side, const float *codes, long block, long offset, float *to) {
    const char *from = side->base + block * side->block_stride + offset * side->token_stride;
    if (side->coded) {
        for (long i = 0; i < side->width; i++) to[i] = codes[((const uint8_t *)from)[i]];
        return;
    }
    for (long i = 0; i < side->width; i += W) {
        const Lanes lanes = lanes_of(side->width - i);
        put_some(to + i, lanes, load(from, i, lanes, side->half));
    }
}

/* Gather `count` tokens as [CHOSEN_KEYS][width], and turned as [width][CHOSEN_KEYS]. Tokens behind them are zeros. */
static void gather_chosen(const ChosenJob *job, const int32_t *table, const int32_t *positions, long count,
                          ChosenScratch *own) {
    const long latent = job->latent.width, width = latent + job->rope.width;
    for (long j = 0; j < CHOSEN_KEYS; j++) {
        float *to = own->wide + j * width;
        if (j >= count) {
            memset(to, 0, width * sizeof *to);
            continue;
        }
        const long block = table[positions[j] / job->block_size], offset = positions[j] % job->block_size;
        read_side(&job->latent, job->codes, block, offset, to);
        read_side(&job->rope, job->codes, block, offset, to + latent);
        if (job->scales) {
            const float *scales = (const float *)(job->scales + block * job->scale_block_stride +
                                                  offset * job->scale_token_stride);
            for (long i = 0; i < latent; i++) to[i] *= scales[i / CHOSEN_TILE];
        } else if (job->unit != 1.0f) {
            for (long i = 0; i < width; i++) to[i] *= job->unit;
        }
    }
    for (long d = 0; d < width; d += W) {
        const Lanes lanes = lanes_of(width - d);
        const long some = width - d < W ? width - d : W;
        for (long j = 0; j < CHOSEN_KEYS; j += W) {
            Words r[W];
            for (long i = 0; i < W; i++) r[i] = as_words(get_some(own->wide + (j + i) * width + d, lanes));
            transpose(r);
            for (long i = 0; i < some; i++) put_words(own->packed + (d + i) * CHOSEN_KEYS + j, r[i]);
        }
    }
}

/* Scores [heads][CHOSEN_KEYS] of gathered tokens for queries q [heads][width]. */
static void score_chosen(const float *q, long heads, long width, const float *packed, float *scores) {
    for (long head = 0; head < heads; head += CHOSEN_HEADS) {
        const long some = heads - head < CHOSEN_HEADS ? heads - head : CHOSEN_HEADS;
        Vec sums[CHOSEN_HEADS][CHOSEN_VECS];
        const float *of[CHOSEN_HEADS];
        for (int h = 0; h < CHOSEN_HEADS; h++) {
            of[h] = q + (head + (h < some ? h : 0)) * width;
            for (int v = 0; v < CHOSEN_VECS; v++) sums[h][v] = zeros();
        }
        for (long d = 0; d < width; d++) {
            Vec key[CHOSEN_VECS];
            for (int v = 0; v < CHOSEN_VECS; v++) key[v] = get(packed + d * CHOSEN_KEYS + v * W);
            for (int h = 0; h < CHOSEN_HEADS; h++)
                for (int v = 0; v < CHOSEN_VECS; v++) sums[h][v] = madd(fill(of[h][d]), key[v], sums[h][v]);
        }
        for (long h = 0; h < some; h++)
            for (int v = 0; v < CHOSEN_VECS; v++) put(scores + (head + h) * CHOSEN_KEYS + v * W, sums[h][v]);
    }
}

/* Turn scores of `count` tokens into weights, and scale what was summed before to the new largest score. A score that
   is not a number stays one in its head's total. */
static void weigh_chosen(ChosenScratch *own, long heads, long latent, long count) {
    for (long h = 0; h < heads; h++) {
        float *scores = own->scores + h * CHOSEN_KEYS, most = own->most[h], total = 0;
        for (long j = 0; j < count; j++) most = scores[j] > most ? scores[j] : most;
        if (most > own->most[h]) {
            const float down = own->total[h] == 0 ? 0 : expf(own->most[h] - most);
            for (long i = 0; i < latent; i++) own->sums[h * latent + i] *= down;
            own->total[h] *= down;
            own->most[h] = most;
        }
        for (long v = 0; v < CHOSEN_KEYS; v += W) {
            const Lanes lanes = lanes_of(count - v);
            const Vec weight = choose(lanes, exp_of(get(scores + v) - fill(most)), zeros());
            put(scores + v, weight);
            total += sum_of(weight);
        }
        own->total[h] += total;
    }
}

/* Add the weighted latents of a tile to the sums [heads][latent]. */
static void sum_chosen(ChosenScratch *own, long heads, long latent, long width, long count) {
    for (long head = 0; head < heads; head += CHOSEN_SUMS) {
        const long some = heads - head < CHOSEN_SUMS ? heads - head : CHOSEN_SUMS;
        for (long i = 0; i < latent; i += CHOSEN_WIDE * W) {
            Vec sums[CHOSEN_SUMS][CHOSEN_WIDE];
            Lanes lanes[CHOSEN_WIDE];
            for (int v = 0; v < CHOSEN_WIDE; v++) lanes[v] = lanes_of(latent - i - v * W);
            for (long h = 0; h < CHOSEN_SUMS; h++)
                for (int v = 0; v < CHOSEN_WIDE; v++)
                    sums[h][v] = h < some ? get_some(own->sums + (head + h) * latent + i + v * W, lanes[v]) : zeros();
            for (long j = 0; j < count; j++) {
                const float *from = own->wide + j * width + i;
                Vec number[CHOSEN_WIDE];
                for (int v = 0; v < CHOSEN_WIDE; v++) number[v] = get_some(from + v * W, lanes[v]);
                for (long h = 0; h < CHOSEN_SUMS; h++) {
                    const Vec weight = fill(own->scores[(head + (h < some ? h : 0)) * CHOSEN_KEYS + j]);
                    for (int v = 0; v < CHOSEN_WIDE; v++) sums[h][v] = madd(weight, number[v], sums[h][v]);
                }
            }
            for (long h = 0; h < some; h++)
                for (int v = 0; v < CHOSEN_WIDE; v++)
                    put_some(own->sums + (head + h) * latent + i + v * W, lanes[v], sums[h][v]);
        }
    }
}

static void chosen_tasks(void *argument) {
    ChosenJob *job = argument;
    ChosenScratch own = chosen_scratch(job);
    const long latent = job->latent.width, width = latent + job->rope.width;
    const long each = (job->heads + job->parts - 1) / job->parts;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long row = task / job->parts, head = task % job->parts * each;
        const long heads = job->heads - head < each ? job->heads - head : each;
        const int32_t *positions = job->positions + row * job->top_k;
        const int32_t *table = job->tables + job->table_rows[row] * job->table_stride;
        if (heads <= 0) continue;
        for (long i = 0; i < heads * width; i++)
            own.q[i] = number_at(job->q, (row * job->heads + head) * width + i, job->half) * job->scale;
        for (long h = 0; h < heads; h++) own.most[h] = -INFINITY, own.total[h] = 0;
        memset(own.sums, 0, heads * latent * sizeof *own.sums);
        for (long first = 0; first < job->top_k && positions[first] >= 0; first += CHOSEN_KEYS) {
            long count = 1;
            while (count < CHOSEN_KEYS && first + count < job->top_k && positions[first + count] >= 0) count++;
            gather_chosen(job, table, positions + first, count, &own);
            score_chosen(own.q, heads, width, own.packed, own.scores);
            weigh_chosen(&own, heads, latent, count);
            sum_chosen(&own, heads, latent, width, count);
        }
        for (long h = 0; h < heads; h++) {
            const Vec over = fill(1.0f / own.total[h]);
            const long at = (row * job->heads + head + h) * latent;
            for (long i = 0; i < latent; i += W) {
                const Lanes lanes = lanes_of(latent - i);
                store(job->out, at + i, lanes, get_some(own.sums + h * latent + i, lanes) * over, job->half);
            }
        }
    }
}

/* Attention of rows q [rows, heads, latent + rope] to the tokens at positions [rows, top_k] (-1: no more) of their
   sequences, whose block tables are tables[table_rows[row] * table_stride]; see quire.kernels.latent. Writes out [rows,
   heads, latent]. Strides of the cache are in bytes. latent_kind, rope_kind: 0 float32, 1 bfloat16, 2 codes, whose
   numbers are codes [256]. scales: of the codes of latents; NULL: all numbers are multiplied by unit. parts: tasks into
   which the heads of a row are divided. scratch: scratch_bytes for each thread. half: q and out are bfloat16. */
void quire_chosen(const void *q, const void *latent, const void *rope, const void *scales, const float *codes,
                  const int32_t *tables, const int64_t *table_rows, const int32_t *positions, void *out, void *scratch,
                  long rows, long heads, long latent_width, long rope_width, long top_k, long block_size,
                  long latent_block, long latent_token, long rope_block, long rope_token, long scale_block,
                  long scale_token, long table_stride, long parts, long scratch_bytes, float scale, float unit,
                  int latent_kind, int rope_kind, int half, int threads) {
    ChosenJob job = {.tasks.count = rows * parts, .q = q,
                     .latent = {latent, latent_block, latent_token, latent_width, latent_kind == 1, latent_kind == 2},
                     .rope = {rope, rope_block, rope_token, rope_width, rope_kind == 1, rope_kind == 2},
                     .scales = scales, .codes = codes, .tables = tables, .positions = positions,
                     .table_rows = table_rows, .out = out, .scratch = scratch, .heads = heads, .parts = parts,
                     .top_k = top_k, .block_size = block_size, .table_stride = table_stride,
                     .scale_block_stride = scale_block, .scale_token_stride = scale_token,
                     .scratch_bytes = scratch_bytes, .scale = scale, .unit = unit, .half = half};
    RUN(chosen_tasks, &job, threads);
}
