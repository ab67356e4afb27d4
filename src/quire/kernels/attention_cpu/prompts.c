/* Attention of many rows of a sequence (a chunk of a prompt, or chosen rows of it) without AMX.

   A task computes the query heads of one KV head for a block of rows, a span of the context at a time: it packs
   its keys and values into buffers of its own, then goes through the rows in tiles: scores, softmax with a running
   maximum (Dao et al., 2022, FlashAttention), sums of values. Packing is paid once per block, and what is packed stays
   in the second-level cache.

   The rows of a block are pairs (position, query head), position by position: every number of query heads fills the
   tiles, and rows of a tile see nearly as many tokens. Spans start at multiples of their length. Each sum is a chain
   in the order of dimensions or tokens, and a weight past a row's position or before its window is exactly 0. So a
   row's result depends neither on other rows nor on the chunk's first row. Slots past the end of the context are never
   read, nor those before the window of a block's first row.

   Factors are words of 32 bits, by form: a float32, a bfloat16 widened to float32, or a pair of bfloat16 where the CPU
   multiplies pairs. Pairs of keys are neighbouring dimensions, pairs of values are neighbouring tokens. */

enum { FLOATS, WIDENED, PAIRS }; /* forms */
#ifdef __AVX512BF16__
enum { HALF_FORM = PAIRS };
#else
enum { HALF_FORM = WIDENED };
#endif
enum { TILE_ROWS = W == 16 ? 12 : 6 };                     /* times 2 vectors of sums, which stay in registers */
enum { BLOCK_ROWS = 384, BLOCK_WORDS = BLOCK_ROWS * 128 }; /* most rows of a block, most of their dimensions */
enum { KEYS = 256, SPAN_WORDS = KEYS * 128 };              /* most tokens at a time, most of their dimensions */

/* first, rows: of q; length: context with these rows; table: row of the block tables */
typedef struct PromptItem {
    int64_t first, rows, length, table;
} PromptItem;

typedef struct PromptsJob {
    Tasks tasks;
    const void *q, *k, *v;
    void *out;
    const int32_t *tables;
    const PromptItem *items;
    const int64_t *positions; /* of each row of q, ascending in a chunk; NULL: the rows are the last of the context */
    long num_heads, num_kv_heads, dim, block_rows, span, q_stride, block_size, block_stride, head_stride, table_stride;
    long window;           /* see first_seen */
    const float *sinks;    /* [num_heads], or NULL */
    float scale, soft_cap; /* 0: no cap */
    int half;
} PromptsJob;

/* Buffers of a task. width: dimensions rounded up to 2 W; words: dimensions, in words of the form.

   q        [tile][words][TILE_ROWS]
   keys     [2 W tokens][words][2 W]
   values   [2 W dimensions][span, or pairs of its tokens][2 W]
   scores   [TILE_ROWS][KEYS]; weights: the same as words
   sums     [tile][2 W dimensions][TILE_ROWS][2 W]
   maximum, total   [tile][W]: of the rows so far
   hidden, seen     [row]: first token of its window, and the end of the tokens that it sees
   at       [token] of the span: see locate_tokens
   sound    0: a value in `values` is not finite */
typedef struct __attribute__((aligned(64))) PromptBlock {
    float q[BLOCK_WORDS + W], sums[BLOCK_WORDS], keys[SPAN_WORDS], values[SPAN_WORDS];
    float scores[TILE_ROWS * KEYS], weights[TILE_ROWS * KEYS];
    float maximum[BLOCK_ROWS / TILE_ROWS * W], total[BLOCK_ROWS / TILE_ROWS * W];
    long hidden[BLOCK_ROWS], seen[BLOCK_ROWS], at[KEYS];
    int sound;
} PromptBlock;

INLINE long rounded_up(long count, long unit) { return (count + unit - 1) / unit * unit; }

/* W words of a row of `dim` elements from word `at` on; 0 past its end. */
INLINE Words words_of(const void *row, long at, long dim, int form) {
#ifdef __AVX512BF16__
    if (form == PAIRS) return _mm512_maskz_loadu_epi16(mask32_of(dim - 2 * at), (const bf16 *)row + 2 * at);
#endif
    return as_words(load(row, at, lanes_of(dim - at), form != FLOATS));
}

