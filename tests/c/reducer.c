/* The reducer from C: what it computes, what it refuses, and what the other ranks hear when one does wrong. */
#include "check.h"

static kolo_comm_t comm;
static int world;

enum { A, B, C, PARAMETERS };

static const size_t matrix[] = {2, 3}, vector[] = {4};
static const kolo_tensor_t parameters[PARAMETERS] = {
  {"a", matrix, 2, KOLO_FLOAT32, 0}, {"b", vector, 1, KOLO_FLOAT64, 0}, {"c", NULL, 0, KOLO_FLOAT32, 0}};
static const kolo_tensor_t buffers[] = {{"mean", vector, 1, KOLO_FLOAT32, 0}, {"seen", NULL, 0, KOLO_INT64, 0}};

static kolo_reducer_config_t options(void) {
  kolo_reducer_config_t config = KOLO_REDUCER_CONFIG_INITIALIZER;
  return config;
}

static kolo_reducer_t make(const kolo_reducer_config_t *config) {
  kolo_reducer_t reducer = NULL;
  OK(kolo_reducer_create(&reducer, parameters, PARAMETERS, buffers, 2, config, comm));
  CHECK(reducer != NULL);
  return reducer;
}

static void *gradient(kolo_reducer_t reducer, size_t parameter) {
  void *place = NULL;
  OK(kolo_reducer_gradient(reducer, parameter, &place, NULL));
  return place;
}

/* One step, in which everybody's gradients are its rank times something: checks the averages. */
static void step(kolo_reducer_t reducer) {
  float a[6], transposed[6], *got_a;
  double *b, average = (world - 1) / 2.0;
  const size_t strides[] = {1, 2};
  int i, used;
  OK(kolo_reducer_begin(reducer));
  b = (double *)gradient(reducer, B);
  for (i = 0; i < 4; i++) b[i] = my_rank * 10 + i;
  OK(kolo_reducer_ready(reducer, B));
  for (i = 0; i < 6; i++) a[i] = (float)(my_rank + i);
  for (i = 0; i < 6; i++) transposed[i % 3 * 2 + i / 3] = a[i];
  OK(my_rank % 2 ? kolo_reducer_put(reducer, A, a, NULL) : kolo_reducer_put(reducer, A, transposed, strides));
  OK(kolo_reducer_unused(reducer, C));
  OK(kolo_reducer_finish(reducer));
  b = (double *)gradient(reducer, B);
  for (i = 0; i < 4; i++) CHECK(b[i] == average * 10 + i);
  got_a = (float *)gradient(reducer, A);
  for (i = 0; i < 6; i++) CHECK(got_a[i] == (float)average + (float)i);
  CHECK(*(float *)gradient(reducer, C) == 0);
  OK(kolo_reducer_is_used(reducer, A, &used));
  CHECK(used == 1);
  OK(kolo_reducer_is_used(reducer, C, &used));
  CHECK(used == 0);
}

