/* Data-parallel training: each rank computes the gradients of its own samples, and the reducer
 * averages them during the rest of the backward pass. The model is y = weight * x + bias, and the
 * samples are of y = 3 x + 1.
 *
 *   cc -std=c99 data_parallel.c $(pkg-config --cflags --libs kolo) -o data_parallel && kolo run -n 2 -- ./data_parallel
 */
#include <kolo.h>
#include <stdio.h>
#include <stdlib.h>

enum { WEIGHT, BIAS, PARAMETERS, SAMPLES = 16 };

static void check(kolo_result_t result) {
  if (result == KOLO_OK) return;
  kolo_error_t error = KOLO_ERROR_INITIALIZER;
  kolo_last_error(NULL, &error);
  fprintf(stderr, "%s\n", error.message);
  exit(1);
}

int main(void) {
  kolo_comm_t comm;
  int32_t rank;
  check(kolo_comm_init_env(&comm, NULL));
  check(kolo_comm_rank(comm, &rank));

  /* The parameters in the order in which the forward pass uses them. */
  size_t shape[] = {1};
  kolo_tensor_t parameters[PARAMETERS] = {{"weight", shape, 1, KOLO_FLOAT32, 0}, {"bias", shape, 1, KOLO_FLOAT32, 0}};
  kolo_reducer_t reducer;
  check(kolo_reducer_create(&reducer, parameters, PARAMETERS, NULL, 0, NULL, comm));

  /* All ranks start with the values of rank 0. */
  float model[PARAMETERS] = {(float)rank, (float)rank};
  void *values[PARAMETERS] = {&model[WEIGHT], &model[BIAS]};
  check(kolo_reducer_broadcast_parameters(reducer, values));

  for (int step = 0; step < 500; step++) {
    float error[SAMPLES], x[SAMPLES];
    for (int i = 0; i < SAMPLES; i++) {
      x[i] = (float)((rank * SAMPLES + i * 7 + step) % 32) / 16 - 1;
      error[i] = model[WEIGHT] * x[i] + model[BIAS] - (3 * x[i] + 1);
    }

    check(kolo_reducer_begin(reducer));
    /* The backward pass starts with the last parameter. Write its gradient in place. */
    void *place;
    check(kolo_reducer_gradient(reducer, BIAS, &place, NULL));
    float *bias = (float *)place;
    *bias = 0;
    for (int i = 0; i < SAMPLES; i++) *bias += error[i] / SAMPLES;
    check(kolo_reducer_ready(reducer, BIAS));
    /* Copy this gradient from other memory. */
    float weight = 0;
    for (int i = 0; i < SAMPLES; i++) weight += error[i] * x[i] / SAMPLES;
    check(kolo_reducer_put(reducer, WEIGHT, &weight, NULL));
    check(kolo_reducer_finish(reducer));

    /* Now the gradients are averages, the same on all ranks. */
    for (int i = 0; i < PARAMETERS; i++) {
      check(kolo_reducer_gradient(reducer, (size_t)i, &place, NULL));
      model[i] -= 0.5f * *(float *)place;
    }
  }
  printf("rank %d: y = %.2f x + %.2f\n", rank, model[WEIGHT], model[BIAS]);

  check(kolo_reducer_destroy(reducer));
  check(kolo_comm_destroy(comm));
  return 0;
}
