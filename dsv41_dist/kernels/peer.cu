// One-shot collectives over GPU peer memory, for WORLD ranks of one host. Joined after peer_device.cuh when compiled.
//
// Every rank has an arena that all ranks can read and write. Three protocols move a rank's shard:
//   packet  16 bytes: 8 of payload, and the sequence number beside each 4. No fence and no barrier: what arrives says
//           itself that it is there. Halves the wire, and is the fastest while latency is all there is (NCCL's LL).
//   line    128 bytes: 120 of payload and a 64-bit sequence number, written by eight lanes of one instruction. NVLink
//           delivers a line whole (NCCL's LL128 rests on the same); other links need not, and are refused by the caller.
//   bulk    plain payload in chunks, one flag a chunk, set with release and awaited with acquire at system scope.
//
// Sequence. Each kind of operation (copy, sum, barrier) counts its calls in a 64-bit word of the arena, so that a CUDA
// graph can be replayed, and uses one of two slots, by the parity of the count. Why two are enough: in EVERY call every rank
// sends at least one packet or flag to every other, an empty one where it has no payload (a broadcast is a gather in which
// all shards but one are empty; a reduce_scatter sends each rank its part, or an empty chunk), and a rank's kernel ends only
// when something of this call has come from every other rank. Rank r writes for call k+2 when its kernel k+1 has ended, so
// it has received something of k+1 from each peer p; p sends that from its kernel k+1, which began after its kernel k ended
// (calls of a kind are in stream order on each rank), and so after p had read its slot of call k. Hence a rank is never
// more than one call ahead, slot k is free when k+2 is written, and a reader can meet in a slot only k (what it waits for)
// or something older, never k+2. Flags are compared for equality and 64 bits do not come round.
// A packet has room for 2 x 32 bits: (low, low + high). An equal pair is one call while the 16 bytes are stored as one.
//
// Waits are bounded by %globaltimer. Who waits in vain writes the ranks it misses into every arena and into host memory
// (`fail`), and every kernel that sees such a report, at its start or while it waits, sends nothing more and ends.
struct Args {
  u64 peer[8];        // arena of each rank, as this rank addresses it
  u64 x, out, host;   // input, output; the record the host reads without synchronising: 8 reports, kind, sequence
  u64 timeout_ns;
  u64 pitch;          // copy: bytes from one row of out to the next
  u64 start[8];       // copy: first byte of each rank's columns within a row of out
  u64 area, source;   // packet and line: offset of the kind's slots in an arena, bytes for one sender
  u64 stage[2], stage_slot[2], flags[2], flag_slot;  // bulk, first and second shot: offsets and bytes of one slot
  u32 width[8];       // copy: bytes of each rank in a row
  u32 rows;           // copy: rows of out
  u32 bytes, part;    // sum: bytes of x; bytes of one rank's part
  u32 rank, kind;
  u32 unit_x, unit_out;  // widest access of 1, 2, 4, 8, 16 bytes that the addresses of this rank allow; no effect on the wire
  u32 own;            // copy: whether the own shard has to be copied to out as well
  u32 scatter;        // sum: 0 everything to everyone, 1 each rank its part, 2 its part and then the sums to everyone
  u32 chunk, chunks;  // bulk: bytes of a chunk, flags there are for a sender
  // Blocks that send, that reduce, that collect, in this order, so that no sender waits for a place. Packet and line:
  // blocks that only send (0: every block does both).
  u32 blocks[3];
};

#define FLAG_BYTES 32
#define PEERS for (int s = 0; s < WORLD; s++)

__device__ __forceinline__ u64 kind_word(const Args& a) { return a.peer[a.rank] + 128 + a.kind * 128; }

struct Run {
  u64 seq, started;
  u32 polls;
  bool dead;
};

