/* Every collective, on every element type, blocking, started and in a group, in place and not, against plain loops.
 *
 * usage: collectives MOST, where no block has more than MOST elements. */
#include "check.h"

#include <sched.h>

enum { BLOCKING, STARTED, GROUPED, MODES };

static kolo_comm_t comm;
static int world;

static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 2, 2, 1, 1, 1};
enum { DTYPES = 15 };

static int is_float(int dtype) {
  return dtype == KOLO_FLOAT16 || dtype == KOLO_FLOAT32 || dtype == KOLO_FLOAT64 || dtype == KOLO_BFLOAT16 ||
         dtype >= KOLO_FLOAT8_E4M3;
}

/* Numbers up to 255 and their quarters are exact in floating-point types of 16 bits and more, products of up to 4 of the
 * values below in those of 8. */
static void put(void *buffer, size_t i, int dtype, double value) {
  float single = (float)value;
  uint32_t bits;
  uint16_t half;
  memcpy(&bits, &single, 4);
  switch (dtype) {
  case KOLO_INT8: ((int8_t *)buffer)[i] = (int8_t)value; break;
  case KOLO_UINT8: case KOLO_BOOL: ((uint8_t *)buffer)[i] = (uint8_t)value; break;
  case KOLO_INT16: ((int16_t *)buffer)[i] = (int16_t)value; break;
  case KOLO_UINT16: ((uint16_t *)buffer)[i] = (uint16_t)value; break;
  case KOLO_INT32: ((int32_t *)buffer)[i] = (int32_t)value; break;
  case KOLO_UINT32: ((uint32_t *)buffer)[i] = (uint32_t)value; break;
  case KOLO_INT64: ((int64_t *)buffer)[i] = (int64_t)value; break;
  case KOLO_UINT64: ((uint64_t *)buffer)[i] = (uint64_t)value; break;
  case KOLO_FLOAT32: ((float *)buffer)[i] = single; break;
  case KOLO_FLOAT64: ((double *)buffer)[i] = value; break;
  case KOLO_BFLOAT16: ((uint16_t *)buffer)[i] = (uint16_t)(bits >> 16); break;
  case KOLO_FLOAT8_E4M3:
    ((uint8_t *)buffer)[i] = value == 0 ? 0 : (uint8_t)(((bits >> 23) - 127 + 7) << 3 | (bits >> 20 & 7));
    break;
  case KOLO_FLOAT8_E5M2:
    ((uint8_t *)buffer)[i] = value == 0 ? 0 : (uint8_t)(((bits >> 23) - 127 + 15) << 2 | (bits >> 21 & 3));
    break;
  default: /* KOLO_FLOAT16: another bias and fewer bits */
    half = value == 0 ? 0 : (uint16_t)(((bits >> 23) - 127 + 15) << 10 | (bits >> 13 & 0x3ff));
    ((uint16_t *)buffer)[i] = half;
  }
}

static double get(const void *buffer, size_t i, int dtype) {
  float single;
  uint32_t bits, half;
  switch (dtype) {
  case KOLO_INT8: return ((const int8_t *)buffer)[i];
  case KOLO_UINT8: case KOLO_BOOL: return ((const uint8_t *)buffer)[i];
  case KOLO_INT16: return ((const int16_t *)buffer)[i];
  case KOLO_UINT16: return ((const uint16_t *)buffer)[i];
  case KOLO_INT32: return ((const int32_t *)buffer)[i];
  case KOLO_UINT32: return ((const uint32_t *)buffer)[i];
  case KOLO_INT64: return (double)((const int64_t *)buffer)[i];
  case KOLO_UINT64: return (double)((const uint64_t *)buffer)[i];
  case KOLO_FLOAT32: return ((const float *)buffer)[i];
  case KOLO_FLOAT64: return ((const double *)buffer)[i];
  case KOLO_BFLOAT16: bits = (uint32_t)((const uint16_t *)buffer)[i] << 16; break;
  case KOLO_FLOAT8_E4M3:
    half = ((const uint8_t *)buffer)[i];
    bits = half == 0 ? 0 : ((half >> 3) + 127 - 7) << 23 | (half & 7) << 20;
    break;
  case KOLO_FLOAT8_E5M2:
    half = ((const uint8_t *)buffer)[i];
    bits = half == 0 ? 0 : ((half >> 2) + 127 - 15) << 23 | (half & 3) << 21;
    break;
  default:
    half = ((const uint16_t *)buffer)[i];
    bits = half == 0 ? 0 : ((half >> 10) + 127 - 15) << 23 | (half & 0x3ff) << 13;
  }
  memcpy(&single, &bits, 4);
  return single;
}

