/* The sequences of a step and their states, and the causal convolution of the layers that keep some: see
   quire.kernels.states. */

enum { STATE_COPIES = 2, CONV_CHANNELS = 512 }; /* copies of a sequence's state in a step; channels of a task */

typedef struct StateRows {
    const int32_t *starts, *lengths, *slots, *kept_at, *kept;
} StateRows;

/* The number of rows of a sequence in the step, and of those before it. */
INLINE long state_rows(const StateRows *of, long s) { return of->starts[s + 1] - of->starts[s]; }
INLINE long state_past(const StateRows *of, long s) { return of->lengths[s] - state_rows(of, s); }

/* The number of rows of the step after which the sequence's state is copied for the n-th time; at most 0: it is not. */
INLINE long state_kept(const StateRows *of, long s, int n) {
    const long rows = of->kept_at[STATE_COPIES * of->slots[s] + n] - state_past(of, s);
    return rows > state_rows(of, s) ? 0 : rows;
}

/* The row of the arena that gets this copy. */
INLINE long state_copy(const StateRows *of, long s, int n) { return of->kept[STATE_COPIES * of->slots[s] + n]; }

/* Copy what follows `from`, `bytes` of a state of `stride` bytes, to the copies that are due after `rows` rows. */
INLINE void keep_copies(const StateRows *of, long s, long rows, char *base, long stride, const char *from, long bytes) {
    const long offset = from - (base + of->slots[s] * stride);
    for (int n = 0; n < STATE_COPIES; n++)
        if (rows == state_kept(of, s, n)) memcpy(base + state_copy(of, s, n) * stride + offset, from, bytes);
}

/* A causal convolution of `taps` rows in each channel, and the inputs that a state keeps for the next step.

   x          inputs; times: numbers by which they are multiplied, the product rounded to their type; NULL: by none
   bias       added to the sum; NULL: nothing
   opened     numbers that multiply the sum, of the type of x, as the result is then; NULL: the result is the sum's silu
              in float32
   columns    [states][taps - 1][channels] of the type of x */
typedef struct ConvJob {
    Tasks tasks;
    StateRows of;
    const void *x, *times, *opened;
    const float *conv, *bias;
    void *columns, *result;
    long sequences, channels, taps, stride, columns_stride; /* stride: of x, times and opened */
    int half;
} ConvJob;

/* The inputs of a channel block i rows from the first one of the step: of the step, or from the state. */
INLINE Vec conv_input(const ConvJob *job, const void *past, long first, long i, long c, Lanes lanes, int half) {
    if (i < 0) return past ? load(past, (i + job->taps - 1) * job->channels + c, lanes, half) : zeros();
    const Vec x = load(job->x, (first + i) * job->stride + c, lanes, half);
    if (!job->times) return x;
    const Vec product = x * load(job->times, (first + i) * job->stride + c, lanes, half);
    return half ? widen(narrow(product)) : product;
}

INLINE void convolve_block(const ConvJob *job, long s, long block, int half) {
    const long channels = job->channels, taps = job->taps, first = job->of.starts[s], rows = state_rows(&job->of, s);
    const long from = block * CONV_CHANNELS, to = from + CONV_CHANNELS < channels ? from + CONV_CHANNELS : channels;
    if (!rows) return;
    void *own = (void *)element(job->columns, job->of.slots[s] * job->columns_stride, half);
    const void *past = state_past(&job->of, s) ? own : NULL;
    for (long c = from; c < to; c += W) {
        const Lanes lanes = lanes_of(to - c);
        for (long i = 0; i < rows; i++) {
            const long at = (first + i) * channels + c;
            Vec sum = job->bias ? get_some(job->bias + c, lanes) : zeros();
            for (long k = 0; k < taps; k++)
                sum = madd(conv_input(job, past, first, i - taps + 1 + k, c, lanes, half),
                           get_some(job->conv + k * channels + c, lanes), sum);
            if (job->opened)
                store(job->result, at, lanes,
                      sum * load(job->opened, (first + i) * job->stride + c, lanes, half), half);
            else put_some((float *)job->result + at, lanes, gated_of(sum, fill(1.0f), SILU));
        }
        for (int n = 0; n < STATE_COPIES; n++) {
            const long kept = state_kept(&job->of, s, n);
            if (kept <= 0) continue;
            void *copy = (void *)element(job->columns, state_copy(&job->of, s, n) * job->columns_stride, half);
            for (long k = 0; k < taps - 1; k++)
                store(copy, k * channels + c, lanes,
                      conv_input(job, past, first, kept - taps + 1 + k, c, lanes, half), half);
        }
        for (long k = 0; k < taps - 1; k++) /* in this order no column is overwritten before it is read */
            store(own, k * channels + c, lanes, conv_input(job, past, first, rows - taps + 1 + k, c, lanes, half),
                  half);
    }
}

static void convolve_blocks(void *argument) {
    ConvJob *job = argument;
    const long blocks = (job->channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    long task;
    while ((task = claim(&job->tasks)) >= 0)
        if (job->half) convolve_block(job, task / blocks, task % blocks, 1);
        else convolve_block(job, task / blocks, task % blocks, 0);
}

/* Run the convolution; `tasks` is set here. */
static void convolve_all(ConvJob *job, int threads) {
    job->tasks = (Tasks){.count = job->sequences * ((job->channels + CONV_CHANNELS - 1) / CONV_CHANNELS)};
    RUN(convolve_blocks, job, threads);
}
