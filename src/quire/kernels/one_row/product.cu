// Products of one row with a weight, or with the weights of the row's experts; norm, quantization, activation and
// residual are fused. A step of one request with weights of 8 or 4 bits consists of them, but for attention.
//
// The outputs are cut into units of 16, in which a product by tensor cores has the weights as its tall operand and the
// row as one of 8 equal columns. A block has `own` units, whose steps of 128 inputs are one list. Each warp has an
// equal piece of it, so a part of the sums of one unit or more; the block adds up the parts at its end, always in the
// same order. A warp has the weights of AHEAD steps in registers, the first ones from before the wait for the row.
//
// A block has most registers of its multiprocessor, so that no multiprocessor has two: where a dependent launch may
// start beside the kernel before it, some get two blocks and others none, which took up to a third longer. Loads on
// their way take room of the L1 cache: shared memory is small.
//
// Macros: FORMAT bits of a weight: 8 FP8 in blocks of 128 x 128, 4 words (`weight_only/words.py`); K inputs of a
// matrix; WARPS of a block; AHEAD; REGISTERS of a thread, at most; GATED 1: a unit has 8 outputs of gate and the same
// 8 of up; NORM 1: the row is normed; PICKS experts of the row, 0: one matrix; DOWN 1: their results are added, with a
// row for each; POWERS 1: scales of the row are powers of two; ZEROS 1: numbers of 4 bits have zero points, 0: they are
// 8; FLOAT 1: y is float32.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

struct Args {
  const u16 *x, *norm;        // [K], with DOWN [PICKS, K]; [K]
  const char *weight;         // [experts, N, K]; with GATED [experts, 2 N, K]
  const float *scales;        // FP8: [experts, N / 128, K / 128]; 4 bits: [N / 16, K / 128, 16]
  const u8 *zeros;            // 4 bits: as scales, with ZEROS
  const u16 *residual;        // [N], or none
  void *y;                    // [N], of experts without DOWN [PICKS, N]
  const int *ids;             // [PICKS] experts, below 0: none
  const float *weights;       // [PICKS] with DOWN: factors of their results
  i64 matrix, matrix_scales;  // bytes of an expert's weights; number of its scales
  int n, units, own;          // outputs of a matrix (of gate); units of all blocks and of a block
  float eps;
};

constexpr int INPUTS = K * (DOWN ? PICKS : 1), STEPS = INPUTS / 128, OF_MATRIX = K / 128;
constexpr int WORDS = FORMAT * 2, EACH = GATED ? 8 : 16;  // registers of a lane for a step; outputs of a unit
constexpr int THREADS = WARPS * 32, TURNS = (STEPS + WARPS - 1) / WARPS;
constexpr int OF_STEP = FORMAT == 8 ? 4 : 8;  // bytes of a step of the row: scale; 4 bits: and sum
// places in shared memory, behind the row in 16 bits
constexpr int X_SCALES = INPUTS * 2, CHOSEN = X_SCALES + (STEPS * OF_STEP + 15) / 16 * 16;
constexpr int SQUARES = CHOSEN + 128, PARTS = SQUARES + 128;  // parts: [own, WARPS, 16]
static_assert(K % 128 == 0 && PICKS <= 16 && WARPS <= 32 && (FORMAT == 8 || !PICKS) && !(PICKS && NORM), "sizes");

__device__ __forceinline__ float widen(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

__device__ __forceinline__ u32 pack_halves(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

__device__ __forceinline__ u32 minus(u32 x, u32 y) {
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(y));
  return x;
}

__device__ __forceinline__ u16 eight_bits(float low, float high) {
  u16 x;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(x) : "f"(high), "f"(low));
  return x;
}

// Numbers of 8 bits in float16, which has all of them. Hopper's `mma` of 8 bits converts both operands, too.
__device__ __forceinline__ u32 two_halves(u16 eights) {
  u32 x;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"(eights));
  return x;
}
__device__ __forceinline__ void halves(u32 &low, u32 &high, u32 eights) {
  u16 first, second;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(first), "=h"(second) : "r"(eights));
  low = two_halves(first), high = two_halves(second);
}

