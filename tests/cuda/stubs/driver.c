// The CUDA driver of the pretended card: contexts, modules, launches, and the virtual memory that expandable segments use.
#define _GNU_SOURCE
#include "card.h"
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern int cudaGetDeviceCount(int *), cudaDeviceGetAttribute(int *, int, int);

PUBLIC CUresult cuInit(unsigned flags) { return 0; }
PUBLIC CUresult cuDriverGetVersion(int *version) { *version = setting("FAKE_DRIVER", 13000); return 0; }
PUBLIC CUresult cuGetErrorString(CUresult error, const char **text) { *text = "an error of the pretended card"; return 0; }
PUBLIC CUresult cuGetErrorName(CUresult error, const char **name) { *name = "PRETENDED"; return 0; }
PUBLIC CUresult cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
PUBLIC CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return 0; }
PUBLIC CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
PUBLIC CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { memset(uuid, device, sizeof *uuid); return 0; }

// ---- contexts -------------------------------------------------------------------------------------------------------

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(device + 1); }

PUBLIC CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = has_context(device);
  return 0;
}
PUBLIC CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = context_of(device); return 0; }
PUBLIC CUresult cuCtxGetCurrent(CUcontext *context) { *context = context_of(current_card()); return 0; }
PUBLIC CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
PUBLIC CUresult cuCtxPushCurrent_v2(CUcontext context) { return 0; }
PUBLIC CUresult cuCtxPopCurrent_v2(CUcontext *context) { return cuCtxGetCurrent(context); }
PUBLIC CUresult cuCtxGetDevice(CUdevice *device) { *device = current_card(); return 0; }
PUBLIC CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return 0; }
PUBLIC CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }

// ---- kernels --------------------------------------------------------------------------------------------------------

PUBLIC CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; return 0; }
PUBLIC CUresult cuModuleUnload(CUmodule module) { return 0; }
PUBLIC CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)1;
  return 0;
}
PUBLIC CUresult cuFuncGetName(const char **name, CUfunction function) { *name = "kernel"; return 0; }
PUBLIC CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return 0;
}
PUBLIC CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return 0; }
PUBLIC CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }
PUBLIC CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return 0;
}

static CUresult launch(unsigned x, unsigned y, unsigned z) {
  if (x && y && z && y <= 65535 && z <= 65535) return 0;
  note("refused launch of a compiled kernel grid %u %u %u", x, y, z);
  return CUDA_ERROR_INVALID_VALUE;
}
PUBLIC CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **parameters, void **extra) {
  return launch(c->gridDimX, c->gridDimY, c->gridDimZ);
}
PUBLIC CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra) {
  return launch(x, y, z);
}

// ---- pointers -------------------------------------------------------------------------------------------------------

PUBLIC CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr at) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    if (owner_of((void *)at, NULL) == UNKNOWN) return CUDA_ERROR_INVALID_VALUE;
    *(CUdeviceptr *)value = at;
  } else
    memset(value, 0, 4);
  return 0;
}
PUBLIC CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr at) {
  for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(values[i], attributes[i], at);
  return 0;
}
PUBLIC CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr at) {
  *base = at;
  *bytes = 0;
  return 0;
}

// ---- virtual memory -------------------------------------------------------------------------------------------------

typedef struct {
  size_t bytes;
  int device, host;
} piece;

static void *map(void *at, size_t bytes, int protection, int fixed) {
  return mmap(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (fixed ? MAP_FIXED : 0), -1, 0);
}
PUBLIC CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags flags) {
  *bytes = PAGE;
  return 0;
}
PUBLIC CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
  void *memory = map(NULL, bytes, PROT_NONE, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *at = (CUdeviceptr)memory;
  return 0;
}
PUBLIC CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) { munmap((void *)at, bytes); return 0; }
PUBLIC CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *p, unsigned long long flags) {
  int host = p->location.type != CU_MEM_LOCATION_TYPE_DEVICE;
  if (!host && !take_memory(bytes, p->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  piece *made = malloc(sizeof *made);
  *made = (piece){bytes, p->location.id, host};
  *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
  return 0;
}
PUBLIC CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  piece *made = (piece *)(uintptr_t)handle;
  if (!made->host) give_memory(made->bytes, made->device);
  free(made);
  return 0;
}
PUBLIC CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  piece *made = (piece *)(uintptr_t)handle;
  map((void *)at, bytes, PROT_READ | PROT_WRITE, 1);
  add_range((void *)at, bytes, made->host ? PINNED : ON_CARD, made->device);
  return 0;
}
PUBLIC CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += PAGE) remove_range((void *)(at + offset), NULL);
  map((void *)at, bytes, PROT_NONE, 1);
  return 0;
}
PUBLIC CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count) { return 0; }
PUBLIC CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t count, CUstream stream) { return 0; }

PUBLIC CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) { return 0; }
