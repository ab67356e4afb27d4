/* RMS normalization of rows. Sums of squares in float32, 16 lanes. */

typedef struct NormJob {
    Tasks tasks;
    const void *x, *weight;
    void *y;
    long rows, dim, x_stride, weight_rows; /* weight row of row r: r % weight_rows */
    float eps;
    int half;
} NormJob;

enum { NORM_ROWS = 8 }; /* rows of a task */

INLINE void norm_row(const NormJob *job, long row, int half) {
    const long dim = job->dim;
    const void *x = element(job->x, row * job->x_stride, half);
    const void *weight = element(job->weight, row % job->weight_rows * dim, half);
    void *y = (void *)element(job->y, row * dim, half);
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < dim; i += 16) {
        const __m512 value = load(x, i, mask_of(dim - i), half);
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)dim + job->eps));
    for (long i = 0; i < dim; i += 16) {
        const __mmask16 mask = mask_of(dim - i);
        const __m512 value = _mm512_mul_ps(load(x, i, mask, half), scale);
        store(y, i, mask, _mm512_mul_ps(value, load(weight, i, mask, half)), half);
    }
}

static void norm_tasks(void *argument) {
    NormJob *job = argument;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long end = (task + 1) * NORM_ROWS, stop = end < job->rows ? end : job->rows;
        for (long row = task * NORM_ROWS; row < stop; row++) {
            if (job->half) norm_row(job, row, 1);
            else norm_row(job, row, 0);
        }
    }
}

/* y [rows, dim] = rms_norm of x [rows, dim], which has a stride between rows. weight [weight_rows, dim], by row modulo
   weight_rows. half: bfloat16, else float32. */
void quire_rms_norm(const void *x, const void *weight, void *y, long rows, long dim, long x_stride, long weight_rows,
                    float eps, int half, int threads) {
    NormJob job = {.tasks.count = (rows + NORM_ROWS - 1) / NORM_ROWS, .x = x, .weight = weight, .y = y, .rows = rows,
                   .dim = dim, .x_stride = x_stride, .weight_rows = weight_rows, .eps = eps, .half = half};
    RUN(norm_tasks, &job, rows * dim < SMALL ? 1 : threads, half && OWN_THREADS);
}
