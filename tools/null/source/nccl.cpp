// NCCL: communicators, and collectives that are counted and logged, and send nothing.
//
// Each process sees its own calls only. They are logged with their sizes, in the order in which a
// communicator gets them, and compared between the ranks when the processes have ended.
#include "null.h"

#include <unistd.h>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace null {

namespace {

struct Communicator {
  std::string name;  // the same on all its ranks
  int ranks, rank, device;
  int apart = 1;  // by how much the numbers of its ranks differ
  int splits = 0;
};

// The ranks of the next communicator that is split off, and how far apart they are, told by
// inside/null_groups.py: NCCL would ask the other ranks which colors they have.
int ranks_of_next_split = 0, apart_in_next_split = 1;

struct Type {
  const char* name;
  int size;  // bytes
};
const Type TYPES[] = {{"int8", 1},    {"uint8", 1},   {"int32", 4},    {"uint32", 4},
                      {"int64", 8},   {"uint64", 8},  {"float16", 2},  {"float32", 4},
                      {"float64", 8}, {"bfloat16", 2}, {"float8", 1},  {"float8", 1}};
const Type UNKNOWN = {"unknown", 1};

const int INVALID_ARGUMENT = 4, INVALID_USAGE = 5;  // ncclResult_t

Communicator* new_communicator(const char* id, int ranks, int rank) {
  unsigned hash = 2166136261u;  // of the 128 bytes that rank 0 has passed on
  for (int i = 0; i < 128; i++) hash = (hash ^ (unsigned char)id[i]) * 16777619u;
  char name[16];
  snprintf(name, sizeof name, "%08x", hash);
  count("communicator", "of " + std::to_string(ranks) + " ranks");
  return new Communicator{name, ranks, rank, current_device()};
}

// Count and log a call. `where`: a rank that it names, such as " from 0".
int collective(const char* kind, size_t elements, int type_number, const std::string& where,
               const void* buffer, Communicator* communicator, cudaStream_t stream) {
  if (elements && !is_on_device(buffer)) return INVALID_ARGUMENT;
  if (communicator->device != current_device()) return INVALID_USAGE;
  auto& type = type_number < 12 ? TYPES[type_number] : UNKNOWN;
  std::string ranks = ", " + std::to_string(communicator->ranks) + " ranks";
  if (communicator->apart > 1) ranks += ", " + std::to_string(communicator->apart) + " apart";
  enqueue("collective", kind + ranks, stream, (double)elements * type.size);
  const std::string size = " of " + std::to_string(elements) + " " + type.name;
  log_collective(communicator->name + " of " + std::to_string(communicator->ranks) + " ranks",
                 kind + size + where);
  return 0;
}

}  // namespace

}  // namespace null

using namespace null;

API int ncclGetVersion(int* version) {
  *version = 22900;
  return 0;
}
API const char* ncclGetErrorString(int error) {
  return error == INVALID_ARGUMENT ? "invalid argument: the buffer is not on a GPU"
         : error == INVALID_USAGE
             ? "invalid usage: the communicator's GPU is not the current device"
             : "no error";
}
API const char* ncclGetLastError(Communicator*) { return ""; }
API int ncclCommGetAsyncError(Communicator*, int* error) {
  *error = 0;
  return 0;
}

// Communicators

struct Id {
  char bytes[128];
};
API int ncclGetUniqueId(Id* id) {
  static int number = 0;
  Lock lock;
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "null %d %d %ld", getpid(), number++, (long)time(nullptr));
  return 0;
}
API int ncclCommInitRankConfig(Communicator** made, int ranks, Id id, int rank, void*) {
  *made = new_communicator(id.bytes, ranks, rank);
  return 0;
}
API int ncclCommInitRank(Communicator** made, int ranks, Id id, int rank) {
  return ncclCommInitRankConfig(made, ranks, id, rank, nullptr);
}
API int ncclCommInitRankScalable(Communicator** made, int ranks, int rank, int, Id* ids, void*) {
  return ncclCommInitRankConfig(made, ranks, ids[0], rank, nullptr);
}
API int ncclCommInitAll(Communicator** made, int count, const int* devices) {
  Id id;
  ncclGetUniqueId(&id);
  for (int i = 0; i < count; i++) {
    made[i] = new_communicator(id.bytes, count, i);
    made[i]->device = devices ? devices[i] : i;
  }
  return 0;
}
API int ncclCommSplit(Communicator* parent, int color, int, Communicator** made, void*) {
  const int number = parent->splits++;
  *made = nullptr;
  if (color < 0) return 0;  // this rank is not in it
  const std::string name = parent->name + "/" + std::to_string(number) + "/";
  const int ranks = ranks_of_next_split;
  const int apart = apart_in_next_split;
  *made = new Communicator{name + std::to_string(color), ranks, 0, current_device(), apart};
  count("communicator", "of " + std::to_string(ranks) + " ranks, by split");
  return 0;
}
API void null_expect_split(int ranks, int apart) {
  ranks_of_next_split = ranks;
  apart_in_next_split = apart;
}
API int ncclCommCount(Communicator* communicator, int* ranks) {
  *ranks = communicator->ranks;
  return 0;
}
API int ncclCommUserRank(Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return 0;
}
API int ncclCommCuDevice(Communicator* communicator, int* device) {
  *device = communicator->device;
  return 0;
}

// Collectives. Bytes count this rank's own part.

API int ncclAllReduce(const void* from, void*, size_t n, int type, int, Communicator* c,
                      cudaStream_t s) {
  return collective("all-reduce", n, type, "", from, c, s);
}
API int ncclAllGather(const void* from, void*, size_t n, int type, Communicator* c,
                      cudaStream_t s) {
  return collective("all-gather", n, type, "", from, c, s);
}
API int ncclReduceScatter(const void*, void* to, size_t n, int type, int, Communicator* c,
                          cudaStream_t s) {
  return collective("reduce-scatter", n, type, "", to, c, s);
}
API int ncclBroadcast(const void*, void* to, size_t n, int type, int root, Communicator* c,
                      cudaStream_t s) {
  return collective("broadcast", n, type, " from " + std::to_string(root), to, c, s);
}
API int ncclBcast(void* buffer, size_t n, int type, int root, Communicator* c, cudaStream_t s) {
  return ncclBroadcast(buffer, buffer, n, type, root, c, s);
}
API int ncclReduce(const void* from, void*, size_t n, int type, int, int root, Communicator* c,
                   cudaStream_t s) {
  return collective("reduce", n, type, " to " + std::to_string(root), from, c, s);
}
API int ncclAlltoAll(const void* from, void*, size_t n, int type, Communicator* c,
                     cudaStream_t s) {
  return collective("all-to-all", n, type, "", from, c, s);
}
API int ncclSend(const void* from, size_t n, int type, int peer, Communicator* c,
                 cudaStream_t s) {
  return collective("send", n, type, " to " + std::to_string(peer), from, c, s);
}
API int ncclRecv(void* to, size_t n, int type, int peer, Communicator* c, cudaStream_t s) {
  return collective("receive", n, type, " from " + std::to_string(peer), to, c, s);
}
API int ncclMemAlloc(void** address, size_t size) { return cudaMalloc(address, size); }
API int ncclMemFree(void* address) { return cudaFree(address); }
