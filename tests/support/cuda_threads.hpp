// The threads of a cluster as fibers of one thread, for `cuda_emulated.py`: a fiber runs until the others are needed.
//
// Faults end the run with a text: a wait that never ends, threads of a warp at different instructions, places outside
// of shared memory or not aligned, writes to a block that has not started or has ended. Shared memory is NaN until it
// is written. Three orders: copies are made at their wait, so that a read before it shows, and threads wait together for
// earlier kernels; or (`early`) copies are made at once, so that one into memory in use shows, and a warp runs as far
// as it can before the one before it begins, the last warp of the last block first; or so (2), but blocks in place of
// warps. Orders of memory that hardware alone has are not seen.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <map>
#include <ucontext.h>
#include <vector>
#ifdef __F16C__
#include <immintrin.h>
#endif
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __maxnreg__(n)
#define __launch_bounds__(...)

namespace emulated {
struct Meeting { int arrived = 0, turn = 0; const char *at = nullptr; };
struct Copy { char *to; const char *from; int bytes, group; };
struct Block { std::vector<char> shared; Meeting meeting; bool started = false; int ended = 0; };
struct Warp { Meeting meeting; uint32_t words[2][32][6]; };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  int block, thread, phase = 0, group = 0;
  Meeting *waits = nullptr;
  int turn = 0;
  bool ended = false;
  std::vector<Copy> copies;
};
struct Bar { Meeting meeting; int left = 0; };  // bytes that are to come, in its first phase
struct Point { unsigned x, y, z; };
static std::map<uint32_t, Bar> bars;
static std::vector<Fiber> fibers;
static std::vector<Block> blocks;
static std::vector<Warp> warps;
static Meeting cluster, grid;
static Fiber *self;
static ucontext_t scheduler;
static int threads, early, shared_size;
static void (*start)(), (*released)();
static char fault[200];
constexpr int BEHIND = 1024;  // bytes behind shared memory that stay as they are
static Point first_block;

