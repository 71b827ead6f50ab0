/* The fields of an error. Rank 1 ends without a goodbye. The error on each other rank names rank 1, its
 * host and the operation.
 *
 *   cc -std=c99 errors.c $(pkg-config --cflags --libs kolo) -o errors && kolo run -n 3 -- ./errors
 */
#include <kolo.h>
#include <stdio.h>

int main(void) {
  kolo_comm_t comm;
  kolo_error_t error = KOLO_ERROR_INITIALIZER;
  kolo_config_t config = KOLO_CONFIG_INITIALIZER;
  config.timeout_ms = 10000;
  if (kolo_comm_init_env(&comm, &config) != KOLO_OK) {
    kolo_last_error(NULL, &error);
    fprintf(stderr, "%s\n", error.message);
    return 1;
  }
  int32_t rank;
  kolo_comm_rank(comm, &rank);

  /* A wrong argument is an error before anything is sent, and changes nothing. */
  double value = rank;
  kolo_all_reduce(&value, &value, (size_t)-1, KOLO_FLOAT64, KOLO_SUM, comm, NULL);
  kolo_last_error(comm, &error);
  printf("rank %d: %s (usable: %d)\n", rank, error.message, error.usable);

  if (rank != 1) {
    kolo_result_t result;
    /* Without a rank 1, nothing fails. */
    while ((result = kolo_barrier(comm, NULL)) == KOLO_OK) {
      int32_t nranks;
      kolo_comm_count(comm, &nranks);
      if (nranks < 2) break;
    }
    if (result != KOLO_OK) {
      kolo_last_error(comm, &error);
      printf("rank %d: rank %d on %s is at fault (cause %d) in operation %d, seq %llu: %s\n", rank, error.rank, error.host,
             error.cause, error.op, (unsigned long long)error.seq, error.message);
    }
  }
  kolo_comm_destroy(comm);
  return 0;
}
