// Norm, rotation, cache write and attention of decodes, from the projection on, in clusters of blocks.
//
// A cluster computes a sequence's attention for a KV head and all its query heads. The context is cut into pieces of
// 16 tokens, which the cluster's warps ("units") take in turn; the step's own tokens are the last piece. Pieces go to
// shared memory before the wait for the projection, as far as there is room. So what is left behind it is one trip to
// memory, two products, and the sum of the units through the cluster's shared memory, always in the same order.
//
// The first launch of a step waits before it reads anything: the kernels of the step's lengths, slots and angles may
// run still, since those behind them let later kernels start before their own wait. Later launches of the step start
// behind the wait of the first one, so all of these are there.
//
// Macros: D head size; GROUP query heads of a KV head; ROWS most rows of a sequence; SIZE tokens of a block of the
// cache; CLUSTER blocks of a cluster; WARPS of a block; STAGES pieces of a warp in shared memory; REGISTERS of a
// thread, at most; HALF 1: float16, 0: bfloat16; WIDE_NORM 1: the norm's weights are float32.
//
// A "lane" is a query of the KV head: row * GROUP + head. Products have the tokens or the dimensions as rows of 16, and
// the lanes as columns of 8 ("tile"). The layouts of fragments are those of the PTX manual for m16n8k16: a thread has
// rows g and g + 8, columns 2 t and 2 t + 1, with g = its number in the warp / 4 and t the remainder.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct Args {
  const u16 *qkv;           // [T, heads, D] with stride_qkv, heads: queries, keys, values
  const void *norm;         // [query heads + KV heads, D], or none
  const u16 *cos, *sin;     // [T, D]; sin is signed
  const i64 *slots;         // [T]: block * SIZE + offset
  u16 *out;                 // [T, query heads, D] with stride_out
  u16 *k, *v;               // cache [blocks, KV heads, SIZE, D]
  const int *table, *starts, *lengths, *table_rows;  // see AttentionMeta: query_start, seq_lens; table_rows may be none
  const float *sinks;       // [query heads], or none
  i64 stride_qkv, stride_out, stride_block, stride_head, stride_token, stride_table;  // in elements
  float eps, scale;         // scale of scores in base 2
  int window, kv_heads;     // window 0: none
  int first;                // 1: of the launches of a step
};

constexpr int LANES = GROUP * ROWS, TILES = (LANES + 7) / 8, EVEN = (LANES + 1) / 2 * 2;
constexpr int PIECE = 16, CHUNKS = D / 8;                      // tokens of a piece; 16 bytes of a head
constexpr int UNITS = CLUSTER * WARPS, OWN = D / CLUSTER;      // dimensions that a block adds up for the cluster
constexpr int AT_ONCE = WARPS * 32 / CHUNKS;                   // heads that a block prepares at a time
constexpr int TASKS = (LANES + 2 * ROWS + AT_ONCE - 1) / AT_ONCE;
constexpr int TILE_BYTES = PIECE * D * 2;
constexpr int APART = EVEN * OWN + 2;  // numbers of a unit's sums [OWN, EVEN]: two more, for other banks
// places in shared memory, behind the rings of the warps
constexpr int KEYS = WARPS * STAGES * 2 * TILE_BYTES, VALUES = KEYS + TILE_BYTES, QUERIES = VALUES + TILE_BYTES;
constexpr int SUMS = QUERIES + TILE_BYTES, STATS = SUMS + UNITS * APART * 4, STAT = EVEN * 8;
constexpr int READY = STATS + UNITS * STAT;                    // the barrier that counts what other blocks send
constexpr int RECEIVED = UNITS * (OWN * EVEN * 4 + STAT);      // bytes of it
constexpr float LOWEST = -1e30f;
__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int power_below(int n) { return n < 2 ? 1 : 2 * power_below(n / 2); }
constexpr int PAIRS = EVEN / 2 * OWN;                          // results of a block, two lanes each
constexpr int SHARE = least(least(32, UNITS), power_below(WARPS * 32 / PAIRS));  // threads that add up a pair
static_assert(LANES <= 16 && D % (8 * CLUSTER) == 0 && CHUNKS >= 8 && CHUNKS <= 32 && SIZE % PIECE == 0, "sizes");
static_assert((UNITS & (UNITS - 1)) == 0, "threads beside each other add up the units");
static_assert(CLUSTER > 1, "a block that is launched by itself has no cluster to send to");