inline void fail(const char *text) {
  if (!fault[0]) snprintf(fault, sizeof fault, "block %d, thread %d: %s", self->block, self->thread, text);
  swapcontext(&self->context, &scheduler);
}
inline void wait(Meeting &meeting, int turn) {
  self->waits = &meeting, self->turn = turn;
  if (meeting.turn == turn) swapcontext(&self->context, &scheduler);
}
inline bool arrive(Meeting &meeting, int count, const char *at) {
  if (meeting.arrived && meeting.at != at) fail(at);
  meeting.at = at;
  if (++meeting.arrived < count) return false;
  return meeting.arrived = 0, meeting.turn++, true;
}
inline void meet(Meeting &meeting, int count, const char *at) {
  const int turn = meeting.turn;
  if (!arrive(meeting, count, at)) wait(meeting, turn);
}
// Gives the words of this thread to its warp; returns those of all its threads.
inline uint32_t (*give(const char *at, std::initializer_list<uint32_t> words))[6] {
  Warp &warp = warps[self->block * (threads / 32) + self->thread / 32];
  auto *all = warp.words[warp.meeting.turn % 2];
  std::copy(words.begin(), words.end(), all[self->thread % 32]);
  meet(warp.meeting, 32, at);
  return all;
}
inline char *shared(uint32_t at, int bytes) {
  Block &block = blocks[at >> 24];
  if ((at & 0xffffff) + bytes > shared_size) fail("outside of shared memory");
  if ((at & 0xffffff) % bytes) fail("not aligned");
  if (!block.started || block.ended == threads) fail("the block is not there");
  return block.shared.data() + (at & 0xffffff);
}
inline void do_copy(const Copy &one) {
  memset(one.to, 0, 16), memcpy(one.to, one.from, one.bytes);
}
template <class To, class From> inline To as(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
inline float e4m3(uint32_t bits) {
  const int exponent = bits >> 3 & 15, part = bits & 7;
  const float x = exponent ? std::ldexp(8 + part, exponent - 10) : std::ldexp(part, -9);
  return (bits & 127) == 127 ? NAN : bits & 128 ? -x : x;
}
inline uint32_t e4m3_bits(float x) {
  if (x != x) return 127;
  const float y = std::min(std::fabs(x), 448.0f);
  const int exponent = std::max(y ? std::ilogb(y) : -6, -6);
  const int parts = std::nearbyint(std::ldexp(y, 3 - exponent));  // 8 to 16; below 8 it is denormal
  return (std::signbit(x) ? 128 : 0) + (exponent + 6) * 8 + parts;
}
inline float half(uint32_t bits) {
#if HALF
  return _cvtsh_ss(bits & 0xffff);
#else
  const int exponent = bits >> 10 & 31, part = bits & 1023;
  const float x = exponent ? std::ldexp(1024 + part, exponent - 25) : std::ldexp(part, -24);
  return exponent == 31 ? NAN : bits >> 15 & 1 ? -x : x;
#endif
}
inline uint32_t half_bits(float x) {  // rounded to float16
  if (x != x) return 0x7e00;
  const float y = std::fabs(x);
  const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
  if (y >= 65520) return sign | 0x7c00;
  const int exponent = std::max(y ? std::ilogb(y) : -14, -14);
  return sign | ((exponent + 14) << 10) + (uint32_t)std::nearbyint(std::ldexp(y, 10 - exponent));
}
inline float number(uint32_t bits) {
#if HALF
  return half(bits);
#else
  return as<float>(bits << 16);
#endif
}
inline uint32_t bits(float x) {
#if HALF
  return _cvtss_sh(x, 0);
#else
  if (x != x) return 0x7fff;
  const uint32_t y = as<uint32_t>(x);
  return (y + 0x7fff + (y >> 16 & 1)) >> 16;
#endif
}

static void enter() {
  blocks[self->block].started = true;
  start();
  if (self->copies.size()) fail("ends with copies that it has not waited for");
  blocks[self->block].ended++, self->ended = true;
  swapcontext(&self->context, &scheduler);
}
// Runs a cluster; returns the fault, or "". released: called once all threads are at griddepcontrol.wait
inline const char *run(int size, int of_block, int shared_bytes, int copies_early, void (*kernel)(), void (*then)()) {
  start = kernel, released = then, threads = of_block, early = copies_early, fault[0] = 0;
  shared_size = shared_bytes;
  fibers.assign(size * threads, Fiber()), blocks.assign(size, Block()), warps.assign(size * threads / 32, Warp());
  cluster = grid = Meeting(), bars.clear();
  for (auto &block : blocks) block.shared.assign(shared_bytes + BEHIND, (char)0xff);
  for (int i = 0; i < size * threads; i++) {
    Fiber &fiber = fibers[i];
    fiber.block = i / threads, fiber.thread = i % threads, fiber.stack.resize(1 << 16);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, enter, 0);
  }
  if (early) released();
  const int count = fibers.size(), together = early == 2 ? threads : early ? 32 : count;
  for (bool moved = true; moved && !fault[0];) {
    moved = false;
    for (int last = count; last > 0; last -= together)
      for (bool again = true; again && !fault[0];) {
        again = false;
        for (int i = last - together; i < last && !fault[0]; i++) {
          self = &fibers[i];
          if (self->ended || (self->waits && self->waits->turn == self->turn)) continue;
          again = moved = true, swapcontext(&scheduler, &self->context);
        }
      }
  }
  for (auto &block : blocks)
    for (int i = shared_bytes; i < shared_bytes + BEHIND && !fault[0]; i++)
      if (block.shared[i] != (char)0xff) snprintf(fault, sizeof fault, "writes behind shared memory");
  for (auto &fiber : fibers)
    if (!fiber.ended && !fault[0])
      snprintf(fault, sizeof fault, "block %d, thread %d: waits for ever", fiber.block, fiber.thread);
  return fault;
}
}  // namespace emulated

