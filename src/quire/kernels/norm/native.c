/* RMS normalization of rows. Sums of squares in float32, a sum per lane. */

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
    Vec squares = zeros();
    for (long i = 0; i < dim; i += W) {
        const Vec value = load(x, i, lanes_of(dim - i), half);
        squares = madd(value, value, squares);
    }
    const Vec scale = fill(1.0f / sqrtf(sum_of(squares) / (float)dim + job->eps));
    for (long i = 0; i < dim; i += W) {
        const Lanes lanes = lanes_of(dim - i);
        const Vec value = load(x, i, lanes, half) * scale;
        store(y, i, lanes, value * load(weight, i, lanes, half), half);
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
    RUN(norm_tasks, &job, rows * dim < SMALL ? 1 : threads);
}
