/* The jobs of many kernels, recorded while they run, to run again in one call without Python in between.

   The recording code must keep every buffer that a job points to, and write the next inputs to the same places. */

enum { JOB_BYTES = 320 };

typedef struct Entry {
    void (*body)(void *);
    long threads;
    char job[JOB_BYTES]; /* starts with its Tasks; as it was before it ran */
} Entry;

typedef struct Recording {
    long count, room; /* of entries; count -1: there was more than fits, and the recording cannot be replayed */
    Entry entries[];
} Recording;

static __thread Recording *current_recording; /* where this thread's jobs are written down, or NULL */

static void write_down(Recording *recording, void (*body)(void *), const void *job, long size, int threads) {
    if (recording->count < 0 || recording->count == recording->room) {
        recording->count = -1;
        return;
    }
    Entry *entry = &recording->entries[recording->count++];
    entry->body = body;
    entry->threads = threads;
    memcpy(entry->job, job, size);
}

/* Run job (a struct that starts with its Tasks) on up to `threads` threads, of which each calls body and claims tasks
   until none is left. */
#define RUN(body, job, threads)                                                               \
    do {                                                                                      \
        _Static_assert(sizeof *(job) <= JOB_BYTES, "a recording has no room for the job");    \
        run_job(body, job, sizeof *(job), threads);                                           \
    } while (0)

static void run_job(void (*body)(void *), void *job, long size, int threads) {
    if (current_recording) write_down(current_recording, body, job, size, threads);
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

/* Bytes of a recording with room for so many jobs. */
long quire_recording_bytes(long room) { return (long)sizeof(Recording) + room * (long)sizeof(Entry); }

/* Record this thread's jobs from now on in a recording whose `room` is set; NULL: stop recording. */
void quire_record(Recording *recording) { current_recording = recording; }

/* Run the recorded jobs in order. */
void quire_replay(const Recording *recording) {
    char job[JOB_BYTES] __attribute__((aligned(64)));
    for (long i = 0; i < recording->count; i++) {
        const Entry *entry = &recording->entries[i];
        memcpy(job, entry->job, JOB_BYTES);
        run_parallel(entry->body, job, ((Tasks *)job)->count, (int)entry->threads);
    }
}