// 1 / x, and x / y, given 1 / y, as a division rounds it (Markstein, 1990). No number here is denormal.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(fmaf(-x, y, 1.0f), y, y);
}
__device__ __forceinline__ float divided(float x, float y, float inverse) {
  const float quotient = x * inverse;
  return fmaf(fmaf(-quotient, y, x), inverse, quotient);
}

// Loads 16 bytes of a weight, which nothing reads again.
__device__ __forceinline__ void load_weights(u32 *to, const char *at) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(at));
}

// Loads 8 bytes, past the L1 cache: another multiprocessor has written them in this step.
__device__ __forceinline__ void load_inputs(u32 *to, const void *at) {
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(at));
}

// c = a b, and c += a b.
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
__device__ __forceinline__ void begin_sum(float *c, const u32 *a, const u32 *b) {
  asm volatile(PRODUCT " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
__device__ __forceinline__ void go_on(float *c, const u32 *a, const u32 *b) {
  asm volatile(PRODUCT " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ u32 most(u32 x) {
  u32 y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int far = 16; far; far /= 2) x += __shfl_xor_sync(~0u, x, far);
  return x;
}

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

// The weights of a step in registers, and their scales.
struct Tile {
  u32 words[WORDS];
  float scale[2];  // of the first 8 outputs and the others
  u8 zero[2];
};

// A place in the list of steps of a block, from which weights are loaded.
struct Reader {
  const char *at, *beside;  // of the first 8 outputs and the others
  const float *scale;
  const u8 *zero;
  int unit, step, left;     // unit of the block; steps until the next unit or expert

  __device__ __forceinline__ void seek(const Args &args, int first, const int *ids) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int here = first + unit, from = step;
    i64 matrix = 0;
    left = STEPS - step;
    if (PICKS) {
      const int of_matrix = args.n / EACH, pick = DOWN ? step / OF_MATRIX : here / of_matrix;
      if (!DOWN) here -= pick * of_matrix;
      if (DOWN) from -= pick * OF_MATRIX, left = OF_MATRIX - from;
      matrix = ids[pick] < 0 ? 0 : ids[pick];  // what is read for an expert that is not there is not used
    }
    const char *weight = args.weight + matrix * args.matrix;
#if FORMAT == 4
    const i64 place = (i64)here * OF_MATRIX + from;
    at = weight + place * 1024 + lane * 16;
    scale = args.scales + place * 16 + g;
    if (ZEROS) zero = args.zeros + place * 16 + g;
#else
    const int row = here * EACH;
    at = weight + (i64)(row + g) * K + from * 128 + t * 16;
    if (GATED) beside = at + (i64)args.n * K;
    scale = args.scales + matrix * args.matrix_scales + row / 128 * OF_MATRIX + from;
#endif
  }

  // Loads the step, and goes on to the next one.
  __device__ __forceinline__ void load(const Args &args, int first, const int *ids, Tile &tile) {
#if FORMAT == 4
    load_weights(tile.words, at), load_weights(tile.words + 4, at + 512);
    tile.scale[0] = scale[0], tile.scale[1] = scale[8];
    if (ZEROS) tile.zero[0] = zero[0], tile.zero[1] = zero[8], zero += 16;
    at += 1024, scale += 16;
#else
    load_weights(tile.words, at), load_weights(tile.words + 4, at + 64);
    const char *other = GATED ? beside : at + 8 * K;
    load_weights(tile.words + 8, other), load_weights(tile.words + 12, other + 64);
    tile.scale[0] = scale[0], tile.scale[1] = GATED ? scale[args.n / 128 * OF_MATRIX] : scale[0];
    at += 128, beside += 128, scale += 1;
#endif
    ++step;
    if (--left) return;
    if (step == STEPS) step = 0, ++unit;
    seek(args, first, ids);
  }
};

// Masks of the numbers of 4 bits of outputs g and g + 8 in a word. As constants they would be loaded before each use:
// an instruction in five. So the compiler must not know that n is positive.
struct Masks {
  u32 first, other;

  __device__ __forceinline__ explicit Masks(int n) : first(0x000f000f + (n >> 31)), other(0x00f000f0 + (n >> 31)) {}
};

// Multiplies a step with the row in shared memory, and adds to the sums of outputs g and g + 8, which all lanes with
// the same g have. factor: of the expert.
__device__ __forceinline__ void add(float *sums, const Tile &tile, const char *memory, int step, float factor,
                                    const Masks &masks) {
  const uint4 *x = (const uint4 *)(memory + step * 256) + threadIdx.x % 4 * 2;
  float even[4], odd[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {  // two products at a time, whose sums do not wait for each other
    const uint4 given = x[j / 2 * 8 + j % 2];
    const u32 b[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int m = 2 * j + i;
      u32 a[4];
#if FORMAT == 8
      halves(a[0], a[2], tile.words[m]), halves(a[1], a[3], tile.words[8 + m]);
#else
      // A number q is 1024 + q or 1024 + 16 q in float16: its bits behind those of 1024. From the former 1024 is taken
      // at once, since sums with it are 15 times less exact; the others are corrected as sums.
      const u32 later = tile.words[m] >> 8, thousand = 0x64006400;
      a[0] = minus(tile.words[m] & masks.first | thousand, thousand), a[1] = tile.words[m] & masks.other | thousand;
      a[2] = minus(later & masks.first | thousand, thousand), a[3] = later & masks.other | thousand;
#endif
      if (j) go_on(i ? odd : even, a, b + 2 * i);
      else begin_sum(i ? odd : even, a, b + 2 * i);
    }
  }
#if FORMAT == 8
  const float own = ((const float *)(memory + X_SCALES))[step];
  sums[0] += factor * own * tile.scale[0] * (even[0] + odd[0]);
  sums[1] += factor * own * tile.scale[1] * (even[2] + odd[2]);
#else
  const float2 own = ((const float2 *)(memory + X_SCALES))[step];
  const int zero[2] = {ZEROS ? tile.zero[0] : 8, ZEROS ? tile.zero[1] : 8};
  sums[0] += tile.scale[0] * own.x * (even[0] + odd[0] - zero[0] * own.y);
  sums[1] += tile.scale[1] * own.x * ((even[2] + odd[2]) * 0.0625f - (64 + zero[1]) * own.y);
#endif
}

// The row: a warp has 128 inputs at a time, a lane 4 of them.
struct Row {
  u32 given[TURNS][2], norm[NORM ? TURNS : 1][2];

  __device__ __forceinline__ void load(u32 (*to)[2], const u16 *from) {
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int step = i * WARPS + threadIdx.x / 32;
      to[i][0] = to[i][1] = 0;
      if (step < STEPS) load_inputs(to[i], from + step * 128 + threadIdx.x % 32 * 4);
    }
  }

  // Norms the row, and rounds it to bfloat16. All threads of the block.
  __device__ __forceinline__ void normalize(const Args &args, char *memory) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < TURNS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float x = widen(given[i][j / 2] >> j % 2 * 16 & 0xffff);
        squares += x * x;
      }
    squares = sum_of_warp(squares);
    float *all = (float *)(memory + SQUARES);
    if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) squares += all[i];
    const float factor = rsqrtf(squares / K + args.eps);
