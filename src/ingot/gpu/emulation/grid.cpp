#include "ingot/gpu/emulation/grid.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/core/rng.h"
#include "ingot/gpu/emulation/context.h"
#include "ingot/gpu/emulation/order.h"
#include "ingot/gpu/emulation/sanitizers.h"
#include "ingot/gpu/limits.h"

namespace ingot::emulation {
namespace {

constexpr size_t kStackBytes = 256 << 10, kPageBytes = 4096;
constexpr int64_t kMaxSharedBytes = 227 << 10;  // of a block on any GPU
constexpr uint64_t kSwitchNs = 100;             // virtual time of a switch
constexpr uint64_t kMaxIdleSwitches = 20'000'000;
// For orders that hold fibers back (order.h). When the other fibers have polled kPatience times the number of fibers,
// they may be waiting for the fibers held back. These fibers then get kTurnsOfEach switches each. The extra polls would
// take no time on a GPU, so virtual time passes kSlower times as slowly.
constexpr uint64_t kPatience = 2, kSlower = 16;
constexpr uint32_t kTurnsOfEach = 16;
// A 32-bit address: the block of the cluster (kOwnBlock: this one), the variable, the byte. Clusters have up to 16
// blocks.
constexpr uint32_t kMaxVariables = 256, kOffsetBits = 18, kRankBit = 26, kOwnBlock = 63;
static_assert(kMaxSharedBytes < 1 << kOffsetBits && kMaxVariables << kOffsetBits == 1u << kRankBit, "all offsets fit");

// The most shared memory of a block on the emulated GPU.
int64_t most_shared_bytes() { return std::min(kMaxSharedBytes, gpu::current_limits().smem_per_block); }

// A stack with an inaccessible page below it.
class Stack {
 public:
  Stack() {
    void* p = mmap(nullptr, kStackBytes + kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fail(ErrorCode::io, "emulation: found no memory for a stack of ", kStackBytes, " bytes");
    base_ = static_cast<char*>(p);
    (void)mprotect(base_, kPageBytes, PROT_NONE);
  }
  ~Stack() { (void)munmap(base_, kStackBytes + kPageBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  char* data() const { return base_ + kPageBytes; }

 private:
  char* base_ = nullptr;
};

// Stacks of earlier launches, for reuse: the system calls that make a stack take longer than the runs of many threads.
class Stacks {
 public:
  std::unique_ptr<Stack> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!all_.empty()) {
        std::unique_ptr<Stack> stack = std::move(all_.back());
        all_.pop_back();
        return stack;
      }
    }
    return std::make_unique<Stack>();
  }
  void give_back(std::unique_ptr<Stack> stack) {
    const std::lock_guard lock(mutex_);
    if (all_.size() < kMost) all_.push_back(std::move(stack));
  }
  static Stacks& of_all() {
    static Stacks stacks;
    return stacks;
  }

 private:
  static constexpr size_t kMost = 4096;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stack>> all_;
};

struct Block;
enum class State { ready, waiting, done };

// A copy of cp.async that has not arrived.
struct Copy {
  void* to;
  const void* from;
  uint32_t valid, bytes, group;
  void arrive() const {
    if (valid > 0) std::memcpy(to, from, valid);
    std::memset(static_cast<char*>(to) + valid, 0, bytes - valid);
  }
};

struct Fiber {
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (!stack) return;
    sanitized.allow_stack(stack->data(), kStackBytes);
    Stacks::of_all().give_back(std::move(stack));
  }

