// What the peer kernels need from a CUDA device, sm_80 or newer. tests/unit/kernels/peer_host.h has the same for a CPU.
typedef unsigned int u32;
typedef unsigned long long u64;
#define FULL_WARP 0xffffffffu
#define BLOCK_LIMIT __launch_bounds__(1024, 1)

// Volatile is relaxed at system scope: performed at L2 of the GPU that owns the address, never served from an L1.
__device__ __forceinline__ u32 ld_word(u64 p) {
  u32 v;
  asm volatile("ld.volatile.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_word(u64 p, u32 v) {
  asm volatile("st.volatile.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint4 ld_packet(u64 p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_packet(u64 p, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// One instruction of the warp writes (reads) whole 128-byte lines, eight lanes each: over NVLink a line arrives as one.
__device__ __forceinline__ uint4 ld_line(u64 p) { return ld_packet(p); }
__device__ __forceinline__ void st_line(u64 p, uint4 v) { st_packet(p, v); }

__device__ __forceinline__ u64 ld_sequence(u64 p) {
  u64 v;
  asm volatile("ld.volatile.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_sequence(u64 p, u64 v) {
  asm volatile("st.volatile.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ u64 ld_flag(u64 p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_flag(u64 p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
// Payload of the bulk protocol: ordered by the flags, cached in L2 only. Not volatile, so that loads may be in flight together.
__device__ __forceinline__ uint4 ld_bulk(u64 p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void st_bulk(u64 p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ void fence_system() { __threadfence_system(); }
__device__ __forceinline__ void poll_pause() {}
__device__ __forceinline__ u32 add_and_wrap(u64 p, u32 last) { return atomicInc((u32*)p, last); }
__device__ __forceinline__ u32 or_word(u64 p, u32 v) { return atomicOr((u32*)p, v); }
__device__ __forceinline__ bool block_any(bool v) { return __syncthreads_or(v) != 0; }
__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ bool warp_any(bool v) { return __any_sync(FULL_WARP, v); }
__device__ __forceinline__ u32 warp_ballot(bool v) { return __ballot_sync(FULL_WARP, v); }

// Conversions as torch's own on CUDA: cvt.rn, so every NaN becomes 0x7fff.
struct bf16_t {
  __device__ static float2 widen(u32 v) { return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)); }
  __device__ static u32 narrow(float2 f) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(v) : "f"(f.y), "f"(f.x));
    return v;
  }
};
struct fp16_t {
  __device__ static float2 widen(u32 v) {
    float2 f;
    asm("{.reg .b16 a,b; mov.b32 {a,b},%2; cvt.f32.f16 %0,a; cvt.f32.f16 %1,b;}" : "=f"(f.x), "=f"(f.y) : "r"(v));
    return f;
  }
  __device__ static u32 narrow(float2 f) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(v) : "f"(f.y), "f"(f.x));
    return v;
  }
};
// In PTX, because cupy compiles with -ftz=true, which would flush subnormal sums.
__device__ __forceinline__ float add_rn(float a, float b) {
  float c;
  asm("add.rn.f32 %0,%1,%2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
__device__ __forceinline__ float bits_to_float(u32 v) { return __uint_as_float(v); }
__device__ __forceinline__ u32 float_to_bits(float v) { return __float_as_uint(v); }
