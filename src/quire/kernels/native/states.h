/* The sequences of a step and their states, and the causal convolution of the layers that keep some: see
   quire.kernels.states.

   A sequence's rows here: first the pending ones that are replayed, then those of the step. Lazy: its rows may be
   rejected, so they leave the state as it is, and become the pending ones. */

enum { STATE_COPIES = 2, CONV_CHANNELS = 512 }; /* copies of a sequence's state in a step; channels of a task */

/* Strides are in numbers, from state to state; a pending row has pending_width numbers. rows: of the step.
   `StateRows` of native/states.py has the same fields. */
typedef struct StateRows {
    const int32_t *starts, *lengths, *slots, *kept_at, *kept;
    void *pending; /* NULL: no sequence is lazy */
    int32_t *at;
    long sequences, rows, most_pending, pending_width, pending_stride, at_stride;
} StateRows;

/* The number of rows of a sequence in the step, and of those before it. */
INLINE long state_rows(const StateRows *of, long s) { return of->starts[s + 1] - of->starts[s]; }
INLINE long state_past(const StateRows *of, long s) { return of->lengths[s] - state_rows(of, s); }

INLINE int state_lazy(const StateRows *of, long s) { return of->pending && state_rows(of, s) <= of->most_pending; }

/* Pending rows of a sequence that were accepted. */
INLINE long state_replayed(const StateRows *of, long s) {
    const long past = state_past(of, s);
    if (!of->pending || !past) return 0;
    const long rows = past - of->at[of->slots[s] * of->at_stride];
    return rows < 0 ? 0 : rows > of->most_pending ? of->most_pending : rows;
}

/* The place of row i of a sequence in scratch [rows + sequences * most_pending]. */
INLINE long state_place(const StateRows *of, long s, long replayed, long i) {
    return i < replayed ? of->rows + s * of->most_pending + i : of->starts[s] + i - replayed;
}

/* Number `at` of the pending row i of a sequence. */
INLINE void *pending_at(const StateRows *of, long s, long i, long at, int half) {
    return (void *)element(of->pending, of->slots[s] * of->pending_stride + i * of->pending_width + at, half);
}

/* The number of rows of the step after which the sequence's state is copied for the n-th time; 0: it is not. */
INLINE long state_kept(const StateRows *of, long s, int n) {
    const long rows = of->kept_at[STATE_COPIES * of->slots[s] + n] - state_past(of, s);
    return rows < 0 || rows > state_rows(of, s) ? 0 : rows;
}

/* The row of the arena that gets this copy. */
INLINE long state_copy(const StateRows *of, long s, int n) { return of->kept[STATE_COPIES * of->slots[s] + n]; }

/* Write `count` numbers, those from `at` on of a matrix of `stride` numbers, to the copies that are due after `rows`
   rows of the step. half: matrices are bfloat16, else float32. */
INLINE void keep_copies(const StateRows *of, long s, long rows, void *matrices, long stride, long at, const void *from,
                        long count, int half) {
    for (int n = 0; n < STATE_COPIES; n++)
        if (rows == state_kept(of, s, n))
            memcpy((void *)element(matrices, state_copy(of, s, n) * stride + at, half), from, count * (half ? 2 : 4));
}

typedef struct SettleJob {
    Tasks tasks;
    StateRows of;
} SettleJob;

static void settle_lengths(void *argument) {
    SettleJob *job = argument;
    const StateRows *of = &job->of;
    if (claim(&job->tasks) < 0) return;
    for (long s = 0; s < of->sequences; s++) {
        if (!state_rows(of, s)) continue;
        of->at[of->slots[s] * of->at_stride] = (int32_t)(state_lazy(of, s) ? state_past(of, s) : of->lengths[s]);
        for (int n = 0; n < STATE_COPIES; n++)
            if (state_kept(of, s, n))
                of->at[state_copy(of, s, n) * of->at_stride] = (int32_t)(state_past(of, s) + state_kept(of, s, n));
    }
}

/* Write the lengths at which states and copies stand, when no job of the operation needs the old ones any more. */
static void settle(const StateRows *of) {
    SettleJob job = {.tasks = {.count = 1}, .of = *of};
    if (of->pending) RUN(settle_lengths, &job, 1);
}

/* A causal convolution of `taps` rows in each channel, and the inputs that a state keeps for the next step.

   x          inputs; times: numbers by which they are multiplied, the product rounded to their type; NULL: by none
   bias       added to the sum; NULL: nothing
   opened     with `times`: numbers that multiply the sum, of the type of x, as the result of the step's rows is then;
              NULL: the result is the sum's silu in float32, by `state_place`
   columns    [states][taps - 1][channels] of the type of x */
