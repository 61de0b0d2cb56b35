// What PyTorch's allocator hands out is zero, as no kernel writes to it: what is read from it does
// not depend on what was there before, and is the same on all ranks. For tools.fit, its allocations
// are recorded, too.
#include <c10/cuda/CUDACachingAllocator.h>

#include <sys/mman.h>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

using c10::cuda::CUDACachingAllocator::TraceEntry;

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

struct Event {  // as in inside/null_memory.py
  uint64_t address, size;
  int32_t device, tag;  // tag: what Python was doing; -1: freed
};
std::vector<Event> events;
std::mutex events_mutex;
int32_t current_tag = 0;
bool is_recording = false;

void record(const TraceEntry& entry, int32_t tag) {
  std::lock_guard<std::mutex> lock(events_mutex);
  events.push_back({(uint64_t)entry.addr_, entry.size_, entry.device_, tag});
}

}  // namespace

extern "C" void null_clear_allocations() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry& entry) {
    if (entry.action_ == TraceEntry::ALLOC) {
      clear((uintptr_t)entry.addr_, (uintptr_t)entry.addr_ + entry.size_);
      if (is_recording) record(entry, current_tag);
    } else if (entry.action_ == TraceEntry::FREE_REQUESTED && is_recording) {
      record(entry, -1);
    }
  });
}

extern "C" void null_record_allocations() { is_recording = true; }
extern "C" void null_tag_allocations(int tag) { current_tag = tag; }

// How many events there are so far, and where they are, until the next allocation.
extern "C" long null_allocations(const void** first) {
  std::lock_guard<std::mutex> lock(events_mutex);
  *first = events.data();
  return events.size();
}
