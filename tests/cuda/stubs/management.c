// NVML of the pretended card: how many cards there are; no links between them, no processes on them.
#include "card.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NOT_SUPPORTED 3

static int count(void) {
  const char *cards = getenv("FAKE_GPUS");
  return cards && *cards ? atoi(cards) : 1;
}
PUBLIC int nvmlInit(void) { return 0; }
PUBLIC int nvmlInit_v2(void) { return 0; }
PUBLIC int nvmlShutdown(void) { return 0; }
PUBLIC int nvmlDeviceGetCount_v2(unsigned *number) { *number = count(); return 0; }
PUBLIC int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)1; return 0; }
PUBLIC int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) { *device = (void *)(uintptr_t)(number + 1); return 0; }
PUBLIC int nvmlDeviceGetUUID(void *device, char *uuid, unsigned room) { strncpy(uuid, "GPU-0", room); return 0; }
PUBLIC int nvmlDeviceGetGpuFabricInfoV(void *device, unsigned char *info) { info[24] = 0; return 0; } // its state
PUBLIC int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return NOT_SUPPORTED; }
PUBLIC int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NOT_SUPPORTED; }
PUBLIC int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *number, void *infos) { *number = 0; return 0; }
PUBLIC int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return 0; }
PUBLIC int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