__device__ __forceinline__ u32 reports(const Args& a) {
  uint4 lo = ld_packet(a.peer[a.rank]), hi = ld_packet(a.peer[a.rank] + 16);
  return lo.x | lo.y | lo.z | lo.w | hi.x | hi.y | hi.z | hi.w;
}

__device__ __noinline__ void tell_host(const Args& a, u64 seq) {
  for (int s = 0; s < 8; s++) {
    u32 word = ld_word(a.peer[a.rank] + 4 * s);
    if (word) st_word(a.host + 4 * s, word);
  }
  st_word(a.host + 32, a.kind + 1);
  st_sequence(a.host + 40, seq);
}

// missing: bit s for rank s. The report goes to every arena, so that nobody waits for the bound of its own.
__device__ __noinline__ void fail(const Args& a, u64 seq, u32 missing) {
  u32 word = or_word(a.peer[a.rank] + 4 * a.rank, 0x80000000u | missing) | 0x80000000u | missing;
  PEERS if (s != (int)a.rank) st_word(a.peer[s] + 4 * a.rank, word);
  tell_host(a, seq);
}

__device__ __forceinline__ Run begin(const Args& a) {
  Run run;
  run.seq = ld_sequence(kind_word(a)) + 1;
  run.dead = reports(a) != 0;
  run.started = 0;
  run.polls = 0;
  if (run.dead && blockIdx.x == 0 && threadIdx.x == 0) tell_host(a, run.seq);
  return run;
}

// The count goes on when every block has read it: nothing later in the launch needs the old value. All threads call it.
__device__ __forceinline__ void count_call(const Args& a, const Run& run) {
  block_sync();
  if (threadIdx.x == 0 && add_and_wrap(kind_word(a) + 8, gridDim.x - 1) == gridDim.x - 1) st_sequence(kind_word(a), run.seq);
}

// One more look was in vain: true when waiting is over. The clock and the reports are read at every 64th look only.
__device__ __forceinline__ bool expired(const Args& a, Run& run, u32 missing) {
  poll_pause();
  if (++run.polls & 63) return false;
  if (reports(a)) {
    tell_host(a, run.seq);
    return true;
  }
  u64 now = now_ns();
  if (run.started == 0) run.started = now;
  if (now - run.started < a.timeout_ns) return false;
  fail(a, run.seq, missing);
  return true;
}

// ---- memory of the caller, at whatever alignment -------------------------------------------------------------------
template <int N>
union Bytes {
  unsigned char b[N];
  unsigned short h[N / 2];
  u32 w[N / 4];
};
// Bytes at..at+sizeof(V) of a buffer of `bytes`; zeros beyond its end.
template <class V>
__device__ __forceinline__ V load(u64 p, u32 at, u32 bytes, u32 unit) {
  if (unit >= sizeof(V) && at + sizeof(V) <= bytes) return *(const V*)(p + at);
  union { V v; Bytes<sizeof(V)> u; } r;
#pragma unroll
  for (int i = 0; i < (int)sizeof(V) / 4; i++) r.u.w[i] = 0;
#pragma unroll 1
  for (u32 i = 0; i < sizeof(V) && at + i < bytes;) {
    if (unit >= 4 && at + i + 4 <= bytes) { r.u.w[i / 4] = *(const u32*)(p + at + i); i += 4; }
    else if (unit >= 2 && at + i + 2 <= bytes) { r.u.h[i / 2] = *(const unsigned short*)(p + at + i); i += 2; }
    else { r.u.b[i] = *(const unsigned char*)(p + at + i); i += 1; }
  }
  return r.v;
}

template <class V>
__device__ __forceinline__ void store(u64 p, u32 at, u32 bytes, u32 unit, V v) {
  if (unit >= sizeof(V) && at + sizeof(V) <= bytes) { *(V*)(p + at) = v; return; }
  union { V v; Bytes<sizeof(V)> u; } r;
  r.v = v;
#pragma unroll 1
  for (u32 i = 0; i < sizeof(V) && at + i < bytes;) {
    if (unit >= 4 && at + i + 4 <= bytes) { *(u32*)(p + at + i) = r.u.w[i / 4]; i += 4; }
    else if (unit >= 2 && at + i + 2 <= bytes) { *(unsigned short*)(p + at + i) = r.u.h[i / 2]; i += 2; }
    else { *(unsigned char*)(p + at + i) = r.u.b[i]; i += 1; }
  }
}

