// Latent attention of decodes with norm, rotation and cache write, in clusters of blocks.
//
// A cluster computes a sequence's attention for a group of heads. The context, with the step's own tokens at its end,
// is cut into pieces of 16 tokens, which the cluster's blocks take in turn, and a block several at a time ("stage").
// Pieces go to shared memory before the wait for the queries, as far as there is room. A cached latent is read once: as
// a key, with its rotated key behind it, and as a value.
//
// Scores: each warp has some of the dimensions, and the queries of these in registers; the parts of the warps are added
// up in shared memory. Sums of values: each warp has some of the dimensions, for all tokens of its block. At the end
// each block adds up some of the dimensions for the cluster, through its shared memory, always in the same order.
//
// The first launch of a step waits before it reads anything, as in decode_clusters.cu.
//
// Macros: L latent dimensions; GROUP heads of a cluster; ROWS most rows of a sequence; SIZE tokens of a block of the
// cache; CLUSTER blocks of a cluster; WARPS of a block; TILE tokens of a stage; STAGES in shared memory; REGISTERS of a
// thread, at most.
//
// A "lane" is a query: row * GROUP + head. Products have the tokens or the dimensions as rows of 16, and the lanes as
// columns of 8 ("tile"). The layouts of fragments are those of the PTX manual for m16n8k16: a thread has rows g and
// g + 8, columns 2 t and 2 t + 1, with g = its number in the warp / 4 and t the remainder. Dimensions of scores may
// have any order: a thread has eight beside each other where fragments have two and two.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct Args {
  const u16 *absorbed;      // [T, heads, L]: queries times the up-projection of keys
  const u16 *q;             // [T, heads, width] with stride_q: the last R are to be rotated
  const u16 *given;         // [T, L + R] with stride_given: latents before their norm, keys before their rotation
  const u16 *norm;          // [L]
  const u16 *cos, *sin;     // [T, R]; sin is signed
  const i64 *slots;         // [T]: block * SIZE + offset
  u16 *out;                 // [T, heads, L]
  u16 *latent, *rope;       // cache [blocks, 1, SIZE, L] and [blocks, 1, SIZE, R]
  const int *table, *starts, *lengths, *table_rows;  // see AttentionMeta: query_start, seq_lens; table_rows may be none
  i64 latent_block, rope_block;  // elements from block to block
  int stride_q, stride_given, stride_table;  // in elements
  float eps, scale;         // scale of scores in base 2
  int heads, width;
  int first;                // 1: of the launches of a step
};

constexpr int R = 64, PIECE = 16, PIECES = TILE / PIECE;     // rotated dimensions; tokens of a piece; pieces of a stage
constexpr int LANES = GROUP * ROWS, TILES = (LANES + 7) / 8;
constexpr int CHUNKS = (L + R) / 8, KEY = L / 8;             // 16 bytes each of a token; the first of the rotated key
constexpr int DEEP = L / 32 / WARPS;                         // of a warp in scores: 32 dimensions each
constexpr int MINE = L / 16 / WARPS, OWN = L / 16 / CLUSTER;  // of a warp, of a block in sums of values: 16 dimensions
constexpr int EACH = L / 256;                                // chunks of a latent that a thread of a warp has
constexpr int PAIRS = TILES * 4;                             // of lanes
constexpr int SPAN = TILE % 32 || WARPS * 32 < PAIRS * 32 ? 16 : 32;  // threads that have the scores of a pair
constexpr int WIDE = TILES * 8 + 2;                          // numbers of a token's scores: two more, for other banks
constexpr int LINE = TILE * 2 + 16;                          // bytes of a lane's probabilities, likewise
constexpr int STAGE = TILE * CHUNKS * 16;
__host__ __device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }
// places in shared memory, behind the ring: scores of the warps, later the sums of all blocks; the others
constexpr int SCORES = STAGES * STAGE, SUMS = SCORES;
constexpr int SHARES = SCORES + most(WARPS * TILE * WIDE * 4, L / 16 * TILES * 512);
constexpr int DECAYS = SHARES + 16 * LINE, READY = DECAYS + 64, STATS = READY + 16;
constexpr int RECEIVED = L / 16 * TILES * 512 + CLUSTER * PAIRS * 16;  // bytes of sums and statistics from all blocks
constexpr float LOWEST = -1e30f;
static_assert(LANES <= 16 && L % 256 == 0 && DEEP * WARPS * 32 == L && OWN * CLUSTER * 16 == L, "sizes");
static_assert(WARPS >= 4 && ROWS <= WARPS && WARPS * 32 >= PAIRS * SPAN && WARPS * 32 % KEY == 0, "warps");
static_assert(SIZE % PIECE == 0 && TILE % PIECE == 0, "pieces");

