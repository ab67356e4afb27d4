/* Activations: see gated_of and pointwise_of. */

typedef struct GateJob {
    Tasks tasks;
    const void *gate, *up;
    void *y;
    long width, gate_stride, up_stride;
    int act, half;
} GateJob;

INLINE void gate_row(const GateJob *job, long row, int act, int half) {
    const void *gate = element(job->gate, row * job->gate_stride, half);
    const void *up = element(job->up, row * job->up_stride, half);
    void *y = (void *)element(job->y, row * job->width, half);
    for (long i = 0; i < job->width; i += W) {
        const Lanes lanes = lanes_of(job->width - i);
        store(y, i, lanes, gated_of(load(gate, i, lanes, half), load(up, i, lanes, half), act), half);
    }
}

static void gate_tasks(void *argument) {
    GateJob *job = argument;
    long row;
    while ((row = claim(&job->tasks)) >= 0) {
#define CASE(act) case act: if (job->half) gate_row(job, row, act, 1); else gate_row(job, row, act, 0); break;
        switch (job->act) { CASE(SILU) CASE(GELU_TANH) CASE(SWIGLU_OAI) CASE(GELU) }
#undef CASE
    }
}

/* gate and up [rows, width], each with a stride between rows -> y [rows, width]; half: bfloat16, else float32. */
void quire_gated(const void *gate, const void *up, void *y, long rows, long width, long gate_stride, long up_stride,
                 int act, int half, int threads) {
    GateJob job = {.tasks.count = rows, .gate = gate, .up = up, .y = y, .width = width, .gate_stride = gate_stride,
                   .up_stride = up_stride, .act = act, .half = half};
    RUN(gate_tasks, &job, rows * width < SMALL ? 1 : threads);
}

typedef struct PointJob {
    Tasks tasks;
    const void *x;
    void *y;
    long width, stride;
    int act, half;
} PointJob;

INLINE void point_row(const PointJob *job, long row, int act, int half) {
    const void *x = element(job->x, row * job->stride, half);
    void *y = (void *)element(job->y, row * job->width, half);
    for (long i = 0; i < job->width; i += W) {
        const Lanes lanes = lanes_of(job->width - i);
        store(y, i, lanes, pointwise_of(load(x, i, lanes, half), act), half);
    }
}

static void point_tasks(void *argument) {
    PointJob *job = argument;
    long row;
    while ((row = claim(&job->tasks)) >= 0) {
#define CASE(act) case act: if (job->half) point_row(job, row, act, 1); else point_row(job, row, act, 0); break;
        switch (job->act) { CASE(SILU) CASE(GELU_TANH) CASE(GELU) CASE(RELU) CASE(RELU2) }
#undef CASE
    }
}

/* x [rows, width] with a stride between rows -> y [rows, width]; half: as of quire_gated. */
void quire_pointwise(const void *x, void *y, long rows, long width, long stride, int act, int half, int threads) {
    PointJob job = {.tasks.count = rows, .x = x, .y = y, .width = width, .stride = stride, .act = act, .half = half};
    RUN(point_tasks, &job, rows * width < SMALL ? 1 : threads);
}

typedef struct OpenJob {
    Tasks tasks;
    const void *x, *gate;
    void *y;
    long width, x_stride, gate_stride;
    int half;
} OpenJob;

INLINE void open_row(const OpenJob *job, long row, int half) {
    const void *x = element(job->x, row * job->x_stride, half);
    const void *gate = element(job->gate, row * job->gate_stride, half);
    void *y = (void *)element(job->y, row * job->width, half);
    for (long i = 0; i < job->width; i += W) {
        const Lanes lanes = lanes_of(job->width - i);
        const Vec below = fill(1.0f) + exp_of(negative(load(gate, i, lanes, half)));
        store(y, i, lanes, load(x, i, lanes, half) / below, half);
    }
}

static void open_tasks(void *argument) {
    OpenJob *job = argument;
    long row;
    while ((row = claim(&job->tasks)) >= 0)
        if (job->half) open_row(job, row, 1);
        else open_row(job, row, 0);
}

/* x, gate [rows, width] with strides between rows -> y [rows, width] = x * sigmoid(gate); half: as of quire_gated. */
void quire_opened(const void *x, const void *gate, void *y, long rows, long width, long x_stride, long gate_stride,
                  int half, int threads) {
    OpenJob job = {.tasks.count = rows, .x = x, .gate = gate, .y = y, .width = width, .x_stride = x_stride,
                   .gate_stride = gate_stride, .half = half};
    RUN(open_tasks, &job, rows * width < SMALL ? 1 : threads);
}