__device__ __forceinline__ u32 shard_bytes(const Args& a, int s) { return a.rows * a.width[s]; }

// Bytes at..at+sizeof(V) of rank s's shard go to their final columns in out.
template <class V>
__device__ __forceinline__ void place(const Args& a, int s, u32 at, V v) {
  u32 width = a.width[s], bytes = a.rows * width;
  if (at >= bytes) return;
  u64 out = a.out + a.start[s];
  if (a.rows == 1) { store(out, at, bytes, a.unit_out, v); return; }
  u32 row = at / width, col = at - row * width;
  if (a.unit_out >= sizeof(V) || col + sizeof(V) <= width) { store(out + row * a.pitch, col, width, a.unit_out, v); return; }
  union { V v; unsigned char b[sizeof(V)]; } r;
  r.v = v;
#pragma unroll 1
  for (u32 i = 0; i < sizeof(V) && at + i < bytes; i++) {
    *(unsigned char*)(out + row * a.pitch + col) = r.b[i];
    if (++col == width) { col = 0; row++; }
  }
}

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

// ---- bulk --------------------------------------------------------------------------------------------------------
__device__ __forceinline__ u32 round16(u32 v) { return (v + 15) & ~15u; }
__device__ __forceinline__ u32 chunks_of(const Args& a, u32 bytes) { return bytes ? (bytes + a.chunk - 1) / a.chunk : 1; }
__device__ __forceinline__ u64 flag(const Args& a, int shot, int owner, int sender, u64 seq, u32 chunk) {
  return a.peer[owner] + a.flags[shot] + (seq & 1) * a.flag_slot + ((u64)sender * a.chunks + chunk) * FLAG_BYTES;
}
// Where a sender's bytes lie in a reader's arena. Senders write to their peers: on NV18 links SM stores moved 360 GB/s
// each way at once, SM loads 330.
__device__ __forceinline__ u64 staged(const Args& a, int shot, int sender, int reader, u64 seq, u32 region) {
  return a.peer[reader] + a.stage[shot] + (seq & 1) * a.stage_slot[shot] + (u64)sender * region;
}

// Items of 16 bytes from..to by the whole block, four in flight per thread.
template <class Load, class Store>
__device__ __forceinline__ void stream(u32 from, u32 to, Load get, Store put) {
  u32 items = (to - from + 15) / 16;
  for (u32 i = threadIdx.x; i < items; i += 4 * blockDim.x) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) if (i + k * blockDim.x < items) v[k] = get(from + (i + k * blockDim.x) * 16);
#pragma unroll
    for (int k = 0; k < 4; k++) if (i + k * blockDim.x < items) put(from + (i + k * blockDim.x) * 16, v[k]);
  }
}

// Every thread's stores of the chunk come before the flag, for whoever acquires it: block_sync, then a release.
__device__ __forceinline__ void raise(const Args& a, int shot, u32 chunk, u64 seq, u32 to) {
  block_sync();
  if (threadIdx.x < WORLD && ((to >> threadIdx.x) & 1)) st_flag(flag(a, shot, threadIdx.x, a.rank, seq, chunk), seq);
}

// The whole block waits for a chunk of the ranks in `from`; false, for all its threads, when waiting is over.
__device__ __forceinline__ bool await(const Args& a, Run& run, int shot, u32 chunk, u32 from) {
  bool over = false;
  if (threadIdx.x < WORLD && ((from >> threadIdx.x) & 1))
    while (ld_flag(flag(a, shot, a.rank, threadIdx.x, run.seq, chunk)) != run.seq)
      if (expired(a, run, 1u << threadIdx.x)) { over = true; break; }
  return !block_any(over);
}