/* What a rank gives at a place: small, so that sums and products of 4 ranks fit. */
static double value(int rank, size_t i, int dtype) {
  if (dtype == KOLO_FLOAT8_E5M2) return (double)((rank + (int)(i % 5)) % 2 + 1);
  return dtype == KOLO_BOOL ? (double)((rank + (int)(i % 5)) % 2) : (double)((rank * 2 + (int)(i % 7)) % 3 + 1);
}

/* The reduction of all ranks, done plainly. */
static double reduced(size_t i, int dtype, int op) {
  double result = value(0, i, dtype);
  int rank;
  for (rank = 1; rank < world; rank++) {
    double next = value(rank, i, dtype);
    switch (op) {
    case KOLO_SUM: case KOLO_AVG: result += next; break;
    case KOLO_PROD: result *= next; break;
    case KOLO_MAX: result = next > result ? next : result; break;
    case KOLO_MIN: result = next < result ? next : result; break;
    case KOLO_BAND: result = (int)result & (int)next; break;
    case KOLO_BOR: result = (int)result | (int)next; break;
    default: result = (int)result ^ (int)next;
    }
  }
  return op == KOLO_AVG ? result / world : result;
}

static int applies(int op, int dtype) {
  /* Averages of the values above are not exact in KOLO_FLOAT8_E5M2. */
  if (op == KOLO_AVG) return is_float(dtype) && dtype != KOLO_FLOAT8_E5M2;
  if (op >= KOLO_BAND) return !is_float(dtype);
  return dtype != KOLO_BOOL || op == KOLO_MAX || op == KOLO_MIN;
}

static void finish(kolo_work_t work) {
  int32_t done = -1;
  uint64_t nanoseconds = 0;
  kolo_result_t result = kolo_work_wait_timeout(work, 0);
  CHECK(result == KOLO_OK || result == KOLO_IN_PROGRESS);
  OK(kolo_work_wait(work));
  OK(kolo_work_wait_timeout(work, 0));
  OK(kolo_work_test(work, &done));
  CHECK(done == 1);
  OK(kolo_work_duration(work, &nanoseconds));
  CHECK(nanoseconds > 0 && nanoseconds < 1000000000000u);
  OK(kolo_work_cancel(work)); /* it has ended: nothing happens */
  OK(kolo_work_destroy(work));
}

