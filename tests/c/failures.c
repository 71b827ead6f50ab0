/* What other ranks do wrong is an error that says who it was; what is under way can be given up. For two ranks. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static kolo_comm_t world;

/* A communicator that may come to an end. */
static kolo_comm_t another(void) {
  kolo_comm_t comm;
  OK(kolo_comm_split(world, 0, 0, &comm));
  return comm;
}

static void ranks_disagree(void) {
  kolo_comm_t comm = another();
  double a = 1;
  kolo_result_t result, ended;
  int32_t saw_both;
  kolo_error_t error;
  result = kolo_all_reduce(&a, &a, 1, my_rank == 0 ? KOLO_FLOAT64 : KOLO_INT64, KOLO_SUM, comm, NULL);
  CHECK(result == KOLO_ERR_MISMATCH || result == KOLO_ERR_PEER);
  error = last_error(comm);
  /* Both ranks name the same one: of two calls that are equally frequent, the one of the lower rank counts. */
  CHECK(error.code == result && error.usable == 0 && error.rank == 1 && error.op == KOLO_OP_ALL_REDUCE);
  CHECK(error.seq == 1 && (error.rank == my_rank || strlen(error.host) > 0));
  CHECK(a == 1);
  OK(kolo_comm_get_async_error(comm, &ended));
  CHECK(ended == result);
  REFUSED(KOLO_ERR_REVOKED, "revoked", kolo_barrier(comm, NULL));
  CHECK(last_error(comm).rank == 1);
  saw_both = result == KOLO_ERR_MISMATCH && strstr(error.message, "f64") != NULL && strstr(error.message, "i64") != NULL;
  OK(kolo_comm_destroy(comm));
  OK(kolo_all_reduce(&saw_both, &saw_both, 1, KOLO_INT32, KOLO_MAX, world, NULL));
  CHECK(saw_both);
}

static void counts_differ(void) {
  kolo_comm_t comm = another();
  int32_t a[4] = {0};
  kolo_result_t result;
  if (my_rank == 0) {
    result = kolo_send(a, 2, KOLO_INT32, 1, comm, NULL);
    CHECK(result == KOLO_OK || result == KOLO_ERR_PEER || result == KOLO_ERR_MISMATCH);
  } else {
    result = kolo_recv(a, 3, KOLO_INT32, 0, comm, NULL);
    CHECK(result == KOLO_ERR_MISMATCH || result == KOLO_ERR_COUNTS);
    CHECK(last_error(comm).rank == 0);
  }
  OK(kolo_barrier(world, NULL));
  OK(kolo_comm_destroy(comm));
}

static void a_rank_leaves(void) {
  kolo_comm_t comm = another();
  kolo_error_t error;
  if (my_rank == 0) {
    CHECK(kolo_barrier(comm, NULL) == KOLO_ERR_PEER);
    error = last_error(comm);
    CHECK(error.cause == KOLO_CAUSE_LEFT && error.rank == 1 && error.op == KOLO_OP_BARRIER && error.pid != 0);
    CHECK(strlen(error.host) > 0 && strstr(error.message, "has left") != NULL);
  }
  OK(kolo_comm_destroy(comm));
}

/* Rank 1 does not come until rank 0 has given up waiting for it. The communicator has a deadline of its own. */
static void a_rank_is_silent(void) {
  kolo_comm_t comm;
  kolo_unique_id_t id;
  kolo_config_t config = KOLO_CONFIG_INITIALIZER;
  config.timeout_ms = 200;
  if (my_rank == 0) OK(kolo_get_unique_id(&id));
  OK(kolo_broadcast(&id, &id, sizeof id, KOLO_UINT8, 0, world, NULL));
  OK(kolo_comm_init_rank(&comm, 2, id, my_rank, &config));
  if (my_rank == 0) {
    kolo_error_t error;
    CHECK(kolo_barrier(comm, NULL) == KOLO_ERR_PEER);
    error = last_error(NULL);
    CHECK(error.cause == KOLO_CAUSE_ABSENT && error.rank == 1 && error.after_us >= 200000);
  }
  OK(kolo_barrier(world, NULL));
  if (my_rank == 1) CHECK(kolo_barrier(comm, NULL) == KOLO_ERR_PEER);
  OK(kolo_comm_destroy(comm));
}

/* As above, with a deadline that the calls of this thread have, the started ones, too, and those of others have not. */
static void a_rank_is_silent_in_one_call(int32_t is_started) {
  kolo_comm_t comm = another();
  if (my_rank == 0) {
    kolo_work_t work;
    kolo_error_t error;
    OK(kolo_call_timeout(200));
    if (is_started) {
      OK(kolo_start_barrier(comm, NULL, &work));
      OK(kolo_call_timeout(0));
    }
    CHECK((is_started ? kolo_work_wait(work) : kolo_barrier(comm, NULL)) == KOLO_ERR_PEER);
    OK(kolo_call_timeout(0));
    error = last_error(NULL);
    CHECK(error.cause == KOLO_CAUSE_ABSENT && error.rank == 1 && error.after_us >= 200000);
    if (is_started) OK(kolo_work_destroy(work));
  }
  OK(kolo_barrier(world, NULL));
  if (my_rank == 1) CHECK(kolo_barrier(comm, NULL) == KOLO_ERR_PEER);
  OK(kolo_comm_destroy(comm));
}

