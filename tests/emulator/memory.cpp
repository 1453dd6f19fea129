// Judges every access to memory in checked mode: bounds, alignment, initialisation, and races by happens-before clocks.
//
// The kernel is compiled with -fsanitize=thread but not linked to its library: the calls that the compiler puts before each
// access come here. Likewise -fsanitize=signed-integer-overflow and others, whose handlers are at the end.
// What it keeps: for every 2 bytes the last write and, since then, the last reads by two different warps.
#include "runtime.h"
#include <sys/mman.h>

extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));

namespace emulator::memory {
namespace {
constexpr size_t GRAIN = 2;
const char* const VERB[] = {"read", "write"};

struct Event { uint16_t thread; uint32_t clock, block; };  // block: its number + 1, 0 for none
struct Cell { uint32_t epoch; Event write, reads[2]; bool initialised, flying; };
struct Region { Range range; bool shared; Cell* cells; size_t bytes; };

bool checked, running;
std::vector<Region> regions;
uint32_t epoch, block;
// A thread's time, which every meeting moves on; and for every thread the time of each other that is known to be past:
// of its whole block since the last barrier, and of its warp since the last __syncwarp.
std::vector<uint32_t> clocks, past_block, past_warp;

bool is_past(const Event& e) {
  if (e.thread == current) return true;
  if (e.thread / LANES == current / LANES) return past_warp[current * LANES + e.thread % LANES] >= e.clock;
  return past_block[e.thread] >= e.clock;
}

Region* find(const char* p) {
  for (Region& r : regions)
    if (p >= r.range.begin && p < r.range.end) return &r;
  return nullptr;
}

void race(const Region& r, size_t i, Access how, const Event& other, const char* verb, const void* pc, const char* what) {
  if (other.block != block)
    fail("race between blocks on byte %zu of %s: a %s here, a %s by block %u (%s) pc=%p", i * GRAIN, r.range.name, VERB[how], verb, other.block - 1, what, pc);
  fail("race on byte %zu of %s: a %s here, unordered with the %s by thread %u (%s) pc=%p", i * GRAIN, r.range.name, VERB[how], verb, other.thread, what, pc);
}

void judge(Region& r, size_t i, Access how, const void* pc, const char* what) {
  Cell& c = r.cells[i];
  if (r.shared && c.epoch != epoch) c = Cell{epoch, {}, {}, false, false};
  if (c.flying) fail("%s of byte %zu of %s while a cp.async to it is in flight (%s) pc=%p", VERB[how], i * GRAIN, r.range.name, what, pc);
  const auto orders = [&](const Event& e) { return !e.block || (e.block == block && is_past(e)); };
  if (!orders(c.write)) race(r, i, how, c.write, "write", pc, what);
  const Event now{(uint16_t)current, clocks[current], block};
  if (how == READ) {
    if (!c.initialised && (r.shared || r.range.uninitialised)) fail("read of byte %zu of %s, never written (%s) pc=%p", i * GRAIN, r.range.name, what, pc);
    const bool second = c.reads[0].block && c.reads[0].thread / LANES != current / LANES;
    c.reads[second] = now;
    return;
  }
  for (const Event& e : c.reads)
    if (!orders(e)) race(r, i, how, e, "read", pc, what);
  c.write = now, c.initialised = true, c.reads[0] = c.reads[1] = Event{};
}
}  // namespace

void start(bool with_checks, const std::vector<Range>& arrays, char* shared, size_t bytes) {
  checked = with_checks;
  regions.clear();
  regions.push_back({{shared, shared + bytes, true, true, "shared memory"}, true, nullptr, 0});
  for (const Range& a : arrays) regions.push_back({a, false, nullptr, 0});
  if (!checked) return;
  for (Region& r : regions) {
    r.bytes = ((r.range.end - r.range.begin) / GRAIN + 2) * sizeof(Cell);
    r.cells = (Cell*)mmap(nullptr, r.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
}

void stop() {
  running = false;
  for (Region& r : regions)
    if (r.cells) munmap(r.cells, r.bytes);
  regions.clear();
}

void next_block(unsigned number) {
  block = number + 1, ++epoch, running = checked;
  clocks.assign(threads.size(), 1), past_block.assign(threads.size(), 0), past_warp.assign(threads.size() * LANES, 0);
}

void joined_block() {
  if (!checked) return;
  past_block = clocks;
  for (unsigned t = 0; t < threads.size(); ++t)
    for (unsigned l = 0; l < LANES; ++l) past_warp[t * LANES + l] = clocks[t / LANES * LANES + l];
  for (uint32_t& c : clocks) ++c;
}

void joined_warp(unsigned first) {
  if (!checked) return;
  for (unsigned t = first; t < first + LANES; ++t)
    for (unsigned l = 0; l < LANES; ++l) past_warp[t * LANES + l] = clocks[first + l];
  for (unsigned t = first; t < first + LANES; ++t) ++clocks[t];
}

bool is_shared(const void* p, size_t n) {
  const Range& s = regions[0].range;
  return (const char*)p >= s.begin && (const char*)p + n <= s.end;
}

void in_flight(char* p, size_t n, bool begins) {
  if (!checked) return;
  Region& r = regions[0];
  for (size_t i = (p - r.range.begin) / GRAIN; i < (p + n - r.range.begin) / GRAIN; ++i) {
    r.cells[i].flying = begins;
    r.cells[i].write = {(uint16_t)current, clocks[current], block};
  }
}

void access(const void* at, size_t n, Access how, const void* pc, const char* what) {
  if (!running) return;
  const char* p = (const char*)at;
  Region* r = find(p);
  if (!r) {
    // A fiber's own stack, or a constant of the program; anything else is nobody's.
    if (on_own_stack(p) || (p >= __ehdr_start && p < _end && how == READ)) return;
    const Region* nearest = nullptr;
    ptrdiff_t distance = 0;
    for (const Region& x : regions) {
      const ptrdiff_t d = p < x.range.begin ? p - x.range.begin : p - x.range.end + 1;
      if (!nearest || std::abs(d) < std::abs(distance)) nearest = &x, distance = d;
    }
    fail("out-of-bounds %s of %zu bytes, %td %s %s (%s) pc=%p", VERB[how], n, std::abs(distance),
         distance < 0 ? "before the start of" : "past the end of", nearest->range.name, what, pc);
  }
  if (p + n > r->range.end) fail("%s of %zu bytes runs past the end of %s (%s) pc=%p", VERB[how], n, r->range.name, what, pc);
  if (how == WRITE && !r->range.writable) fail("write to %s, which is const (%s) pc=%p", r->range.name, what, pc);
  if (n <= 16 && (uintptr_t)p % n) fail("misaligned %s of %zu bytes at byte %td of %s (%s) pc=%p", VERB[how], n, p - r->range.begin, r->range.name, what, pc);
  for (size_t i = (p - r->range.begin) / GRAIN; i < (p + n - r->range.begin + GRAIN - 1) / GRAIN; ++i) judge(*r, i, how, pc, what);
}
}  // namespace emulator::memory

// ------------------------------------------------------------------------------------------ what the compiler calls

extern "C" {
#define PC __builtin_return_address(0)
#define HOOK(n)                                                                                                      \
  void __tsan_read##n(void* p) { emulator::memory::access(p, n, emulator::READ, PC, "load"); }                       \
  void __tsan_write##n(void* p) { emulator::memory::access(p, n, emulator::WRITE, PC, "store"); }                    \
  void __tsan_unaligned_read##n(void* p) { emulator::memory::access(p, n, emulator::READ, PC, "load"); }             \
  void __tsan_unaligned_write##n(void* p) { emulator::memory::access(p, n, emulator::WRITE, PC, "store"); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
void __tsan_read_range(void* p, size_t n) { emulator::memory::access(p, n, emulator::READ, PC, "load"); }
void __tsan_write_range(void* p, size_t n) { emulator::memory::access(p, n, emulator::WRITE, PC, "store"); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

struct Source { const char* file; uint32_t line, column; };
#define TRAP(name, words) \
  void __ubsan_handle_##name(Source* s, ...) { emulator::fail(words " at %s:%u", s->file, s->line); }
TRAP(add_overflow, "signed overflow of +") TRAP(sub_overflow, "signed overflow of -") TRAP(mul_overflow, "signed overflow of *")
TRAP(negate_overflow, "signed overflow of -") TRAP(divrem_overflow, "division by zero") TRAP(shift_out_of_bounds, "shift out of bounds")
TRAP(out_of_bounds, "array index out of bounds")
}
