/* The gated delta rule: see quire.kernels.delta. First the convolution of all channels, then one task for each head of
   each sequence, which goes through the sequence's rows in order. A head's matrix [key dim][value dim] stays in the L2
   cache meanwhile; a block of its columns stays in L1 between the two passes over it that a row takes. Rows that may be
   rejected go through a copy of the matrix. */

enum { DELTA_COLUMNS = 4 * W, DELTA_DIM = 512 };

typedef struct DeltaJob {
    Tasks tasks;
    StateRows of;
    const void *gate, *decay, *strength;
    const float *rate, *shift, *norm, *u;
    void *matrix, *scratch, *y;
    long scratches; /* claimed so far */
    long key_heads, heads, key_dim, value_dim, channels;
    long gate_stride, decay_stride, strength_stride, matrix_stride;
    float eps, lowest;
    int by_channel, sigmoid, doubled, half, half_state;
} DeltaJob;

/* from [dim] times 1 / sqrt(sum of squares + 1e-6) times factor -> to */
INLINE void to_unit(const float *from, float *to, long dim, float factor) {
    Vec squares = zeros();
    for (long i = 0; i < dim; i += W) {
        const Vec x = get_some(from + i, lanes_of(dim - i));
        squares = madd(x, x, squares);
    }
    const Vec scale = fill(factor / sqrtf(sum_of(squares) + 1e-6f));
    for (long i = 0; i < dim; i += W) {
        const Lanes lanes = lanes_of(dim - i);
        put_some(to + i, lanes, get_some(from + i, lanes) * scale);
    }
}

/* log(1 + e^x) = max(x, 0) + log(1 + t) with t = e^-|x|, and NaN for NaN. log(1 + t) = 2 atanh z with z = t / (2 + t),
   at most 1/3, where the series to z^15 is exact to 1e-9 relative. */
static inline Vec softplus_of(Vec x) {
    const Vec t = exp_of(as_floats(as_words(x) | fill_words(INT32_MIN))), z = t / (fill(2.0f) + t), square = z * z;
    Vec p = fill(1.0f / 15);
    for (int k = 13; k > 0; k -= 2) p = madd(p, square, fill(1.0f / (float)k));
    return madd(z + z, p, largest(zeros(), x));
}

/* The factors exp(g) of raw decays. */
INLINE Vec fading(const DeltaJob *job, Vec raw, float rate) {
    if (job->lowest != 0.0f) return exp_of(fill(job->lowest) / (fill(1.0f) + exp_of(raw * fill(-rate))));
    return exp_of(softplus_of(raw) * fill(-rate));
}

/* A row of columns c .. of a head: decay, correct and read the matrix. own [dim][stride], output o. half: the matrix is
   bfloat16; its numbers are rounded when they are written. */
INLINE void turn_columns(void *own, long stride, const float *q, const float *k, const float *fade, float strength,
                         const float *v, float *o, long dim, long count, int half) {
    Vec said[4], read[4];
    Lanes lanes[4];
    for (int j = 0; j < 4; j++) {
        lanes[j] = lanes_of(count - j * W);
        said[j] = read[j] = zeros();
    }
    for (long d = 0; d < dim; d++) {
        const Vec key = fill(k[d] * fade[d]);
        for (int j = 0; j < 4; j++) said[j] = madd(load(own, d * stride + j * W, lanes[j], half), key, said[j]);
    }
    for (int j = 0; j < 4; j++) said[j] = (get_some(v + j * W, lanes[j]) - said[j]) * fill(strength);
    for (long d = 0; d < dim; d++) {
        const Vec key = fill(k[d]), query = fill(q[d]), faded = fill(fade[d]);
        for (int j = 0; j < 4; j++) {
            const Vec now = madd(key, said[j], load(own, d * stride + j * W, lanes[j], half) * faded);
            store(own, d * stride + j * W, lanes[j], now, half);
            read[j] = madd(now, query, read[j]);
        }
    }
    for (int j = 0; j < 4; j++) put_some(o + j * W, lanes[j], read[j]);
}

