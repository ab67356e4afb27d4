/* Norm and rotation of the projected q and k heads, and the write of k and v to the cache, in one pass over the
   projection. Values stay in float32 between norm and rotation. */

typedef struct HeadsJob {
    Tasks tasks;
    const void *qkv, *norm, *cos, *sin;
    void *q, *k, *v;
    const int64_t *slots;
    long rows, num_heads, num_kv_heads, dim, row_stride, block_size, block_stride, head_stride;
    float eps;
    int half, half_norm, values;
} HeadsJob;

enum { VALUES_PLAIN, VALUES_NORMED, VALUES_KEYS, VALUES_KEPT }; /* in the order of VALUES in __init__.py */

enum { HEADS_ROWS = 4 }; /* tokens of a task */

/* Normalize a head [dim] (norm NULL: no norm), rotate it, and write it to `to`. */
INLINE void rotate(const HeadsJob *job, const void *x, const void *norm, const void *cos, const void *sin, void *to,
                   int half, int half_norm) {
    const long dim = job->dim, pairs = dim / 2;
    Vec scale = fill(1.0f);
    if (norm) {
        Vec squares = zeros();
        for (long i = 0; i < dim; i += W) {
            const Vec value = load(x, i, lanes_of(dim - i), half);
            squares = madd(value, value, squares);
        }
        scale = fill(1.0f / sqrtf(sum_of(squares) / (float)dim + job->eps));
    }
    for (long i = 0; i < pairs; i += W) {
        const Lanes lanes = lanes_of(pairs - i);
        const long j = i + pairs;
        Vec first = load(x, i, lanes, half) * scale;
        Vec second = load(x, j, lanes, half) * scale;
        if (norm) {
            first = first * load(norm, i, lanes, half_norm);
            second = second * load(norm, j, lanes, half_norm);
        }
        const Vec low = second * load(sin, i, lanes, half);
        const Vec high = first * load(sin, j, lanes, half);
        store(to, i, lanes, madd(first, load(cos, i, lanes, half), low), half);
        store(to, j, lanes, madd(second, load(cos, j, lanes, half), high), half);
    }
}

/* Write a head [dim] over its root mean square to `to`. */
INLINE void normalize(const HeadsJob *job, const void *x, void *to, int half) {
    const long dim = job->dim;
    Vec squares = zeros();
    for (long i = 0; i < dim; i += W) {
        const Vec value = load(x, i, lanes_of(dim - i), half);
        squares = madd(value, value, squares);
    }
    const Vec scale = fill(1.0f / sqrtf(sum_of(squares) / (float)dim + job->eps));
    for (long i = 0; i < dim; i += W) {
        const Lanes lanes = lanes_of(dim - i);
        store(to, i, lanes, load(x, i, lanes, half) * scale, half);
    }
}

INLINE void heads_row(const HeadsJob *job, long row, int half, int half_norm) {
    const long dim = job->dim, size = half ? 2 : 4;
    const void *x = element(job->qkv, row * job->row_stride, half);
    const void *cos = element(job->cos, row * dim, half), *sin = element(job->sin, row * dim, half);
    const long slot = job->slots[row];
    const long at = slot / job->block_size * job->block_stride + slot % job->block_size * dim;
    for (long head = 0; head < job->num_heads + job->num_kv_heads; head++) {
        const long kv_head = head - job->num_heads;
        void *to = kv_head < 0 ? (void *)element(job->q, (row * job->num_heads + head) * dim, half)
                               : (void *)element(job->k, at + kv_head * job->head_stride, half);
        const void *norm = job->norm ? element(job->norm, head * dim, half_norm) : NULL;
        rotate(job, element(x, head * dim, half), norm, cos, sin, to, half, half_norm);
    }
    x = element(x, (job->num_heads + (job->values == VALUES_KEYS ? 0 : job->num_kv_heads)) * dim, half);
    for (long head = 0; head < job->num_kv_heads; head++) {
        void *to = (void *)element(job->v, at + head * job->head_stride, half);
        if (job->values == VALUES_PLAIN) memcpy(to, element(x, head * dim, half), dim * size);
        else normalize(job, element(x, head * dim, half), to, half);
    }
}

static void heads_tasks(void *argument) {
    HeadsJob *job = argument;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long end = (task + 1) * HEADS_ROWS, stop = end < job->rows ? end : job->rows;
        for (long row = task * HEADS_ROWS; row < stop; row++) {
            if (!job->half) heads_row(job, row, 0, 0);
            else if (job->half_norm) heads_row(job, row, 1, 1);
            else heads_row(job, row, 1, 0);
        }
    }
}

/* qkv [rows, num_heads + 2 num_kv_heads, dim] with a stride between rows; norm [num_heads + num_kv_heads, dim] or NULL;
   cos, sin [rows, dim], sin signed (kernels/rope). Writes q [rows, num_heads, dim] and, at slots [rows], the caches k
   and v: element (block, head, token) starts at block * block_stride + head * head_stride + token * dim. half:
   everything is bfloat16, else float32; half_norm: likewise, of the norm. dim is even.
   values   VALUES_PLAIN: v as it is; VALUES_NORMED: over its root mean square; VALUES_KEYS: qkv has no v, which is k
            over its root mean square, before the norm of k; VALUES_KEPT: qkv has queries alone, num_kv_heads is 0 */
void quire_heads(const void *qkv, const void *norm, const void *cos, const void *sin, void *q, void *k, void *v,
                 const int64_t *slots, long rows, long num_heads, long num_kv_heads, long dim, long row_stride,
                 long block_size, long block_stride, long head_stride, float eps, int half, int half_norm,
                 int values, int threads) {
    HeadsJob job = {.tasks.count = (rows + HEADS_ROWS - 1) / HEADS_ROWS, .qkv = qkv, .norm = norm, .cos = cos,
                    .sin = sin, .q = q, .k = k, .v = v, .slots = slots, .rows = rows, .num_heads = num_heads,
                    .num_kv_heads = num_kv_heads, .dim = dim, .row_stride = row_stride, .block_size = block_size,
                    .block_stride = block_stride, .head_stride = head_stride, .eps = eps, .half = half,
                    .half_norm = half_norm, .values = values};
    RUN(heads_tasks, &job, row_stride * rows < SMALL ? 1 : threads);
}