__device__ __forceinline__ u32 low(u32 a, u32 b) { return a < b ? a : b; }

__device__ __forceinline__ void copy_bulk_body(const Args& a) {
  Run run = begin(a);
  run.dead = block_any(run.dead);
  count_call(a, run);
  if (run.dead) return;
  const u32 everyone = (1u << WORLD) - 1, me = a.rank;
  u32 widest = 0;
  PEERS widest = a.width[s] > widest ? a.width[s] : widest;
  const u32 region = round16(a.rows * widest);
  if (blockIdx.x < a.blocks[0]) {
    u32 bytes = shard_bytes(a, me), count = chunks_of(a, bytes);
    for (u32 c = blockIdx.x; c < count; c += a.blocks[0]) {
      stream(c * a.chunk, low((c + 1) * a.chunk, bytes),
             [&](u32 at) { return load<uint4>(a.x, at, bytes, a.unit_x); },
             [&](u32 at, uint4 v) {
#pragma unroll
               for (int k = 1; k < WORLD; k++) st_bulk(staged(a, 0, me, (me + k) % WORLD, run.seq, region) + at, v);
               if (a.own) place(a, me, at, v);
             });
      raise(a, 0, c, run.seq, everyone & ~(1u << me));
    }
    return;
  }
  u32 most = chunks_of(a, a.rows * widest);
  for (u32 i = blockIdx.x - a.blocks[0]; i < most * (WORLD - 1); i += a.blocks[2]) {
    u32 c = i / (WORLD - 1);
    int s = (me + 1 + i % (WORLD - 1)) % WORLD;
    u32 bytes = shard_bytes(a, s);
    if (c >= chunks_of(a, bytes)) continue;
    if (!await(a, run, 0, c, 1u << s)) return;
    u64 from = staged(a, 0, s, me, run.seq, region);
    stream(c * a.chunk, low((c + 1) * a.chunk, bytes), [&](u32 at) { return ld_bulk(from + at); },
           [&](u32 at, uint4 v) { place(a, s, at, v); });
  }
}

// Sums of bytes from..to of this rank's part, for two shots, staged for the others as well.
template <class T>
__device__ __forceinline__ void stream_sums(const Args& a, const Run& run, u64 own, u64 out, u32 from, u32 to, u32 size,
                                            u32 region) {
  constexpr int depth = WORLD <= 4 ? 2 : 1;  // more would spill registers
  const int me = a.rank, step = blockDim.x * 16;
  for (u32 base = from + threadIdx.x * 16; base < to; base += depth * step) {
    uint4 v[depth][WORLD];
#pragma unroll
    for (int k = 0; k < depth; k++) if (base + k * step < to) {
#pragma unroll
      PEERS v[k][s] = s == me ? load<uint4>(own, base + k * step, size, a.unit_x)
                              : ld_bulk(staged(a, 0, s, me, run.seq, region) + base + k * step);
    }
#pragma unroll
    for (int k = 0; k < depth; k++) if (base + k * step < to) {
      uint4 r;
      r.x = sum_lane<T>([&](int s) { return v[k][s].x; });
      r.y = sum_lane<T>([&](int s) { return v[k][s].y; });
      r.z = sum_lane<T>([&](int s) { return v[k][s].z; });
      r.w = sum_lane<T>([&](int s) { return v[k][s].w; });
      u32 at = base + k * step;
      store(out, at, size, a.unit_out, r);
      if (a.scatter != 2) continue;
#pragma unroll
      for (int j = 1; j < WORLD; j++) st_bulk(staged(a, 1, me, (me + j) % WORLD, run.seq, region) + at, r);
    }
  }
}

