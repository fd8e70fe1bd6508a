// cuBLASLt of the pretended card: the first algorithm fits.
#include "card.h"
#include <stdlib.h>
#include <string.h>

#define BYTES_OF_A_RESULT 88

static int new_handle(void **handle) { *handle = calloc(1, 256); return 0; }

PUBLIC size_t cublasLtGetVersion(void) { return 130000; }
PUBLIC int cublasLtMatmulDescCreate(void **handle) { return new_handle(handle); }
PUBLIC int cublasLtMatmulPreferenceCreate(void **handle) { return new_handle(handle); }
PUBLIC int cublasLtMatrixLayoutCreate(void **handle) { return new_handle(handle); }
PUBLIC int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int most,
                                          void *results, int *count) {
  memset(results, 0, BYTES_OF_A_RESULT);
  *count = 1;
  return 0;
}