  Place place;
  Block* block = nullptr;
  State state = State::ready;
  bool held_back = false;      // runs where no other fiber can, or where the others only poll (order.h)
  Where where;                 // place of the last wait
  const char* what = "";       // name of the awaited event
  uint64_t cluster_phase = 0;  // the cluster's phase at the fiber's last arrival
  std::deque<Copy> copies;
  uint32_t copy_group = 0;  // group of the next copy
  Context context;
  std::unique_ptr<Stack> stack;
  SanitizedFiber sanitized;
};

struct Barrier {
  uint32_t arrived = 0, votes = 0, result = 0;
  std::vector<Fiber*> waiting;
  Where where;
  char sync[2] = {};  // ThreadSanitizer's handles, for each parity of the phase
  uint64_t phase = 0;
};

struct Exchange {
  Lanes lanes;
  uint32_t arrived = 0, left = 0;
  std::vector<Fiber*> waiting;
};

struct Warp {
  std::vector<std::unique_ptr<Exchange>> open, closed;
  char sync = 0;
};

struct Cluster {
  uint32_t arrived = 0, threads = 0;
  uint64_t phase = 0;
  std::vector<Fiber*> waiting;
  std::vector<Block*> blocks;
  char sync[2] = {};
};

struct Free {
  void operator()(char* p) const { std::free(p); }
};
struct Block {
  uint32_t index = 0, rank = 0, threads = 0, left = 0;
  Cluster* cluster = nullptr;
  Barrier barrier, named[16];
  std::vector<Warp> warps;
  std::unique_ptr<char, Free> memory[kMaxVariables];
};

struct Variable {
  const void* key;
  size_t bytes;
};

// A launch.
struct Grid {
  const char* name;
  Shape shape;
  const std::function<void()>* thread;
  std::vector<Variable> variables;
  int64_t shared_bytes = 0;
  std::vector<std::unique_ptr<Block>> blocks;  // blocks that have started and not ended
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> ready, ready_held_back;
  uint32_t turns = 0;  // switches that are left for the fibers held back
  uint64_t polls = 0;  // polls of the other fibers since the last of these switches
  size_t running = 0;  // fibers not done
  std::exception_ptr failure;
  Context main;
  SanitizedFiber main_sanitized;
  uint64_t random, now = 0, idle = 0;
  char start = 0, end = 0;  // ThreadSanitizer's handles
};

thread_local Grid* grid = nullptr;
thread_local Fiber* self = nullptr;

uint64_t draw(uint64_t below) {
  grid->random ^= grid->random << 13;
  grid->random ^= grid->random >> 7;
  grid->random ^= grid->random << 17;
  return (grid->random >> 11) % below;
}

void pass_time(uint64_t ns) { grid->now += grid->ready_held_back.empty() ? ns : ns / kSlower + 1; }

// Switches from the running fiber, or from the main context, to the fiber `next`; nullptr means the main context.
void change_to(Fiber* next) {
  Fiber* const from = self;
  if (next == from) return;
  pass_time(kSwitchNs);
  self = next;
  Context& leaving = from == nullptr ? grid->main : from->context;
  Context& entering = next == nullptr ? grid->main : next->context;
  SanitizedFiber& left = from == nullptr ? grid->main_sanitized : from->sanitized;
  SanitizedFiber& entered = next == nullptr ? grid->main_sanitized : next->sanitized;
  left.leave(entered, from != nullptr && from->state == State::done);
  leaving.change_to(entering);
  left.enter();
}

// The list from which the next fiber is taken.
std::vector<Fiber*>& ready_next() {
  if (grid->ready_held_back.empty()) return grid->ready;
  if (grid->ready.empty()) return grid->ready_held_back;
  if (grid->turns == 0 && grid->polls > kPatience * grid->running)
    grid->turns = kTurnsOfEach * uint32_t(grid->ready_held_back.size()), grid->polls = 0;
  if (grid->turns == 0) return grid->ready;
  --grid->turns;
  return grid->ready_held_back;
}
Fiber* take_ready() {
  std::vector<Fiber*>& ready = ready_next();
  if (ready.empty()) return nullptr;
  std::swap(ready[draw(ready.size())], ready.back());
  Fiber* const next = ready.back();
  ready.pop_back();
  return next;
}
void add_ready(Fiber& f) { (f.held_back ? grid->ready_held_back : grid->ready).push_back(&f); }

void make_ready(std::vector<Fiber*>& waiting) {
  for (Fiber* f : waiting) {
    f->state = State::ready;
    add_ready(*f);
  }
  waiting.clear();
  grid->idle = 0;
}

void block_here(std::vector<Fiber*>& waiting, const char* what, Where where) {
  self->state = State::waiting;
  self->what = what;
  self->where = where;
  waiting.push_back(self);
  tsan_release(&grid->end);  // if the fiber waits for ever
  change_to(take_ready());   // no fiber is ready: switch to the main context for the report of the deadlock
}

template <class... Note> [[noreturn]] void complain(const Note&... note) {
  fail(ErrorCode::invalid_argument, grid->name, ": block ", self->block->index, " thread ", self->place.thread.x, ": ",
       note...);
}
std::string said(Where w) {
  const char* file = std::strrchr(w.file_name(), '/');
  return ingot::detail::concat(file == nullptr ? w.file_name() : file + 1, ":", w.line());
}

void fiber_main() {
  self->sanitized.enter_first();
  tsan_acquire(&grid->start);
  try {
    const Attention listen;  // ThreadSanitizer sees the kernel's accesses, not the scheduler's
    (*grid->thread)();
  } catch (...) {
    if (!grid->failure) grid->failure = std::current_exception();
  }
  tsan_release(&grid->end);
  self->state = State::done;
  self->copies.clear();  // the next thread of this fiber has copies of its own
  ++self->block->left;
  --grid->running;
  grid->idle = 0;
  change_to(grid->failure ? nullptr : take_ready());
}

void prepare(Fiber& f) {
  if (!f.stack)
    f.stack = Stacks::of_all().take();
  else
    f.sanitized.allow_stack(f.stack->data(), kStackBytes);
  f.sanitized.prepare(f.stack->data(), kStackBytes);
  f.context.start_at(f.stack->data(), kStackBytes, fiber_main);
  f.state = State::ready;
}

// The number, below `count`, of the warp or block that the order chooses; drawn where the order has no number.
uint32_t chosen_of(uint32_t count) {
  const std::optional<uint32_t>& which = order().which;
  return which ? *which % count : uint32_t(draw(count));
}
bool chooses_a_block() { return order().kind == Order::Kind::late_block || order().kind == Order::Kind::early_block; }
bool holds_back(bool chosen) {
  const Order::Kind kind = order().kind;
  if (kind == Order::Kind::drawn) return false;
  return chosen == (kind == Order::Kind::late_warp || kind == Order::Kind::late_block);
}

// Starts the threads of a cluster. `late_or_early` is the number of the block that the order chooses.
void start_cluster(int64_t first_block, uint32_t late_or_early) {
  const Shape& s = grid->shape;
  Cluster& cluster = *grid->clusters.emplace_back(std::make_unique<Cluster>());
  cluster.threads = uint32_t(s.cluster * s.block);
  for (int rank = 0; rank < s.cluster; ++rank) {
    Block& b = *grid->blocks.emplace_back(std::make_unique<Block>());
    b.index = uint32_t(first_block + rank);
    b.rank = uint32_t(rank);
    b.threads = uint32_t(s.block);
    b.cluster = &cluster;
    b.warps.resize(size_t((s.block + 31) / 32));
    cluster.blocks.push_back(&b);
    const uint32_t warp = order().kind == Order::Kind::drawn ? 0 : chosen_of(uint32_t(b.warps.size()));
    for (uint32_t t = 0; t < b.threads; ++t) {
      if (grid->running == grid->fibers.size()) grid->fibers.push_back(std::make_unique<Fiber>());
      Fiber& f = *grid->fibers[grid->running++];
      f.block = &b;
      f.place = {.thread = {t, 0, 0},
                 .block = {b.index, 0, 0},
                 .block_dim = {b.threads, 1, 1},
                 .grid_dim = {uint32_t(s.grid), 1, 1}};
      prepare(f);
      f.held_back = holds_back(chooses_a_block() ? grid->blocks.size() - 1 == late_or_early : t / 32 == warp);
      add_ready(f);
    }
  }
}

// The threads of the launch by the place of their wait.
std::string waits() {
  std::map<std::string, int> waits;
  size_t left = 0, all = 0;
  for (const auto& f : grid->fibers) {
    if (f->block == nullptr) continue;
    ++all;
    if (f->state == State::done) ++left;
    if (f->state == State::waiting) ++waits[std::string(f->what) + " at " + said(f->where)];
  }
  std::string text = ingot::detail::concat("of ", all, ":");
  for (const auto& [what, threads] : waits) text += ingot::detail::concat(" ", threads, " wait for ", what, ";");
  return ingot::detail::concat(text, " ", left, " have ended");
}
[[noreturn]] void report_deadlock() {
  fail(ErrorCode::invalid_argument, grid->name, ": found threads that wait for ever, ", waits(),
       "; expected all of a block (of a cluster) at each barrier");
}

// Runs the clusters [first, end) of `clusters` together, to their end.
void run_together(const std::vector<int64_t>& clusters, size_t first, size_t end) {
  grid->blocks.clear();
  grid->clusters.clear();
  grid->ready.clear();
  grid->ready_held_back.clear();
  grid->turns = 0;
  grid->polls = 0;
  grid->running = 0;
  for (auto& f : grid->fibers) f->block = nullptr;
  const uint32_t late_or_early =
      chooses_a_block() ? chosen_of(uint32_t(end - first) * uint32_t(grid->shape.cluster)) : 0;
  for (size_t i = first; i < end; ++i) start_cluster(clusters[i] * grid->shape.cluster, late_or_early);
  tsan_release(&grid->start);
  change_to(take_ready());
  tsan_acquire(&grid->end);
  if (grid->failure) std::rethrow_exception(grid->failure);
  if (grid->running > 0) report_deadlock();
}

void check_shape(const char* name, const Shape& s) {
  INGOT_CHECK(s.grid >= 1 && s.grid <= 0x7fffffff && s.cluster >= 1 && s.cluster <= 16 && s.grid % s.cluster == 0, name,
              ": found a grid of ", s.grid, " blocks in clusters of ", s.cluster, ", expected a multiple of 1 to 16");
  INGOT_CHECK(s.block >= 1 && s.block <= 1024, name, ": found blocks of ", s.block, " threads, expected 1 to 1024");
  INGOT_CHECK(s.smem >= 0 && s.smem <= most_shared_bytes(), name, ": found ", s.smem,
              " bytes of shared memory, expected at most ", most_shared_bytes());
  INGOT_CHECK(!s.cooperative || settings().resident_blocks == 0 || s.grid <= settings().resident_blocks, name,
              ": found a cooperative launch of ", s.grid, " blocks, expected at most ", settings().resident_blocks);
}

// In code for GPUs without clusters a cluster barrier is compiled to no instruction (gpu/ptx/cluster.cuh), so a kernel
// that needs the barrier would be wrong there.
void check_clusters() {
  if (!gpu::current_limits().hopper)
    complain("found a cluster barrier on a GPU without clusters, where no thread waits; expected one of the block");
}

// The variable's memory in a block.
char* memory_of(Block& b, uint32_t variable) {
  auto& memory = b.memory[variable];
  if (!memory) {
    const size_t bytes = (grid->variables[variable].bytes + 1023) / 1024 * 1024;
    memory.reset(static_cast<char*>(std::aligned_alloc(1024, bytes)));
    std::memset(memory.get(), 0xff, bytes);
    asan_forbid(memory.get() + grid->variables[variable].bytes, bytes - grid->variables[variable].bytes);
  }
  return memory.get();
}

}  // namespace

