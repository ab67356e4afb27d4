/* Attention of many consecutive rows of a sequence (a chunk of a prompt) in bfloat16 on AMX tiles.

   First the context's keys and values are written in the order of tiles, once for all rows and heads that read them.
   Then each task computes 32 rows of a query head, SPAN tokens at a time: scores, softmax with a running maximum (Dao
   et al., 2022, FlashAttention), sums of values. Spans start at multiples of SPAN for every chunk, and a row's
   arithmetic does not depend on other rows. Slots past the end of the context are never read, nor those before the
   window of the chunk's first row; tiles hold zeros there. A task skips groups of STEP tokens that none of its rows
   sees.

   A weight of 0 does not hide a value that is not finite: 0 * NaN is NaN. So values are checked while they are written
   in order. The caller computes the few rows again that read such a value of a later token (see `first_bad`); with a
   window also all rows after it, which read values of tokens that they see no more. */

#ifdef HAVE_TILES

enum { SPAN = 128, ROWS = 32, WIDEST = 256 }; /* tokens at a time, rows of a task, largest head */

/* first, rows: of q; length: context with these rows; table: row of the block tables; packed: where this chunk's keys
   and values start in the scratch, in elements; first_bad: lowered to the first group of STEP tokens that has a value
   that is not finite; start: first token that the first row sees. */
typedef struct ChunkItem {
    int64_t first, rows, length, table, packed, first_bad, start;
} ChunkItem;

typedef struct ChunksJob {
    Tasks tasks;
    const bf16 *q, *k, *v;
    bf16 *out, *packed;
    const int32_t *tables;
    ChunkItem *items;
    long num_items, num_heads, num_kv_heads, dim, steps, q_stride, out_stride, block_size, block_stride, head_stride;
    long table_stride, window; /* see first_seen */
    const float *sinks;        /* [num_heads], or NULL */
    float scale, soft_cap;     /* 0: no cap */
} ChunksJob;

/* Groups of STEP tokens from that of the first token on. */
static inline long groups_of(const ChunkItem *item) { return (item->length + STEP - 1) / STEP - item->start / STEP; }

/* Keys, then values, of one KV head of a chunk: as many elements each, from the group of the first token on. */
static inline bf16 *keys_of(const ChunksJob *job, const ChunkItem *item, long kv_head) {
    return job->packed + item->packed + kv_head * 2 * groups_of(item) * job->steps * 2 * TILE;
}

static inline bf16 *values_of(const ChunksJob *job, const ChunkItem *item, long kv_head) {
    return keys_of(job, item, kv_head) + groups_of(item) * job->steps * 2 * TILE;
}

/* 32 tokens: keys as [16 tokens][step] tiles of dimension pairs, values as [16 dimensions] tiles of token pairs.
   windowed: 0 if the item starts at token 0 */
