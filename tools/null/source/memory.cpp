// The CUDA runtime: memory and copies.
//
// A device's memory is address space of the process. The system provides a page when it is first
// written, so that 80 GiB cost nothing until then. Small copies move their bytes.
#include "null.h"

#include <sys/mman.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

namespace null {

namespace {

const size_t LARGEST_MOVED = 1 << 20;  // bytes: what is larger is weights and batches
// Beyond it, CUDA waits for the stream's work before it copies pageable memory to the device.
const size_t LARGEST_STAGED = 64 << 10;

struct Block {
  size_t size;
  int device;  // -1: pinned memory of the host
};

std::map<char*, Block>& blocks() {
  static auto* only = new std::map<char*, Block>;
  return *only;
}

std::map<int, size_t>& used() {  // bytes per device
  static auto* only = new std::map<int, size_t>;
  return *only;
}

const Block* find(const void* address) {
  auto next = blocks().upper_bound((char*)address);
  if (next == blocks().begin()) return nullptr;
  auto& [start, block] = *--next;
  return (char*)address < start + block.size ? &block : nullptr;
}

bool is_moved(size_t size) { return size <= LARGEST_MOVED; }

// Zeros, as pages that the system provides when they are read: the copy of a large model takes no
// memory. Those of files and shared memory stay as they are.
void clear(char* start, size_t size) {
  const uintptr_t page = 4096, end = (uintptr_t)start + size;
  const uintptr_t first = ((uintptr_t)start + page - 1) / page * page, last = end / page * page;
  memset(start, 0, first - (uintptr_t)start);
  madvise((void*)first, last - first, MADV_DONTNEED);
  memset((void*)last, 0, end - last);
}

void move_to_host(void* to, const void* from, size_t size) {
  if (is_moved(size))
    memmove(to, from, size);
  else
    clear((char*)to, size);
  // No kernel has computed the bool that is read alone: as bool(tensor), it is true.
  if (size == 1 && !*(char*)to) *(char*)to = 1;
}

cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t stream) {
  const bool to_device = is_on_device(to), from_device = is_on_device(from);
  const bool is_within = to_device && from_device;
  const bool pinned = is_within || is_pinned(to_device ? from : to);
  std::string name = is_within     ? "within devices"
                     : to_device   ? "host to device"
                     : from_device ? "device to host"
                                   : "within the host";
  if (!is_within) name += pinned ? ", pinned" : ", pageable";
  if (!pinned)
    if (auto error = refuse_in_capture(stream_of(stream))) return error;
  if (from_device && !to_device)
    move_to_host(to, from, size);
  else if (is_moved(size) || !to_device)
    memmove(to, from, size);
  if (auto error = enqueue("copy", name, stream, size)) return error;
  const bool waits = !pinned && (from_device || size > LARGEST_STAGED);
  return waits ? cudaStreamSynchronize(stream) : cudaSuccess;
}

}  // namespace

bool is_on_device(const void* address) {
  Lock lock;
  auto* block = find(address);
  return block && block->device >= 0;
}

bool is_pinned(const void* address) {
  Lock lock;
  auto* block = find(address);
  return block && block->device < 0;
}

}  // namespace null

using namespace null;

API cudaError_t cudaMalloc(void** address, size_t size) {
  Lock lock;
  *address = nullptr;
  auto& bytes = used()[current_device()];
  if (bytes + size > memory_size()) return fail(cudaErrorMemoryAllocation);
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    count("memory", "no address space", size);
    return fail(cudaErrorMemoryAllocation);
  }
  blocks()[(char*)start] = {size, current_device()};
  bytes += size;
  count("memory", "allocated", size);
  *address = start;
  return cudaSuccess;
}

API cudaError_t cudaFree(void* address) {
  Lock lock;
  auto found = blocks().find((char*)address);
  if (found != blocks().end()) {
    count("memory", "freed", found->second.size);
    used()[found->second.device] -= found->second.size;
    munmap(address, found->second.size);
    blocks().erase(found);
  }
  return cudaSuccess;
}

API cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t) {
  return cudaMalloc(address, size);
}
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  Lock lock;
  *total = memory_size();
  *available = *total - used()[current_device()];
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  if (posix_memalign(address, 4096, size ? size : 1)) return fail(cudaErrorMemoryAllocation);
  Lock lock;
  blocks()[(char*)*address] = {size, -1};
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* address) {
  Lock lock;
  blocks().erase((char*)address);
  free(address);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  Lock lock;
  blocks()[(char*)address] = {size, -1};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* address) {
  Lock lock;
  blocks().erase((char*)address);
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Lock lock;
  memset(attributes, 0, sizeof *attributes);
  auto* block = find(address);
  if (!block) return cudaSuccess;  // cudaMemoryTypeUnregistered
  const bool is_pinned = block->device < 0;
  attributes->type = is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = is_pinned ? current_device() : block->device;
  attributes->devicePointer = (void*)address;
  if (is_pinned) attributes->hostPointer = (void*)address;
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                                cudaStream_t stream) {
  return copy(to, from, size, stream);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  if (auto error = refuse_in_capture(nullptr)) return error;
  if (auto error = copy(to, from, size, nullptr)) return error;
  return cudaStreamSynchronize(nullptr);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                    cudaStream_t stream) {
  return copy(to, from, size, stream);
}
API cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t width, size_t height,
                                  cudaMemcpyKind, cudaStream_t stream) {
  return enqueue("copy", "2-D", stream, (double)width * height);  // moves nothing
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = (void*)symbol;
  return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t stream) {
  if (is_moved(size)) memset(address, value, size);
  return enqueue("copy", "memset", stream, size);
}
API cudaError_t cudaMemset(void* address, int value, size_t size) {
  return cudaMemsetAsync(address, value, size, nullptr);
}