__device__ __forceinline__ float widen(u32 bits) {
#if HALF
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
  return x;
#else
  return __uint_as_float(bits << 16);
#endif
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 x;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
  return x;
}

// The cache holds finite numbers only, see `finite` in triton_tiles.py.
__device__ __forceinline__ float finite(float x) {
  constexpr float most = HALF ? 65504.0f : 3.38e38f;
  return fabsf(x) <= most ? x : most;
}

__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Loads 16 bytes, past the L1 cache: another multiprocessor may have written them in this step.
__device__ __forceinline__ void load(u32 *to, const void *at) {
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(at)
               : "memory");
}

__device__ __forceinline__ void store(u32 at, const u32 *x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ __forceinline__ void unpack(float *to, const u32 *x) {
#pragma unroll
  for (int i = 0; i < 4; i++) to[2 * i] = widen(x[i] & 0xffff), to[2 * i + 1] = widen(x[i] >> 16);
}

// The place of a chunk of a row in a tile of 16 rows: eight rows of a column lie in different banks.
__device__ __forceinline__ u32 place(u32 tile, int row, int chunk) {
  return tile + row * (D * 2) + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void matrices(u32 *to, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ void turned_matrices(u32 *to, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ u32 turned(u32 matrix) {
  u32 to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(matrix));
  return to;
}

__device__ __forceinline__ void multiply(float *c, const u32 *a, const u32 *b) {
#if HALF
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Stores two numbers at a place of the shared memory of a block of the cluster, which counts their bytes. A barrier of
// the cluster that releases other stores would wait for all memory of the GPU.
__device__ __forceinline__ void send(u32 shared, u32 at, int block, float x, float y) {
  u32 there, ready;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared + at), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(ready) : "r"(shared + READY), "r"(block));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(there), "f"(x),
               "f"(y), "r"(ready)
               : "memory");
}

// The work of a block, and of a warp in it.
struct Item {
  int head, rank, start, rows, before;  // KV head, block of the cluster, first row, rows, tokens in the cache
  int first, pieces, unit;              // first piece that is seen, number of pieces, number of the warp in the cluster
  const int *table;                     // blocks of the sequence

  __device__ __forceinline__ explicit Item(const Args &args) {
    const int sequence = blockIdx.y;
    head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    start = args.starts[sequence], rows = args.starts[sequence + 1] - start;
    before = args.lengths[sequence] - rows;
    first = args.window > 0 && before >= args.window ? (before - args.window + 1) / PIECE : 0;
    pieces = rows > 0 ? (before + PIECE - 1) / PIECE - first : 0;
    unit = rank + CLUSTER * (threadIdx.x / 32);
    table = args.table + (args.table_rows ? args.table_rows[sequence] : sequence) * args.stride_table;
  }

  // The step's own tokens belong to the unit whose turn is after the last piece of the cache.
  __device__ __forceinline__ bool has_own() const { return pieces % UNITS == unit; }
  __device__ __forceinline__ bool block_has_own() const { return pieces % CLUSTER == rank; }
};

// Starts to copy 16 bytes to shared memory, of which `bytes` are read and the others zero.
__device__ __forceinline__ void copy(u32 to, const u16 *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Starts to copy a warp's piece number n to its ring, zeros behind the context. Every call is a group of copies.
__device__ __forceinline__ void fetch(const Args &args, const Item &item, u32 ring, int n) {
  const int piece = item.unit + n * UNITS, token = (item.first + piece) * PIECE;
  if (piece < item.pieces) {
    const i64 block = item.table[token / SIZE];
    const i64 at = block * args.stride_block + item.head * args.stride_head + token % SIZE * args.stride_token;
    const u32 keys = ring + n % STAGES * (2 * TILE_BYTES);
#pragma unroll
    for (int i = threadIdx.x % 32; i < PIECE * CHUNKS; i += 32) {
      const int row = i / CHUNKS, chunk = i % CHUNKS, bytes = token + row < item.before ? 16 : 0;
      const i64 from = at + row * args.stride_token + chunk * 8;
      const u32 to = place(keys, row, chunk);
      copy(to, args.k + from, bytes), copy(to + TILE_BYTES, args.v + from, bytes);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// A chunk of a head of the step: of a query (a lane), key or value. CHUNKS threads beside each other have a head.
struct Task {
  int lane, key, row, head, chunk;  // lane; key: number among the step's keys, then values, below 0 for queries
  bool value, there;
  u32 cosine[4], sine[4], norm[WIDE_NORM ? 8 : 4];
  i64 to;  // place in the cache

  // Loads what does not depend on the projection.
  __device__ __forceinline__ void begin(const Args &args, const Item &item, int turn) {
    lane = turn * AT_ONCE + threadIdx.x / CHUNKS, key = lane - LANES, chunk = threadIdx.x % CHUNKS;
    row = key < 0 ? lane / GROUP : key % ROWS, value = key >= ROWS;
    head = key < 0 ? item.head * GROUP + lane % GROUP : args.kv_heads * (GROUP + value) + item.head;
    there = row < item.rows && (key < 0 || (key < 2 * ROWS && item.block_has_own()));
    if (!there) return;
    const i64 angle = (i64)(item.start + row) * D + chunk * 8;
    load(cosine, args.cos + angle), load(sine, args.sin + angle);
    if (args.norm && !value) {
      const char *weights = (const char *)args.norm + ((i64)head * D + chunk * 8) * (WIDE_NORM ? 4 : 2);
      load(norm, weights);
      if (WIDE_NORM) load(norm + (WIDE_NORM ? 4 : 0), weights + 16);
    }
    if (key >= 0) {
      const i64 slot = args.slots[item.start + row];
      to = slot / SIZE * args.stride_block + item.head * args.stride_head + slot % SIZE * args.stride_token + chunk * 8;
    }
  }

  // Norms and rotates the head in float32, and writes it to shared memory, keys and values to the cache, too.
  __device__ __forceinline__ void run(const Args &args, const Item &item, u32 shared) {
    u32 packed[4] = {0, 0, 0, 0};
    if (there) load(packed, args.qkv + (item.start + row) * args.stride_qkv + head * D + chunk * 8);
    float x[8], squares = 0;
    unpack(x, packed);
#pragma unroll
    for (int j = 0; j < 8; j++) squares += x[j] * x[j];
#pragma unroll
    for (int far = CHUNKS / 2; far; far /= 2) squares += __shfl_xor_sync(~0u, squares, far);
    if (args.norm && !value) {
      const float inverse = rsqrtf(squares / D + args.eps);
      float weights[8];
      if (WIDE_NORM) {
#pragma unroll
        for (int j = 0; j < 8; j++) weights[j] = __uint_as_float(norm[WIDE_NORM ? j : 0]);
      } else {
        unpack(weights, norm);
      }
#pragma unroll
      for (int j = 0; j < 8; j++) x[j] = x[j] * inverse * weights[j];
    }
    float c[8], s[8];
    unpack(c, cosine), unpack(s, sine);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float other = __shfl_xor_sync(~0u, x[j], CHUNKS / 2);  // half a head further on
      x[j] = value ? finite(x[j]) : x[j] * c[j] + other * s[j];
    }
    if (!there) return;
#pragma unroll
    for (int j = 0; j < 4; j++) packed[j] = pack(x[2 * j], x[2 * j + 1]);
    store(key < 0 ? place(shared + QUERIES, lane, chunk) : place(shared + (value ? VALUES : KEYS), row, chunk), packed);
    if (key >= 0)
      asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"((value ? args.v : args.k) + to), "r"(packed[0]),
                   "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                   : "memory");
  }
};

// The softmax of a warp's tokens: weighted sums of values [dimensions, lanes], maxima and sums of weights of the lanes.
struct Softmax {
  float sums[D / 16][TILES][4], top[TILES][2], weight[TILES][2];

  // Adds 16 tokens from `token` on. NEW: they are the step's own. `queries` as second operands of products.
  template <bool NEW>
  __device__ __forceinline__ void add(const u32 (*queries)[D / 16][2], u32 keys, u32 values, int token,
                                      const Item &item, float scale, int window) {
    const int thread = threadIdx.x % 32, g = thread / 4, t = thread % 4;
    float scores[TILES][4] = {}, odd[TILES][4] = {};  // two sums, so that a product does not wait for the one before
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      u32 a[4];
      matrices(a, place(keys, thread % 16, 2 * step + thread / 16));
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) multiply(step % 2 ? odd[tile] : scores[tile], a, queries[tile][step]);
    }
    u32 shares[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int position = item.before + (tile * 8 + t * 2 + j) / GROUP;
        float above = top[tile][j];
#pragma unroll
        for (int i = j; i < 4; i += 2) {
          const int at = token + g + 4 * (i - j);
          const bool seen = NEW ? at <= position && at < item.before + item.rows : at < item.before;
          const float score = (scores[tile][i] + odd[tile][i]) * scale;
          scores[tile][i] = seen && (window == 0 || at > position - window) ? score : __int_as_float(0xff800000);
          above = fmaxf(above, scores[tile][i]);
        }
#pragma unroll
        for (int far = 4; far < 32; far *= 2) above = fmaxf(above, __shfl_xor_sync(~0u, above, far));
        const float decay = power(top[tile][j] - above);
        top[tile][j] = above, weight[tile][j] *= decay;
#pragma unroll
        for (int i = j; i < 4; i += 2) weight[tile][j] += scores[tile][i] = power(scores[tile][i] - above);
#pragma unroll
        for (int m = 0; m < D / 16; m++) sums[m][tile][j] *= decay, sums[m][tile][2 + j] *= decay;
      }
      shares[tile][0] = turned(pack(scores[tile][0], scores[tile][1]));
      shares[tile][1] = turned(pack(scores[tile][2], scores[tile][3]));
    }
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
      u32 a[4];
      turned_matrices(a, place(values, thread % 8 + thread / 16 * 8, 2 * m + thread / 8 % 2));
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) multiply(sums[m][tile], a, shares[tile]);
    }
  }

  // Sends each block of the cluster its dimensions of the sums, and maxima and weights to all of them.
  __device__ __forceinline__ void share_out(u32 shared, int unit) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
      for (int far = 4; far < 32; far *= 2)