__device__ __forceinline__ float widen(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// Keys and values made of a cached latent must be finite, see `prepare` in latent/triton.py.
__device__ __forceinline__ float finite(float x) { return fabsf(x) <= 1e18f ? x : 1e18f; }

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

__device__ __forceinline__ void keep(u16 *at, const u32 *x) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ __forceinline__ void unpack(float *to, const u32 *x) {
#pragma unroll
  for (int i = 0; i < 4; i++) to[2 * i] = widen(x[i] & 0xffff), to[2 * i + 1] = widen(x[i] >> 16);
}

// Rotates eight numbers x, whose others are y.
__device__ __forceinline__ void turn(u32 *to, const u32 *x, const u32 *y, const u32 *cosine, const u32 *sine) {
  float a[8], b[8], c[8], s[8];
  unpack(a, x), unpack(b, y), unpack(c, cosine), unpack(s, sine);
#pragma unroll
  for (int j = 0; j < 8; j++) a[j] = a[j] * c[j] + b[j] * s[j];
#pragma unroll
  for (int j = 0; j < 4; j++) to[j] = pack(a[2 * j], a[2 * j + 1]);
}

// The place of a chunk of a token in a stage. Eight tokens' chunks of a number lie in different banks, and so do four
// neighbouring chunks of two tokens.
__device__ __forceinline__ u32 place(u32 stage, int token, int chunk) {
  return stage + (token * CHUNKS + (chunk ^ ((token & 1) << 2 | (token >> 1 & 3)))) * 16;
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

__device__ __forceinline__ void multiply(float *c, u32 a0, u32 a1, u32 a2, u32 a3, const u32 *b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
}

// Stores four numbers at a place of the shared memory of a block of the cluster, which counts the bytes. A
// barrier of the cluster that releases other stores would wait for all memory of the GPU.
__device__ __forceinline__ void send(u32 shared, int at, int block, float a, float b, float c, float d) {
  u32 there, ready;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared + at), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(ready) : "r"(shared + READY), "r"(block));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there),
               "f"(a), "f"(b), "f"(c), "f"(d), "r"(ready)
               : "memory");
}

