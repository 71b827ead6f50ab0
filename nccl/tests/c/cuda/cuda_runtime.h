/* What nccl.h needs of CUDA's headers, so that clients compile without CUDA. */
#ifndef KOLO_CUDA_RUNTIME_H
#define KOLO_CUDA_RUNTIME_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#define CUDART_VERSION 12080
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
#endif