#pragma unroll
        for (int j = 0; j < 2; j++) weight[tile][j] += __shfl_xor_sync(~0u, weight[tile][j], far);
      const int lane = tile * 8 + t * 2;
      if (lane >= LANES) continue;
#pragma unroll
      for (int m = 0; m < D / 16; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int dim = m * 16 + h * 8;
          const u32 at = SUMS + (unit * APART + (dim % OWN + g) * EVEN + lane) * 4;
          send(shared, at, dim / OWN, sums[m][tile][2 * h], sums[m][tile][2 * h + 1]);
        }
      const u32 at = STATS + unit * STAT + lane * 8;
      for (int block = g; block < CLUSTER; block += 8) {
        send(shared, at, block, top[tile][0], weight[tile][0]);
        send(shared, at + 8, block, top[tile][1], weight[tile][1]);
      }
    }
  }
};

// Adds up the units for the dimensions of this block. SHARE threads beside each other have a dimension of two lanes.
__device__ __forceinline__ void combine(const Args &args, const Item &item, const char *memory) {
  const float *sums = (const float *)(memory + SUMS);
  const float4 *stats = (const float4 *)(memory + STATS);
  const int part = threadIdx.x % SHARE;
  for (int begin = 0; begin < PAIRS; begin += WARPS * 32 / SHARE) {
    const int i = least(begin + threadIdx.x / SHARE, PAIRS - 1);  // the last one more than once: warps are whole
    const int pair = i / OWN, dim = i % OWN;
    float top[2] = {LOWEST, LOWEST}, weight[2] = {}, sum[2] = {};
#pragma unroll 8
    for (int unit = part; unit < UNITS; unit += SHARE) {
      const float4 stat = stats[unit * (EVEN / 2) + pair];
      top[0] = fmaxf(top[0], stat.x), top[1] = fmaxf(top[1], stat.z);
    }
#pragma unroll
    for (int far = 1; far < SHARE; far *= 2)
#pragma unroll
      for (int j = 0; j < 2; j++) top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], far));
