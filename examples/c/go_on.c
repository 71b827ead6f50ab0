/* A rank is killed in the middle of the work, and the survivors continue without it.
 *
 *   cc -std=c99 go_on.c $(pkg-config --cflags --libs kolo) -o go_on && ./go_on
 */
#define _POSIX_C_SOURCE 200809L
#include <kolo.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 3, STEPS = 6 };

static int failed(void) {
  kolo_error_t error = KOLO_ERROR_INITIALIZER;
  kolo_last_error(NULL, &error);
  fprintf(stderr, "%s\n", error.message);
  return 1;
}

static int work(int rank, const char *store) {
  kolo_comm_t comm;
  if (kolo_comm_init_store(&comm, RANKS, store, rank, NULL) != KOLO_OK) return failed();
  int32_t step = 0, sum = 0, left = 0;
  while (step < STEPS) {
    if (rank == 1 && step == 3) raise(SIGKILL);
    sum = 1;
    if (kolo_all_reduce(&sum, &sum, 1, KOLO_INT32, KOLO_SUM, comm, NULL) == KOLO_OK) {
      step++;
      continue;
    }
    kolo_error_t error = KOLO_ERROR_INITIALIZER;
    kolo_last_error(comm, &error);
    printf("rank %d: step %d: %s\n", rank, step, error.message);
    /* A wrong call of this rank, which would also fail on a new communicator. */
    if (error.usable) return 1;
    kolo_comm_t fewer;
    if (kolo_comm_shrink(comm, &fewer) != KOLO_OK) return failed();
    kolo_comm_destroy(comm);
    comm = fewer;
    /* One rank may have completed a step that failed on another. Continue with the first step that not
     * all ranks have completed. */
    if (kolo_all_reduce(&step, &step, 1, KOLO_INT32, KOLO_MIN, comm, NULL) != KOLO_OK) return failed();
  }
  kolo_comm_count(comm, &left);
  printf("rank %d: %d ranks are left, the last sum is %d\n", rank, left, sum);
  kolo_comm_destroy(comm);
  return 0;
}

int main(void) {
  char store[] = "file:///tmp/kolo-go-on-XXXXXX";
  if (mkstemp(store + 7) < 0) return 1;
  for (int rank = 0; rank < RANKS; rank++) {
    if (fork() == 0) return work(rank, store);
  }
  int went_on = 0, status;
  while (wait(&status) > 0) went_on += status == 0;
  unlink(store + 7);
  return went_on != RANKS - 1;
}
