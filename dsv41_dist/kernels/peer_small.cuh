// The packet and line protocols, and the sums. Joined after peer_core.cuh.
// ---- packet and line: one interface, `words` of 8 bytes that a thread carries at a time -----------------------------
__device__ __forceinline__ u32 words_of(u32 bytes) { return bytes ? (bytes + 7) / 8 : 1; }

struct Packet {
  static constexpr int words = 1;
  static __device__ __forceinline__ u32 first(u32 block) { return block * blockDim.x + threadIdx.x; }
  static __device__ __forceinline__ u32 step(u32 blocks) { return blocks * blockDim.x; }
  static __device__ __forceinline__ u32 items(u32 bytes) { return words_of(bytes); }
  static __device__ __forceinline__ bool more(u32 item, u32 items) { return item < items; }
  static __device__ __forceinline__ u32 word(u32 item, int) { return item; }
  static __device__ __forceinline__ bool carries(int) { return true; }
  static __device__ __forceinline__ u64 address(u64 base, u32 item) { return base + (u64)item * 16; }
  static __device__ __forceinline__ uint4 pack(const uint2* d, u64 seq) {
    return make_uint4(d[0].x, (u32)seq, d[0].y, (u32)seq + (u32)(seq >> 32));
  }
  static __device__ __forceinline__ void unpack(uint4 v, uint2* d) { d[0] = make_uint2(v.x, v.z); }
  static __device__ __forceinline__ void send(u64 p, uint4 v, bool valid) { if (valid) st_packet(p, v); }
  static __device__ __forceinline__ uint4 look(u64 p) { return ld_packet(p); }
  static __device__ __forceinline__ bool there(uint4 v, u64 seq) {
    return v.y == (u32)seq && v.w == (u32)seq + (u32)(seq >> 32);
  }
  static __device__ __forceinline__ bool any(bool v) { return v; }
};

// Lanes 8g..8g+7 of a warp carry one line: two words each, the last lane one word and the sequence number.
// Everything that meets warp_any, warp_ballot or a line access is executed by whole warps.
struct Line {
  static constexpr int words = 2;
  static __device__ __forceinline__ u32 lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ u32 first(u32 block) { return (block * blockDim.x + threadIdx.x) / 8; }
  static __device__ __forceinline__ u32 step(u32 blocks) { return blocks * blockDim.x / 8; }
  static __device__ __forceinline__ u32 items(u32 bytes) { return (words_of(bytes) + 14) / 15; }
  static __device__ __forceinline__ bool more(u32 item, u32 items) { return (item & ~3u) < items; }
  static __device__ __forceinline__ u32 word(u32 item, int k) { return item * 15 + (lane() & 7) * 2 + k; }
  static __device__ __forceinline__ bool carries(int k) { return k == 0 || (lane() & 7) != 7; }
  static __device__ __forceinline__ u64 address(u64 base, u32 item) { return base + (u64)item * 128 + (lane() & 7) * 16; }
  static __device__ __forceinline__ uint4 pack(const uint2* d, u64 seq) {
    bool last = (lane() & 7) == 7;
    return make_uint4(d[0].x, d[0].y, last ? (u32)seq : d[1].x, last ? (u32)(seq >> 32) : d[1].y);
  }
  static __device__ __forceinline__ void unpack(uint4 v, uint2* d) {
    d[0] = make_uint2(v.x, v.y);
    d[1] = make_uint2(v.z, v.w);
  }
  static __device__ __forceinline__ void send(u64 p, uint4 v, bool) { st_line(p, v); }
  static __device__ __forceinline__ uint4 look(u64 p) { return ld_line(p); }
  static __device__ __forceinline__ bool there(uint4 v, u64 seq) {
    u32 ok = warp_ballot(v.z == (u32)seq && v.w == (u32)(seq >> 32));
    return (ok >> (lane() | 7)) & 1;
  }
  static __device__ __forceinline__ bool any(bool v) { return warp_any(v); }
};

// Which items a block sends and receives: all blocks do both, or the first blocks[0] send and the others receive, which
// overlaps the two where a thread has many items. Blocks wait, so all of a grid must be on the GPU together.
struct Share {
  u32 sender, senders, receiver, receivers;
  bool sends, receives;
  __device__ __forceinline__ Share(const Args& a) {
    u32 split = a.blocks[0];
    sends = split == 0 || blockIdx.x < split;
    receives = split == 0 || !sends;
    sender = blockIdx.x;
    receiver = blockIdx.x - split;
    senders = split ? split : gridDim.x;
    receivers = gridDim.x - split;
  }
};

// A line's neighbours in the warp may lie past the end of the shard: areas have four lines to spare at each sender's end.
template <class P>
__device__ __forceinline__ u64 cell(const Args& a, int owner, int sender, u64 seq, u32 item) {
  return P::address(a.peer[owner] + a.area + ((seq & 1) * WORLD + sender) * a.source, item);
}

template <class P>
__device__ __forceinline__ bool receive(const Args& a, Run& run, u32 item, const u32* items, u32 from, uint4* v) {
  while (true) {
    u32 missing = 0;
#pragma unroll
    PEERS if ((from >> s) & 1) v[s] = P::look(cell<P>(a, a.rank, s, run.seq, item));
#pragma unroll
    PEERS if (((from >> s) & 1) && !P::there(v[s], run.seq) && item < items[s]) missing |= 1u << s;
    if (!P::any(missing != 0)) return true;
    if (P::any(expired(a, run, missing))) return false;
  }
}