// Starts to copy 16 bytes to shared memory.
__device__ __forceinline__ void copy(u32 to, const u16 *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The work of a block.
struct Item {
  int group, rank, start, rows, before;  // heads, block of the cluster, first row, rows, tokens in the cache
  int pieces, stages;                    // of this block
  const int *table;                      // blocks of the sequence

  __device__ __forceinline__ explicit Item(const Args &args) {
    const int sequence = blockIdx.y;
    group = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    start = args.starts[sequence], rows = args.starts[sequence + 1] - start;
    before = args.lengths[sequence] - rows;
    pieces = rows > 0 ? ((before + rows + PIECE - 1) / PIECE - rank + CLUSTER - 1) / CLUSTER : 0;
    stages = (pieces + PIECES - 1) / PIECES;
    table = args.table + (args.table_rows ? args.table_rows[sequence] : sequence) * (i64)args.stride_table;
  }

  // True if the block has a token of the step in stage n.
  __device__ __forceinline__ bool own(int n) const {
    return token(least((n + 1) * PIECES, pieces) - 1) + PIECE > before;
  }

  // The first token of the block's piece number n.
  __device__ __forceinline__ int token(int n) const { return (n * CLUSTER + rank) * PIECE; }
};

// Starts to copy the cached tokens of stage n to the ring, zeros behind the context. Every call is a group of copies.
__device__ __forceinline__ void fetch(const Args &args, const Item &item, u32 shared, int n) {
  constexpr int STEP = WARPS * 32 / KEY;  // tokens that the threads copy at a time
  const u32 stage = shared + n % STAGES * STAGE;
  const int row = threadIdx.x / KEY, chunk = threadIdx.x % KEY;
  const int short_row = threadIdx.x / 8, short_chunk = threadIdx.x % 8;
  i64 block[PIECES];
#pragma unroll
  for (int j = 0; j < PIECES; j++)
    if (n * PIECES + j < item.pieces) block[j] = item.table[item.token(n * PIECES + j) / SIZE];
#pragma unroll
  for (int j = 0; j < PIECES; j++) {
    const int token = item.token(n * PIECES + j), offset = token % SIZE;
    if (n * PIECES + j >= item.pieces || token + PIECE > item.before) break;
    const u16 *latent = args.latent + block[j] * args.latent_block + (offset + row) * L + chunk * 8;
#pragma unroll
    for (int i = 0; i < PIECE; i += STEP) copy(place(stage, j * PIECE + row + i, chunk), latent + i * L);
    const u16 *rope = args.rope + block[j] * args.rope_block + (offset + short_row) * R + short_chunk * 8;
    if (threadIdx.x < PIECE * 8) copy(place(stage, j * PIECE + short_row, KEY + short_chunk), rope);
  }
  const u32 nothing[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int j = 0; j < PIECES; j++) {  // those with some tokens in the cache, or none
    const int token = item.token(n * PIECES + j), left = item.before - token;
    if (n * PIECES + j >= item.pieces || left >= PIECE) continue;
    const i64 at = item.table[token / SIZE];
    const u16 *latent = args.latent + at * args.latent_block + token % SIZE * L;
    const u16 *rope = args.rope + at * args.rope_block + token % SIZE * R;
#pragma unroll 1
    for (int i = threadIdx.x; i < PIECE * CHUNKS; i += WARPS * 32) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      const u16 *from = chunk < KEY ? latent + row * L + chunk * 8 : rope + row * R + (chunk - KEY) * 8;
      const u32 to = place(stage, j * PIECE + row, chunk);
      row < left ? copy(to, from) : store(to, nothing);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// A token of the step, which a warp of the block norms and rotates whose turn it is.
struct Own {
  int stage, row;                                    // -1: none; place in the stage
  u32 latent[EACH][4], key[4], cosine[4], sine[4];  // before `run`, latent: weights of the norm
  int slot;

  // Loads what does not depend on the projection.
  __device__ __forceinline__ void begin(const Args &args, const Item &item) {
    const int number = WARPS - 1 - threadIdx.x / 32, thread = threadIdx.x % 32;
    const int position = item.before + number, piece = position / PIECE;
    stage = number < item.rows && piece % CLUSTER == item.rank ? piece / CLUSTER / PIECES : -1;
    row = piece / CLUSTER % PIECES * PIECE + position % PIECE;
    if (stage < 0) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) load(latent[i], args.norm + (i * 32 + thread) * 8);
    const int angle = (item.start + number) * R + thread % 8 * 8;
    load(cosine, args.cos + angle), load(sine, args.sin + angle);
    slot = (int)args.slots[item.start + number];
  }

  // Norms and rotates in float32, and writes to the cache. Each eight threads have the rotated key.
  __device__ __forceinline__ void run(const Args &args, const Item &item) {
    if (stage < 0) return;
    const int thread = threadIdx.x % 32;
    const u16 *from = args.given + (item.start + WARPS - 1 - threadIdx.x / 32) * args.stride_given;
    u32 packed[EACH][4], other[4];
#pragma unroll
    for (int i = 0; i < EACH; i++) load(packed[i], from + (i * 32 + thread) * 8);
    load(key, from + L + thread % 8 * 8), load(other, from + L + (thread % 8 ^ 4) * 8);
    float x[EACH][8], squares = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      unpack(x[i], packed[i]);
#pragma unroll
      for (int j = 0; j < 8; j++) squares += x[i][j] * x[i][j];
    }
#pragma unroll
    for (int far = 16; far; far /= 2) squares += __shfl_xor_sync(~0u, squares, far);
    const float inverse = rsqrtf(squares / L + args.eps);
    u16 *to = args.latent + slot / SIZE * args.latent_block + slot % SIZE * L;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float weights[8];
      unpack(weights, latent[i]);
#pragma unroll
      for (int j = 0; j < 8; j++) x[i][j] = finite(x[i][j] * inverse * weights[j]);
#pragma unroll
      for (int j = 0; j < 4; j++) latent[i][j] = pack(x[i][2 * j], x[i][2 * j + 1]);
      if (item.group == 0) keep(to + (i * 32 + thread) * 8, latent[i]);
    }
    turn(key, key, other, cosine, sine);
    to = args.rope + slot / SIZE * args.rope_block + slot % SIZE * R;
    if (item.group == 0 && thread < 8) keep(to + thread * 8, key);
  }

  // Puts the token into the ring.
  __device__ __forceinline__ void put(u32 at) const {
    const int thread = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < EACH; i++) store(place(at, row, i * 32 + thread), latent[i]);
    if (thread < 8) store(place(at, row, KEY + thread), key);
  }
};