INLINE void pack_tokens(const ChunksJob *job, ChunkItem *item, long place, long kv_head, int windowed) {
    const int32_t *table = job->tables + item->table * job->table_stride;
    const long group = place + (windowed ? item->start / STEP : 0), first = group * STEP;
    const long count = item->length - first < STEP ? item->length - first : STEP;
    const long skip = windowed && item->start > first ? item->start - first : 0;
    const bf16 *key[STEP], *value[STEP];
    for (long t = skip; t < count; t++) {
        const long at = table[(first + t) / job->block_size] * job->block_stride + kv_head * job->head_stride +
                        (first + t) % job->block_size * job->dim;
        key[t] = job->k + at;
        value[t] = job->v + at;
    }
    bf16 *to = keys_of(job, item, kv_head) + place * job->steps * 2 * TILE;
    for (long half = 0; half < 2; half++)
        for (long step = 0; step < job->steps; step++, to += TILE) {
            const __mmask32 mask = mask32_of(job->dim - step * STEP);
            __m512i rows[16];
            for (long t = 0; t < 16; t++)
                rows[t] = half * 16 + t >= skip && half * 16 + t < count
                              ? _mm512_maskz_loadu_epi16(mask, key[half * 16 + t] + step * STEP)
                              : _mm512_setzero_si512();
            transpose(rows);
            for (long t = 0; t < 16; t++) _mm512_store_si512(to + t * 32, rows[t]);
        }
    to = values_of(job, item, kv_head) + place * job->steps * 2 * TILE;
    __m512i largest = _mm512_setzero_si512();
    for (long d = 0; d < job->steps * STEP; d += 16)
        for (long t = 0; t < STEP; t += 2, to += 32) {
            const Lanes mask = lanes_of(job->dim - d);
            __m512i pair = _mm512_setzero_si512();
            if (t >= skip && t < count) pair = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, value[t] + d));
            if (t + 1 >= skip && t + 1 < count) {
                const __m512i next = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, value[t + 1] + d));
                pair = _mm512_or_si512(pair, _mm512_slli_epi32(next, 16));
            }
            _mm512_store_si512(to, pair);
            largest = _mm512_max_epu16(largest, _mm512_and_si512(pair, _mm512_set1_epi16(0x7FFF)));
        }
    if (_mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7F80))) { /* infinity; NaN are above it */
        int64_t found = __atomic_load_n(&item->first_bad, __ATOMIC_RELAXED);
        while (group < found && !__atomic_compare_exchange_n(&item->first_bad, &found, group, 0, __ATOMIC_RELAXED,
                                                             __ATOMIC_RELAXED)) {}
    }
}

static void pack_context_tasks(void *argument) {
    ChunksJob *job = argument;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        ChunkItem *item = job->items;
        for (; task >= groups_of(item) * job->num_kv_heads; item++) task -= groups_of(item) * job->num_kv_heads;
        const long place = task / job->num_kv_heads, kv_head = task % job->num_kv_heads;
        if (job->window) pack_tokens(job, item, place, kv_head, 1);
        else pack_tokens(job, item, place, kv_head, 0);
    }
}

/* State of a task: sums [32][dim], and per row the maximum and the sum of the weights. */
typedef struct __attribute__((aligned(64))) Block {
    bf16 q[ROWS * WIDEST], weights[ROWS * SPAN];
    float scores[ROWS * SPAN], sums[ROWS * WIDEST], maximum[ROWS], total[ROWS];
} Block;

/* scores [32][SPAN] of 32 rows and the keys of groups from .. groups - 1 of a span */
static inline void score(const ChunksJob *job, Block *block, const bf16 *keys, long from, long groups) {
    const long width = job->steps * STEP;
    for (long group = from; group < groups; group++, keys += job->steps * 2 * TILE) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long step = 0; step < job->steps; step++) {
            _tile_loadd(4, block->q + step * STEP, width * 2);
            _tile_loadd(6, keys + step * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, keys + (job->steps + step) * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, block->q + 16 * width + step * STEP, width * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        float *to = block->scores + group * STEP;
        _tile_stored(0, to, SPAN * 4);
        _tile_stored(1, to + 16, SPAN * 4);
        _tile_stored(2, to + 16 * SPAN, SPAN * 4);
        _tile_stored(3, to + 16 * SPAN + 16, SPAN * 4);
    }
}

/* Scores from .. width of row i, of which it sees those from `hidden` on and before `seen`, -> weights; its sums so far
   are scaled to the new maximum. special: 0 if `hidden` and `from` are 0 and there is no soft cap */
