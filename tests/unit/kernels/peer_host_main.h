// Joined after peer.cu: runs queues of launches, one queue a rank, each queue in order like a CUDA stream.
static const struct { const char* name; void (*run)(const Args); } kernels[] = {
#define ENTRY(name) {#name, name}
    ENTRY(copy_packet), ENTRY(copy_line), ENTRY(copy_bulk),
    ENTRY(sum_packet_fp16), ENTRY(sum_line_fp16), ENTRY(sum_bulk_fp16),
    ENTRY(sum_packet_bf16), ENTRY(sum_line_bf16), ENTRY(sum_bulk_bf16),
    ENTRY(sum_packet_fp32), ENTRY(sum_line_fp32), ENTRY(sum_bulk_fp32),
};
struct Launch { const char* name; u32 grid, block; Args args; };
struct Grid { std::vector<std::unique_ptr<Fiber>> fibers; std::vector<std::unique_ptr<Barrier>> barriers; u32 live = 0; };

static void trampoline() {
  current->body();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}
static void start(Grid& grid, const Launch& launch, u32 rank) {
  void (*run)(const Args) = nullptr;
  for (auto& k : kernels) if (!strcmp(k.name, launch.name)) run = k.run;
  if (!run) { fprintf(stderr, "no kernel %s\n", launch.name); abort(); }
  grid.fibers.clear();
  grid.barriers.clear();
  auto barrier = [&](u32 n) { grid.barriers.push_back(std::make_unique<Barrier>()); grid.barriers.back()->expected = n; return grid.barriers.back().get(); };
  for (u32 b = 0; b < launch.grid; b++) {
    Barrier *whole = barrier(launch.block), *warp = nullptr;
    for (u32 t = 0; t < launch.block; t++) {
      if (t % 32 == 0) warp = barrier(launch.block - t < 32 ? launch.block - t : 32);
      auto f = std::make_unique<Fiber>();
      f->thread = t; f->block = b; f->threads = launch.block; f->blocks = launch.grid; f->rank = rank;
      f->warp_barrier = warp; f->block_barrier = whole;
      f->stack.reset(new char[32768]);
      f->body = [run, &launch] { run(launch.args); };
      getcontext(&f->context);
      f->context.uc_stack.ss_sp = f->stack.get();
      f->context.uc_stack.ss_size = 32768;
      f->context.uc_link = nullptr;
      makecontext(&f->context, trampoline, 0);
      grid.fibers.push_back(std::move(f));
    }
  }
  grid.live = grid.fibers.size();
}

// queues[r] has counts[r] launches. 0 when all have ended, 1 when `steps` scheduling steps were not enough (0: no limit).
extern "C" int run_queues(u32 ranks, const u32* counts, const Launch* const* queues, u64 seed, u64 steps) {
  dice_state = seed * 2 + 1;
  std::vector<Grid> grids(ranks);
  std::vector<u32> next(ranks, 0), weight(ranks, 1);
  for (u64 step = 0;; step++) {
    bool all = true;
    for (u32 r = 0; r < ranks; r++) {
      if (grids[r].live == 0 && next[r] < counts[r]) start(grids[r], queues[r][next[r]++], r);
      all &= grids[r].live == 0;
    }
    if (all) return 0;
    if (steps && step > steps) return 1;
    if (step % 4000 == 0) for (auto& w : weight) w = (dice() % 3) ? 8 : 0;
    if (step % 2000 == 1000) for (auto& w : weight) w = 1 + dice() % 4;
    u32 r = dice() % ranks;
    if (grids[r].live == 0 || dice() % 8 >= weight[r]) continue;
    // A run of neighbouring fibers: cheaper than one at a time, still any order between blocks and ranks.
    auto& fibers = grids[r].fibers;
    u32 from = dice() % fibers.size(), many = 1 + dice() % 48;
    for (u32 i = 0; i < many && grids[r].live; i++) {
      Fiber* f = fibers[(from + i) % fibers.size()].get();
      if (f->done) continue;
      current = f;
      swapcontext(&scheduler, &f->context);
      if (f->done) grids[r].live--;
    }
    if (ranks == 1 && polls_in_vain > 2000) { polls_in_vain = 0; sched_yield(); }
  }
}
extern "C" u32 args_bytes() { return sizeof(Args); }
extern "C" u32 launch_bytes() { return sizeof(Launch); }
