// Threads as fibers: one block at a time, a thread runs until it waits for others, the next is drawn at random.
#include "runtime.h"
#include <cstdarg>
#include <cstdio>
#include <sys/mman.h>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
std::vector<Thread> threads;
unsigned current;

namespace {
constexpr size_t STACK = 256 << 10, GUARD = 4096;

// Saves the callee's registers and stack pointer, and takes up those of another fiber (System V, x86-64).
extern "C" void emulator_switch(void** save, void* to);
asm(R"(.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
 pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
 movq %rsp,(%rdi); movq %rsi,%rsp
 popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
 ret
.size emulator_switch,.-emulator_switch
)");

struct Meeting { unsigned arrived = 0; const char* operation; Place at; void* brought[LANES]; };
std::vector<Meeting> meetings;  // one a warp
std::vector<unsigned> ready;
unsigned live, at_barrier;
char* stacks;
size_t stacks_bytes;
unsigned char* shared;
void* host;
void (*entry)(void**);
void** arguments;
uint64_t random_state;
bool failed;
char* message;
size_t message_bytes;

uint64_t random() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return random_state;
}

void deadlock() {
  const Thread* stuck = nullptr;
  unsigned barrier = 0, warp = 0;
  for (const Thread& t : threads) {
    barrier += t.state == Thread::AT_BARRIER, warp += t.state == Thread::IN_WARP;
    if (t.state == Thread::IN_WARP || (t.state == Thread::AT_BARRIER && !stuck)) stuck = &t;
  }
  fail("deadlock: %u threads wait at a barrier, %u for their warp, one at %s:%d", barrier, warp, stuck ? stuck->at.file : "?",
       stuck ? stuck->at.line : 0);
}

void run_another(void** save) {
  if (ready.empty()) deadlock();
  const size_t i = random() % ready.size();
  current = ready[i];
  ready[i] = ready.back();
  ready.pop_back();
  threads[current].state = Thread::READY;
  threadIdx = threads[current].index;
  emulator_switch(save, threads[current].stack);
}

void release_barrier() {
  const Thread* first = nullptr;
  for (const Thread& t : threads) {
    if (t.state != Thread::AT_BARRIER) continue;
    if (!first) first = &t;
    if (t.at.line != first->at.line || strcmp(t.at.file, first->at.file))
      fail("divergent barrier: some threads are at %s:%d, others at %s:%d", first->at.file, first->at.line, t.at.file, t.at.line);
  }
  at_barrier = 0;
  memory::joined_block();
  for (unsigned i = 0; i < threads.size(); ++i)
    if (threads[i].state == Thread::AT_BARRIER) {
      threads[i].state = Thread::READY;
      if (i != current) ready.push_back(i);
    }
}

void finish_thread() {
  entry(arguments);
  Thread& t = threads[current];
  if (!t.open.empty() || !t.committed.empty()) fail("a thread ends while its cp.async copies are in flight");
  t.state = Thread::DONE;
  --live;
  void* never;
  if (live && at_barrier == live) {
    release_barrier();
  }
  if (!live) emulator_switch(&never, host);
  run_another(&never);
}

void* first_stack(char* top) {
  void** p = (void**)((uintptr_t)top & ~15ull);
  *--p = nullptr;
  *--p = (void*)finish_thread;
  p -= 6;
  memset(p, 0, 48);
  return p;
}

void run_block(size_t bytes) {
  memset(shared, 0xff, bytes);  // NaN in every type
  live = threads.size(), at_barrier = 0;
  ready.clear();
  for (Meeting& m : meetings) m.arrived = 0;
  for (unsigned i = 0; i < threads.size(); ++i) {
    threads[i] = Thread{Thread::READY, first_stack(stacks + (i + 1) * (STACK + GUARD)), {i, 0, 0}, {"the start", 0}, false, {}, {}};
    ready.push_back(i);
  }
  run_another(&host);
}
}  // namespace

unsigned char* shared_memory() { return shared; }

bool on_own_stack(const void* p) {
  const char* bottom = stacks + current * (STACK + GUARD);
  return p >= bottom && p < bottom + STACK + GUARD;
}

void fail(const char* format, ...) {
  if (!failed) {
    failed = true;
    va_list list;
    va_start(list, format);
    const int n = vsnprintf(message, message_bytes, format, list);
    va_end(list);
    snprintf(message + n, message_bytes - n, " [block %u, thread %u]", blockIdx.x, current);
  }
  void* never;
  emulator_switch(&never, host);
  __builtin_unreachable();
}