INLINE void soften_row(const ChunksJob *job, Block *block, long i, long hidden, long seen, long from, long width,
                       int special) {
    const __m512 scale = _mm512_set1_ps(job->scale), none = _mm512_set1_ps(-INFINITY);
    float *scores = block->scores + i * SPAN;
    __m512 most = none, sum = _mm512_setzero_ps();
    for (long t = special ? from : 0; t < width; t += 16) {
        const Lanes mask = special ? lanes_of(seen - t) & ~lanes_of(hidden - t) : lanes_of(seen - t);
        __m512 scaled = _mm512_mul_ps(_mm512_load_ps(scores + t), scale);
        if (special && job->soft_cap) scaled = capped(scaled, job->soft_cap);
        const __m512 value = _mm512_mask_mov_ps(none, mask, scaled);
        _mm512_store_ps(scores + t, value);
        most = _mm512_max_ps(most, value);
    }
    const float before = block->maximum[i], now = fmaxf(before, _mm512_reduce_max_ps(most));
    const __m512 peak = _mm512_set1_ps(now > -INFINITY ? now : 0.0f); /* as in rows.c */
    for (long t = special ? from : 0; t < width; t += 16) {
        const Lanes mask = special ? lanes_of(seen - t) & ~lanes_of(hidden - t) : lanes_of(seen - t);
        const __m512 weight = _mm512_maskz_mov_ps(mask, exp_of(_mm512_sub_ps(_mm512_load_ps(scores + t), peak)));
        sum = _mm512_add_ps(sum, weight);
        _mm256_store_si256((__m256i *)(block->weights + i * SPAN + t), narrow(weight));
    }
    float fade = 1.0f;
    if (now > before && before > -INFINITY) {
        const __m512 factor = exp_of(_mm512_set1_ps(before - now));
        fade = _mm512_cvtss_f32(factor);
        float *sums = block->sums + i * job->steps * STEP;
        for (long d = 0; d < job->steps * STEP; d += 16)
            _mm512_store_ps(sums + d, _mm512_mul_ps(_mm512_load_ps(sums + d), factor));
    }
    block->maximum[i] = now;
    block->total[i] = block->total[i] * fade + _mm512_reduce_add_ps(sum);
}

/* sums [32][dim] += weights times values of groups first .. groups - 1 of a span */
static inline void add_chunk_values(const ChunksJob *job, Block *block, const bf16 *values, long first, long groups) {
    const long width = job->steps * STEP, pitch = width * 4;
    for (long d = 0; d < width; d += STEP) {
        float *sums = block->sums + d;
        _tile_loadd(0, sums, pitch);
        _tile_loadd(1, sums + 16, pitch);
        _tile_loadd(2, sums + 16 * width, pitch);
        _tile_loadd(3, sums + 16 * width + 16, pitch);
        for (long group = first; group < groups; group++) {
            const bf16 *from = values + ((group - first) * job->steps * 2 + d / 16) * TILE;
            _tile_loadd(4, block->weights + group * STEP, SPAN * 2);
            _tile_loadd(6, from, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, from + TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, block->weights + 16 * SPAN + group * STEP, SPAN * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, pitch);
        _tile_stored(1, sums + 16, pitch);
        _tile_stored(2, sums + 16 * width, pitch);
        _tile_stored(3, sums + 16 * width + 16, pitch);
    }
}

/* Rows first .. first + rows of the chunk, at most 32, of one head. special: 0 without window and soft cap */
INLINE void attend_block(const ChunksJob *job, Block *block, const ChunkItem *item, long first, long rows, long head,
                         int special) {
    const long kv_head = head / (job->num_heads / job->num_kv_heads), width = job->steps * STEP;
    const long position = item->length - item->rows + first, context = position + rows;
    const long begin = special ? first_seen(position, job->window) : 0, packed = special ? item->start / STEP : 0;
    const bf16 *keys = keys_of(job, item, kv_head), *values = values_of(job, item, kv_head);
    for (long i = 0; i < ROWS; i++) {
        const bf16 *from = job->q + (item->first + first + i) * job->q_stride + head * job->dim;
        for (long d = 0; d < width; d += STEP) {
            const __mmask32 mask = i < rows ? mask32_of(job->dim - d) : 0;
            _mm512_store_si512(block->q + i * width + d, _mm512_maskz_loadu_epi16(mask, from + d));
        }
        block->maximum[i] = -INFINITY;
        block->total[i] = 0;
    }
    memset(block->sums, 0, ROWS * width * sizeof(float));
    for (long start = special ? begin / SPAN * SPAN : 0; start < context; start += SPAN) {
        const long left = (context - start + STEP - 1) / STEP, groups = left < SPAN / STEP ? left : SPAN / STEP;
        const long from = special && begin > start ? (begin - start) / STEP : 0;
        const long tiles = (start / STEP + from - packed) * job->steps * 2 * TILE;
        score(job, block, keys + tiles, from, groups);
        for (long i = 0; i < ROWS; i++) {
            const long seen = i < rows ? position + i + 1 - start : 0;
            const long hidden = special ? first_seen(position + i, job->window) - start : 0;
            if (seen > 0 && (!special || hidden < groups * STEP))
                soften_row(job, block, i, hidden, seen, from * STEP, groups * STEP, special);
            else memset(block->weights + i * SPAN, 0, SPAN * sizeof(bf16));
        }
        add_chunk_values(job, block, values + tiles, from, groups);
    }
    for (long i = 0; i < rows; i++) {
        const float *sink = job->sinks ? job->sinks + head : NULL;
        const __m512 share = _mm512_set1_ps(share_of(block->maximum[i], block->total[i], sink));
        bf16 *to = job->out + (item->first + first + i) * job->out_stride + head * job->dim;
        for (long d = 0; d < job->dim; d += 16)
            store(to, d, lanes_of(job->dim - d), _mm512_mul_ps(_mm512_load_ps(block->sums + i * width + d), share), 1);
    }
}

static void attend_chunk_tasks(void *argument) {
    ChunksJob *job = argument;
    Block block;
    configure_tiles(16, 16);
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const ChunkItem *item = job->items;
        long blocks;
        for (;; item++) {
            blocks = (item->rows + ROWS - 1) / ROWS;
            if (task < blocks * job->num_heads) break;
            task -= blocks * job->num_heads;
        }
        /* Last rows first: they see most tokens, and short tasks at the end balance the threads. */
        const long head = task / blocks, first = (blocks - 1 - task % blocks) * ROWS;
        const long rows = item->rows - first < ROWS ? item->rows - first : ROWS;
        if (job->window || job->soft_cap) attend_block(job, &block, item, first, rows, head, 1);
        else attend_block(job, &block, item, first, rows, head, 0);
    }
    _tile_release();
}