#define AT __func__
using namespace emulated;
#define threadIdx (Point{(unsigned)self->thread, 0, 0})
#define blockIdx (Point{first_block.x + self->block, first_block.y, 0})
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __uint_as_float(uint32_t x) { return as<float>(x); }
inline float __int_as_float(int x) { return as<float>(x); }
inline uint32_t __float_as_uint(float x) { return as<uint32_t>(x); }
inline float __expf(float x) { return std::exp(x); }
template <class T> inline T __ldcg(const T *at) { return *at; }
inline uint32_t __cvta_generic_to_shared(const void *) { return (uint32_t)self->block << 24; }
inline void __syncwarp() { give(AT, {}); }
inline void __syncthreads() { meet(blocks[self->block].meeting, threads, AT); }
inline float __shfl_xor_sync(unsigned, float x, int far) {
  return as<float>(give(AT, {as<uint32_t>(x)})[(self->thread % 32) ^ far][0]);
}
inline float __shfl_sync(unsigned, float x, int lane) { return as<float>(give(AT, {as<uint32_t>(x)})[lane][0]); }

// PTX: names and operands as in the source, dots as one line, colons as none.
inline void cvt_f32_f16(float &x, uint16_t y) { x = number(y); }
inline void cvt_rn_f16x2_f32(uint32_t &x, float high, float low) { x = half_bits(high) << 16 | half_bits(low); }
inline void cvt_rn_bf16x2_f32(uint32_t &x, float high, float low) { x = bits(high) << 16 | bits(low); }
inline void cvt_rn_satfinite_e4m3x2_f32(uint16_t &x, float high, float low) {
  x = e4m3_bits(high) << 8 | e4m3_bits(low);
}
inline void cvt_rn_f16x2_e4m3x2(uint32_t &x, uint16_t y) {
  static uint16_t all[256];
  for (int i = 0; i < 256 && !all[255]; i++) all[i] = half_bits(e4m3(i));
  x = all[y >> 8] << 16 | all[y & 255];
}
inline void mov_b32(uint16_t &low, uint16_t &high, uint32_t x) { low = x, high = x >> 16; }
inline void rcp_approx_ftz_f32(float &y, float x) { y = 1 / x; }
inline void ex2_approx_ftz_f32(float &y, float x) { y = std::exp2(x); }
inline void ld_global_cg_v4_u32(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, const void *at) {
  if ((uintptr_t)at % 16) fail("not aligned");
  auto *x = (const uint32_t *)at;
  a = x[0], b = x[1], c = x[2], d = x[3];
}
inline void ld_global_nc_L1no_allocate_v4_u32(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, const void *at) {
  ld_global_cg_v4_u32(a, b, c, d, at);
}
inline void ld_global_cg_v2_u32(uint32_t &a, uint32_t &b, const void *at) {
  if ((uintptr_t)at % 8) fail("not aligned");
  auto *x = (const uint32_t *)at;
  a = x[0], b = x[1];
}
inline void st_global_v4_u32(void *at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t x[4] = {a, b, c, d};
  if ((uintptr_t)at % 16) fail("not aligned");
  memcpy(at, x, 16);
}
inline void st_shared_v4_u32(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t x[4] = {a, b, c, d};
  memcpy(shared(at, 16), x, 16);
}
inline void ldmatrix(const char *name, bool turned, uint32_t **to, uint32_t at) {
  auto *all = give(name, {at});
  const int g = self->thread % 32 / 4, t = self->thread % 4;
  for (int m = 0; m < 4; m++)
    for (int j = 0; j < 2; j++) {
      const int row = turned ? 2 * t + j : g, col = turned ? g : 2 * t + j;
      ((uint16_t *)to[m])[j] = ((uint16_t *)shared(all[m * 8 + row][0], 16))[col];
    }
}
#define LDMATRIX(name, turned) \
  inline void name(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, uint32_t at) { \
    uint32_t *to[4] = {&a, &b, &c, &d}; \
    ldmatrix(AT, turned, to, at); \
  }
