/* What nccl_device.h needs of CUDA's driver, so that clients compile without CUDA. */
#ifndef KOLO_CUDA_H
#define KOLO_CUDA_H
#include <cuda_runtime.h>
typedef unsigned long long CUdeviceptr;
typedef int CUdevice;
typedef int CUmemLocationType;
typedef int CUmemAllocationHandleType;
#endif
