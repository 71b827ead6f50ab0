/* A process joins two ranks, and all three go on. Rank 0 starts it with this program's path. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

/* What all three do with the larger communicator. The newcomer learns the step from rank 0. */
static void go_on(kolo_comm_t larger, int32_t step) {
  int32_t rank, count, sum, all[3];
  OK(kolo_comm_rank(larger, &rank));
  OK(kolo_comm_count(larger, &count));
  CHECK(count == 3 && (my_rank < 0 ? rank == 2 : rank == my_rank));
  my_rank = rank;
  OK(kolo_broadcast(&step, &step, 1, KOLO_INT32, 0, larger, NULL));
  CHECK(step > 0);
  sum = rank + 1;
  OK(kolo_all_reduce(&sum, &sum, 1, KOLO_INT32, KOLO_SUM, larger, NULL));
  CHECK(sum == 6);
  OK(kolo_all_gather(&rank, all, 1, KOLO_INT32, larger, NULL));
  CHECK(all[0] == 0 && all[1] == 1 && all[2] == 2);
  OK(kolo_comm_destroy(larger));
  printf("rank %d of three goes on\n", rank);
}

static void be_newcomer(void) {
  kolo_config_t config = KOLO_CONFIG_INITIALIZER;
  kolo_comm_t comm;
  config.join = 1;
  OK(kolo_comm_init_env(&comm, &config));
  go_on(comm, 0);
}

int main(int argc, char **argv) {
  kolo_comm_t two, larger = NULL;
  pid_t newcomer = -1;
  int32_t step = 0;
  int status;
  if (argc > 1) {
    be_newcomer();
    return 0;
  }
  OK(kolo_comm_init_env(&two, NULL));
  OK(kolo_comm_rank(two, &my_rank));
  if (my_rank == 0) {
    newcomer = fork();
    CHECK(newcomer >= 0);
    if (newcomer == 0) {
      execl(argv[0], argv[0], "newcomer", (char *)NULL);
      _exit(1);
    }
  }
  /* As a program that looks for newcomers after each step. */
  while (larger == NULL) {
    OK(kolo_comm_grow(two, &larger));
    OK(kolo_barrier(two, NULL));
    step++;
    if (larger == NULL && my_rank == 0) CHECK(waitpid(newcomer, &status, WNOHANG) == 0);
  }
  OK(kolo_comm_destroy(two));
  go_on(larger, my_rank == 0 ? step : 0);
  if (my_rank == 0) CHECK(waitpid(newcomer, &status, 0) == newcomer && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return 0;
}
