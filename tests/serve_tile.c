/* The host tile behind a pipe, for a processor that is emulated. served.py speaks to it, in int64 but for memory itself:
 *
 *   asked     function, its arguments
 *   number    itself
 *   memory    bytes, whether it comes back, the bytes
 *   array     axes (-1: there is none), shape, strides, origin (where in its memory it points), memory
 *   others    bytes, the bytes, and the arrays whose addresses they begin with
 *   answered  result, the memory that comes back
 */
#include "tile.c"

#include <stdio.h>
#include <stdlib.h>

enum { PIECES = 32, AXES = 4 };
typedef struct { int64_t bytes, back; char *data; } piece;
static piece pieces[PIECES];
static description arrays[PIECES];
static intptr_t sizes[PIECES][2 * AXES];
static int number_of_pieces, number_of_arrays;

static void get(void *to, int64_t bytes) { if (fread(to, 1, bytes, stdin) != (size_t)bytes) exit(0); }
static void put(const void *from, int64_t bytes) { if (fwrite(from, 1, bytes, stdout) != (size_t)bytes) exit(1); }
static int64_t number(void) { int64_t n; get(&n, sizeof n); return n; }

static char *memory(void) {
  piece *p = &pieces[number_of_pieces++];
  p->bytes = number(), p->back = number();
  p->data = aligned_alloc(64, round_up(p->bytes + 1, 64));
  get(p->data, p->bytes);
  return p->data;
}

static const description *an_array(void) {
  const int64_t axes = number();
  if (axes < 0) return NULL;
  intptr_t *shape = sizes[number_of_arrays];
  for (int64_t i = 0; i < 2 * axes; i++) shape[i] = number();
  const int64_t origin = number();
  description *x = &arrays[number_of_arrays++];
  *x = (description){.axes = (int)axes, .shape = shape, .strides = shape + axes, .data = memory() + origin};
  return x;
}

/* A structure that begins with the addresses of some arrays. */
static void *structure(void *to, int arrays_in_it) {
  get(to, number());
  for (int i = 0; i < arrays_in_it; i++) {
    const description *x = an_array();
    memcpy((char *)to + i * sizeof x, &x, sizeof x);
  }
  return to;
}

int main(void) {
  for (;;) {
    request r;
    part p;
    described_place into;
    described_partial other;
    char *space;
    int64_t result = 0, a;
    number_of_pieces = number_of_arrays = 0;
    switch (number()) {
      case 0: structure(&r, 13), space = memory(), structure(&p, 0), forward(&r, space, &p, structure(&into, 3)); break;
      case 1: structure(&r, 13), space = memory(), backward(&r, space, structure(&p, 0)); break;
      case 2: structure(&into, 3), structure(&other, 3), merge(&into, &other, (int)number()); break;
      case 3: {
        const description *lse = (structure(&other, 3), an_array());
        finish(&other, lse, (int)number());
        break;
      }
      case 4: {
        const description *dout = an_array(), *out = an_array(), *sums = an_array();
        delta(dout, out, sums, (int)number());
        break;
      }
      case 5: structure(&r, 13), result = forward_space_of(&r, structure(&p, 0)); break;
      case 6: structure(&r, 13), result = backward_space_of(&r, structure(&p, 0)); break;
      case 7: result = strips(number()); break;
      case 8: a = number(), result = strip_row(a, number()); break;
      case 9: result = block_of_keys(number()); break;
      case 10: result = constant(number()); break;
    }
    put(&result, sizeof result);
    for (int i = 0; i < number_of_pieces; i++) {
      if (pieces[i].back) put(pieces[i].data, pieces[i].bytes);
      free(pieces[i].data);
    }
    fflush(stdout);
  }
}