Settings& settings() {
  thread_local Settings s;
  return s;
}

Order order_named(std::string_view name) {
  constexpr std::pair<std::string_view, Order::Kind> kKinds[] = {{"late-warp", Order::Kind::late_warp},
                                                                 {"early-warp", Order::Kind::early_warp},
                                                                 {"late-block", Order::Kind::late_block},
                                                                 {"early-block", Order::Kind::early_block}};
  const size_t colon = std::min(name.find(':'), name.size());
  const auto kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                 [&](const auto& k) { return k.first == name.substr(0, colon); });
  const std::string_view number = name.substr(std::min(colon + 1, name.size()));
  uint32_t which = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), which);
  const bool whole = error == std::errc() && end == number.data() + number.size();
  if (kind == std::end(kKinds) || (colon < name.size() && !whole))
    fail(ErrorCode::usage, "INGOT_EMULATOR_ORDER: found '", name,
         "', expected late-warp, early-warp, late-block or early-block, with or without a number as in late-warp:3");
  return {kind->second, colon < name.size() ? std::optional(which) : std::nullopt};
}
Order& order() {
  thread_local Order o = [] {
    const char* const name = std::getenv("INGOT_EMULATOR_ORDER");
    return name == nullptr || *name == 0 ? Order{} : order_named(name);
  }();
  return o;
}

