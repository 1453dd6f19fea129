/* The host tile behind a pipe, for a processor that is emulated. served.py speaks to it:
 *
 *   request   int64 function, int64 bytes of the structure, the structure, int64 pieces of memory,
 *             and for each int64 offset of its pointer in the structure, int64 origin (where in the piece the pointer points),
 *             int64 bytes, int64 whether it comes back, the bytes
 *   answer    int64 result, the pieces that come back
 */
#include "tile.c"

#include <stdio.h>
#include <stdlib.h>

enum { PIECES = 32 };
typedef struct { int64_t at, origin, bytes, back; char *data; } piece;

static void get(void *to, int64_t bytes) { if (fread(to, 1, bytes, stdin) != (size_t)bytes) exit(0); }
static void put(const void *from, int64_t bytes) { if (fwrite(from, 1, bytes, stdout) != (size_t)bytes) exit(1); }
static int64_t number(void) { int64_t n; get(&n, sizeof n); return n; }

int main(void) {
  for (;;) {
    static char given[4096] __attribute__((aligned(64)));
    const int64_t function = number();
    get(given, number());
    piece p[PIECES];
    const int64_t pieces = number();
    for (int64_t i = 0; i < pieces; i++) {
      get(&p[i], 4 * sizeof(int64_t));
      p[i].data = aligned_alloc(64, round_up(p[i].bytes + 1, 64));
      get(p[i].data, p[i].bytes);
      char *pointer = p[i].data + p[i].origin;
      memcpy(given + p[i].at, &pointer, sizeof pointer);
    }
    int64_t result = 0, *numbers = (int64_t *)given;
    switch (function) {
      case 0: forward((call *)given); break;
      case 1: backward((call *)given); break;
      case 2: merge((merging *)given); break;
      case 3: finish((finishing *)given); break;
      case 4: delta((dotting *)given); break;
      case 5: result = forward_space_of((call *)given); break;
      case 6: result = backward_space_of((call *)given); break;
      case 7: result = strips(numbers[0]); break;
      case 8: result = strip_row(numbers[0], numbers[1]); break;
      case 9: result = block_of_keys(numbers[0]); break;
      case 10: result = constant(numbers[0]); break;
    }
    put(&result, sizeof result);
    for (int64_t i = 0; i < pieces; i++) {
      if (p[i].back) put(p[i].data, p[i].bytes);
      free(p[i].data);
    }
    fflush(stdout);
  }
}
