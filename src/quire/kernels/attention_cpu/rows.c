/* Paged attention of single rows: decodes, and the few rows of short chunks.

   A task computes a row's query heads of one KV head over a part of the context. A part is always PART tokens, so that
   a row's result depends on that row alone. Parts are counted from the first token that the row sees: with a window,
   the tokens before it are never read. A task computes the scores of a part, then its softmax, then the sums of values.
   Parts of a longer context are merged by their maxima and sums (Dao, 2023, flash-decoding). Slots past the end of a
   context are never read. */

enum { PART = 512, HEADS = 16, MAX_DIM = 512 }; /* tokens of a part, query heads at a time, largest head */

typedef struct RowItem {
    int64_t row, length, table, first_part; /* of q; end of its tokens; row of the block tables; parts before its own */
    int64_t start;                          /* first token that it sees */
} RowItem;

typedef struct RowsAttention {
    Tasks tasks;
    const void *q;
    void *out;
    const void *k, *v;
    const int32_t *tables;
    const RowItem *items;
    const int32_t *part_item; /* part -> its item */
    float *partial;           /* [part][query head]: dim sums, maximum, total */
    const float *sinks;       /* [query head], or NULL */
    long num_items, num_heads, num_kv_heads, dim, q_stride, block_size, block_stride, head_stride, table_stride;
    float scale, soft_cap; /* 0: no cap */
    int half, kv_group;    /* KV group of the layer, by which a recorded call finds its rows */
} RowsAttention;

static inline long parts_of(const RowItem *item) { return (item->length - item->start + PART - 1) / PART; }

/* First token that a row at `position` sees. window > 0: the row sees so many tokens. window < 0: it sees its own chunk
   of -window tokens, up to itself. 0: it sees everything */
static inline long first_seen(long position, long window) {
    if (window < 0) return position - position % -window;
    return window && position + 1 > window ? position + 1 - window : 0;
}

/* Scores with a soft cap: cap * tanh(score / cap). */
INLINE Vec capped(Vec scores, float cap) { return fill(cap) * tanh_of(scores * fill(1.0f / cap)); }

/* As share_of, with a sink. Not inlined: its calls would cost registers in rows without sinks. */
static __attribute__((noinline)) float share_beside(float maximum, float total, float sink) {
    const float peak = fmaxf(maximum, sink), fade = expf(maximum - peak);
    return fade / (total * fade + expf(sink - peak));
}

/* The factor that turns a row's sums of values into its result; `maximum` and `total` are those of its scores. A sink
   (NULL: none) is one more score, without a value. */
INLINE float share_of(float maximum, float total, const float *sink) {
    return sink ? share_beside(maximum, total, *sink) : 1.0f / total;
}

/* Find the addresses of W tokens from `first` on in the cache; tokens past `stop` repeat the last one. */
static inline void locate(const RowsAttention *job, const int32_t *table, const void *base, long first, long stop,
                          const void **tokens, int half) {
    long block = first / job->block_size, offset = first % job->block_size;
    const long last = stop - first - 1;
    for (long i = 0; i < W; i++) {
        if (i > last) {
            tokens[i] = tokens[last];
            continue;
        }
        tokens[i] = element(base, table[block] * job->block_stride + offset * job->dim, half);
        if (++offset == job->block_size) {
            offset = 0;
            block++;
        }
    }
}

/* As locate, and fetch the tokens into the first-level cache. The processor alone reads 7 GB/s: a token's 256 bytes are
   too short for it to run ahead. */
static inline void fetch(const RowsAttention *job, const int32_t *table, const void *base, long first, long stop,
                         const void **tokens, int half) {
    const long bytes = job->dim * (half ? 2 : 4), count = stop - first < W ? stop - first : W;
    locate(job, table, base, first, stop, tokens, half);
    for (long i = 0; i < count; i++)
        for (long at = 0; at < bytes; at += 64) _mm_prefetch((const char *)tokens[i] + at, _MM_HINT_T0);
}

/* q . k of W tokens */
INLINE Vec scores_of(const void *q, const void **keys, long dim, int half) {
    Vec sums[W];
    for (int t = 0; t < W; t++) sums[t] = zeros();
#ifdef __AVX512BF16__
    if (half) {
        for (long i = 0; i < dim; i += 32) {
            const __mmask32 lanes = dim - i >= 32 ? 0xFFFFFFFFu : (1u << (dim - i)) - 1;
            const __m512bh query = (__m512bh)_mm512_maskz_loadu_epi16(lanes, (const bf16 *)q + i);
#pragma GCC unroll 16
            for (int t = 0; t < 16; t++)
                sums[t] = _mm512_dpbf16_ps(sums[t], query,
                                           (__m512bh)_mm512_maskz_loadu_epi16(lanes, (const bf16 *)keys[t] + i));
        }
        return sum_lanes(sums);
    }
#endif
    for (long i = 0; i < dim; i += W) {
        const Lanes lanes = lanes_of(dim - i);
        const Vec query = load(q, i, lanes, half);
#pragma GCC unroll 16
        for (int t = 0; t < W; t++) sums[t] = madd(query, load(keys[t], i, lanes, half), sums[t]);
    }
    return sum_lanes(sums);
}