static void averages(void) {
  kolo_reducer_config_t config = options();
  kolo_step_stats_t stats;
  kolo_bucket_stats_t bucket;
  uint64_t bytes = 0;
  int i;
  kolo_reducer_t reducer = make(NULL);
  for (i = 0; i < 3; i++) step(reducer);
  memset(&stats, 0, sizeof stats);
  REFUSED(KOLO_ERR_ARGUMENT, "stats->size", kolo_reducer_stats(reducer, &stats));
  stats.size = sizeof stats;
  OK(kolo_reducer_stats(reducer, &stats));
  CHECK(stats.bytes == 4 * 6 + 8 * 4 + 4 && stats.buckets == 2);
  CHECK(stats.overlapped_us <= stats.communicated_us);
  memset(&bucket, 0, sizeof bucket);
  REFUSED(KOLO_ERR_ARGUMENT, "stats->size", kolo_reducer_bucket_stats(reducer, 0, &bucket));
  for (i = 0; i < (int)stats.buckets; i++) {
    bucket.size = sizeof bucket;
    OK(kolo_reducer_bucket_stats(reducer, (size_t)i, &bucket));
    CHECK(bucket.ready_us <= bucket.started_us && bucket.started_us <= bucket.ended_us);
    /* Those of one type: B, or A and C. */
    CHECK(bucket.dtype == KOLO_FLOAT64 ? bucket.parameters == 1 && bucket.bytes == 8 * 4
                                       : bucket.dtype == KOLO_FLOAT32 && bucket.parameters == 2 && bucket.bytes == 4 * 7);
    bytes += bucket.bytes;
  }
  CHECK(bytes == stats.bytes);
  REFUSED(KOLO_ERR_ARGUMENT, "the last step that was reduced had 2", kolo_reducer_bucket_stats(reducer, 2, &bucket));
  REFUSED(KOLO_ERR_REDUCER, "parameter", kolo_reducer_is_used(reducer, PARAMETERS, &i));
  OK(kolo_reducer_destroy(reducer));
  config.bucket_bytes = config.first_bucket_bytes = 1;
  config.no_overlap = config.no_rebuild = 1;
  config.unused = KOLO_UNUSED_FIND;
  reducer = make(&config);
  for (i = 0; i < 3; i++) step(reducer);
  OK(kolo_reducer_destroy(reducer));
}

static void accumulates(void) {
  kolo_reducer_t reducer = make(NULL);
  int adds = -1, i;
  void *place;
  float a[6] = {1, 1, 1, 1, 1, 1}, *sum;
  double b[4] = {2, 2, 2, 2};
  for (i = 0; i < 3; i++) {
    OK(i < 2 ? kolo_reducer_accumulate(reducer) : kolo_reducer_begin(reducer));
    OK(kolo_reducer_put(reducer, A, a, NULL));
    OK(kolo_reducer_put(reducer, B, b, NULL));
    OK(kolo_reducer_gradient(reducer, C, &place, &adds));
    CHECK(adds == (i > 0));
    *(float *)place = adds ? *(float *)place + 5 : 5;
    OK(kolo_reducer_ready(reducer, C));
    OK(kolo_reducer_finish(reducer));
  }
  sum = (float *)gradient(reducer, A);
  CHECK(sum[0] == 3 && sum[5] == 3 && ((double *)gradient(reducer, B))[3] == 6 && *(float *)gradient(reducer, C) == 15);
  OK(kolo_reducer_destroy(reducer));
}

static void values(void) {
  kolo_reducer_t reducer = make(NULL);
  float a[6] = {0}, c = (float)my_rank, mean[4] = {0};
  double b[4] = {0};
  int64_t seen = my_rank + 7;
  void *parameters_at[PARAMETERS], *buffers_at[2];
  parameters_at[A] = a;
  parameters_at[B] = b;
  parameters_at[C] = &c;
  buffers_at[0] = mean;
  buffers_at[1] = &seen;
  a[5] = (float)my_rank;
  mean[2] = (float)my_rank;
  OK(kolo_reducer_average_parameters(reducer, parameters_at));
  CHECK(a[5] == (float)(world - 1) / 2 && c == a[5] && b[3] == 0);
  c = (float)my_rank + 1;
  OK(kolo_reducer_broadcast_parameters(reducer, parameters_at));
  CHECK(c == 1);
  OK(kolo_reducer_sync_buffers(reducer, buffers_at, KOLO_SYNC_AVERAGE));
  CHECK(mean[2] == (float)(world - 1) / 2 && seen == 7);
  seen = my_rank;
  OK(kolo_reducer_sync_buffers(reducer, buffers_at, world - 1));
  CHECK(seen == world - 1);
  REFUSED(KOLO_ERR_REDUCER, "does not exist", kolo_reducer_sync_buffers(reducer, buffers_at, world));
  REFUSED(KOLO_ERR_ARGUMENT, "from is -2", kolo_reducer_sync_buffers(reducer, buffers_at, -2));
  REFUSED(KOLO_ERR_ARGUMENT, "values is null", kolo_reducer_broadcast_parameters(reducer, NULL));
  buffers_at[1] = NULL;
  REFUSED(KOLO_ERR_ARGUMENT, "an address of values is null", kolo_reducer_sync_buffers(reducer, buffers_at, 0));
  OK(kolo_reducer_destroy(reducer));
}