INLINE void open_head(const DeltaJob *job, const float *o, const void *gate, void *y, int half) {
    const long dim = job->value_dim;
    Vec squares = zeros();
    for (long i = 0; i < dim; i += W) {
        const Vec x = get_some(o + i, lanes_of(dim - i));
        squares = madd(x, x, squares);
    }
    const Vec scale = fill(1.0f / sqrtf(sum_of(squares) / (float)dim + job->eps));
    for (long i = 0; i < dim; i += W) {
        const Lanes lanes = lanes_of(dim - i);
        const Vec z = load(gate, i, lanes, half), x = get_some(o + i, lanes) * scale * get_some(job->norm + i, lanes);
        const Vec below = fill(1.0f) + exp_of(negative(z));
        store(y, i, lanes, x * (job->sigmoid ? fill(1.0f) : z) / below, half);
    }
}

/* A row of inputs of all heads' decays, or of their strengths, of the step or pending. */
INLINE const void *delta_rates(const DeltaJob *job, long s, long replayed, long i, int strengths, int half) {
    const long decays = job->by_channel ? job->heads * job->key_dim : job->heads;
    if (i < replayed) return pending_at(&job->of, s, i, job->channels + (strengths ? decays : 0), half);
    const long row = job->of.starts[s] + i - replayed;
    return strengths ? element(job->strength, row * job->strength_stride, half)
                     : element(job->decay, row * job->decay_stride, half);
}

/* Row i of a head through a matrix -> o */
INLINE void take_row(const DeltaJob *job, long s, long head, long replayed, long i, void *matrix, float *o, int half,
                     int half_state) {
    float q[DELTA_DIM + W], k[DELTA_DIM + W], fade[DELTA_DIM];
    const long dim = job->key_dim, width = job->value_dim;
    const long key_head = head / (job->heads / job->key_heads);
    const float rate = expf(job->rate[head]);
    const float *u = job->u + state_place(&job->of, s, replayed, i) * job->channels;
    const float *v = u + 2 * job->key_heads * dim + head * width;
    const void *decays = delta_rates(job, s, replayed, i, 0, half);
    to_unit(u + key_head * dim, q, dim, 1.0f / sqrtf((float)dim));
    to_unit(u + (job->key_heads + key_head) * dim, k, dim, 1.0f);
    Vec faded = zeros();
    if (!job->by_channel) faded = fading(job, fill(number_at(decays, head, half) + job->shift[head]), rate);
    for (long d = 0; d < dim; d += W) {
        const Lanes lanes = lanes_of(dim - d);
        const long at = head * dim + d;
        if (job->by_channel)
            faded = fading(job, load(decays, at, lanes, half) + get_some(job->shift + at, lanes), rate);
        put_some(fade + d, lanes, faded);
    }
    const float strength = (job->doubled ? 2.0f : 1.0f) /
                           (1.0f + expf(-number_at(delta_rates(job, s, replayed, i, 1, half), head, half)));
    for (long c = 0; c < width; c += DELTA_COLUMNS)
        turn_columns((void *)element(matrix, c, half_state), width, q, k, fade, strength, v + c, o + c, dim, width - c,
                     half_state);
}

/* Make the inputs of a head's decays and strengths of the step pending. */
INLINE void put_off(const DeltaJob *job, long s, long head, int half) {
    const long own = job->by_channel ? job->key_dim : 1, decays = job->channels, size = half ? 2 : 4;
    for (long i = 0; i < state_rows(&job->of, s); i++) {
        memcpy(pending_at(&job->of, s, i, decays + head * own, half),
               element(delta_rates(job, s, 0, i, 0, half), head * own, half), own * size);
        memcpy(pending_at(&job->of, s, i, decays + job->heads * own + head, half),
               element(delta_rates(job, s, 0, i, 1, half), head, half), size);
    }
}