#pragma unroll
    for (int i = 0; i < (NORM ? TURNS : 0); i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float low = widen(given[i][j] & 0xffff) * factor * widen(norm[i][j] & 0xffff);
        const float high = widen(given[i][j] >> 16) * factor * widen(norm[i][j] >> 16);
        given[i][j] = pack(low, high);
      }
  }

  // Converts the row, and writes it to shared memory.
  __device__ __forceinline__ void write(char *memory) const {
    const int lane = threadIdx.x % 32;
    float *scales = (float *)(memory + X_SCALES);
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int step = i * WARPS + threadIdx.x / 32;
      if (step >= STEPS) continue;
      float x[4];
      u32 largest = FORMAT == 8 ? 0x2edbe6ff : 0x00800000;  // 1e-10; the least number that is not denormal
#pragma unroll
      for (int j = 0; j < 4; j++) {
        x[j] = widen(given[i][j / 2] >> j % 2 * 16 & 0xffff);
        const u32 magnitude = __float_as_uint(x[j]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
      }
      largest = most(largest);
#if FORMAT == 8
      float scale = divided(__uint_as_float(largest), 448.0f, 1.0f / 448);
#if POWERS
      const u32 bits = __float_as_uint(scale);
      if (bits < 0x7f800000) scale = __uint_as_float((bits + 0x7fffff) & 0x7f800000);
#endif
      const float inverse = reciprocal(scale);
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = divided(x[j], scale, inverse);
      *(uint2 *)(memory + (step * 128 + lane * 4) * 2) =
          make_uint2(two_halves(eight_bits(x[0], x[1])), two_halves(eight_bits(x[2], x[3])));
      if (lane == 0) scales[step] = scale;
#else
      // Numbers below 2 in float16: multiples of 2^-24, as the sum with a number between 0.5 and 1 makes them.
      const u32 exponent = least(largest >> 23, 253);
      const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = x[j] * inverse + 0.75f - 0.75f;
      // 64 inputs lie as 4 lanes of 8 words: for each 16 inputs those of 2 t and of 2 t + 8
      const int in = lane * 4 % 64, k16 = in / 16, half = in / 8 % 2, pair = in % 8 / 2;
      u32 *to = (u32 *)(memory + step * 256 + lane / 16 * 128) + k16 * 2 + half;
      to[pair * 8] = pack_halves(x[0], x[1]), to[(pair + 1) * 8] = pack_halves(x[2], x[3]);
      const float sum = sum_of_warp(x[0] + x[1] + x[2] + x[3]);
      if (lane == 0) scales[step * 2] = __uint_as_float(exponent << 23), scales[step * 2 + 1] = sum;
#endif
    }
  }
};

