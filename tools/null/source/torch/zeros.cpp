// Memory that PyTorch's allocator hands out is zero, as no kernel writes to it: what is read from it
// does not depend on what was there before, and is the same on all ranks.
#include <c10/cuda/CUDACachingAllocator.h>

#include <sys/mman.h>
#include <cstdint>
#include <cstring>

namespace {

const uintptr_t PAGE = 4096;

void clear(uintptr_t start, uintptr_t end) {
  // Whole pages are given back to the system, which provides zeros: they may never be written.
  const uintptr_t first = (start + PAGE - 1) / PAGE * PAGE, last = end / PAGE * PAGE;
  if (first >= last) {
    memset((void*)start, 0, end - start);
    return;
  }
  memset((void*)start, 0, first - start);
  madvise((void*)first, last - first, MADV_DONTNEED);
  memset((void*)last, 0, end - last);
}

}  // namespace

extern "C" void null_clear_allocations() {
  using c10::cuda::CUDACachingAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry& entry) {
    if (entry.action_ == TraceEntry::ALLOC)
      clear((uintptr_t)entry.addr_, (uintptr_t)entry.addr_ + entry.size_);
  });
}