template <class P>
__device__ __forceinline__ void copy_small(const Args& a) {
  Run run = begin(a);
  const Share share(a);
  const u32 others = ((1u << WORLD) - 1) & ~(1u << a.rank);
  u32 items[WORLD], most = 0, mine = shard_bytes(a, a.rank);
#pragma unroll
  PEERS {
    items[s] = P::items(shard_bytes(a, s));
    most = items[s] > most ? items[s] : most;
  }
  u32 count = P::items(mine);
  // The input is loaded before the sequence and the reports are looked at: the three reads are under way together.
  for (u32 i = P::first(share.sender); share.sends && P::more(i, count); i += P::step(share.senders)) {
    uint2 d[P::words];
#pragma unroll
    for (int k = 0; k < P::words; k++) d[k] = P::carries(k) ? load<uint2>(a.x, P::word(i, k) * 8, mine, a.unit_x) : make_uint2(0, 0);
    if (P::any(run.dead)) break;
    uint4 v = P::pack(d, run.seq);
#pragma unroll
    for (int k = 1; k < WORLD; k++) {
      int p = (a.rank + k) % WORLD;
      P::send(cell<P>(a, p, a.rank, run.seq, i), v, i < count);
    }
    if (a.own) {
#pragma unroll
      for (int k = 0; k < P::words; k++) if (P::carries(k)) place(a, a.rank, P::word(i, k) * 8, d[k]);
    }
  }
  count_call(a, run);
  run.dead = P::any(run.dead);
  for (u32 i = P::first(share.receiver); share.receives && P::more(i, most) && !run.dead; i += P::step(share.receivers)) {
    uint4 v[WORLD];
    if (!receive<P>(a, run, i, items, others, v)) break;
#pragma unroll
    PEERS if (s != (int)a.rank) {
      uint2 d[P::words];
      P::unpack(v[s], d);
#pragma unroll
      for (int k = 0; k < P::words; k++) if (P::carries(k)) place(a, s, P::word(i, k) * 8, d[k]);
    }
  }
}

// ---- sums: in rank order from rank 0's own value, in fp32, rounded once ----------------------------------------------
template <class T>
struct Acc {  // two values of 16 bits
  float2 f;
  __device__ __forceinline__ void set(u32 v) { f = T::widen(v); }
  __device__ __forceinline__ void add(u32 v) { float2 g = T::widen(v); f.x = add_rn(f.x, g.x); f.y = add_rn(f.y, g.y); }
  __device__ __forceinline__ u32 get() const { return T::narrow(f); }
};
struct fp32_t {};
template <>
struct Acc<fp32_t> {
  float f;
  __device__ __forceinline__ void set(u32 v) { f = bits_to_float(v); }
  __device__ __forceinline__ void add(u32 v) { f = add_rn(f, bits_to_float(v)); }
  __device__ __forceinline__ u32 get() const { return float_to_bits(f); }
};
template <class T, class Get>
__device__ __forceinline__ u32 sum_lane(Get get) {
  Acc<T> acc;
  acc.set(get(0));
#pragma unroll
  for (int s = 1; s < WORLD; s++) acc.add(get(s));
  return acc.get();
}

template <class P, class T>
__device__ __forceinline__ void sum_small(const Args& a) {
  Run run = begin(a);
  const Share share(a);
  u32 size = a.scatter ? a.part : a.bytes, count = P::items(size);
  u64 mine = a.x + (a.scatter ? (u64)a.rank * a.part : 0);
  // In place, out is x. Where other blocks receive than send, a rank sends to itself too: a sum is written over x only
  // when that part of x has been sent.
  const bool to_self = a.blocks[0] != 0;
  const u32 from_all = (1u << WORLD) - 1, from = to_self ? from_all : from_all & ~(1u << a.rank);
  u32 items[WORLD];
#pragma unroll
  PEERS items[s] = count;
  for (u32 i = P::first(share.sender); share.sends && P::more(i, count); i += P::step(share.senders)) {
    uint2 d[P::words];
    uint4 v = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 1; k <= WORLD; k++) {
      if (k == WORLD && !to_self) break;
      int p = (a.rank + k) % WORLD;
      if (k == 1 || a.scatter) {
        u64 part = a.scatter ? a.x + (u64)p * a.part : a.x;
#pragma unroll
        for (int j = 0; j < P::words; j++) d[j] = P::carries(j) ? load<uint2>(part, P::word(i, j) * 8, size, a.unit_x) : make_uint2(0, 0);
        if (P::any(run.dead)) break;
        v = P::pack(d, run.seq);
      }
      P::send(cell<P>(a, p, a.rank, run.seq, i), v, i < count);
    }
  }
  count_call(a, run);
  run.dead = P::any(run.dead);
  for (u32 i = P::first(share.receiver); share.receives && P::more(i, count) && !run.dead; i += P::step(share.receivers)) {
    uint4 v[WORLD];
    uint2 own[P::words], d[WORLD][P::words];
#pragma unroll
    for (int j = 0; j < P::words; j++) own[j] = P::carries(j) && !to_self ? load<uint2>(mine, P::word(i, j) * 8, size, a.unit_x) : make_uint2(0, 0);
    if (!receive<P>(a, run, i, items, from, v)) break;
#pragma unroll
    PEERS P::unpack(v[s], d[s]);
#pragma unroll
    PEERS if (s == (int)a.rank && !to_self) {
#pragma unroll
      for (int j = 0; j < P::words; j++) d[s][j] = own[j];
    }
#pragma unroll
    for (int j = 0; j < P::words; j++) {
      uint2 r;
      r.x = sum_lane<T>([&](int s) { return d[s][j].x; });
      r.y = sum_lane<T>([&](int s) { return d[s][j].y; });
      if (P::carries(j)) store(a.out, P::word(i, j) * 8, size, a.unit_out, r);
    }
  }
}

