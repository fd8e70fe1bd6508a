// cuBLAS of the pretended card: handles and modes. FAKE_CUBLAS_ERROR=3: as if no memory were left for a handle.
#include "card.h"
#include <stdlib.h>

PUBLIC int cublasCreate_v2(void **handle) { *handle = calloc(1, 256); return setting("FAKE_CUBLAS_ERROR", 0); }
PUBLIC int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
PUBLIC int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