#pragma unroll 8
    for (int unit = part; unit < UNITS; unit += SHARE) {
      const float4 stat = stats[unit * (EVEN / 2) + pair];
      const float2 one = *(const float2 *)(sums + unit * APART + dim * EVEN + pair * 2);
      const float share[2] = {power(stat.x - top[0]), power(stat.z - top[1])};
      weight[0] += stat.y * share[0], weight[1] += stat.w * share[1];
      sum[0] += one.x * share[0], sum[1] += one.y * share[1];
    }
#pragma unroll
    for (int far = 1; far < SHARE; far *= 2)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        weight[j] += __shfl_xor_sync(~0u, weight[j], far);
        sum[j] += __shfl_xor_sync(~0u, sum[j], far);
      }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int lane = pair * 2 + j, row = lane / GROUP, head = item.head * GROUP + lane % GROUP;
      if (lane >= LANES || row >= item.rows || part > 0) continue;
      if (args.sinks) weight[j] += power(args.sinks[head] * 1.4426950408889634f - top[j]);
      const i64 at = (item.start + row) * args.stride_out + head * D + item.rank * OWN + dim;
      args.out[at] = (u16)pack(sum[j] / weight[j], 0);
    }
  }
}

// Grid (KV heads * CLUSTER, sequences), in clusters of CLUSTER blocks.
extern "C" __global__ void __maxnreg__(REGISTERS) decode_clusters(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) char memory[];
  const u32 shared = (u32)__cvta_generic_to_shared(memory);
  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared + READY) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared + READY), "n"(RECEIVED)
                 : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  if (args.first) asm volatile("griddepcontrol.wait;" ::: "memory");
  const Item item(args);
  const u32 ring = shared + warp * (STAGES * 2 * TILE_BYTES);