static void joins(void) {
  kolo_reducer_config_t config = options();
  kolo_reducer_t reducer;
  int more = 1, joined = 0, last = -1, i;
  config.uneven = KOLO_UNEVEN_BY_ACTIVE;
  config.unused = KOLO_UNUSED_FIND;
  reducer = make(&config);
  /* The last rank has the most input. */
  for (i = 0; i < my_rank; i++) {
    float c = 3;
    OK(kolo_reducer_begin(reducer));
    OK(kolo_reducer_put(reducer, C, &c, NULL));
    OK(kolo_reducer_finish(reducer));
    CHECK(*(float *)gradient(reducer, C) == 3);
  }
  for (;;) {
    OK(kolo_reducer_join(reducer, &more));
    if (!more) break;
    CHECK(*(float *)gradient(reducer, C) == 3);
    joined++;
  }
  CHECK(joined == world - 1 - my_rank);
  OK(kolo_reducer_last(reducer, &last));
  CHECK(last == world - 1);
  OK(kolo_reducer_destroy(reducer));
}

/* A hook that reduces on a communicator of its own, and sums instead. */
static int32_t sum(void *context, const kolo_bucket_t *bucket) {
  kolo_comm_t own = *(kolo_comm_t *)context;
  return kolo_all_reduce(bucket->data, bucket->data, bucket->count, bucket->dtype, KOLO_SUM, own, NULL);
}

static int32_t fail(void *context, const kolo_bucket_t *bucket) {
  (void)context;
  return bucket->count > 0 ? KOLO_ERR_COUNTS : 0;
}

/* A hook that calls reducers, which it must not: its own would wait for it. */
typedef struct {
  kolo_reducer_t own;
  int called;
} nested_t;

static int32_t nested(void *context, const kolo_bucket_t *bucket) {
  nested_t *at = (nested_t *)context;
  kolo_reducer_t another;
  void *place;
  int number;
  (void)bucket;
  REFUSED(KOLO_ERR_REDUCER, "in hook_function", kolo_reducer_begin(at->own));
  REFUSED(KOLO_ERR_REDUCER, "in hook_function", kolo_reducer_finish(at->own));
  REFUSED(KOLO_ERR_REDUCER, "in hook_function", kolo_reducer_gradient(at->own, A, &place, NULL));
  REFUSED(KOLO_ERR_REDUCER, "in hook_function", kolo_reducer_join(at->own, &number));
  REFUSED(KOLO_ERR_REDUCER, "in hook_function", kolo_reducer_is_used(at->own, A, &number));
  REFUSED(KOLO_ERR_REDUCER, "in hook_function", kolo_reducer_create(&another, parameters, PARAMETERS, NULL, 0, NULL, comm));
  REFUSED(KOLO_ERR_REDUCER, "in hook_function", kolo_reducer_destroy(at->own));
  at->called++;
  return 0;
}

static void calls_reducers_in_a_hook(void) {
  kolo_reducer_config_t config = options();
  nested_t context = {NULL, 0};
  kolo_reducer_t reducer;
  config.hook = KOLO_HOOK_CUSTOM;
  config.hook_function = nested;
  config.hook_context = &context;
  config.no_overlap = 1;
  reducer = context.own = make(&config);
  OK(kolo_reducer_begin(reducer));
  OK(kolo_reducer_unused(reducer, A));
  OK(kolo_reducer_unused(reducer, B));
  OK(kolo_reducer_unused(reducer, C));
  OK(kolo_reducer_finish(reducer));
  CHECK(context.called > 0);
  OK(kolo_reducer_destroy(reducer));
}