void run(const char* name, const Shape& shape, const std::function<void()>& thread) {
  check_shape(name, shape);
  const Silence silence;
  const auto now = std::make_unique<Grid>();
  now->name = name;
  now->shape = shape;
  now->thread = &thread;
  now->random = settings().seed * 0x9e3779b97f4a7c15u | 1;
  now->main_sanitized.is_main();
  INGOT_CHECK(grid == nullptr, name, ": found a launch inside an emulated kernel, expected none");
  grid = now.get();
  struct Restore {
    ~Restore() {
      grid = nullptr;
      self = nullptr;
    }
  } restore;
  std::vector<int64_t> clusters(size_t(shape.grid / shape.cluster));
  for (size_t i = 0; i < clusters.size(); ++i) clusters[i] = int64_t(i);
  for (size_t i = clusters.size(); i > 1; --i) std::swap(clusters[i - 1], clusters[draw(i)]);
  const size_t at_once = shape.cooperative ? clusters.size() : 1;
  for (size_t i = 0; i < clusters.size(); i += at_once)
    run_together(clusters, i, std::min(i + at_once, clusters.size()));
}

namespace {
thread_local std::vector<std::function<void()>>* recording = nullptr;
}
void submit(std::function<void()> work) {
  if (recording != nullptr)
    recording->push_back(std::move(work));
  else
    work();
}
void record(const std::function<void()>& work, std::vector<std::function<void()>>& recorded) {
  struct Ended {
    ~Ended() { recording = nullptr; }
  } ended;
  recording = &recorded;
  work();
}

