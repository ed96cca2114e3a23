// peer_device.cuh for a CPU: the real kernels run here as fibers of one OS thread, one fiber a CUDA thread.
// A seeded scheduler picks the next fiber at every poll, remote store and barrier, with some ranks held back for a while,
// so that orders appear which a GPU shows once in a million calls. Barriers and warp votes are real.
#include <sched.h>
#include <time.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define BLOCK_LIMIT
// Aligned as on a GPU, which faults on a wider access than the address allows; peer_host.py has g++ trap it here.
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
struct Dim { u32 x; };

struct Barrier { u32 expected = 0, arrived = 0, generation = 0; u32 votes = 0, last_votes = 0; };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  u32 thread, block, threads, blocks, rank;
  Barrier *warp_barrier, *block_barrier;
  bool done = false;
  std::function<void()> body;
};
static Fiber* current = nullptr;
static ucontext_t scheduler;
static u64 dice_state = 1;
static u64 polls_in_vain = 0;
inline u32 dice() { dice_state = dice_state * 6364136223846793005ull + 1442695040888963407ull; return dice_state >> 33; }
inline void yield() { swapcontext(&current->context, &scheduler); }
struct ThreadIdx { struct X { operator u32() const { return current->thread; } } x; } static threadIdx;
struct BlockIdx { struct X { operator u32() const { return current->block; } } x; } static blockIdx;
struct BlockDim { struct X { operator u32() const { return current->threads; } } x; } static blockDim;
struct GridDim { struct X { operator u32() const { return current->blocks; } } x; } static gridDim;

// A vote and a barrier in one: returns the OR of (bit << place) over everyone. Votes of the next round start from nothing.
inline u32 meet(Barrier* b, u32 bits) {
  u32 generation = b->generation;
  b->votes |= bits;
  if (++b->arrived == b->expected) {
    b->last_votes = b->votes;
    b->votes = b->arrived = 0;
    b->generation++;
  }
  while (b->generation == generation) yield();
  return b->last_votes;
}

inline u32 ld_word(u64 p) { return *(volatile u32*)p; }
inline void st_word(u64 p, u32 v) { *(volatile u32*)p = v; }
inline u64 ld_sequence(u64 p) { return *(volatile u64*)p; }
inline void st_sequence(u64 p, u64 v) { *(volatile u64*)p = v; }
inline u64 ld_flag(u64 p) { return __atomic_load_n((u64*)p, __ATOMIC_ACQUIRE); }
inline void st_flag(u64 p, u64 v) { yield(); __atomic_store_n((u64*)p, v, __ATOMIC_RELEASE); }
// Two halves, flag last (the 16 bytes of a packet are one store on the device; x86 keeps this order between processes).
inline void st_packet(u64 p, uint4 v) {
  yield();
  __atomic_store_n((u64*)p, (u64)v.y << 32 | v.x, __ATOMIC_RELEASE);
  __atomic_store_n((u64*)(p + 8), (u64)v.w << 32 | v.z, __ATOMIC_RELEASE);
}
inline uint4 ld_packet(u64 p) {
  u64 hi = __atomic_load_n((u64*)(p + 8), __ATOMIC_ACQUIRE), lo = __atomic_load_n((u64*)p, __ATOMIC_ACQUIRE);
  return {(u32)lo, (u32)(lo >> 32), (u32)hi, (u32)(hi >> 32)};
}
// Whole lines: the lane with the flag stores last and loads first, as if the eight lanes were one access.
inline void st_line(u64 p, uint4 v) {
  if ((current->thread & 7) == 7) { meet(current->warp_barrier, 0); st_packet(p, v); }
  else { st_packet(p, v); meet(current->warp_barrier, 0); }
}
inline uint4 ld_line(u64 p) {
  if ((current->thread & 7) == 7) { uint4 v = ld_packet(p); meet(current->warp_barrier, 0); return v; }
  meet(current->warp_barrier, 0);
  return ld_packet(p);
}
inline uint4 ld_bulk(u64 p) { return *(volatile uint4*)p, *(uint4*)p; }
inline void st_bulk(u64 p, uint4 v) { if ((dice() & 7) == 0) yield(); *(uint4*)p = v; }
// The time this process has had: a loaded machine must not make ranks look late.
inline u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
inline void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void poll_pause() { polls_in_vain++; yield(); }
inline u32 add_and_wrap(u64 p, u32 last) { u32 old = *(u32*)p; *(u32*)p = old >= last ? 0 : old + 1; return old; }
inline u32 or_word(u64 p, u32 v) { return __atomic_fetch_or((u32*)p, v, __ATOMIC_SEQ_CST); }
inline bool block_any(bool v) { return meet(current->block_barrier, v) != 0; }
inline void block_sync() { meet(current->block_barrier, 0); }
inline bool warp_any(bool v) { return meet(current->warp_barrier, v) != 0; }
inline u32 warp_ballot(bool v) { return meet(current->warp_barrier, (u32)v << (current->thread & 31)); }

inline float bits_to_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 float_to_bits(float f) { u32 v; memcpy(&v, &f, 4); return v; }
inline float add_rn(float a, float b) { volatile float c = a + b; return c; }
struct bf16_t {
  static float2 widen(u32 v) { return {bits_to_float(v << 16), bits_to_float(v & 0xffff0000u)}; }
  static u32 one(float f) {
    u32 u = float_to_bits(f);
    return std::isnan(f) ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  }
  static u32 narrow(float2 f) { return one(f.x) | one(f.y) << 16; }
};
struct fp16_t {
  static float half(u32 v) { unsigned short h = v; _Float16 f; memcpy(&f, &h, 2); return (float)f; }
  static float2 widen(u32 v) { return {half(v & 0xffff), half(v >> 16)}; }
  static u32 one(float f) {
    if (std::isnan(f)) return 0x7fff;
    _Float16 h = (_Float16)f;
    unsigned short v;
    memcpy(&v, &h, 2);
    return v;
  }
  static u32 narrow(float2 f) { return one(f.x) | one(f.y) << 16; }
};
