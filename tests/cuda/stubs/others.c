// Functions of further libraries of which torch reads a result. Each library takes those that it needs.
#include "card.h"
#include <stdlib.h>

#ifdef LIBRARY_cupti
PUBLIC int cuptiActivityGetNextRecord(void) { return 12; } // no record is left
PUBLIC int cuptiGetResultString(int result, const char **text) { *text = "an error of the pretended profiler"; return 0; }
PUBLIC int cuptiGetVersion(unsigned *version) { *version = 26; return 0; }
#endif
#ifdef LIBRARY_cusolver
PUBLIC int cusolverDnCreate(void **handle) { *handle = calloc(1, 256); return 0; }
#endif
#ifdef LIBRARY_cusparse
PUBLIC int cusparseCreate(void **handle) { *handle = calloc(1, 256); return 0; }
#endif
#ifdef LIBRARY_nvrtc
PUBLIC const char *nvrtcGetErrorString(int result) { return "an error of the pretended compiler"; }
PUBLIC int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
#endif