const Place& place() { return self->place; }
uint32_t lane() { return self->place.thread.x % 32; }

void yield() {
  const Silence silence;
  if (++grid->idle > kMaxIdleSwitches)
    complain("found ", kMaxIdleSwitches, " polls during which no thread got on (", waits(),
             "), expected a wait to end");
  grid->polls += !self->held_back;
  add_ready(*self);
  tsan_release(&grid->end);  // if another thread fails
  change_to(take_ready());
}
void maybe_yield() {
  const Silence silence;
  if (draw(4) == 0) yield();
}
void yield_to_others() {
  yield();
  const Silence silence;
  // The work of a second CPU thread takes longer than a switch here, so virtual time must not run ahead of this work.
  if (grid->idle % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
}
uint64_t clock_ns(uint64_t passing) {
  const Silence silence;
  pass_time(passing + kSwitchNs);
  return grid->now;
}

uint32_t sync_block(bool vote, Where where) {
  const Silence silence;
  Block& block = *self->block;
  Barrier& b = block.barrier;
  const uint64_t phase = b.phase;
  if (b.arrived == 0) b.where = where;
  if (b.where.line() != where.line() || std::strcmp(b.where.file_name(), where.file_name()) != 0)
    complain("found a barrier at ", said(where), " while others wait at ", said(b.where), ", expected one barrier");
  tsan_release(&b.sync[phase % 2]);
  b.votes += vote;
  if (++b.arrived == block.threads) {
    b.result = b.votes;
    b.arrived = b.votes = 0;
    ++b.phase;
    make_ready(b.waiting);
  } else {
    block_here(b.waiting, "a block barrier", where);
  }
  tsan_acquire(&b.sync[phase % 2]);
  return b.result;  // the next phase cannot complete before all threads have read this phase
}

void sync_named(uint32_t id, uint32_t threads, bool wait, Where where) {
  const Silence silence;
  if (id >= 16 || threads % 32 != 0 || threads > (self->block->threads + 31) / 32 * 32)
    complain("found barrier ", id, " of ", threads, " threads, expected 0 to 15 and whole warps of the block");
  Barrier& b = self->block->named[id];
  const uint64_t phase = b.phase;
  tsan_release(&b.sync[phase % 2]);
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.phase;
    make_ready(b.waiting);
  } else if (wait) {
    block_here(b.waiting, "a named barrier", where);
  }
  if (wait) tsan_acquire(&b.sync[phase % 2]);
}

Lanes exchange(uint32_t mask, uint64_t value, Where where) {
  const Silence silence;
  const uint32_t me = lane(), first = self->place.thread.x / 32 * 32,
                 exist = std::min<uint32_t>(32, self->block->threads - first);
  if (exist < 32) mask &= (1u << exist) - 1;
  if (!(mask >> me & 1)) complain("found lane ", me, " outside of its own mask at ", said(where));
  Warp& warp = self->block->warps[first / 32];
  auto found = std::find_if(warp.open.begin(), warp.open.end(), [&](const auto& e) { return e->lanes.mask == mask; });
  if (found == warp.open.end()) {
    found = warp.open.insert(found, std::make_unique<Exchange>());
    (*found)->lanes.mask = mask;
    (*found)->left = uint32_t(std::popcount(mask));
  }
  Exchange& e = **found;
  e.lanes.value[me] = value;
  e.arrived |= 1u << me;
  if (e.arrived == mask) {
    warp.closed.push_back(std::move(*found));
    warp.open.erase(found);
    make_ready(e.waiting);
  } else {
    block_here(e.waiting, "lanes of its warp", where);
  }
  const Lanes lanes = e.lanes;
  if (--e.left == 0)
    warp.closed.erase(
        std::find_if(warp.closed.begin(), warp.closed.end(), [&](const auto& c) { return c.get() == &e; }));
  return lanes;
}

