/* Gated activations: see gated_of. */

typedef struct GateJob {
    Tasks tasks;
    const void *gate_up;
    void *y;
    long width, row_stride;
    int act, half;
} GateJob;

INLINE void gate_row(const GateJob *job, long row, int act, int half) {
    const void *gate = element(job->gate_up, row * job->row_stride, half), *up = element(gate, job->width, half);
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

/* gate_up [rows, 2 width] with a stride between rows -> y [rows, width]; half: bfloat16, else float32. */
void quire_gated(const void *gate_up, void *y, long rows, long width, long row_stride, int act, int half, int threads) {
    GateJob job = {.tasks.count = rows, .gate_up = gate_up, .y = y, .width = width, .row_stride = row_stride,
                   .act = act, .half = half};
    RUN(gate_tasks, &job, rows * width < SMALL ? 1 : threads);
}