/* A tile's sums [TILE_ROWS][2 W], `pitch` apart, = fade * sums + x times w [count][2 W]; fade NULL: from 0. Word k of
   row r is x[r * row_step + k * word_step]. */
INLINE void multiply_tile(const float *x, long row_step, long word_step, const float *w, long count,
                          const float *fade, float *sums, long pitch, int form) {
    Vec own[2 * TILE_ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < TILE_ROWS; r++) {
        own[2 * r] = own[2 * r + 1] = zeros();
        if (!fade) continue;
        own[2 * r] = get(sums + r * pitch) * fill(fade[r]);
        own[2 * r + 1] = get(sums + r * pitch + W) * fill(fade[r]);
    }
    for (long k = 0; k < count; k++, x += word_step, w += 2 * W) {
        const Vec low = get(w), high = get(w + W);
#pragma GCC unroll 12
        for (int r = 0; r < TILE_ROWS; r++) {
            const Vec value = fill(x[r * row_step]);
            own[2 * r] = madd_words(value, low, own[2 * r], form == PAIRS);
            own[2 * r + 1] = madd_words(value, high, own[2 * r + 1], form == PAIRS);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < TILE_ROWS; r++) {
        put(sums + r * pitch, own[2 * r]);
        put(sums + r * pitch + W, own[2 * r + 1]);
    }
}

/* Find the elements where tokens skip .. count - 1 from `first` on start in a KV head of the cache. */
static inline void locate_tokens(const PromptsJob *job, PromptBlock *block, const int32_t *table, long first,
                                 long skip, long count) {
    long page = (first + skip) / job->block_size, offset = (first + skip) % job->block_size;
    for (long t = skip; t < count; t++) {
        block->at[t] = table[page] * job->block_stride + offset * job->dim;
        if (++offset == job->block_size) {
            offset = 0;
            page++;
        }
    }
}

/* Keys of the located tokens skip .. count - 1; tokens from the last and to the next multiple of 2 W are 0. */
INLINE void pack_keys(const PromptsJob *job, PromptBlock *block, const void *base, long skip, long count, long words,
                      int form) {
    for (long t = skip / (2 * W) * 2 * W; t < rounded_up(count, 2 * W); t += W) {
        float *to = block->keys + t / (2 * W) * words * 2 * W + t % (2 * W);
        for (long at = 0; at < words; at += W) {
            Words some[W];
            for (int i = 0; i < W; i++)
                some[i] = t + i >= skip && t + i < count
                              ? words_of(element(base, block->at[t + i], form != FLOATS), at, job->dim, form)
                              : as_words(zeros());
            transpose(some);
            const long left = words - at < W ? words - at : W;
            for (long i = 0; i < left; i++, to += 2 * W) put(to, as_floats(some[i]));
        }
    }
}

/* Values of the located tokens skip .. count - 1; tokens from the last multiple of 2 W on are 0, and so is the second
   token of a pair past the end. */
INLINE void pack_values(const PromptsJob *job, PromptBlock *block, const void *base, long skip, long count, long width,
                        int form) {
    const long step = form == PAIRS ? 2 : 1;
    Vec bad = zeros();
    for (long t = skip / (2 * W) * 2 * W; t < count; t += step) {
        const int own = t >= skip;
        const void *from = own ? element(base, block->at[t], form != FLOATS) : NULL;
        float *to = block->values + t / step * 2 * W;
        for (long d = 0; d < width; d += W) {
            const Lanes lanes = lanes_of(job->dim - d);
            Vec value = own ? load(from, d, lanes, form != FLOATS) : zeros();
            bad = madd(value, zeros(), bad);
#ifdef __AVX512BF16__
            if (form == PAIRS) {
                Vec next = zeros();
                if (t + 1 >= skip && t + 1 < count) next = load(element(base, block->at[t + 1], 1), d, lanes, 1);
                bad = madd(next, zeros(), bad);
                value = as_floats(_mm512_or_si512(_mm512_srli_epi32(as_words(value), 16), as_words(next)));
            }
#endif
            put(to + d % (2 * W), value);
            if (d % (2 * W)) to += job->span / step * 2 * W;
        }
    }
    block->sound = sum_of(bad) == 0;
}

/* Scores from .. width of a row, of which it sees those from `hidden` on and before `seen`, -> weights. Returns the sum
   of the weights; raises `maximum` to that of the scores. special: 0 without window and soft cap */
INLINE float soften_scores(const PromptsJob *job, float *scores, float *weights, long hidden, long seen, long from,
                           long width, float *maximum, int form, int special) {
    const Vec scale = fill(job->scale), none = fill(-INFINITY);
    Vec most = none, sum = zeros();
    for (long t = from; t < width; t += W) {
        Vec value = get(scores + t) * scale;
        if (special && job->soft_cap) value = capped(value, job->soft_cap);
        value = choose(lanes_of(seen - t), value, none);
        if (special) value = choose(lanes_of(hidden - t), none, value);
        put(scores + t, value);
        most = largest(most, value);
    }
    const float now = fmaxf(*maximum, largest_of(most));
    const Vec peak = fill(now > -INFINITY ? now : 0.0f); /* as in rows.c */
    for (long t = from; t < width; t += W) {
        const Vec weight = exp_of(get(scores + t) - peak);
        sum = sum + weight;
        if (form == PAIRS) write_halves((bf16 *)weights + t, lanes_of(W), narrow(weight));
        else put(weights + t, weight);
    }
    *maximum = now;
    return sum_of(sum);
}

/* A row's sums += weights of the tokens hidden .. seen - 1, which it sees, times values, as multiply_tile would if all
   values were finite: a weight of 0 does not hide a value that is not, 0 * NaN is NaN. */
INLINE void add_seen_values(const float *weights, const float *values, long hidden, long seen, float fade, float *sums,
                            int form) {
    const long step = form == PAIRS ? 2 : 1;
    Vec low = get(sums) * fill(fade), high = get(sums + W) * fill(fade);
    const long from = hidden > 0 ? hidden / step : 0;
    weights += from;
    values += from * 2 * W;
    for (long t = from * step; t < seen; t += step, weights++, values += 2 * W) {
        Vec a = get(values), b = get(values + W);
        if (form == PAIRS && (t + 1 == seen || t < hidden)) {
            const Words own = fill_words((t + 1 == seen ? 0 : ~0xFFFF) | (t < hidden ? 0 : 0xFFFF));
            a = as_floats(as_words(a) & own);
            b = as_floats(as_words(b) & own);
        }
        low = madd_words(fill(*weights), a, low, form == PAIRS);
        high = madd_words(fill(*weights), b, high, form == PAIRS);
    }
    put(sums, low);
    put(sums + W, high);
}

/* A tile's rows over the packed tokens, of which `start` precede in the context. */
INLINE void attend_tile(const PromptsJob *job, PromptBlock *block, long tile, long start, long words, long width,
                        int form, int special) {
    const long *seen = block->seen + tile * TILE_ROWS, step = form == PAIRS ? 2 : 1;
    const long *hidden = block->hidden + tile * TILE_ROWS; /* the first row has the first token of all */
    const long from = special && *hidden > start ? (*hidden - start) / (2 * W) * 2 * W : 0;
    const long left = seen[TILE_ROWS - 1] - start; /* the last row sees most */
    const long most = left < job->span ? left : job->span;
    float *maximum = block->maximum + tile * W, *total = block->total + tile * W, fade[W], part[W] = {0};
    for (long t = from; t < most; t += 2 * W)
        multiply_tile(block->q + tile * words * TILE_ROWS, 1, TILE_ROWS, block->keys + t * words, words, NULL,
                      block->scores + t, KEYS, form);
    const Vec before = get(maximum);
    for (long r = 0; r < TILE_ROWS; r++)
        part[r] = soften_scores(job, block->scores + r * KEYS, block->weights + r * KEYS / step,
                                special ? hidden[r] - start : 0, seen[r] - start, from, rounded_up(most, 2 * W),
                                maximum + r, form, special);
    Vec peak = get(maximum);
    peak = largest(peak, fill(-FLT_MAX)); /* before any score both are minus infinity, whose difference is NaN */
    put(fade, exp_of(before - peak));
    put(total, madd(get(total), get(fade), get(part)));
    for (long d = 0; d < width; d += 2 * W) {
        float *sums = block->sums + (tile * width + d) * TILE_ROWS;
        const float *values = block->values + d * (job->span / step);
        if (block->sound) {
            multiply_tile(block->weights + from / step, KEYS / step, 1, values + from / step * 2 * W,
                          (most + step - 1) / step - from / step, fade, sums, 2 * W, form);
            continue;
        }
        for (long r = 0; r < TILE_ROWS; r++)
            add_seen_values(block->weights + r * KEYS / step, values, special ? hidden[r] - start : 0,
                            seen[r] - start < most ? seen[r] - start : most, fade[r], sums + r * 2 * W, form);
    }
}

/* Tokens that row `row` of a KV head's pairs (position, query head) sees. */
INLINE long seen_by(const PromptsJob *job, const PromptItem *item, long row) {
    const long token = row / (job->num_heads / job->num_kv_heads);
    return job->positions ? job->positions[item->first + token] + 1 : item->length - item->rows + token + 1;
}

/* Rows first .. first + rows - 1 of a KV head's pairs (position, query head). special: 0 without window and soft cap */
INLINE void attend_rows(const PromptsJob *job, PromptBlock *block, const PromptItem *item, long kv_head, long first,
                        long rows, int form, int special) {
    const int half = form != FLOATS;
    const long dim = job->dim, width = rounded_up(dim, 2 * W), words = form == PAIRS ? (dim + 1) / 2 : dim;
    const long group = job->num_heads / job->num_kv_heads, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const long context = seen_by(job, item, first + rows - 1);
    const long begin = special ? first_seen(seen_by(job, item, first) - 1, job->window) : 0;
    const int32_t *table = job->tables + item->table * job->table_stride;
    const void *k = element(job->k, kv_head * job->head_stride, half);
    const void *v = element(job->v, kv_head * job->head_stride, half);
    for (long tile = 0; tile < tiles; tile++) {
        const void *from[TILE_ROWS];
        for (long r = 0; r < TILE_ROWS; r++) { /* the last tile repeats the last row */
            const long own = tile * TILE_ROWS + r, row = first + (own < rows ? own : rows - 1);
            block->seen[own] = seen_by(job, item, row);
            block->hidden[own] = special ? first_seen(block->seen[own] - 1, job->window) : 0;
            from[r] = element(job->q, (item->first + row / group) * job->q_stride +
                                          (kv_head * group + row % group) * dim, half);
        }
        float *to = block->q + tile * words * TILE_ROWS;
        for (long at = 0; at < words; at += W) {
            Words some[W];
            for (int r = 0; r < W; r++) some[r] = words_of(from[r < TILE_ROWS ? r : 0], at, dim, form);
            transpose(some);
            const long left = words - at < W ? words - at : W;
            /* W - TILE_ROWS lanes too many, which the next vector covers */
            for (long i = 0; i < left; i++, to += TILE_ROWS) put(to, as_floats(some[i]));
        }
        put(block->maximum + tile * W, fill(-INFINITY));
        put(block->total + tile * W, zeros());
    }
    memset(block->sums, 0, tiles * TILE_ROWS * width * sizeof(float));
    for (long start = special ? begin / job->span * job->span : 0; start < context; start += job->span) {
        const long count = context - start < job->span ? context - start : job->span;
        const long skip = special && begin > start ? begin - start : 0;
        locate_tokens(job, block, table, start, skip, count);
        pack_keys(job, block, k, skip, count, words, form);
        pack_values(job, block, v, skip, count, width, form);
        for (long tile = 0; tile < tiles; tile++)
            if (block->seen[tile * TILE_ROWS + TILE_ROWS - 1] > start &&
                (!special || block->hidden[tile * TILE_ROWS] < start + count))
                attend_tile(job, block, tile, start, words, width, form, special);
    }
    for (long own = 0; own < rows; own++) {
        const long row = first + own, tile = own / TILE_ROWS, r = own % TILE_ROWS;
        const long head = kv_head * group + row % group;
        const long to = ((item->first + row / group) * job->num_heads + head) * dim;
        const float *sink = job->sinks ? job->sinks + head : NULL;
        const Vec share = fill(share_of(block->maximum[tile * W + r], block->total[tile * W + r], sink));
        for (long d = 0; d < dim; d += W) {
            const long at = ((tile * width + d / (2 * W) * 2 * W) * TILE_ROWS) + r * 2 * W + d % (2 * W);
            store(job->out, to + d, lanes_of(dim - d), get(block->sums + at) * share, half);
        }
    }
}

static inline long blocks_of(const PromptsJob *job, const PromptItem *item) {
    return (item->rows * (job->num_heads / job->num_kv_heads) + job->block_rows - 1) / job->block_rows;
}

static void attend_prompt_tasks(void *argument) {
    PromptsJob *job = argument;
    PromptBlock block;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const PromptItem *item = job->items;
        long blocks;
        for (;; item++) {
            blocks = blocks_of(job, item);
            if (task < blocks * job->num_kv_heads) break;
            task -= blocks * job->num_kv_heads;
        }
        /* A head's tasks follow each other: they read the same tokens. Its last rows come first: they see most. */
        const long kv_head = task / blocks, first = (blocks - 1 - task % blocks) * job->block_rows;
        const long left = item->rows * (job->num_heads / job->num_kv_heads) - first;
        const long rows = left < job->block_rows ? left : job->block_rows;
        const int special = job->window || job->soft_cap;
        if (job->half && special) attend_rows(job, &block, item, kv_head, first, rows, HALF_FORM, 1);
        else if (special) attend_rows(job, &block, item, kv_head, first, rows, FLOATS, 1);
        else if (job->half) attend_rows(job, &block, item, kv_head, first, rows, HALF_FORM, 0);
        else attend_rows(job, &block, item, kv_head, first, rows, FLOATS, 0);
    }
}

