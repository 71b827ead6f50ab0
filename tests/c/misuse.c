/* Whatever is wrong with a call and can be known is an error that says so, and leaves the communicator as it was. */
#include "check.h"

static kolo_comm_t comm;
static int world;

/* The communicator works as before. */
static void still_works(void) {
  int32_t one = 1, result = -1;
  OK(kolo_all_reduce(&one, &one, 1, KOLO_INT32, KOLO_SUM, comm, NULL));
  CHECK(one == world);
  OK(kolo_comm_get_async_error(comm, &result));
  CHECK(result == KOLO_OK);
}

/* The last operations can be had as a file. */
static void trace(void) {
  char path[100], begins[14] = "";
  int32_t rank = -1;
  FILE *file;
  OK(kolo_comm_rank(comm, &rank));
  sprintf(path, "/tmp/kolo-c-trace-%p-%d.json", (void *)path, (int)rank);
  OK(kolo_comm_dump_trace(comm, path));
  file = fopen(path, "r");
  CHECK(file != NULL && fread(begins, 1, sizeof begins - 1, file) == sizeof begins - 1);
  CHECK(strcmp(begins, "{\"kolo_trace\"") == 0);
  fclose(file);
  remove(path);
}

/* All memory here is the host's, so no operation took a path on devices. */
static void counts_of_paths(void) {
  union {
    kolo_comm_stats_t stats;
    unsigned char bytes[sizeof(kolo_comm_stats_t) + 8];
  } longer;
  kolo_comm_stats_t stats;
  memset(&stats, 0xaa, sizeof stats);
  stats.size = 0;
  REFUSED(KOLO_ERR_ARGUMENT, "stats->size", kolo_comm_stats(comm, &stats));
  stats.size = sizeof stats;
  OK(kolo_comm_stats(comm, &stats));
  CHECK(stats.size == sizeof stats);
  CHECK(stats.device_whole == 0 && stats.device_staged == 0 && stats.device_copied == 0);
  CHECK(stats.device_in_place == 0 && stats.device_through_areas == 0 && stats.device_one_shot == 0);
  /* The struct of a later header. */
  memset(&longer, 0xaa, sizeof longer);
  longer.stats.size = sizeof longer;
  OK(kolo_comm_stats(comm, &longer.stats));
  CHECK(longer.stats.device_one_shot == 0 && longer.bytes[sizeof stats] == 0xaa);
}

