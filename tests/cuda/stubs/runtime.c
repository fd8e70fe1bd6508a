// The CUDA runtime of a card that does not exist. Memory is address space that counts against the card's size, streams and
// events are numbers, kernels are checked for what a launch may be and compute nothing, copies up to FAKE_COPY bytes are done.
#define _GNU_SOURCE
#include "card.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

// ---- cards ----------------------------------------------------------------------------------------------------------

typedef struct {
  const char *name;
  int major, minor, processors;
  size_t memory; // bytes that the driver reports
  int shared;    // bytes of shared memory that a block may ask for
  int cache;     // MiB of L2
} card;

static const card CARDS[] = {
    {"Tesla T4", 7, 5, 40, 15655829504, 65536, 4},
    {"NVIDIA GeForce RTX 3060", 8, 6, 28, 12622364672, 101376, 3},
    {"NVIDIA GeForce RTX 3090", 8, 6, 82, 25438126080, 101376, 6},
    {"NVIDIA GeForce RTX 4090", 8, 9, 128, 25347424256, 101376, 72},
    {"NVIDIA GeForce RTX 5090", 12, 0, 170, 33715617792, 101376, 96},
    {"NVIDIA A40", 8, 6, 84, 47608692736, 101376, 6},
    {"NVIDIA A100-SXM4-80GB", 8, 0, 108, 85041807360, 166912, 40},
    {"NVIDIA H100 80GB HBM3", 9, 0, 132, 84929216512, 232448, 50},
    {"NVIDIA B200", 10, 0, 148, 191503138816, 232448, 126},
};

long setting(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

static const card *the_card(void) {
  static const card *chosen;
  if (!chosen) {
    const char *name = getenv("FAKE_GPU");
    for (size_t i = 0; i < sizeof CARDS / sizeof *CARDS; i++)
      if (!chosen && strstr(CARDS[i].name, name ? name : "4090")) chosen = &CARDS[i];
    if (!chosen) {
      fprintf(stderr, "FAKE_GPU=%s is no pretended card (tests/cuda/stubs/runtime.c)\n", name);
      abort();
    }
  }
  return chosen;
}

static int cards(void) { return setting("FAKE_GPUS", 1); }

// ---- the log --------------------------------------------------------------------------------------------------------

void note(const char *format, ...) {
  static FILE *log;
  static int tried;
  if (!tried) {
    const char *path = getenv("FAKE_LOG");
    if (path && *path && (log = fopen(path, "ae"))) setvbuf(log, NULL, _IOLBF, 0);
    tried = 1;
  }
  if (!log) return;
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  fprintf(log, "%s %d %d %s\n", getenv("RANK") ? getenv("RANK") : "0", getpid(), gettid(), line);
}

// ---- memory ---------------------------------------------------------------------------------------------------------

typedef struct {
  uintptr_t start, end;
  enum owner owner;
  int device;
} range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used[MANY_CARDS], registered;
static int contexts[MANY_CARDS];
static range *ranges;
static int range_count, range_room;
static __thread int current;

static size_t of_others(void) { return (size_t)setting("FAKE_OTHER_MIB", 0) << 20; }

int take_memory(size_t bytes, int device) {
  pthread_mutex_lock(&lock);
  int fits = used[device] + of_others() + bytes <= the_card()->memory;
  if (fits) used[device] += bytes;
  pthread_mutex_unlock(&lock);
  return fits;
}

void give_memory(size_t bytes, int device) {
  pthread_mutex_lock(&lock);
  used[device] -= bytes;
  pthread_mutex_unlock(&lock);
}

void add_range(void *at, size_t bytes, enum owner owner, int device) {
  pthread_mutex_lock(&lock);
  if (range_count == range_room) {
    range_room = range_room ? 2 * range_room : 1024;
    ranges = realloc(ranges, range_room * sizeof *ranges);
  }
  ranges[range_count++] = (range){(uintptr_t)at, (uintptr_t)at + bytes, owner, device};
  pthread_mutex_unlock(&lock);
}

size_t remove_range(void *at, int *device) {
  size_t bytes = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < range_count; i++) {
    if (ranges[i].start != (uintptr_t)at) continue;
    bytes = ranges[i].end - ranges[i].start;
    if (device) *device = ranges[i].device;
    ranges[i] = ranges[--range_count];
    break;
  }
  pthread_mutex_unlock(&lock);
  return bytes;
}

