/* RMS normalization of rows, or layer normalization, which subtracts the mean. Sums in float32, a sum per lane. */

typedef struct NormJob {
    Tasks tasks;
    const void *x, *weight, *bias, *residual;
    const float *factor;
    void *y;
    long rows, dim, x_stride, weight_rows; /* weight row of row r: r % weight_rows; a bias has one row */
    float eps;
    int half, half_weight, centered;
} NormJob;

enum { NORM_ROWS = 8 }; /* rows of a task */

INLINE void norm_row(const NormJob *job, long row, int half, int half_weight) {
    const long dim = job->dim;
    const void *x = element(job->x, row * job->x_stride, half);
    const void *weight = element(job->weight, row % job->weight_rows * dim, half_weight);
    const void *residual = job->residual ? element(job->residual, row * dim, half) : NULL;
    void *y = (void *)element(job->y, row * dim, half);
    Vec mean = zeros(), squares = zeros();
    if (job->centered) {
        for (long i = 0; i < dim; i += W) mean = mean + load(x, i, lanes_of(dim - i), half);
        mean = fill(sum_of(mean) / (float)dim);
    }
    for (long i = 0; i < dim; i += W) {
        const Lanes lanes = lanes_of(dim - i);
        Vec value = load(x, i, lanes, half);
        if (job->centered) value = choose(lanes, value - mean, zeros());
        squares = madd(value, value, squares);
    }
    const Vec scale = fill(1.0f / sqrtf(sum_of(squares) / (float)dim + job->eps));
    for (long i = 0; i < dim; i += W) {
        const Lanes lanes = lanes_of(dim - i);
        Vec value = (load(x, i, lanes, half) - mean) * scale * load(weight, i, lanes, half_weight);
        if (job->bias) value = value + load(job->bias, i, lanes, half_weight);
        if (residual) value = value + load(residual, i, lanes, half);
        if (job->factor) value = value * fill(*job->factor);
        store(y, i, lanes, value, half);
    }
}

static void norm_tasks(void *argument) {
    NormJob *job = argument;
    long task;
    while ((task = claim(&job->tasks)) >= 0) {
        const long end = (task + 1) * NORM_ROWS, stop = end < job->rows ? end : job->rows;
        for (long row = task * NORM_ROWS; row < stop; row++) {
            if (!job->half) norm_row(job, row, 0, 0);
            else if (job->half_weight) norm_row(job, row, 1, 1);
            else norm_row(job, row, 1, 0);
        }
    }
}

/* y [rows, dim] = residual + norm of x [rows, dim], which has a stride between rows. weight [weight_rows, dim], by row
   modulo weight_rows. residual [rows, dim], may be y, or NULL. factor of the result, or NULL. bias [dim] of the
   weight's type, or NULL. half: bfloat16, else float32; half_weight: likewise, of the weight. centered: layer
   normalization. */
void quire_norm(const void *x, const void *weight, const void *residual, const float *factor, const void *bias, void *y,
                long rows, long dim, long x_stride, long weight_rows, float eps, int half, int half_weight,
                int centered, int threads) {
    NormJob job = {.tasks.count = (rows + NORM_ROWS - 1) / NORM_ROWS, .x = x, .weight = weight, .residual = residual,
                   .y = y, .rows = rows, .dim = dim, .x_stride = x_stride, .weight_rows = weight_rows, .eps = eps,
                   .half = half, .half_weight = half_weight, .centered = centered, .factor = factor,
                   .bias = bias};
    RUN(norm_tasks, &job, rows * dim < SMALL ? 1 : threads);
}
