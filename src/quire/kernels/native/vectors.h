/* Vectors of float32 at the width of this CPU: the same source is compiled for AVX-512 (16 lanes) and for AVX2 with FMA
   and F16C (8 lanes). `a + b`, `a * b` and `a / b` are the compiler's operators on vectors.

   `Lanes` says which lanes of a vector exist at the end of a row: lanes past it are neither read nor written. */

typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__

enum { W = 16 }; /* lanes */
typedef __m512 Vec;
typedef __m512i Words; /* W 32-bit integers */
typedef __m256i Halves; /* W bfloat16 */
typedef __mmask16 Lanes;

INLINE Lanes lanes_of(long count) { return count >= 16 ? 0xFFFF : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }
INLINE Vec zeros(void) { return _mm512_setzero_ps(); }
INLINE Vec fill(float x) { return _mm512_set1_ps(x); }
INLINE Vec get(const float *from) { return _mm512_loadu_ps(from); }
INLINE void put(float *to, Vec x) { _mm512_storeu_ps(to, x); }
INLINE Vec get_some(const float *from, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
INLINE void put_some(float *to, Lanes lanes, Vec x) { _mm512_mask_storeu_ps(to, lanes, x); }
INLINE Vec madd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec nmadd(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE Vec largest(Vec a, Vec b) { return _mm512_max_ps(a, b); } /* b if either is NaN */
INLINE Vec smallest(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE float sum_of(Vec x) { return _mm512_reduce_add_ps(x); }
INLINE float largest_of(Vec x) { return _mm512_reduce_max_ps(x); }
INLINE Vec negative(Vec x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }
/* The power of two that is at most |x|. */
INLINE Vec power_of(Vec x) { return _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(0x7F800000))); }
INLINE Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); } /* x * 2^n for whole n */
INLINE Vec choose(Lanes lanes, Vec a, Vec b) { return _mm512_mask_mov_ps(b, lanes, a); } /* a where lanes exist */
INLINE Vec as_floats(Words x) { return _mm512_castsi512_ps(x); }
INLINE Words as_words(Vec x) { return _mm512_castps_si512(x); }
INLINE Words get_words(const void *from) { return _mm512_loadu_si512(from); }
INLINE void put_words(void *to, Words x) { _mm512_storeu_si512(to, x); }
INLINE Words fill_words(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Vec from_words(Words x) { return _mm512_cvtepi32_ps(x); }
/* Whole numbers in [0, 255] -> W bytes. */
INLINE void put_bytes(uint8_t *to, Vec x) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

/* bfloat16 is the upper half of a float32. */
INLINE Vec widen(Halves x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

/* Round to nearest, ties to even. */
INLINE Halves narrow(Vec x) {
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

INLINE Halves read_halves(const bf16 *from, Lanes lanes) { return _mm256_maskz_loadu_epi16(lanes, from); }
INLINE void write_halves(bf16 *to, Lanes lanes, Halves x) { _mm256_mask_storeu_epi16(to, lanes, x); }

/* Sums of the lanes of W vectors, as one vector. */
static inline Vec sum_lanes(const Vec *v) {
    __m512 quarter[4];
    for (int i = 0; i < 4; i++) {
        const __m512 *w = v + 4 * i;
        const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
        const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(w[2], w[3]), _mm512_unpackhi_ps(w[2], w[3]));
        quarter[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
    }
    /* Every 128-bit lane of quarter[i] now holds sums of that lane of v[4i .. 4i + 3]. */
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[0], quarter[1], 0x88),
                                   _mm512_shuffle_f32x4(quarter[0], quarter[1], 0xDD));
    const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[2], quarter[3], 0x88),
                                   _mm512_shuffle_f32x4(quarter[2], quarter[3], 0xDD));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

INLINE __mmask32 mask32_of(long count) {
    return count >= 32 ? 0xFFFFFFFFu : count <= 0 ? 0 : (__mmask32)((1u << count) - 1);
}