/* One call, in one of the three modes. */
#define RUN(mode, name, ...) \
  do { \
    kolo_work_t work = NULL; \
    if ((mode) == STARTED) { \
      OK(kolo_start_##name(__VA_ARGS__, comm, NULL, &work)); \
      finish(work); \
    } else { \
      if ((mode) == GROUPED) OK(kolo_group_start()); \
      OK(kolo_##name(__VA_ARGS__, comm, NULL)); \
      if ((mode) == GROUPED) OK(kolo_group_end()); \
    } \
  } while (0)

/* A buffer of so many elements, all of them the same garbage. */
static char *garbage(size_t count, int dtype) {
  char *buffer = (char *)allocate(count * SIZES[dtype]);
  size_t i;
  for (i = 0; i < count; i++) put(buffer, i, dtype, dtype == KOLO_BOOL ? 1 : 99);
  return buffer;
}

/* What this rank gives, from an element on. */
static char *mine(size_t count, int dtype) {
  char *buffer = garbage(count, dtype);
  size_t i;
  for (i = 0; i < count; i++) put(buffer, i, dtype, value(my_rank, i, dtype));
  return buffer;
}

static void reductions(size_t count, int dtype, int mode) {
  size_t i, element = SIZES[dtype], all = count * (size_t)world;
  int op, in_place, root = (int)count % world;
  for (op = KOLO_SUM; op <= KOLO_BXOR; op++) {
    if (!applies(op, dtype)) continue;
    for (in_place = 0; in_place < 2; in_place++) {
      char *send = mine(count, dtype), *recv = in_place ? send : garbage(count, dtype);
      RUN(mode, all_reduce, send, recv, count, dtype, op);
      for (i = 0; i < count; i++) CHECK(get(recv, i, dtype) == reduced(i, dtype, op));
      if (!in_place) {
        for (i = 0; i < count; i++) CHECK(get(send, i, dtype) == value(my_rank, i, dtype));
        free(recv);
      }
      free(send);

      send = mine(count, dtype);
      recv = in_place ? send : my_rank == root ? garbage(count, dtype) : NULL;
      RUN(mode, reduce, send, recv, count, dtype, op, root);
      for (i = 0; i < count; i++) {
        if (my_rank == root) CHECK(get(recv, i, dtype) == reduced(i, dtype, op));
        else CHECK(get(send, i, dtype) == value(my_rank, i, dtype));
      }
      if (!in_place) free(recv);
      free(send);

      send = mine(all, dtype);
      recv = in_place ? send + (size_t)my_rank * count * element : garbage(count, dtype);
      RUN(mode, reduce_scatter, send, recv, count, dtype, op);
      for (i = 0; i < count; i++) CHECK(get(recv, i, dtype) == reduced((size_t)my_rank * count + i, dtype, op));
      if (!in_place) free(recv);
      free(send);
    }
  }
}

/* What is only moved. */
static void movements(size_t count, int dtype, int mode) {
  size_t i, element = SIZES[dtype], all = count * (size_t)world;
  int in_place, rank, root = (int)(count + 1) % world, is_root = my_rank == root;
  for (in_place = 0; in_place < 2; in_place++) {
    size_t own = (size_t)my_rank * count;
    char *given = mine(count, dtype), *recv = garbage(all, dtype), *send = given;
    if (in_place) {
      send = recv + own * element;
      memcpy(send, given, count * element);
    }
    RUN(mode, all_gather, send, recv, count, dtype);
    for (i = 0; i < all; i++) CHECK(get(recv, i, dtype) == value((int)(i / count), i % count, dtype));
    free(recv);

    recv = is_root || in_place ? garbage(all, dtype) : NULL;
    send = given;
    if (in_place) {
      send = recv + own * element;
      memcpy(send, given, count * element);
    }
    RUN(mode, gather, send, recv, count, dtype, root);
    for (i = 0; is_root && i < all; i++) CHECK(get(recv, i, dtype) == value((int)(i / count), i % count, dtype));
    free(recv);
    free(given);

    send = is_root || in_place ? mine(count, dtype) : NULL;
    recv = in_place ? send : garbage(count, dtype);
    RUN(mode, broadcast, send, recv, count, dtype, root);
    for (i = 0; i < count; i++) CHECK(get(recv, i, dtype) == value(root, i, dtype));
    if (!in_place) free(recv);
    free(send);

    send = is_root || in_place ? mine(all, dtype) : NULL;
    recv = in_place ? send + own * element : garbage(count, dtype);
    RUN(mode, scatter, send, recv, count, dtype, root);
    for (i = 0; i < count; i++) CHECK(get(recv, i, dtype) == value(root, own + i, dtype));
    if (!in_place) free(recv);
    free(send);

    send = mine(all, dtype);
    recv = in_place ? send : garbage(all, dtype);
    RUN(mode, all_to_all, send, recv, count, dtype);
    for (i = 0; i < all; i++) CHECK(get(recv, i, dtype) == value((int)(i / count), own + i % count, dtype));
    if (!in_place) free(recv);
    free(send);
  }
  for (rank = 0; rank < world; rank++) {
    if (rank == my_rank || world == 1) continue;
    {
      char *send = mine(count, dtype), *recv = garbage(count, dtype);
      OK(kolo_send_recv(send, count, rank, recv, count, rank, dtype, comm, NULL));
      for (i = 0; i < count; i++) CHECK(get(recv, i, dtype) == value(rank, i, dtype));
      free(recv);
      recv = garbage(count, dtype);
      if (mode == BLOCKING) {
        /* The lower one sends first. */
        if (my_rank < rank) {
          OK(kolo_send(send, count, dtype, rank, comm, NULL));
          OK(kolo_recv(recv, count, dtype, rank, comm, NULL));
        } else {
          OK(kolo_recv(recv, count, dtype, rank, comm, NULL));
          OK(kolo_send(send, count, dtype, rank, comm, NULL));
        }
      } else if (mode == STARTED) {
        kolo_work_t sent, received;
        OK(kolo_start_send(send, count, dtype, rank, comm, NULL, &sent));
        OK(kolo_start_recv(recv, count, dtype, rank, comm, NULL, &received));
        finish(received);
        finish(sent);
      } else {
        /* Both receive first: that would never end outside of a group. */
        OK(kolo_group_start());
        OK(kolo_recv(recv, count, dtype, rank, comm, NULL));
        OK(kolo_send(send, count, dtype, rank, comm, NULL));
        OK(kolo_group_end());
      }
      for (i = 0; i < count; i++) CHECK(get(recv, i, dtype) == value(rank, i, dtype));
      free(recv);
      free(send);
    }
  }
  /* From whoever sends first. */
  OK(kolo_barrier(comm, NULL));
  if (my_rank == 0) {
    for (rank = 1; rank < world; rank++) {
      int32_t source = -1;
      char *recv = garbage(count, dtype);
      if (mode == BLOCKING) {
        OK(kolo_recv_any(recv, count, dtype, &source, comm, NULL));
      } else {
        kolo_work_t received;
        OK(kolo_start_recv_any(recv, count, dtype, &source, comm, NULL, &received));
        finish(received);
      }
      CHECK(source > 0 && source < world);
      for (i = 0; i < count; i++) CHECK(get(recv, i, dtype) == value(source, i, dtype));
      free(recv);
    }
  } else {
    char *send = mine(count, dtype);
    OK(kolo_send(send, count, dtype, 0, comm, NULL));
    free(send);
  }
  OK(kolo_barrier(comm, NULL));
}

/* The forms with a count for each rank. */
static size_t block(int rank, size_t count) { return count + (size_t)rank; }
static size_t pair(int from, int to, size_t count) { return count + (size_t)(3 * from + to) % 4; }

static void with_counts(size_t count, int dtype, int mode) {
  size_t element = SIZES[dtype], i, all = 0, own = 0, sent = 0, expected = 0;
  size_t *counts = (size_t *)allocate(sizeof(size_t) * (size_t)world);
  size_t *sends = (size_t *)allocate(sizeof(size_t) * (size_t)world);
  size_t *recvs = (size_t *)allocate(sizeof(size_t) * (size_t)world);
  char *send, *recv;
  int rank, in_place, op = dtype == KOLO_BOOL ? KOLO_MAX : KOLO_SUM;
  for (rank = 0; rank < world; rank++) {
    counts[rank] = block(rank, count);
    if (rank < my_rank) own += counts[rank];
    all += counts[rank];
    sent += sends[rank] = pair(my_rank, rank, count);
    expected += recvs[rank] = pair(rank, my_rank, count);
  }
  for (in_place = 0; in_place < 2; in_place++) {
    char *given = mine(counts[my_rank], dtype);
    recv = garbage(all, dtype);
    send = given;
    if (in_place) {
      send = recv + own * element;
      memcpy(send, given, counts[my_rank] * element);
    }
    RUN(mode, all_gather_v, send, recv, counts, dtype);
    for (rank = 0, i = 0; rank < world; rank++) {
      size_t j;
      for (j = 0; j < counts[rank]; j++, i++) CHECK(get(recv, i, dtype) == value(rank, j, dtype));
    }
    free(recv);
    free(given);

    send = mine(all, dtype);
    recv = in_place ? send + own * element : garbage(counts[my_rank], dtype);
    RUN(mode, reduce_scatter_v, send, recv, counts, dtype, op);
    for (i = 0; i < counts[my_rank]; i++) CHECK(get(recv, i, dtype) == reduced(own + i, dtype, op));
    if (!in_place) free(recv);
    free(send);
  }
  send = mine(sent, dtype);
  recv = garbage(expected, dtype);
  RUN(mode, all_to_all_v, send, sends, recv, recvs, dtype);
  for (rank = 0, i = 0; rank < world; rank++) {
    size_t j, before = 0;
    int to;
    for (to = 0; to < my_rank; to++) before += pair(rank, to, count);
    for (j = 0; j < recvs[rank]; j++, i++) CHECK(get(recv, i, dtype) == value(rank, before + j, dtype));
  }
  free(recv);
  free(send);
  free(recvs);
  free(sends);
  free(counts);
}

/* Operations take effect in the order of their calls, started or not. */
static void in_order(void) {
  int64_t a = 1, b = 0;
  kolo_work_t first, second;
  OK(kolo_start_all_reduce(&a, &a, 1, KOLO_INT64, KOLO_SUM, comm, NULL, &first));
  OK(kolo_start_all_reduce(&a, &b, 1, KOLO_INT64, KOLO_SUM, comm, NULL, &second));
  OK(kolo_barrier(comm, NULL));
  finish(second);
  finish(first);
  CHECK(a == world && b == (int64_t)world * world);
  a = 1;
  OK(kolo_group_start());
  OK(kolo_group_start());
  OK(kolo_all_reduce(&a, &a, 1, KOLO_INT64, KOLO_SUM, comm, NULL));
  OK(kolo_group_end());
  CHECK(a == 1); /* the outermost group is still open */
  OK(kolo_all_reduce(&a, &b, 1, KOLO_INT64, KOLO_SUM, comm, NULL));
  OK(kolo_barrier(comm, NULL));
  OK(kolo_group_end());
  CHECK(a == world && b == (int64_t)world * world);
  OK(kolo_group_start());
  OK(kolo_group_end());
  OK(kolo_start_barrier(comm, NULL, &first));
  finish(first);
}

static void groups_of_ranks(void) {
  kolo_comm_t part, none;
  int32_t rank, count, sum = my_rank, expected = 0, i;
  /* Odd and even ranks, in reverse order. */
  OK(kolo_comm_split(comm, my_rank % 2, -my_rank, &part));
  OK(kolo_comm_rank(part, &rank));
  OK(kolo_comm_count(part, &count));
  CHECK(count == (world + 1 - my_rank % 2) / 2);
  CHECK(rank == count - 1 - my_rank / 2);
  OK(kolo_all_reduce(&sum, &sum, 1, KOLO_INT32, KOLO_SUM, part, NULL));
  for (i = my_rank % 2; i < world; i += 2) expected += i;
  CHECK(sum == expected);
  /* Calls of two communicators in one group. */
  sum = 1;
  i = 1;
  OK(kolo_group_start());
  OK(kolo_all_reduce(&sum, &sum, 1, KOLO_INT32, KOLO_SUM, part, NULL));
  OK(kolo_all_reduce(&i, &i, 1, KOLO_INT32, KOLO_SUM, comm, NULL));
  OK(kolo_group_end());
  CHECK(sum == count && i == world);
  OK(kolo_comm_destroy(part));
  OK(kolo_comm_split(comm, my_rank == 0 ? 0 : KOLO_NO_COLOR, 0, &none));
  CHECK((none == NULL) == (my_rank != 0));
  if (none != NULL) OK(kolo_comm_destroy(none));
}

static void registered(size_t count) {
  void *memory, *nothing;
  float *floats;
  size_t i;
  OK(kolo_mem_alloc(&memory, count * sizeof(float), comm));
  OK(kolo_mem_alloc(&nothing, 0, comm));
  CHECK(nothing != NULL && nothing != memory);
  floats = (float *)memory;
  for (i = 0; i < count; i++) CHECK(floats[i] == 0);
  for (i = 0; i < count; i++) floats[i] = (float)value(my_rank, i, KOLO_FLOAT32);
  OK(kolo_all_reduce(memory, memory, count, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
  for (i = 0; i < count; i++) CHECK(floats[i] == (float)reduced(i, KOLO_FLOAT32, KOLO_SUM));
  OK(kolo_barrier(comm, NULL));
  OK(kolo_mem_free(nothing));
  OK(kolo_mem_free(memory));
}

/* Each rank takes and frees memory alone, and the others reduce it in place from the third operation on. */
static void pooled(size_t count) {
  void *memory, *before = NULL, *other;
  float *floats;
  size_t i;
  int round;
  for (round = 0; round < 4; round++) {
    if (my_rank == 0) OK(kolo_mem_alloc_pooled(&other, 0, comm));
    OK(kolo_mem_alloc_pooled(&memory, count * sizeof(float), comm));
    if (my_rank == 0) {
      CHECK(other != NULL && other != memory);
      OK(kolo_mem_free(other));
    } else {
      CHECK(before == NULL || memory == before);
    }
    before = memory;
    floats = (float *)memory;
    for (i = 0; i < count; i++) floats[i] = (float)value(my_rank, i, KOLO_FLOAT32);
    OK(kolo_all_reduce(memory, memory, count, KOLO_FLOAT32, KOLO_SUM, comm, NULL));
    for (i = 0; i < count; i++) CHECK(floats[i] == (float)reduced(i, KOLO_FLOAT32, KOLO_SUM));
    OK(kolo_mem_free(memory));
  }
}

/* What kolo_work_on_done tells. */
struct done {
  int32_t calls;
  kolo_result_t result;
};

static void note_done(void *context, kolo_result_t result) {
  struct done *done = (struct done *)context;
  done->result = result;
  __atomic_add_fetch(&done->calls, 1, __ATOMIC_RELEASE);
}

/* Waits for the function, which must be called once, whether the operation has ended before or not. */
static void await_done(struct done *done) {
  while (__atomic_load_n(&done->calls, __ATOMIC_ACQUIRE) == 0) {
    sched_yield();
  }
  CHECK(done->calls == 1 && done->result == KOLO_OK);
}

/* Rank 0 has three operations in flight, and is told when each has ended. */
static void told_of_the_end(void) {
  kolo_work_t works[3];
  uint64_t nanoseconds = 7;
  kolo_result_t result;
  size_t index = 7;
  int32_t mine = my_rank, theirs = -1;
  struct done early = {0, -1}, late = {0, -1};
  if (world == 1) return;
  if (my_rank > 1) {
    OK(kolo_barrier(comm, NULL));
    return;
  }
  if (my_rank == 1) {
    OK(kolo_barrier(comm, NULL));
    OK(kolo_recv(&theirs, 1, KOLO_INT32, 0, comm, NULL));
    OK(kolo_send(&mine, 1, KOLO_INT32, 0, comm, NULL));
    return;
  }
  OK(kolo_start_barrier(comm, NULL, &works[1]));
  OK(kolo_start_recv(&theirs, 1, KOLO_INT32, 1, comm, NULL, &works[0]));
  /* Rank 1 sends after it has received. */
  CHECK(kolo_work_duration(works[0], &nanoseconds) == KOLO_IN_PROGRESS && nanoseconds == 7);
  OK(kolo_start_send(&mine, 1, KOLO_INT32, 1, comm, NULL, &works[2]));
  OK(kolo_work_on_done(works[0], note_done, &early));
  while ((result = kolo_work_wait_any(works, 2, &index, 20)) == KOLO_IN_PROGRESS) {
  }
  CHECK(result == KOLO_OK && index < 2);
  OK(kolo_work_wait_any(&works[1], 1, &index, 1000000));
  CHECK(index == 0);
  OK(kolo_work_wait_any(&works[0], 1, &index, 1000000));
  OK(kolo_work_on_done(works[0], note_done, &late));
  finish(works[2]);
  OK(kolo_work_destroy(works[0]));
  OK(kolo_work_destroy(works[1]));
  await_done(&early);
  await_done(&late);
  CHECK(theirs == 1);
}

int main(int argc, char **argv) {
  size_t counts[] = {0, 1, 5, 300, 70000};
  size_t most = argc > 1 ? (size_t)atoi(argv[1]) : 70000, i;
  int dtype, mode;
  int32_t rank, count;
  size_t size = 0;
  OK(kolo_dtype_size(KOLO_FLOAT64, &size));
  CHECK(size == 8);
  OK(kolo_dtype_size(KOLO_BOOL, &size));
  CHECK(size == 1);
  OK(kolo_comm_init_env(&comm, NULL));
  OK(kolo_comm_rank(comm, &rank));
  OK(kolo_comm_count(comm, &count));
  my_rank = rank;
  world = count;
  for (i = 0; i < sizeof counts / sizeof counts[0] && counts[i] <= most; i++) {
    for (dtype = 0; dtype < DTYPES; dtype++) {
      for (mode = BLOCKING; mode < MODES; mode++) {
        /* Large ones once for each mode. */
        if (counts[i] > 1000 && dtype % MODES != mode) continue;
        reductions(counts[i], dtype, mode);
        movements(counts[i], dtype, mode);
        with_counts(counts[i], dtype, mode);
      }
    }
  }
  in_order();
  told_of_the_end();
  groups_of_ranks();
  registered(most);
  pooled(most);
  OK(kolo_comm_get_async_error(comm, &count));
  CHECK(count == KOLO_OK && last_error(comm).code == KOLO_OK && last_error(NULL).code == KOLO_OK);
  OK(kolo_comm_destroy(comm));
  printf("rank %d of %d: every collective\n", my_rank, world);
  return 0;
}
