/* The indexer of sparse latent attention: scores of keys in tiles, and a running choice of the best for each row, in
   memory that does not grow with the context.

   A candidate is a score and its position in 64 bits: the score's bits in the order of numbers, then the position,
   inverted, so that the larger of two candidates is the better one, and none are equal. A row keeps its candidates in
   the order of positions. When there is no room, those below the k-th largest leave, and later ones must be larger than
   that one: an equal score at a later position is not. */

enum {
    INDEX_ROWS = 4,           /* rows of a sequence whose scores are computed together: they share packed keys */
    INDEX_KEYS = 32,          /* keys of a tile */
    INDEX_VECS = INDEX_KEYS / W,
    INDEX_HEADS = W == 16 ? 8 : 2 /* heads whose sums are in registers */
};

typedef struct IndexItem {
    int64_t row, rows;   /* rows of queries and weights */
    int64_t table;       /* row of the block tables */
    int64_t position;    /* of the first row in its sequence */
    int64_t begin, end;  /* keys of the sequence that this item scores */
    int64_t place, part; /* first row of the result; number of this part of its context */
} IndexItem;

typedef struct IndexJob {
    Tasks tasks;
    const void *q, *keys;
    const float *weights, *scales, *codes;
    const int32_t *tables;
    const IndexItem *items;
    int32_t *positions;
    uint64_t *parts;
    int64_t *counts;
    char *scratch;
    long heads, dim, top_k, block_size, block_stride, scale_stride, table_stride, num_parts, room, scratch_bytes;
    int half_q, half_keys, entered;
} IndexJob;

/* Memory of a thread. */
typedef struct IndexScratch {
    float *q, *packed, *wide;
    uint64_t *best[INDEX_ROWS], *sorted;
} IndexScratch;

static IndexScratch index_scratch(IndexJob *job) {
    const long thread = __atomic_fetch_add(&job->entered, 1, __ATOMIC_RELAXED);
    IndexScratch own = {.sorted = (uint64_t *)(job->scratch + thread * job->scratch_bytes)};
    uint64_t *next = own.sorted + job->room;
    for (int i = 0; i < INDEX_ROWS; i++) {
        own.best[i] = next;
        next += i == 0 ? job->room : 2 * job->top_k;
    }
    own.packed = (float *)next;
    own.wide = own.packed + job->dim * INDEX_KEYS;
    own.q = own.wide + job->dim * INDEX_KEYS;
    return own;
}

/* A score in the order of unsigned numbers; one that is not a number is the largest. */
INLINE uint64_t candidate(float score, long position) {
    uint32_t bits;
    score = isnan(score) ? INFINITY : score + 0.0f; /* -0 equals 0 */
    memcpy(&bits, &score, sizeof bits);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~(uint32_t)position;
}

