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

// The record keeps the call that met the failure first: kernels behind it in a replay find only the report. The call is
// written before the reports, because a report is what the host takes for the sign that the record is there.
__device__ __noinline__ void tell_host(const Args& a, u64 seq) {
  if (!ld_word(a.host + 32)) {
    st_sequence(a.host + 40, seq);
    st_word(a.host + 32, a.kind + 1);
  }
  fence_system();
  for (int s = 0; s < 8; s++) {
    u32 word = ld_word(a.peer[a.rank] + 4 * s);
    if (word) st_word(a.host + 4 * s, word);
  }
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
  // A lane of a line that lacks nothing itself waits with its warp: only one that knows who is missing reports.
  if (!missing || now - run.started < a.timeout_ns) return false;
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