LDMATRIX(ldmatrix_sync_aligned_m8n8_x4_shared_b16, false)
LDMATRIX(ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16, true)
inline void movmatrix_sync_aligned_m8n8_trans_b16(uint32_t &to, uint32_t matrix) {
  auto *all = give(AT, {matrix});
  const int g = self->thread % 32 / 4, t = self->thread % 4;
  for (int j = 0; j < 2; j++) ((uint16_t *)&to)[j] = ((uint16_t *)&all[(2 * t + j) * 4 + g / 2][0])[g % 2];
}
template <float (*number)(uint32_t)>
inline void product(const char *name, float **c, std::initializer_list<uint32_t> words) {
  auto *all = give(name, words);
  const int g = self->thread % 32 / 4, t = self->thread % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {  // a: word (row / 8 + k / 8 * 2) of thread (row % 8, k % 8 / 2)
      const uint32_t a = all[g * 4 + k % 8 / 2][i / 2 + k / 8 * 2], b = all[(2 * t + i % 2) * 4 + k % 8 / 2][4 + k / 8];
      *c[i] += number(a >> k % 2 * 16 & 0xffff) * number(b >> k % 2 * 16 & 0xffff);
    }
}
#define MMA(name, number) \
  inline void name(float &p, float &q, float &r, float &s, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e, \
                   uint32_t f, float w, float x, float y, float z) { \
    float *sums[4] = {&p, &q, &r, &s}; \
    p = w, q = x, r = y, s = z; \
    product<number>(AT, sums, {a, b, c, d, e, f}); \
  }
MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, number)
MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, half)
inline void redux_sync_max_u32(uint32_t &most, uint32_t x) {
  auto *all = give(AT, {x});
  most = 0;
  for (int i = 0; i < 32; i++) most = std::max(most, all[i][0]);
}
inline void mapa_sharedcluster_u32(uint32_t &there, uint32_t at, int block) { there = (at & 0xffffff) | block << 24; }
inline void sub_rn_f16x2(uint32_t &x, uint32_t y, uint32_t z) {
  x = half_bits(half(y >> 16) - half(z >> 16)) << 16 | half_bits(half(y & 0xffff) - half(z & 0xffff));
}
inline void mbarrier_init_sharedcta_b64(uint32_t at) { shared(at, 8), bars[at] = Bar(); }
inline void fence_mbarrier_init_release_cluster() {}
inline void mbarrier_arrive_expect_tx_sharedcta_b64(uint32_t at, int bytes) { bars.at(at).left += bytes; }
inline void store_and_count(uint32_t at, std::initializer_list<float> numbers, uint32_t bar) {
  const int bytes = numbers.size() * 4;
  if (at >> 24 != bar >> 24) fail("the barrier of another block");
  if (!bars.count(bar) || bars[bar].left < bytes) fail("nobody waits for these bytes");
  memcpy(shared(at, bytes), numbers.begin(), bytes);
  if (!(bars[bar].left -= bytes)) bars[bar].meeting.turn++;
}
inline void st_async_sharedcluster_mbarriercomplete_txbytes_f32(uint32_t at, float x, uint32_t bar) {
  store_and_count(at, {x}, bar);
}
inline void st_async_sharedcluster_mbarriercomplete_txbytes_v2_f32(uint32_t at, float x, float y, uint32_t bar) {
  store_and_count(at, {x, y}, bar);
}
inline void st_async_sharedcluster_mbarriercomplete_txbytes_v4_f32(uint32_t at, float x, float y, float z, float w,
                                                                   uint32_t bar) {
  store_and_count(at, {x, y, z, w}, bar);
}
inline void mbarrier_try_wait_parity_sharedcta_b64(int &done, uint32_t at) {
  wait(bars.at(at).meeting, 0), done = 1;
}
inline void selp_u32(uint32_t &to, int done) { to = done; }
inline void cp_async_cg_shared_global(uint32_t to, const void *from, int bytes = 16) {
  if ((uintptr_t)from % 16) fail("not aligned");
  const Copy one = {shared(to, 16), (const char *)from, bytes, self->group};
  if (early) do_copy(one);
  else self->copies.push_back(one);
}
inline void cp_async_commit_group() { self->group++; }
inline void cp_async_wait_group(int left) {
  std::vector<Copy> later;
  for (auto &one : self->copies) one.group < self->group - left ? do_copy(one) : later.push_back(one);
  self->copies.swap(later);
}
inline void barrier_cluster_arrive_relaxed_aligned() {
  self->phase = cluster.turn;
  arrive(cluster, fibers.size(), "barrier.cluster");
}
inline void barrier_cluster_wait_aligned() {
  give(AT, {});
  wait(cluster, self->phase);
}
inline void griddepcontrol_wait() {
  const int turn = grid.turn;
  if (turn || early) return;
  if (arrive(grid, fibers.size(), AT)) released();
  else wait(grid, turn);
}
inline void griddepcontrol_launch_dependents() {}