__device__ __forceinline__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_later_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

extern "C" __global__ void __maxnreg__(REGISTERS) one_row(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * args.own;
  const int count = least(args.units - first, args.own), items = count * STEPS, piece = (items + WARPS - 1) / WARPS;
  const int begin = least(warp * piece, items), end = least(begin + piece, items);
  int *ids = (int *)(memory + CHOSEN);
  float *weights = (float *)(memory + CHOSEN + 64), *parts = (float *)(memory + PARTS);
  Row row;
  if (NORM) row.load(row.norm, args.norm);
  if (!PICKS) let_later_start();
  // Experts are there once the kernels before have ended. Those behind may read them before they wait: so does DOWN.
  if (PICKS && !DOWN) wait_for_earlier(), let_later_start(), row.load(row.given, args.x);
  if (PICKS) {
    if (threadIdx.x < PICKS) {
      ids[threadIdx.x] = __ldcg(args.ids + threadIdx.x);
      if (DOWN) weights[threadIdx.x] = __ldcg(args.weights + threadIdx.x);
    }
    if (!DOWN) row.write(memory);
    __syncthreads();
  }
  Tile tiles[AHEAD];
  Reader reader;
  reader.unit = begin / STEPS, reader.step = begin % STEPS, reader.seek(args, first, ids);
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (begin + i < end) reader.load(args, first, ids, tiles[i]);
  if (!PICKS || DOWN) {
    wait_for_earlier();
    if (DOWN) let_later_start();
    row.load(row.given, args.x);
    if (NORM) row.normalize(args, memory);
    row.write(memory);
    __syncthreads();
  }
  const Masks masks(args.n);
  float sums[2] = {};
  int unit = begin / STEPS, step = begin % STEPS;
  for (int item = begin; item < end; item += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (item + i >= end) break;
      const int pick = DOWN ? step / OF_MATRIX : 0;
      if (!DOWN || ids[pick] >= 0) add(sums, tiles[i], memory, step, DOWN ? weights[pick] : 1.0f, masks);
      if (item + i + AHEAD < end) reader.load(args, first, ids, tiles[i]);
      if (++step < STEPS && item + i + 1 < end) continue;
      float *to = parts + (unit * WARPS + warp) * 16 + lane / 4;
      if (lane % 4 == 0) to[0] = sums[0], to[8] = sums[1];
      sums[0] = sums[1] = 0, step = 0, ++unit;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * EACH; i += THREADS) {
    const int output = first * EACH + i, of = i / EACH, last = ((of + 1) * STEPS - 1) / piece;
    const float *from = parts + of * WARPS * 16 + i % EACH;
    float sum = 0, up = 0;
    for (int j = of * STEPS / piece; j <= last; j++) sum += from[j * 16], up += GATED ? from[j * 16 + 8] : 0;
    if (GATED) sum = sum / (1 + __expf(-sum)) * up;
    if (args.residual) sum += widen(args.residual[output]);
#if FLOAT
    ((float *)args.y)[output] = sum;
#else
    ((u16 *)args.y)[output] = (u16)pack(sum, 0);
#endif
  }
}