static void hooks(void) {
  kolo_reducer_config_t config = options();
  kolo_comm_t own;
  kolo_reducer_t reducer;
  int i, hook;
  float a[6] = {1, 2, 3, 4, 5, 6}, c = 1;
  double b[4] = {1, 2, 3, 4};
  OK(kolo_comm_split(comm, 0, my_rank, &own));
  for (hook = KOLO_HOOK_AVERAGE; hook <= KOLO_HOOK_ERROR_FEEDBACK; hook++) {
    float expected = hook == KOLO_HOOK_CUSTOM ? (float)world : 1;
    config.hook = hook;
    config.hook_rank = 2;
    config.hook_function = sum;
    config.hook_context = &own;
    reducer = make(&config);
    for (i = 0; i < 2; i++) {
      OK(kolo_reducer_begin(reducer));
      OK(kolo_reducer_put(reducer, C, &c, NULL));
      OK(kolo_reducer_put(reducer, B, b, NULL));
      OK(kolo_reducer_put(reducer, A, a, NULL));
      OK(kolo_reducer_finish(reducer));
      CHECK(*(float *)gradient(reducer, C) == expected);
      CHECK(((double *)gradient(reducer, B))[3] == 4 * expected);
    }
    OK(kolo_reducer_destroy(reducer));
  }
  config.hook = KOLO_HOOK_CUSTOM;
  config.hook_function = fail;
  reducer = make(&config);
  OK(kolo_reducer_begin(reducer));
  OK(kolo_reducer_put(reducer, C, &c, NULL));
  /* The bucket may have failed by now, or not. */
  if (kolo_reducer_put(reducer, B, b, NULL) == KOLO_OK && kolo_reducer_put(reducer, A, a, NULL) == KOLO_OK) {
    CHECK(kolo_reducer_finish(reducer) != KOLO_OK);
  }
  if (world == 1) {
    CHECK(strstr(last_error(NULL).message, "hook_function returned 6") != NULL);
    CHECK(strstr(last_error(NULL).message, kolo_error_string(KOLO_ERR_COUNTS)) != NULL);
  }
  REFUSED(KOLO_ERR_REVOKED, "", kolo_reducer_begin(reducer));
  OK(kolo_reducer_destroy(reducer));
  OK(kolo_comm_destroy(own));
}