enum owner owner_of(const void *at, int *device) {
  enum owner owner = UNKNOWN;
  pthread_mutex_lock(&lock);
  for (int i = range_count - 1; i >= 0; i--) {
    if ((uintptr_t)at < ranges[i].start || (uintptr_t)at >= ranges[i].end) continue;
    owner = ranges[i].owner;
    if (device) *device = ranges[i].device;
    break;
  }
  pthread_mutex_unlock(&lock);
  return owner;
}

int current_card(void) { return current; }
int has_context(int device) { return contexts[device]; }

// What really uses a card opens a context there.
static void open_context(void) {
  if (contexts[current]) return;
  contexts[current] = 1;
  used[current] += (size_t)setting("FAKE_CONTEXT_MIB", 450) << 20;
  note("context %d", current);
}

static void *address_space(size_t bytes) {
  return mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// ---- errors ---------------------------------------------------------------------------------------------------------

static __thread cudaError_t last;
static cudaError_t fail(cudaError_t error) { return last = error; }
// FAKE_INIT_ERROR: 35, the driver is too old; 100, no card is usable. FAKE_INIT_ERROR_RANK: on this process of a launch only.
static cudaError_t initial_error(void) {
  const char *only = getenv("FAKE_INIT_ERROR_RANK"), *rank = getenv("RANK");
  return only && (!rank || strcmp(only, rank)) ? 0 : setting("FAKE_INIT_ERROR", 0);
}

PUBLIC cudaError_t cudaPeekAtLastError(void) { return last; }
PUBLIC cudaError_t cudaGetLastError(void) {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
PUBLIC const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "no error";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
  case cudaErrorNoDevice: return "no CUDA-capable device is detected";
  default: return "an error of the pretended card";
  }
}
PUBLIC const char *cudaGetErrorName(cudaError_t error) {
  static __thread char name[40];
  snprintf(name, sizeof name, "cudaError%d", (int)error);
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error ? name : "cudaSuccess";
}

// ---- devices --------------------------------------------------------------------------------------------------------