/* Chunks `items` [num_items] of q [*, num_heads, dim] with a stride between rows -> the same rows of out. k, v, tables,
   sinks, soft_cap and half as for quire_attend_rows; positions, window: see PromptsJob; dim <= MAX_DIM */
void quire_attend_prompts(const void *q, void *out, const void *k, const void *v, const int32_t *tables,
                          const PromptItem *items, const int64_t *positions, const float *sinks, long num_items,
                          long num_heads, long num_kv_heads, long dim, long q_stride, long block_size,
                          long block_stride, long head_stride, long table_stride, long window, float scale,
                          float soft_cap, int half, int threads) {
    PromptsJob job = {.q = q, .k = k, .v = v, .out = out, .tables = tables, .items = items,
                      .positions = positions, .num_heads = num_heads, .num_kv_heads = num_kv_heads, .dim = dim,
                      .q_stride = q_stride, .block_size = block_size, .block_stride = block_stride,
                      .head_stride = head_stride, .table_stride = table_stride, .window = window,
                      .sinks = sinks, .scale = scale, .soft_cap = soft_cap, .half = half, .span = KEYS};
    while (job.span * rounded_up(dim, 2 * W) > SPAN_WORDS) job.span /= 2;
    const long most = BLOCK_WORDS / rounded_up(dim, 2 * W) / TILE_ROWS * TILE_ROWS;
    for (job.block_rows = most < BLOCK_ROWS ? most : BLOCK_ROWS;;) {
        job.tasks.count = 0;
        for (long i = 0; i < num_items; i++) job.tasks.count += blocks_of(&job, items + i) * num_kv_heads;
        if (job.tasks.count >= 4L * threads || job.block_rows < 2 * TILE_ROWS) break;
        job.block_rows = rounded_up(job.block_rows / 2, TILE_ROWS);
    }
    RUN(attend_prompt_tasks, &job, threads);
}