/* A call that rank 1 does not make. */
static void *blocked(void *comm) {
  kolo_result_t result = kolo_barrier((kolo_comm_t)comm, NULL);
  CHECK(result == KOLO_ERR_ABORTED || result == KOLO_ERR_REVOKED || result == KOLO_ERR_HANDLE);
  return NULL;
}

static void aborted(void) {
  kolo_comm_t comm = another();
  pthread_t thread;
  kolo_result_t ended;
  if (my_rank == 0) {
    CHECK(pthread_create(&thread, NULL, blocked, comm) == 0);
    OK(kolo_comm_abort(comm));
    CHECK(pthread_join(thread, NULL) == 0);
    OK(kolo_comm_get_async_error(comm, &ended));
    CHECK(ended == KOLO_ERR_ABORTED);
    OK(kolo_barrier(world, NULL));
  } else {
    OK(kolo_barrier(world, NULL));
    CHECK(kolo_barrier(comm, NULL) == KOLO_ERR_PEER);
    CHECK(last_error(comm).rank == 0 && last_error(comm).cause == KOLO_CAUSE_ABORTED);
    CHECK(last_error(comm).op == KOLO_OP_BARRIER && last_error(comm).seq > 0);
  }
  REFUSED(KOLO_ERR_REVOKED, "revoked", kolo_barrier(comm, NULL));
  OK(kolo_comm_destroy(comm));
}

/* Whoever destroys a communicator in use ends its calls first. */
static void destroyed_in_use(void) {
  kolo_comm_t comm = another();
  pthread_t thread;
  if (my_rank == 0) {
    CHECK(pthread_create(&thread, NULL, blocked, comm) == 0);
    OK(kolo_comm_destroy(comm));
    CHECK(pthread_join(thread, NULL) == 0);
    OK(kolo_barrier(world, NULL));
  } else {
    OK(kolo_barrier(world, NULL));
    OK(kolo_comm_destroy(comm));
  }
}

static void given_up(void) {
  kolo_comm_t comm = another();
  int32_t a = 0, done = -1;
  kolo_work_t work, later;
  if (my_rank == 0) {
    OK(kolo_start_recv(&a, 1, KOLO_INT32, 1, comm, NULL, &work));
    OK(kolo_start_barrier(comm, NULL, &later));
    CHECK(kolo_work_wait_timeout(work, 20) == KOLO_IN_PROGRESS);
    OK(kolo_work_test(work, &done));
    CHECK(done == 0);
    OK(kolo_work_cancel(work));
    REFUSED(KOLO_ERR_ABORTED, "was aborted", kolo_work_wait(work));
    REFUSED(KOLO_ERR_ABORTED, "was aborted", kolo_work_test(work, &done));
    CHECK(done == 1 && last_error(comm).op == KOLO_OP_RECV);
    CHECK(kolo_work_wait(later) == KOLO_ERR_REVOKED);
    OK(kolo_work_destroy(work));
  } else {
    CHECK(kolo_barrier(comm, NULL) != KOLO_OK);
    OK(kolo_start_barrier(comm, NULL, &later));
  }
  OK(kolo_comm_destroy(comm));
  /* A handle on an operation outlives the communicator. */
  CHECK(kolo_work_wait(later) == KOLO_ERR_REVOKED || kolo_work_wait(later) == KOLO_ERR_ABORTED);
  OK(kolo_work_cancel(later));
  OK(kolo_work_destroy(later));
  OK(kolo_barrier(world, NULL));
}

/* A child that frees what its parent has allocated leaves the parent's memory as it is. */
static void a_child_frees(void) {
  void *memory;
  int32_t *numbers, count;
  size_t i;
  pid_t child;
  int status;
  OK(kolo_comm_count(world, &count));
  OK(kolo_mem_alloc(&memory, 40000 * sizeof(int32_t), world));
  numbers = (int32_t *)memory;
  for (i = 0; i < 40000; i++) numbers[i] = 1;
  child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    /* It ends as another program: to valgrind, what the parent's other threads hold is lost in a child that exits. */
    if (kolo_mem_free(memory) == KOLO_OK) execlp("true", "true", (char *)NULL);
    _exit(1);
  }
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  OK(kolo_all_reduce(memory, memory, 40000, KOLO_INT32, KOLO_SUM, world, NULL));
  for (i = 0; i < 40000; i++) CHECK(numbers[i] == count);
  OK(kolo_mem_free(memory));
}

int main(void) {
  int32_t rank;
  OK(kolo_comm_init_env(&world, NULL));
  OK(kolo_comm_rank(world, &rank));
  my_rank = rank;
  ranks_disagree();
  counts_differ();
  a_rank_leaves();
  a_rank_is_silent();
  a_rank_is_silent_in_one_call(0);
  a_rank_is_silent_in_one_call(1);
  aborted();
  destroyed_in_use();
  given_up();
  a_child_frees();
  OK(kolo_comm_destroy(world));
  printf("rank %d: failures are errors\n", my_rank);
  return 0;
}