/* Swap rows and columns of W x W words. */
INLINE void transpose(Words *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* 128-bit lane l of r[4i + j] is column 4l + j of rows 4i .. 4i + 3. */
    for (int j = 0; j < 4; j++) {
        const __m512i even_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        const __m512i even_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xDD);
        const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xDD);
        t[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
        t[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

#else

enum { W = 8 };
typedef __m256 Vec;
typedef __m256i Words;
typedef __m128i Halves;
typedef long Lanes; /* their number, W at most */

INLINE Lanes lanes_of(long count) { return count >= W ? W : count <= 0 ? 0 : count; }
INLINE Vec zeros(void) { return _mm256_setzero_ps(); }
INLINE Vec fill(float x) { return _mm256_set1_ps(x); }
INLINE Vec get(const float *from) { return _mm256_loadu_ps(from); }
INLINE void put(float *to, Vec x) { _mm256_storeu_ps(to, x); }
INLINE Vec madd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec nmadd(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE Vec largest(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec smallest(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec negative(Vec x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }
INLINE Vec power_of(Vec x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000))); }
INLINE Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec as_floats(Words x) { return _mm256_castsi256_ps(x); }
INLINE Words as_words(Vec x) { return _mm256_castps_si256(x); }
INLINE Words get_words(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE void put_words(void *to, Words x) { _mm256_storeu_si256((__m256i *)to, x); }
INLINE Words fill_words(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Vec from_words(Words x) { return _mm256_cvtepi32_ps(x); }
INLINE void put_bytes(uint8_t *to, Vec x) {
    const __m256i words = _mm256_cvtps_epi32(x);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(halves, halves));
}

INLINE __m256i mask_of(Lanes lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE Vec choose(Lanes lanes, Vec a, Vec b) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(mask_of(lanes))); }

INLINE Vec get_some(const float *from, Lanes lanes) {
    return lanes == W ? get(from) : _mm256_maskload_ps(from, mask_of(lanes));
}

INLINE void put_some(float *to, Lanes lanes, Vec x) {
    if (lanes == W) put(to, x);
    else _mm256_maskstore_ps(to, mask_of(lanes), x);
}

INLINE float sum_of(Vec x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float largest_of(Vec x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* In two steps: 2^n itself may be out of range. */
INLINE Vec scale_by_power(Vec x, Vec n) {
    const __m256i power = _mm256_cvtps_epi32(n), low = _mm256_srai_epi32(power, 1), high = _mm256_sub_epi32(power, low);
    const __m256i one = _mm256_set1_epi32(127);
    const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(low, one), 23));
    const __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(high, one), 23));
    return x * a * b;
}

INLINE Vec widen(Halves x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }

INLINE Halves narrow(Vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i sound = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC00000), nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(sound), _mm256_extracti128_si256(sound, 1));
}

INLINE Halves read_halves(const bf16 *from, Lanes lanes) {
    if (lanes == W) return _mm_loadu_si128((const __m128i *)from);
    bf16 some[W] = {0};
    for (long i = 0; i < lanes; i++) some[i] = from[i];
    return _mm_loadu_si128((const __m128i *)some);
}

INLINE void write_halves(bf16 *to, Lanes lanes, Halves x) {
    if (lanes == W) {
        _mm_storeu_si128((__m128i *)to, x);
        return;
    }
    bf16 some[W];
    _mm_storeu_si128((__m128i *)some, x);
    for (long i = 0; i < lanes; i++) to[i] = some[i];
}

