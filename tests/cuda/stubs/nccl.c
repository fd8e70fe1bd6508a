// NCCL of pretended cards. Groups really meet, through files in FAKE_NCCL_DIR, and take memory; operations are written to
// FAKE_LOG in the order in which each process issues them, and move nothing.
#define _GNU_SOURCE
#include "card.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SYSTEM_ERROR 3

typedef struct {
  char text[128];
} identity;

typedef struct {
  int rank, size, device, splits;
  long operations;
  size_t bytes;
  char name[64];
} group;

static const char *folder(void) {
  const char *path = getenv("FAKE_NCCL_DIR");
  if (!path) path = "/tmp/fake_nccl";
  mkdir(path, 0777);
  return path;
}

// Wait for all ranks of a group.
static int meet(const char *what, int rank, int size) {
  char own[PATH_MAX], other[PATH_MAX];
  snprintf(own, sizeof own, "%s/%s", folder(), what);
  mkdir(own, 0777);
  snprintf(other, sizeof other, "%s/%s/%d", folder(), what, rank);
  FILE *file = fopen(other, "w");
  if (file) fclose(file);
  for (long waited = 0; waited < 100 * setting("FAKE_NCCL_WAIT_S", 60); waited++) {
    int present = 0;
    for (int i = 0; i < size; i++) {
      snprintf(other, sizeof other, "%s/%s/%d", folder(), what, i);
      present += !access(other, F_OK);
    }
    if (present == size) return 0;
    usleep(10000);
  }
  note("hang %s rank %d of %d", what, rank, size);
  fprintf(stderr, "pretended NCCL: rank %d of %d waited in vain for the others of %s\n", rank, size, what);
  return SYSTEM_ERROR;
}

static int make(group **out, const char *name, int rank, int size) {
  group *made = calloc(1, sizeof *made);
  made->rank = rank;
  made->size = size;
  made->device = current_card();
  made->bytes = (size_t)(size > 1 ? setting("FAKE_NCCL_MIB", 300) : 4) << 20;
  snprintf(made->name, sizeof made->name, "%s", name);
  if (!take_memory(made->bytes, made->device)) made->bytes = 0;
  note("group %s rank %d of %d on %d", name, rank, size, made->device);
  *out = made;
  return meet(name, rank, size);
}

PUBLIC int ncclGetVersion(int *version) { *version = 22907; return 0; }
PUBLIC int ncclGetUniqueId(identity *id) {
  static int made;
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "g%d-%d-%ld", getpid(), made++, (long)time(NULL));
  return 0;
}
PUBLIC int ncclCommInitRankConfig(group **out, int size, identity id, int rank, void *config) { return make(out, id.text, rank, size); }
PUBLIC int ncclCommInitRank(group **out, int size, identity id, int rank) { return make(out, id.text, rank, size); }
PUBLIC int ncclCommInitRankScalable(group **out, int size, int rank, int count, identity *id, void *config) {
  return make(out, id->text, rank, size);
}

// All ranks of the parent take part; those of the same colour, in the order of their keys, are a new group.
PUBLIC int ncclCommSplit(group *parent, int colour, int key, group **out, void *config) {
  char what[100], name[120], path[PATH_MAX], draft[PATH_MAX];
  int rank = 0, size = 0;
  snprintf(what, sizeof what, "%s-split%d", parent->name, parent->splits++);
  note("split %s colour %d key %d", what, colour, key);
  snprintf(path, sizeof path, "%s/%s.%d", folder(), what, parent->rank);
  snprintf(draft, sizeof draft, "%s/%s.%d.new", folder(), what, parent->rank);
  FILE *file = fopen(draft, "w");
  fprintf(file, "%d %d", colour, key);
  fclose(file);
  rename(draft, path);
  if (meet(what, parent->rank, parent->size)) return SYSTEM_ERROR;
  for (int i = 0; i < parent->size; i++) {
    int its_colour, its_key;
    snprintf(path, sizeof path, "%s/%s.%d", folder(), what, i);
    file = fopen(path, "r");
    int read = fscanf(file, "%d %d", &its_colour, &its_key);
    fclose(file);
    if (read != 2 || its_colour != colour) continue;
    size++;
    rank += its_key < key || (its_key == key && i < parent->rank);
  }
  *out = NULL;
  snprintf(name, sizeof name, "%s-%d", what, colour);
  return colour < 0 ? 0 : make(out, name, rank, size);
}

static int end(group *g, const char *how) {
  note("%s %s", how, g->name);
  give_memory(g->bytes, g->device);
  g->bytes = 0;
  return 0;
}
PUBLIC int ncclCommDestroy(group *g) { return end(g, "destroy"); }
PUBLIC int ncclCommAbort(group *g) { return end(g, "abort"); }
PUBLIC int ncclCommCount(group *g, int *size) { *size = g->size; return 0; }
PUBLIC int ncclCommUserRank(group *g, int *rank) { *rank = g->rank; return 0; }
PUBLIC int ncclCommGetAsyncError(group *g, int *error) { *error = 0; return 0; }
PUBLIC const char *ncclGetErrorString(int error) { return error ? "an error of the pretended NCCL" : "no error"; }
PUBLIC const char *ncclGetLastError(group *g) { return ""; }

static int operation(group *g, const char *what, size_t count, int type) {
  note("op %s %ld %s %zu %d", g->name, g->operations++, what, count, type);
  return 0;
}
PUBLIC int ncclAllReduce(void *from, void *to, size_t n, int type, int reduction, group *g, void *stream) {
  return operation(g, "allreduce", n, type);
}
PUBLIC int ncclAllGather(void *from, void *to, size_t n, int type, group *g, void *stream) { return operation(g, "allgather", n, type); }
PUBLIC int ncclReduceScatter(void *from, void *to, size_t n, int type, int reduction, group *g, void *stream) {
  return operation(g, "reducescatter", n, type);
}
PUBLIC int ncclBroadcast(void *from, void *to, size_t n, int type, int root, group *g, void *stream) {
  return operation(g, "broadcast", n, type);
}
PUBLIC int ncclBcast(void *at, size_t n, int type, int root, group *g, void *stream) { return operation(g, "broadcast", n, type); }
PUBLIC int ncclReduce(void *from, void *to, size_t n, int type, int reduction, int root, group *g, void *stream) {
  return operation(g, "reduce", n, type);
}
PUBLIC int ncclAlltoAll(void *from, void *to, size_t n, int type, group *g, void *stream) { return operation(g, "alltoall", n, type); }

// Between two processes: the words differ on both sides.
static int with_peer(group *g, const char *what, int peer, size_t n, int type) {
  char words[40];
  snprintf(words, sizeof words, "%s:%d", what, peer);
  return operation(g, words, n, type);
}
PUBLIC int ncclSend(void *from, size_t n, int type, int peer, group *g, void *stream) { return with_peer(g, "send", peer, n, type); }
PUBLIC int ncclRecv(void *to, size_t n, int type, int peer, group *g, void *stream) { return with_peer(g, "recv", peer, n, type); }
