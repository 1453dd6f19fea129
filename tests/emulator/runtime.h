// What the parts of the emulator know of each other. None of them is compiled with the sanitizers.
#pragma once
#include "emulated.h"
#include <vector>

namespace emulator {
constexpr unsigned LANES = 32;

struct Copy { char* to; const char* from; bool real; };
struct Thread {
  enum State { READY, AT_BARRIER, IN_WARP, DONE } state;
  void* stack;
  uint3 index;
  Place at;
  bool vote;
  std::vector<Copy> open, committed;
};
extern std::vector<Thread> threads;
extern unsigned current;  // which of them runs

bool on_own_stack(const void* p);

// Ends the launch with a message; the kernel is not returned to.
[[noreturn]] void fail(const char* format, ...);

// Meeting of a warp: when its 32 lanes have come with the same operation from the same place, `work` sees what each brought.
using Work = void (*)(void** brought, const void* common);
void meet(const char* operation, void* mine, Work work, const void* common, Place at);

// A launch's memory: the block's shared memory and the arrays the kernel was given.
struct Range { char *begin, *end; bool writable, uninitialised; char name[32]; };
enum Access { READ, WRITE };
namespace memory {
void start(bool checked, const std::vector<Range>& arrays, char* shared, size_t bytes);
void stop();
void next_block(unsigned block);
void joined_block();               // all threads have met: what each did is before what each does next
void joined_warp(unsigned first);  // the same for a warp's lanes
void access(const void* p, size_t n, Access how, const void* pc, const char* what);
void in_flight(char* p, size_t n, bool begins);
bool is_shared(const void* p, size_t n);
}  // namespace memory
}  // namespace emulator
