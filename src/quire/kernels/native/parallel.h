/* Shared by all native kernels: threads, vector types and the few functions on them.

   All kernels are compiled as one file (see build.py), so everything here is static.

   Threads claim tasks one by one from a counter; a result never depends on the thread that ran a task. There are two
   sources of threads:

   - PyTorch's OpenMP runtime, if a step also has operations of PyTorch (float32, whose linears are oneDNN's). Its entry
     point is passed once. A second pool would compete with its threads, which spin on after their work.
   - our own pool, if a whole step consists of these kernels (bfloat16 on AMX). An OpenMP region ends when every thread
     has ended, even one that never got a core; a region of this pool ends when every task is done. Beside one busy
     process on 2 cores, a decode step took 85 ms instead of 300 to 1,000. */

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <immintrin.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))
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

/* -- PyTorch's threads -- */

typedef void (*ParallelRegion)(void (*body)(void *), void *job, unsigned threads, unsigned flags);

static ParallelRegion parallel_region;

void quire_set_parallel_region(ParallelRegion region) { parallel_region = region; }

/* -- Our own threads -- */

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

/* Run body(job) on up to `threads` threads; each claims tasks until none is left. `own`: use our own pool. */
static void run_parallel(void (*body)(void *), void *job, long tasks, int threads, int own) {
    if (tasks < threads) threads = (int)tasks;
    if (threads <= 1) body(job);
    else if (own) run_on_own_threads(body, job, threads);
    else if (parallel_region) parallel_region(body, job, (unsigned)threads, 0);
    else body(job);
}

static inline __mmask16 mask_of(long count) {
    return count >= 16 ? 0xFFFF : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

/* bfloat16 is the upper half of a float32. */
static inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

/* Round to nearest, ties to even. */
static inline __m256i narrow(__m512 x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i sound = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sound, 16));
#endif
}

/* Tensors are bfloat16 where `half` says so and float32 otherwise; `half` is a constant wherever these are inlined. */
INLINE const void *element(const void *base, long at, int half) {
    return (const char *)base + at * (half ? 2 : 4);
}

INLINE __m512 load(const void *base, long at, __mmask16 mask, int half) {
    return half ? widen(_mm256_maskz_loadu_epi16(mask, (const bf16 *)base + at))
                : _mm512_maskz_loadu_ps(mask, (const float *)base + at);
}

/* Store x; return the stored value, which is x rounded. */
INLINE __m512 store(void *base, long at, __mmask16 mask, __m512 x, int half) {
    if (!half) {
        _mm512_mask_storeu_ps((float *)base + at, mask, x);
        return x;
    }
    const __m256i rounded = narrow(x);
    _mm256_mask_storeu_epi16((bf16 *)base + at, mask, rounded);
    return widen(rounded);
}

/* e^x within 2 units in the last place, 0 far below, infinite far above, NaN for NaN (minimum and maximum return their
   second operand when either is NaN): 2^n * e^r with n = round(x / ln 2) and |r| <= ln 2 / 2, where the Taylor
   polynomial of degree 6 is exact to 1e-8 relative. ln 2 is split in two so that r keeps its bits. */
static inline __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* gate * sigmoid(gate) * up */
static inline __m512 silu_mul_ps(__m512 gate, __m512 up) {
    __m512 minus = _mm512_xor_ps(gate, _mm512_set1_ps(-0.0f));
    __m512 sigmoid = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), exp_ps(minus)));
    return _mm512_mul_ps(sigmoid, up);
}
