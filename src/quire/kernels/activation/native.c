/* Gated activations: see gated_of. */

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
        switch (job->act) { CASE(SILU) CASE(GELU_TANH) CASE(SWIGLU_OAI) }
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