static void wrong_arguments(void) {
  float a[8] = {0}, b[8] = {0}, *many = a;
  size_t *counts = (size_t *)allocate(sizeof(size_t) * (size_t)world);
  const size_t huge[] = {(size_t)-1, (size_t)-1 / 2, (size_t)-1 / 4, (size_t)1 << (8 * sizeof(size_t) - 2)};
  size_t i;
  int rank;
  kolo_work_t work = (kolo_work_t)&a;
  kolo_comm_t part = comm;
  /* Pointers. */
  REFUSED(KOLO_ERR_ARGUMENT, "send pointer is null", kolo_all_reduce(NULL, b, 1, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  CHECK(last_error(comm).code == KOLO_ERR_ARGUMENT && last_error(comm).usable == 1);
  CHECK(last_error(comm).op == KOLO_OP_ALL_REDUCE && last_error(comm).rank == -1);
  REFUSED(KOLO_ERR_ARGUMENT, "receive pointer is null", kolo_all_reduce(a, NULL, 1, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "not aligned", kolo_all_reduce((char *)a + 1, b, 1, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "overlap", kolo_all_reduce(a, many + 1, 4, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  OK(kolo_all_reduce(NULL, NULL, 0, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "recv_counts is null", kolo_all_gather_v(a, b, NULL, KOLO_FLOAT32, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "send_counts is null", kolo_reduce_scatter_v(a, b, NULL, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "send_counts is null", kolo_all_to_all_v(a, NULL, b, NULL, KOLO_FLOAT32, comm, NULL));
  {
    const size_t *odd = (const size_t *)((char *)counts + 1);
    int32_t *place = (int32_t *)((char *)a + 1);
    void **memory = (void **)((char *)a + 1);
    REFUSED(KOLO_ERR_ARGUMENT, "recv_counts is not aligned", kolo_all_gather_v(a, b, odd, KOLO_FLOAT32, comm, NULL));
    REFUSED(KOLO_ERR_ARGUMENT, "send_counts is not aligned", kolo_all_to_all_v(a, odd, b, odd, KOLO_FLOAT32, comm, NULL));
    REFUSED(KOLO_ERR_ARGUMENT, "rank is not aligned", kolo_comm_rank(comm, place));
    REFUSED(KOLO_ERR_ARGUMENT, "ptr is not aligned", kolo_mem_alloc(memory, 1, comm));
    REFUSED(KOLO_ERR_ARGUMENT, "newcomm is not aligned", kolo_comm_split(comm, 0, 0, (kolo_comm_t *)memory));
    REFUSED(KOLO_ERR_ARGUMENT, "source is not aligned", kolo_recv_any(a, 1, KOLO_FLOAT32, place, comm, NULL));
    REFUSED(KOLO_ERR_ARGUMENT, "work is not aligned", kolo_start_barrier(comm, NULL, (kolo_work_t *)memory));
    REFUSED(KOLO_ERR_ARGUMENT, "stats is not aligned", kolo_comm_stats(comm, (kolo_comm_stats_t *)memory));
    REFUSED(KOLO_ERR_ARGUMENT, "error is not aligned", kolo_last_error(comm, (kolo_error_t *)memory));
  }
  REFUSED(KOLO_ERR_ARGUMENT, "work is null", kolo_start_barrier(comm, NULL, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "rank is null", kolo_comm_rank(comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "has is null", kolo_comm_has_devices(comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "stats is null", kolo_comm_stats(comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "comm is null", kolo_comm_init_env(NULL, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "path is null", kolo_comm_dump_trace(comm, NULL));
  REFUSED(KOLO_ERR_SETTING, "/no/such/folder", kolo_comm_dump_trace(comm, "/no/such/folder/x"));
  REFUSED(KOLO_ERR_ARGUMENT, "newcomm is null", kolo_comm_split(comm, 0, 0, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "ptr is null", kolo_mem_alloc(NULL, 1, comm));
  REFUSED(KOLO_ERR_ARGUMENT, "ptr is null", kolo_mem_alloc_pooled(NULL, 1, comm));
  REFUSED(KOLO_ERR_ARGUMENT, "id is null", kolo_get_unique_id(NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "id is null", kolo_discard_unique_id(NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "error is null", kolo_last_error(comm, NULL));
  /* Numbers that stand for nothing. */
  REFUSED(KOLO_ERR_ARGUMENT, "dtype is 15", kolo_all_reduce(a, b, 1, 15, KOLO_SUM, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "dtype is -1", kolo_all_reduce(a, b, 1, -1, KOLO_SUM, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "dtype is 263", kolo_all_reduce(a, b, 1, 256 + KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "op is 8", kolo_all_reduce(a, b, 1, KOLO_FLOAT32, 8, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "op is -1", kolo_all_reduce(a, b, 1, KOLO_FLOAT32, -1, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "bitxor is not defined on f32", kolo_all_reduce(a, b, 1, KOLO_FLOAT32, KOLO_BXOR, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "average is not defined on i32", kolo_all_reduce(a, b, 1, KOLO_INT32, KOLO_AVG, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "root is -1", kolo_broadcast(a, b, 1, KOLO_FLOAT32, -1, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "out of range", kolo_broadcast(a, b, 1, KOLO_FLOAT32, world, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "out of range", kolo_send(a, 1, KOLO_FLOAT32, world, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "peer is -1", kolo_recv(a, 1, KOLO_FLOAT32, -1, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "color is -2", kolo_comm_split(comm, -2, 0, &part));
  CHECK(part == NULL);
  /* Counts, the first of them a -1. */
  for (i = 0; i < sizeof huge / sizeof huge[0]; i++) {
    REFUSED(KOLO_ERR_ARGUMENT, "more than memory can hold", kolo_all_reduce(a, b, huge[i], KOLO_FLOAT64, KOLO_SUM, comm, NULL));
    REFUSED(KOLO_ERR_ARGUMENT, "more than memory can hold", kolo_all_gather(a, b, huge[i], KOLO_FLOAT64, comm, NULL));
    REFUSED(KOLO_ERR_ARGUMENT, "more than memory can hold", kolo_all_to_all(a, b, huge[i], KOLO_FLOAT64, comm, NULL));
    REFUSED(KOLO_ERR_ARGUMENT, "more than memory can hold",
            kolo_start_all_reduce(a, b, huge[i], KOLO_FLOAT64, KOLO_SUM, comm, NULL, &work));
    CHECK(work == NULL);
    for (rank = 0; rank < world; rank++) counts[rank] = huge[i];
    REFUSED(KOLO_ERR_ARGUMENT, "more than memory can hold", kolo_all_gather_v(a, b, counts, KOLO_FLOAT64, comm, NULL));
    REFUSED(KOLO_ERR_ARGUMENT, "more than memory can hold",
            kolo_all_to_all_v(a, counts, b, counts, KOLO_FLOAT64, comm, NULL));
  }
  {
    void *memory = a;
    REFUSED(KOLO_ERR_ARGUMENT, "more than memory can hold", kolo_mem_alloc(&memory, (size_t)-1, comm));
    REFUSED(KOLO_ERR_ARGUMENT, "more than memory can hold", kolo_mem_alloc_pooled(&memory, (size_t)-1, comm));
    CHECK(memory == NULL);
  }
  /* Streams are of a GPU. */
  REFUSED(KOLO_ERR_UNSUPPORTED, "stream", kolo_all_reduce(a, b, 1, KOLO_FLOAT32, KOLO_SUM, comm, a));
  REFUSED(KOLO_ERR_UNSUPPORTED, "stream", kolo_start_barrier(comm, a, &work));
  CHECK(last_error(comm).usable == 1);
  free(counts);
  still_works();
}

static void never_told(void *context, kolo_result_t result) {
  CHECK(context == NULL && result == KOLO_OK);
}

static void wrong_handles(void) {
  size_t index = 0;
  float a[2] = {0};
  int local = 0, done;
  int32_t number;
  uint64_t nanoseconds;
  void *memory;
  kolo_comm_t part, copy;
  kolo_work_t work, dead;
  kolo_comm_t foreign[4];
  size_t i;
  OK(kolo_start_barrier(comm, NULL, &work));
  foreign[0] = NULL;
  foreign[1] = (kolo_comm_t)&local;
  foreign[2] = (kolo_comm_t)work;
  foreign[3] = (kolo_comm_t)((uintptr_t)comm + 1);
  for (i = 0; i < 4; i++) {
    const char *words = foreign[i] == NULL ? "comm handle is null" : "comm handle is not valid";
    REFUSED(KOLO_ERR_HANDLE, words, kolo_all_reduce(a, a, 2, KOLO_FLOAT32, KOLO_SUM, foreign[i], NULL));
    REFUSED(KOLO_ERR_HANDLE, words, kolo_start_all_reduce(a, a, 2, KOLO_FLOAT32, KOLO_SUM, foreign[i], NULL, &dead));
    REFUSED(KOLO_ERR_HANDLE, words, kolo_comm_rank(foreign[i], &number));
    REFUSED(KOLO_ERR_HANDLE, words, kolo_comm_split(foreign[i], 0, 0, &part));
    REFUSED(KOLO_ERR_HANDLE, words, kolo_mem_alloc(&memory, 1, foreign[i]));
    REFUSED(KOLO_ERR_HANDLE, words, kolo_mem_alloc_pooled(&memory, 1, foreign[i]));
    REFUSED(KOLO_ERR_HANDLE, words, kolo_comm_abort(foreign[i]));
    REFUSED(KOLO_ERR_HANDLE, words, kolo_comm_destroy(foreign[i]));
  }
  OK(kolo_work_wait(work));
  OK(kolo_work_destroy(work));
  dead = work;
  /* Its place is taken by another. */
  OK(kolo_start_barrier(comm, NULL, &work));
  REFUSED(KOLO_ERR_HANDLE, "work handle is not valid", kolo_work_wait(dead));
  REFUSED(KOLO_ERR_HANDLE, "work handle is not valid", kolo_work_wait_timeout(dead, 1));
  REFUSED(KOLO_ERR_HANDLE, "work handle is not valid", kolo_work_test(dead, &done));
  REFUSED(KOLO_ERR_HANDLE, "work handle is not valid", kolo_work_wait_any(&dead, 1, &index, 1));
  REFUSED(KOLO_ERR_HANDLE, "work handle is not valid", kolo_work_on_done(dead, never_told, NULL));
  REFUSED(KOLO_ERR_HANDLE, "work handle is not valid", kolo_work_duration(dead, &nanoseconds));
  REFUSED(KOLO_ERR_ARGUMENT, "nanoseconds is null", kolo_work_duration(work, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "works is null", kolo_work_wait_any(NULL, 1, &index, 1));
  REFUSED(KOLO_ERR_ARGUMENT, "n is 0", kolo_work_wait_any(&work, 0, &index, 1));
  REFUSED(KOLO_ERR_ARGUMENT, "index is null", kolo_work_wait_any(&work, 1, NULL, 1));
  REFUSED(KOLO_ERR_ARGUMENT, "function is null", kolo_work_on_done(work, NULL, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "dtype is 15", kolo_dtype_size(15, &index));
  REFUSED(KOLO_ERR_ARGUMENT, "size is null", kolo_dtype_size(KOLO_INT8, NULL));
  REFUSED(KOLO_ERR_HANDLE, "work handle is not valid", kolo_work_cancel(dead));
  REFUSED(KOLO_ERR_HANDLE, "work handle is not valid", kolo_work_destroy(dead));
  REFUSED(KOLO_ERR_HANDLE, "work handle is null", kolo_work_wait(NULL));
  REFUSED(KOLO_ERR_HANDLE, "work handle is not valid", kolo_work_wait((kolo_work_t)comm));
  REFUSED(KOLO_ERR_ARGUMENT, "done is null", kolo_work_test(work, NULL));
  OK(kolo_work_wait(work));
  OK(kolo_work_destroy(work));

  OK(kolo_comm_split(comm, 0, 0, &part));
  copy = part;
  OK(kolo_comm_destroy(part));
  OK(kolo_comm_split(comm, 0, 0, &part));
  REFUSED(KOLO_ERR_HANDLE, "not valid", kolo_all_reduce(a, a, 2, KOLO_FLOAT32, KOLO_SUM, copy, NULL));
  REFUSED(KOLO_ERR_HANDLE, "not valid", kolo_comm_destroy(copy));
  OK(kolo_comm_destroy(part));

  OK(kolo_mem_free(NULL));
  REFUSED(KOLO_ERR_HANDLE, "memory handle is not valid", kolo_mem_free(a));
  OK(kolo_mem_alloc(&memory, 100, comm));
  REFUSED(KOLO_ERR_HANDLE, "memory handle is not valid", kolo_mem_free((char *)memory + 1));
  OK(kolo_mem_free(memory));
  OK(kolo_mem_alloc_pooled(&memory, 100, comm));
  OK(kolo_mem_free(memory));
  REFUSED(KOLO_ERR_HANDLE, "memory handle is not valid", kolo_mem_free(memory));
  REFUSED(KOLO_ERR_HANDLE, "memory handle is not valid", kolo_mem_free(memory));
  still_works();
}

static void wrong_groups(void) {
  float a[2] = {0};
  kolo_comm_t part;
  kolo_work_t work;
  void *memory;
  REFUSED(KOLO_ERR_ARGUMENT, "no group is open", kolo_group_end());
  OK(kolo_group_start());
  REFUSED(KOLO_ERR_ARGUMENT, "in a group", kolo_start_barrier(comm, NULL, &work));
  REFUSED(KOLO_ERR_ARGUMENT, "in a group", kolo_comm_split(comm, 0, 0, &part));
  REFUSED(KOLO_ERR_ARGUMENT, "in a group", kolo_mem_alloc(&memory, 1, comm));
  REFUSED(KOLO_ERR_ARGUMENT, "in a group", kolo_comm_init_env(&part, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "is 4; so none of them", kolo_group_end());
  /* A call on what is no communicator counts, too. */
  OK(kolo_group_start());
  OK(kolo_group_start());
  REFUSED(KOLO_ERR_HANDLE, "not valid", kolo_all_reduce(a, a, 2, KOLO_FLOAT32, KOLO_SUM, (kolo_comm_t)&part, NULL));
  OK(kolo_group_end());
  /* What the group does not carry out does not succeed: a caller that has left it would take the buffer for the sum. */
  a[0] = 1;
  REFUSED(KOLO_ERR_ARGUMENT, "call kolo_group_end first", kolo_all_reduce(a, a, 2, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "call kolo_group_end first", kolo_barrier(comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "is 3; so none of them", kolo_group_end());
  CHECK(a[0] == 1);
  /* The next group knows nothing of it. */
  OK(kolo_group_start());
  OK(kolo_all_reduce(a, a, 2, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  OK(kolo_group_end());
  CHECK(a[0] == (float)world);
  /* One call that is refused, and none is carried out. */
  OK(kolo_group_start());
  OK(kolo_barrier(comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "dtype", kolo_all_reduce(a, a, 2, 99, KOLO_SUM, comm, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "none of them", kolo_group_end());
  /* A communicator that is gone when the group ends. */
  OK(kolo_comm_split(comm, 0, 0, &part));
  OK(kolo_group_start());
  OK(kolo_barrier(comm, NULL));
  OK(kolo_barrier(part, NULL));
  OK(kolo_comm_destroy(part));
  REFUSED(KOLO_ERR_HANDLE, "not valid", kolo_group_end());
  still_works();
}

static int never(void *context, const char *key, const void *value, size_t length, uint64_t timeout_ms) {
  (void)context, (void)key, (void)value, (void)length, (void)timeout_ms;
  return 7;
}

static int nothing(void *context, const char *key, uint64_t timeout_ms, kolo_reply_t reply) {
  (void)context, (void)key, (void)timeout_ms;
  REFUSED(KOLO_ERR_HANDLE, "reply handle is null", kolo_store_reply(NULL, "", 1));
  REFUSED(KOLO_ERR_ARGUMENT, "value is null", kolo_store_reply(reply, NULL, 1));
  REFUSED(KOLO_ERR_ARGUMENT, "length is", kolo_store_reply(reply, "", (size_t)-1));
  return 0;
}

static void wrong_starts(void) {
  kolo_comm_t other = comm;
  kolo_config_t config = KOLO_CONFIG_INITIALIZER;
  struct {
    kolo_config_t known;
    int beyond;
  } newer;
  kolo_error_t error;
  kolo_unique_id_t id;
  kolo_store_t store;
  memset(&id, 7, sizeof id);
  memset(&store, 0, sizeof store);
  REFUSED(KOLO_ERR_ARGUMENT, "nranks is 0", kolo_comm_init_store(&other, 0, "tcp://h:1", 0, NULL));
  CHECK(other == NULL);
  REFUSED(KOLO_ERR_ARGUMENT, "rank is -1", kolo_comm_init_store(&other, 2, "tcp://h:1", -1, NULL));
  REFUSED(KOLO_ERR_SETTING, "rank", kolo_comm_init_store(&other, 2, "tcp://h:1", 2, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "url is null", kolo_comm_init_store(&other, 2, NULL, 0, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "url is not UTF-8", kolo_comm_init_store(&other, 2, "tcp://\xff:1", 0, NULL));
  REFUSED(KOLO_ERR_STORE, "scheme", kolo_comm_init_store(&other, 2, "nowhere", 0, NULL));
  REFUSED(KOLO_ERR_SETTING, "kolo_get_unique_id", kolo_comm_init_rank(&other, 2, id, 0, NULL));
  REFUSED(KOLO_ERR_SETTING, "kolo_get_unique_id", kolo_discard_unique_id(&id));
  REFUSED(KOLO_ERR_ARGUMENT, "comms is null", kolo_comm_init_all(NULL, 2, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "nranks is -5", kolo_comm_init_all(&other, -5, NULL));
  REFUSED(KOLO_ERR_SETTING, "at most", kolo_comm_init_all(&other, 0x7fffffff, NULL));
  {
    char *odd = (char *)&store + 1;
    REFUSED(KOLO_ERR_ARGUMENT, "comms is not aligned", kolo_comm_init_all((kolo_comm_t *)odd, 2, NULL));
    REFUSED(KOLO_ERR_ARGUMENT, "config is not aligned", kolo_comm_init_all(&other, 2, (kolo_config_t *)odd));
    REFUSED(KOLO_ERR_ARGUMENT, "store is not aligned", kolo_comm_init_callbacks(&other, 2, (kolo_store_t *)odd, 0, NULL));
  }
  REFUSED(KOLO_ERR_ARGUMENT, "store is null", kolo_comm_init_callbacks(&other, 2, NULL, 0, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "store->size", kolo_comm_init_callbacks(&other, 2, &store, 0, NULL));
  store.size = sizeof store;
  REFUSED(KOLO_ERR_ARGUMENT, "store->set is null", kolo_comm_init_callbacks(&other, 2, &store, 0, NULL));
  store.set = never;
  REFUSED(KOLO_ERR_ARGUMENT, "store->get is null", kolo_comm_init_callbacks(&other, 2, &store, 0, NULL));
  store.is_private = 2;
  REFUSED(KOLO_ERR_ARGUMENT, "store->is_private is 2", kolo_comm_init_callbacks(&other, 2, &store, 0, NULL));
  store.is_private = 0;
  config.tls_ca = "ca.pem";
  REFUSED(KOLO_ERR_SETTING, "tls_key", kolo_comm_init_store(&other, 2, "tcp://h:1", 0, &config));
  config.tls_ca = NULL;
  config.secret_file = "/nowhere/secret";
  REFUSED(KOLO_ERR_SETTING, "/nowhere/secret", kolo_comm_init_store(&other, 2, "tcp://h:1", 0, &config));
  config.secret_file = "";
  REFUSED(KOLO_ERR_SETTING, "it is set but empty", kolo_comm_init_store(&other, 2, "tcp://h:1", 0, &config));
  config.secret_file = NULL;
  store.get = nothing;
  REFUSED(KOLO_ERR_STORE, "set: the function returned 7", kolo_comm_init_callbacks(&other, 2, &store, 0, NULL));
  /* Rank 1 finds nothing there, and says who is missing. */
  config.start_timeout_ms = 50;
  REFUSED(KOLO_ERR_MISSING, "missing 0", kolo_comm_init_callbacks(&other, 2, &store, 1, &config));
  config.start_timeout_ms = 0;
  REFUSED(KOLO_ERR_HANDLE, "reply handle", kolo_store_reply((kolo_reply_t)&store, "", 1));

  config.size = 8;
  REFUSED(KOLO_ERR_ARGUMENT, "config->size is 8", kolo_comm_init_env(&other, &config));
  config.size = (size_t)-1;
  REFUSED(KOLO_ERR_ARGUMENT, "config->size", kolo_comm_init_env(&other, &config));
  config.size = sizeof config;
  config.version = 2;
  REFUSED(KOLO_ERR_ARGUMENT, "config->version is 2", kolo_comm_init_env(&other, &config));
  config.version = KOLO_CONFIG_VERSION;
  config.reproducible = 3;
  REFUSED(KOLO_ERR_ARGUMENT, "reproducible", kolo_comm_init_env(&other, &config));
  config.reproducible = 0;
  config.transport = "pigeon";
  REFUSED(KOLO_ERR_SETTING, "shm", kolo_comm_init_env(&other, &config));
  config.transport = NULL;
  config.copy_mode = "read";
  REFUSED(KOLO_ERR_SETTING, "cma", kolo_comm_init_env(&other, &config));
  config.copy_mode = NULL;
  config.flag_layout = "tree";
  REFUSED(KOLO_ERR_SETTING, "hierarchy", kolo_comm_init_env(&other, &config));
  config.flag_layout = NULL;
  config.algorithm = "guess";
  REFUSED(KOLO_ERR_SETTING, "ring", kolo_comm_init_env(&other, &config));
  config.algorithm = NULL;
  config.sockets = 65;
  REFUSED(KOLO_ERR_SETTING, "64", kolo_comm_init_env(&other, &config));
  config.sockets = 0;
  config.devices = 7;
  REFUSED(KOLO_ERR_ARGUMENT, "config->devices is 7", kolo_comm_init_env(&other, &config));
  config.devices = 0;
  config.device_path = "wire";
  REFUSED(KOLO_ERR_SETTING, "staged", kolo_comm_init_env(&other, &config));
  config.device_path = NULL;
  config.device_waits = "gpu";
  REFUSED(KOLO_ERR_SETTING, "kernels", kolo_comm_init_env(&other, &config));
  config.device_waits = NULL;
  config.wire_dtype = "f8";
  REFUSED(KOLO_ERR_SETTING, "bf16", kolo_comm_init_env(&other, &config));
  config.wire_dtype = NULL;
  config.ports = "100-20";
  REFUSED(KOLO_ERR_SETTING, "20000-20100", kolo_comm_init_env(&other, &config));
  config.ports = NULL;
  config.secret = "short";
  REFUSED(KOLO_ERR_SETTING, "64 hexadecimal digits", kolo_comm_init_env(&other, &config));
  config.secret = "";
  REFUSED(KOLO_ERR_SETTING, "it is set but empty", kolo_comm_init_store(&other, 2, "tcp://h:1", 0, &config));
  config.secret = NULL;
  config.metrics = "9400";
  REFUSED(KOLO_ERR_SETTING, "metrics", kolo_comm_init_env(&other, &config));
  config.metrics = NULL;
  config.trace_signal = 2;
  REFUSED(KOLO_ERR_ARGUMENT, "trace_signal", kolo_comm_init_env(&other, &config));
  config.trace_signal = 1;
  REFUSED(KOLO_ERR_SETTING, "KOLO_TRACE_DIR", kolo_comm_init_env(&other, &config));
  config.trace_signal = 0;
  config.trace_dir = "/dev/null/x";
  REFUSED(KOLO_ERR_SETTING, "/dev/null/x", kolo_comm_init_env(&other, &config));
  config.trace_dir = NULL;
  config.network_latency_us = 5;
  REFUSED(KOLO_ERR_SETTING, "both", kolo_comm_init_env(&other, &config));
  config.network_latency_us = 0;
  /* A larger struct, of a newer header: harmless if what is new is not set. */
  memset(&newer, 0, sizeof newer);
  newer.known = config;
  newer.known.size = sizeof newer;
  newer.beyond = 1;
  REFUSED(KOLO_ERR_ARGUMENT, "newer", kolo_comm_init_env(&other, &newer.known));
  newer.beyond = 0;
  OK(kolo_comm_init_all(&other, 1, &newer.known));
  OK(kolo_comm_destroy(other));

  /* A shorter one, of the first header: what it lacks is not set. */
  {
    const size_t first = offsetof(kolo_config_t, trace_dir);
    kolo_config_t *old = (kolo_config_t *)allocate(first);
    config.size = first;
    memcpy((void *)old, (const void *)&config, first);
    OK(kolo_comm_init_all(&other, 1, old));
    OK(kolo_comm_destroy(other));
    old->size = first - 1;
    REFUSED(KOLO_ERR_ARGUMENT, "config->size", kolo_comm_init_all(&other, 1, old));
    free(old);
  }
  /* A longer place for an error: what is beyond stays as it is. */
  {
    struct {
      kolo_error_t known;
      int beyond;
    } longer;
    memset(&longer, 5, sizeof longer);
    longer.known.size = sizeof longer;
    OK(kolo_last_error(NULL, &longer.known));
    CHECK(longer.known.size == sizeof longer && longer.known.code == KOLO_ERR_ARGUMENT && longer.beyond == 0x05050505);
  }

  error.size = 4;
  CHECK(kolo_last_error(NULL, &error) == KOLO_ERR_ARGUMENT);
  still_works();
}

/* At the end, because it changes KOLO_VERSION. */
static void another_header(void);

int main(void) {
  int32_t rank, count;
  int result;
  CHECK(kolo_version() == KOLO_VERSION);
  CHECK(KOLO_VERSION == KOLO_VERSION_MAJOR * 10000 + KOLO_VERSION_MINOR * 100 + KOLO_VERSION_PATCH);
  CHECK(last_error(NULL).code == KOLO_OK);
  for (result = -2; result < 30; result++) CHECK(strlen(kolo_error_string(result)) > 5);
  OK(kolo_comm_init_env(&comm, NULL));
  OK(kolo_comm_rank(comm, &rank));
  OK(kolo_comm_count(comm, &count));
  my_rank = rank;
  world = count;
  trace();
  counts_of_paths();
  wrong_arguments();
  wrong_handles();
  wrong_groups();
  wrong_starts();
  another_header();
  OK(kolo_comm_destroy(comm));
  REFUSED(KOLO_ERR_HANDLE, "not valid", kolo_barrier(comm, NULL));
  printf("rank %d of %d: misuse is refused\n", my_rank, world);
  return 0;
}

/* The header of the next major version. */
#undef KOLO_VERSION
#define KOLO_VERSION (10000 * (KOLO_VERSION_MAJOR + 1))

static void another_header(void) {
  const char *words = "has another ABI";
  kolo_comm_t other = NULL;
  kolo_unique_id_t id;
  OK(kolo_get_unique_id(&id));
  REFUSED(KOLO_ERR_VERSION, words, kolo_check_version(KOLO_VERSION));
  REFUSED(KOLO_ERR_VERSION, words, kolo_comm_init_env(&other, NULL));
  REFUSED(KOLO_ERR_VERSION, words, kolo_comm_init_rank(&other, 1, id, 0, NULL));
  REFUSED(KOLO_ERR_VERSION, words, kolo_comm_init_store(&other, 1, "env://", 0, NULL));
  REFUSED(KOLO_ERR_VERSION, words, kolo_comm_init_callbacks(&other, 1, NULL, 0, NULL));
  REFUSED(KOLO_ERR_VERSION, words, kolo_comm_init_all(&other, 1, NULL));
  CHECK(other == NULL);
  /* A name without parentheses is the function. */
  OK((kolo_comm_init_all)(&other, 1, NULL));
  OK(kolo_comm_destroy(other));
}
