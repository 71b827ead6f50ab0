/* What the tests in C have in common. They are also compiled as C++. */
#ifndef CHECK_H
#define CHECK_H

#include "kolo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int my_rank = -1;

static inline kolo_error_t last_error(kolo_comm_t comm) {
  kolo_error_t error = KOLO_ERROR_INITIALIZER;
  if (kolo_last_error(comm, &error) != KOLO_OK) {
    fprintf(stderr, "rank %d: there is no last error of this communicator\n", my_rank);
    exit(1);
  }
  return error;
}

/* A condition that must hold. */
#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      kolo_error_t failed_with = last_error(NULL); \
      fprintf(stderr, "%s:%d: rank %d: not true: %s (last error: %d %s)\n", __FILE__, __LINE__, my_rank, #condition, \
              (int)failed_with.code, failed_with.message); \
      exit(1); \
    } \
  } while (0)

/* A call that must succeed, and one that must return a certain result and say so in words. */
#define OK(call) CHECK((call) == KOLO_OK)
#define REFUSED(result, words, call) \
  do { \
    CHECK((call) == (result)); \
    CHECK(last_error(NULL).code == (result)); \
    CHECK(strstr(last_error(NULL).message, words) != NULL); \
  } while (0)

static inline void *allocate(size_t bytes) {
  void *memory = malloc(bytes > 0 ? bytes : 1);
  CHECK(memory != NULL);
  return memory;
}

#endif
