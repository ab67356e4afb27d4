/* Mamba 2: see quire.kernels.mamba. First the convolution of all channels, then one task for each head of each
   sequence, which goes through the sequence's rows in order, then one task for each row, which gates and normalizes it.
   A row takes one pass over a head's matrix [state dim][head dim], which stays in the L2 cache between rows. Rows that
   may be rejected go through a copy of the matrix. */

enum { MAMBA_COLUMNS = 4, NO_NORM = 0, GATE_FIRST = 1, NORM_FIRST = 2 };

typedef struct MambaJob {
    Tasks tasks;
    StateRows of;
    const void *step;
    const float *rate, *shift, *skip, *u;
    float *o;
    void *matrix, *scratch;
    long scratches; /* claimed so far */
    long heads, per, dim, width, channels; /* per: heads of a group; dim: N; width: P */
    long step_stride, matrix_stride;
    float lowest, highest;
    int half, half_state;
} MambaJob;

/* A row of MAMBA_COLUMNS vectors of a head's columns: decay, add and read the matrix. own [dim][stride], output o.
   half: the matrix is bfloat16; its numbers are rounded when they are written. */
INLINE void mamba_columns(void *own, long stride, const float *b, const float *c, float fade, float step, float skip,
                          const float *x, float *o, long dim, long count, int half) {
    Vec value[MAMBA_COLUMNS], read[MAMBA_COLUMNS];
    Lanes lanes[MAMBA_COLUMNS];
    const Vec faded = fill(fade);
    for (int j = 0; j < MAMBA_COLUMNS; j++) {
        lanes[j] = lanes_of(count - j * W);
        const Vec one = get_some(x + j * W, lanes[j]);
        value[j] = one * fill(step);
        read[j] = one * fill(skip);
    }
    for (long d = 0; d < dim; d++) {
        const Vec in = fill(b[d]), out = fill(c[d]);
        for (int j = 0; j < MAMBA_COLUMNS; j++) {
            const Vec now = madd(in, value[j], load(own, d * stride + j * W, lanes[j], half) * faded);
            store(own, d * stride + j * W, lanes[j], now, half);
            read[j] = madd(now, out, read[j]);
        }
    }
    for (int j = 0; j < MAMBA_COLUMNS; j++) put_some(o + j * W, lanes[j], read[j]);
}

INLINE void mamba_head(const MambaJob *job, long s, long head, void *scratch, int half_state) {
    const long dim = job->dim, width = job->width, heads = job->heads, first = job->of.starts[s], numbers = dim * width;
    const long rows = state_rows(&job->of, s), replayed = state_replayed(&job->of, s), half = job->half;
    const long in = heads * width + head / job->per * dim, out = in + heads / job->per * dim;
    const long bytes = numbers * (half_state ? 2 : 4), own = job->of.slots[s] * job->matrix_stride + head * numbers;
    const int lazy = state_lazy(&job->of, s);
    const float rate = expf(job->rate[head]);
    void *matrix = (void *)element(job->matrix, own, half_state);
    if (!rows) return;
    if (!state_past(&job->of, s)) memset(matrix, 0, bytes);
    for (long i = 0; i < replayed + rows; i++) {
        const long row = i < replayed ? first : first + i - replayed; /* the first one's output comes last */
        const void *steps = i < replayed ? pending_at(&job->of, s, i, job->channels, half)
                                         : element(job->step, row * job->step_stride, half);
        const float *u = job->u + state_place(&job->of, s, replayed, i) * job->channels;
        const float raw = number_at(steps, head, half) + job->shift[head];
        const float soft = raw > 20.0f ? raw : log1pf(expf(raw));
        const float step = soft < job->lowest ? job->lowest : soft > job->highest ? job->highest : soft;
        if (i == replayed && lazy) matrix = memcpy(scratch, matrix, bytes);
        for (long c = 0; c < width; c += MAMBA_COLUMNS * W)
            mamba_columns((void *)element(matrix, c, half_state), width, u + in, u + out, expf(-rate * step), step,
                          job->skip[head], u + head * width + c, job->o + (row * heads + head) * width + c, dim,
                          width - c, half_state);
        if (i < replayed) continue;
        keep_copies(&job->of, s, i - replayed + 1, job->matrix, job->matrix_stride, head * numbers, matrix, numbers,
                    half_state);
        if (lazy)
            memcpy(pending_at(&job->of, s, i - replayed, job->channels + head, half), element(steps, head, half),
                   half ? 2 : 4);
    }
}