static void misuse(void) {
  kolo_reducer_config_t config = options();
  kolo_reducer_t reducer = (kolo_reducer_t)&config, good;
  kolo_tensor_t tensor = {NULL, NULL, 1, KOLO_FLOAT32, 0};
  float a[7] = {0};
  void *place, *addresses[PARAMETERS + 1];
  int more;
  for (more = 0; more <= PARAMETERS; more++) addresses[more] = (char *)a + 1;
  REFUSED(KOLO_ERR_HANDLE, "reducer handle is not valid", kolo_reducer_begin(reducer));
  REFUSED(KOLO_ERR_HANDLE, "reducer handle is null", kolo_reducer_finish(NULL));
  REFUSED(KOLO_ERR_HANDLE, "reducer handle is not valid", kolo_reducer_destroy((kolo_reducer_t)comm));
  REFUSED(KOLO_ERR_ARGUMENT, "name is null", kolo_reducer_create(&reducer, &tensor, 1, NULL, 0, NULL, comm));
  CHECK(reducer == NULL);
  tensor.name = "a";
  REFUSED(KOLO_ERR_ARGUMENT, "shape is null", kolo_reducer_create(&reducer, &tensor, 1, NULL, 0, NULL, comm));
  tensor.ndim = 0;
  tensor.dtype = 99;
  REFUSED(KOLO_ERR_ARGUMENT, "dtype is 99", kolo_reducer_create(&reducer, &tensor, 1, NULL, 0, NULL, comm));
  REFUSED(KOLO_ERR_ARGUMENT, "parameters is null", kolo_reducer_create(&reducer, NULL, 1, NULL, 0, NULL, comm));
  REFUSED(KOLO_ERR_ARGUMENT, "reducer is null", kolo_reducer_create(NULL, parameters, 3, NULL, 0, NULL, comm));
  REFUSED(KOLO_ERR_ARGUMENT, "length of parameters is", kolo_reducer_create(&reducer, parameters, (size_t)-1, NULL, 0, NULL, comm));
  REFUSED(KOLO_ERR_ARGUMENT, "length of buffers is", kolo_reducer_create(&reducer, parameters, 3, buffers, (size_t)-1 / 4, NULL, comm));
  REFUSED(KOLO_ERR_ARGUMENT, "parameters is not aligned",
          kolo_reducer_create(&reducer, (const kolo_tensor_t *)((const char *)parameters + 1), 1, NULL, 0, NULL, comm));
  tensor.dtype = KOLO_FLOAT32;
  tensor.shape = matrix;
  tensor.ndim = (size_t)-1;
  REFUSED(KOLO_ERR_ARGUMENT, "more than memory can hold", kolo_reducer_create(&reducer, &tensor, 1, NULL, 0, NULL, comm));
  tensor.shape = (const size_t *)((const char *)matrix + 1);
  tensor.ndim = 1;
  REFUSED(KOLO_ERR_ARGUMENT, "shape is not aligned", kolo_reducer_create(&reducer, &tensor, 1, NULL, 0, NULL, comm));
  REFUSED(KOLO_ERR_ARGUMENT, "config is not aligned",
          kolo_reducer_create(&reducer, parameters, 3, NULL, 0, (kolo_reducer_config_t *)((char *)&config + 1), comm));
  REFUSED(KOLO_ERR_SETTING, "at least one", kolo_reducer_create(&reducer, NULL, 0, NULL, 0, NULL, comm));
  tensor.shape = vector;
  tensor.on_device = 2;
  REFUSED(KOLO_ERR_ARGUMENT, "on_device of a tensor is 2", kolo_reducer_create(&reducer, &tensor, 1, NULL, 0, NULL, comm));
  OK(kolo_comm_has_devices(comm, &more));
  if (!more) {
    tensor.on_device = 1;
    REFUSED(KOLO_ERR_UNSUPPORTED, "device", kolo_reducer_create(&reducer, &tensor, 1, NULL, 0, NULL, comm));
    REFUSED(KOLO_ERR_UNSUPPORTED, "device", kolo_reducer_create(&reducer, parameters, 3, &tensor, 1, NULL, comm));
  }
  config.device = -1;
  REFUSED(KOLO_ERR_ARGUMENT, "config->device is -1", kolo_reducer_create(&reducer, parameters, 3, NULL, 0, &config, comm));
  config.device = 0;
  config.hook = 7;
  REFUSED(KOLO_ERR_ARGUMENT, "config->hook is 7", kolo_reducer_create(&reducer, parameters, 3, NULL, 0, &config, comm));
  config.hook = KOLO_HOOK_CUSTOM;
  REFUSED(KOLO_ERR_ARGUMENT, "hook_function is null", kolo_reducer_create(&reducer, parameters, 3, NULL, 0, &config, comm));
  config.size = 8;
  REFUSED(KOLO_ERR_ARGUMENT, "config->size", kolo_reducer_create(&reducer, parameters, 3, NULL, 0, &config, comm));
  good = make(NULL);
  REFUSED(KOLO_ERR_REDUCER, "begin one first", kolo_reducer_ready(good, A));
  REFUSED(KOLO_ERR_REDUCER, "no parameter 3", kolo_reducer_put(good, 3, a, NULL));
  REFUSED(KOLO_ERR_REDUCER, "no parameter 3", kolo_reducer_gradient(good, 3, &place, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "gradient is null", kolo_reducer_put(good, A, NULL, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "aligned", kolo_reducer_put(good, A, (char *)a + 1, NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "strides is not aligned", kolo_reducer_put(good, A, a, (const size_t *)((const char *)matrix + 1)));
  REFUSED(KOLO_ERR_ARGUMENT, "values is not aligned",
          kolo_reducer_broadcast_parameters(good, (void *const *)(void *)((char *)addresses + 1)));
  REFUSED(KOLO_ERR_ARGUMENT, "an address of values is not aligned", kolo_reducer_broadcast_parameters(good, addresses));
  REFUSED(KOLO_ERR_ARGUMENT, "gradient is not aligned",
          kolo_reducer_gradient(good, A, (void **)(void *)((char *)addresses + 1), NULL));
  REFUSED(KOLO_ERR_ARGUMENT, "stats is not aligned", kolo_reducer_stats(good, (kolo_step_stats_t *)((char *)addresses + 1)));
  REFUSED(KOLO_ERR_REDUCER, "join", kolo_reducer_join(good, &more));
  OK(kolo_reducer_begin(good));
  REFUSED(KOLO_ERR_REDUCER, "in progress", kolo_reducer_begin(good));
  place = gradient(good, A);
  REFUSED(KOLO_ERR_REDUCER, "call kolo_reducer_ready", kolo_reducer_put(good, A, place, NULL));
  REFUSED(KOLO_ERR_REDUCER, "call kolo_reducer_ready", kolo_reducer_put(good, A, (float *)place + 5, NULL));
  OK(kolo_reducer_ready(good, A));
  REFUSED(KOLO_ERR_REDUCER, "a was marked ready", kolo_reducer_ready(good, A));
  /* It is given up. */
  OK(kolo_reducer_destroy(good));
  REFUSED(KOLO_ERR_HANDLE, "not valid", kolo_reducer_destroy(good));
}

/* What one rank does wrong all hear, and the communicator stays. */
static void wrong_together(void) {
  kolo_tensor_t other[PARAMETERS];
  kolo_reducer_t reducer;
  float a[6] = {0}, c = 1;
  memcpy(other, parameters, sizeof other);
  if (my_rank == world - 1) other[B].dtype = KOLO_FLOAT32;
  if (world > 1) {
    REFUSED(KOLO_ERR_REDUCER, "parameter 1", kolo_reducer_create(&reducer, other, PARAMETERS, NULL, 0, NULL, comm));
    CHECK(strstr(last_error(NULL).message, "`b f64 [4]`") && strstr(last_error(NULL).message, "`b f32 [4]`"));
    CHECK(last_error(NULL).usable == 1);
  }
  reducer = make(NULL);
  OK(kolo_reducer_begin(reducer));
  OK(kolo_reducer_put(reducer, A, a, NULL));
  OK(kolo_reducer_put(reducer, C, &c, NULL));
  if (my_rank == 0) {
    REFUSED(KOLO_ERR_REDUCER, "but b is not ready", kolo_reducer_finish(reducer));
  } else {
    kolo_result_t result = kolo_reducer_unused(reducer, B);
    if (result == KOLO_OK) result = kolo_reducer_finish(reducer);
    CHECK(result == KOLO_ERR_PEER);
  }
  OK(kolo_reducer_destroy(reducer));
  OK(kolo_barrier(comm, NULL));
}

int main(void) {
  OK(kolo_comm_init_env(&comm, NULL));
  OK(kolo_comm_rank(comm, &my_rank));
  OK(kolo_comm_count(comm, &world));
  averages();
  accumulates();
  values();
  joins();
  hooks();
  calls_reducers_in_a_hook();
  misuse();
  wrong_together();
  OK(kolo_comm_destroy(comm));
  printf("the reducer works\n");
  return 0;
}
