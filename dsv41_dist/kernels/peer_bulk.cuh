// The bulk protocol. Joined after peer_small.cuh.
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

