/* Products of adapters: inner = A x, then y += B inner, for each row by its own adapter; see `quire.kernels.lora`.

   A recorded step reads the slots of its rows from memory that the next step fills, so no rows are grouped. */

enum { LORA_RANKS = 8 }; /* ranks of a task of A x, whose sums are in registers */

typedef struct LoraJob {
    Tasks tasks;
    const void *x, *weight; /* A or B of all slots */
    const int32_t *slots, *ranks, *blocks; /* of rows; of slots; (module, first output, outputs, first row of B) */
    float *inner; /* [rows, modules, rank] */
    void *y;
    long rows, width, modules, rank, x_row, x_module, slot, module, line, y_row;
    int half, half_weight; /* of x or y; of the weight */
} LoraJob;

INLINE void lora_sums(const void *x, const void *weight, long width, long line, long count, float *to, int half,
                      int half_weight) {
    Vec sums[LORA_RANKS];
    for (long j = 0; j < count; j++) sums[j] = zeros();
    for (long i = 0; i < width; i += W) {
        const Lanes lanes = lanes_of(width - i);
        const Vec own = load(x, i, lanes, half);
        for (long j = 0; j < count; j++) sums[j] = madd(own, load(weight, j * line + i, lanes, half_weight), sums[j]);
    }
    for (long j = 0; j < count; j++) to[j] = sum_of(sums[j]);
}

INLINE void shrink_task(const LoraJob *job, long task, int half, int half_weight) {
    const long blocks = (job->rank + LORA_RANKS - 1) / LORA_RANKS;
    const long module = task / blocks, first = task % blocks * LORA_RANKS;
    for (long row = 0; row < job->rows; row++) {
        const long slot = job->slots[row], left = slot < 0 ? 0 : job->ranks[slot] - first;
        if (left <= 0) continue;
        const void *x = element(job->x, row * job->x_row + module * job->x_module, half);
        const void *weight =
            element(job->weight, slot * job->slot + module * job->module + first * job->line, half_weight);
        float *to = job->inner + (row * job->modules + module) * job->rank + first;
        if (left >= LORA_RANKS) lora_sums(x, weight, job->width, job->line, LORA_RANKS, to, half, half_weight);
        else for (long j = 0; j < left; j++)
            lora_sums(x, element(weight, j * job->line, half_weight), job->width, 0, 1, to + j, half, half_weight);
    }
}

INLINE void expand_task(const LoraJob *job, long task, int half, int half_weight) {
    const int32_t *block = job->blocks + 4 * task;
    const long module = block[0], outputs = block[2];
    for (long row = 0; row < job->rows; row++) {
        const long slot = job->slots[row], rank = slot < 0 ? 0 : job->ranks[slot];
        if (!rank) continue;
        const float *inner = job->inner + (row * job->modules + module) * job->rank;
        const void *weight = element(job->weight, slot * job->slot + block[3] * job->line, half_weight);
        void *y = (void *)element(job->y, row * job->y_row + block[1], half);
        for (long n = 0; n < outputs; n += W) {
            Vec sums[W];
            for (long i = 0; i < W; i++) {
                const long at = (n + i < outputs ? n + i : outputs - 1) * job->line;
                sums[i] = zeros();
                for (long j = 0; j < rank; j += W) {
                    const Lanes lanes = lanes_of(rank - j);
                    sums[i] = madd(load(weight, at + j, lanes, half_weight), get_some(inner + j, lanes), sums[i]);
                }
            }
            const Lanes lanes = lanes_of(outputs - n);
            store(y, n, lanes, load(y, n, lanes, half) + sum_lanes(sums), half);
        }
    }
}

#define LORA_TASKS(name)                                                             \
    static void name##_tasks(void *argument) {                                       \
        LoraJob *job = argument;                                                     \
        long task;                                                                   \
        while ((task = claim(&job->tasks)) >= 0) {                                   \
            if (job->half && job->half_weight) name##_task(job, task, 1, 1);         \
            else if (job->half) name##_task(job, task, 1, 0);                        \
            else if (job->half_weight) name##_task(job, task, 0, 1);                 \
            else name##_task(job, task, 0, 0);                                       \
        }                                                                            \
    }
LORA_TASKS(shrink)
LORA_TASKS(expand)
#undef LORA_TASKS

/* inner [rows, modules, rank] = A x. x [rows, (modules,) width] with strides of rows and modules; a with strides of
   slots, modules and ranks; slots [rows], -1: no adapter; ranks [slots]. half: bfloat16, else float32. */
void quire_lora_shrink(const void *x, const void *a, const int32_t *slots, const int32_t *ranks, float *inner,
                       long rows, long width, long modules, long rank, long x_row, long x_module, long slot,
                       long module, long line, int half, int half_weight, int threads) {
    LoraJob job = {.tasks.count = modules * ((rank + LORA_RANKS - 1) / LORA_RANKS), .x = x, .weight = a, .slots = slots,
                   .ranks = ranks, .inner = inner, .rows = rows, .width = width, .modules = modules, .rank = rank,
                   .x_row = x_row, .x_module = x_module, .slot = slot, .module = module, .line = line, .half = half,
                   .half_weight = half_weight};
    RUN(shrink_tasks, &job, rows * modules * rank * width < 4 * SMALL ? 1 : threads);
}

/* y [rows, ..] += B inner, for the outputs of `blocks` [count, 4]. b with strides of slots and rows. */
void quire_lora_expand(void *y, const float *inner, const void *b, const int32_t *slots, const int32_t *ranks,
                       const int32_t *blocks, long count, long rows, long modules, long rank, long y_row, long slot,
                       long line, int half, int half_weight, int threads) {
    LoraJob job = {.tasks.count = count, .y = y, .inner = (float *)inner, .weight = b, .slots = slots, .ranks = ranks,
                   .blocks = blocks, .rows = rows, .modules = modules, .rank = rank, .y_row = y_row, .slot = slot,
                   .line = line, .half = half, .half_weight = half_weight};
    RUN(expand_tasks, &job, rows * count * rank < SMALL / 64 ? 1 : threads);
}

typedef struct UngateJob {
    Tasks tasks;
    const char *x;
    char *y;
    long width, x_row; /* outputs of gate; bytes of a row of x */
    int size; /* bytes of a number */
} UngateJob;

static void ungate_tasks(void *argument) {
    UngateJob *job = argument;
    long row;
    while ((row = claim(&job->tasks)) >= 0) {
        const long size = job->size, half = job->width * size, lanes = W * size;
        for (long n = 0; n < half; n += lanes) {
            const char *from = job->x + row * job->x_row + 2 * n;
            const long count = half - n < lanes ? half - n : lanes;
            memcpy(job->y + row * 2 * half + n, from, count);
            memcpy(job->y + row * 2 * half + half + n, from + lanes, count);
        }
    }
}

/* Outputs of panels that are packed for gates, x [rows, outputs], W of gate and W of up in turns -> y [rows, 2 width]:
   those of gate, then those of up, without padding. */
void quire_linear_ungate(const void *x, void *y, long rows, long width, long outputs, int size,
                         int threads) {
    UngateJob job = {.tasks.count = rows, .x = x, .y = y, .width = width, .x_row = outputs * size, .size = (int)size};
    RUN(ungate_tasks, &job, rows * width < SMALL ? 1 : threads);
}
