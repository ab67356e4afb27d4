/* The gated delta rule: see quire.kernels.delta. First the convolution of all channels, then one task for each head of
   each sequence, which goes through the sequence's rows in order. A head's matrix [key dim][value dim] stays in the L2
   cache meanwhile; a block of its columns stays in L1 between the two passes over it that a row takes.

   A sequence's rows here: first the pending ones that are replayed, then those of the step. Lazy: its rows may be
   rejected, so they go through a copy of the matrix, and become the pending ones. */

enum { DELTA_COLUMNS = 4 * W, DELTA_CHANNELS = 512, DELTA_DIM = 512 };

typedef struct DeltaJob {
    Tasks tasks;
    const void *qkv, *gate, *decay, *strength;
    const float *conv, *rate, *shift, *norm;
    const int32_t *starts, *lengths, *slots, *kept_at, *kept;
    void *columns, *pending; /* pending NULL: none is lazy */
    int32_t *at, *replays;
    float *u, *matrix, *scratch;
    void *y;
    long scratches; /* claimed so far */
    long most_pending, pending_width, pending_stride, at_stride, rows;
    long sequences, key_heads, heads, key_dim, value_dim, taps;
    long qkv_stride, gate_stride, decay_stride, strength_stride, columns_stride, matrix_stride;
    float eps, lowest;
    int by_channel, sigmoid, doubled, half;
} DeltaJob;

