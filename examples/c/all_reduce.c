/* All ranks get the average of their gradients.
 *
 *   cc -std=c99 all_reduce.c $(pkg-config --cflags --libs kolo) -o all_reduce && kolo run -n 4 -- ./all_reduce
 */
#include <kolo.h>
#include <stdio.h>

int main(void) {
  kolo_comm_t comm;
  if (kolo_comm_init_env(&comm, NULL) != KOLO_OK) {
    kolo_error_t error = KOLO_ERROR_INITIALIZER;
    kolo_last_error(NULL, &error);
    fprintf(stderr, "%s\n", error.message);
    return 1;
  }
  int32_t rank;
  kolo_comm_rank(comm, &rank);

  float gradients[1000];
  for (int i = 0; i < 1000; i++) gradients[i] = (float)rank;
  kolo_result_t result = kolo_all_reduce(gradients, gradients, 1000, KOLO_FLOAT32, KOLO_AVG, comm, NULL);
  printf("rank %d: %s, %g\n", rank, kolo_error_string(result), gradients[999]);

  kolo_comm_destroy(comm);
  return result != KOLO_OK;
}
