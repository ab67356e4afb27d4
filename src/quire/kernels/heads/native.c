/* Norm and rotation of the projected q and k heads, and the write of k and v to the cache, in one pass over the
   projection. Values stay in float32 between norm and rotation. */

typedef struct HeadsJob {
    Tasks tasks;
    const void *qkv, *norm, *cos, *sin;
    void *q, *k, *v;
    const int64_t *slots;
    long rows, num_heads, num_kv_heads, dim, row_stride, block_size, block_stride, head_stride;
    float eps;
    int half;
} HeadsJob;

enum { HEADS_ROWS = 4 }; /* tokens of a task */

/* Normalize a head [dim] (norm NULL: no norm), rotate it, and write it to `to`. */
INLINE void rotate(const HeadsJob *job, const void *x, const void *norm,
                                                         const void *cos, const void *sin, void *to, int half) {
    const long dim = job->dim, pairs = dim / 2;
    __m512 scale = _mm512_set1_ps(1.0f);
    if (norm) {
        __m512 squares = _mm512_setzero_ps();
        for (long i = 0; i < dim; i += 16) {
            const __m512 value = load(x, i, mask_of(dim - i), half);
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)dim + job->eps));
    }
    for (long i = 0; i < pairs; i += 16) {
        const __mmask16 mask = mask_of(pairs - i);
        const long j = i + pairs;
        __m512 first = _mm512_mul_ps(load(x, i, mask, half), scale);
        __m512 second = _mm512_mul_ps(load(x, j, mask, half), scale);
        if (norm) {
            first = _mm512_mul_ps(first, load(norm, i, mask, half));
            second = _mm512_mul_ps(second, load(norm, j, mask, half));
        }
        const __m512 low = _mm512_mul_ps(second, load(sin, i, mask, half));
        const __m512 high = _mm512_mul_ps(first, load(sin, j, mask, half));
        store(to, i, mask, _mm512_fmadd_ps(first, load(cos, i, mask, half), low), half);
        store(to, j, mask, _mm512_fmadd_ps(second, load(cos, j, mask, half), high), half);
    }
}

INLINE void heads_row(const HeadsJob *job, long row, int half) {
    const long dim = job->dim, size = half ? 2 : 4;
    const void *x = element(job->qkv, row * job->row_stride, half);
    const void *cos = element(job->cos, row * dim, half), *sin = element(job->sin, row * dim, half);
    const long slot = job->slots[row];
    const long at = slot / job->block_size * job->block_stride + slot % job->block_size * dim;
    for (long head = 0; head < job->num_heads + job->num_kv_heads; head++) {
        const long kv_head = head - job->num_heads;
        void *to = kv_head < 0 ? (void *)element(job->q, (row * job->num_heads + head) * dim, half)
                               : (void *)element(job->k, at + kv_head * job->head_stride, half);
        const void *norm = job->norm ? element(job->norm, head * dim, half) : NULL;
        rotate(job, element(x, head * dim, half), norm, cos, sin, to, half);
    }
    x = element(x, (job->num_heads + job->num_kv_heads) * dim, half);
    for (long head = 0; head < job->num_kv_heads; head++)
        memcpy((void *)element(job->v, at + head * job->head_stride, half), element(x, head * dim, half), dim * size);
}

static void heads_tasks(void *argument) {
    HeadsJob *job = argument;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long end = (task + 1) * HEADS_ROWS, stop = end < job->rows ? end : job->rows;
        for (long row = task * HEADS_ROWS; row < stop; row++) {
            if (job->half) heads_row(job, row, 1);
            else heads_row(job, row, 0);
        }
    }
}

/* qkv [rows, num_heads + 2 num_kv_heads, dim] with a stride between rows; norm [num_heads + num_kv_heads, dim] or NULL;
   cos, sin [rows, dim], sin signed (kernels/rope). Writes q [rows, num_heads, dim] and, at slots [rows], the caches k
   and v: element (block, head, token) starts at block * block_stride + head * head_stride + token * dim. half:
   everything is bfloat16, else float32. dim is even. */
void quire_heads(const void *qkv, const void *norm, const void *cos, const void *sin, void *q, void *k, void *v,
                 const int64_t *slots, long rows, long num_heads, long num_kv_heads, long dim, long row_stride,
                 long block_size, long block_stride, long head_stride, float eps, int half, int threads) {
    HeadsJob job = {.tasks.count = (rows + HEADS_ROWS - 1) / HEADS_ROWS, .qkv = qkv, .norm = norm, .cos = cos,
                    .sin = sin, .q = q, .k = k, .v = v, .slots = slots, .rows = rows, .num_heads = num_heads,
                    .num_kv_heads = num_kv_heads, .dim = dim, .row_stride = row_stride, .block_size = block_size,
                    .block_stride = block_stride, .head_stride = head_stride, .eps = eps, .half = half};
    RUN(heads_tasks, &job, row_stride * rows < SMALL ? 1 : threads, half && OWN_THREADS);
}