/* sums [heads][dim] += weights [heads][PART] at `at` times W values; weights past the end are 0 */
INLINE void add_values(const void **values, const float *weights, long heads, long dim,
                                                             float *sums, int half) {
    for (long i = 0; i < dim; i += W) {
        const Lanes lanes = lanes_of(dim - i);
        Vec value[W];
#pragma GCC unroll 16
        for (int t = 0; t < W; t++) value[t] = load(values[t], i, lanes, half);
        for (long head = 0; head < heads; head++) {
            const float *weight = weights + head * PART;
            Vec sum = get(sums + head * MAX_DIM + i), other = zeros();
#pragma GCC unroll 8
            for (int t = 0; t < W; t += 2) {
                sum = madd(fill(weight[t]), value[t], sum);
                other = madd(fill(weight[t + 1]), value[t + 1], other);
            }
            put(sums + head * MAX_DIM + i, sum + other);
        }
    }
}

/* Cap `count` scores; those past the end stay minus infinity. A pass of its own: a variant of attend_part would slow
   the one without a cap. */
static __attribute__((noinline)) void cap_scores(float *scores, long count, float cap) {
    for (long i = 0; i < count; i += W)
        put(scores + i, choose(lanes_of(count - i), capped(get(scores + i), cap), fill(-INFINITY)));
}

/* Replace scores by weights; give their maximum and the sum of the weights. The sum is NaN if a score is NaN or
   infinite. If all scores are minus infinity, weights and sum are 0. */
static inline void soften(float *scores, long count, float *maximum, float *total) {
    Vec most = fill(-INFINITY), sum = zeros();
    for (long i = 0; i < count; i += W) most = largest(most, get(scores + i));
    *maximum = largest_of(most);
    const Vec peak = fill(*maximum > -INFINITY ? *maximum : 0.0f);
    for (long i = 0; i < count; i += W) {
        const Vec weight = exp_of(get(scores + i) - peak);
        put(scores + i, weight);
        sum = sum + weight;
    }
    *total = sum_of(sum);
}

/* Up to HEADS query heads from `head` on, all of one KV head, over tokens first .. stop. */
INLINE void attend_part(const RowsAttention *job, const RowItem *item, long part, long head, long heads, long kv_head,
                        int half) {
    float scores[HEADS * PART] __attribute__((aligned(64))), sums[HEADS * MAX_DIM] __attribute__((aligned(64)));
    const long dim = job->dim, first = item->start + (part - item->first_part) * PART;
    const long stop = first + PART < item->length ? first + PART : item->length, count = stop - first;
    const int32_t *table = job->tables + item->table * job->table_stride;
    const void *k = element(job->k, kv_head * job->head_stride, half);
    const void *v = element(job->v, kv_head * job->head_stride, half);
    const void *q = element(job->q, item->row * job->q_stride + head * dim, half), *tokens[2][W], **own;
    const Vec scale = fill(job->scale), none = fill(-INFINITY);
    fetch(job, table, k, first, stop, tokens[0], half);
    for (long t = 0, next = 1; t < count; t += W, next ^= 1) {
        own = tokens[next ^ 1];
        if (t + W < count) fetch(job, table, k, first + t + W, stop, tokens[next], half);
        else fetch(job, table, v, first, stop, tokens[next], half);
        for (long i = 0; i < heads; i++) {
            const Vec dots = scores_of(element(q, i * dim, half), own, dim, half) * scale;
            put(scores + i * PART + t, choose(lanes_of(count - t), dots, none));
        }
    }
    float maximum[HEADS], total[HEADS];
    for (long i = 0; i < heads; i++) {
        if (job->soft_cap) cap_scores(scores + i * PART, count, job->soft_cap);
        soften(scores + i * PART, count, &maximum[i], &total[i]);
        for (long d = 0; d < dim; d += W) put(sums + i * MAX_DIM + d, zeros());
    }
    for (long t = 0, next = (count + W - 1) / W % 2 ? 0 : 1; t < count; t += W, next ^= 1) {
        own = tokens[next ^ 1];
        if (t + W < count) fetch(job, table, v, first + t + W, stop, tokens[next], half);
        add_values(own, scores + t, heads, dim, sums, half);
    }
    const int whole = parts_of(item) == 1;
    for (long i = 0; i < heads; i++) {
        float *to = whole ? NULL : job->partial + (part * job->num_heads + head + i) * (dim + 2);
        const long at = (item->row * job->num_heads + head + i) * dim;
        const Vec share = fill(share_of(maximum[i], total[i], whole && job->sinks ? job->sinks + head + i : NULL));
        for (long d = 0; d < dim; d += W) {
            const Lanes lanes = lanes_of(dim - d);
            const Vec sum = get(sums + i * MAX_DIM + d);
            if (whole) store(job->out, at + d, lanes, sum * share, half);
            else put_some(to + d, lanes, sum);
        }
        if (!whole) {
            to[dim] = maximum[i];
            to[dim + 1] = total[i];
        }
    }
}

