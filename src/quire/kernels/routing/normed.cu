// The norm of a row, its product with the router, and the choice of its experts, by a cluster of blocks.
//
// Each block of the cluster has some of the experts, whose weights its warps have in registers before the wait for the
// row. It norms the row, writes its part of it, and sends its logits to the first block, where one warp chooses: the
// largest key first, of equal keys that of the lower expert, as routing/triton.py does.
//
// Macros: K inputs; EXPERTS, PICKS of a row; CLUSTER blocks of a cluster; WARPS of a block; SOFTMAX 1: scores by
// softmax, 0: by sigmoid; TOTAL 1: it needs the sum of all, 0: it cancels; CORRECTED 1: a correction is added to scores
// for the choice; NORMALIZE 1: weights are divided by their sum; EXACT 1: logits stay float32, 0: bfloat16 rounds them;
// KEY type of a key: u32 with EXACT 0 and CORRECTED 0, else u64.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

struct Args {
  const u16 *x, *norm, *weight;  // [T, K] with stride; [K]; [EXPERTS, K]
  const u16 *bias;               // [EXPERTS], or none
  const float *correction;       // [EXPERTS] with CORRECTED
  const float *factors;          // [EXPERTS] of the weights, or none
  const u8 *live;                // [T] 0: the row chooses none; or none
  u16 *normed;                   // [T, K]
  float *weights;                // [T, PICKS]
  int *ids;                      // [T, PICKS]
  i64 stride;
  float eps, sum_eps, scaling;   // of the norm; added to the sum of weights; factor of the weights
};

constexpr int CHUNKS = K / 8, THREADS = WARPS * 32;  // 16 bytes of a row
constexpr int TURNS = (CHUNKS + THREADS - 1) / THREADS, STEPS = (CHUNKS + 31) / 32;
constexpr int EACH = (EXPERTS + CLUSTER - 1) / CLUSTER, OWN = (EACH + WARPS - 1) / WARPS;
constexpr int LANES = (EXPERTS + 31) / 32;  // experts of a lane
constexpr int PART = (CHUNKS + CLUSTER - 1) / CLUSTER;
// places in shared memory, behind the row
constexpr int LOGITS = CHUNKS * 16, READY = LOGITS + (EXPERTS + 1) / 2 * 8;  // the barrier that counts logits
constexpr int SQUARES = READY + 8;
static_assert(K % 8 == 0 && EXPERTS < 65536 && PICKS <= 32 && PICKS <= EXPERTS && WARPS <= 32, "sizes");

__device__ __forceinline__ float widen(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

__device__ __forceinline__ void unpack(float *to, const u32 *x) {
#pragma unroll
  for (int i = 0; i < 4; i++) to[2 * i] = widen(x[i] & 0xffff), to[2 * i + 1] = __uint_as_float(x[i] & 0xffff0000);
}

// Loads 16 bytes, past the L1 cache: another multiprocessor may have written them in this step.
__device__ __forceinline__ void load(u32 *to, const void *at) {
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(at)
               : "memory");
}

// Loads 16 bytes of a weight, which nothing reads again.
__device__ __forceinline__ void load_weights(u32 *to, const void *at) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(at));
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int far = 16; far; far /= 2) x += __shfl_xor_sync(~0u, x, far);
  return x;
}

__device__ __forceinline__ u32 most(u32 x) {
  u32 y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

// A number and an expert as one key. Keys differ, and are in the order of the numbers, of equal ones the lower expert
// first; 0 is below all of them. The numbers are logits, but with a correction: a softmax keeps their order.
constexpr bool SHORT = !EXACT && !CORRECTED;  // 16 bits have the number
typedef KEY Key;

__device__ __forceinline__ Key key_of(float x, int expert) {
  const u32 bits = __float_as_uint(x), ordered = bits ^ (bits >> 31 ? 0xffffffff : 0x80000000);
  const Key high = SHORT ? ordered >> 16 : ordered;
  return high << (sizeof(Key) * 4) | (65535 - expert);
}

// The largest key of the warp.
__device__ __forceinline__ Key largest(Key x) {
  const u32 high = most((u32)(x >> (sizeof(Key) * 8 - 32)));
  if (SHORT) return high;
  return (Key)high << 32 % (sizeof(Key) * 8) | most((u32)(x >> (sizeof(Key) * 8 - 32)) == high ? (u32)x : 0);
}

__device__ __forceinline__ float score(float logit, float top) {
  return SOFTMAX ? __expf(logit - top) : 1 / (1 + __expf(-logit));
}

// Chooses the experts of a row by its logits. One warp; a lane has every 32nd expert, the best one first.
__device__ __forceinline__ void choose(const Args &args, int row, const float *logits, const float *correction) {
  const int lane = threadIdx.x % 32;
  float logit[LANES], top = __int_as_float(0xff800000), total = 0;
  Key keys[LANES];
#pragma unroll
  for (int i = 0; i < LANES; i++) {
    logit[i] = i * 32 + lane < EXPERTS ? logits[i * 32 + lane] : top;
    keys[i] = i * 32 + lane < EXPERTS ? key_of(logit[i], i * 32 + lane) : 0;
  }
  if (TOTAL) {
#pragma unroll
    for (int i = 0; i < LANES; i++) top = fmaxf(top, logit[i]);
#pragma unroll
    for (int far = 16; far; far /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, far));
#pragma unroll
    for (int i = 0; i < LANES; i++) total += score(logit[i], top);
    total = sum_of_warp(total);
  }
  if (CORRECTED)
#pragma unroll
    for (int i = 0; i < LANES; i++)
      if (keys[i]) keys[i] = key_of(score(logit[i], top) / (SOFTMAX ? total : 1) + correction[i], i * 32 + lane);
#pragma unroll
  for (int i = 1; i < LANES; i++)
#pragma unroll
    for (int j = i; j > 0; j--) {
      const Key before = keys[j - 1], own = keys[j];
      keys[j - 1] = own > before ? own : before, keys[j] = own > before ? before : own;
    }
  Key found = 0;
#pragma unroll
  for (int pick = 0; pick < PICKS; pick++) {
    const Key best = largest(keys[0]);
    if (lane == pick) found = best;
    const bool mine = keys[0] == best;
#pragma unroll
    for (int i = 0; i < LANES; i++) keys[i] = !mine ? keys[i] : i + 1 < LANES ? keys[i + 1 < LANES ? i + 1 : 0] : 0;
  }
  const int id = lane < PICKS ? 65535 - (int)(found & 65535) : 0;
  const float own = logits[id];
  if (SOFTMAX && !TOTAL) top = __shfl_sync(~0u, own, 0);
  float weight = lane < PICKS ? score(own, top) / (SOFTMAX && TOTAL ? total : 1) : 0;
  if (NORMALIZE) weight /= sum_of_warp(weight) + args.sum_eps;
  if (lane >= PICKS) return;
  weight *= args.scaling;
  if (args.factors) weight *= args.factors[id];
  args.weights[row * PICKS + lane] = weight;
  args.ids[row * PICKS + lane] = args.live && !args.live[row] ? -1 : id;
}