typedef struct ConvJob {
    Tasks tasks;
    StateRows of;
    const void *x, *times, *opened;
    const float *conv, *bias;
    void *columns, *result;
    long channels, taps, stride, columns_stride; /* stride: of x, times and opened */
    int half;
} ConvJob;

/* The inputs of a sequence: of the state (NULL: zeros), of pending rows, of the step. */
typedef struct ConvInputs {
    const void *past, *pending, *x, *times;
    long before, replayed, channels, pending_width, stride;
} ConvInputs;

/* Those of a channel block in row i of the step. */
INLINE Vec conv_row(const ConvInputs *in, long i, long c, Lanes lanes, int half, int gated) {
    const Vec x = load(in->x, i * in->stride + c, lanes, half);
    if (!gated) return x;
    const Vec product = x * load(in->times, i * in->stride + c, lanes, half);
    return half ? widen(narrow(product)) : product;
}

/* Those in row i of the sequence, which is negative in the state. */
INLINE Vec conv_input(const ConvInputs *in, long i, long c, Lanes lanes, int half, int gated) {
    if (i >= in->replayed) return conv_row(in, i - in->replayed, c, lanes, half, gated);
    if (i >= 0) return load(in->pending, i * in->pending_width + c, lanes, half);
    return in->past ? load(in->past, (i + in->before) * in->channels + c, lanes, half) : zeros();
}

INLINE void convolve_block(const ConvJob *job, long s, long block, int half, int gated) {
    const StateRows *of = &job->of;
    const long channels = job->channels, taps = job->taps, first = of->starts[s], rows = state_rows(of, s);
    const long from = block * CONV_CHANNELS, to = from + CONV_CHANNELS < channels ? from + CONV_CHANNELS : channels;
    const long replayed = state_replayed(of, s);
    const int lazy = state_lazy(of, s);
    if (!rows) return;
    void *own = (void *)element(job->columns, of->slots[s] * job->columns_stride, half);
    const ConvInputs in = {.past = state_past(of, s) ? own : NULL,
                           .pending = of->pending ? pending_at(of, s, 0, 0, half) : NULL,
                           .x = element(job->x, first * job->stride, half),
                           .times = gated ? element(job->times, first * job->stride, half) : NULL, .before = taps - 1,
                           .replayed = replayed, .channels = channels, .pending_width = of->pending_width,
                           .stride = job->stride};
    for (long c = from; c < to; c += W) {
        const Lanes lanes = lanes_of(to - c);
        const Vec bias = job->bias ? get_some(job->bias + c, lanes) : zeros();
        for (long i = gated ? replayed : 0; i < replayed + rows; i++) {
            const long at = state_place(of, s, replayed, i) * channels + c;
            Vec sum = bias;
            for (long k = 0; k < taps; k++)
                sum = madd(conv_input(&in, i - taps + 1 + k, c, lanes, half, gated),
                           get_some(job->conv + k * channels + c, lanes), sum);
            if (gated)
                store(job->result, at, lanes,
                      sum * load(job->opened, (first + i - replayed) * job->stride + c, lanes, half), half);
            else put_some((float *)job->result + at, lanes, gated_of(sum, fill(1.0f), SILU));
        }
        for (int n = 0; n < STATE_COPIES; n++) {
            const long kept = state_kept(of, s, n);
            if (!kept) continue;
            void *copy = (void *)element(job->columns, state_copy(of, s, n) * job->columns_stride, half);
            for (long k = 0; k < taps - 1; k++)
                store(copy, k * channels + c, lanes,
                      conv_input(&in, replayed + kept - taps + 1 + k, c, lanes, half, gated), half);
        }
        const long end = lazy ? replayed : replayed + rows;
        for (long k = 0; k < taps - 1; k++) /* in this order no column is overwritten before it is read */
            store(own, k * channels + c, lanes, conv_input(&in, end - taps + 1 + k, c, lanes, half, gated), half);
        for (long i = 0; lazy && i < rows; i++)
            store(pending_at(of, s, i, c, half), 0, lanes, conv_row(&in, i, c, lanes, half, gated), half);
    }
}

static void convolve_blocks(void *argument) {
    ConvJob *job = argument;
    const long blocks = (job->channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    long task;
    while ((task = claim(&job->tasks)) >= 0)
        if (job->times && job->half) convolve_block(job, task / blocks, task % blocks, 1, 1);
        else if (job->times) convolve_block(job, task / blocks, task % blocks, 0, 1);
        else if (job->half) convolve_block(job, task / blocks, task % blocks, 1, 0);
        else convolve_block(job, task / blocks, task % blocks, 0, 0);
}

/* Run the convolution; `tasks` is set here. */
static void convolve_all(ConvJob *job, int threads) {
    job->tasks = (Tasks){.count = job->of.sequences * ((job->channels + CONV_CHANNELS - 1) / CONV_CHANNELS)};
    RUN(convolve_blocks, job, threads);
}
