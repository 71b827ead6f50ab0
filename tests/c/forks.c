/* Forks of a process of the parallel program: its handlers may call the library, another thread may call it under a lock that the
   program keeps over the fork, and the child meets nothing that waits for threads of its parent. Two ranks. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static kolo_comm_t world;

/* ---- Handlers of a fork ---- */

static void *in_handlers[3];
static int handled;
static void *shared_memory(void) {
  void *memory;
  OK(kolo_mem_alloc(&memory, 64, world));
  return memory;
}
static void handle(int which) {
  if (in_handlers[which] != NULL && kolo_mem_free(in_handlers[which]) == KOLO_OK) handled++;
  in_handlers[which] = NULL;
}
static void before(void) { handle(0); }
static void in_parent(void) { handle(1); }
static void in_child(void) { handle(2); }

/* ---- A lock that is kept over a fork ---- */

static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;
static volatile int keeps, is_over;
static void keep(void) {
  if (keeps) pthread_mutex_lock(&table);
}
static void give_back(void) {
  if (keeps) pthread_mutex_unlock(&table);
}
static void *works(void *none) {
  while (!is_over) {
    kolo_work_t work;
    float value = 1;
    pthread_mutex_lock(&table);
    /* An operation that nobody else takes part in. */
    OK(kolo_start_send(&value, 1, KOLO_FLOAT32, 1, world, NULL, &work));
    OK(kolo_work_wait(work));
    OK(kolo_work_destroy(work));
    pthread_mutex_unlock(&table);
    sched_yield();
  }
  return none;
}

/* The child's exit status is what `act` returns. It ends as another program, since a child that exits has lost what its parent's
   threads hold. */
static void fork_and(int (*act)(void)) {
  int status;
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);
    if (act() == 0) execlp("true", "true", (char *)NULL);
    _exit(1);
  }
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static int nothing(void) { return 0; }
static int has_handled_all(void) { return handled == 2 ? 0 : 1; }

static kolo_work_t in_flight;
static int refuses_a_wait(void) {
  return kolo_work_wait(in_flight) == KOLO_ERR_FORKED && kolo_work_destroy(in_flight) == KOLO_OK ? 0 : 1;
}

static kolo_reducer_t reducer;
static int refuses_a_step(void) {
  return kolo_reducer_begin(reducer) == KOLO_ERR_FORKED && kolo_reducer_finish(reducer) == KOLO_ERR_FORKED &&
                 kolo_reducer_destroy(reducer) == KOLO_OK
             ? 0
             : 1;
}

int main(void) {
  int32_t rank, i;
  pthread_t worker;
  float value = 0;
  alarm(300);
  /* Before the library is used, and beside its own. */
  CHECK(pthread_atfork(before, in_parent, in_child) == 0);
  CHECK(pthread_atfork(keep, give_back, give_back) == 0);
  OK(kolo_comm_init_env(&world, NULL));
  OK(kolo_comm_rank(world, &rank));
  my_rank = rank;

  for (i = 0; i < 3; i++) in_handlers[i] = shared_memory();
  fork_and(has_handled_all);
  CHECK(handled == 2);

  if (rank == 0) {
    keeps = 1;
    CHECK(pthread_create(&worker, NULL, works, NULL) == 0);
    for (i = 0; i < 20; i++) fork_and(nothing);
    keeps = 0;
    is_over = 1;
    CHECK(pthread_join(worker, NULL) == 0);
    value = -1;
    OK(kolo_send(&value, 1, KOLO_FLOAT32, 1, world, NULL));
  } else {
    while (value >= 0) OK(kolo_recv(&value, 1, KOLO_FLOAT32, 0, world, NULL));
  }

  OK(kolo_start_recv(&value, 1, KOLO_FLOAT32, 1 - rank, world, NULL, &in_flight));
  fork_and(refuses_a_wait);
  OK(kolo_send(&value, 1, KOLO_FLOAT32, 1 - rank, world, NULL));
  OK(kolo_work_wait(in_flight));
  OK(kolo_work_destroy(in_flight));

  {
    size_t shape[] = {1000};
    kolo_tensor_t parameter;
    memset(&parameter, 0, sizeof parameter);
    parameter.name = "weight";
    parameter.dtype = KOLO_FLOAT32;
    parameter.shape = shape;
    parameter.ndim = 1;
    OK(kolo_reducer_create(&reducer, &parameter, 1, NULL, 0, NULL, world));
    fork_and(refuses_a_step);
    OK(kolo_reducer_destroy(reducer));
  }
  OK(kolo_comm_destroy(world));
  printf("rank %d: forks do no harm\n", rank);
  return 0;
}