static void attend_tasks(void *argument) {
    RowsAttention *job = argument;
    const long group = job->num_heads / job->num_kv_heads;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long part = task / job->num_kv_heads, kv_head = task % job->num_kv_heads;
        const RowItem *item = job->items + job->part_item[part];
        for (long i = 0; i < group; i += HEADS) {
            const long heads = group - i < HEADS ? group - i : HEADS, head = kv_head * group + i;
            if (job->half) attend_part(job, item, part, head, heads, kv_head, 1);
            else attend_part(job, item, part, head, heads, kv_head, 0);
        }
    }
}

static void merge_tasks(void *argument) {
    RowsAttention *job = argument;
    const long dim = job->dim, pitch = job->num_heads * (dim + 2);
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const RowItem *item = job->items + task / job->num_heads;
        const long head = task % job->num_heads, parts = parts_of(item);
        if (parts <= 1) continue;
        const float *from = job->partial + item->first_part * pitch + head * (dim + 2);
        float peak = job->sinks ? job->sinks[head] : -INFINITY, total = 0;
        for (long p = 0; p < parts; p++) peak = fmaxf(peak, from[p * pitch + dim]);
        for (long p = 0; p < parts; p++) total += from[p * pitch + dim + 1] * expf(from[p * pitch + dim] - peak);
        if (job->sinks) total += expf(job->sinks[head] - peak);
        for (long d = 0; d < dim; d += W) {
            const Lanes lanes = lanes_of(dim - d);
            Vec sum = zeros();
            for (long p = 0; p < parts; p++) {
                const Vec weight = fill(expf(from[p * pitch + dim] - peak) / total);
                sum = madd(weight, get_some(from + p * pitch + d, lanes), sum);
            }
            store(job->out, (item->row * job->num_heads + head) * dim + d, lanes, sum, job->half);
        }
    }
}

/* Rows of q [*, num_heads, dim] with a stride between rows -> the same rows of out [*, num_heads, dim].

   items      [num_items], one per row; the parts of all items have consecutive numbers
   part_item  [num_parts] the item of each part
   partial    num_parts * num_heads * (dim + 2) floats of scratch, or NULL if no row has several parts
   sinks      [num_heads], or NULL
   k, v       as for quire_heads
   tables     [*, table_stride] block ids; those before the block of an item's first token are not read
   soft_cap   0: none
   half       bfloat16, else float32; dim <= MAX_DIM */
void quire_attend_rows(const void *q, void *out, const void *k, const void *v, const int32_t *tables,
                       const RowItem *items, const int32_t *part_item, float *partial, const float *sinks,
                       long num_items, long num_parts, long num_heads, long num_kv_heads, long dim, long q_stride,
                       long block_size, long block_stride, long head_stride, long table_stride, float scale,
                       float soft_cap, int half, int kv_group, int threads) {
    RowsAttention job = {.tasks.count = num_parts * num_kv_heads, .q = q, .out = out, .k = k, .v = v, .tables = tables,
                         .items = items, .part_item = part_item, .partial = partial, .sinks = sinks,
                         .num_items = num_items, .soft_cap = soft_cap, .kv_group = kv_group,
                         .num_heads = num_heads, .num_kv_heads = num_kv_heads, .dim = dim, .q_stride = q_stride,
                         .block_size = block_size, .block_stride = block_stride, .head_stride = head_stride,
                         .table_stride = table_stride, .scale = scale, .half = half};
    RUN(attend_tasks, &job, threads);
    if (!partial && !current_recording) return;
    job.tasks = (Tasks){.count = partial ? num_items * num_heads : 0};
    RUN(merge_tasks, &job, threads);
}

/* Give the recorded attention calls of a KV group the rows of the next step; parameters as for quire_attend_rows. */
void quire_retarget_rows(Recording *recording, const int32_t *tables, const RowItem *items, const int32_t *part_item,
                          float *partial, long num_items, long num_parts, long table_stride, int kv_group) {
    for (long i = 0; i < recording->count; i++) {
        const Entry *entry = &recording->entries[i];
        RowsAttention *job = (RowsAttention *)entry->job;
        if ((entry->body != attend_tasks && entry->body != merge_tasks) || job->kv_group != kv_group) continue;
        if (entry->body == attend_tasks) job->tasks.count = num_parts * job->num_kv_heads;
        else job->tasks.count = partial ? num_items * job->num_heads : 0;
        job->tables = tables;
        job->items = items;
        job->part_item = part_item;
        job->partial = partial;
        job->num_items = num_items;
        job->table_stride = table_stride;
    }
}
