/* A tape: the jobs of many kernels, recorded while they run, to run again in one call without Python in between.

   The recording code must keep every buffer that a job points to, and write the next inputs to the same places. */

enum { JOB_BYTES = 192 };

typedef struct Entry {
    void (*body)(void *);
    long threads;
    char job[JOB_BYTES]; /* starts with its Tasks; as it was before it ran */
} Entry;

typedef struct Tape {
    long count, room; /* of entries; count -1: there was more than fits, and the tape cannot be played */
    Entry entries[];
} Tape;

static __thread Tape *recording; /* where this thread's jobs are written down, or NULL */

static void write_down(Tape *tape, void (*body)(void *), const void *job, long size, int threads) {
    if (tape->count < 0 || tape->count == tape->room || size > JOB_BYTES) {
        tape->count = -1;
        return;
    }
    Entry *entry = &tape->entries[tape->count++];
    entry->body = body;
    entry->threads = threads;
    memcpy(entry->job, job, size);
}

/* Run job (a struct that starts with its Tasks) on up to `threads` threads, of which each calls body and claims tasks
   until none is left. */
#define RUN(body, job, threads) run_job(body, job, sizeof *(job), threads)

static void run_job(void (*body)(void *), void *job, long size, int threads) {
    if (recording) write_down(recording, body, job, size, threads);
    run_parallel(body, job, ((Tasks *)job)->count, threads);
}

/* Keep freed memory in the process. By default glibc gives the outputs of a prompt's kernels back to the system, and
   every layer faults their pages in again: 280,000 faults for a prompt of 1,024 tokens (0.6B). */
void quire_keep_memory(void) {
#ifdef M_TRIM_THRESHOLD
    mallopt(M_MMAP_THRESHOLD, 32 << 20); /* the most that glibc takes */
    mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
}

/* Bytes of a tape with room for so many jobs. */
long quire_tape_bytes(long room) { return (long)sizeof(Tape) + room * (long)sizeof(Entry); }

/* Record this thread's jobs from now on in a tape whose `room` is set; NULL: stop recording. */
void quire_tape_record(Tape *tape) { recording = tape; }

/* Run the recorded jobs in order. */
void quire_tape_play(const Tape *tape) {
    char job[JOB_BYTES] __attribute__((aligned(64)));
    for (long i = 0; i < tape->count; i++) {
        const Entry *entry = &tape->entries[i];
        memcpy(job, entry->job, JOB_BYTES);
        run_parallel(entry->body, job, ((Tasks *)job)->count, (int)entry->threads);
    }
}
