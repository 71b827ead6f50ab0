/* A program that starts its ranks itself, as with NCCL: one process makes a unique id and gives it to the
 * others, here through pipes.
 *
 *   cc -std=c99 unique_id.c $(pkg-config --cflags --libs kolo) -o unique_id && ./unique_id 4
 */
#define _POSIX_C_SOURCE 200809L
#include <kolo.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(call) \
  do { \
    if ((call) != KOLO_OK) { \
      kolo_error_t error = KOLO_ERROR_INITIALIZER; \
      kolo_last_error(NULL, &error); \
      fprintf(stderr, "%s\n", error.message); \
      exit(1); \
    } \
  } while (0)

static void work(int rank, int nranks, kolo_unique_id_t id) {
  kolo_comm_t comm;
  CHECK(kolo_comm_init_rank(&comm, nranks, id, rank, NULL));

  /* Operations that progress while this rank computes. */
  double sums[3] = {1.0, (double)rank, 2.0 * rank};
  kolo_work_t work;
  CHECK(kolo_start_all_reduce(sums, sums, 3, KOLO_FLOAT64, KOLO_SUM, comm, NULL, &work));
  CHECK(kolo_work_wait(work));
  CHECK(kolo_work_destroy(work));

  /* All ranks send to the next rank at once. */
  int32_t token = rank, received = -1;
  if (nranks > 1) {
    CHECK(kolo_group_start());
    CHECK(kolo_send(&token, 1, KOLO_INT32, (rank + 1) % nranks, comm, NULL));
    CHECK(kolo_recv(&received, 1, KOLO_INT32, (rank + nranks - 1) % nranks, comm, NULL));
    CHECK(kolo_group_end());
  }
  printf("rank %d of %d: sums %g %g %g, a token from rank %d\n", rank, nranks, sums[0], sums[1], sums[2], received);
  CHECK(kolo_comm_destroy(comm));
}

int main(int argc, char **argv) {
  int nranks = argc > 1 ? atoi(argv[1]) : 2;
  int pipes[64][2];
  if (nranks < 1 || nranks > 64) return 2;
  /* Start the processes first: a fork does not copy threads, and kolo has some. */
  for (int rank = 1; rank < nranks; rank++) {
    if (pipe(pipes[rank]) != 0) return 1;
    if (fork() == 0) {
      kolo_unique_id_t id;
      if (read(pipes[rank][0], &id, sizeof id) != (ssize_t)sizeof id) return 1;
      work(rank, nranks, id);
      return 0;
    }
  }
  kolo_unique_id_t id;
  CHECK(kolo_get_unique_id(&id));
  for (int rank = 1; rank < nranks; rank++) {
    if (write(pipes[rank][1], &id, sizeof id) != (ssize_t)sizeof id) return 1;
  }
  work(0, nranks, id);
  int failed = 0, status;
  while (wait(&status) > 0) failed |= status;
  return failed != 0;
}