// Queries as second operands of products: a thread has eight of each 32 dimensions of its warp, for each tile. Each of
// the first two warps has half of the rotated dimensions, too. Lanes without a query have one of the first row.
struct Queries {
  u32 words[DEEP + 1][TILES][4], cosine[TILES][4], sine[TILES][4];

  // The thread's lane of a tile, the row of the step that this belongs to, and the first rotated dimension.
  static __device__ __forceinline__ int lane(int tile) { return tile * 8 + threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int row(const Item &item, int tile) {
    const int own = lane(tile) / GROUP;
    return item.start + (own < item.rows ? own : 0);
  }
  static __device__ __forceinline__ int turned() { return threadIdx.x / 32 * 32 + threadIdx.x % 4 * 8; }

  // Loads the angles.
  __device__ __forceinline__ void begin(const Args &args, const Item &item) {
    if (threadIdx.x >= 64 || item.rows <= 0) return;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const int angle = row(item, tile) * R + turned();
      load(cosine[tile], args.cos + angle), load(sine[tile], args.sin + angle);
    }
  }

  __device__ __forceinline__ void run(const Args &args, const Item &item) {
    u32 others[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const int head = item.group * GROUP + lane(tile) % GROUP;
      const u16 *from = args.absorbed + (row(item, tile) * args.heads + head) * L;
#pragma unroll
      for (int i = 0; i < DEEP; i++)
        load(words[i][tile], from + (threadIdx.x / 32 * DEEP + i) * 32 + threadIdx.x % 4 * 8);
      if (threadIdx.x >= 64) continue;
      from = args.q + row(item, tile) * args.stride_q + (head + 1) * args.width - R;
      load(words[DEEP][tile], from + turned()), load(others[tile], from + (turned() ^ R / 2));
    }
    if (threadIdx.x >= 64) return;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
      turn(words[DEEP][tile], words[DEEP][tile], others[tile], cosine[tile], sine[tile]);
  }
};

// Adds the product of 32 dimensions of 16 tokens and the lanes.
__device__ __forceinline__ void score(float (*even)[4], float (*odd)[4], const char *memory, int token, int chunk,
                                      const u32 (*words)[4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint4 low = *(const uint4 *)(memory + place(0, token + g, chunk + t));
  const uint4 high = *(const uint4 *)(memory + place(0, token + g + 8, chunk + t));
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    multiply(even[tile], low.x, high.x, low.y, high.y, words[tile]);
    multiply(odd[tile], low.z, high.z, low.w, high.w, words[tile] + 2);
  }
}

// Writes a warp's part of the scores of a stage: of its dimensions.
__device__ __forceinline__ void score_stage(const Queries &queries, char *memory, int slot, int pieces) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float *scores = (float *)(memory + SCORES) + (warp * TILE + g) * WIDE + t * 2;
#pragma unroll 1
  for (int j = 0; j < pieces; j++) {
    float even[TILES][4] = {}, odd[TILES][4] = {};  // two sums, so that a product does not wait for the one before
#pragma unroll
    for (int i = 0; i < DEEP; i++)
      score(even, odd, memory + slot * STAGE, j * PIECE, (warp * DEEP + i) * 4, queries.words[i]);
    if (warp < 2) score(even, odd, memory + slot * STAGE, j * PIECE, KEY + warp * 4, queries.words[DEEP]);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float *to = scores + (j * PIECE + h * 8) * WIDE + tile * 8;
        *(float2 *)to = {even[tile][2 * h] + odd[tile][2 * h], even[tile][2 * h + 1] + odd[tile][2 * h + 1]};
      }
  }
}

// The softmax of a pair of lanes over the tokens of a block; SPAN threads beside each other have one.
struct Softmax {
  float top[2] = {LOWEST, LOWEST}, weight[2] = {};

