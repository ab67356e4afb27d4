/* Threads of all native kernels.

   All kernels are compiled as one file (see build.py), so everything here is static.

   Threads claim tasks one by one from a counter; a result never depends on the thread that ran a task. The threads are
   our own, not PyTorch's: an OpenMP region ends when every thread has ended, even one that never got a core, but a
   region of this pool ends when every task is done. Beside one busy process on 2 cores, a decode step took 85 ms
   instead of 300 to 1,000. */

#include <errno.h>
#include <float.h>
#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <immintrin.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

enum { SMALL = 16384 }; /* elements of a row-wise operation that one thread does sooner than two */

/* A counter of tasks. A job starts with one. */
typedef struct Tasks {
    long count;
    long next;
} Tasks;

/* Claim the next task; -1: none is left. */
static inline long claim(Tasks *tasks) {
    long task = __atomic_fetch_add(&tasks->next, 1, __ATOMIC_RELAXED);
    return task < tasks->count ? task : -1;
}

enum { MOST_THREADS = 256, SPINS = 4000 }; /* SPINS: about 100 us, longer than Python takes between two operations */

/* There is one region at a time. `open` is its number while helpers may enter, else 0; `inside` counts the helpers
   that have entered. To enter, a helper adds 1 to `inside`, then checks that the region is still open; to leave, it
   subtracts 1. The owner closes the region when no task is left to claim, and waits until `inside` is 0. A helper that
   comes later finds the region closed and touches nothing. */
static struct {
    pthread_mutex_t owner;
    int started, sleepers;
    uint32_t serial; /* number of the last region; what sleeping helpers wait on */
    uint32_t open, inside, helpers;
    void (*body)(void *);
    void *job;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER};

static void futex_wait(uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void *help(void *number) {
    const uint32_t mine = (uint32_t)(uintptr_t)number;
    uint32_t seen = 0;
    for (;;) {
        uint32_t serial;
        for (int spins = 0; (serial = __atomic_load_n(&pool.serial, __ATOMIC_SEQ_CST)) == seen; spins++) {
            if (spins < SPINS) {
                _mm_pause();
                continue;
            }
            __atomic_fetch_add(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
            futex_wait(&pool.serial, seen);
            __atomic_fetch_sub(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
        }
        seen = serial;
        __atomic_fetch_add(&pool.inside, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&pool.open, __ATOMIC_SEQ_CST) && mine < __atomic_load_n(&pool.helpers, __ATOMIC_SEQ_CST))
            pool.body(pool.job);
        __atomic_fetch_sub(&pool.inside, 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

/* A forked child has none of its parent's helpers, and nobody in it is in a region. */
static void start_anew(void) {
    pthread_mutex_init(&pool.owner, NULL);
    pool.started = pool.sleepers = 0;
    pool.open = pool.inside = 0;
}

__attribute__((constructor)) static void expect_forks(void) { pthread_atfork(NULL, NULL, start_anew); }

/* Start helpers until `wanted` exist; return their number, at most `wanted`. */
static int start_helpers(int wanted) {
    while (pool.started < wanted && pool.started < MOST_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(uintptr_t)pool.started)) break;
        pthread_detach(thread);
        pool.started++;
    }
    return pool.started < wanted ? pool.started : wanted;
}

static void run_on_own_threads(void (*body)(void *), void *job, int threads) {
    if (pthread_mutex_trylock(&pool.owner)) { /* another engine's step: it has the helpers */
        body(job);
        return;
    }
    pool.body = body;
    pool.job = job;
    __atomic_store_n(&pool.helpers, (uint32_t)start_helpers(threads - 1), __ATOMIC_SEQ_CST);
    __atomic_store_n(&pool.open, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&pool.serial, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST)) futex_wake(&pool.serial);
    body(job);
    __atomic_store_n(&pool.open, 0, __ATOMIC_SEQ_CST);
    for (long spins = 0; __atomic_load_n(&pool.inside, __ATOMIC_SEQ_CST); spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
    pthread_mutex_unlock(&pool.owner);
}

/* Run body(job) on up to `threads` threads; each claims tasks until none is left. */
static void run_parallel(void (*body)(void *), void *job, long tasks, int threads) {
    if (tasks < threads) threads = (int)tasks;
    if (threads <= 1) body(job);
    else run_on_own_threads(body, job, threads);
}