// Grid (CLUSTER, rows), in clusters of CLUSTER blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 1) normed_router(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) char memory[];
  const u32 shared = (u32)__cvta_generic_to_shared(memory);
  const int rank = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (rank == 0 && threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared + READY) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared + READY), "n"(EXPERTS * 4)
                 : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  u32 weights[OWN][STEPS][4] = {}, norm[TURNS][4];
  float bias[OWN] = {}, correction[LANES] = {};
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int own = n * WARPS + warp, expert = rank * EACH + own;
    if (own >= EACH || expert >= EXPERTS) continue;
    const u16 *at = args.weight + (i64)expert * K;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      if (i * 32 + lane < CHUNKS) load_weights(weights[n][i], at + (i * 32 + lane) * 8);
    if (args.bias) bias[n] = widen(args.bias[expert]);
  }
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int chunk = i * THREADS + threadIdx.x;
    if (chunk < CHUNKS) load_weights(norm[i], args.norm + chunk * 8);
  }
  if (CORRECTED && rank == 0 && warp == 0)
#pragma unroll
    for (int i = 0; i < LANES; i++)
      if (i * 32 + lane < EXPERTS) correction[i] = args.correction[i * 32 + lane];
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // from here on a block may write to another one
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  float x[TURNS][8], squares = 0;
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    u32 packed[4] = {0, 0, 0, 0};
    const int chunk = i * THREADS + threadIdx.x;
    if (chunk < CHUNKS) load(packed, args.x + row * args.stride + chunk * 8);
    unpack(x[i], packed);
#pragma unroll
    for (int j = 0; j < 8; j++) squares += x[i][j] * x[i][j];
  }
  float *parts = (float *)(memory + SQUARES);
  squares = sum_of_warp(squares);
  if (lane == 0) parts[warp] = squares;
  __syncthreads();
  squares = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) squares += parts[i];
  const float inverse = rsqrtf(squares / K + args.eps);
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int chunk = i * THREADS + threadIdx.x;
    if (chunk >= CHUNKS) continue;
    float scale[8];
    u32 packed[4];
    unpack(scale, norm[i]);
#pragma unroll
    for (int j = 0; j < 4; j++)
      packed[j] = pack(x[i][2 * j] * inverse * scale[2 * j], x[i][2 * j + 1] * inverse * scale[2 * j + 1]);
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared + chunk * 16), "r"(packed[0]), "r"(packed[1]),
                 "r"(packed[2]), "r"(packed[3])
                 : "memory");
    if (chunk / PART == rank)
      asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(args.normed + (i64)row * K + chunk * 8),
                   "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                   : "memory");
  }
  __syncthreads();
  float sums[OWN] = {};
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    if (i * 32 + lane >= CHUNKS) continue;
    float given[8];
    unpack(given, (const u32 *)(memory + (i * 32 + lane) * 16));
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      float by[8];
      unpack(by, weights[n][i]);
#pragma unroll
      for (int j = 0; j < 8; j++) sums[n] += given[j] * by[j];
    }
  }
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int own = n * WARPS + warp, expert = rank * EACH + own;
    float logit = sum_of_warp(sums[n]) + bias[n];
    if (!EXACT) logit = widen(pack(logit, 0) & 0xffff);
    if (lane > 0 || own >= EACH || expert >= EXPERTS) continue;
    u32 there, ready;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared + LOGITS + expert * 4), "r"(0));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(ready) : "r"(shared + READY), "r"(0));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(there), "f"(logit),
                 "r"(ready)
                 : "memory");
  }
  if (rank > 0 || warp > 0) return;
  for (u32 done = 0; !done;)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared + READY)
        : "memory");
  __syncwarp();
  choose(args, row, (const float *)(memory + LOGITS), correction);
}