void sync_warp(uint32_t mask, Where where) {
  char* const sync = &self->block->warps[self->place.thread.x / 32].sync;
  tsan_release(sync);
  (void)exchange(mask, 0, where);
  tsan_acquire(sync);
}

uint32_t cluster_rank() { return self->block->rank; }
uint32_t cluster_size() { return uint32_t(grid->shape.cluster); }
void cluster_arrive() {
  const Silence silence;
  check_clusters();
  Cluster& c = *self->block->cluster;
  self->cluster_phase = c.phase;
  tsan_release(&c.sync[c.phase % 2]);
  if (++c.arrived < c.threads) return;
  c.arrived = 0;
  ++c.phase;
  make_ready(c.waiting);
}
void cluster_wait(Where where) {
  const Silence silence;
  Cluster& c = *self->block->cluster;
  const uint64_t phase = self->cluster_phase;
  if (c.phase == phase) block_here(c.waiting, "a cluster barrier", where);
  tsan_acquire(&c.sync[phase % 2]);
}

void* shared_memory(const void* key, size_t bytes) {
  const Silence silence;
  if (key == nullptr) {
    if (int64_t(bytes) > grid->shape.smem)
      complain("found a launch with ", grid->shape.smem, " bytes of dynamic shared memory, expected ", bytes);
    bytes = size_t(grid->shape.smem);
  }
  auto& all = grid->variables;
  auto found = std::find_if(all.begin(), all.end(), [&](const Variable& v) { return v.key == key; });
  if (found == all.end()) {
    grid->shared_bytes += int64_t(bytes);
    if (all.size() == kMaxVariables || grid->shared_bytes > most_shared_bytes())
      complain("found ", grid->shared_bytes, " bytes of shared memory, expected at most ", most_shared_bytes());
    found = all.insert(found, {key, bytes});
  }
  return memory_of(*self->block, uint32_t(found - all.begin()));
}

uint32_t shared_address(const void* p) {
  const Silence silence;
  const char* const byte = static_cast<const char*>(p);
  for (uint32_t i = 0; i < grid->variables.size(); ++i)
    if (const char* base = self->block->memory[i].get(); base != nullptr && byte >= base)
      if (const size_t offset = size_t(byte - base); offset <= grid->variables[i].bytes)
        return kOwnBlock << kRankBit | i << kOffsetBits | uint32_t(offset);
  complain("found an address outside of this block's shared memory, expected one inside");
}
uint32_t cluster_address(uint32_t address, uint32_t rank) {
  if (rank >= cluster_size()) complain("found block ", rank, " of a cluster of ", cluster_size());
  return (address & ((1u << kRankBit) - 1)) | rank << kRankBit;
}
void* at_shared_address(uint32_t address, uint32_t bytes) {
  const Silence silence;
  const uint32_t rank = address >> kRankBit, variable = address >> kOffsetBits & (kMaxVariables - 1),
                 offset = address & ((1u << kOffsetBits) - 1);
  if (variable >= grid->variables.size() || offset + bytes > grid->variables[variable].bytes)
    complain("found ", bytes, " bytes at byte ", offset, " of a shared variable, expected them inside its ",
             variable < grid->variables.size() ? grid->variables[variable].bytes : 0);
  Block& block = rank == kOwnBlock ? *self->block : *self->block->cluster->blocks[rank];
  if (block.left == block.threads)
    complain("found an access to the shared memory of block ", block.index, ", which has ended; expected it to wait");
  return memory_of(block, variable) + offset;
}

void copy_async(void* to, const void* from, uint32_t valid, uint32_t bytes) {
  const Copy copy{to, from, valid, bytes, self->copy_group};
  if (draw(2) == 0)
    copy.arrive();
  else
    self->copies.push_back(copy);
}
void commit_copies() { ++self->copy_group; }
void wait_for_copies(uint32_t groups_left) {
  for (; !self->copies.empty(); self->copies.pop_front()) {
    const Copy& first = self->copies.front();
    if (first.group + groups_left >= self->copy_group) return;
    first.arrive();
  }
}

void misaligned(const void* p, size_t bytes) {
  complain("found address ", p, " for an access of ", bytes, " bytes, expected it aligned to them");
}

}  // namespace ingot::emulation