PUBLIC cudaError_t cudaGetDeviceCount(int *count) {
  if (initial_error()) return fail(initial_error());
  *count = cards();
  return cudaSuccess;
}
PUBLIC cudaError_t cudaDriverGetVersion(int *version) { *version = setting("FAKE_DRIVER", 13000); return cudaSuccess; }
PUBLIC cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
PUBLIC cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
PUBLIC cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= cards()) return fail(cudaErrorInvalidDevice);
  current = device;
  open_context();
  return cudaSuccess;
}
PUBLIC cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  const card *c = the_card();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", c->name);
  p->totalGlobalMem = c->memory;
  p->major = c->major;
  p->minor = c->minor;
  p->multiProcessorCount = c->processors;
  p->l2CacheSize = c->cache << 20;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = c->shared;
  p->sharedMemPerMultiprocessor = c->shared + 1024;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = c->major >= 9 && c->major < 12 ? 2048 : c->major == 8 && !c->minor ? 2048 : 1536;
  p->maxBlocksPerMultiProcessor = 16;
  p->memoryBusWidth = 384;
  p->textureAlignment = 512;
  p->asyncEngineCount = 2;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->canMapHostMemory = p->hostRegisterSupported = 1;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
  case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
  case cudaDevAttrMaxBlockDimZ: *value = 64; break;
  case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
  case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
  case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerBlock; break;
  case cudaDevAttrWarpSize: *value = p.warpSize; break;
  case cudaDevAttrClockRate: *value = 2500000; break;
  case cudaDevAttrMemoryClockRate: *value = 10501000; break;
  case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
  case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
  case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
  case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
  case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
  case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
  case 128: case 132: *value = 0; break; // fabric handles and multicast objects, of the driver's numbers: there are none
  default: *value = 1;
  }
  return cudaSuccess;
}
PUBLIC cudaError_t cudaDeviceGetPCIBusId(char *id, int room, int device) {
  snprintf(id, room, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceSynchronize(void) {
  open_context();
  note("wait device");
  return cudaSuccess;
}

// ---- allocation -----------------------------------------------------------------------------------------------------

PUBLIC cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  open_context();
  *total = the_card()->memory;
  size_t taken = used[current] + of_others();
  *free_bytes = *total > taken ? *total - taken : 0;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaMalloc(void **at, size_t bytes) {
  open_context();
  size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
  if (!take_memory(whole, current)) return fail(cudaErrorMemoryAllocation);
  *at = address_space(whole);
  add_range(*at, whole, ON_CARD, current);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaFree(void *at) {
  int device = 0;
  if (!at) { // the usual way to open a context
    open_context();
    return cudaSuccess;
  }
  size_t bytes = remove_range(at, &device);
  if (bytes) {
    munmap(at, bytes);
    give_memory(bytes, device);
  }
  return cudaSuccess;
}
PUBLIC cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned flags) {
  open_context();
  note("pin %zu", bytes);
  *at = address_space(bytes);
  add_range(*at, bytes ? bytes : 1, PINNED, current);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaFreeHost(void *at) {
  size_t bytes = remove_range(at, NULL);
  if (bytes) munmap(at, bytes);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned flags) {
  size_t limit = (size_t)setting("FAKE_REGISTER_MIB", 1 << 30) << 20;
  open_context();
  note("register %zu", bytes);
  if (owner_of(at, NULL)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  if (registered + bytes > limit) return fail(cudaErrorMemoryAllocation);
  registered += bytes;
  add_range(at, bytes, REGISTERED, current);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaHostUnregister(void *at) {
  size_t bytes = remove_range(at, NULL);
  registered -= bytes;
  note("unregister %zu", bytes);
  return bytes ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
PUBLIC cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
  int device = -2;
  enum owner owner = owner_of(at, &device);
  memset(a, 0, sizeof *a);
  a->type = owner == ON_CARD ? cudaMemoryTypeDevice : owner ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = device;
  a->devicePointer = owner ? (void *)at : NULL;
  a->hostPointer = owner == ON_CARD ? NULL : (void *)at;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) {
  static void *memory;
  if (!memory) add_range(memory = address_space(1 << 20), 1 << 20, ON_CARD, 0);
  *at = memory;
  return cudaSuccess;
}

// ---- copies ---------------------------------------------------------------------------------------------------------

static size_t largest_copy(void) { return setting("FAKE_COPY", 1 << 20); }

static cudaError_t copy(void *to, const void *from, size_t bytes, const char *how) {
  open_context();
  enum owner target = owner_of(to, NULL), source = owner_of(from, NULL);
  const char *way = target == ON_CARD ? source == ON_CARD ? "on_card" : "to_card" : "to_host";
  enum owner host = target == ON_CARD ? source : target;
  note("copy %s %s %s %zu", how, way, host == UNKNOWN ? "pageable" : "pinned", bytes);
  if (bytes <= largest_copy()) memmove(to, from, bytes);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  return copy(to, from, bytes, "waits");
}
PUBLIC cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes, "queued");
}
PUBLIC cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, "queued");
}
PUBLIC cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                                     enum cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t i = 0; i < height && width * height <= largest_copy(); i++)
    memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaMemset(void *at, int value, size_t bytes) {
  open_context();
  if (bytes <= largest_copy()) memset(at, value, bytes);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
  return cudaMemset(at, value, bytes);
}

// ---- streams and events: everything is done at once -----------------------------------------------------------------

static cudaError_t new_stream(cudaStream_t *stream) {
  static uintptr_t next = 0x1000;
  open_context();
  *stream = (cudaStream_t)__atomic_add_fetch(&next, 16, __ATOMIC_SEQ_CST);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaStreamCreate(cudaStream_t *s) { return new_stream(s); }
PUBLIC cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return new_stream(s); }
PUBLIC cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { return new_stream(s); }
PUBLIC cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  open_context();
  note("wait stream");
  return cudaSuccess;
}
PUBLIC cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
  if (id) *id = 0;
  return cudaStreamIsCapturing(s, status);
}
PUBLIC cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
PUBLIC cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned flags) {
  call(s, cudaSuccess, data);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) { call(data); return cudaSuccess; }
