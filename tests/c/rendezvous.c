/* The ways in which ranks find each other, here as threads of one process. usage: rendezvous RANKS FOLDER */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <time.h>

enum { MOST_RANKS = 8, MOST_KEYS = 1000 };

static int world;

/* A store of our own, as a program may have one. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  char *keys[MOST_KEYS];
  void *values[MOST_KEYS];
  size_t lengths[MOST_KEYS];
  size_t count;
} shelf = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, {0}, {0}, {0}, 0};

static size_t find(const char *key) {
  size_t i = 0;
  while (i < shelf.count && strcmp(shelf.keys[i], key) != 0) i++;
  return i;
}

static void store_at(size_t i, const char *key, const void *value, size_t length) {
  CHECK(i < MOST_KEYS);
  if (i == shelf.count) {
    shelf.keys[i] = (char *)allocate(strlen(key) + 1);
    strcpy(shelf.keys[i], key);
    shelf.count++;
  } else {
    free(shelf.values[i]);
  }
  shelf.values[i] = allocate(length);
  memcpy(shelf.values[i], value, length);
  shelf.lengths[i] = length;
  pthread_cond_broadcast(&shelf.changed);
}

static int set(void *context, const char *key, const void *value, size_t length, uint64_t timeout_ms) {
  (void)timeout_ms;
  CHECK(context == &shelf);
  pthread_mutex_lock(&shelf.lock);
  store_at(find(key), key, value, length);
  pthread_mutex_unlock(&shelf.lock);
  return 0;
}

static int get(void *context, const char *key, uint64_t timeout_ms, kolo_reply_t reply) {
  struct timespec until;
  int late = 0;
  CHECK(context == &shelf);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += (time_t)(timeout_ms / 1000);
  until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  pthread_mutex_lock(&shelf.lock);
  while (find(key) == shelf.count && !late) late = pthread_cond_timedwait(&shelf.changed, &shelf.lock, &until) != 0;
  if (find(key) < shelf.count) OK(kolo_store_reply(reply, shelf.values[find(key)], shelf.lengths[find(key)]));
  pthread_mutex_unlock(&shelf.lock);
  return 0;
}

static int claim(void *context, const char *key, const void *value, size_t length, uint64_t timeout_ms, kolo_reply_t reply) {
  (void)timeout_ms;
  CHECK(context == &shelf);
  pthread_mutex_lock(&shelf.lock);
  if (find(key) == shelf.count) store_at(shelf.count, key, value, length);
  OK(kolo_store_reply(reply, shelf.values[find(key)], shelf.lengths[find(key)]));
  pthread_mutex_unlock(&shelf.lock);
  return 0;
}

/* How the ranks of one round meet. */
static enum { BY_ID, BY_URL, BY_CALLBACKS, BY_CALLBACKS_WITHOUT_CLAIM, WAYS } way;
static kolo_unique_id_t id;
static char url[4096];

static void use(kolo_comm_t comm, int rank) {
  int32_t sum = rank, number;
  const char *transport;
  OK(kolo_comm_rank(comm, &number));
  CHECK(number == rank);
  OK(kolo_comm_count(comm, &number));
  CHECK(number == world);
  OK(kolo_comm_host_count(comm, &number));
  CHECK(number == 1);
  OK(kolo_comm_transport(comm, &transport));
  CHECK(strlen(transport) > 0 && (world > 1) == (strcmp(transport, "none") != 0));
  number = -1;
  OK(kolo_comm_has_devices(comm, &number));
  CHECK(number == 0 || number == 1);
  OK(kolo_all_reduce(&sum, &sum, 1, KOLO_INT32, KOLO_SUM, comm, NULL));
  CHECK(sum == world * (world - 1) / 2);
}

static void *one_rank(void *argument) {
  int rank = *(int *)argument;
  kolo_comm_t comm;
  kolo_store_t store;
  memset(&store, 0, sizeof store);
  store.size = sizeof store;
  store.context = &shelf;
  store.set = set;
  store.get = get;
  store.claim = way == BY_CALLBACKS ? claim : NULL;
  switch (way) {
  case BY_ID: OK(kolo_comm_init_rank(&comm, world, id, rank, NULL)); break;
  case BY_URL: OK(kolo_comm_init_store(&comm, world, url, rank, NULL)); break;
  default: OK(kolo_comm_init_callbacks(&comm, world, &store, rank, NULL));
  }
  if (way == BY_CALLBACKS || way == BY_CALLBACKS_WITHOUT_CLAIM) {
    /* The store was there for the start only. */
    kolo_comm_t larger;
    CHECK(kolo_comm_grow(comm, &larger) == KOLO_ERR_UNSUPPORTED && larger == NULL);
  }
  use(comm, rank);
  OK(kolo_barrier(comm, NULL));
  OK(kolo_comm_destroy(comm));
  return NULL;
}

static void *drive(void *comm) {
  int32_t rank;
  OK(kolo_comm_rank((kolo_comm_t)comm, &rank));
  use((kolo_comm_t)comm, rank);
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t threads[MOST_RANKS];
  int ranks[MOST_RANKS], rank, turn;
  int64_t values[MOST_RANKS];
  kolo_comm_t comms[MOST_RANKS];
  kolo_config_t config = KOLO_CONFIG_INITIALIZER;
  CHECK(argc == 3);
  world = atoi(argv[1]);
  for (turn = 0; turn < WAYS; turn++) {
    way = turn == 0 ? BY_ID : turn == 1 ? BY_URL : turn == 2 ? BY_CALLBACKS : BY_CALLBACKS_WITHOUT_CLAIM;
    if (way == BY_ID) OK(kolo_get_unique_id(&id));
    CHECK(snprintf(url, sizeof url, "file://%s/rendezvous-%d", argv[2], world) < (int)sizeof url);
    for (rank = 0; rank < world; rank++) {
      ranks[rank] = rank;
      CHECK(pthread_create(&threads[rank], NULL, one_rank, &ranks[rank]) == 0);
    }
    for (rank = 0; rank < world; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
  }

  /* Ranks of one process, each with a thread of its own, and then all driven by one, in a group. */
  config.algorithm = "ring";
  config.timeout_ms = 300000;
  config.reproducible = -1;
  OK(kolo_comm_init_all(comms, world, &config));
  for (rank = 0; rank < world; rank++) CHECK(pthread_create(&threads[rank], NULL, drive, comms[rank]) == 0);
  for (rank = 0; rank < world; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
  OK(kolo_group_start());
  for (rank = 0; rank < world; rank++) {
    values[rank] = rank + 1;
    OK(kolo_all_reduce(&values[rank], &values[rank], 1, KOLO_INT64, KOLO_SUM, comms[rank], NULL));
  }
  OK(kolo_group_end());
  for (rank = 0; rank < world; rank++) CHECK(values[rank] == world * (world + 1) / 2);
  for (rank = 0; rank < world; rank++) OK(kolo_comm_destroy(comms[rank]));

  while (shelf.count > 0) {
    shelf.count--;
    free(shelf.keys[shelf.count]);
    free(shelf.values[shelf.count]);
  }
  printf("%d ranks have met\n", world);
  return 0;
}