static void mamba_heads(void *argument) {
    MambaJob *job = argument;
    const long number = __atomic_fetch_add(&job->scratches, 1, __ATOMIC_RELAXED);
    void *scratch = (void *)element(job->scratch, number * job->dim * job->width, job->half_state);
    long task;
    while ((task = claim(&job->tasks)) >= 0)
        if (job->half_state) mamba_head(job, task / job->heads, task % job->heads, scratch, 1);
        else mamba_head(job, task / job->heads, task % job->heads, scratch, 0);
}

typedef struct MambaEnd {
    Tasks tasks;
    const float *o, *norm;
    const void *gate;
    void *y;
    long width, group, gate_stride; /* numbers of a row, and of a group */
    float eps;
    int order, half;
} MambaEnd;

INLINE void mamba_end(const MambaEnd *job, long row, int half) {
    const void *gate = element(job->gate, row * job->gate_stride, half);
    void *y = (void *)element(job->y, row * job->width, half);
    const float *o = job->o + row * job->width;
    for (long from = 0; from < job->width; from += job->group) {
        const long to = from + job->group;
        Vec squares = zeros();
        for (long i = from; i < to && job->order != NO_NORM; i += W) {
            Vec x = get_some(o + i, lanes_of(to - i));
            if (job->order == GATE_FIRST) x = gated_of(load(gate, i, lanes_of(to - i), half), x, SILU);
            squares = madd(x, x, squares);
        }
        const Vec scale = fill(1.0f / sqrtf(sum_of(squares) / (float)job->group + job->eps));
        for (long i = from; i < to; i += W) {
            const Lanes lanes = lanes_of(to - i);
            Vec x = gated_of(load(gate, i, lanes, half), get_some(o + i, lanes), SILU);
            if (job->order != NO_NORM) x = x * scale * get_some(job->norm + i, lanes);
            store(y, i, lanes, x, half);
        }
    }
}

static void mamba_ends(void *argument) {
    MambaEnd *job = argument;
    long row;
    while ((row = claim(&job->tasks)) >= 0)
        if (job->half) mamba_end(job, row, 1);
        else mamba_end(job, row, 0);
}

/* Strides are in numbers, from row to row; those of columns and matrix from state to state. u [rows + sequences *
   most_pending, channels], o [rows, heads * width] and scratch [threads, width * dim] are scratch, the last only with
   pending rows. bias and norm may be NULL; order: 0 without a norm, 1 with the gate before the norm, 2 with the norm
   before the gate; half: as of quire_gated, and the type of columns and pending rows; half_state: that of matrices. */
void quire_mamba(const StateRows *of, const void *inner, const void *gate, const void *step, const float *conv,
                 const float *bias, const float *rate, const float *shift, const float *skip, const float *norm,
                 void *columns, void *matrix, float *u, float *o, void *scratch, void *y, long heads, long groups,
                 long width, long dim, long inner_stride, long gate_stride, long step_stride, long columns_stride,
                 long matrix_stride, float eps, float lowest, float highest, int taps, int order, int half,
                 int half_state, int threads) {
    const long channels = heads * width + 2 * groups * dim;
    ConvJob before = {.of = *of, .x = inner, .conv = conv, .bias = bias, .columns = columns, .result = u,
                      .channels = channels, .taps = taps, .stride = inner_stride, .columns_stride = columns_stride,
                      .half = half};
    convolve_all(&before, threads);
    MambaJob job = {.tasks = {.count = of->sequences * heads}, .of = *of, .step = step, .rate = rate, .shift = shift,
                    .skip = skip, .u = u, .matrix = matrix, .o = o, .scratch = scratch, .heads = heads,
                    .per = heads / groups, .dim = dim, .width = width, .channels = channels,
                    .step_stride = step_stride, .matrix_stride = matrix_stride, .lowest = lowest, .highest = highest,
                    .half = half, .half_state = half_state};
    RUN(mamba_heads, &job, threads);
    MambaEnd end = {.tasks = {.count = of->rows}, .o = o, .norm = norm, .gate = gate, .y = y, .width = heads * width,
                    .group = heads / groups * width, .gate_stride = gate_stride, .eps = eps, .order = order,
                    .half = half};
    RUN(mamba_ends, &end, threads);
    settle(of);
}