PUBLIC cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { *mode = 0; return cudaSuccess; }

PUBLIC cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  open_context();
  *event = calloc(1, sizeof(struct timespec));
  return cudaSuccess;
}
PUBLIC cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
PUBLIC cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
PUBLIC cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) {
  open_context();
  clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned flags) { return cudaEventRecord(event, s); }
PUBLIC cudaError_t cudaEventSynchronize(cudaEvent_t event) { note("wait event"); return cudaSuccess; }
PUBLIC cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  const struct timespec *a = (struct timespec *)from, *b = (struct timespec *)to;
  *ms = (b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) / 1e6;
  if (*ms < 1) *ms = 1; // a rate is divided by it
  return cudaSuccess;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

typedef struct {
  const void *host;
  const char *name;
} function;
static function *functions;
static int function_count, function_room;

PUBLIC void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
PUBLIC void __cudaRegisterFatBinaryEnd(void **handle) {}
PUBLIC void __cudaUnregisterFatBinary(void **handle) {}
PUBLIC char __cudaInitModule(void **handle) { return 1; }
PUBLIC void __cudaRegisterVar(void **handle, char *var, char *address, const char *name, int ext, size_t size, int constant, int global) {}
PUBLIC void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b,
                                   void *c, void *d, int *e) {
  pthread_mutex_lock(&lock);
  if (function_count == function_room) {
    function_room = function_room ? 2 * function_room : 1 << 16;
    functions = realloc(functions, function_room * sizeof *functions);
  }
  functions[function_count++] = (function){host, name};
  pthread_mutex_unlock(&lock);
}
static const char *name_of(const void *host) {
  for (int i = 0; i < function_count; i++)
    if (functions[i].host == host) return functions[i].name;
  return "?";
}

static cudaError_t launch(const void *host, dim3 grid, dim3 block, size_t shared) {
  open_context();
  int grid_fits = grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535;
  if (grid_fits && block.x * block.y * block.z <= 1024 && shared <= (size_t)the_card()->shared) return cudaSuccess;
  note("refused launch %.200s grid %u %u %u block %u %u %u shared %zu", name_of(host), grid.x, grid.y, grid.z, block.x, block.y,
       block.z, shared);
  return fail(cudaErrorInvalidConfiguration);
}
PUBLIC cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return launch(f, grid, block, shared);
}
PUBLIC cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return launch(f, grid, block, shared);
}
PUBLIC cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **arguments) {
  return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes);
}
PUBLIC cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { *kernel = (cudaKernel_t)f; return cudaSuccess; }
PUBLIC cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return launch(kernel, grid, block, shared);
}

static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} pushed;
PUBLIC unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared = shared;
  pushed.stream = stream;
  return 0;
}
PUBLIC cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(void **)stream = pushed.stream;
  return cudaSuccess;
}

PUBLIC cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  const card *c = the_card();
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = c->major == 8 && c->minor == 9 ? 86 : 10 * c->major + c->minor; // torch has none for 8.9
  a->maxDynamicSharedSizeBytes = c->shared;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value <= the_card()->shared) return cudaSuccess;
  note("refused shared memory %d", value);
  return fail(cudaErrorInvalidValue);
}
PUBLIC cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int device) {
  return cudaFuncSetAttribute(kernel, attribute, value);
}
PUBLIC cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int block, size_t shared) {
  *blocks = 2;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int block, size_t shared,
                                                                          unsigned flags) {
  *blocks = 2;
  return cudaSuccess;
}

// ---- the driver's functions -----------------------------------------------------------------------------------------

static int does_nothing(void) { return 0; }

PUBLIC cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
  static void *driver;
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  char second[100];
  snprintf(second, sizeof second, "%s_v2", name);
  *found = driver ? dlsym(driver, name) : NULL;
  if (driver && !*found) *found = dlsym(driver, second);
  if (!*found) {
    note("missing %s", name);
    *found = (void *)does_nothing;
  }
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
