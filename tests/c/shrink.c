/* The ranks that are left when one dies go on. For three ranks, of which rank 1 dies. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <unistd.h>

static kolo_comm_t world;

static void refused(void) {
  kolo_comm_t fewer = world;
  REFUSED(KOLO_ERR_HANDLE, "null", kolo_comm_shrink(NULL, &fewer));
  REFUSED(KOLO_ERR_ARGUMENT, "newcomm is null", kolo_comm_shrink(world, NULL));
  OK(kolo_group_start());
  REFUSED(KOLO_ERR_ARGUMENT, "in a group", kolo_comm_shrink(world, &fewer));
  CHECK(fewer == NULL);
  REFUSED(KOLO_ERR_ARGUMENT, "in a group", kolo_comm_grow(world, &fewer));
  REFUSED(KOLO_ERR_ARGUMENT, "none of them", kolo_group_end());
  REFUSED(KOLO_ERR_HANDLE, "null", kolo_comm_grow(NULL, &fewer));
  REFUSED(KOLO_ERR_ARGUMENT, "newcomm is null", kolo_comm_grow(world, NULL));
  /* No process waits. */
  fewer = world;
  OK(kolo_comm_grow(world, &fewer));
  CHECK(fewer == NULL);
  OK(kolo_barrier(world, NULL));
}

/* One step of a reducer of one parameter, whose gradient is 1. */
static kolo_result_t step(kolo_reducer_t reducer) {
  float gradient = 1;
  kolo_result_t result = kolo_reducer_begin(reducer);
  if (result == KOLO_OK) result = kolo_reducer_put(reducer, 0, &gradient, NULL);
  if (result == KOLO_OK) result = kolo_reducer_finish(reducer);
  return result;
}

int main(void) {
  const kolo_tensor_t parameter = {"a", NULL, 0, KOLO_FLOAT32, 0};
  kolo_comm_t fewer = NULL;
  kolo_reducer_t reducer;
  kolo_work_t work;
  kolo_error_t error = KOLO_ERROR_INITIALIZER;
  void *memory;
  int32_t *shared, value = 1, rank, count, i;
  OK(kolo_comm_init_env(&world, NULL));
  OK(kolo_comm_rank(world, &rank));
  OK(kolo_comm_count(world, &count));
  my_rank = rank;
  CHECK(count == 3);
  refused();
  OK(kolo_mem_alloc(&memory, 1000 * sizeof(int32_t), world));
  OK(kolo_reducer_create(&reducer, &parameter, 1, NULL, 0, NULL, world));
  OK(step(reducer));
  OK(kolo_barrier(world, NULL));
  if (my_rank == 1) _exit(0);

  OK(kolo_start_all_reduce(&value, &value, 1, KOLO_INT32, KOLO_SUM, world, NULL, &work));
  CHECK(kolo_barrier(world, NULL) != KOLO_OK);
  OK(kolo_last_error(world, &error));
  CHECK(error.usable == 0 && error.rank == 1);
  CHECK(step(reducer) != KOLO_OK);
  OK(kolo_comm_shrink(world, &fewer));
  CHECK(fewer != NULL && fewer != world);
  OK(kolo_comm_rank(fewer, &rank));
  OK(kolo_comm_count(fewer, &count));
  CHECK(count == 2 && rank == my_rank / 2);

  /* What was begun has failed, and the old communicator is still a handle. */
  CHECK(kolo_work_wait(work) != KOLO_OK);
  value = 1;
  OK(kolo_work_destroy(work));
  REFUSED(KOLO_ERR_REVOKED, "", kolo_barrier(world, NULL));
  OK(kolo_reducer_destroy(reducer));
  OK(kolo_comm_destroy(world));

  /* The new one works, also on memory of the old one, and with a reducer of its own. */
  OK(kolo_all_reduce(&value, &value, 1, KOLO_INT32, KOLO_SUM, fewer, NULL));
  CHECK(value == 2);
  shared = (int32_t *)memory;
  for (i = 0; i < 1000; i++) shared[i] = i + rank;
  OK(kolo_all_reduce(shared, shared, 1000, KOLO_INT32, KOLO_SUM, fewer, NULL));
  for (i = 0; i < 1000; i++) CHECK(shared[i] == 2 * i + 1);
  OK(kolo_mem_free(memory));
  OK(kolo_reducer_create(&reducer, &parameter, 1, NULL, 0, NULL, fewer));
  OK(step(reducer));
  OK(kolo_reducer_destroy(reducer));

  /* Nobody is missing: all go on. */
  OK(kolo_comm_shrink(fewer, &world));
  OK(kolo_comm_destroy(fewer));
  OK(kolo_barrier(world, NULL));
  OK(kolo_comm_destroy(world));
  printf("rank %d goes on\n", my_rank);
  return 0;
}