  // Adds up the parts of the scores of stage n; writes the probabilities, and the factors of the sums so far.
  __device__ __forceinline__ void add(const Item &item, char *memory, int n, float scale) {
    const int pair = threadIdx.x / SPAN, part = threadIdx.x % SPAN;
    if (pair >= PAIRS) return;
    float scores[TILE / SPAN][2], above[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < TILE / SPAN; i++) {
      const int token = i * SPAN + part, at = item.token(n * PIECES + token / PIECE) + token % PIECE;
      float sum[2] = {};
#pragma unroll
      for (int warp = 0; warp < WARPS; warp++) {
        const float2 one = *(const float2 *)(memory + SCORES + ((warp * TILE + token) * WIDE + pair * 2) * 4);
        sum[0] += one.x, sum[1] += one.y;
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const bool seen = at <= item.before + (pair * 2 + j) / GROUP && at < item.before + item.rows;
        scores[i][j] = seen ? sum[j] * scale : __int_as_float(0xff800000);
        above[j] = fmaxf(above[j], scores[i][j]);
      }
    }
#pragma unroll
    for (int far = 1; far < SPAN; far *= 2)
#pragma unroll
      for (int j = 0; j < 2; j++) above[j] = fmaxf(above[j], __shfl_xor_sync(~0u, above[j], far));
    const float decay[2] = {power(top[0] - above[0]), power(top[1] - above[1])};
#pragma unroll
    for (int j = 0; j < 2; j++) top[j] = above[j], weight[j] *= decay[j];
#pragma unroll
    for (int i = 0; i < TILE / SPAN; i++) {
#pragma unroll
      for (int j = 0; j < 2; j++) weight[j] += scores[i][j] = power(scores[i][j] - top[j]);
      const u32 both = pack(scores[i][0], scores[i][1]);
      char *to = memory + SHARES + pair * 2 * LINE + (i * SPAN + part) * 2;
      *(u16 *)to = (u16)both, *(u16 *)(to + LINE) = (u16)(both >> 16);
    }
    if (part == 0) *(float2 *)(memory + DECAYS + pair * 8) = {decay[0], decay[1]};
  }

  // Sends maxima and sums of weights to all blocks.
  __device__ __forceinline__ void share_out(u32 shared, int rank) {
    const int pair = threadIdx.x / SPAN;
    if (pair >= PAIRS) return;
#pragma unroll
    for (int far = 1; far < SPAN; far *= 2)
#pragma unroll
      for (int j = 0; j < 2; j++) weight[j] += __shfl_xor_sync(~0u, weight[j], far);
    for (int block = threadIdx.x % SPAN; block < CLUSTER; block += SPAN)
      send(shared, STATS + (rank * PAIRS + pair) * 16, block, top[0], weight[0], top[1], weight[1]);
  }
};

// A warp's weighted sums of values [dimensions, lanes].
struct Sums {
  float of[MINE][TILES][4];

  // Adds a stage.
  __device__ __forceinline__ void add(const char *memory, u32 shared, int slot, int pieces) {
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const float2 decay = *(const float2 *)(memory + DECAYS + (tile * 8 + thread % 4 * 2) * 4);
#pragma unroll
      for (int m = 0; m < MINE; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) of[m][tile][2 * h] *= decay.x, of[m][tile][2 * h + 1] *= decay.y;
    }
#pragma unroll 1
    for (int j = 0; j < pieces; j++) {
      u32 shares[4];
      matrices(shares, shared + SHARES + (thread / 16 * 8 + thread % 8) * LINE + (j * 2 + thread / 8 % 2) * 16);
#pragma unroll
      for (int m = 0; m < MINE; m++) {
        u32 a[4];
        const int token = j * PIECE + thread % 8 + thread / 16 * 8;
        turned_matrices(a, place(shared + slot * STAGE, token, (warp * MINE + m) * 2 + thread / 8 % 2));
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) multiply(of[m][tile], a[0], a[1], a[2], a[3], shares + 2 * tile);
      }
    }
  }

  // Sends each block of the cluster its dimensions.
  __device__ __forceinline__ void share_out(u32 shared, int rank) const {
#pragma unroll
    for (int m = 0; m < MINE; m++) {
      const int from = threadIdx.x / 32 * MINE + m;
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const float *x = of[m][tile];
        const int at = SUMS + (((rank * OWN + from % OWN) * TILES + tile) * 32 + threadIdx.x % 32) * 16;
        send(shared, at, from / OWN, x[0], x[1], x[2], x[3]);
      }
    }
  }
};

