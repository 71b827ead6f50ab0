/* Registered buffers: memory that the ranks of a host share, which an all-reduce uses in place.
 *
 *   cc -std=c99 registered.c $(pkg-config --cflags --libs kolo) -o registered && kolo run -n 4 -- ./registered
 */
#include <kolo.h>
#include <stdio.h>
#include <stdlib.h>

static void check(kolo_result_t result) {
  if (result == KOLO_OK) return;
  kolo_error_t error = KOLO_ERROR_INITIALIZER;
  kolo_last_error(NULL, &error);
  fprintf(stderr, "%s\n", error.message);
  exit(1);
}

int main(void) {
  kolo_comm_t comm;
  int32_t rank, nranks;
  check(kolo_comm_init_env(&comm, NULL));
  check(kolo_comm_rank(comm, &rank));
  check(kolo_comm_count(comm, &nranks));

  /* Allocating is a collective call. The memory starts as zeros. */
  size_t count = 1 << 20;
  void *memory;
  check(kolo_mem_alloc(&memory, count * sizeof(float), comm));
  float *weights = (float *)memory;
  for (size_t i = 0; i < count; i++) weights[i] = 1;

  check(kolo_all_reduce(weights, weights, count, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  printf("rank %d: %g, of %d ranks\n", rank, weights[count - 1], nranks);

  check(kolo_mem_free(memory));
  check(kolo_comm_destroy(comm));
  return 0;
}