/* The k-th largest of n different numbers, which are moved; k counts from 1 (Hoare's quickselect). */
static uint64_t kth_largest(uint64_t *of, long n, long k) {
    long low = 0, high = n - 1;
    while (low < high) {
        const uint64_t a = of[low], b = of[low + (high - low) / 2], c = of[high];
        const uint64_t pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        long i = low, j = high;
        while (i <= j) {
            while (of[i] > pivot) i++;
            while (of[j] < pivot) j--;
            if (i > j) break;
            const uint64_t moved = of[i];
            of[i++] = of[j];
            of[j--] = moved;
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return of[k - 1];
}

/* Keep the k largest of n candidates, in their order; return the smallest of them. */
static uint64_t keep_largest(uint64_t *of, long n, long k, uint64_t *sorted) {
    memcpy(sorted, of, n * sizeof *of);
    const uint64_t least = kth_largest(sorted, n, k);
    long kept = 0;
    for (long i = 0; i < n; i++)
        if (of[i] >= least) of[kept++] = of[i];
    return least;
}

/* Write the positions of n candidates, in their order, and -1 behind them. */
static void write_positions(const uint64_t *of, long n, int32_t *to, long top_k) {
    for (long i = 0; i < n; i++) to[i] = (int32_t)~(uint32_t)of[i];
    for (long i = n; i < top_k; i++) to[i] = -1;
}

/* Pack keys from `first` on, as float32 [dim][INDEX_KEYS]; those from `count` on are zeros. */
static void pack_index_keys(const IndexJob *job, const IndexItem *item, long first, long count, IndexScratch *own) {
    const long dim = job->dim;
    const void *rows[INDEX_KEYS] = {0};
    const int half = job->codes ? 0 : job->half_keys;
    for (long j = 0; j < count; j++) {
        const long at = first + j, offset = at % job->block_size;
        const long block = job->tables[item->table * job->table_stride + at / job->block_size];
        const long element_at = block * job->block_stride + offset * dim;
        if (!job->codes) {
            rows[j] = element(job->keys, element_at, half);
            continue;
        }
        const float scale = job->scales[block * job->scale_stride + offset];
        for (long d = 0; d < dim; d++)
            own->wide[j * dim + d] = job->codes[((const uint8_t *)job->keys)[element_at + d]] * scale;
        rows[j] = own->wide + j * dim;
    }
    for (long d = 0; d < dim; d += W) {
        const Lanes lanes = lanes_of(dim - d);
        const long wide = dim - d < W ? dim - d : W;
        for (long j = 0; j < INDEX_KEYS; j += W) {
            Words r[W];
            for (long i = 0; i < W; i++) r[i] = as_words(rows[j + i] ? load(rows[j + i], d, lanes, half) : zeros());
            transpose(r);
            for (long i = 0; i < wide; i++) put_words(own->packed + (d + i) * INDEX_KEYS + j, r[i]);
        }
    }
}

/* Scores of a row for packed keys. q [heads][dim]. */
static void score_keys(const IndexJob *job, const float *q, const float *weights, const float *packed, float *scores) {
    const long dim = job->dim;
    Vec total[INDEX_VECS];
    for (int v = 0; v < INDEX_VECS; v++) total[v] = zeros();
    for (long head = 0; head < job->heads; head += INDEX_HEADS) {
        const long some = job->heads - head < INDEX_HEADS ? job->heads - head : INDEX_HEADS;
        Vec sums[INDEX_HEADS][INDEX_VECS];
        const float *of[INDEX_HEADS];
        for (int h = 0; h < INDEX_HEADS; h++) {
            of[h] = q + (head + (h < some ? h : 0)) * dim; /* heads that are not there repeat the first one */
            for (int v = 0; v < INDEX_VECS; v++) sums[h][v] = zeros();
        }
        for (long d = 0; d < dim; d++) {
            Vec key[INDEX_VECS];
            for (int v = 0; v < INDEX_VECS; v++) key[v] = get(packed + d * INDEX_KEYS + v * W);
            for (int h = 0; h < INDEX_HEADS; h++)
                for (int v = 0; v < INDEX_VECS; v++) sums[h][v] = madd(fill(of[h][d]), key[v], sums[h][v]);
        }
        for (long h = 0; h < some; h++)
            for (int v = 0; v < INDEX_VECS; v++) /* a sum that is not a number stays one */
                total[v] = madd(fill(weights[head + h]), largest(zeros(), sums[h][v]), total[v]);
    }
    for (int v = 0; v < INDEX_VECS; v++) put(scores + v * W, total[v]);
}

static void index_tasks(void *argument) {
    IndexJob *job = argument;
    IndexScratch own = index_scratch(job);
    const long width = job->heads * job->dim, top_k = job->top_k, room = 2 * top_k;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const IndexItem *item = job->items + task;
        long counts[INDEX_ROWS] = {0};
        uint64_t least[INDEX_ROWS] = {0};
        for (long i = 0; i < item->rows * width; i++)
            own.q[i] = number_at(job->q, item->row * width + i, job->half_q);
        for (long first = item->begin; first < item->end; first += INDEX_KEYS) {
            const long there = item->end - first < INDEX_KEYS ? item->end - first : INDEX_KEYS;
            pack_index_keys(job, item, first, there, &own);
            for (long row = 0; row < item->rows; row++) {
                const long seen = item->position + row + 1 - first; /* keys up to the row's own */
                const long count = seen < there ? seen : there;
                if (count <= 0) continue;
                float scores[INDEX_KEYS];
                score_keys(job, own.q + row * width, job->weights + (item->row + row) * job->heads, own.packed, scores);
                for (long j = 0; j < count; j++) {
                    const uint64_t found = candidate(scores[j], first + j);
                    if (found <= least[row]) continue;
                    own.best[row][counts[row]++] = found;
                    if (counts[row] < room) continue;
                    least[row] = keep_largest(own.best[row], room, top_k, own.sorted);
                    counts[row] = top_k;
                }
            }
        }
        for (long row = 0; row < item->rows; row++) {
            if (counts[row] > top_k) keep_largest(own.best[row], counts[row], top_k, own.sorted);
            const long kept = counts[row] < top_k ? counts[row] : top_k, place = item->place + row;
            if (job->num_parts == 1) {
                write_positions(own.best[row], kept, job->positions + place * top_k, top_k);
                continue;
            }
            const long part = place * job->num_parts + item->part;
            memcpy(job->parts + part * top_k, own.best[row], kept * sizeof(uint64_t));
            job->counts[part] = kept;
        }
    }
}

/* Choose among the candidates of all parts of a row's context. */
static void index_joins(void *argument) {
    IndexJob *job = argument;
    IndexScratch own = index_scratch(job);
    const long top_k = job->top_k;
    long row;
    while ((row = claim(&job->tasks)) >= 0) {
        long count = 0;
        for (long part = row * job->num_parts; part < (row + 1) * job->num_parts; part++) {
            memcpy(own.best[0] + count, job->parts + part * top_k, job->counts[part] * sizeof(uint64_t));
            count += job->counts[part];
        }
        if (count > top_k) keep_largest(own.best[0], count, top_k, own.sorted);
        write_positions(own.best[0], count < top_k ? count : top_k, job->positions + row * top_k, top_k);
    }
}

/* Choose the top_k best keys of each row, see quire.kernels.index. q [., heads, dim], weights [., heads] and items as
   drawn above; keys: element (block, token) starts at block * block_stride + token * dim; tables: block ids,
   table_stride a row. codes: the numbers of 256 codes, and scales [block * scale_stride + token], where keys are codes;
   else NULL.
   Writes positions [rows, top_k]. With num_parts > 1 each row's context is divided among as many items; parts [rows,
   num_parts, top_k] and counts [rows, num_parts] are theirs. scratch: scratch_bytes for each thread, with two lists of
   `room` candidates, at least 2 top_k and num_parts * top_k, and INDEX_ROWS - 1 of 2 top_k. */
void quire_index(const void *q, const float *weights, const void *keys, const float *scales, const float *codes,
                 const int32_t *tables, const void *items, int32_t *positions, void *parts, void *counts,
                 void *scratch, long num_items, long rows, long heads, long dim, long top_k, long block_size,
                 long block_stride, long scale_stride, long table_stride, long num_parts, long room,
                 long scratch_bytes, int half_q, int half_keys, int threads) {
    IndexJob job = {.tasks.count = num_items, .q = q, .keys = keys, .weights = weights, .scales = scales,
                    .codes = codes, .tables = tables, .items = items, .positions = positions, .parts = parts,
                    .counts = counts, .scratch = scratch, .heads = heads, .dim = dim, .top_k = top_k,
                    .block_size = block_size, .block_stride = block_stride, .scale_stride = scale_stride,
                    .table_stride = table_stride, .num_parts = num_parts, .room = room,
                    .scratch_bytes = scratch_bytes, .half_q = half_q, .half_keys = half_keys};
    RUN(index_tasks, &job, threads);
    if (num_parts == 1) return;
    job.tasks = (Tasks){.count = rows};
    job.entered = 0;
    RUN(index_joins, &job, threads);
}