void barrier(Place at) {
  Thread& me = threads[current];
  me.state = Thread::AT_BARRIER, me.at = at;
  if (++at_barrier == live) release_barrier();
  else run_another(&me.stack);
}

bool barrier_or(bool mine, Place at) {
  threads[current].vote = mine;
  barrier(at);
  bool any = false;
  for (const Thread& t : threads) any |= t.vote;
  barrier(at);
  return any;
}

void meet(const char* operation, void* mine, Work work, const void* common, Place at) {
  Thread& me = threads[current];
  Meeting& m = meetings[current / LANES];
  if (!m.arrived) m.operation = operation, m.at = at;
  if (m.at.line != at.line || strcmp(m.at.file, at.file) || strcmp(m.operation, operation))
    fail("divergent warp: some lanes are in %s at %s:%d, others in %s at %s:%d", m.operation, m.at.file, m.at.line, operation, at.file, at.line);
  m.brought[current % LANES] = mine;
  me.state = Thread::IN_WARP, me.at = at;
  if (++m.arrived < LANES) return run_another(&me.stack);
  m.arrived = 0;
  if (work) work(m.brought, common);
  for (unsigned i = current / LANES * LANES; i < current / LANES * LANES + LANES; ++i) {
    threads[i].state = Thread::READY;
    if (i != current) ready.push_back(i);
  }
}

void warp_barrier(Place at) {
  const unsigned first = current / LANES * LANES;
  meet("__syncwarp", nullptr, [](void**, const void* first) { memory::joined_warp(*(const unsigned*)first); }, &first, at);
}

struct Shuffled { uint64_t mine, got; int which; };
struct How { Shuffle how; int width; };
uint64_t shuffle(Shuffle how, uint64_t mine, int which, int width, Place at) {
  Shuffled s{mine, 0, which};
  const How common{how, width};
  const auto work = [](void** brought, const void* common) {
    const How& h = *(const How*)common;
    uint64_t ballot = 0;
    for (unsigned i = 0; i < LANES; ++i) ballot |= (((Shuffled*)brought[i])->mine & 1) << i;
    for (unsigned i = 0; i < LANES; ++i) {
      Shuffled& s = *(Shuffled*)brought[i];
      const unsigned source = h.how == XOR ? i ^ s.which : i / h.width * h.width + s.which % h.width;
      s.got = h.how == BALLOT ? ballot : ((Shuffled*)brought[source])->mine;
    }
  };
  meet(how == BALLOT ? "a vote" : "a shuffle", &s, work, &common, at);
  return s.got;
}

// ex2.approx is good to two units in the last place: which one it gives is drawn from the bits of x, so that runs repeat.
float about(float x) {
  if (!(x > 1.2e-38f) || !std::isfinite(x)) return x > 1.17549435e-38f || x != x ? x : 0;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits += (bits * 2654435761u >> 16) % 5 - 2;
  memcpy(&x, &bits, 4);
  return x;
}

struct Launch {
  void (*entry)(void**);
  void** arguments;
  unsigned grid, block;
  size_t shared;
  uint64_t seed;
  int checked, arrays;
  const Range* ranges;
};

extern "C" __attribute__((visibility("default"))) int emulator_launch(const Launch* l, char* text, size_t text_bytes) {
  message = text, message_bytes = text_bytes, failed = false;
  entry = l->entry, arguments = l->arguments, random_state = l->seed * 0x9e3779b97f4a7c15ull + 88172645463325252ull;
  gridDim = {l->grid, 1, 1}, blockDim = {l->block, 1, 1};
  threads.resize(l->block), meetings.resize(l->block / LANES);
  const size_t need = l->block * (STACK + GUARD);
  if (need > stacks_bytes) {
    stacks = (char*)mmap(nullptr, need, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks_bytes = need;
    for (unsigned i = 0; i < l->block; ++i) mprotect(stacks + i * (STACK + GUARD), GUARD, PROT_NONE);
  }
  std::vector<unsigned char> room(l->shared + 128);
  shared = room.data() + (-(uintptr_t)room.data() & 127);
  memory::start(l->checked, std::vector<Range>(l->ranges, l->ranges + l->arrays), (char*)shared, l->shared);
  std::vector<unsigned> order(l->grid);
  for (unsigned i = 0; i < l->grid; ++i) order[i] = i;
  for (unsigned i = l->grid; i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  for (unsigned i = 0; i < l->grid && !failed; ++i) {
    blockIdx = {order[i], 0, 0};
    memory::next_block(order[i]);
    run_block(l->shared);
  }
  memory::stop();
  return failed;
}
}  // namespace emulator