// Adds up the blocks for the dimensions of this one. A warp has 16 dimensions of a tile, as they were summed up.
__device__ __forceinline__ void combine(const Args &args, const Item &item, const char *memory) {
  const int thread = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < OWN * TILES; i += WARPS) {
    const float4 *sums = (const float4 *)(memory + SUMS) + i * 32 + thread;
    const float4 *stats = (const float4 *)(memory + STATS) + i % TILES * 4 + thread % 4;
    float top[2] = {LOWEST, LOWEST}, weight[2] = {}, sum[4] = {};
#pragma unroll
    for (int block = 0; block < CLUSTER; block++) {
      const float4 stat = stats[block * PAIRS];
      top[0] = fmaxf(top[0], stat.x), top[1] = fmaxf(top[1], stat.z);
    }
#pragma unroll
    for (int block = 0; block < CLUSTER; block++) {
      const float4 stat = stats[block * PAIRS], one = sums[block * OWN * TILES * 32];
      const float share[2] = {power(stat.x - top[0]), power(stat.z - top[1])};
      weight[0] += stat.y * share[0], weight[1] += stat.w * share[1];
      sum[0] += one.x * share[0], sum[1] += one.y * share[1], sum[2] += one.z * share[0], sum[3] += one.w * share[1];
    }
    const int lane = i % TILES * 8 + thread / 4, row = lane / GROUP, head = item.group * GROUP + lane % GROUP;
    u32 dims[2];
#pragma unroll
    for (int h = 0; h < 2; h++) dims[h] = turned(pack(sum[2 * h] / weight[0], sum[2 * h + 1] / weight[1]));
    u16 *to = args.out + ((item.start + row) * args.heads + head) * L + (item.rank * OWN + i / TILES) * 16;
    if (row < item.rows) *(u32 *)(to + thread % 4 * 2) = dims[0], *(u32 *)(to + 8 + thread % 4 * 2) = dims[1];
  }
}

// Grid (groups of heads * CLUSTER, sequences), in clusters of CLUSTER blocks.
extern "C" __global__ void __maxnreg__(REGISTERS) latent_clusters(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) char memory[];
  const u32 shared = (u32)__cvta_generic_to_shared(memory);
  if (args.first) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared + READY) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared + READY), "n"(RECEIVED)
                 : "memory");
  }
  __syncwarp();
  const Item item(args);
#pragma unroll 1
  for (int n = 0; n < STAGES; n++) fetch(args, item, shared, n);
  Own own;
  Queries queries;
  own.begin(args, item), queries.begin(args, item);
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (item.rows <= 0) return;  // a padded sequence, for the whole cluster
  queries.run(args, item), own.run(args, item);
  Softmax softmax;
  Sums sums = {};
  // A block's scores are read for the last time before it arrives: then others may write their sums there.
  if (item.stages == 0) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  for (int n = 0; n < item.stages; n++) {
    const int slot = n % STAGES, pieces = least(item.pieces - n * PIECES, PIECES);
    if (n == 0 || STAGES == 1) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    } else {
      asm volatile("cp.async.wait_group %0;" ::"n"(most(STAGES, 2) - 2) : "memory");
    }
    __syncthreads();
    if (n > 0 && STAGES > 1) fetch(args, item, shared, n - 1 + STAGES);  // all warps are done with the stage before
    if (item.own(n)) {
      if (own.stage == n) own.put(shared + slot * STAGE);
      __syncthreads();
    }
    score_stage(queries, memory, slot, pieces);
    __syncthreads();
    softmax.add(item, memory, n, args.scale);
    __syncthreads();
    if (n + 1 == item.stages) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    sums.add(memory, shared, slot, pieces);
    if (STAGES == 1 && n + 1 < item.stages) {
      __syncthreads();
      fetch(args, item, shared, n + 1);
    }
  }
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  sums.share_out(shared, item.rank), softmax.share_out(shared, item.rank);
  for (u32 done = 0; !done;)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared + READY)
        : "memory");
  combine(args, item, memory);
}