template <class T>
__device__ __forceinline__ void sum_bulk_body(const Args& a) {
  Run run = begin(a);
  run.dead = block_any(run.dead);
  count_call(a, run);
  if (run.dead) return;
  const u32 everyone = (1u << WORLD) - 1, me = a.rank, others = everyone & ~(1u << me);
  // The parts of all ranks; one part, for everyone, when nothing is scattered. The last parts may be short or empty.
  auto part_at = [&](u32 p) { return a.scatter ? low(p * a.part, a.bytes) : 0u; };
  auto part_size = [&](u32 p) { return a.scatter ? low(a.part, a.bytes - part_at(p)) : a.bytes; };
  const u32 region = round16(a.scatter ? a.part : a.bytes), parts = a.scatter != 0;
  u32 block = blockIdx.x;
  if (block < a.blocks[0]) {
    const u32 targets = parts ? WORLD - 1 : 1;
    u32 most = chunks_of(a, region) * targets;
    for (u32 i = block; i < most; i += a.blocks[0]) {
      u32 c = i / targets, p = (me + 1 + i % targets) % WORLD, size = part_size(p);
      if (c >= chunks_of(a, size)) continue;
      u64 from = a.x + part_at(p);
      stream(c * a.chunk, low((c + 1) * a.chunk, size),
             [&](u32 at) { return load<uint4>(from, at, size, a.unit_x); },
             [&](u32 at, uint4 v) {
               if (parts) {
                 st_bulk(staged(a, 0, me, p, run.seq, region) + at, v);
               } else {
#pragma unroll
                 for (int k = 1; k < WORLD; k++) st_bulk(staged(a, 0, me, (me + k) % WORLD, run.seq, region) + at, v);
               }
             });
      // In place, out is x: a reducer may write a chunk only when this rank has sent it, so it awaits the own flag too.
      raise(a, 0, c, run.seq, parts ? 1u << p : everyone);
    }
    return;
  }
  block -= a.blocks[0];
  if (block < a.blocks[1]) {
    const u32 size = part_size(me);
    const u64 own = a.x + part_at(me), out = a.out + (a.scatter == 2 ? part_at(me) : 0);
    for (u32 c = block; c < chunks_of(a, size); c += a.blocks[1]) {
      if (!await(a, run, 0, c, parts ? others : everyone)) return;
      stream_sums<T>(a, run, own, out, c * a.chunk, low((c + 1) * a.chunk, size), size, region);
      if (a.scatter == 2) raise(a, 1, c, run.seq, others);
    }
    return;
  }
  block -= a.blocks[1];
  u32 most = chunks_of(a, region) * (WORLD - 1);
  for (u32 i = block; i < most; i += a.blocks[2]) {
    u32 c = i / (WORLD - 1), s = (me + 1 + i % (WORLD - 1)) % WORLD, size = part_size(s);
    if (c >= chunks_of(a, size)) continue;
    if (!await(a, run, 1, c, 1u << s)) return;
    u64 from = staged(a, 1, s, me, run.seq, region), out = a.out + part_at(s);
    stream(c * a.chunk, low((c + 1) * a.chunk, size), [&](u32 at) { return ld_bulk(from + at); },
           [&](u32 at, uint4 v) { store(out, at, size, a.unit_out, v); });
  }
}

#define KERNEL(name, body) \
  extern "C" __global__ void BLOCK_LIMIT name(const __grid_constant__ Args a) { body(a); }
KERNEL(copy_packet, copy_small<Packet>)
KERNEL(copy_line, copy_small<Line>)
KERNEL(copy_bulk, copy_bulk_body)
#define SUMS(type) \
  KERNEL(sum_packet_##type, (sum_small<Packet, type##_t>)) \
  KERNEL(sum_line_##type, (sum_small<Line, type##_t>)) \
  KERNEL(sum_bulk_##type, sum_bulk_body<type##_t>)
SUMS(fp16)
SUMS(bf16)
SUMS(fp32)
