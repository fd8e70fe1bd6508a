// cuDNN of the pretended card: descriptors exist, every engine fits, workspaces have FAKE_WORKSPACE bytes.
#include "card.h"
#include <stdint.h>
#include <stdlib.h>

enum { INT64 = 3, DESCRIPTOR = 15, WORKSPACE_SIZE = 402 }; // of cudnnBackendAttributeType_t and cudnnBackendAttributeName_t

static int new_handle(void **handle) { *handle = calloc(1, 256); return 0; }

PUBLIC size_t cudnnGetVersion(void) { return 92000; }
PUBLIC size_t cudnnGetCudartVersion(void) { return 13000; }
PUBLIC int cudnnGetProperty(int which, int *value) { *value = which == 0 ? 9 : which == 1 ? 20 : 0; return 0; }
PUBLIC int cudnnCreate(void **handle) { return new_handle(handle); }
PUBLIC int cudnnGetStream(void *handle, void **stream) { *stream = NULL; return 0; }
PUBLIC const char *cudnnGetErrorString(int error) { return "an error of the pretended cuDNN"; }
PUBLIC void cudnnGetLastErrorString(char *text, size_t room) { if (room) *text = 0; }

PUBLIC int cudnnBackendCreateDescriptor(int type, void **descriptor) { return new_handle(descriptor); }
PUBLIC int cudnnBackendDestroyDescriptor(void *descriptor) { free(descriptor); return 0; }
PUBLIC int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *count, int64_t *values) {
  if (count) *count = type == INT64 || type == DESCRIPTOR;
  if (type == INT64 && values && wanted) *values = name == WORKSPACE_SIZE ? setting("FAKE_WORKSPACE", 0) : 0;
  return 0;
}

PUBLIC int cudnnCreateActivationDescriptor(void **d) { return new_handle(d); }
PUBLIC int cudnnCreateCTCLossDescriptor(void **d) { return new_handle(d); }
PUBLIC int cudnnCreateConvolutionDescriptor(void **d) { return new_handle(d); }
PUBLIC int cudnnCreateDropoutDescriptor(void **d) { return new_handle(d); }
PUBLIC int cudnnCreateFilterDescriptor(void **d) { return new_handle(d); }
PUBLIC int cudnnCreatePoolingDescriptor(void **d) { return new_handle(d); }
PUBLIC int cudnnCreateRNNDataDescriptor(void **d) { return new_handle(d); }
PUBLIC int cudnnCreateRNNDescriptor(void **d) { return new_handle(d); }
PUBLIC int cudnnCreateSpatialTransformerDescriptor(void **d) { return new_handle(d); }
PUBLIC int cudnnCreateTensorDescriptor(void **d) { return new_handle(d); }