INLINE void go_through(const DeltaJob *job, long s, long head, void *scratch, int half, int half_state) {
    float o[DELTA_DIM + W];
    const long width = job->value_dim, numbers = job->key_dim * width, bytes = numbers * (half_state ? 2 : 4);
    const long first = job->of.starts[s], rows = state_rows(&job->of, s), replayed = state_replayed(&job->of, s);
    const long own = job->of.slots[s] * job->matrix_stride + head * numbers;
    void *matrix = (void *)element(job->matrix, own, half_state);
    if (!rows) return;
    if (!state_past(&job->of, s)) memset(matrix, 0, bytes);
    for (long i = 0; i < replayed; i++) take_row(job, s, head, replayed, i, matrix, o, half, half_state);
    if (state_lazy(&job->of, s)) matrix = memcpy(scratch, matrix, bytes);
    for (long i = 0; i < rows; i++) {
        take_row(job, s, head, replayed, replayed + i, matrix, o, half, half_state);
        open_head(job, o, element(job->gate, (first + i) * job->gate_stride + head * width, half),
                  (void *)element(job->y, ((first + i) * job->heads + head) * width, half), half);
        keep_copies(&job->of, s, i + 1, job->matrix, job->matrix_stride, head * numbers, matrix, numbers, half_state);
    }
    if (state_lazy(&job->of, s)) put_off(job, s, head, half);
}

static void delta_tasks(void *argument) {
    DeltaJob *job = argument;
    const long number = __atomic_fetch_add(&job->scratches, 1, __ATOMIC_RELAXED);
    void *scratch = (void *)element(job->scratch, number * job->key_dim * job->value_dim, job->half_state);
    long task;
    while ((task = claim(&job->tasks)) >= 0)
        if (job->half && job->half_state) go_through(job, task / job->heads, task % job->heads, scratch, 1, 1);
        else if (job->half_state) go_through(job, task / job->heads, task % job->heads, scratch, 0, 1);
        else if (job->half) go_through(job, task / job->heads, task % job->heads, scratch, 1, 0);
        else go_through(job, task / job->heads, task % job->heads, scratch, 0, 0);
}

/* Strides are in numbers, from row to row; those of columns and matrix from state to state. u [rows + sequences *
   most_pending, channels] and scratch [threads, key_dim * value_dim] are scratch, the latter only with pending rows.
   by_channel: a decay for each number of a key; sigmoid: the gate's activation, else silu; half: as of quire_gated, and
   the type of columns and pending rows; half_state: that of matrices. Dimensions are at most DELTA_DIM. */
void quire_delta(const StateRows *of, const void *qkv, const void *gate, const void *decay, const void *strength,
                 const float *conv, const float *rate, const float *shift, const float *norm, void *columns,
                 void *matrix, float *u, void *scratch, void *y, long key_heads, long heads, long key_dim,
                 long value_dim, long taps, long qkv_stride, long gate_stride, long decay_stride,
                 long strength_stride, long columns_stride, long matrix_stride, float eps, float lowest,
                 int by_channel, int sigmoid, int doubled, int half, int half_state, int threads) {
    const long channels = 2 * key_heads * key_dim + heads * value_dim;
    ConvJob before = {.of = *of, .x = qkv, .conv = conv, .columns = columns, .result = u, .channels = channels,
                      .taps = taps, .stride = qkv_stride, .columns_stride = columns_stride, .half = half};
    convolve_all(&before, threads);
    DeltaJob job = {.tasks = {.count = of->sequences * heads}, .of = *of, .gate = gate, .decay = decay,
                    .strength = strength, .rate = rate, .shift = shift, .norm = norm, .u = u, .matrix = matrix,
                    .scratch = scratch, .y = y, .key_heads = key_heads, .heads = heads, .key_dim = key_dim,
                    .value_dim = value_dim, .channels = channels, .gate_stride = gate_stride,
                    .decay_stride = decay_stride, .strength_stride = strength_stride,
                    .matrix_stride = matrix_stride, .eps = eps, .lowest = lowest, .by_channel = by_channel,
                    .sigmoid = sigmoid, .doubled = doubled, .half = half, .half_state = half_state};
    RUN(delta_tasks, &job, threads);
    settle(of);
}