static inline Vec sum_lanes(const Vec *v) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/* Swap rows and columns of W x W words. */
INLINE void transpose(Words *r) {
    __m256i t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* 128-bit lane l of r[4i + j] is column 4l + j of rows 4i .. 4i + 3. */
    for (int j = 0; j < 4; j++) {
        t[j] = _mm256_permute2x128_si256(r[j], r[4 + j], 0x20);
        t[4 + j] = _mm256_permute2x128_si256(r[j], r[4 + j], 0x31);
    }
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

#endif

/* sum + x * w, of floats, or of words that are pairs of bfloat16 */
INLINE Vec madd_words(Vec x, Vec w, Vec sum, int pairs) {
#ifdef __AVX512BF16__
    if (pairs) return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
#endif
    (void)pairs;
    return madd(x, w, sum);
}

/* sums + the products of 4 unsigned bytes of x and 4 signed ones of w, in each word; exact modulo 2^32 */
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define HAVE_QUADS 1
INLINE Words dot_quads(Words sums, Words x, Words w) { return _mm512_dpbusd_epi32(sums, x, w); }
#elif !defined(__AVX512F__) && defined(__AVXVNNI__)
#define HAVE_QUADS 1
INLINE Words dot_quads(Words sums, Words x, Words w) { return _mm256_dpbusd_avx_epi32(sums, x, w); }
#endif

/* Tensors are bfloat16 where `half` says so and float32 otherwise; `half` is a constant wherever these are inlined. */
INLINE const void *element(const void *base, long at, int half) {
    return (const char *)base + at * (half ? 2 : 4);
}

INLINE Vec load(const void *base, long at, Lanes lanes, int half) {
    return half ? widen(read_halves((const bf16 *)base + at, lanes)) : get_some((const float *)base + at, lanes);
}

INLINE float number_at(const void *base, long at, int half) {
    if (!half) return ((const float *)base)[at];
    const uint32_t bits = (uint32_t)((const bf16 *)base)[at] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Store x; return the stored value, which is x rounded. */
INLINE Vec store(void *base, long at, Lanes lanes, Vec x, int half) {
    if (!half) {
        put_some((float *)base + at, lanes, x);
        return x;
    }
    const Halves rounded = narrow(x);
    write_halves((bf16 *)base + at, lanes, rounded);
    return widen(rounded);
}

/* e^x within 2 units in the last place, 0 far below, infinite far above, NaN for NaN (minimum and maximum return their
   second operand when either is NaN): 2^n * e^r with n = round(x / ln 2) and |r| <= ln 2 / 2, where the Taylor
   polynomial of degree 6 is exact to 1e-8 relative. ln 2 is split in two so that r keeps its bits. */
static inline Vec exp_of(Vec x) {
    x = largest(fill(-104.0f), smallest(fill(89.0f), x));
    const Vec n = nearest(x * fill(1.44269504f));
    const Vec r = nmadd(n, fill(1.42860677e-6f), nmadd(n, fill(0.693145752f), x));
    Vec p = fill(1.0f / 720);
    p = madd(p, r, fill(1.0f / 120));
    p = madd(p, r, fill(1.0f / 24));
    p = madd(p, r, fill(1.0f / 6));
    p = madd(p, r, fill(0.5f));
    p = madd(p, r, fill(1.0f));
    p = madd(p, r, fill(1.0f));
    return scale_by_power(p, n);
}

/* tanh x within 4 units in the last place, NaN for NaN: y / (y + 2) of y = e^(2|x|) - 1, with the sign of x. Here
   y = 2^n * (e^r - 1) + (2^n - 1), with n and r as in exp_of: near 0, where n is 0, no bits are lost. */
static inline Vec tanh_of(Vec x) {
    const Words sign = fill_words(INT32_MIN);
    const Vec size = as_floats(as_words(x) & ~sign), twice = smallest(fill(40.0f), size + size);
    const Vec n = nearest(twice * fill(1.44269504f)), power = scale_by_power(fill(1.0f), n);
    const Vec r = nmadd(n, fill(1.42860677e-6f), nmadd(n, fill(0.693145752f), twice));
    Vec p = fill(1.0f / 5040);
    p = madd(p, r, fill(1.0f / 720));
    p = madd(p, r, fill(1.0f / 120));
    p = madd(p, r, fill(1.0f / 24));
    p = madd(p, r, fill(1.0f / 6));
    p = madd(p, r, fill(0.5f));
    p = madd(p, r, fill(1.0f));
    const Vec y = madd(power, p * r, power - fill(1.0f));
    return as_floats(as_words(y / (y + fill(2.0f))) | (as_words(x) & sign));
}

/* erf x within 2e-7, NaN for NaN: 1 - t e^(p(t) - x^2) of t = 1 / (1 + |x| / 2), with the sign of x. The polynomial is
   that of erfcc in Press et al., Numerical Recipes. */
static inline Vec erf_of(Vec x) {
    const Words sign = fill_words(INT32_MIN);
    const Vec size = as_floats(as_words(x) & ~sign), t = fill(1.0f) / madd(size, fill(0.5f), fill(1.0f));
    Vec p = fill(0.17087277f);
    p = madd(p, t, fill(-0.82215223f));
    p = madd(p, t, fill(1.48851587f));
    p = madd(p, t, fill(-1.13520398f));
    p = madd(p, t, fill(0.27886807f));
    p = madd(p, t, fill(-0.18628806f));
    p = madd(p, t, fill(0.09678418f));
    p = madd(p, t, fill(0.37409196f));
    p = madd(p, t, fill(1.00002368f));
    p = madd(p, t, fill(-1.26551223f));
    const Vec y = nmadd(t, exp_of(nmadd(size, size, p)), fill(1.0f));
    return as_floats(as_words(y) | (as_words(x) & sign));
}

/* Activations, by their NUMBERS of quire.kernels.activation. */
enum { SILU = 0, GELU_TANH = 1, SWIGLU_OAI = 2, GELU = 3, RELU = 4, RELU2 = 5 };

/* The activation of gate and up; `act` is a constant wherever this is inlined. But for GELU all are
   gate * sigmoid(z) * up, because (1 + tanh t) / 2 = sigmoid(2 t). The minima return their second operand, which is
   gate or up, where it is NaN. */
INLINE Vec gated_of(Vec gate, Vec up, int act) {
    if (act == GELU) return gate * madd(erf_of(gate * fill(0.707106781f)), fill(0.5f), fill(0.5f)) * up;
    Vec z = gate;
    if (act == GELU_TANH) /* 2 sqrt(2 / pi) = 1.5957691 */
        z = gate * fill(1.59576912f) * madd(gate * gate, fill(0.044715f), fill(1.0f));
    if (act == SWIGLU_OAI) {
        gate = smallest(fill(7.0f), gate);
        up = largest(fill(-7.0f), smallest(fill(7.0f), up)) + fill(1.0f);
        z = gate * fill(1.702f);
    }
    return gate / (fill(1.0f) + exp_of(negative(z))) * up;
}

/* gated_of, chosen at run time: for a vector after long sums, of which it is a small part. */
static inline Vec gated_by(Vec gate, Vec up, int act) {
    if (act == GELU_TANH) return gated_of(gate, up, GELU_TANH);
    if (act == GELU) return gated_of(gate, up, GELU);
    return act == SWIGLU_OAI ? gated_of(gate, up, SWIGLU_OAI) : gated_of(gate, up, SILU);
}

/* The activation of x; `act` is a constant wherever this is inlined. The maximum returns x where it is NaN. */
INLINE Vec pointwise_of(Vec x, int act) {
    if (act != RELU && act != RELU2) return gated_of(x, fill(1.0f), act);
    const Vec above = largest(fill(0.0f), x);
    if (act == RELU) return above;
    return above * above;
}