/* Chunks `items` [num_items] of q [*, num_heads, dim] -> the same rows of out. Both have a stride between rows: the
   heads may be a part of the model's heads.

   packed  scratch for every item's keys and values: 2 * num_kv_heads * (length - start) * dim elements, with length and
           dim rounded up to 32, start rounded down to 32; begins at a multiple of 64 bytes
   window  0: none; else the items' `start` follows from it
   k, v, tables, sinks, soft_cap as for quire_attend_rows; dim <= WIDEST */
void quire_attend_chunks(const bf16 *q, bf16 *out, const bf16 *k, const bf16 *v, const int32_t *tables,
                         ChunkItem *items, bf16 *packed, const float *sinks, long num_items, long num_heads,
                         long num_kv_heads, long dim, long q_stride, long out_stride, long block_size,
                         long block_stride, long head_stride, long table_stride, long window, float scale,
                         float soft_cap, int threads) {
    ChunksJob job = {.q = q, .k = k, .v = v, .out = out, .packed = packed, .tables = tables, .items = items,
                     .num_items = num_items, .num_heads = num_heads, .num_kv_heads = num_kv_heads, .dim = dim,
                     .steps = (dim + STEP - 1) / STEP, .q_stride = q_stride, .out_stride = out_stride,
                     .block_size = block_size, .block_stride = block_stride, .head_stride = head_stride,
                     .table_stride = table_stride, .window = window, .sinks = sinks, .scale = scale,
                     .soft_cap = soft_cap};
    for (long i = 0; i < num_items; i++) job.tasks.count += groups_of(items + i) * num_kv_heads;
    RUN(pack_context_tasks, &job, threads);
    job.tasks = (Tasks){0};
    for (long i = 0; i < num_items; i++) job.tasks.count += (items[i].rows + ROWS - 1) / ROWS * num_heads;
    RUN(attend_chunk_tasks, &job, threads);
}

#endif