INLINE float number_at(const void *base, long at, int half) {
    if (!half) return ((const float *)base)[at];
    const uint32_t bits = (uint32_t)((const bf16 *)base)[at] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Rows of a sequence before the step, and in it. */
INLINE long delta_rows(const DeltaJob *job, long s) { return job->starts[s + 1] - job->starts[s]; }
INLINE long delta_past(const DeltaJob *job, long s) { return job->lengths[s] - delta_rows(job, s); }

INLINE int delta_lazy(const DeltaJob *job, long s) { return job->pending && delta_rows(job, s) <= job->most_pending; }

/* Pending rows of a sequence that were accepted. */
INLINE long delta_replayed(const DeltaJob *job, long s) {
    const long past = delta_past(job, s);
    if (!job->pending || !past) return 0;
    const long rows = past - job->at[job->slots[s] * job->at_stride];
    return rows < 0 ? 0 : rows > job->most_pending ? job->most_pending : rows;
}

/* The place of row i of a sequence in u; the first `replayed` rows are pending ones. */
INLINE long delta_place(const DeltaJob *job, long s, long replayed, long i) {
    return i < replayed ? job->rows + s * job->most_pending + i : job->starts[s] + i - replayed;
}

enum { DELTA_COPIES = 2 }; /* of a sequence */

/* The number of rows of the step after which the sequence's state is copied for the n-th time; 0: it is not. */
INLINE long delta_kept(const DeltaJob *job, long s, int n) {
    const long rows = job->kept_at[DELTA_COPIES * job->slots[s] + n] - delta_past(job, s);
    return rows <= 0 || rows > delta_rows(job, s) ? 0 : rows;
}

/* The state that gets this copy. */
INLINE long delta_copy(const DeltaJob *job, long s, int n) { return job->kept[DELTA_COPIES * job->slots[s] + n]; }

/* A sequence's inputs of the convolution: of the state, pending ones, of the step. */
typedef struct DeltaInputs {
    const void *columns; /* NULL: zeros */
    const void *pending, *rows;
    long before, replayed, channels, stride, pending_width;
} DeltaInputs;

/* The inputs of a channel block in row i, which is negative in the state. */
INLINE Vec delta_input(const DeltaInputs *in, long i, long c, Lanes lanes, int half) {
    if (i >= in->replayed) return load(in->rows, (i - in->replayed) * in->stride + c, lanes, half);
    if (i >= 0) return load(in->pending, i * in->pending_width + c, lanes, half);
    return in->columns ? load(in->columns, (i + in->before) * in->channels + c, lanes, half) : zeros();
}

INLINE void convolve(const DeltaJob *job, long s, long block, int half) {
    const long channels = 2 * job->key_heads * job->key_dim + job->heads * job->value_dim, taps = job->taps;
    const long first = job->starts[s], rows = delta_rows(job, s), from = block * DELTA_CHANNELS;
    const long to = from + DELTA_CHANNELS < channels ? from + DELTA_CHANNELS : channels;
    const long replayed = delta_replayed(job, s), slot = job->slots[s];
    const int lazy = delta_lazy(job, s);
    void *own = (void *)element(job->columns, slot * job->columns_stride, half);
    void *pending = job->pending ? (void *)element(job->pending, slot * job->pending_stride, half) : NULL;
    const DeltaInputs in = {.columns = delta_past(job, s) ? own : NULL, .pending = pending,
                            .rows = element(job->qkv, first * job->qkv_stride, half), .before = taps - 1,
                            .replayed = replayed, .channels = channels, .stride = job->qkv_stride,
                            .pending_width = job->pending_width};
    if (!block) job->replays[s] = (int32_t)replayed;
    if (!rows) return;
    for (long c = from; c < to; c += W) {
        const Lanes lanes = lanes_of(to - c);
        for (long i = 0; i < replayed + rows; i++) {
            Vec sum = zeros();
            for (long k = 0; k < taps; k++)
                sum = madd(delta_input(&in, i - taps + 1 + k, c, lanes, half),
                           get_some(job->conv + k * channels + c, lanes), sum);
            put_some(job->u + delta_place(job, s, replayed, i) * channels + c, lanes,
                     gated_of(sum, fill(1.0f), SILU));
        }
        for (int n = 0; n < DELTA_COPIES; n++) {
            const long kept = delta_kept(job, s, n);
            if (!kept) continue;
            void *copy = (void *)element(job->columns, delta_copy(job, s, n) * job->columns_stride, half);
            for (long k = 0; k < taps - 1; k++)
                store(copy, k * channels + c, lanes,
                      delta_input(&in, replayed + kept - taps + 1 + k, c, lanes, half), half);
        }
        const long end = lazy ? replayed : replayed + rows;
        for (long k = 0; k < taps - 1; k++) /* in this order no column is overwritten before it is read */
            store(own, k * channels + c, lanes, delta_input(&in, end - taps + 1 + k, c, lanes, half), half);
        for (long i = 0; lazy && i < rows; i++)
            store(pending, i * job->pending_width + c, lanes, load(in.rows, i * in.stride + c, lanes, half), half);
    }
}

static void convolve_tasks(void *argument) {
    DeltaJob *job = argument;
    const long channels = 2 * job->key_heads * job->key_dim + job->heads * job->value_dim;
    const long blocks = (channels + DELTA_CHANNELS - 1) / DELTA_CHANNELS;
    long task;
    while ((task = claim(&job->tasks)) >= 0)
        if (job->half) convolve(job, task / blocks, task % blocks, 1);
        else convolve(job, task / blocks, task % blocks, 0);
}

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

/* A row of columns c .. of a head: decay, correct and read the matrix. own [dim][stride], output o. */
INLINE void turn_columns(float *own, long stride, const float *q, const float *k, const float *fade, float strength,
                         const float *v, float *o, long dim, long count) {
    Vec said[4], read[4];
    Lanes lanes[4];
    for (int j = 0; j < 4; j++) {
        lanes[j] = lanes_of(count - j * W);
        said[j] = read[j] = zeros();
    }
    for (long d = 0; d < dim; d++) {
        const Vec key = fill(k[d] * fade[d]);
        for (int j = 0; j < 4; j++) said[j] = madd(get_some(own + d * stride + j * W, lanes[j]), key, said[j]);
    }
    for (int j = 0; j < 4; j++) said[j] = (get_some(v + j * W, lanes[j]) - said[j]) * fill(strength);
    for (long d = 0; d < dim; d++) {
        const Vec key = fill(k[d]), query = fill(q[d]), faded = fill(fade[d]);
        for (int j = 0; j < 4; j++) {
            const Vec now = madd(key, said[j], get_some(own + d * stride + j * W, lanes[j]) * faded);
            put_some(own + d * stride + j * W, lanes[j], now);
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
    const long channels = 2 * job->key_heads * job->key_dim + job->heads * job->value_dim;
    const long decays = job->by_channel ? job->heads * job->key_dim : job->heads;
    if (i < replayed)
        return element(job->pending, job->slots[s] * job->pending_stride + i * job->pending_width + channels +
                                         (strengths ? decays : 0), half);
    const long row = job->starts[s] + i - replayed;
    return strengths ? element(job->strength, row * job->strength_stride, half)
                     : element(job->decay, row * job->decay_stride, half);
}

/* Row i of a head through a matrix -> o */
INLINE void take_row(const DeltaJob *job, long s, long head, long replayed, long i, float *matrix, float *o, int half) {
    float q[DELTA_DIM + W], k[DELTA_DIM + W], fade[DELTA_DIM];
    const long dim = job->key_dim, width = job->value_dim, channels = 2 * job->key_heads * dim + job->heads * width;
    const long key_head = head / (job->heads / job->key_heads);
    const float rate = expf(job->rate[head]);
    const float *u = job->u + delta_place(job, s, replayed, i) * channels;
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
        turn_columns(matrix + c, width, q, k, fade, strength, v + c, o + c, dim, width - c);
}

/* Make the inputs of a head's decays and strengths of the step pending. */
INLINE void put_off(const DeltaJob *job, long s, long head, int half) {
    const long channels = 2 * job->key_heads * job->key_dim + job->heads * job->value_dim, size = half ? 2 : 4;
    const long own = job->by_channel ? job->key_dim : 1;
    for (long i = 0; i < delta_rows(job, s); i++) {
        const long row = job->slots[s] * job->pending_stride + i * job->pending_width + channels;
        memcpy((void *)element(job->pending, row + head * own, half),
               element(delta_rates(job, s, 0, i, 0, half), head * own, half), own * size);
        memcpy((void *)element(job->pending, row + job->heads * own + head, half),
               element(delta_rates(job, s, 0, i, 1, half), head, half), size);
    }
}

INLINE void go_through(const DeltaJob *job, long s, long head, float *scratch, int half) {
    float o[DELTA_DIM + W];
    const long width = job->value_dim, numbers = job->key_dim * width;
    const long first = job->starts[s], rows = delta_rows(job, s), replayed = job->replays[s];
    float *matrix = job->matrix + job->slots[s] * job->matrix_stride + head * numbers;
    if (!rows) return;
    if (!delta_past(job, s)) memset(matrix, 0, numbers * sizeof(float));
    for (long i = 0; i < replayed; i++) take_row(job, s, head, replayed, i, matrix, o, half);
    if (delta_lazy(job, s)) matrix = memcpy(scratch, matrix, numbers * sizeof(float));
    for (long i = 0; i < rows; i++) {
        take_row(job, s, head, replayed, replayed + i, matrix, o, half);
        open_head(job, o, element(job->gate, (first + i) * job->gate_stride + head * width, half),
                  (void *)element(job->y, ((first + i) * job->heads + head) * width, half), half);
        for (int n = 0; n < DELTA_COPIES; n++)
            if (i + 1 == delta_kept(job, s, n))
                memcpy(job->matrix + delta_copy(job, s, n) * job->matrix_stride + head * numbers, matrix,
                       numbers * sizeof(float));
    }
    if (delta_lazy(job, s)) put_off(job, s, head, half);
    if (head || !job->pending) return;
    job->at[job->slots[s] * job->at_stride] = delta_lazy(job, s) ? delta_past(job, s) : job->lengths[s];
    for (int n = 0; n < DELTA_COPIES; n++)
        if (delta_kept(job, s, n))
            job->at[delta_copy(job, s, n) * job->at_stride] = delta_past(job, s) + delta_kept(job, s, n);
}

static void delta_tasks(void *argument) {
    DeltaJob *job = argument;
    const long number = __atomic_fetch_add(&job->scratches, 1, __ATOMIC_RELAXED);
    float *scratch = job->scratch + number * job->key_dim * job->value_dim;
    long task;
    while ((task = claim(&job->tasks)) >= 0)
        if (job->half) go_through(job, task / job->heads, task % job->heads, scratch, 1);
        else go_through(job, task / job->heads, task % job->heads, scratch, 0);
}

/* Strides are in numbers, from row to row; those of columns, matrix, pending and at from state to state.
   u [rows + sequences * most_pending, channels], scratch [threads, key_dim * value_dim] and replays [sequences] are
   scratch. pending NULL: no sequence is lazy. by_channel: a decay for each number of a key; sigmoid: the gate's
   activation, else silu; half: as of quire_gated, and the type of columns. Dimensions are at most DELTA_DIM. */
void quire_delta(const void *qkv, const void *gate, const void *decay, const void *strength, const float *conv,
                 const float *rate, const float *shift, const float *norm, const int32_t *starts,
                 const int32_t *lengths, const int32_t *slots, const int32_t *kept_at, const int32_t *kept,
                 void *columns, float *matrix, void *pending, int32_t *at, float *u, float *scratch,
                 int32_t *replays, void *y, long rows, long sequences, long key_heads, long heads, long key_dim,
                 long value_dim, long taps, long qkv_stride, long gate_stride, long decay_stride,
                 long strength_stride, long columns_stride, long matrix_stride, long most_pending,
                 long pending_stride, long at_stride, float eps, float lowest, int by_channel, int sigmoid,
                 int doubled, int half, int threads) {
    const long channels = 2 * key_heads * key_dim + heads * value_dim;
    DeltaJob job = {.qkv = qkv, .gate = gate, .decay = decay, .strength = strength, .conv = conv, .rate = rate,
                    .shift = shift, .norm = norm, .starts = starts, .lengths = lengths, .slots = slots,
                    .kept_at = kept_at, .kept = kept, .columns = columns, .pending = pending, .at = at,
                    .replays = replays, .u = u, .matrix = matrix, .scratch = scratch, .y = y,
                    .most_pending = most_pending,
                    .pending_width = channels + (by_channel ? heads * key_dim : heads) + heads,
                    .pending_stride = pending_stride, .at_stride = at_stride, .rows = rows, .sequences = sequences,
                    .key_heads = key_heads, .heads = heads, .key_dim = key_dim, .value_dim = value_dim, .taps = taps,
                    .qkv_stride = qkv_stride, .gate_stride = gate_stride, .decay_stride = decay_stride,
                    .strength_stride = strength_stride, .columns_stride = columns_stride,
                    .matrix_stride = matrix_stride, .eps = eps, .lowest = lowest, .by_channel = by_channel,
                    .sigmoid = sigmoid, .doubled = doubled, .half = half};
    job.tasks.count = sequences * ((channels + DELTA_CHANNELS - 1) / DELTA_CHANNELS);
    RUN(convolve_tasks, &job, threads);
    job.tasks = (Tasks){.count = sequences * heads};
    RUN(delta_tasks, &job, threads);
}
