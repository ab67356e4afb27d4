/* Sums over bytes of stored tensors; see `quire.kernels.sums`. */

enum { SUM_NUMBERS = 1024, SUM_BLOCK = 4096 };

typedef struct Slice {
    int64_t base, length, stride;
    uint64_t keys[2];
} Slice;

static inline uint64_t sum_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Add `count` words times their numbers to sums. `a`, `b`: numbers of the two sums, below 2**32. */
static inline void sum_words(const uint8_t *bytes, long count, const uint64_t *a, const uint64_t *b, uint64_t *sums) {
    long i = 0;
#ifdef __AVX512F__
    __m512i low = _mm512_setzero_si512(), high = low;
    for (; i + 8 <= count; i += 8) {
        const __m512i words = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)(bytes + 4 * i)));
        low = _mm512_add_epi64(low, _mm512_mul_epu32(words, _mm512_loadu_si512(a + i)));
        high = _mm512_add_epi64(high, _mm512_mul_epu32(words, _mm512_loadu_si512(b + i)));
    }
    sums[0] += (uint64_t)_mm512_reduce_add_epi64(low);
    sums[1] += (uint64_t)_mm512_reduce_add_epi64(high);
#else
    __m256i low = _mm256_setzero_si256(), high = low;
    for (; i + 4 <= count; i += 4) {
        const __m256i words = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(bytes + 4 * i)));
        low = _mm256_add_epi64(low, _mm256_mul_epu32(words, _mm256_loadu_si256((const __m256i *)(a + i))));
        high = _mm256_add_epi64(high, _mm256_mul_epu32(words, _mm256_loadu_si256((const __m256i *)(b + i))));
    }
    uint64_t lanes[8];
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), high);
    sums[0] += lanes[0] + lanes[1] + lanes[2] + lanes[3];
    sums[1] += lanes[4] + lanes[5] + lanes[6] + lanes[7];
#endif
    for (; i < count; i++) {
        uint32_t word;
        memcpy(&word, bytes + 4 * i, 4);
        sums[0] += word * a[i];
        sums[1] += word * b[i];
    }
}

/* Add a byte of a word that is cut. `at`: its offset in the block. */
static inline void sum_byte(uint8_t byte, long at, const uint64_t *numbers, uint64_t *sums) {
    const uint64_t part = (uint64_t)byte << (8 * (at & 3));
    sums[0] += part * numbers[at >> 2];
    sums[1] += part * numbers[SUM_NUMBERS + (at >> 2)];
}

/* Add adjacent bytes, from `offset` of the tensor on, to sums. */
static void sum_run(const uint8_t *bytes, long count, long offset, const uint64_t *numbers, const Slice *slice,
                    uint64_t *sums) {
    while (count > 0) {
        const uint64_t step = (uint64_t)(offset / SUM_BLOCK) * 0x9E3779B97F4A7C15u;
        long at = offset % SUM_BLOCK;
        const long taken = count < SUM_BLOCK - at ? count : SUM_BLOCK - at, end = at + taken;
        const uint8_t *from = bytes;
        uint64_t own[2] = {0, 0};
        for (; at < end && (at & 3); at++) sum_byte(*from++, at, numbers, own);
        const long words = (end - at) / 4;
        sum_words(from, words, numbers + at / 4, numbers + SUM_NUMBERS + at / 4, own);
        from += 4 * words;
        for (at += 4 * words; at < end; at++) sum_byte(*from++, at, numbers, own);
        for (int t = 0; t < 2; t++) sums[t] += own[t] * (sum_mix(slice->keys[t] + step) | 1);
        bytes += taken;
        offset += taken;
        count -= taken;
    }
}

/* Write the two sums of a span of `count` bytes, from `position` of a slice on. numbers: [2, SUM_NUMBERS]. */
void quire_sum_bytes(const uint8_t *bytes, const uint64_t *numbers, const Slice *slice, uint64_t *sums, long count,
                     long position) {
    sums[0] = sums[1] = 0;
    long run = position / slice->length, inside = position % slice->length;
    while (count > 0) {
        const long taken = count < slice->length - inside ? count : slice->length - inside;
        sum_run(bytes, taken, slice->base + run * slice->stride + inside, numbers, slice, sums);
        bytes += taken;
        count -= taken;
        run++;
        inside = 0;
    }
}