#pragma unroll
  for (int n = 0; n < STAGES; n++) fetch(args, item, ring, n);
  Task tasks[TASKS];
#pragma unroll
  for (int i = 0; i < TASKS; i++) tasks[i].begin(args, item, i);
  const u32 nothing[4] = {0, 0, 0, 0};
  for (int i = threadIdx.x; i < 3 * PIECE * CHUNKS; i += WARPS * 32) store(shared + KEYS + i * 16, nothing);
  __syncthreads();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // from here on a block may write to another one
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (item.rows <= 0) return;  // a padded sequence, for the whole cluster
#pragma unroll
  for (int i = 0; i < TASKS; i++) tasks[i].run(args, item, shared);
  __syncthreads();
  u32 queries[TILES][D / 16][2];
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int step = 0; step < D / 16; step += 2)
      matrices(queries[tile][step], place(shared + QUERIES, tile * 8 + thread % 8, 2 * step + thread / 8));
  Softmax softmax = {};
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) softmax.top[tile][0] = softmax.top[tile][1] = LOWEST;
  if (item.has_own())
    softmax.add<true>(queries, shared + KEYS, shared + VALUES, item.before, item, args.scale, args.window);
  for (int n = 0; item.unit + n * UNITS < item.pieces; n++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
    const u32 keys = ring + n % STAGES * (2 * TILE_BYTES);
    const int token = (item.first + item.unit + n * UNITS) * PIECE;
    softmax.add<false>(queries, keys, keys + TILE_BYTES, token, item, args.scale, args.window);
    __syncwarp();
    fetch(args, item, ring, n + STAGES);
  }
  softmax.share_out(shared, item.rank * WARPS + warp);
  for (u32 done = 0; !done;)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared + READY)
        : "memory");
  combine(args, item, memory);
}
